"""Put the parts of a value together: rows from several ranks, partial sums, gradients of several readers."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from efftra_fx.program import Value

from .transport import Handle, Transport, result_of

Pieces = list[tuple[int, int, Tensor]]  # first row, row behind the last, tensor


class Bound(Protocol):
    """A value of which the whole batch's is wanted."""

    @property
    def name(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def dim(self) -> int: ...


def assemble(pieces: Pieces, value: Value, first: int, stop: int, device: torch.device) -> Tensor:
    """Return the value for rows [first, stop) from its pieces; pieces for the same rows add up.

    Where a partial sum goes to another replica, there are no pieces, and this one counts nothing.
    """
    if not pieces and value.kind == "sum":
        return torch.zeros(value.shape, dtype=getattr(torch, value.dtype), device=device)
    if len(pieces) == 1:
        return pieces[0][2]
    if value.kind != "rows":
        total = pieces[0][2]
        for _, _, piece in pieces[1:]:
            total = total + piece
        return total
    ordered = sorted(pieces, key=lambda piece: piece[0])
    if all(a[1] == b[0] for a, b in zip(ordered, ordered[1:], strict=False)):
        return torch.cat([piece for _, _, piece in ordered], value.dim)
    shape = value.part_shape(stop - first)
    result = torch.zeros(shape, dtype=ordered[0][2].dtype, device=ordered[0][2].device)
    for start, end, piece in ordered:
        rows_of(result, value.dim, first, stop, start, end).add_(piece)
    return result


def rows_of(tensor: Tensor, dim: int, first: int, stop: int, start: int, end: int) -> Tensor:
    """Return rows [start, end) of a tensor that has rows [first, stop) along `dim`."""
    width = tensor.shape[dim] // (stop - first)
    return tensor.narrow(dim, (start - first) * width, (end - start) * width)


def join_parts(pieces: Pieces, kind: str, dim: int, rows: int) -> Tensor:
    """Return the whole batch's value from the parts of all ranks."""
    ordered = sorted(pieces, key=lambda piece: piece[0])
    if kind == "rows":
        return torch.cat([piece for _, _, piece in ordered], dim)
    if kind == "sum":
        total = ordered[0][2]
        for _, _, piece in ordered[1:]:
            total = total + piece
        return total
    return ordered[0][2]


def gather_parts(
    transport: Transport,
    ranks: Sequence[int],
    bounds: Sequence[Bound],
    parts: Mapping[str, Pieces],
    what: str,
) -> Generator[tuple[Handle[Any], str], None, dict[str, Tensor]]:
    """Give every rank in `ranks` the joined values; a collective call over them.

    First all learn who has which rows in which shape (small sums over zeros), then each part goes to everybody.
    """
    table = yield from _tell(transport, ranks, bounds, parts, what)
    values: dict[str, Tensor] = {}
    me = transport.rank
    for index, bound in enumerate(bounds):
        pieces: Pieces = []
        handles = []
        for owner, number, start, stop, shape, dtype in table[index]:
            if owner == me:
                tensor = parts[bound.name][number][2].contiguous()
                pieces.append((start, stop, tensor))
                for peer in ranks:
                    if peer != me:
                        transport.send(tensor, peer, _TAG + index)
            else:
                handles.append((start, stop, transport.recv(shape, dtype, transport.device, owner, _TAG + index)))
        for start, stop, handle in handles:
            tensor = yield from result_of(handle, what)
            pieces.append((start, stop, tensor))
        values[bound.name] = join_parts(pieces, bound.kind, bound.dim, 0)
    return values


_TAG = 1 << 24
_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
)
_DIMS = 8
Entry = tuple[int, int, int, int, tuple[int, ...], torch.dtype]  # owner, number, start, stop, shape, dtype


def _tell(
    transport: Transport, ranks: Sequence[int], bounds: Sequence[Bound], parts: Mapping[str, Pieces], what: str
) -> Generator[tuple[Handle[Any], str], None, list[list[Entry]]]:
    """Let all ranks know which parts there are: counts first, then one line of numbers a part."""
    counts = torch.zeros(len(ranks), len(bounds), dtype=torch.int64, device=transport.device)
    mine = list(ranks).index(transport.rank)
    for index, bound in enumerate(bounds):
        counts[mine, index] = len(parts.get(bound.name, ()))
    counts = yield from result_of(transport.all_reduce(counts, tuple(ranks)), what)
    table = counts.tolist()
    total = sum(sum(row) for row in table)
    lines = torch.zeros(max(total, 1), 4 + _DIMS, dtype=torch.int64, device=transport.device)
    at = 0
    for rank_index in range(len(ranks)):
        for index, bound in enumerate(bounds):
            for number in range(table[rank_index][index]):
                if rank_index == mine:
                    start, stop, tensor = parts[bound.name][number]
                    shape = [*tensor.shape, *([0] * (_DIMS - tensor.ndim))]
                    line = [start, stop, _DTYPES.index(tensor.dtype), tensor.ndim, *shape]
                    lines[at] = torch.tensor(line, dtype=torch.int64)
                at += 1
    lines = yield from result_of(transport.all_reduce(lines, tuple(ranks)), what)
    rows = lines.tolist()
    result: list[list[Entry]] = [[] for _ in bounds]
    at = 0
    for rank_index, rank in enumerate(ranks):
        for index in range(len(bounds)):
            for number in range(table[rank_index][index]):
                start, stop, dtype, ndim, *shape = rows[at]
                entry = (rank, number, start, stop, tuple(shape[:ndim]), _DTYPES[dtype])
                result[index].append(entry)
                at += 1
    return result
