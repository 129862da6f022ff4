"""Price many plans at once: the figures of each stage as arrays, and bounds on the step.

A batch of plans under one layout has arrays of shape (plans, stages). Shorter plans
are filled up at the front with empty stages, which cost nothing and delay nothing.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from .evaluate import port_loads, row_overlaps, share
from .table import Floats, Ints, Layout, RangeMax, Table

FEW_RUNS = 64  # up to so many runs of blocks are looked through one by one
IMPOSSIBLE = 1e15  # seconds of a stage that a kind of device has no option for


@dataclass(frozen=True)
class Batch:
    """Plans under one layout: cut positions (plans, stages + 1), device counts and ways (plans, stages).

    `skip` (plans,) positions at the front of the line stay unused, and what is left at its end.
    """

    cuts: Ints
    counts: Ints
    ways: Ints
    skip: Ints

    def __len__(self) -> int:
        return len(self.cuts)

    def take(self, which: Ints | NDArray[np.bool_]) -> Batch:
        """Some of the plans."""
        return Batch(self.cuts[which], self.counts[which], self.ways[which], self.skip[which])


@dataclass(frozen=True)
class Prices:
    """Arrays of shape (plans, stages), seconds and bytes; `extra_s` is what the all-reduce adds after the backward.

    `there_s` and `back_s` are the boundaries after each stage, shape (plans, stages - 1).
    `fits` needs `flying`, the micro-batches in flight.
    """

    forward_s: Floats
    backward_s: Floats
    there_s: Floats
    back_s: Floats
    reduce_s: Floats
    extra_s: Floats
    tied_s: Floats
    tied_stage: Ints
    fixed_bytes: Floats
    flying_bytes: Floats
    limit_bytes: Floats
    spans: NDArray[np.bool_]
    first: Ints
    stop: Ints

    def take(self, which: Ints) -> Prices:
        """The prices of some of the plans."""
        return Prices(*(getattr(self, one.name)[which] for one in fields(self)))


class Pricer:
    """Prices batches under one layout for one micro-batch size."""

    def __init__(self, table: Table, layout: Layout, rows: int, micro_batches: int, exact: bool = False) -> None:
        self.table, self.layout, self.exact = table, layout, exact
        self.pairs: dict[tuple[int, ...], tuple[list[tuple[float, int, float]], float]] = {}
        self.whole = table.rules.whole_rows
        self.micro_batches = micro_batches
        self.micro_rows = share(rows, micro_batches, self.whole)
        self.loads: dict[int, float] = {}
        self.breaks: dict[int, Ints] = {}
        self.tails: dict[tuple[int, int, float, float, float], RangeMax] = {}

    def part_rows(self, replicas: Ints) -> Floats:
        """Rows of the largest part of a micro-batch."""
        if self.whole:
            return np.ceil(self.micro_rows / np.maximum(replicas, 1) - 1e-9)
        return self.micro_rows / np.maximum(replicas, 1)

    def price(self, batch: Batch) -> Prices:
        """The figures of each stage of each plan."""
        table, layout = self.table, self.layout
        low, high = batch.cuts[:, :-1], batch.cuts[:, 1:]
        first, stop = self.runs(batch)
        empty = batch.counts == 0
        width = table.widths[batch.ways]
        replicas = np.where(empty, 1, batch.counts // width * layout.copies)
        rows = np.where(empty, 0.0, self.part_rows(replicas))
        forward, backward, parameters, gradients, saved, working, slowest = self.computing(
            batch, low, high, first, stop, rows, empty, width
        )
        spans = ~empty & (replicas > 1) & layout.spans(np.minimum(first, layout.size - 1), np.maximum(batch.counts, 1))
        forward, backward = self.exchanging(low, high, first, stop, replicas, spans, forward, backward)
        reduce, extra = self.reducing(batch.ways, low, high, first, stop, rows, replicas, gradients, slowest, spans)
        there, back, coming, going = self.moving(batch, first, stop, rows, width)
        optimizer = table.rules.optimizer_bytes_per_parameter_byte
        recompute = table.recompute[batch.ways]
        fixed = parameters + (1 + optimizer) * gradients + rows * working + 2 * (coming + going)
        flying = rows * saved + np.where(recompute, coming, 0.0)
        safe_first, safe_stop = np.where(empty, 0, first), np.where(empty, 1, stop)
        limit = np.where(empty, np.inf, -layout.least_memory.of(safe_first, safe_stop))
        tied, tied_stage = self.tied(low, high, replicas, batch.skip, stop[:, -1])
        return Prices(
            forward, backward, there, back, reduce, extra, tied, tied_stage, fixed, flying, limit, spans, first, stop
        )

    def runs(self, batch: Batch) -> tuple[Ints, Ints]:
        """The device positions [first, stop) of each stage."""
        stop = np.cumsum(batch.counts, axis=1) + batch.skip[:, None]
        return stop - batch.counts, stop

    def within(self, batch: Batch, seconds: float) -> NDArray[np.bool_]:
        """The plans (plans,) whose stages may do all their work in that time: as on the fastest class and way."""
        rows = self.micro_rows / (np.maximum(batch.counts, 1) * self.layout.copies)
        fixed, row = self.table.least_fixed, self.table.least_row
        low, high = batch.cuts[:, :-1], batch.cuts[:, 1:]
        work = fixed[high] - fixed[low] + rows * (row[high] - row[low])
        within: NDArray[np.bool_] = (self.micro_batches * work).max(axis=1) <= seconds
        return within

    def computing(
        self,
        batch: Batch,
        low: Ints,
        high: Ints,
        first: Ints,
        stop: Ints,
        rows: Floats,
        empty: NDArray[np.bool_],
        width: Ints,
    ) -> tuple[Floats, Floats, Floats, Floats, Floats, Floats, Ints]:
        """Seconds and bytes of the stages, at the slowest class of device; IMPOSSIBLE where an option is missing."""
        table, layout = self.table, self.layout
        shape = low.shape
        forward, backward = np.zeros(shape), np.zeros(shape)
        parameters, gradients, saved, working = (np.zeros(shape) for _ in range(4))
        slowest = np.zeros(shape, dtype=np.int64)
        w = batch.ways
        for c in range(len(table.classes)):
            present = ~empty if layout.uniform else layout.class_counts[c][stop] > layout.class_counts[c][first]
            if not present.any():
                continue
            ahead = table.forward_fixed[w, c, high] - table.forward_fixed[w, c, low]
            ahead += rows * (table.forward_row[w, c, high] - table.forward_row[w, c, low])
            behind = table.backward_fixed[w, c, high] - table.backward_fixed[w, c, low]
            behind += rows * (table.backward_row[w, c, high] - table.backward_row[w, c, low])
            if (width > 1).any():
                collective = self.collectives(w, c, low, high, first, stop, rows, width)
                ahead, behind = ahead + collective, behind + collective
            absent = table.missing[w, c, high] > table.missing[w, c, low]
            ahead, behind = np.where(absent, IMPOSSIBLE, ahead), np.where(absent, IMPOSSIBLE, behind)
            slower = present & (ahead + behind >= forward + backward)
            forward, backward = np.where(slower, ahead, forward), np.where(slower, behind, backward)
            slowest = np.where(slower, c, slowest)
            held = table.parameters[w, c, high] - table.parameters[w, c, low]
            parameters = np.where(present, np.maximum(parameters, held), parameters)
            own = table.gradients[w, c, high] - table.gradients[w, c, low]
            gradients = np.where(present, np.maximum(gradients, own), gradients)
            kept = table.saved[w, c, high] - table.saved[w, c, low]
            saved = np.where(present, np.maximum(saved, kept), saved)
            used = table.working[w, c, high] - table.working[w, c, low]
            working = np.where(present, np.maximum(working, used), working)
        return forward, backward, parameters, gradients, saved, working, slowest

    def collectives(
        self, w: Ints, c: int, low: Ints, high: Ints, first: Ints, stop: Ints, rows: Floats, width: Ints
    ) -> Floats:
        """Seconds of the tensor-parallel collectives of one direction; IMPOSSIBLE where a group leaves its machine."""
        table, layout = self.table, self.layout
        safe = np.minimum(first, layout.size - 1)
        leaves = np.zeros(low.shape, dtype=bool)
        for t in sorted(set(table.widths.tolist()) - {1}):
            hit = np.nonzero((width == t) & (stop > first))
            broken = self.broken(t)
            leaves[hit] = broken[first[hit]] > broken[stop[hit]]
        port = layout.slowest_port.of(safe, np.maximum(stop, safe + 1))
        around = 2.0 * (width - 1)
        sizes = table.reduce_bytes[w, c, high] - table.reduce_bytes[w, c, low]
        number = table.reduces[w, c, high] - table.reduces[w, c, low]
        seconds = around / width * sizes * rows * port + number * around * layout.intra_latency_s
        return np.where(leaves, IMPOSSIBLE, np.where(width > 1, seconds, 0.0))

    def exchanging(
        self,
        low: Ints,
        high: Ints,
        first: Ints,
        stop: Ints,
        replicas: Ints,
        spans: NDArray[np.bool_],
        forward: Floats,
        backward: Floats,
    ) -> tuple[Floats, Floats]:
        """Seconds forward and backward with the replicas' exchanges of batch statistics added."""
        table = self.table
        if not table.exchanges[-1]:
            return forward, backward
        second, latency = self.ring(first, stop, spans)
        around = 2.0 * (replicas - 1)
        moved = around * second * (table.exchange_bytes[high] - table.exchange_bytes[low])
        late = around * latency * (table.exchanges[high] - table.exchanges[low])
        return forward + moved + late, backward + moved / replicas + late

    def ring(self, first: Ints, stop: Ints, spans: NDArray[np.bool_]) -> tuple[Floats, Floats]:
        """Seconds of a byte, and of a message, on the slowest link of a ring over a stage's replicas."""
        layout = self.layout
        safe_first, safe_stop = np.minimum(first, layout.size - 1), np.maximum(stop, 1)
        port = layout.slowest_port.of(safe_first, np.maximum(safe_stop, safe_first + 1))
        second: Floats = np.where(spans, layout.nic_s, port)
        return second, np.where(spans, layout.inter_latency_s, layout.latency_s[safe_first])

    def broken(self, width: int) -> Ints:
        """For each position how many of the groups of that width, laid from there to the end, leave a machine."""
        if width not in self.breaks:
            size, machine = self.layout.size, self.layout.machine
            suffix = np.zeros(size + width + 1, dtype=np.int64)
            for at in range(size - 1, -1, -1):
                bad = at + width > size or bool((machine[at : at + width] != machine[at]).any())
                suffix[at] = suffix[at + width] + bad
            self.breaks[width] = suffix
        return self.breaks[width]

    def leaves_machine(self, first: int, count: int) -> tuple[bool, ...]:
        """For each width whether a group of that run of positions leaves its machine."""
        widths = sorted(set(self.table.widths.tolist()) - {1})
        return tuple(bool(self.broken(width)[first] > self.broken(width)[first + count]) for width in widths)

    def reducing(
        self,
        ways: Ints,
        low: Ints,
        high: Ints,
        first: Ints,
        stop: Ints,
        rows: Floats,
        replicas: Ints,
        gradients: Floats,
        slowest: Ints,
        spans: NDArray[np.bool_],
    ) -> tuple[Floats, Floats]:
        """Seconds of each stage's all-reduce, and how many of them are left when its last backward ends."""
        second, latency = self.ring(first, stop, spans)
        around = 2.0 * (replicas - 1)
        rate = around / replicas * second
        late = np.where((replicas > 1) & (gradients > 0), around * latency, 0.0)
        takes = rate * gradients + late
        reducing = takes > 0
        if not self.table.rules.overlap or not reducing.any():
            return takes, takes
        inside = self.ring(first, stop, np.zeros(spans.shape, dtype=bool))[0]  # what tensor collectives go through
        kind = (ways * len(self.table.classes) + slowest)[reducing]
        for one in (second, inside):
            seconds = np.unique(one[reducing])
            kind = kind * len(seconds) + np.searchsorted(seconds, one[reducing])
        kind = kind * (int(replicas.max()) + 1) + replicas[reducing]
        order = np.argsort(kind, kind="stable")
        edges = np.nonzero(np.diff(kind[order], prepend=-1, append=-1))[0].tolist()
        i, j, w, c = low[reducing], high[reducing], ways[reducing], slowest[reducing]
        speeds, parts, port = rate[reducing], rows[reducing], inside[reducing]
        left = np.zeros(len(kind))
        for begin, end in itertools.pairwise(edges):  # all runs of one way and class, on as many replicas
            hit, one = order[begin:end], order[begin]
            way, slow, speed, part, start = int(w[one]), int(c[one]), float(speeds[one]), float(parts[one]), i[hit]
            behind = self.behind(way, slow, part, float(port[one]))
            done = self.tail(way, slow, speed, part, float(port[one]), start, j[hit])
            left[hit] = done - speed * self.table.gradients[way, slow, start] + behind[start]
        extra = np.zeros(low.shape)
        extra[reducing] = np.maximum(left + late[reducing], 0.0)
        return takes, extra

    def behind(self, w: int, c: int, rows: float, port: float) -> Floats:
        """Backward seconds of the first 0, 1, 2, … blocks, tensor collectives included."""
        table, width = self.table, int(self.table.widths[w])
        seconds: Floats = table.backward_fixed[w, c] + rows * table.backward_row[w, c]
        if width > 1:
            around = 2.0 * (width - 1)
            seconds = seconds + around / width * rows * port * table.reduce_bytes[w, c]
            seconds = seconds + around * self.layout.intra_latency_s * table.reduces[w, c]
        return seconds

    def tail(self, w: int, c: int, rate: float, rows: float, port: float, first: Ints, stop: Ints) -> Floats:
        """Over the blocks k of each run: the most of (reduced up to and with k) less (backward before k), seconds.

        Blocks are reduced from the last to the first, each once its own backward is done.
        The all-reduce of blocks [i, j) ends max over k of (what is left of the backward
        after block k, negative) + (reduce of blocks i to k) after the last backward.
        """
        key, table = (w, c, rate, rows, port), self.table
        if key in self.tails:
            return self.tails[key].of(first, stop)
        behind = self.behind(w, c, rows, port)[:-1]
        done = np.where(table.block_gradients[w, c] > 0, rate * table.gradients[w, c, 1:] - behind, -np.inf)
        if len(first) <= FEW_RUNS:
            pairs = np.stack([first, stop], axis=1).reshape(-1)
            longest: Floats = np.maximum.reduceat(np.append(done, -np.inf), pairs)[::2]
            return longest
        self.tails[key] = RangeMax(done)
        return self.tails[key].of(first, stop)

    def moving(
        self, batch: Batch, first: Ints, stop: Ints, rows: Floats, width: Ints
    ) -> tuple[Floats, Floats, Floats, Floats]:
        """Boundary seconds there and back, and bytes of one part that come in and go out of each stage."""
        table = self.table
        a, b, c = batch.cuts[:, :-2], batch.cuts[:, 1:-1], batch.cuts[:, 2:]
        real = (batch.counts[:, :-1] > 0) & (batch.counts[:, 1:] > 0)
        if table.near is None:
            there_bytes, back_bytes = table.cut_bytes[b], table.back_bytes[b]
            whole, whole_back = table.cut_whole[b], table.back_whole[b]
        else:
            there_bytes, back_bytes, whole, whole_back = (one[a, b, c] for one in table.near)
        seconds, late, pairs = self.boundary(batch.counts[:, :-1], batch.counts[:, 1:], stop[:, :-1], width)
        moved = there_bytes * self.micro_rows
        moved_back = back_bytes * self.micro_rows
        there = np.where(real & (moved + whole > 0), seconds * (moved + pairs * whole) + late, 0.0)
        back = np.where(real & (moved_back + whole_back > 0), seconds * (moved_back + pairs * whole_back) + late, 0.0)
        if self.exact:
            there = self.exactly(first, stop, width, there_bytes, whole, real, forth=True)
            back = self.exactly(first, stop, width, back_bytes, whole_back, real, forth=False)
        low, high = batch.cuts[:, :-1], batch.cuts[:, 1:]
        if table.buffers is None:
            coming = table.cut_bytes[low] * rows + table.cut_whole[low]
            going = table.cut_bytes[high] * rows + table.cut_whole[high]
        else:
            coming, going = (row[low, high] * rows + fixed[low, high] for row, fixed in table.buffers)
        return there, back, coming, going

    def exactly(
        self, first: Ints, stop: Ints, width: Ints, row: Floats, fixed: Floats, real: NDArray[np.bool_], forth: bool
    ) -> Floats:
        """Boundary seconds as `evaluate` has them, port by port; each pair of stages is worked out once."""
        found = np.zeros(row.shape)
        which = np.nonzero(real & (row + fixed > 0))
        ends = [one[which] for one in (first[:, :-1], stop[:, :-1], stop[:, 1:], width[:, :-1], width[:, 1:])]
        pairs, members = np.unique(np.stack(ends, axis=1), axis=0, return_inverse=True)
        for index, pair in enumerate(pairs.tolist()):
            key = (*pair, forth)
            if key not in self.pairs:
                begin, middle, end, left_width, right_width = pair
                order = self.layout.order[0]
                left, right = (order[begin:middle], left_width), (order[middle:end], right_width)
                senders, receivers = (left, right) if forth else (right, left)
                self.pairs[key] = port_loads(*senders, *receivers, self.table.cluster, self.micro_rows, self.whole)
            loads, latency = self.pairs[key]
            hit = members.reshape(-1) == index
            at = which[0][hit], which[1][hit]
            takes = [(rows * row[at] + messages * fixed[at]) / rate for rows, messages, rate in loads]
            found[at] = latency + np.max(takes, axis=0)
        return found

    def boundary(self, left: Ints, right: Ints, at: Ints, width: Ints) -> tuple[Floats, Floats, Floats]:
        """For one byte of a whole micro-batch: seconds at the busiest port; latency; peers of a busy replica."""
        layout = self.layout
        size = layout.size
        left_safe, right_safe = np.maximum(left, 1), np.maximum(right, 1)
        begin, end = np.clip(at - left_safe, 0, size - 1), np.clip(at + right_safe, 1, size)
        middle = np.clip(at, begin + 1, end)
        t_left, t_right = width[:, :-1], width[:, 1:]
        r_left, r_right = left_safe // t_left * layout.copies, right_safe // t_right * layout.copies
        share_left, share_right = self.part_rows(r_left) / self.micro_rows, self.part_rows(r_right) / self.micro_rows
        wider = np.maximum(1.0, t_right / t_left)
        port_left = layout.slowest_port.of(begin, middle)
        safe_middle = np.minimum(middle, size - 1)
        port_right = layout.slowest_port.of(safe_middle, np.maximum(end, safe_middle + 1))
        busiest = np.maximum(share_left * wider * port_left, share_right * port_right)
        late = np.where(busiest > 0, layout.intra_latency_s, 0.0)
        if layout.nic_s > 0 and len(layout.starts) > 1:
            load = self.machine_load(begin, middle, end, left_safe, right_safe) * t_right / layout.copies
            busiest = np.maximum(busiest, load * layout.nic_s)
            late = np.where(load > 0, np.maximum(late, layout.inter_latency_s), late)
        pairs = np.maximum(np.ceil(r_right / r_left), np.ceil(r_left / r_right))
        return busiest, late, pairs

    def machine_load(self, begin: Ints, middle: Ints, end: Ints, left: Ints, right: Ints) -> Floats:
        """The largest share of the rows that any one machine sends out or takes in."""
        layout = self.layout
        if not layout.in_line:
            return self.scattered_load(begin, middle, end, left, right)
        stops = np.append(layout.starts[1:], layout.size)
        machines = len(layout.starts)
        if machines <= 6:
            chosen = [np.full(begin.shape, one) for one in range(machines)]
        else:
            of = layout.machine
            last_left, first_right = of[middle - 1], of[np.minimum(middle, layout.size - 1)]
            last = of[end - 1]
            chosen = [of[begin], of[begin] + 1, last_left - 1, last_left, first_right, first_right + 1, last - 1, last]
            chosen = [np.clip(one, 0, machines - 1) for one in chosen]
        load = np.zeros(begin.shape)
        for one in chosen:
            low, high = layout.starts[one], stops[one]
            send_low = (np.clip(low, begin, middle) - begin) / left
            send_high = (np.clip(high, begin, middle) - begin) / left
            take_low = (np.clip(low, middle, end) - middle) / right
            take_high = (np.clip(high, middle, end) - middle) / right
            if self.whole:
                send_low, send_high, take_low, take_high = (
                    np.floor(part * self.micro_rows + 1e-9) / self.micro_rows
                    for part in (send_low, send_high, take_low, take_high)
                )
            common = np.maximum(0.0, np.minimum(send_high, take_high) - np.maximum(send_low, take_low))
            load = np.maximum(load, np.maximum(send_high - send_low, take_high - take_low) - common)
        return np.where(load < 1e-12, 0.0, load)

    def scattered_load(self, begin: Ints, middle: Ints, end: Ints, left: Ints, right: Ints) -> Floats:
        """The same where a machine's devices are not neighbours in the line; each case worked out once."""
        size = self.layout.size + 1
        codes, which = np.unique((begin * size + middle) * size + end, return_inverse=True)
        for code in codes.tolist():
            if code not in self.loads:
                self.loads[code] = self.one_load(code // size // size, code // size % size, code % size)
        load: Floats = np.array([self.loads[code] for code in codes.tolist()])[which].reshape(begin.shape)
        return load

    def one_load(self, begin: int, middle: int, end: int) -> float:
        """The largest share of the rows that any one machine sends out or takes in, pair by pair."""
        machine = self.layout.machine
        if not begin < middle < end:
            return 0.0
        total = self.micro_rows
        out: dict[int, float] = {}
        into: dict[int, float] = {}
        for source, target, rows in row_overlaps(middle - begin, end - middle, total, self.whole):
            a, b = int(machine[begin + source]), int(machine[middle + target])
            if a != b:
                out[a] = out.get(a, 0.0) + rows / total
                into[b] = into.get(b, 0.0) + rows / total
        return max([0.0, *out.values(), *into.values()])

    def tied(self, low: Ints, high: Ints, replicas: Ints, begin: Ints, end: Ints) -> tuple[Floats, Ints]:
        """For each plan, of the parameters that several stages hold: all-reduce seconds and the first such stage."""
        layout, plans = self.layout, len(low)
        takes, first = np.zeros(plans), np.full(plans, low.shape[1] - 1)
        if not self.table.chain.shared:
            return takes, first
        across = layout.spans(begin, end - begin)
        port = layout.slowest_port.of(begin, end)
        second = np.where(across, layout.nic_s, port)
        latency = np.where(across, layout.inter_latency_s, layout.intra_latency_s)
        for shared in self.table.chain.shared:
            holds = np.zeros(low.shape, dtype=bool)
            for block in shared.blocks:
                holds |= (low <= block) & (block < high)
            several = holds.sum(axis=1) > 1
            members = np.maximum(np.where(holds, replicas, 0).sum(axis=1), 1)
            ring = 2.0 * (members - 1) * (shared.parameter_bytes / members * second + latency)
            takes += np.where(several, ring, 0.0)
            first = np.where(several, np.minimum(first, np.argmax(holds, axis=1)), first)
        return takes, first
