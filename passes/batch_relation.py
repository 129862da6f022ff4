"""How a value of the whole batch relates to the values of its parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from efftra_fx.meta import Split

_TOLERANCE = 1e-9


def relation(whole: Any, parts: Sequence[Any], rows: int, sizes: Sequence[int], reading: bool) -> Split:
    """Return how a value for the whole batch relates to its parts' values; `reading` says that it reads rows."""
    if not isinstance(whole, Tensor):
        same = not isinstance(whole, (int, float, bool)) or all(whole == p for p in parts)
        return Split("whole" if same else "mixed")
    differing = [d for d in range(whole.ndim) if any(p.shape[d] != whole.shape[d] for p in parts)]
    if len(differing) > 1:
        return Split("mixed")
    if differing:
        dim = differing[0]
        per_row, rest = divmod(whole.shape[dim], rows)
        fits = rest == 0 and all(p.shape[dim] == per_row * size for p, size in zip(parts, sizes, strict=True))
        if fits and close(torch.cat(list(parts), dim), whole):
            return Split("rows", dim, per_row)
        return Split("mixed")
    if not reading and all(close(p, whole) for p in parts):
        return Split("whole")
    if whole.dtype is not torch.bool and close(sum(parts[1:], parts[0]), whole):
        return Split("sum")
    return Split("mixed")


def _same_memory(a: Tensor, b: Tensor) -> bool:
    """Say whether two tensors of one shape are the same values in memory, as views of one parameter are."""
    return a.data_ptr() == b.data_ptr() and a.stride() == b.stride() and a.dtype == b.dtype


def close(a: Tensor, b: Tensor, tolerance: float = _TOLERANCE) -> bool:
    """Say whether two tensors are equal to rounding of the largest; what is no number must stand in the same places."""
    if a.shape != b.shape:
        return False
    if not (a.is_floating_point() or a.is_complex()):
        return bool(torch.equal(a, b))
    if a.numel() == 0 or _same_memory(a, b):
        return True
    difference = (a - b).abs().max()
    if bool(torch.isfinite(difference)):
        return bool(difference <= tolerance * b.abs().max().clamp(min=1e-12))
    finite = torch.isfinite(b)
    if not torch.equal(finite, torch.isfinite(a)) or not torch.equal(a[~finite].isnan(), b[~finite].isnan()):
        return False
    if not bool(finite.any()):
        return True
    scale = b[finite].abs().max()
    return bool((a[finite] - b[finite]).abs().max() <= tolerance * scale.clamp(min=1e-12))


def one_number(tensor: Tensor) -> bool:
    """Say whether all elements of a tensor are the same number."""
    return tensor.numel() < 2 or bool((tensor == tensor.flatten()[0]).all())
