"""The dynamic program: for a bound on the slowest stage, the cheapest suffixes of the chain.

For a bound P on the period (the slowest stage or channel), built from the last stage
to the first, over (first block i, first device position o, devices d of the first stage):

    x(stage + suffix) = x + f + b + c + c'         one micro-batch there and back
    y(stage + suffix) = max(y + f + c,  x(stage + suffix) + a)      with the all-reduces

and the step is (m - 1) P + max(x, y) (`formulas.py`). One label is kept a state, the one
with the smaller max(x, y). The bounds are scanned upwards. Cut positions are thinned
out on long chains, the refinement puts them back. Stages deep (`layers`) are told
apart only where that matters: when memory binds or their number is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .candidates import Search, pad
from .pricing import IMPOSSIBLE, Batch, Pricer
from .table import Floats, Ints, Layout, Table

Mask = NDArray[np.bool_]
Links = NDArray[np.int32]


@dataclass(frozen=True)
class StageCosts:
    """One run of devices: arrays (positions, positions) over [i, j) of the best way; infinite where impossible."""

    forward_s: Floats
    backward_s: Floats
    extra_s: Floats
    way: Ints
    fixed_bytes: Floats
    flying_bytes: Floats


def thinned(table: Table, most: int) -> Ints:
    """At most about `most` cut positions: in each slice of equal work and weight, the one with the fewest bytes."""
    every = np.arange(table.blocks + 1)
    if table.blocks <= most:
        return every
    work = table.forward_row[0, 0] + table.backward_row[0, 0] + table.forward_fixed[0, 0] + table.backward_fixed[0, 0]
    weight = table.parameters[0, 0]
    parts = [part / part[-1] for part in (work, weight, table.saved[0, 0]) if part[-1] > 0]
    measure = 0.6 * parts[0] + 0.4 * np.mean(parts, axis=0) if parts else every / table.blocks
    slices = np.minimum((measure[1:-1] * (most - 1)).astype(np.int64), most - 2)
    order = np.lexsort((every[1:-1], table.cut_bytes[1:-1], slices))
    first = np.ones(len(order), dtype=bool)
    first[1:] = slices[order][1:] != slices[order][:-1]
    chosen = np.sort(every[1:-1][order[first]])
    return np.concatenate([[0], chosen, [table.blocks]])


class Program:
    """The dynamic program under one layout for one number of micro-batches."""

    def __init__(self, search: Search, pricer: Pricer, positions: Ints, layers: int) -> None:
        self.search, self.pricer, self.layout = search, pricer, pricer.layout
        self.positions, self.layers = positions, layers
        self.costs: dict[tuple[object, ...], StageCosts] = {}
        size = len(positions)
        self.low, self.high = np.repeat(positions, size), np.tile(positions, size)
        self.pairs = np.nonzero(self.low < self.high)[0]

    def stage(self, first: int, count: int) -> StageCosts:
        """Costs of every interval on positions [first, first + count), shared between equal runs of devices."""
        layout = self.layout
        if layout.uniform:
            spans = bool(layout.spans(np.array([first]), np.array([count]))[0])
            port = float(layout.slowest_port.of(np.array([first]), np.array([first + count]))[0])
            key: tuple[object, ...] = (count, spans, port)
        else:
            key = (count, first)
        if key not in self.costs:
            self.costs[key] = self.work_out(first, count)
        return self.costs[key]

    def work_out(self, first: int, count: int) -> StageCosts:
        """Price every interval in every way and keep the fastest that has a chance to fit."""
        pricer, table, layout = self.pricer, self.search.table, self.layout
        low, high = self.low[self.pairs][:, None], self.high[self.pairs][:, None]
        size = len(self.positions)
        best: list[Floats] = [np.full(size * size, np.inf) for _ in range(3)]
        fixed, flying = np.full(size * size, np.inf), np.zeros(size * size)
        chosen = np.zeros(size * size, dtype=np.int64)
        limit = float(-layout.least_memory.of(np.array([first]), np.array([first + count]))[0])
        optimizer = 1 + table.rules.optimizer_bytes_per_parameter_byte
        for index, way in enumerate(table.ways):
            if count % way.tensor:
                continue
            shape = low.shape
            ways, counts = np.full(shape, index), np.full(shape, count)
            starts, stops = np.full(shape, first), np.full(shape, first + count)
            width = np.full(shape, way.tensor)
            replicas = np.full(shape, count // way.tensor * layout.copies)
            rows = pricer.part_rows(replicas)
            batch = Batch(np.concatenate([low, high], axis=1), counts, ways, np.zeros(len(low), dtype=np.int64))
            nothing = np.zeros(shape, dtype=bool)
            forward, backward, parameters, gradients, saved, working = pricer.computing(
                batch, low, high, starts, stops, rows, nothing, width
            )
            spans = (replicas > 1) & layout.spans(starts, counts)
            _, extra = pricer.reducing(batch, low, high, starts, stops, rows, replicas, gradients, backward, spans)
            edges = (table.cut_bytes[low] + table.cut_bytes[high]) * rows
            held = parameters + optimizer * gradients + rows * working + 2 * edges
            moving = rows * saved + (table.cut_bytes[low] * rows if way.recompute else 0.0)
            possible = (forward < IMPOSSIBLE) & (held + moving <= limit)
            at = self.pairs
            price = np.where(possible, forward + backward + extra / pricer.micro_batches, np.inf)[:, 0]
            old = best[0][at] + best[1][at] + best[2][at] / pricer.micro_batches
            better = price < old
            where = at[better]
            for target, source in zip((*best, fixed, flying), (forward, backward, extra, held, moving), strict=True):
                target[where] = source[:, 0][better]
            chosen[where] = index
        grid = (size, size)
        return StageCosts(
            best[0].reshape(grid),
            best[1].reshape(grid),
            best[2].reshape(grid),
            chosen.reshape(grid),
            fixed.reshape(grid),
            flying.reshape(grid),
        )

    def boundaries(self, at: int) -> tuple[Floats, Floats]:
        """Seconds there and back over the boundary at device position `at`: (left devices, right devices, cut)."""
        pricer, table, layout = self.pricer, self.search.table, self.layout
        left, right = np.meshgrid(np.arange(1, at + 1), np.arange(1, layout.size - at + 1), indexing="ij")
        shape = left.shape
        width = np.ones((left.size, 2), dtype=np.int64)
        seconds, late, pairs = pricer.boundary(
            left.reshape(-1, 1), right.reshape(-1, 1), np.full((left.size, 1), at), width
        )
        grids = []
        for rows, whole in ((table.cut_bytes, table.cut_whole), (table.back_bytes, table.back_whole)):
            moved, fixed = rows[self.positions] * pricer.micro_rows, whole[self.positions]
            times = seconds * (moved + pairs * fixed) + late * (moved + fixed > 0)
            grids.append(times.reshape(*shape, len(self.positions)))
        return grids[0], grids[1]

    def run(self, period_s: float, flying_cap: int) -> tuple[Batch, Floats] | None:
        """The best plans with no stage or channel above the period, with (x, y) maxima; `None` when there are none."""
        layout, size = self.layout, len(self.positions)
        devices, layers = layout.size, self.layers
        # labels by (layer, position, device position, devices of the first stage)
        shape = (layers, size, devices + 1, devices + 1)
        x, y = np.full(shape, np.inf), np.full(shape, np.inf)
        came = np.full((*shape, 2), -1, dtype=np.int32)  # next position, devices of the next stage
        layered = layers > 1
        flying = np.minimum(np.arange(1, layers + 1), flying_cap)[:, None, None]
        limits = [
            [float(-layout.least_memory.of(np.array([o]), np.array([o + d]))[0]) for d in range(1, devices - o + 1)]
            for o in range(devices)
        ]
        boundary = [self.boundaries(at) for at in range(devices)] if devices > 1 else []
        for o in range(devices - 1, -1, -1):
            for d in range(1, devices - o + 1):
                cost = self.stage(o, d)
                through = cost.forward_s + cost.backward_s
                allowed = through <= period_s
                if not allowed.any():
                    continue
                end = o + d
                # the last stage
                last = allowed[:, -1]
                if layout.limited:
                    last = last & (cost.fixed_bytes[:, -1] + cost.flying_bytes[:, -1] <= limits[o][d - 1])
                x[0, :, o, d] = np.where(last, through[:, -1], np.inf)
                y[0, :, o, d] = np.where(last, through[:, -1] + cost.extra_s[:, -1], np.inf)
                came[0, :, o, d, 0] = np.where(last, size - 1, -1)
                came[0, :, o, d, 1] = 0
                if end >= devices:
                    continue
                self.extend(
                    o, d, cost, through, allowed, boundary[end], period_s, flying, limits[o][d - 1], x, y, came, layered
                )
        return self.collect(x, y, came)

    def extend(
        self,
        o: int,
        d: int,
        cost: StageCosts,
        through: Floats,
        allowed: Mask,
        boundary: tuple[Floats, Floats],
        period_s: float,
        flying: Ints,
        limit: float,
        x: Floats,
        y: Floats,
        came: Links,
        layered: bool,
    ) -> None:
        """Put a stage on positions [o, o + d) before every suffix that starts at o + d."""
        end = o + d
        there, back = boundary[0][d - 1], boundary[1][d - 1]  # (devices of the next stage, cut)
        ok = (np.maximum(there, back) <= period_s).T[None]  # (1, cut, devices)
        next_x = x[:, :, end, 1 : there.shape[0] + 1] + (there + back).T[None]
        next_y = y[:, :, end, 1 : there.shape[0] + 1] + there.T[None]
        value = np.where(ok, np.maximum(next_x, next_y), np.inf)
        pick = np.argmin(value, axis=2)[..., None]
        best_x = np.take_along_axis(next_x, pick, axis=2)[..., 0]
        best_y = np.take_along_axis(next_y, pick, axis=2)[..., 0]
        best_x = np.where(np.isfinite(np.take_along_axis(value, pick, axis=2)[..., 0]), best_x, np.inf)
        fits = allowed[None]
        if self.layout.limited:
            deeper = flying if not layered else np.minimum(flying + 1, np.max(flying))
            fits = fits & (cost.fixed_bytes[None] + deeper * cost.flying_bytes[None] <= limit)
        new_x = np.where(fits, through[None] + best_x[:, None, :], np.inf)
        new_y = np.maximum(best_y[:, None, :] + cost.forward_s[None], new_x + cost.extra_s[None])
        total = np.maximum(new_x, new_y)
        cut = np.argmin(total, axis=2)[..., None]
        found = np.take_along_axis(total, cut, axis=2)[..., 0]
        chosen_x = np.take_along_axis(new_x, cut, axis=2)[..., 0]
        chosen_y = np.take_along_axis(new_y, cut, axis=2)[..., 0]
        following = np.take_along_axis(pick[..., 0], cut[..., 0], axis=1) + 1
        source = slice(0, len(x) - 1) if layered else slice(0, 1)
        target = slice(1, len(x)) if layered else slice(0, 1)
        old = np.maximum(x[target, :, o, d], y[target, :, o, d])
        better = found[source] < old
        x[target, :, o, d] = np.where(better, chosen_x[source], x[target, :, o, d])
        y[target, :, o, d] = np.where(better, chosen_y[source], y[target, :, o, d])
        came[target, :, o, d, 0] = np.where(better, cut[source, :, 0], came[target, :, o, d, 0])
        came[target, :, o, d, 1] = np.where(better, following[source], came[target, :, o, d, 1])

    def collect(self, x: Floats, y: Floats, came: Links) -> tuple[Batch, Floats] | None:
        """The plans that start at block 0, the best for each device position and layer."""
        total = np.maximum(x[:, 0], y[:, 0])  # (layer, device position, devices)
        plans, values, skips = [], [], []
        for layer in range(total.shape[0]):
            for o in range(self.layout.size):
                for d in np.argsort(total[layer, o], kind="stable")[:2].tolist():
                    if np.isfinite(total[layer, o, d]):
                        plans.append(self.trace(came, layer, o, d))
                        values.append(float(total[layer, o, d]))
                        skips.append(o)
        if not plans:
            return None
        return pad(plans, skips), np.array(values)

    def trace(
        self, came: Links, layer: int, o: int, d: int
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Cuts, devices and ways of a plan, followed from its first stage to its last."""
        at, cuts, counts, ways = 0, [0], [], []
        while True:
            following, devices = came[layer, at, o, d].tolist()
            ways.append(int(self.stage(o, d).way[at, following]))
            counts.append(d)
            cuts.append(int(self.positions[following]))
            if devices == 0:
                return tuple(cuts), tuple(counts), tuple(ways)
            at, o, d = following, o + d, devices
            layer = max(layer - 1, 0) if self.layers > 1 else 0


def fastest_period(search: Search, layout: Layout, rows: float) -> float:
    """Forward and backward of one micro-batch, spread over all devices of the layout as they like."""
    table = search.table
    slowness = []
    for c in range(len(table.classes)):
        each = []
        for w, way in enumerate(table.ways):
            if table.missing[w, c, -1] == 0:
                seconds = table.forward_row[w, c, -1] + table.backward_row[w, c, -1]
                each.append(way.tensor * seconds)
        slowness.append(min(each, default=np.inf))
    speed = sum(1.0 / slowness[c] for c in layout.device_class.tolist() if slowness[c] > 0)
    return rows / layout.copies / speed if speed > 0 else 0.0


def scan(search: Search, layout: Layout, micro_batches: int, most: int, layers: int, rounds: int) -> list[Batch]:
    """Plans for a scan of bounds on the period, from tight to loose."""
    pricer = search.pricer(layout, micro_batches)
    program = Program(search, pricer, thinned(search.table, most), layers)
    tightest = fastest_period(search, layout, pricer.micro_rows)
    if micro_batches == 1 or tightest <= 0:
        ratios = [1e9]
    else:
        ratios = [1.02, 1.06, 1.12, 1.22, 1.38, 1.65, 2.1, 3.0, 5.0][:rounds]
    found = []
    best = np.inf
    for ratio in ratios:
        period = max(tightest, 1e-12) * ratio if micro_batches > 1 else IMPOSSIBLE / 2
        if (micro_batches - 1) * period > min(best, search.least_s):
            break
        answer = program.run(period, micro_batches)
        if answer is not None:
            batch, values = answer
            best = min(best, float(values.min()) + (micro_batches - 1) * period)
            found.append(batch)
    return found
