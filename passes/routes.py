"""Who computes which rows, and which parts of which values go from whom to whom.

A cell is one stage's computation of one micro-batch on one replica. Between stages
with different numbers of replicas each pair of cells exchanges just the rows that
both touch:

    producer, 3 replicas   | 0 1 | 2 3 | 4 5 |
    consumer, 2 replicas   | 0 1   2 | 3 4 5 |       0 → 0 [0:2]   1 → 0 [2:3]   1 → 1 [3:4]   2 → 1 [4:6]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from efftra_fx.program import Recv, Send, Value, Wiring, micro_batch_rows, replica_rows

Devices: TypeAlias = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Cell:
    """Rows [start, stop) of a micro-batch, computed by `rank` for `stage`; never empty."""

    stage: int
    micro_batch: int
    rank: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Route:
    """A part of a value on its way from one cell to another; `gradient` says that its gradient comes back."""

    value: Value
    source: Cell
    target: Cell
    start: int
    stop: int
    gradient: bool

    def send(self) -> Send:
        """The producer's instruction."""
        return Send(*self._fields(self.target.rank, False))

    def recv(self) -> Recv:
        """The consumer's instruction."""
        return Recv(*self._fields(self.source.rank, False))

    def send_gradient(self) -> Send:
        """The consumer's instruction on the way back."""
        return Send(*self._fields(self.source.rank, True))

    def recv_gradient(self) -> Recv:
        """The producer's instruction on the way back."""
        return Recv(*self._fields(self.target.rank, True))

    def _fields(self, peer: int, gradient: bool) -> tuple[str, int, int, int, int, str, tuple[int, ...], bool]:
        value, start, stop = self.value, self.start, self.stop
        shape = value.part_shape(stop - start)
        return value.name, self.source.micro_batch, start, stop, peer, value.dtype, shape, gradient


def lay_out_cells(devices: Devices, rows: int, micro_batches: int) -> list[list[list[Cell]]]:
    """Return the cells that have rows, by stage and micro-batch, in order of replicas."""
    parts = micro_batch_rows(rows, micro_batches)
    return [
        [
            [
                Cell(stage, k, rank, start, stop)
                for q, rank in enumerate(ranks)
                for start, stop in [replica_rows(lo, hi, q, len(ranks))]
                if start < stop
            ]
            for k, (lo, hi) in enumerate(parts)
        ]
        for stage, ranks in enumerate(devices)
    ]


def find_routes(wiring: Wiring, cells: list[list[list[Cell]]]) -> list[Route]:
    """Return every part that crosses: by value, consumer, micro-batch, then producing and consuming replica.

    A consuming cell gets a "whole" value from one producing cell; a producing cell
    gives its "sum" to one consuming cell; both spread evenly over the other side.
    """
    routes: list[Route] = []
    for value in wiring.values:
        for consumer in value.consumers:
            gradient = wiring.returns_gradient(value, consumer)
            for sources, targets in zip(cells[value.producer], cells[consumer], strict=True):
                routes += (Route(value, *pair, gradient) for pair in _pairs(value.kind, sources, targets))
    return routes


def _pairs(kind: str, sources: Sequence[Cell], targets: Sequence[Cell]) -> list[tuple[Cell, Cell, int, int]]:
    if kind == "whole":
        chosen = [(sources[j * len(sources) // len(targets)], target) for j, target in enumerate(targets)]
        return [(source, target, source.start, source.stop) for source, target in chosen]
    if kind == "sum":
        chosen = [(source, targets[i * len(targets) // len(sources)]) for i, source in enumerate(sources)]
        return [(source, target, source.start, source.stop) for source, target in chosen]
    pairs = []
    for source in sources:
        for target in targets:
            start, stop = max(source.start, target.start), min(source.stop, target.stop)
            if start < stop:
                pairs.append((source, target, start, stop))
    return pairs
