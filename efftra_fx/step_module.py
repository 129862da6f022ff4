"""The training step as a module: what a tracer sees, what eager runs, and what a loss may be."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from efftra_fx.capture_guards import Answers, Asked, no_questions
from efftra_fx.capture_opaque import forward_replaced
from efftra_fx.containers import Tree, take_apart
from efftra_fx.errors import LossError
from efftra_fx.held_buffers import assignments_written_back
from efftra_fx.meta import CONSTANTS, OUTPUTS, ROLE
from efftra_fx.settings import Setting, stood_in
from efftra_fx.signature import Call

LossFn = Callable[..., Any]


@dataclass(frozen=True)
class OutputTree:
    """How a model's output is put together: the leaves that the graph computes, and those that are constants."""

    tree: Tree
    moving: tuple[bool, ...]
    constants: tuple[Any, ...]

    def rebuild(self, values: Sequence[Any]) -> Any:
        """Return the output with these values at the leaves that the graph computes."""
        source = iter(values)
        flat = [next(source) if m else constant for m, constant in zip(self.moving, self.constants, strict=True)]
        return self.tree.rebuild(flat)


class Step(nn.Module):
    def __init__(
        self, model: nn.Module, loss_fn: LossFn | None, call: Call, want: str, note_tree: Callable[[OutputTree], None]
    ) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn
        self.call_structure = call
        self.want = want
        self.note_tree = note_tree  # a tracer takes back what forward writes on modules, so it is told outside
        self.answers: Answers | None = None
        self.settings: tuple[Setting, ...] = ()  # whose tensors come after those of the call
        self.note_guards: Callable[[list[Asked]], None] = lambda guards: None
        self.note_first: Callable[[], None] = lambda: None  # that a tuple's first element is the loss
        self.call_loss: LossFn | None = None  # in place of the loss function itself

    def forward(self, tensors: list[Tensor]) -> Any:
        if self.answers is None:
            count = len(tensors) - sum(len(one.tensors) for one in self.settings)
            given = stood_in(self.settings, tensors[count:])
            with no_questions(), assignments_written_back(*self.owners), given:
                return self.result(tensors[:count])
        guards: list[Asked] = []
        with self.answers.replaying(guards), assignments_written_back(*self.owners):
            result = self.result(tensors)
        self.note_guards(guards)
        return (*(result if isinstance(result, tuple) else (result,)), *(one.value for one in guards))

    @property
    def owners(self) -> tuple[nn.Module, ...]:
        """What holds buffers: the model, and the loss function where it is a module."""
        return (self.model, self.loss_fn) if isinstance(self.loss_fn, nn.Module) else (self.model,)

    def result(self, tensors: Sequence[Tensor]) -> Any:
        """Return the loss, or the leaves of the output."""
        args, kwargs, target = self.call_structure.rebuild(tensors)
        output = self.model(*args, **kwargs)
        if self.want == "loss":
            if self.loss_fn is None and _begins_with_loss(output):
                self.note_first()
            return loss_of(output, self.call_loss or self.loss_fn, target, self.call_structure.has_target)
        leaves, tree = take_apart(output)
        flat = [leaf for _, leaf in leaves]
        moving = tuple(isinstance(leaf, (Tensor, torch.SymInt)) for leaf in flat)
        constants = tuple(None if m else leaf for leaf, m in zip(flat, moving, strict=True))
        self.note_tree(OutputTree(tree, moving, constants))
        return tuple(leaf for leaf, m in zip(flat, moving, strict=True) if m)


class Replay(Step):
    """The step as its graph says, on the model's own tensors."""

    def __init__(self, step: Step, gm: fx.GraphModule) -> None:
        super().__init__(step.model, step.loss_fn, step.call_structure, step.want, step.note_tree)
        self.call_loss = step.call_loss
        self.roles = [ROLE[n] for n in gm.graph.nodes if n.op == "placeholder"]
        self.outputs = OUTPUTS[gm]
        self.held = dict(CONSTANTS[gm])
        self.run = fx.Interpreter(gm).run

    def forward(self, tensors: list[Tensor]) -> Any:
        source = iter(tensors)
        own = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        if isinstance(self.loss_fn, nn.Module):
            for name, tensor in (*self.loss_fn.named_parameters(), *self.loss_fn.named_buffers()):
                own[f"loss_fn.{name}"] = tensor
        operands = []
        for role in self.roles:
            held = self.held if role.kind == "constant" else own
            operands.append(next(source) if role.kind == "input" else held[role.name])
        results = self.run(*operands)
        for name, value in zip(self.outputs.buffers, results[self.outputs.loss :], strict=True):
            own[name].copy_(value)
        return results[0] if self.want == "loss" else tuple(results[: self.outputs.loss])


def loss_of(output: Any, loss_fn: LossFn | None, target: Any, has_target: bool) -> Tensor:
    """Return the scalar loss of a model output, in the ways in which a user may give it.

    Raises LossError where there is none or it is not a scalar tensor.
    """
    if loss_fn is not None:
        name = getattr(loss_fn, "__name__", type(loss_fn).__name__).replace("<lambda>", "loss_fn")
        if not has_target and _needs_target(loss_fn):
            raise LossError(
                f"{name} takes a target, but none was given; give example_target= to compile and target= to each step"
            )
        loss = loss_fn(output, target) if has_target else loss_fn(output)
    else:
        loss, name = _own_loss(output), "the model"
    if not isinstance(loss, Tensor):
        raise LossError(f"{name} returned {type(loss).__name__}, expected a scalar tensor as the loss")
    if loss.numel() != 1:
        raise LossError(
            f"{name} returned a loss of shape {_sizes(loss)}, expected a scalar; reduce it, for instance by .mean()"
        )
    if not loss.is_floating_point():
        kind = str(loss.dtype).removeprefix("torch.")
        raise LossError(f"{name} returned a loss of dtype {kind}, expected a real floating-point number")
    return loss.reshape(())


@contextmanager
def loss_alone(model: nn.Module, note_first: Callable[[], None]) -> Iterator[None]:
    """Let a model that gives its own loss return nothing else: what else it returns may change from call to call."""
    forward = model.forward

    def loss(*args: Any, **kwargs: Any) -> Tensor:
        output = forward(*args, **kwargs)
        if _begins_with_loss(output):
            note_first()
        return loss_of(output, None, None, False)

    with forward_replaced(model, loss):
        yield


def _needs_target(loss_fn: LossFn) -> bool:
    """Say whether a loss function has a second argument without a default."""
    try:
        parameters = inspect.signature(loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn).parameters
    except (TypeError, ValueError):  # a function written in C may tell nothing
        return False
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [p for p in parameters.values() if p.kind in kinds and p.default is inspect.Parameter.empty]
    return len(needed) > 1


def _sizes(tensor: Tensor) -> list[int]:
    """Return a tensor's sizes as those of the example, also while sizes are symbols."""
    return [size if isinstance(size, int) else int(size.node.hint) for size in tensor.shape]


def _own_loss(output: Any) -> Any:
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping) and output.get("loss") is not None:
        return output["loss"]
    loss = getattr(output, "loss", None)
    if loss is not None:
        return loss
    if _begins_with_loss(output):
        return output[0]
    first = f" (it begins with shape {_sizes(output[0])})" if _begins_with_tensor(output) else ""
    raise LossError(
        f"the model returned {type(output).__name__} without a loss{first}; "
        "give loss_fn=, or the labels with which the model computes its own loss"
    )


def _begins_with_tensor(output: Any) -> bool:
    return isinstance(output, tuple) and bool(output) and isinstance(output[0], Tensor)


def _begins_with_loss(output: Any) -> bool:
    """Say whether a model returns a tuple of its loss, a scalar, and more."""
    return _begins_with_tensor(output) and output[0].ndim == 0 and output[0].is_floating_point()
