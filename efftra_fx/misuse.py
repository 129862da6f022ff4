"""What a compiled model is not: calls and attributes of a module that it has not, each with what to do instead."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from efftra_fx.errors import InputError

_INSTEAD = {
    "forward": "step(...) computes loss and gradients, evaluate(...) outputs",
    "train": "model.train() holds from the next step on",
    "eval": "evaluate(...) is in eval mode, whatever the model is; for steps, model.eval() holds from the next one on",
    "zero_grad": "use optimizer.zero_grad()",
    "backward": "step(...) has computed the gradients",
    "explain": "use plan.explain(), or plan.explain(as_dict=True) for data",
    "to": "the cluster says where each rank computes",
}


class NotAModule:
    """Says what to do instead where it is taken for a module."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Raise InputError: a step and an evaluation are different calls."""
        raise InputError("a compiled model is not called: step(...) computes loss and gradients, evaluate(...) outputs")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise InputError(
            "a compiled model belongs to its running ranks and can be neither copied nor pickled; save state_dict(), "
            "and the plan by plan.save(), and compile again with plan="
        )

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            hint = _INSTEAD.get(name)
            if hint is None and hasattr(nn.Module, name):
                hint = f"the model's own is model.{name}"
            raise AttributeError(f"a compiled model has no '{name}'" + (f": {hint}" if hint is not None else ""))
