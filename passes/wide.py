"""Seeds for long lines of devices: the device dimension leaves the dynamic program.

For a bound P on the slowest stage, the fewest devices that blocks [i, j) need in a
given way has a closed form, since times are straight lines in rows:

    fixed + per_row * rows / replicas <= P     =>     replicas >= per_row * rows / (P - fixed)

so for each P the fewest devices for each suffix of the chain follow in one pass over
pairs of cut positions. A range of P is tried; devices left over go to the refinement.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .candidates import Search
from .dynamic import fastest_period, thinned
from .neighbours import Shape
from .pricing import Pricer
from .table import Floats, Ints, Layout

POSITIONS = 64
RATIOS = (1.0001, 1.02, 1.05, 1.1, 1.17, 1.26, 1.4, 1.7, 2.2, 3.2, 5.0, 8.0)  # of the fastest period


def wide_scan(search: Search, layout: Layout, micro_batches: int) -> list[Shape]:
    """Shapes from a scan of bounds on the period."""
    pricer = search.pricer(layout, micro_batches)
    positions = thinned(search.table, POSITIONS)
    tightest = fastest_period(search, layout, pricer.micro_rows)
    periods = np.array([tightest * ratio for ratio in RATIOS])
    per_machine = int(np.bincount(layout.machine).max())
    found: list[Shape] = []
    for cap in dict.fromkeys((layout.size, min(per_machine, layout.size))):
        for shape in Suffixes(search, pricer, positions, periods, cap).shapes():
            found.append(shape)
            found.append(stretched(shape, layout.size, search.table.widths.tolist()))
    return list(dict.fromkeys(found))


class Suffixes:
    """For each bound on the period and each cut position, the suffix of the chain with the fewest devices.

    Arrays have a first axis over the bounds. `end` is the first device position in use,
    -1 where the line is too short.
    """

    def __init__(self, search: Search, pricer: Pricer, positions: Ints, periods: Floats, cap: int) -> None:
        self.search, self.pricer, self.layout = search, pricer, pricer.layout
        self.positions, self.periods, self.cap = positions, periods, cap
        rows = pricer.micro_rows / pricer.layout.copies
        classes = sorted(set(self.layout.device_class.tolist()))
        self.needs = {c: fewest(search, positions, rows, periods, c, pricer.whole) for c in classes}
        bounds, size = len(periods), len(positions)
        self.end = np.full((bounds, size), -1)
        self.end[:, -1] = self.layout.size
        self.depth = np.zeros((bounds, size), dtype=np.int64)
        self.pick = np.zeros((bounds, size, 3), dtype=np.int64)  # next cut, devices, way
        for i in range(size - 2, -1, -1):
            self.extend(i)

    def extend(self, i: int) -> None:
        """The best stage from cut i on, under each bound."""
        later = np.arange(i + 1, len(self.positions))
        reach = self.end[:, later]
        best = np.full(len(self.periods), -1)
        for c, (devices, ways) in self.needs.items():
            wanted = devices[:, i, later]
            ok = (reach > 0) & (wanted <= np.minimum(reach, self.cap))
            count = np.where(ok, wanted, 1).astype(np.int64)
            first = np.maximum(reach - count, 0)
            for other, (more, _) in self.needs.items():  # a run with slower devices in it needs as many as they do
                if other != c:
                    has = self.layout.class_counts[other]
                    inside = has[np.maximum(reach, 0)] > has[first]
                    ok &= ~inside | (more[:, i, later] <= wanted)
            if self.layout.limited:
                ok &= self.fits(i, later, count, ways[:, i, later], np.maximum(reach, 1))
            left = np.where(ok, (reach - count) * (len(self.positions) + 1) - self.depth[:, later], -1)
            at = np.argmax(left, axis=1)
            bound = np.arange(len(self.periods))
            start = np.where(left[bound, at] >= 0, reach[bound, at] - count[bound, at], -1)
            better = start > best
            best = np.where(better, start, best)
            fresh = np.stack([later[at], count[bound, at], ways[bound, i, later[at]]], axis=1)
            self.pick[:, i] = np.where(better[:, None], fresh, self.pick[:, i])
        self.end[:, i] = best
        self.depth[:, i] = self.depth[np.arange(len(best)), self.pick[:, i, 0]] + 1

    def fits(self, i: int, later: Ints, count: Ints, ways: Ints, reach: Ints) -> NDArray[np.bool_]:
        """Whether a stage from cut i to each later cut fits its devices, so deep in the pipeline."""
        table = self.search.table
        low, high = self.positions[i], self.positions[later][None]
        rows = self.pricer.part_rows(count // table.widths[ways] * self.layout.copies)
        sums = (table.parameters, table.gradients, table.saved, table.working)
        parameters, gradients, saved, working = (one[ways, 0, high] - one[ways, 0, low] for one in sums)
        flying = np.minimum(self.depth[:, later] + 1, self.pricer.micro_batches)
        edges = (table.cut_bytes[low] + table.cut_bytes[high]) * rows
        needed = parameters + (1 + table.rules.optimizer_bytes_per_parameter_byte) * gradients
        needed = needed + rows * (working + flying * saved) + 2 * edges
        needed = needed + np.where(table.recompute[ways], flying * table.cut_bytes[low] * rows, 0.0)
        first = np.clip(reach - count, 0, self.layout.size - 1)
        limit = -self.layout.least_memory.of(first, np.maximum(reach, first + 1))
        return np.asarray(needed <= limit)

    def shapes(self) -> list[Shape]:
        """The plan under each bound that has one."""
        found = []
        for bound in np.nonzero(self.end[:, 0] >= 0)[0].tolist():
            cuts, counts, ways, i = [0], [], [], 0
            while i < len(self.positions) - 1:
                i, count, way = self.pick[bound, i].tolist()
                cuts.append(int(self.positions[i]))
                counts.append(count)
                ways.append(way)
            found.append((tuple(cuts), tuple(counts), tuple(ways), int(self.end[bound, 0])))
        return found


def fewest(search: Search, at: Ints, rows: float, periods: Floats, c: int, whole: bool) -> tuple[Floats, Ints]:
    """For each bound and interval the fewest devices of a class, and in which way; infinite where no number helps."""
    table = search.table
    shape = (len(periods), len(at), len(at))
    best: Floats = np.full(shape, np.inf)
    ways = np.zeros(shape, dtype=np.int64)
    link = search.cluster.links.intra[search.cluster.devices[0].machine] or search.cluster.links.inter
    for w, way in enumerate(table.ways):
        slope = table.forward_row[w, c][at] + table.backward_row[w, c][at]
        fixed = table.forward_fixed[w, c][at] + table.backward_fixed[w, c][at]
        if link is not None and way.tensor > 1:
            around = 4.0 * (way.tensor - 1)
            slope = slope + around / way.tensor * table.reduce_bytes[w, c][at] / link.bandwidth_bytes_per_s
            fixed = fixed + around * table.reduces[w, c][at] * link.latency_s
        slope, fixed = slope[None] - slope[:, None], fixed[None] - fixed[:, None]
        room = periods[:, None, None] - fixed
        absent = table.missing[w, c][at][None] > table.missing[w, c][at][:, None]
        part = np.where(slope > 0, room / np.where(slope > 0, slope, 1.0), rows)  # rows that one replica can do
        part = np.floor(part + 1e-9) if whole else part
        possible = (room > 0) & ~absent & (part > 0)
        count = np.where(possible, np.ceil(rows / np.where(possible, part, 1.0) - 1e-9), np.inf)
        count = np.maximum(count, 1.0) * way.tensor
        better = count < best
        best, ways = np.where(better, count, best), np.where(better, w, ways)
    return best, ways


def stretched(shape: Shape, devices: int, widths: list[int]) -> Shape:
    """The same stages with the devices that are left over shared out in proportion."""
    cuts, counts, ways, _ = shape
    units = [count // widths[way] for count, way in zip(counts, ways, strict=True)]
    factor = devices / sum(counts)
    grown = [max(1, int(unit * factor)) for unit in units]
    return cuts, tuple(unit * widths[way] for unit, way in zip(grown, ways, strict=True)), ways, 0
