"""A loss function that runs as it is: one node, which sees the whole batch's output of the model once a step.

What a loss decides by values (a selection by a mask, the hardest examples, a matching) cannot be
captured, and need not be: the model's output is gathered, and the user's own Python computes the
loss from it, with autograd just around it. So nothing of the loss may be cut by the batch, whatever
a few rows would suggest; unless the user says how the losses of parts make that of the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from efftra_fx.containers import take_apart
from efftra_fx.errors import CaptureError
from efftra_fx.opaque import make_operator
from efftra_fx.stand_ins import call_with, places_of

LossFn = Callable[..., Any]


@dataclass(frozen=True)
class WholeLoss:
    """A loss function as one node; `reason` says why it could not be captured, `dtype` is that of its result.

    `divided`: the losses of parts are wanted, each from its own rows.
    """

    function: LossFn
    reason: str
    dtype: torch.dtype
    divided: bool = False

    def __call__(self, *given: Any) -> Tensor:
        """Return the loss of output and target, as a node while a graph is captured."""
        module = self.function if isinstance(self.function, nn.Module) else None
        state = {} if module is None else {n: t for n, t in (*module.named_parameters(), *module.named_buffers())}
        leaves, tree = take_apart(given)
        flat = [leaf for _, leaf in leaves]
        if any(isinstance(leaf, torch.SymInt) for leaf in flat):
            raise CaptureError(
                "the model's output has a size of its input among its values, which a loss cannot be given"
            )
        places = [i for i, leaf in enumerate(flat) if isinstance(leaf, Tensor)]
        names, function = list(state), self.function
        places_in = {} if module is None else places_of(module)

        def run(operands: Sequence[Tensor]) -> list[Tensor]:
            filled = list(flat)
            for place, operand in zip(places, operands[len(names) :], strict=True):
                filled[place] = operand
            arguments = tree.rebuild(filled)
            if module is not None:
                held = dict(zip(names, operands, strict=False))
                put = {place: held[name] for place, name in places_in.items()}
                return [call_with(module, put, arguments).reshape(())]
            return [function(*arguments).reshape(())]

        operands = [*state.values(), *(flat[i] for i in places)]
        wanted = [t.requires_grad for t in operands]
        operator = make_operator(
            "loss",
            run,
            lambda given: [given[0].new_empty((), dtype=self.dtype)],
            wanted=wanted,
            whole=not self.divided,
            rests=True,
        )
        result: Tensor = operator(operands)[0]
        return result


def dtype_of_loss(function: LossFn, call: Callable[[], Tensor]) -> torch.dtype:
    """Run a loss function on real values (`call` does) and return its result's dtype.

    Raises CaptureError where it does more than compute: its backward runs it again.
    """
    buffers = list(function.buffers()) if isinstance(function, nn.Module) else []
    before, state = [b.detach().clone() for b in buffers], torch.get_rng_state()
    loss = call()
    problem = None
    if not torch.equal(state, torch.get_rng_state()):
        problem = "draws random numbers"
    elif any(not torch.equal(a, b) for a, b in zip(before, buffers, strict=True)):
        problem = "writes its buffers"
    with torch.no_grad():
        for buffer, value in zip(buffers, before, strict=True):
            buffer.copy_(value)
    if problem is not None:
        raise CaptureError(
            f"the loss function {problem}, and its backward runs it again; "
            "move that into the model, or give loss_fn what it needs as a part of the target"
        )
    return loss.dtype


__all__ = ["WholeLoss", "dtype_of_loss"]
