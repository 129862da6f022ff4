"""Write, on every rank, the buffers that the whole batch makes: join what parts hand over, and compute once more.

Sums are added up over all ranks in one all-reduce for each kind of number; rows go to everybody. A buffer that one
stage has written is carried to the others when they read it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .drawing import drawing
from .parts import Bound, Pieces, gather_parts, join_parts
from .step import NewsCode, Step, Waiting
from .transport import Transport, result_of


def write_news(step: Step, news: NewsCode, held: Mapping[str, Tensor], by: Transport) -> Waiting:
    """Write the new values; a collective call over all ranks."""
    everyone = tuple(range(by.world_size))
    if by.world_size == 1:
        values = {p.name: join_parts(step.news[p.name], p.kind, p.dim, 0) for p in news.parts}
    else:
        values = yield from _added([p for p in news.parts if p.kind != "rows"], news, step.news, by)
        rows = [p for p in news.parts if p.kind == "rows"]
        if rows:
            values |= yield from gather_parts(by, everyone, rows, step.news, "buffers")
    with drawing(step.seed if news.random else None, by.device):
        made = news.make(step.batch, values)
    if news.beside:
        yield from result_of(by.all_reduce(torch.zeros(1, device=by.device), everyone), "buffers")
    for name, value in made.items():
        held[name].copy_(value)
    step.news.clear()


def carry_buffers(owners: Mapping[str, int], held: Mapping[str, Tensor], by: Transport) -> Waiting:
    """Give every rank what the owners have written in these buffers; a collective call over all ranks."""
    everyone = tuple(range(by.world_size))
    for name, owner in owners.items():
        own = held[name] if by.rank == owner else torch.zeros_like(held[name])
        flat, kind = _flat(own)
        total = yield from result_of(by.all_reduce(flat.to(kind, copy=True), everyone), "buffers")
        if by.rank != owner:
            held[name].copy_(_shaped(total, held[name]))


def _added(bounds: Sequence[Bound], news: NewsCode, parts: Mapping[str, Pieces], by: Transport) -> Waiting:
    """Return sums over all parts, and of what all parts have alike the first one's."""
    values: dict[str, Tensor] = {}
    kinds: dict[torch.dtype, list[tuple[str, Tensor]]] = {}
    for bound in bounds:
        zeros = news.zeros(bound.name)
        pieces = [p for p in parts.get(bound.name, ()) if bound.kind == "sum" or p[0] == 0]
        mine = join_parts(pieces, bound.kind, bound.dim, 0) if pieces else zeros
        values[bound.name] = zeros
        flat, kind = _flat(mine)
        kinds.setdefault(kind, []).append((bound.name, flat.to(kind)))
    for some in kinds.values():
        joined = torch.cat([flat for _, flat in some])
        total = yield from result_of(by.all_reduce(joined, tuple(range(by.world_size))), "buffers")
        for (name, _), flat in zip(some, total.split([flat.numel() for _, flat in some]), strict=True):
            values[name] = _shaped(flat, values[name])
    return values


def _flat(tensor: Tensor) -> tuple[Tensor, torch.dtype]:
    """Return a tensor's numbers in a row, and the type in which they are added over ranks."""
    flat = (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).reshape(-1)
    if not flat.dtype.is_floating_point:
        return flat, torch.int64
    return flat, torch.float64 if flat.dtype is torch.float64 else torch.float32


def _shaped(flat: Tensor, like: Tensor) -> Tensor:
    whole = torch.view_as_complex(flat.view(*like.shape, 2)) if like.is_complex() else flat.view(like.shape)
    return whole.to(like.dtype)


__all__ = ["carry_buffers", "write_news"]
