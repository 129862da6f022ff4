"""The dynamic program: for a bound on the slowest stage, the cheapest suffixes of the chain.

For a bound P on the period (the slowest stage or channel), built from the last stage
to the first, over (first block i, first device position o, devices d of the first stage):

    x(stage + suffix) = x + f + b + c + c'         one micro-batch there and back
    y(stage + suffix) = max(y + f + c (+ a),  x(stage + suffix) + a)      with the all-reduces
                        (+ a where all of them share the machines' ports)

and the step is about (m - 1) P + y; y is never below x. A suffix of k stages must
have x <= K P for the K micro-batches it may keep in flight, so k is part of the state; and
since 1F1B alternates strictly, two neighbours and what lies between them there and back
must take no more than 3 P (2 P where S - s are in flight). One label is kept a state, the
one with the least y. Which bounds are run, `scan.py` says.
Cut positions are thinned out on long chains; the refinement puts them back.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from .candidates import Search, pad
from .pricing import IMPOSSIBLE, Batch, Pricer
from .table import Floats, Ints, Layout, Table

Mask = NDArray[np.bool_]
Links = NDArray[np.int32]
Singles = NDArray[np.float32]  # half the memory to go through; its plans are priced again in full

Joined = tuple[Singles, Singles, Singles, Ints]

FAR = np.float32(np.inf)


@dataclass(frozen=True)
class StageCosts:
    """One run of devices, one way: arrays (positions, positions) over [i, j); infinite where impossible."""

    forward_s: Floats
    backward_s: Floats
    extra_s: Floats
    turn_s: Floats  # all-reduce that waits for those of later stages, where all share the machines' ports
    fixed_bytes: Floats
    flying_bytes: Floats


@dataclass(frozen=True)
class Merged:
    """The best of all ways: arrays (…, layers or 1, positions, positions); a layer more is a stage more to the end."""

    forward_s: Singles
    through_s: Singles
    extra_s: Singles
    turn_s: Singles
    way: Ints


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
    """The dynamic program under one layout for one number of micro-batches.

    `layers` is the most stages told apart; a suffix of k stages may keep `depth(k)`
    micro-batches in flight, so a micro-batch may take at most `depth(k)` periods there and back.
    """

    def __init__(self, search: Search, pricer: Pricer, positions: Ints, layers: int) -> None:
        self.search, self.pricer, self.layout = search, pricer, pricer.layout
        self.positions, self.layers = positions, layers
        self.crowded = pricer.layout.shared_groups or not pricer.layout.in_line
        self.set_order(gpipe=search.request.schedule == "gpipe")
        self.costs: dict[tuple[object, ...], list[StageCosts]] = {}
        self.merged: dict[tuple[object, ...], Merged] = {}
        self.stacks: dict[tuple[int, bool], Merged] = {}
        self.edges: dict[int, tuple[Singles, Singles]] = {}
        size = len(positions)
        self.low, self.high = np.repeat(positions, size), np.tile(positions, size)
        self.pairs = np.nonzero(self.low < self.high)[0]

    def set_order(self, gpipe: bool) -> None:
        """Set what the schedule allows: how deep, how tight neighbours, how many micro-batches are held."""
        stages, micro_batches = np.arange(1, self.layers + 1), self.pricer.micro_batches
        multiplicity = 1 if self.search.request.in_flight == 1 else 2
        self.gpipe = gpipe
        free = gpipe or micro_batches == 1
        self.channel = 0.5 if free and micro_batches > 1 else 1.0  # share of the period that a channel may take
        self.pair = IMPOSSIBLE if free else multiplicity + 1.0
        self.depth = np.where(free, IMPOSSIBLE, stages if multiplicity == 1 else 2.0 * stages - 1)
        least = 2 * stages - 1 if self.search.request.in_flight == 2 else stages
        self.held = np.full(self.layers, micro_batches) if gpipe else np.minimum(micro_batches, least)

    def stage(self, first: int, count: int) -> Merged:
        """Costs of every interval on positions [first, first + count), shared between equal runs of devices."""
        layout = self.layout
        limit = float(-layout.least_memory.of(np.array([first]), np.array([first + count]))[0])
        if layout.uniform:
            spans = bool(layout.spans(np.array([first]), np.array([count]))[0])
            port = float(layout.slowest_port.of(np.array([first]), np.array([first + count]))[0])
            leaves = self.pricer.leaves_machine(first, count)
            key: tuple[object, ...] = (count, spans, port, leaves)
        else:
            key = (count, first)
        if key not in self.costs:
            self.costs[key] = [self.one_way(first, count, index) for index in range(len(self.search.table.ways))]
        whole = (*key, limit, self.gpipe)
        if whole not in self.merged:
            self.merged[whole] = self.merge(self.costs[key], limit)
        return self.merged[whole]

    def merge(self, ways: list[StageCosts], limit: float) -> Merged:
        """For each number of stages to the end, the fastest way that fits the memory, interval by interval."""
        held = self.held if self.layout.limited else self.held[:1]
        grid = ways[0].forward_s.shape
        best = [np.full((len(held), *grid), np.inf) for _ in range(4)]
        way = np.zeros((len(held), *grid), dtype=np.int64)
        price = np.full((len(held), *grid), np.inf)
        for index, cost in enumerate(ways):
            own = cost.forward_s + cost.backward_s + cost.extra_s / self.pricer.micro_batches
            fits = np.isfinite(own)[None]
            if self.layout.limited:
                fits = fits & (cost.fixed_bytes[None] + held[:, None, None] * cost.flying_bytes[None] <= limit)
            better = fits & (own[None] < price)
            price = np.where(better, own[None], price)
            way = np.where(better, index, way)
            for at, array in enumerate((cost.forward_s, cost.backward_s, cost.extra_s, cost.turn_s)):
                best[at] = np.where(better, array[None], best[at])
        forward, backward, extra, turn = (one.astype(np.float32) for one in best)
        return Merged(forward, forward + backward, extra, turn, way)

    def one_way(self, first: int, count: int, index: int) -> StageCosts:
        """Price every interval in one way; infinite where it is impossible."""
        pricer, table, layout = self.pricer, self.search.table, self.layout
        way = table.ways[index]
        size = len(self.positions)
        grid = (size, size)
        arrays = [np.full(size * size, np.inf) for _ in range(6)]
        if count % way.tensor == 0:
            low, high = self.low[self.pairs][:, None], self.high[self.pairs][:, None]
            shape = low.shape
            counts, ways, width = np.full(shape, count), np.full(shape, index), np.full(shape, way.tensor)
            starts, stops = np.full(shape, first), np.full(shape, first + count)
            replicas = np.full(shape, count // way.tensor * layout.copies)
            rows = pricer.part_rows(replicas)
            batch = Batch(np.concatenate([low, high], axis=1), counts, ways, np.zeros(len(low), dtype=np.int64))
            forward, backward, parameters, gradients, saved, working, slowest = pricer.computing(
                batch, low, high, starts, stops, rows, np.zeros(shape, dtype=bool), width
            )
            spans = (replicas > 1) & layout.spans(starts, counts)
            forward, backward = pricer.exchanging(low, high, starts, stops, replicas, spans, forward, backward)
            takes, extra = pricer.reducing(ways, low, high, starts, stops, rows, replicas, gradients, slowest, spans)
            edges = (table.cut_bytes[low] + table.cut_bytes[high]) * rows
            held = parameters + (1 + table.rules.optimizer_bytes_per_parameter_byte) * gradients
            held = held + rows * working + 2 * edges
            flying = rows * saved + (table.cut_bytes[low] * rows if way.recompute else 0.0)
            forward = np.where(forward < IMPOSSIBLE, forward, np.inf)
            turn = np.where(spans & self.crowded, takes, 0.0)
            for target, source in zip(arrays, (forward, backward, extra, turn, held, flying), strict=True):
                target[self.pairs] = source[:, 0]
        forward, backward, extra, turn, held, flying = (array.reshape(grid) for array in arrays)
        return StageCosts(forward, backward, extra, turn, held, flying)

    def stack(self, o: int) -> Merged:
        """The costs of 1, 2, … devices from position o on: arrays (devices, layers or 1, positions, positions)."""
        key = (o, self.gpipe and self.layout.limited)
        if key not in self.stacks:
            columns = [self.stage(o, d) for d in range(1, self.layout.size - o + 1)]
            names = [one.name for one in fields(Merged)]
            self.stacks[key] = Merged(*(np.stack([getattr(column, name) for column in columns]) for name in names))
        return self.stacks[key]

    def boundaries(self, at: int) -> tuple[Singles, Singles]:
        """Seconds there and back over the boundary at device position `at`: (cut, left devices, right devices)."""
        if at in self.edges:
            return self.edges[at]
        pricer, table, layout = self.pricer, self.search.table, self.layout
        left, right = np.meshgrid(np.arange(1, at + 1), np.arange(1, layout.size - at + 1), indexing="ij")
        width = np.ones((left.size, 2), dtype=np.int64)
        seconds, late, pairs = pricer.boundary(
            left.reshape(-1, 1), right.reshape(-1, 1), np.full((left.size, 1), at), width
        )
        grids = []
        for rows, whole in ((table.cut_bytes, table.cut_whole), (table.back_bytes, table.back_whole)):
            moved, fixed = rows[self.positions] * pricer.micro_rows, whole[self.positions]
            times = seconds * (moved + pairs * fixed) + late * (moved + fixed > 0)
            grids.append(np.ascontiguousarray(times.T, dtype=np.float32).reshape(len(self.positions), *left.shape))
        self.edges[at] = grids[0], grids[1]
        return self.edges[at]

    def run(self, period_s: float, times: int = 1) -> tuple[Batch, Singles] | None:
        """The best plans with no stage or channel above the period, with their y; `None` when there are none.

        With `times` micro-batches, y counts them all on each stage, as where there are too
        few for any rhythm: x(stage + suffix) is then no less than times (f + b).
        """
        size, devices = len(self.positions), self.layout.size
        shape = (self.layers, size, devices + 1, devices + 1)  # layer, position, device position, devices
        x, y, t = (
            np.full(shape, np.inf, dtype=np.float32) for _ in range(3)
        )  # t: forward and backward of the first stage
        came = np.full((*shape, 3), -1, dtype=np.int32)  # next position, devices of the next stage, way
        beside = (devices, self.layers, size, devices)  # device position, layer, position, devices to the left
        join_x, join_y, join_t = (np.full(beside, np.inf, dtype=np.float32) for _ in range(3))
        joins: Joined = join_x, join_y, join_t, np.zeros(beside, dtype=np.int64)
        for o in range(devices - 1, -1, -1):
            cost = self.stack(o)
            self.last_stage(o, cost, period_s, times, x, y, t, came)
            if o + 1 < devices and self.layers > 1:
                self.extend(o, cost, period_s, times, joins, x, y, t, came)
            if o > 0:
                found = self.join(o, period_s, x, y, t)
                part = o, slice(0, len(found[0])), slice(None), slice(0, o)
                for target, values in zip(joins[:3], found[:3], strict=True):
                    target[part] = values
                joins[3][part] = found[3]
        return self.collect(y, came)

    def last_stage(
        self, o: int, cost: Merged, period_s: float, times: int, x: Singles, y: Singles, t: Singles, came: Links
    ) -> None:
        """Suffixes of one stage on positions [o, o + d), for every d."""
        through = cost.through_s[:, 0, :, -1]
        fits = through <= period_s
        stop = through.shape[0] + 1
        y[0, :, o, 1:stop] = np.where(fits, times * through + cost.extra_s[:, 0, :, -1], FAR).T
        x[0, :, o, 1:stop] = np.where(fits, times * through, FAR).T
        t[0, :, o, 1:stop] = np.where(fits, through, FAR).T
        came[0, :, o, 1:stop, 0] = len(self.positions) - 1
        came[0, :, o, 1:stop, 1] = 0
        came[0, :, o, 1:stop, 2] = cost.way[:, 0, :, -1].T

    def join(
        self, at: int, period_s: float, x: Singles, y: Singles, t: Singles
    ) -> tuple[Singles, Singles, Singles, Ints]:
        """For each number of devices to the left of position `at`, the best suffix behind the boundary.

        Arrays (layer, position, left devices), of no more layers than there are devices behind:
        x, y and t with the boundary, and the devices of the next stage.
        """
        there, back = self.boundaries(at)
        right = there.shape[2]
        part = slice(0, right), slice(None), at, None, slice(1, right + 1)
        next_t = t[part] + (there + back)
        closed = (np.maximum(there, back) > self.channel * period_s) | (next_t > self.pair * period_s)
        next_y, next_x = y[part] + there, x[part] + (there + back)
        np.putmask(next_y, closed, FAR)
        np.putmask(next_x, closed, FAR)
        pick = np.argmin(np.maximum(next_x, next_y), axis=3)
        at = pick.reshape(-1) + np.arange(pick.size) * right
        best_x, best_y, best_t = (one.reshape(-1)[at].reshape(pick.shape) for one in (next_x, next_y, next_t))
        return best_x, best_y, best_t, pick + 1

    def extend(
        self,
        o: int,
        cost: Merged,
        period_s: float,
        times: int,
        joins: Joined,
        x: Singles,
        y: Singles,
        t: Singles,
        came: Links,
    ) -> None:
        """Put a stage on positions [o, o + d), for every d, before every suffix that starts at o + d."""
        stop = self.layout.size - o - 1  # devices of the new stage: 1 to stop
        layers = min(self.layers - 1, stop)
        each = np.arange(stop)
        best_x, best_y, best_t, following = (join[o + 1 + each, :layers, :, each] for join in joins)
        if not np.isfinite(best_y).any():
            return
        part = slice(1, layers + 1) if cost.through_s.shape[1] > 1 else slice(0, 1)
        through, forward = cost.through_s[:stop, part], cost.forward_s[:stop, part]
        ceiling = np.full(best_x.shape, period_s, dtype=np.float32)  # of `through`, by (devices, layer, cut)
        if self.pricer.micro_batches > 1:
            deepest = (self.depth[1 : layers + 1] * period_s).astype(np.float32)
            ceiling = np.minimum(ceiling, np.minimum(self.pair * period_s - best_t, deepest[None, :, None] - best_x))
        new_y = best_y[:, :, None, :] + (forward + cost.turn_s[:stop, part])
        np.maximum(new_y, best_x[:, :, None, :] + (through + cost.extra_s[:stop, part]), out=new_y)
        if times > 1:
            np.maximum(new_y, times * through + cost.extra_s[:stop, part], out=new_y)
        np.putmask(new_y, through > ceiling[:, :, None, :], FAR)
        cut = np.argmin(new_y, axis=3)  # (devices, layer, position)
        found = new_y.reshape(-1)[cut.reshape(-1) + np.arange(cut.size) * cut.shape[2]].reshape(cut.shape)
        target_y = np.moveaxis(y[1 : layers + 1, :, o, 1 : stop + 1], 2, 0)  # views of that shape
        better = found < target_y
        if not better.any():
            return
        devices, layer, position = np.nonzero(better)
        at = cut[better]
        target_y[better] = found[better]
        own_layer = layer if through.shape[1] > 1 else np.zeros_like(layer)
        own = through[devices, own_layer, position, at]
        np.moveaxis(t[1 : layers + 1, :, o, 1 : stop + 1], 2, 0)[better] = own
        np.moveaxis(x[1 : layers + 1, :, o, 1 : stop + 1], 2, 0)[better] = np.maximum(
            times * own, own + best_x[devices, layer, at]
        )
        chosen = np.stack(
            [at, following[devices, layer, at], cost.way[:stop, part][devices, own_layer, position, at]], axis=-1
        )
        np.moveaxis(came[1 : layers + 1, :, o, 1 : stop + 1], 2, 0)[better] = chosen

    def collect(self, y: Singles, came: Links) -> tuple[Batch, Singles] | None:
        """The plans that start at block 0, the best for each layer and device position."""
        total = y[:, 0]  # (layer, device position, devices)
        plans, values, skips = [], [], []
        for layer in range(total.shape[0]):
            best = total[layer].min(axis=1)
            for o in np.argsort(best, kind="stable")[:3].tolist():
                d = int(np.argmin(total[layer, o]))
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
            following, devices, way = came[layer, at, o, d].tolist()
            ways.append(way)
            counts.append(d)
            cuts.append(int(self.positions[following]))
            if layer == 0:
                return tuple(cuts), tuple(counts), tuple(ways)
            at, o, d, layer = following, o + d, devices, layer - 1


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
