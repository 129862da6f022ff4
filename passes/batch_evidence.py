"""Does it mean anything that a node follows the rows with these values?

Only where what it is made of is another for parts than for the whole, and where it feels that: a
scale that has been one so far, or a count that has stayed below a limit, would be another in a batch to come.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from efftra_fx.errors import CaptureError
from efftra_fx.meta import BATCH, Split

from .batch_relation import close, one_number

Compute = Callable[[fx.Node, Mapping[fx.Node, Any]], Any]
_FAILS = (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError, CaptureError)


def differs(whole: Tensor, others: Sequence[Tensor], follows: set[Split]) -> bool:
    """Say whether a value of the whole is seen to be another one than those of parts, which it `follows` like this."""
    numbers = [whole, *others]
    if all(map(one_number, numbers)):  # the same, however many times
        numbers = [t.flatten()[:1] for t in numbers if t.numel()]
    alike = all(close(numbers[0], other) for other in numbers[1:])
    return not alike and {split.kind for split in follows} != {"rows"}


def feels(compute: Compute, node: fx.Node, operand: fx.Node, whole: Mapping[fx.Node, Any]) -> bool:
    """Say whether a node's value is another one where an operand's is a little; what follows the rows is made up."""
    made_up = {
        n: shaken(whole[n]) for n in read_by(node) if BATCH[n].kind == "rows" and isinstance(whole.get(n), Tensor)
    }
    for own in (made_up, {}):
        values = {**whole, **own}
        try:
            before = _value(compute, node, values)
            after = _value(compute, node, {**values, operand: shaken(whole[operand])})
        except _FAILS:
            continue
        return before.shape != after.shape or not close(before, after)
    return True  # an order that is none, say


def read_by(node: fx.Node) -> list[fx.Node]:
    """Return what a node reads; for one of several results, what these are made of."""
    made = node.args[0] if node.target is operator.getitem else None
    return [*node.all_input_nodes, *(made.all_input_nodes if isinstance(made, fx.Node) else ())]


def shaken(tensor: Tensor) -> Tensor:
    """Return a tensor with other values of the same kind: moved by a little, drawn, or in another order."""
    if tensor.numel() == 0:
        return tensor
    generator = torch.Generator(device=tensor.device).manual_seed(0)
    noise = torch.rand(tensor.shape, generator=generator, device=tensor.device, dtype=torch.float64)
    if tensor.is_floating_point() or tensor.is_complex():
        finite = tensor.abs()[torch.isfinite(tensor)]
        scale = float(finite.max()) if finite.numel() and float(finite.max()) else 1.0
        return tensor + (0.02 * scale * (noise + 0.25)).to(tensor.dtype)
    if tensor.dtype is torch.bool:
        return ~tensor if tensor.numel() == 1 else noise > 0.5
    if one_number(tensor):
        return tensor + (noise > 0.5).to(tensor.dtype)
    return tensor.flatten()[noise.flatten().argsort()].view(tensor.shape)


def _value(compute: Compute, node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    if node.target is not operator.getitem:
        return compute(node, values)
    return compute(node.args[0], values)[node.args[1]]  # type: ignore[arg-type]


__all__ = ["differs", "feels", "read_by", "shaken"]
