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
Widths: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Cell:
    """Rows [start, stop) of a micro-batch, computed by `rank` for `stage`; never empty."""

    stage: int
    micro_batch: int
    rank: int
    start: int
    stop: int
    replica: int = 0
    tensor: int = 0  # number in the replica's tensor group


@dataclass(frozen=True, slots=True)
class Route:
    """A part of a value on its way from one cell to another; `gradient` says that its gradient comes back.

    Between replicas of unequal width some pairs of ranks exchange only one of the two.
    """

    value: Value
    source: Cell
    target: Cell
    start: int
    stop: int
    gradient: bool
    forward: bool = True

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


def lay_out_cells(
    devices: Devices, rows: int, micro_batches: int, widths: Widths | None = None
) -> list[list[list[Cell]]]:
    """Return the cells that have rows, by stage and micro-batch, in order of replicas.

    A replica `widths[stage]` ranks wide has as many cells, all with its rows.
    """
    parts = micro_batch_rows(rows, micro_batches)
    return [
        [
            [
                Cell(stage, k, rank, start, stop, place // width, place % width)
                for place, rank in enumerate(ranks)
                for start, stop in [replica_rows(lo, hi, place // width, len(ranks) // width)]
                if start < stop
            ]
            for k, (lo, hi) in enumerate(parts)
        ]
        for stage, ranks in enumerate(devices)
        for width in [1 if widths is None else widths[stage]]
    ]


def find_routes(wiring: Wiring, cells: list[list[list[Cell]]]) -> list[Route]:
    """Return every part that crosses: by value, consumer, micro-batch, then producing and consuming replica.

    A consuming cell gets a "whole" value from one producing cell; a producing cell
    gives its "sum" to one consuming cell; both spread evenly over the other side.

    All ranks of a replica have its values and gradients whole. So each rank of a wide replica
    gets a value from one rank of the other side, and each gets its gradient back from one:

        2 wide → 3 wide     values  0→0 0→1 1→2     gradients  0←0 1←1
    """
    routes: list[Route] = []
    for value in wiring.values:
        for consumer in value.consumers:
            gradient = wiring.returns_gradient(value, consumer)
            for sources, targets in zip(cells[value.producer], cells[consumer], strict=True):
                pairs = _pairs(value.kind, _firsts(sources), _firsts(targets))
                for source, target, start, stop in pairs:
                    routes += _widened(value, _group(source, sources), _group(target, targets), start, stop, gradient)
    return routes


def _firsts(cells: Sequence[Cell]) -> list[Cell]:
    return [cell for cell in cells if not cell.tensor]


def _group(first: Cell, cells: Sequence[Cell]) -> list[Cell]:
    return [cell for cell in cells if cell.replica == first.replica]


def _widened(
    value: Value, sources: Sequence[Cell], targets: Sequence[Cell], start: int, stop: int, gradient: bool
) -> list[Route]:
    there = {(j * len(sources) // len(targets), j) for j in range(len(targets))}
    back = {(i, i * len(targets) // len(sources)) for i in range(len(sources))} if gradient else set()
    return [
        Route(value, sources[i], targets[j], start, stop, (i, j) in back, (i, j) in there)
        for i, j in sorted(there | back)
    ]


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
