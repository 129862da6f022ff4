"""What is left in buffers at the end of a step: one value, the same on all ranks of a stage."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from efftra_fx.program import RankProgram, micro_batch_rows, replica_rows

from .step import StageWork, Step, Waiting
from .transport import Transport, result_of


def replicas_with_rows(program: RankProgram, beside: tuple[int, ...], micro_batch: int) -> tuple[tuple[int, int], ...]:
    """Return those of the ranks `beside` (one a replica) that have rows of a micro-batch: replica and rank."""
    lo, hi = micro_batch_rows(program.rows, program.micro_batches)[micro_batch]
    spans = [replica_rows(lo, hi, q, len(beside)) for q in range(len(beside))]
    return tuple((q, rank) for q, (rank, (start, stop)) in enumerate(zip(beside, spans, strict=True)) if start < stop)


def write_buffers(step: Step, work: StageWork, held: dict[str, Tensor], program: RankProgram, by: Transport) -> Waiting:
    """Write new buffer values, a collective call over the stage's ranks.

    What all replicas compute from the rows of all is the same on those that had rows of every micro-batch, of
    which the last is one. Other statistics become the mean of the replicas' own.
    """
    for name in work.buffers:
        buffer, value = held[name], step.buffers.get(name)
        if name in work.shared:
            if _some_lag(program, len(work.beside)):
                value = yield from _of_the_last(value, buffer, work.beside, by)
        elif len(work.group) > 1 and name not in work.once and buffer.is_floating_point():
            value = yield from _mean(value, buffer, work.group, by)
        if value is not None:
            buffer.copy_(value)


def _some_lag(program: RankProgram, replicas: int) -> bool:
    """Say whether some replica has no rows in some micro-batch."""
    return min(hi - lo for lo, hi in micro_batch_rows(program.rows, program.micro_batches)) < replicas


def _of_the_last(value: Tensor | None, buffer: Tensor, beside: tuple[int, ...], by: Transport) -> Any:
    mine = value if value is not None and by.rank == beside[-1] else torch.zeros_like(buffer)
    flat = mine.reshape(-1).clone(memory_format=torch.contiguous_format)
    total = yield from result_of(by.all_reduce(flat, tuple(sorted(beside))), "buffers")
    return total.view(buffer.shape)


def _mean(value: Tensor | None, buffer: Tensor, group: tuple[int, ...], by: Transport) -> Any:
    mine = torch.zeros(buffer.numel() + 1, dtype=torch.float64, device=by.device)
    if value is not None:
        mine[:-1], mine[-1] = value.reshape(-1), 1.0
    total = yield from result_of(by.all_reduce(mine, group), "buffers")
    return (total[:-1] / total[-1]).view(buffer.shape)


__all__ = ["replicas_with_rows", "write_buffers"]
