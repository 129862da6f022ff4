"""One rank's part of operators that need more than cut operands: offsets, whole counts, other ranks' values.

Each is an ordinary function of tensors, made of ATen operators and collectives, so that
differentiation records what it does. `start` and `stop` are the rank's range of the cut dimension.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from efftra_fx.collectives import Ranges, reduce, take, tensor_gather

aten = torch.ops.aten


def _own_index(indices: Tensor, allowed: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Return which indices lie in [start, stop), and all of them counted from there: those of other ranks are 0.

    An index that is not `allowed` is no rank's, and past the end of each, so that looking it up raises.
    """
    inside = (indices >= start) & (indices < stop)
    return inside, torch.where(inside, indices - start, torch.where(allowed, 0, stop - start))


def embedding_part(weight: Tensor, indices: Tensor, padding_idx: int, start: int, stop: int, size: int) -> Tensor:
    """Look up the rows [start, stop) of a table of `size` that `weight` has; others give zeros (partial sums)."""
    inside, local = _own_index(indices, (indices >= 0) & (indices < size), start, stop)
    padding = padding_idx - start if start <= padding_idx < stop else -1
    found = aten.embedding.default(weight, local, -1)
    wanted = inside & (local != padding) if padding >= 0 else inside
    # A padding row's value counts, its gradient does not.
    result = torch.where(wanted.unsqueeze(-1), found, 0.0)
    if padding >= 0:
        result = torch.where((inside & ~wanted).unsqueeze(-1), found.detach(), result)
    return result


def cross_entropy_part(
    logits: Tensor, target: Tensor, reduction: int, ignore_index: int, start: int, stop: int, width: int, size: int
) -> Tensor:
    """Return the cross-entropy of (rows, `size` classes) logits of which this rank has classes [start, stop); whole.

    One number a row and rank is gathered and two are summed: the logits are never put together.
    """
    largest = aten.amax.default(logits.detach(), [1])
    everyone = tensor_gather(largest, [len(largest)] * width).view(width, -1)
    shift = aten.amax.default(everyone, [0])
    moved = logits - shift.unsqueeze(1)
    counts = target != ignore_index
    inside, local = _own_index(target, ((target >= 0) & (target < size)) | ~counts, start, stop)
    picked = torch.where(inside, moved.gather(1, local.unsqueeze(1)).squeeze(1), 0.0)  # a class may be at -inf
    total, own = reduce(torch.stack([moved.exp().sum(1), picked])).unbind(0)
    counted = counts.to(moved.dtype)
    rows = torch.where(counts, total.log() - own, 0.0)
    if reduction == 0:
        return rows
    return rows.sum() if reduction == 2 else rows.sum() / counted.sum()


def dropout_part(x: Tensor, p: float, dim: int, ranges: Ranges, size: int) -> Tensor:
    """Drop what the whole value's mask drops."""
    return x * take(aten.dropout.default(_whole_ones(x, dim, ranges, size), p, True), dim, ranges, size)


def native_dropout_part(x: Tensor, p: float, dim: int, ranges: Ranges, size: int) -> tuple[Tensor, Tensor]:
    """Do as `dropout_part`, and return the mask too."""
    scale, mask = aten.native_dropout.default(_whole_ones(x, dim, ranges, size), p, True)
    return x * take(scale, dim, ranges, size), take(mask, dim, ranges, size)


def _whole_ones(x: Tensor, dim: int, ranges: Ranges, size: int) -> Tensor:
    periods = int(x.shape[dim]) // sum(b - a for a, b in ranges)
    return x.new_ones((*x.shape[:dim], size * periods, *x.shape[dim + 1 :]))


def attention_part(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    p: float,
    causal: bool,
    scale: float | None,
    grouped: bool,
    dim: int,
    ranges: Ranges,
    size: int,
) -> Tensor:
    """Return scaled dot-product attention with dropout of which a leading dimension is cut.

    The weights are dropped that the whole value's mask drops, drawn as on one device without fused kernels.
    """
    if grouped:
        times = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(times, -3), value.repeat_interleave(times, -3)
    root = (query.shape[-1] ** -0.5 if scale is None else scale) ** 0.5
    scores = (query * root) @ (key * root).transpose(-2, -1)
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None and mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=scores.dtype).masked_fill(~mask, float("-inf"))
    if mask is not None:
        scores = scores + mask
    weights = aten._safe_softmax.default(scores, -1) if mask is not None else scores.softmax(-1)
    result: Tensor = dropout_part(weights, p, dim, ranges, size) @ value
    return result


def mean_part(x: Tensor, dims: Sequence[int], keepdim: bool, fraction: float) -> Tensor:
    """Return this rank's part of a mean of which it has a fraction of the elements (partial sums)."""
    result: Tensor = aten.mean.dim(x, list(dims), keepdim) if dims else aten.mean.default(x)
    return result * fraction


# What draws random numbers, and must draw them even where nobody needs them: those behind would be others.
DRAWING_PARTS = frozenset({attention_part, dropout_part, native_dropout_part})

__all__ = [
    "DRAWING_PARTS",
    "attention_part",
    "cross_entropy_part",
    "dropout_part",
    "embedding_part",
    "mean_part",
    "native_dropout_part",
]
