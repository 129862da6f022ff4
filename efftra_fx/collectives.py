"""Graph functions that move values between the ranks of a tensor group, each with its backward.

All of them are made of one operator, `tensor_sum`: the sum over the group. It is what the backward
graph, the generated code and the verifier see; a run meets the other ranks there and nowhere else.

    function          forward                 backward
    copy              itself                  sum
    reduce            sum                     itself
    first             rank 0's, else zeros    itself
    keep              itself                  rank 0's, else zeros
    share             own share               all shares together
    part              own share               own share, zeros around it
    gather            all shares together     own share
    gather_copy       all shares together     own share of the sum
    reduce_share      own share of the sum    all shares together

A share is given as the ranges of indices along a dimension, `size` is the whole's number of
indices (or of one period of it, see `Cut`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from efftra_fx.errors import EmitError

Ranges = Sequence[Sequence[int]]

_LIBRARY = torch.library.Library("efftra_tensor", "DEF")
_LIBRARY.define("sum(Tensor x) -> Tensor")


def _alone(x: Tensor) -> Tensor:
    raise EmitError("a sum over a tensor group runs only inside a stage's code, where other ranks can be met")


def _like(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


_LIBRARY.impl("sum", _alone, "CompositeExplicitAutograd")
torch.library.register_fake("efftra_tensor::sum", _like, lib=_LIBRARY)

TENSOR_SUM = torch.ops.efftra_tensor.sum.default


def tensor_sum(x: Tensor) -> Tensor:
    """Return the sum over the tensor group, contiguous and the same bits on every rank; no gradient."""
    return TENSOR_SUM(x)  # type: ignore[no-any-return]


def take(x: Tensor, dim: int, ranges: Ranges, size: int) -> Tensor:
    """Return the indices in `ranges` along `dim`, in each period of `size`; a view where that can be."""
    if x.shape[dim] != size:
        return take(x.unflatten(dim, (-1, size)), dim + 1, ranges, size).flatten(dim, dim + 1)
    if len(ranges) == 1:
        return x.narrow(dim, ranges[0][0], ranges[0][1] - ranges[0][0])
    return torch.cat([x.narrow(dim, a, b - a) for a, b in ranges], dim)


def spread(x: Tensor, dim: int, ranges: Ranges, size: int) -> Tensor:
    """Return zeros with `x` at the indices in `ranges`: the reverse of `take`."""
    length = sum(b - a for a, b in ranges)
    if x.shape[dim] != length:
        return spread(x.unflatten(dim, (-1, length)), dim + 1, ranges, size).flatten(dim, dim + 1)
    pieces, at, reached = [], 0, 0
    for a, b in [*ranges, (size, size)]:
        if a > reached:
            pieces.append(x.new_zeros((*x.shape[:dim], a - reached, *x.shape[dim + 1 :])))
        if b > a:
            pieces.append(x.narrow(dim, at, b - a))
        at, reached = at + b - a, b
    return torch.cat(pieces, dim)


class _Copy(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return tensor_sum(grad)


class _Reduce(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return tensor_sum(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad


class _First(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rank: int) -> Tensor:
        return x.view_as(x) if rank == 0 else torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


class _Keep(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rank: int) -> Tensor:
        ctx.rank = rank
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad if ctx.rank == 0 else torch.zeros_like(grad), None


class _Share(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, ranges: Ranges, size: int) -> Tensor:
        ctx.where = dim, ranges, size
        return take(x, dim, ranges, size)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return tensor_sum(spread(grad, *ctx.where)), None, None, None


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, ranges: Ranges, size: int) -> Tensor:
        ctx.where = dim, ranges, size
        return tensor_sum(spread(x, dim, ranges, size))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return take(grad, *ctx.where), None, None, None


class _GatherCopy(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, ranges: Ranges, size: int) -> Tensor:
        ctx.where = dim, ranges, size
        return tensor_sum(spread(x, dim, ranges, size))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return take(tensor_sum(grad), *ctx.where), None, None, None


class _ReduceShare(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, ranges: Ranges, size: int) -> Tensor:
        ctx.where = dim, ranges, size
        return take(tensor_sum(x), dim, ranges, size)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return tensor_sum(spread(grad, *ctx.where)), None, None, None


def copy(x: Tensor) -> Tensor:
    """Use the same value on every rank: the gradients of all ranks add up."""
    return _Copy.apply(x)  # type: ignore[no-any-return, no-untyped-call]


def reduce(x: Tensor) -> Tensor:
    """Add up the ranks' partial sums."""
    return _Reduce.apply(x)  # type: ignore[no-any-return, no-untyped-call]


def first(x: Tensor, rank: int) -> Tensor:
    """Turn a value that all have into partial sums."""
    return _First.apply(x, rank)  # type: ignore[no-any-return, no-untyped-call]


def keep(x: Tensor, rank: int) -> Tensor:
    """Turn a whole gradient into partial sums."""
    return _Keep.apply(x, rank)  # type: ignore[no-any-return, no-untyped-call]


def share(x: Tensor, dim: int, ranges: Ranges, size: int) -> Tensor:
    """Take the own share of a whole value; the gradient is whole again."""
    return _Share.apply(x, dim, ranges, size)  # type: ignore[no-any-return, no-untyped-call]


def part(x: Tensor, dim: int, ranges: Ranges, size: int) -> Tensor:
    """Take the own share of a copied value; the gradient stays a partial sum."""
    return take(x, dim, ranges, size)


def gather(x: Tensor, dim: int, ranges: Ranges, size: int) -> Tensor:
    """Put the shares of all ranks together; the gradient must be whole."""
    return _Gather.apply(x, dim, ranges, size)  # type: ignore[no-any-return, no-untyped-call]


def gather_copy(x: Tensor, dim: int, ranges: Ranges, size: int) -> Tensor:
    """Put the shares of all ranks together; the ranks' gradients add up."""
    return _GatherCopy.apply(x, dim, ranges, size)  # type: ignore[no-any-return, no-untyped-call]


def reduce_share(x: Tensor, dim: int, ranges: Ranges, size: int) -> Tensor:
    """Add up partial sums and take the own share."""
    return _ReduceShare.apply(x, dim, ranges, size)  # type: ignore[no-any-return, no-untyped-call]


COLLECTIVE_FUNCTIONS = frozenset({copy, reduce, first, keep, share, part, gather, gather_copy, reduce_share})
