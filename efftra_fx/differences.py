"""How results, gradients and outputs of a captured graph differ from the eager model's, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from efftra_fx.opaque import nobodys

_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 1e-1}
_LOOK = "look for a custom autograd.Function, a hook or Python state that changes from call to call"


@dataclass(frozen=True)
class Difference:
    """What differs, in words: one of the graph's results by number, a parameter's gradient, or a buffer it lacks."""

    text: str
    result: int | None = None
    gradient: str | None = None
    buffer: str | None = None
    remedy: str = _LOOK
    absent: bool = False  # a gradient is there on one side alone


def apart(what: str, expected: Tensor, found: Tensor, **place: Any) -> Difference | None:
    """Say how two tensors differ by more than rounding; None where they do not."""
    if expected.shape == found.shape:
        a, b = expected.detach(), found.detach()
        if a.numel() and a.is_floating_point() and a.dtype == b.dtype:
            gap, reach = float((a - b).abs().max()), float(a.abs().max())
            if gap <= _TOLERANCE.get(expected.dtype, 1e-3) * max(reach, 1e-6):
                return None
        if a.is_complex() or b.is_complex():
            a, b = (torch.view_as_real(t.to(torch.complex128).resolve_conj()) for t in (a, b))
        a, b = a.to(torch.float64), b.to(torch.float64)
        same = torch.equal(a.isnan(), b.isnan())
        a, b = a.nan_to_num(), b.nan_to_num()
        worst = float((a - b).abs().max()) if a.numel() else 0.0
        scale = max(float(a.abs().max()) if a.numel() else 0.0, 1e-6)
        if same and worst <= _TOLERANCE.get(expected.dtype, 1e-3) * scale:
            return None
        detail = f"they differ by {worst:.3g} where values reach {scale:.3g}"
    else:
        detail = f"shape {list(expected.shape)} in eager, {list(found.shape)} in the graph"
    return Difference(f"{what} of the captured graph is not the eager model's: {detail}", **place)


def gradients_apart(expected: Mapping[str, Tensor | None], found: Mapping[str, Tensor | None]) -> Difference | None:
    for name, a in expected.items():
        b = found[name]
        if a is not None and b is not None:
            difference = apart(f"the gradient of '{name}'", a, b, gradient=name)
            if difference is not None:
                return difference
        elif (a is None) != (b is None or nobodys(b)):
            has, lacks = ("eager", "the captured graph") if b is None else ("the captured graph", "eager")
            return Difference(
                f"the gradient of '{name}' exists in {has} and not in {lacks}: the graph is not the model",
                gradient=name,
                remedy="look for a custom autograd.Function, a hook or a detach on the way to it",
                absent=True,
            )
    return None


def equal(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.nan_to_num(), b.nan_to_num())


def equal_all(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return len(a) == len(b) and all(x.shape == y.shape and equal(x, y) for x, y in zip(a, b, strict=True))


def equal_each(a: Mapping[str, Tensor | None], b: Mapping[str, Tensor | None]) -> bool:
    pairs = [(one, b[name]) for name, one in a.items()]
    return all(one is other or (one is not None and other is not None and equal(one, other)) for one, other in pairs)


def dense(gradient: Tensor) -> Tensor:
    """Return a gradient as a dense tensor: an embedding may give a sparse one."""
    return gradient if gradient.layout is torch.strided else gradient.to_dense()


__all__ = ["Difference", "apart", "dense", "equal_all", "equal_each", "equal", "gradients_apart"]
