"""Eval mode for a while, of a model whose modules may do more than switch when they go there.

A module's own `train` or `eval` may merge weights (LoRA) or keep a product of them for later. On one device that
happens at every evaluation, with the weights of then; a captured evaluation runs no Python, and what was written
would stay for the next step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from efftra_fx.containers import take_apart
from efftra_fx.errors import CaptureError
from efftra_fx.held_buffers import same_bits
from efftra_fx.python_state import PythonState

_INSTEAD = (
    "do that in forward, or evaluate a copy of the model, as it is: "
    "plain = copy.deepcopy(model); plain.load_state_dict(program.state_dict()); plain.eval()"
)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put all modules into eval mode for a while, and each back into its own.

    Raises CaptureError where modules write weights when they go there, or keep tensors; all is put back.
    """
    modes = [(module, module.training) for module in model.modules()]
    own = [path for path, module in model.named_modules() if _switches_itself(module)]
    state = _State(model) if own else None
    try:
        model.eval()
        problem = state.problem() if state is not None else ""
        if problem:
            which = f"module '{own[0]}'" if own[0] else "the model"
            raise CaptureError(f"when {which} goes into eval mode, its own train() or eval() {problem}; {_INSTEAD}")
        yield
    finally:
        if state is not None:
            state.restore()
        for module, training in modes:
            module.training = training


def _switches_itself(module: nn.Module) -> bool:
    kind, held = type(module), vars(module)
    return kind.train is not nn.Module.train or kind.eval is not nn.Module.eval or "train" in held or "eval" in held


class _State:
    """What a model holds now: its tensors with their values, and what its modules keep in Python."""

    def __init__(self, model: nn.Module) -> None:
        self.python = PythonState(model)
        self.held = [(module, _tensors(module)) for module in model.modules()]
        self.tensors = [(name, t, t.data, t.detach().clone()) for name, t in _named(model).items()]

    def problem(self) -> str:
        """Say what has been written since that a captured evaluation could not have, or nothing."""
        for name, tensor, _, value in self.tensors:
            if _is_another(tensor, value):
                return f"writes '{name}', which would stay for the next step"
        for module, held in self.held:
            now = _tensors(module)
            for kind in now:
                if any(now[kind].get(name) is not held[kind].get(name) for name in (*now[kind], *held[kind])):
                    return "replaces parameters, buffers or modules, which would stay for the next step"
        keeping = [place for place, value in self.python.changed().items() if _holds_tensor(value)]
        if keeping:
            return f"keeps a tensor in '{keeping[0][1]}', which later evaluations would find as it is now"
        return ""

    def restore(self) -> None:
        """Put everything back."""
        for module, held in self.held:
            for kind, before in held.items():
                vars(module)[kind].clear()
                vars(module)[kind].update(before)
        for _, tensor, data, value in self.tensors:
            if tensor.data_ptr() != data.data_ptr():
                tensor.data = data
            if _is_another(data, value):
                data.copy_(value)
        self.python.restore()


def _tensors(module: nn.Module) -> dict[str, dict[str, Any]]:
    return {kind: dict(vars(module)[kind]) for kind in ("_parameters", "_buffers", "_modules")}


def _named(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _is_another(tensor: Tensor, value: Tensor) -> bool:
    return tensor.shape != value.shape or not same_bits(tensor, value)


def _holds_tensor(value: Any) -> bool:
    return any(isinstance(leaf, Tensor) for _, leaf in take_apart(value)[0])


__all__ = ["evaluating"]
