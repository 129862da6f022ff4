"""What ranks do with each other's tensors, as functions that a graph can call.

In one process they need no ranks: sending and receiving hand the tensor on, and a sum
over ranks is a plain sum of what each of them would bring. So a graph that calls them
runs anywhere, also under autograd, and must equal the model that it was made from.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def take_rows(tensor: Tensor, dim: int, start: int, stop: int) -> Tensor:
    """Return elements [start, stop) along `dim`, as a view; any dtype.

    >>> take_rows(torch.arange(6), 0, 2, 4).tolist()
    [2, 3]
    """
    return tensor.narrow(dim, start, stop - start)


def join_rows(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Return the parts one behind the other along `dim`; a single part as it is."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)


def add_parts(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum of partial sums of equal shape, added from the first to the last.

    >>> add_parts([torch.tensor(1.5), torch.tensor(2.0)]).item()
    3.5
    """
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def send(tensor: Tensor, source: int, target: int) -> Tensor:
    """Hand a tensor of rank `source` to rank `target`; its gradient comes back the same way."""
    return tensor


def recv(tensor: Tensor, source: int, target: int) -> Tensor:
    """Take on rank `target` what rank `source` has sent."""
    return tensor


def replicate(tensor: Tensor, ranks: tuple[int, ...]) -> Tensor:
    """Let each rank in `ranks` hold a copy of a parameter; its gradient is the sum of all copies' gradients."""
    return tensor


def all_reduce(parts: Sequence[Tensor], ranks: tuple[int, ...]) -> Tensor:
    """Return the sum of what the ranks bring, one part a rank, in the order of `ranks`; every rank gets it."""
    return add_parts(parts)


def all_gather(parts: Sequence[Tensor], dim: int, ranks: tuple[int, ...]) -> Tensor:
    """Return the rows of all ranks in the order of the batch, joined along `dim`; every rank gets them.

    `ranks` says whose rows each part holds.
    """
    return join_rows(parts, dim)


__all__ = ["add_parts", "all_gather", "all_reduce", "join_rows", "recv", "replicate", "send", "take_rows"]
