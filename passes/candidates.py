"""One search problem: the requests, the layouts, and a place where the best plans are kept.

All searches (exhaustive, dynamic program, refinement) offer batches of plans here.
A batch is bounded, replayed and, where the best changes, priced once more by
`evaluate`, which has the last word.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, field, replace

import numpy as np

from efftra_fx.cluster import Cluster
from efftra_fx.cost import Chain
from efftra_fx.plan import Plan, Stage

from .evaluate import Figures, evaluate
from .pricing import IMPOSSIBLE, Batch, Pricer, Prices
from .replay import formula_steps, in_flight, lower_bounds, missing_bytes, queues, steps
from .rules import Rules
from .table import Floats, Ints, Layout, Table

MOST_REPLAYED = 6000  # micro-batches of a batch of plans; those plans that the closed form likes best
LEAST_REPLAYED = 24  # plans
FIRST_REPLAYED = 64  # plans at once; the rest only where they may still be better
ROUNDING = 1 + 1e-9  # a bound may come out a little above a step that it equals
CLOSE = 1.0001  # times the lower bound: good enough to stop


@dataclass(frozen=True)
class Setting:
    """Micro-batches and order of work."""

    micro_batches: int
    schedule: str
    in_flight: int = 1


@dataclass(frozen=True)
class Request:
    """What is asked: the batch, and the parts of the plan that are fixed (`None`: searched)."""

    rows: int
    stages: int | None = None
    replicas: tuple[int, ...] | None = None
    micro_batches: int | None = None
    schedule: str | None = None
    in_flight: int | None = None
    tensor: int | None = None
    undivided_alone: bool = False
    limit_s: float = 60.0


@dataclass
class Found:
    """A plan in array form, with the layout and setting that make it one."""

    step_s: float
    layout: Layout
    setting: Setting
    cuts: tuple[int, ...]
    counts: tuple[int, ...]
    ways: tuple[int, ...]
    skip: int = 0

    @property
    def key(self) -> tuple[object, ...]:
        """What makes ties come out the same everywhere: the step, then fewer stages, then the shape."""
        return (
            self.step_s,
            len(self.counts),
            self.setting.micro_batches,
            self.setting.schedule,
            self.setting.in_flight,
            self.layout.label,
            self.cuts,
            self.counts,
            self.ways,
            self.skip,
        )


@dataclass
class Search:
    """The state of one search: prices by layout and micro-batch count, the best plans, the closest misfit."""

    chain: Chain
    cluster: Cluster
    rules: Rules
    request: Request
    table: Table
    started: float = field(default_factory=time.perf_counter)
    pricers: dict[tuple[str, tuple[tuple[int, ...], ...], int, bool], Pricer] = field(default_factory=dict)
    best: dict[tuple[object, ...], Found] = field(default_factory=dict)  # by layout, setting and number of stages
    visits: dict[tuple[object, ...], object] = field(default_factory=dict)  # what `refine` knows
    least_s: float = float("inf")
    floor_s: float = 0.0  # no plan is faster
    closest: tuple[float, Found] | None = None
    exact: bool = False  # every plan is offered: rings that meet are left to `evaluate`
    pending: list[Found] = field(default_factory=list)
    candidates: int = 0
    limited: str = ""

    def pricer(self, layout: Layout, micro_batches: int) -> Pricer:
        """Prices under a layout for a number of micro-batches, kept for the next time."""
        key = (layout.label, layout.order, micro_batches, self.exact)
        if key not in self.pricers:
            self.pricers[key] = Pricer(self.table, layout, self.request.rows, micro_batches, self.exact)
        return self.pricers[key]

    def enough(self) -> bool:
        """Whether to stop: a plan close to the bound is known, or the time limit has passed (the result says so)."""
        if self.least_s <= self.floor_s * CLOSE:
            return True
        if time.perf_counter() - self.started > self.request.limit_s:
            self.limited = f"stopped after the time limit of {self.request.limit_s:g} s"
        return bool(self.limited)

    def offer(
        self,
        layout: Layout,
        micro_batches: int,
        settings: tuple[Setting, ...],
        batch: Batch,
        prune: float = 1.0,
        wanted: int = LEAST_REPLAYED,
    ) -> Floats:
        """Price a batch; keep what is best; give back step seconds under the best of the settings.

        Infinite for plans that do not fit, and for those that cannot be among the best
        `wanted` of the batch, or within `prune` times the best step known: these are not replayed.
        """
        self.candidates += len(batch) * len(settings)
        pricer = self.pricer(layout, micro_batches)
        whole = np.full(len(batch), np.inf)
        near = pricer.within(batch, prune * self.least_s * ROUNDING)
        if not near.any():
            return whole
        batch = batch.take(near)
        prices = pricer.price(batch)
        bounds = lower_bounds(prices, micro_batches)
        result = whole[near]
        for setting in settings:
            flying = in_flight(batch.counts.shape[1], micro_batches, setting.schedule, setting.in_flight)
            missing = missing_bytes(prices, flying)
            self.note_misfits(layout, setting, batch, missing, bounds)
            limit = self.limit(result, prune, wanted)
            alive = np.nonzero((missing <= 0) & (bounds < IMPOSSIBLE) & (bounds <= limit))[0]
            if len(alive) == 0:
                continue
            own = self.replayed(layout, setting, prices, alive, result, prune, wanted)
            if self.exact:
                meeting = alive[prices.spans[alive].sum(axis=1) > 1]
                self.postpone(layout, setting, batch, meeting, own)
                own[meeting] = np.inf
            self.keep(layout, setting, batch, own)
            result = np.minimum(result, own)
        whole[near] = result
        return whole

    def estimate(
        self, layout: Layout, micro_batches: int, settings: tuple[Setting, ...], batch: Batch, prune: float
    ) -> Floats:
        """Step seconds by the formula, under the best of the settings, nothing replayed.

        Infinite for plans that do not fit, and for those above `prune` times the best step known.
        """
        self.candidates += len(batch) * len(settings)
        pricer, limit = self.pricer(layout, micro_batches), min(IMPOSSIBLE, prune * self.least_s * ROUNDING)
        result = np.full(len(batch), np.inf)
        near = np.nonzero(pricer.within(batch, limit))[0]
        if len(near) == 0:
            return result
        prices = pricer.price(batch.take(near))
        close = np.nonzero(lower_bounds(prices, micro_batches) <= limit)[0]
        if len(close) == 0:
            return result
        kept, close = prices.take(close), near[close]
        queue = queues(kept, layout, self.rules.overlap)
        for setting in settings:
            flying = in_flight(batch.counts.shape[1], micro_batches, setting.schedule, setting.in_flight)
            own = formula_steps(kept, micro_batches, setting.schedule, setting.in_flight, queue)
            result[close] = np.minimum(result[close], np.where(missing_bytes(kept, flying) <= 0, own, np.inf))
        return result

    def limit(self, known: Floats, prune: float, wanted: int) -> float:
        """Seconds above which a plan is of no use: `wanted` others of the batch are better, or the best by `prune`."""
        most = prune * self.least_s * ROUNDING
        if self.exact or len(known) <= wanted:
            return most
        return min(most, float(np.partition(known, wanted - 1)[wanted - 1]))

    def replayed(
        self, layout: Layout, setting: Setting, prices: Prices, alive: Ints, known: Floats, prune: float, wanted: int
    ) -> Floats:
        """Step seconds of the plans `alive`, those first that the formula likes best; infinite for the useless rest."""
        own = np.full(len(known), np.inf)
        kept = prices.take(alive)
        queue = queues(kept, layout, self.rules.overlap)
        floors = formula_steps(kept, setting.micro_batches, setting.schedule, setting.in_flight, queue)
        order = np.argsort(floors, kind="stable")
        floors = floors[order]
        left = len(order) if self.exact else max(LEAST_REPLAYED, MOST_REPLAYED // setting.micro_batches)
        done, size = 0, len(order) if self.exact else FIRST_REPLAYED
        while done < len(order) and left > 0:
            useful = int(np.searchsorted(floors, self.limit(np.minimum(known, own), prune, wanted), side="right"))
            stop = min(useful, done + min(size, left))
            if stop <= done:
                break
            part = order[done:stop]
            own[alive[part]] = steps(
                kept.take(part), setting.micro_batches, setting.schedule, setting.in_flight, layout, not self.exact
            )
            self.least_s = min(self.least_s, float(own[alive[part]].min())) if not self.exact else self.least_s
            left, done, size = left - (stop - done), stop, 4 * size
        return own

    def price_one(self, layout: Layout, setting: Setting, batch: Batch) -> tuple[float, bool]:
        """Step seconds of a single plan, and whether it fits the memory."""
        prices = self.pricer(layout, setting.micro_batches).price(batch)
        flying = in_flight(batch.counts.shape[1], setting.micro_batches, setting.schedule, setting.in_flight)
        seconds = steps(prices, setting.micro_batches, setting.schedule, setting.in_flight, layout)
        return float(seconds[0]), bool(missing_bytes(prices, flying)[0] <= 0)

    def postpone(self, layout: Layout, setting: Setting, batch: Batch, meeting: Ints, own: Floats) -> None:
        """Leave plans whose all-reduces meet on a port to `evaluate`; what is known of them is a lower bound."""
        for at in meeting[own[meeting] <= self.least_s].tolist():
            self.pending.append(self.found(layout, setting, batch, at, float(own[at])))

    def keep(self, layout: Layout, setting: Setting, batch: Batch, result: Floats) -> None:
        """Remember the best of a batch for its layout, setting and number of stages."""
        depth = (batch.counts > 0).sum(axis=1)
        for stages in np.unique(depth[np.isfinite(result)]).tolist():
            chosen = np.nonzero(depth == stages)[0]
            at = int(chosen[np.argmin(result[chosen])])
            found = self.found(layout, setting, batch, at, float(result[at]))
            key = (layout.label, layout.order, setting, stages)
            if key not in self.best or found.key < self.best[key].key:
                self.best[key] = found
            self.least_s = min(self.least_s, found.step_s)

    def found(self, layout: Layout, setting: Setting, batch: Batch, at: int, step_s: float) -> Found:
        """One plan of a batch without its empty stages."""
        used = [index for index, count in enumerate(batch.counts[at].tolist()) if count]
        cuts = (*[int(batch.cuts[at, index]) for index in used], self.table.blocks)
        counts = tuple(int(batch.counts[at, index]) for index in used)
        ways = tuple(int(batch.ways[at, index]) for index in used)
        return Found(step_s, layout, setting, cuts, counts, ways, int(batch.skip[at]))

    def note_misfits(self, layout: Layout, setting: Setting, batch: Batch, missing: Floats, bounds: Floats) -> None:
        """Remember the plan that misses the least memory, for the error when nothing fits."""
        if self.best:
            return
        over = np.where((missing > 0) & (bounds < IMPOSSIBLE), missing, np.inf)
        at = int(np.argmin(over))
        if np.isfinite(over[at]) and (self.closest is None or over[at] < self.closest[0]):
            self.closest = float(over[at]), self.found(layout, setting, batch, at, float(bounds[at]))

    def plan(self, found: Found) -> Plan:
        """The plan in its public form."""
        stages, position = [], found.skip
        for index, (count, way) in enumerate(zip(found.counts, found.ways, strict=True)):
            low, high = found.cuts[index], found.cuts[index + 1]
            names = tuple(block.name for block in self.chain.blocks[low:high])
            kind = self.table.ways[way]
            devices = found.layout.devices(position, count)
            stages.append(Stage(low, high, devices, kind.tensor, kind.recompute, names))
            position += count
        setting = found.setting
        label = self.placement(found, [device for stage in stages for device in stage.devices])
        return Plan(tuple(stages), setting.micro_batches, setting.schedule, setting.in_flight, label)

    def placement(self, found: Found, devices: list[int]) -> str:
        """The name of a placement; a line of devices that comes back to a machine is no contiguous one."""
        machines = [self.cluster.devices[device].machine for device in devices]
        runs = 1 + sum(a != b for a, b in zip(machines, machines[1:], strict=False))
        return "interleaved" if found.layout.label == "contiguous" and runs > len(set(machines)) else found.layout.label

    def judge(self, found: Found) -> tuple[Plan, Figures]:
        """The plan and its price by `evaluate`."""
        plan = self.plan(found)
        figures = evaluate(plan, self.chain, self.cluster, self.request.rows, self.rules)
        return replace(plan, predicted_step_s=figures.step_s, memory_bytes=figures.memory_bytes), figures


def pad(plans: list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]], skip: list[int] | None = None) -> Batch:
    """A batch of plans (cuts, counts, ways) of different lengths, filled up at the front."""
    depth = max(len(counts) for _, counts, _ in plans)
    fill = [(0,) * (depth - stages) for stages in range(depth + 1)]
    rows = (
        part
        for cuts, counts, ways in plans
        for empty in (fill[len(ways)],)
        for part in (empty, cuts, empty, counts, empty, ways)
    )
    width = 3 * depth + 1
    flat = np.fromiter(itertools.chain.from_iterable(rows), dtype=np.int64, count=width * len(plans)).reshape(-1, width)
    cuts, counts, ways = flat[:, : depth + 1], flat[:, depth + 1 : 2 * depth + 1], flat[:, 2 * depth + 1 :]
    return Batch(cuts, counts, ways, np.array(skip or [0] * len(plans), dtype=np.int64))
