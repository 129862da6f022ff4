"""No plan is faster: a lower bound on the step of every plan, from a relaxed problem.

What a stage of blocks [i, j) on d devices cannot avoid, whatever the rest of the plan:

    its compute for all rows, on d devices at once               A / d
    its gradients, reduced over its replicas by a ring; the ring
    leaves a machine where d devices do not fit into one         2 (r - 1) / r · G / bandwidth
    what crosses its cuts, through the ports of d devices        C / d
    the way of one micro-batch through all stages before it,
    there and back                                               U

For a step T every stage needs U + max(A / d + what its reduction adds, C / d) <= T. Stages are
put together from the first to the last, for each cut position and number of devices in
use the one with the least U; T is too short when no chain of stages reaches the end.
Where that is too much work, the fewest devices of each stage follow from T in closed
form, without U. Bisection finds the longest T that is too short.

Relaxed are: everything between machines but rings and single-device machines, memory,
the order of work, latency of transfers, tensor collectives, and kinds of device (all as
good as the best for each block; the harmonic bound on mixed kinds holds beside it).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from .candidates import Search
from .table import Floats, Ints, prefix

MOST_STATES = 1_100_000  # (cut positions times devices) squared up to which U is kept
MOST_CELLS = 400  # cut positions told apart; a stage then has at least the cells that lie inside it
BLOCK = 32  # first cells worked out together: what fits the cache
STEPS = 8  # of the bisection


def lower_bound(search: Search) -> float:
    """Seconds below which no step can be by compute alone: all work, spread as one likes over all devices."""
    table, rows = search.table, search.request.rows
    slowness = []
    for c in range(len(table.classes)):
        blockwise = np.full(table.blocks, np.inf)
        for w, way in enumerate(table.ways):
            each = way.tensor * (np.diff(table.forward_row[w, c]) + np.diff(table.backward_row[w, c]))
            absent = np.diff(table.missing[w, c]) > 0
            blockwise = np.minimum(blockwise, np.where(absent, np.inf, each))
        slowness.append(float(blockwise.sum()))
    index = {one: at for at, one in enumerate(table.classes)}
    used = [slowness[index[(device.kind, device.speed)]] for device in search.cluster.devices]
    if min(used) <= 0:
        return 0.0
    return rows / math.fsum(1.0 / one for one in used)


def tight_bound(search: Search, least_s: float, step_s: float) -> float:
    """Seconds below which no step can be; between `least_s`, a bound that is known, and `step_s`, a plan that is."""
    if not 0 < least_s < step_s:
        return least_s
    relaxed = Relaxed(search)
    low, high = least_s, step_s
    for _ in range(STEPS):
        middle = (low + high) / 2
        if relaxed.reaches(middle):
            high = middle
        else:
            low = middle
    return low


@dataclass(frozen=True)
class Wire:
    """Seconds a byte at best: a ring or a port inside a machine, a ring between machines; devices of a machine."""

    inside_s: float
    between_s: float
    latency_s: float
    per_machine: int


class Relaxed:
    """The relaxed problem; arrays (ways, cells + 1) are prefix sums over cells of the chain, for all rows.

    `work`: device-seconds, and seconds whatever the rows. `lag`, by micro-batch count: the
    same without the backward of the last micro-batch, which a reduction may overlap.
    `cut`: seconds of one port at each cut position, the larger of both ways; `both`: their sum.
    """

    def __init__(self, search: Search) -> None:
        table, request = search.table, search.request
        self.devices, self.overlap = len(search.cluster.devices), table.rules.overlap
        fixed, rows = request.micro_batches, request.rows
        self.most, self.fewest = (fixed, fixed) if fixed else (rows, 1)
        self.alone = 1 if request.undivided_alone else self.fewest
        self.wire, self.widths = wire(search), table.widths
        self.whole = table.blocks <= MOST_CELLS
        every = np.arange(table.blocks + 1)
        at = every if self.whole else np.unique(np.linspace(0, table.blocks, MOST_CELLS + 1).astype(np.int64))
        absent = np.diff(table.missing, axis=2) > 0

        def least(sums: Floats) -> Floats:
            """The least of all kinds, block by block."""
            each = np.where(absent, np.inf, np.diff(sums, axis=2)).min(axis=1)
            return prefix(np.where(np.isfinite(each), each, 0.0))[:, at]

        def seconds(micro_batches: int, backwards: float) -> tuple[Floats, Floats]:
            ahead, behind = table.forward_row + backwards / micro_batches * table.backward_row, table.backward_fixed
            stays = micro_batches * table.forward_fixed + backwards * behind
            return least(ahead * (self.widths * float(rows))[:, None, None]), least(stays)

        counts = {self.fewest, self.alone}
        self.work = {count: seconds(count, count) for count in counts}
        self.lag = {count: seconds(count, count - 1) for count in counts}
        self.way = seconds(1, 1)
        self.gradients, self.missing = least(table.gradients), prefix(absent.all(axis=1).astype(float))[:, at]
        there, back = (self.crossing(search, gradients) * rows * self.wire.inside_s for gradients in (False, True))
        self.cut, self.both = np.maximum(there, back)[at], (there + back)[at]
        self.cells = len(at) - 1
        self.memo: dict[int, tuple[Floats, Floats]] = {}

    def crossing(self, search: Search, gradients: bool) -> Floats:
        """Bytes a row that pass each cut position between the stages beside it, whatever the stages are."""
        table = search.table
        found = (table.back_bytes if gradients else table.cut_bytes).copy()
        if not table.rules.forwarded_skips:  # what skips a stage goes past it
            found[:] = 0.0
            for one in table.chain.crossings:
                if one.producer_block + 1 in one.consumer_blocks and (one.gradient or not gradients):
                    found[one.producer_block + 1] += one.bytes_per_row
        found[0] = found[-1] = 0.0
        return found

    def reaches(self, step_s: float) -> bool:
        """Whether some chain of stages may take no longer."""
        if self.alone != self.fewest and self.stage_alone(step_s):
            return True
        if self.whole and (self.cells * self.devices) ** 2 <= MOST_STATES:
            return self.chain_reaches(step_s)
        return self.fewest_devices(step_s) <= self.devices

    def stage_alone(self, step_s: float) -> bool:
        """Whether all blocks as one stage, the batch undivided, may take no longer."""
        counts = np.arange(1, self.devices + 1)
        return bool((self.stage_s(0, np.array([self.cells]), counts, self.alone) <= step_s).any())

    def stage_s(self, first: int, stop: Ints, counts: Ints, micro_batches: int) -> Floats:
        """Least seconds of stages [first, stop) on so many devices, (counts, stops), over all ways."""
        best = np.full((len(counts), len(stop)), np.inf)
        count = counts[:, None].astype(float)
        for w, width in enumerate(self.widths.tolist()):
            (work, fixed), (lag, lag_fixed) = (
                [one[w, stop] - one[w, first] for one in pair[micro_batches]] for pair in (self.work, self.lag)
            )
            gradients = self.gradients[w, stop] - self.gradients[w, first]
            replicas = np.maximum(count / width, 1.0)
            speed = np.where(count > self.wire.per_machine, self.wire.between_s, self.wire.inside_s)
            reduce = 2 * (replicas - 1) * (gradients / replicas * speed + self.wire.latency_s * (gradients > 0))
            own = work / count + fixed
            whole = np.maximum(own, lag / count + lag_fixed + reduce) if self.overlap else own + reduce
            possible = (counts[:, None] % width == 0) & (self.missing[w, stop] == self.missing[w, first])
            best = np.minimum(best, np.where(possible, whole, np.inf))
        return best

    def way_s(self, first: int, stop: Ints, counts: Ints) -> Floats:
        """Least seconds of one micro-batch through stages [first, stop) and their next cut, there and back."""
        work, fixed = ((one[:, stop] - one[:, [first]]).min(axis=0) for one in self.way)
        return np.asarray((work + self.both[stop]) / self.most / counts[:, None] + fixed)

    def chain_reaches(self, step_s: float) -> bool:
        """Whether a chain of stages reaches the end; `way` is the least U by (cell, devices in use)."""
        size, devices = self.cells, self.devices
        way = np.full((size + 1, devices + 1), np.inf)
        way[0, 0] = 0.0
        counts = np.arange(1, devices + 1)
        for i in range(size):
            if not np.isfinite(way[i]).any():
                continue
            stop = np.arange(i + 1, size + 1)
            cut = np.maximum(self.cut[i], self.cut[stop]) / counts[:, None]
            need, more = self.known(i, stop, counts, cut)
            for used in np.nonzero(np.isfinite(way[i, :devices]))[0].tolist():
                left = devices - used
                fits = need[:left] <= step_s - way[i, used]
                reached = way[i + 1 :, used + 1 :]
                np.minimum(reached, np.where(fits, way[i, used] + more[:left], np.inf).T, out=reached)
        return bool(np.isfinite(way[size]).any())

    def known(self, i: int, stop: Ints, counts: Ints, cut: Floats) -> tuple[Floats, Floats]:
        """What stages from cell i on need, and what they add to the way; worked out once for all steps."""
        if i not in self.memo:
            need = np.maximum(self.stage_s(i, stop, counts, self.fewest), cut)
            self.memo[i] = need, self.way_s(i, stop, counts)
        return self.memo[i]

    def fewest_devices(self, step_s: float) -> float:
        """The fewest devices of any chain of stages that may take no longer; infinite for none."""
        size = self.cells
        total = np.full(size + 1, np.inf)
        total[0] = 0.0
        for start in range(0, size, BLOCK):
            rows = np.arange(start, min(start + BLOCK, size))
            every = self.stage_devices(rows[:, None], np.arange(start + 1, size + 1)[None], step_s)
            for i in rows.tolist():
                need = total[i] + every[i - start, i - start :]
                np.minimum(total[i + 1 :], need, out=total[i + 1 :])
                if not self.whole:  # a cut may lie anywhere inside a cell: that cell is then nobody's
                    total[i + 1] = min(total[i + 1], total[i] + 1)
                    total[i + 2 :] = np.minimum(total[i + 2 :], need[:-1])
        return float(total[-1])

    def stage_devices(self, first: Ints, stop: Ints, step_s: float) -> Floats:
        """The fewest devices for stages [first, stop), where it is after first, over all ways; no latencies.

        work / d <= room,    lag / d + 2 (1 - t / d) G s <= late    s seconds a byte, t the width
        """
        best: Floats = np.full((first + stop).shape, np.inf)
        cut = np.maximum(self.cut[first], self.cut[stop]) / step_s if self.whole else np.zeros(best.shape)
        for w, width in enumerate(self.widths.tolist()):
            (work, fixed), (lag, lag_fixed) = (
                [one[w, stop] - one[w, first] for one in pair[self.fewest]] for pair in (self.work, self.lag)
            )
            if not self.overlap:
                lag, lag_fixed = work, fixed
            gradients = self.gradients[w, stop] - self.gradients[w, first]
            room, late = step_s - fixed, step_s - lag_fixed
            possible = (room > 0) & (self.missing[w, stop] == self.missing[w, first])
            enough = np.where(possible, work / np.where(possible, room, 1.0), np.inf)
            need = np.where(enough <= width, float(width), np.inf)  # one replica: nothing to reduce
            for speed, low, high in (
                (self.wire.inside_s, 0.0, float(self.wire.per_machine)),
                (self.wire.between_s, float(self.wire.per_machine + 1), np.inf),
            ):
                ring = 2 * gradients * speed
                above, over = lag - width * ring, late - ring  # above / d <= over
                more = np.where(over > 0, np.maximum(above, 0.0) / np.where(over > 0, over, 1.0), 0.0)
                free = np.maximum(np.maximum(enough, more), low)
                fits = (over > 0) | (above <= over * free)
                need = np.minimum(need, np.where(fits & (free <= high), free, np.inf))
            need = np.maximum(np.maximum(need, cut), width)
            best = np.minimum(best, np.ceil(need / width * (1 - 1e-9)) * width)
        return best


def wire(search: Search) -> Wire:
    """The best links of the cluster."""
    cluster = search.cluster
    machines: dict[int, int] = {}
    for device in cluster.devices:
        machines[device.machine] = machines.get(device.machine, 0) + 1
    most = max(machines.values())
    inter = cluster.links.inter
    links = [cluster.links.intra[machine] for machine in machines] if most > 1 else []
    known = [link for link in (*links, inter) if link is not None]
    between = 1 / inter.bandwidth_bytes_per_s if inter is not None else 0.0
    inside = min((1 / link.bandwidth_bytes_per_s for link in known), default=0.0)
    return Wire(inside, between, min((link.latency_s for link in known), default=0.0), most)
