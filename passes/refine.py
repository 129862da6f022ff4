"""Better plans near good ones: cuts move, devices change stage, stages join and split, and the replay decides."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

import numpy as np

from .candidates import Found, Search, Setting, pad
from .dynamic import thinned
from .pricing import Batch
from .table import Floats, Layout

Shape = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int]  # cuts, counts, ways, skip
STEPS = (1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377, 610, 987)
CLOSE_DEPTH = 1.05  # times the best: the best of another number of stages goes on
WANTED = 24  # of the neighbours in a round, those whose step must be known
LARGE = 64  # devices
LONG = 200  # micro-batches from which on the formula leads and the replay has only the last word
TOGETHER = (-13, -8, -5, -3, -2, -1, 1, 2, 3, 5, 8, 13)
PAIRS = 12  # up to so many stages a device may move between any two


class Neighbourhood:
    """The moves from a plan under one layout."""

    def __init__(self, search: Search, layout: Layout) -> None:
        self.search, self.size = search, layout.size
        self.coarse = thinned(search.table, 40).tolist()
        table = search.table
        self.work = (table.forward_row[0, 0] + table.backward_row[0, 0]).tolist()
        self.coarse_work = [self.work[spot] for spot in self.coarse]
        self.widths = table.widths.tolist()

    def of(self, shape: Shape) -> Iterator[Shape]:
        """All neighbours that make whole replicas and use no more devices than there are."""
        request = self.search.request
        yield from self.moved_cuts(shape)
        yield from self.moved_together(shape)
        if request.replicas is None:
            yield from self.moved_devices(shape)
        if request.replicas is None and request.stages is None:
            yield from self.joined(shape)
            yield from self.split(shape)
            if len(shape[1]) <= PAIRS // 2:
                yield from self.split_with_help(shape)
        if len(self.widths) > 1:
            yield from self.other_ways(shape)

    def moved_cuts(self, shape: Shape) -> Iterator[Shape]:
        """One cut elsewhere between its neighbours, near or at a coarse position; two cuts together."""
        cuts, counts, ways, skip = shape
        few = len(counts) <= PAIRS
        steps, pairs = (STEPS, (-8, -3, -2, -1, 1, 2, 3, 8)) if few else (STEPS[:6:2], (-2, -1, 1, 2))
        for index in range(1, len(cuts) - 1):
            low, at, high = cuts[index - 1], cuts[index], cuts[index + 1]
            spots = {at + step for step in steps} | {at - step for step in steps}
            spots |= set(self.coarse) if few else set()
            for spot in sorted(spots):
                if low < spot < high and spot != at:
                    yield (*cuts[:index], spot, *cuts[index + 1 :]), counts, ways, skip
            for step in pairs:
                if index + 2 < len(cuts) and low < at + step and high + step < cuts[index + 2]:
                    yield (*cuts[:index], at + step, high + step, *cuts[index + 2 :]), counts, ways, skip

    def moved_together(self, shape: Shape) -> Iterator[Shape]:
        """All cuts up to one, or from one on, by as many blocks: each alone would unbalance its stage."""
        cuts, counts, ways, skip = shape
        last = len(cuts) - 1
        runs = dict.fromkeys(
            [(1, stop) for stop in range(3, last + 1)] + [(start, last) for start in range(2, last - 1)]
        )
        for start, stop in runs:
            for step in TOGETHER:
                moved = (*cuts[:start], *(cut + step for cut in cuts[start:stop]), *cuts[stop:])
                if moved[start - 1] < moved[start] and moved[stop - 1] < moved[stop]:
                    yield moved, counts, ways, skip

    def moved_devices(self, shape: Shape) -> Iterator[Shape]:
        """Devices from one stage to another, to or from those unused; with the cut between two neighbours moved."""
        cuts, counts, ways, skip = shape
        stages = len(counts)
        unused = self.size - sum(counts)
        for a in range(stages):
            for b in range(stages):
                if a == b or (stages > PAIRS and abs(a - b) > 1):
                    continue
                for step in self.amounts(counts[a], stages):
                    changed = list(counts)
                    changed[a] -= step
                    changed[b] += step
                    if self.whole(changed, ways, (a, b)):
                        yield cuts, tuple(changed), ways, skip
                        if abs(a - b) == 1 and (stages <= PAIRS // 2 or step <= 2):
                            yield from self.shifted(cuts, tuple(changed), ways, skip, min(a, b) + 1)
            for step in (1, -1, 2, -2, 4, -4):
                changed = list(counts)
                changed[a] += step * self.widths[ways[a]]
                if changed[a] >= 1 and sum(changed) <= self.size:
                    left = self.size - sum(changed)
                    yield cuts, tuple(changed), ways, min(skip, left)
                    if skip and left >= skip:
                        yield cuts, tuple(changed), ways, 0
                    if not skip and left:
                        yield cuts, tuple(changed), ways, left
        if unused:
            for other in {0, unused} - {skip}:
                yield cuts, counts, ways, other

    def shifted(
        self, cuts: tuple[int, ...], counts: tuple[int, ...], ways: tuple[int, ...], skip: int, index: int
    ) -> Iterator[Shape]:
        """The cut at `index` a little to either side, or where the work is in proportion to the devices."""
        low, at, high = cuts[index - 1], cuts[index], cuts[index + 1]
        few = len(counts) <= PAIRS
        spots = {at + step for step in ((-5, -3, -2, -1, 1, 2, 3, 5) if few else (-1, 1))}
        share = counts[index - 1] / (counts[index - 1] + counts[index])
        aim = self.work[low] + share * (self.work[high] - self.work[low])
        near = bisect_left(self.coarse_work, aim)
        reach = 3 if few else 1
        spots |= set(self.coarse[max(0, near - reach) : near + reach])
        for spot in sorted(spots - {at}):
            if low < spot < high:
                yield (*cuts[:index], spot, *cuts[index + 1 :]), counts, ways, skip

    def amounts(self, count: int, stages: int) -> list[int]:
        """How many devices may leave a stage of so many."""
        wanted = (1, 2, 3, 4, 6, 8, 16, 32, 64, 128, 256) if stages <= PAIRS else (1, 4, 16, 64)
        return [step for step in wanted if step < count]

    def whole(self, counts: list[int], ways: tuple[int, ...], where: tuple[int, int]) -> bool:
        """Whether these stages have whole replicas."""
        return all(counts[index] >= 1 and counts[index] % self.widths[ways[index]] == 0 for index in where)

    def joined(self, shape: Shape) -> Iterator[Shape]:
        """Two neighbours as one stage."""
        cuts, counts, ways, skip = shape
        for index in range(len(counts) - 1):
            count = counts[index] + counts[index + 1]
            for way in sorted({ways[index], ways[index + 1]}):
                if count % self.widths[way] == 0:
                    yield (
                        (*cuts[: index + 1], *cuts[index + 2 :]),
                        (*counts[:index], count, *counts[index + 2 :]),
                        (*ways[:index], way, *ways[index + 2 :]),
                        skip,
                    )

    def split(self, shape: Shape) -> Iterator[Shape]:
        """One stage as two, its devices shared by work, one more or less."""
        for index in range(len(shape[1])):
            yield from self.split_one(shape, index, 12 if len(shape[1]) <= PAIRS else 3)

    def split_one(self, shape: Shape, index: int, most: int) -> Iterator[Shape]:
        """Stage `index` as two, at no more than about `most` spots."""
        cuts, counts, ways, skip = shape
        count, low, high, width = counts[index], cuts[index], cuts[index + 1], self.widths[ways[index]]
        spots = [spot for spot in self.coarse if low < spot < high]
        if len(spots) > most:
            spots = spots[:: -(-len(spots) // most)] + [spots[-1]]
        if high - low > 1 and not spots:
            spots = [(low + high) // 2]
        total = self.work[high] - self.work[low]
        for spot in spots:
            part = (self.work[spot] - self.work[low]) / total if total > 0 else 0.5
            middle = round(part * count / width) * width
            for first in (middle - width, middle, middle + width):
                if 0 < first < count:
                    yield (
                        (*cuts[: index + 1], spot, *cuts[index + 1 :]),
                        (*counts[:index], first, count - first, *counts[index + 1 :]),
                        (*ways[: index + 1], ways[index], *ways[index + 1 :]),
                        skip,
                    )

    def split_with_help(self, shape: Shape) -> Iterator[Shape]:
        """One stage as two, with a device from another stage or an unused one."""
        cuts, counts, ways, skip = shape
        for index in range(len(counts)):
            for donor in range(-1, len(counts)):
                given = self.widths[ways[index]]
                changed = list(counts)
                changed[index] += given
                if donor >= 0:
                    changed[donor] -= given
                whole = donor != index and (donor < 0 or self.whole(changed, ways, (donor, index)))
                if whole and sum(changed) <= self.size:
                    room = self.size - sum(changed)
                    yield from self.split_one((cuts, tuple(changed), ways, min(skip, room)), index, 6)

    def other_ways(self, shape: Shape) -> Iterator[Shape]:
        """Another width, or recompute, for one stage or for all."""
        cuts, counts, ways, skip = shape
        for way in range(len(self.widths)):
            if all(count % self.widths[way] == 0 for count in counts):
                yield cuts, counts, (way,) * len(counts), skip
            if len(counts) <= PAIRS:
                for index, count in enumerate(counts):
                    if way != ways[index] and count % self.widths[way] == 0:
                        yield cuts, counts, (*ways[:index], way, *ways[index + 1 :]), skip


def shape_of(batch: Batch, at: int) -> Shape:
    """One plan of a batch without its empty stages."""
    used = [index for index, count in enumerate(batch.counts[at].tolist()) if count]
    cuts = batch.cuts[at].tolist()
    counts, ways = batch.counts[at].tolist(), batch.ways[at].tolist()
    return (
        (*[cuts[index] for index in used], cuts[-1]),
        tuple(counts[index] for index in used),
        tuple(ways[index] for index in used),
        int(batch.skip[at]),
    )


def to_batch(shapes: list[Shape]) -> Batch:
    """Several shapes as one batch."""
    return pad([(cuts, counts, ways) for cuts, counts, ways, _ in shapes], [skip for *_, skip in shapes])


def refine(
    search: Search,
    layout: Layout,
    micro_batches: int,
    settings: tuple[Setting, ...],
    starts: list[Shape],
    beam: int,
    rounds: int,
) -> list[tuple[float, Shape]]:
    """Improve the starts by steps until none helps; the best few, with their step seconds."""
    starts = list(dict.fromkeys(starts))
    if not starts:
        return []
    long = formula_leads(search, micro_batches)
    visit = visits(search, layout, micro_batches, settings)
    front = visit.start(starts, beam)
    pool = front
    for _ in range(rounds):
        shapes = visit.unseen_around(front)
        if not shapes or search.enough():
            break
        worst = max(front[beam - 1][0], front[0][0] * CLOSE_DEPTH) if len(front) >= beam else np.inf
        prune = worst / search.least_s if np.isfinite(worst) and search.least_s > 0 else 1.5
        values = visit.price(shapes, max(prune, 1.0), WANTED)
        front = ranked(front, shapes, values, beam)
        pool = ranked(pool, shapes, values, WANTED) if long else front
    if long:
        shapes = [shape for _, shape in pool]
        front = ranked([], shapes, search.offer(layout, micro_batches, settings, to_batch(shapes), 2.0, beam), beam)
    return front


class Visit:
    """What is known of the plans under one layout and setting: a second refinement goes on from the first."""

    def __init__(self, search: Search, layout: Layout, micro_batches: int, settings: tuple[Setting, ...]) -> None:
        self.search, self.layout = search, layout
        self.micro_batches, self.settings = micro_batches, settings
        self.around = Neighbourhood(search, layout)
        self.seen: set[Shape] = set()
        self.expanded: set[Shape] = set()
        self.good: dict[Shape, float] = {}  # of those seen, the steps of those that were not pruned

    def start(self, starts: list[Shape], beam: int) -> list[tuple[float, Shape]]:
        """The best of some shapes; those seen before keep their step."""
        fresh = [shape for shape in starts if shape not in self.seen]
        known = [(self.good[shape], shape) for shape in starts if shape in self.good]
        self.seen.update(fresh)
        values = self.price(fresh, 2.0, beam) if fresh else np.zeros(0)
        return ranked([], [shape for _, shape in known] + fresh, np.append([value for value, _ in known], values), beam)

    def unseen_around(self, front: list[tuple[float, Shape]]) -> list[Shape]:
        """All neighbours of the front that were not seen yet."""
        fresh: dict[Shape, None] = {}
        for _, shape in front:
            if shape not in self.expanded:
                self.expanded.add(shape)
                fresh.update((one, None) for one in self.around.of(shape) if one not in self.seen)
        self.seen.update(fresh)
        return list(fresh)

    def price(self, shapes: list[Shape], prune: float, wanted: int) -> Floats:
        """Step seconds of some shapes; infinite for those of no use."""
        values = priced(self.search, self.layout, self.micro_batches, self.settings, shapes, prune, wanted)
        self.good.update((shapes[at], float(values[at])) for at in np.nonzero(np.isfinite(values))[0].tolist())
        return values


def visits(search: Search, layout: Layout, micro_batches: int, settings: tuple[Setting, ...]) -> Visit:
    """What is known under a layout and setting, kept with the search."""
    key = (layout.label, layout.order, micro_batches, settings)
    found = search.visits.get(key)
    if not isinstance(found, Visit):
        found = search.visits[key] = Visit(search, layout, micro_batches, settings)
    return found


def formula_leads(search: Search, micro_batches: int) -> bool:
    """Whether plans are sorted by the formula, and only the best replayed: on large clusters sooner."""
    return micro_batches >= (LONG if len(search.cluster.devices) <= LARGE else LONG // 4)


def priced(
    search: Search,
    layout: Layout,
    micro_batches: int,
    settings: tuple[Setting, ...],
    shapes: list[Shape],
    prune: float,
    wanted: int,
) -> Floats:
    """Step seconds of some shapes: replayed, or by the formula where a replay is long."""
    if formula_leads(search, micro_batches):
        return search.estimate(layout, micro_batches, settings, to_batch(shapes), prune)
    return search.offer(layout, micro_batches, settings, to_batch(shapes), prune, wanted)


def ranked(
    front: list[tuple[float, Shape]], shapes: list[Shape], values: Floats, most: int
) -> list[tuple[float, Shape]]:
    """The best of the front and of some shapes, and the best of each number of stages that is close; ties by shape."""
    known = np.array([value for value, _ in front] + values.tolist())
    limit = np.partition(known, most - 1)[most - 1] if len(known) >= most else np.inf
    limit = max(limit, known.min() * CLOSE_DEPTH)
    finite = [(float(values[at]), shapes[at]) for at in np.nonzero(np.isfinite(values) & (values <= limit))[0].tolist()]
    order = sorted([*front, *finite], key=lambda one: (one[0], len(one[1][1]), one[1]))
    kept = order[:most]
    depths = {len(shape[1]) for _, shape in kept}
    for value, shape in order[most:]:
        if value > kept[0][0] * CLOSE_DEPTH or len(kept) == 2 * most:
            break
        if len(shape[1]) not in depths:
            depths.add(len(shape[1]))
            kept.append((value, shape))
    return kept


def found_shape(found: Found) -> Shape:
    """The shape of a plan that was kept."""
    return found.cuts, found.counts, found.ways, found.skip
