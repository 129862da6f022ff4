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
from .pricing import Pricer
from .refine import Shape
from .table import Floats, Ints, Layout

POSITIONS = 96


def wide_scan(search: Search, layout: Layout, micro_batches: int) -> list[Shape]:
    """Shapes from a scan of bounds on the period."""
    pricer = search.pricer(layout, micro_batches)
    positions = thinned(search.table, POSITIONS)
    tightest = fastest_period(search, layout, pricer.micro_rows)
    found: list[Shape] = []
    for ratio in (1.0001, 1.02, 1.05, 1.1, 1.17, 1.26, 1.4, 1.6, 2.0, 2.8, 4.0, 6.0, 10.0):
        for cap in stage_caps(layout):
            shape = suffixes(search, pricer, positions.tolist(), tightest * ratio, cap)
            if shape is not None:
                found.append(shape)
                found.append(stretched(shape, layout.size, search.table.widths.tolist()))
    return list(dict.fromkeys(found))


def stage_caps(layout: Layout) -> list[int]:
    """Most devices of a stage: no limit, or one machine."""
    per_machine = int(np.bincount(layout.machine).max())
    return [layout.size] if per_machine >= layout.size else [layout.size, per_machine]


def suffixes(search: Search, pricer: Pricer, positions: list[int], period_s: float, cap: int) -> Shape | None:
    """The plan with the fewest devices of which no stage is above the period; `None` when the line is too short."""
    layout = pricer.layout
    size = len(positions)
    at = np.array(positions)
    rows = pricer.micro_rows / layout.copies
    classes = layout.device_class.tolist()
    end = np.full(size, -1)  # first device position of the best suffix from each cut position
    end[-1] = layout.size
    picks: list[tuple[int, int, int]] = [(-1, 0, 0)] * size  # (next cut, devices, way)
    depth = np.zeros(size, dtype=np.int64)
    needs: dict[int, tuple[Floats, Ints]] = {}
    for i in range(size - 2, -1, -1):
        best = -1
        for c in sorted(set(classes)):
            if c not in needs:
                needs[c] = fewest(search, at, rows, period_s, c, pricer.whole)
        later = np.arange(i + 1, size)
        reach = end[later]
        for c, (devices, ways) in needs.items():
            wanted = devices[i, later]
            ok = (reach > 0) & (wanted <= np.minimum(reach, cap))
            if layout.limited:
                ok &= fits_memory(search, layout, at, i, later, np.where(ok, wanted, 1), ways[i, later], depth, reach)
            if not ok.any():
                continue
            left = np.where(ok, reach - wanted, -1)
            order = np.lexsort((depth[later], -left))
            for pick in order[:8].tolist():
                if left[pick] < 0 or left[pick] <= best:
                    break
                first, stop = int(left[pick]), int(reach[pick])
                if len(needs) > 1 and slower(classes, first, stop, c, needs, i, int(later[pick]), int(wanted[pick])):
                    continue
                best = first
                picks[i] = (int(later[pick]), int(wanted[pick]), int(ways[i, later[pick]]))
                break
        end[i] = best
        if best >= 0:
            depth[i] = depth[picks[i][0]] + 1
    if end[0] < 0:
        return None
    cuts, counts, way_of, i = [0], [], [], 0
    while i < size - 1:
        i, count, way = picks[i]
        cuts.append(positions[i])
        counts.append(count)
        way_of.append(way)
    return tuple(cuts), tuple(counts), tuple(way_of), int(end[0])


def slower(
    classes: list[int],
    first: int,
    stop: int,
    c: int,
    needs: dict[int, tuple[Floats, Ints]],
    i: int,
    j: int,
    count: int,
) -> bool:
    """Whether some class of device in the run would need more devices than it has."""
    return any(needs[other][0][i, j] > count for other in set(classes[first:stop]) - {c})


def fewest(search: Search, at: Ints, rows: float, period_s: float, c: int, whole: bool) -> tuple[Floats, Ints]:
    """For each interval the fewest devices of a class, and in which way; infinite where no number helps."""
    table = search.table
    best: Floats = np.full((len(at), len(at)), np.inf)
    ways = np.zeros((len(at), len(at)), dtype=np.int64)
    for w, way in enumerate(table.ways):
        slope = table.forward_row[w, c][at] + table.backward_row[w, c][at]
        fixed = table.forward_fixed[w, c][at] + table.backward_fixed[w, c][at]
        collective = table.reduce_bytes[w, c][at] * 2 * 2 * (way.tensor - 1) / way.tensor
        link = search.cluster.links.intra[search.cluster.devices[0].machine] or search.cluster.links.inter
        if link is not None:
            slope = slope + collective / link.bandwidth_bytes_per_s
            fixed = fixed + table.reduces[w, c][at] * 2 * 2 * (way.tensor - 1) * link.latency_s
        slope, fixed = slope[None] - slope[:, None], fixed[None] - fixed[:, None]
        room = period_s - fixed
        absent = table.missing[w, c][at][None] > table.missing[w, c][at][:, None]
        part = np.where(slope > 0, room / np.where(slope > 0, slope, 1.0), np.inf)  # rows that one replica can do
        if whole:
            part = np.where(np.isfinite(part), np.floor(part + 1e-9), part)
        possible = (room > 0) & ~absent & (part > 0)
        count = np.where(possible, np.ceil(rows / np.where(possible, part, 1.0) - 1e-9), np.inf)
        count = np.maximum(count, 1.0) * way.tensor
        better = count < best
        best, ways = np.where(better, count, best), np.where(better, w, ways)
    return best, ways


def fits_memory(
    search: Search,
    layout: Layout,
    at: Ints,
    i: int,
    later: Ints,
    count: Floats,
    ways: Ints,
    depth: Ints,
    reach: Ints,
) -> NDArray[np.bool_]:
    """Whether a stage from cut i to each later cut fits its devices, so deep in the pipeline."""
    table, rules = search.table, search.table.rules
    low, high = at[i], at[later]
    width = table.widths[ways]
    rows = (
        search.request.rows / max(1, search.request.micro_batches or 1) / layout.copies / np.maximum(count // width, 1)
    )
    spread = [table.parameters, table.gradients, table.saved, table.working]
    parameters, gradients, saved, working = (one[ways, 0, high] - one[ways, 0, low] for one in spread)
    flying = depth[later] + 1
    edges = (table.cut_bytes[low] + table.cut_bytes[high]) * rows
    needed = parameters + (1 + rules.optimizer_bytes_per_parameter_byte) * gradients
    needed = needed + rows * (working + flying * saved) + 2 * edges
    first = np.clip(reach - count, 0, layout.size - 1).astype(np.int64)
    limit = -layout.least_memory.of(first, np.maximum(np.clip(reach, 1, layout.size), first + 1).astype(np.int64))
    fits: NDArray[np.bool_] = needed <= limit
    return fits


def stretched(shape: Shape, devices: int, widths: list[int]) -> Shape:
    """The same stages with the devices that are left over shared out in proportion."""
    cuts, counts, ways, _ = shape
    units = [count // widths[way] for count, way in zip(counts, ways, strict=True)]
    factor = devices / sum(counts)
    grown = [max(1, int(unit * factor)) for unit in units]
    return cuts, tuple(unit * widths[way] for unit, way in zip(grown, ways, strict=True)), ways, 0
