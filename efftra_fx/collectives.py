"""Graph functions that move values between the ranks of a tensor group, each with its backward.

They are made of three operators: the sum over the group (`tensor_sum`), all shares one behind the
other (`tensor_gather`), and the own share of the sum (`tensor_scatter`). These are what the backward
graph, the generated code and the verifier see; a run meets the other ranks there and nowhere else.

    function          forward                 backward
    copy              itself                  sum
    reduce            sum                     itself
    first             rank 0's, else zeros    itself
    keep              itself                  rank 0's, else zeros
    share             own share               all shares together
    part              own share               own share, zeros around it
    spread            own share, zeros        own share
                      around it
    gather            all shares together     own share
    gather_copy       all shares together     own share of the sum
    reduce_share      own share of the sum    all shares together

Shares are given as each rank's ranges of indices along a dimension; `size` is the whole's number of
indices (or of one period of it, see `Cut`). Each function takes the rank's number last.

Two more operators go the other way, over the replicas of a stage that have rows of the same
micro-batch: `replica_sum` adds up what they have, `replica_gather` puts it side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd import Function

from efftra_fx.errors import EmitError

Ranges = Sequence[Sequence[int]]
Parts = Sequence[Ranges]  # by rank

_LIBRARY = torch.library.Library("efftra_tensor", "DEF")
_LIBRARY.define("sum(Tensor x) -> Tensor")
_LIBRARY.define("gather(Tensor x, SymInt[] counts) -> Tensor")
_LIBRARY.define("scatter(Tensor x, SymInt[] counts, int rank) -> Tensor")


_LIBRARY.define("replica_sum(Tensor x) -> Tensor")
_LIBRARY.define("replica_gather(Tensor x, int replicas) -> Tensor")


def _alone(x: Tensor, *args: Any) -> Tensor:
    raise EmitError("a sum over ranks runs only inside a stage's code, where other ranks can be met")


def _like(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _all(x: Tensor, counts: Sequence[int]) -> Tensor:
    return x.new_empty(sum(counts))


def _own(x: Tensor, counts: Sequence[int], rank: int) -> Tensor:
    return x.new_empty(counts[rank])


def _beside(x: Tensor, replicas: int) -> Tensor:
    return x.new_empty(replicas, *x.shape)


_OWN: tuple[tuple[str, Any], ...] = (("sum", _like), ("gather", _all), ("scatter", _own))
for _name, _fake in (*_OWN, ("replica_sum", _like), ("replica_gather", _beside)):
    _LIBRARY.impl(_name, _alone, "CompositeExplicitAutograd")
    torch.library.register_fake(f"efftra_tensor::{_name}", _fake, lib=_LIBRARY)

TENSOR_SUM = torch.ops.efftra_tensor.sum.default
TENSOR_GATHER = torch.ops.efftra_tensor.gather.default
TENSOR_SCATTER = torch.ops.efftra_tensor.scatter.default
REPLICA_SUM = torch.ops.efftra_tensor.replica_sum.default
REPLICA_GATHER = torch.ops.efftra_tensor.replica_gather.default


@dataclass(frozen=True)
class Exchange:
    """What a rank asks of others: a sum in place, all ranks' elements, or its own elements of the sum.

    The others are its tensor group, or the replicas that have rows of the micro-batch. `counts` are each rank's
    elements of a gather or scatter in a tensor group, whose tensors are flat; a gather over replicas gives one
    row a replica.
    """

    kind: Literal["sum", "gather", "scatter"]
    counts: tuple[int, ...] = ()
    over: Literal["tensor group", "replicas"] = "tensor group"


_EXCHANGES: dict[Any, Literal["sum", "gather", "scatter"]] = {
    TENSOR_SUM: "sum",
    TENSOR_GATHER: "gather",
    TENSOR_SCATTER: "scatter",
    REPLICA_SUM: "sum",
    REPLICA_GATHER: "gather",
}


def exchange_of(target: Any, args: Sequence[Any]) -> Exchange | None:
    """Return what a call asks of other ranks; None for a call that needs none."""
    kind = _EXCHANGES.get(target)
    if kind is None:
        return None
    if target in (REPLICA_SUM, REPLICA_GATHER):
        return Exchange(kind, over="replicas")
    return Exchange(kind, tuple(args[1]) if kind != "sum" else ())


def tensor_sum(x: Tensor) -> Tensor:
    """Return the sum over the tensor group, contiguous and the same bits on every rank; no gradient."""
    return TENSOR_SUM(x)  # type: ignore[no-any-return]


def replica_sum(x: Tensor) -> Tensor:
    """Return the sum over the replicas with rows of this micro-batch, the same bits on every rank; no gradient."""
    return REPLICA_SUM(x)  # type: ignore[no-any-return]


def replica_gather(x: Tensor, replicas: int) -> Tensor:
    """Return what each of a stage's replicas has of [n], as [replicas, n]; zeros without rows; no gradient."""
    return REPLICA_GATHER(x, replicas)  # type: ignore[no-any-return]


def tensor_gather(x: Tensor, counts: Sequence[int]) -> Tensor:
    """Return the elements of all ranks' tensors, so many of each, flat and in the order of ranks; no gradient."""
    return TENSOR_GATHER(x, list(counts))  # type: ignore[no-any-return]


def tensor_scatter(x: Tensor, counts: Sequence[int], rank: int) -> Tensor:
    """Return the rank's own of `counts` sections of the sum over the tensor group, flat; no gradient."""
    return TENSOR_SCATTER(x, list(counts), rank)  # type: ignore[no-any-return]


def together(x: Tensor, dim: int, parts: Parts, size: int, rank: int) -> Tensor:
    """Return the whole value of which each rank has its share; the reverse of `take` on every rank."""
    lengths = [_length(part) for part in parts]
    if x.shape[dim] != lengths[rank]:
        return together(x.unflatten(dim, (-1, lengths[rank])), dim + 1, parts, size, rank).flatten(dim, dim + 1)
    before, after = x.shape[:dim], x.shape[dim + 1 :]
    each = prod(before) * prod(after)
    flat = tensor_gather(x, [each * length for length in lengths])
    if prod(before) == 1 and _in_order(parts):
        return flat.view(*before, size, *after)
    shares = [
        one.view(*before, length, *after)
        for one, length in zip(flat.split([each * length for length in lengths]), lengths, strict=True)
    ]
    pieces = [(a, shares[r].narrow(dim, at, b - a)) for r, part in enumerate(parts) for a, b, at in _offsets(part)]
    return torch.cat([piece for _, piece in sorted(pieces, key=lambda one: one[0])], dim)


def own_of_sum(x: Tensor, dim: int, parts: Parts, size: int, rank: int) -> Tensor:
    """Return the rank's share of the sum of all ranks' values."""
    if x.shape[dim] != size:
        return own_of_sum(x.unflatten(dim, (-1, size)), dim + 1, parts, size, rank).flatten(dim, dim + 1)
    before, after = x.shape[:dim], x.shape[dim + 1 :]
    each = prod(before) * prod(after)
    if not (prod(before) == 1 and _in_order(parts)):
        x = torch.cat([take(x, dim, part, size).reshape(-1) for part in parts])
    flat = tensor_scatter(x, [each * _length(part) for part in parts], rank)
    return flat.view(*before, _length(parts[rank]), *after)


def _length(ranges: Ranges) -> int:
    return sum(b - a for a, b in ranges)


def _in_order(parts: Parts) -> bool:
    """Say whether the shares, one behind the other, are the whole."""
    bounds = [bound for part in parts for a, b in part for bound in (a, b)]
    return bounds == sorted(bounds)


def _offsets(ranges: Ranges) -> list[tuple[int, int, int]]:
    """Return each range with where it begins in the share."""
    found, at = [], 0
    for a, b in ranges:
        found.append((a, b, at))
        at += b - a
    return found


def take(x: Tensor, dim: int, ranges: Ranges, size: int) -> Tensor:
    """Return the indices in `ranges` along `dim`, in each period of `size`; a view where that can be."""
    if x.shape[dim] != size:
        return take(x.unflatten(dim, (-1, size)), dim + 1, ranges, size).flatten(dim, dim + 1)
    if len(ranges) == 1:
        return x.narrow(dim, ranges[0][0], ranges[0][1] - ranges[0][0])
    return torch.cat([x.narrow(dim, a, b - a) for a, b in ranges], dim)


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
    def forward(ctx: Any, x: Tensor, dim: int, parts: Parts, size: int, rank: int) -> Tensor:
        ctx.where = dim, parts, size, rank
        return take(x, dim, parts[rank], size)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return together(grad, *ctx.where), None, None, None, None


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, parts: Parts, size: int, rank: int) -> Tensor:
        ctx.where = dim, parts[rank], size
        return together(x, dim, parts, size, rank)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return take(grad, *ctx.where), None, None, None, None


class _GatherCopy(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, parts: Parts, size: int, rank: int) -> Tensor:
        ctx.where = dim, parts, size, rank
        return together(x, dim, parts, size, rank)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return own_of_sum(grad, *ctx.where), None, None, None, None


class _ReduceShare(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, parts: Parts, size: int, rank: int) -> Tensor:
        ctx.where = dim, parts, size, rank
        return own_of_sum(x, dim, parts, size, rank)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return together(grad, *ctx.where), None, None, None, None


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


def share(x: Tensor, dim: int, parts: Parts, size: int, rank: int) -> Tensor:
    """Take the own share of a whole value; the gradient is whole again."""
    return _Share.apply(x, dim, parts, size, rank)  # type: ignore[no-any-return, no-untyped-call]


def part(x: Tensor, dim: int, parts: Parts, size: int, rank: int) -> Tensor:
    """Take the own share of a copied value; the gradient stays a partial sum."""
    return take(x, dim, parts[rank], size)


def spread(x: Tensor, dim: int, parts: Parts, size: int, rank: int) -> Tensor:
    """Turn shares into partial sums: each with zeros around it; the gradient, which is whole, is taken in shares."""
    ranges = parts[rank]
    length = _length(ranges)
    if x.shape[dim] != length:
        return spread(x.unflatten(dim, (-1, length)), dim + 1, parts, size, rank).flatten(dim, dim + 1)

    def zeros(count: int) -> list[Tensor]:
        return [x.new_zeros(*x.shape[:dim], count, *x.shape[dim + 1 :])] if count else []

    pieces, end = [], 0
    for a, b, at in sorted(_offsets(ranges)):
        pieces += [*zeros(a - end), x.narrow(dim, at, b - a)]
        end = b
    return torch.cat([*pieces, *zeros(size - end)], dim)


def gather(x: Tensor, dim: int, parts: Parts, size: int, rank: int) -> Tensor:
    """Put the shares of all ranks together; the gradient must be whole."""
    return _Gather.apply(x, dim, parts, size, rank)  # type: ignore[no-any-return, no-untyped-call]


def gather_copy(x: Tensor, dim: int, parts: Parts, size: int, rank: int) -> Tensor:
    """Put the shares of all ranks together; the ranks' gradients add up."""
    return _GatherCopy.apply(x, dim, parts, size, rank)  # type: ignore[no-any-return, no-untyped-call]


def reduce_share(x: Tensor, dim: int, parts: Parts, size: int, rank: int) -> Tensor:
    """Add up partial sums and take the own share."""
    return _ReduceShare.apply(x, dim, parts, size, rank)  # type: ignore[no-any-return, no-untyped-call]


COLLECTIVE_FUNCTIONS = frozenset({copy, reduce, first, keep, share, part, spread, gather, gather_copy, reduce_share})
