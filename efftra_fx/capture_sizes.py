"""Functions that take sizes as numbers in C++, put so that the number of rows stays a symbol.

Under a tracer each of these would fix the number of rows, though the model asks for none. They are put as the same
computation of functions that follow symbols. So is one that takes strides as numbers, and writes through memory,
which a graph that lays its values out otherwise would differentiate wrongly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


def sizes_kept_symbols() -> AbstractContextManager[object]:
    """While this lasts, such functions compute the same with sizes that may be symbols."""
    return _PutOtherwise()


def take_along_dim(input: Tensor, indices: Tensor, dim: int | None = None) -> Tensor:
    """Gather along one dimension; all others are broadcast."""
    if dim is None:
        return input.reshape(-1).gather(0, indices.reshape(-1))
    if input.ndim != indices.ndim or not (input.shape[dim] and indices.shape[dim]):
        plain: Tensor = torch.ops.aten.take_along_dim.default(input, indices, dim)  # which says what is wrong
        return plain
    both = torch.broadcast_tensors(input.narrow(dim, 0, 1), indices.narrow(dim, 0, 1))[0].shape
    wide, places = list(both), list(both)
    wide[dim], places[dim] = input.shape[dim], indices.shape[dim]
    return input.expand(wide).gather(dim, indices.expand(places))


def kron(input: Tensor, other: Tensor) -> Tensor:
    """Multiply each element of one tensor with all of another, side by side in each dimension."""
    count = max(input.ndim, other.ndim)
    a, b = ((1,) * (count - t.ndim) + tuple(t.shape) for t in (input, other))
    left = input.reshape([size for one in a for size in (one, 1)])
    right = other.reshape([size for one in b for size in (1, one)])
    return (left * right).reshape([m * n for m, n in zip(a, b, strict=True)])


def multi_dot(tensors: Sequence[Tensor], *, out: None = None) -> Tensor:
    """Multiply matrices one after another; which two are first would follow from their sizes, and changes no result."""
    return reduce(torch.matmul, tensors)


def chain_matmul(*matrices: Tensor, out: None = None) -> Tensor:
    """Multiply matrices one after another."""
    return multi_dot(matrices)


def fill_diagonal_(input: Tensor, fill_value: float, wrap: bool = False) -> Tensor:
    """Write a number on the diagonal of a matrix."""
    if input.ndim != 2 or wrap:
        plain: Tensor = torch.ops.aten.fill_diagonal_.default(input, fill_value, wrap)
        return plain
    input.diagonal().fill_(fill_value)
    return input


_FUNCTIONS: Mapping[Any, Callable[..., Tensor]] = {
    torch.take_along_dim: take_along_dim,
    Tensor.take_along_dim: take_along_dim,
    torch.kron: kron,
    Tensor.kron: kron,
    torch.linalg.multi_dot: multi_dot,
    torch.chain_matmul: chain_matmul,
    Tensor.fill_diagonal_: fill_diagonal_,
}


class _PutOtherwise(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _FUNCTIONS.get(func, func)(*args, **(kwargs or {}))


__all__ = ["chain_matmul", "fill_diagonal_", "kron", "multi_dot", "sizes_kept_symbols", "take_along_dim"]
