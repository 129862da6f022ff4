"""Better plans near good ones: neighbours are priced as whole batches, and the replay decides."""

from __future__ import annotations

import numpy as np

from .candidates import Found, Search, Setting
from .neighbours import Neighbourhood, Shape, shape_of, to_batch, together
from .pricing import Batch
from .table import Floats, Layout

CLOSE_DEPTH = 1.05  # times the best: the best of another number of stages goes on
WANTED = 24  # of the neighbours in a round, those whose step must be known
LARGE = 64  # devices
LONG = 200  # micro-batches from which on the formula leads and the replay has only the last word


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
        batch = visit.unseen_around(front)
        if len(batch) == 0 or search.enough():
            break
        worst = max(front[beam - 1][0], front[0][0] * CLOSE_DEPTH) if len(front) >= beam else np.inf
        prune = worst / search.least_s if np.isfinite(worst) and search.least_s > 0 else 1.5
        found = visit.price(batch, max(prune, 1.0), WANTED)
        front = ranked(front + found, beam)
        pool = ranked(pool + found, WANTED) if long else front
    if long:
        batch = to_batch([shape for _, shape in pool])
        front = ranked(finite(batch, search.offer(layout, micro_batches, settings, batch, 2.0, beam), beam), beam)
    return front


class Visit:
    """What is known of the plans under one layout and setting: a second refinement goes on from the first."""

    def __init__(self, search: Search, layout: Layout, micro_batches: int, settings: tuple[Setting, ...]) -> None:
        self.search, self.layout = search, layout
        self.micro_batches, self.settings = micro_batches, settings
        self.around = Neighbourhood(search, layout)
        self.seen: set[int] = set()
        self.expanded: set[Shape] = set()
        self.good: dict[Shape, float] = {}  # of those seen, the steps of the best

    def start(self, starts: list[Shape], beam: int) -> list[tuple[float, Shape]]:
        """The best of some shapes; those seen before keep their step."""
        known = [(self.good[shape], shape) for shape in starts if shape in self.good]
        return ranked(known + self.price(self.unseen(to_batch(starts)), 2.0, beam), beam)

    def unseen(self, batch: Batch) -> Batch:
        """The plans not seen yet, each once; they are now."""
        marks = self.around.marks(batch)
        first = dict(zip(reversed(marks), range(len(marks) - 1, -1, -1), strict=True))
        fresh = sorted(at for mark, at in first.items() if mark not in self.seen)
        self.seen.update(first)
        return batch.take(np.array(fresh, dtype=np.int64))

    def unseen_around(self, front: list[tuple[float, Shape]]) -> Batch:
        """All neighbours of the front that were not seen yet."""
        shapes = [shape for _, shape in front if shape not in self.expanded]
        self.expanded.update(shapes)
        return self.unseen(together([self.around.of(shape) for shape in shapes]))

    def price(self, batch: Batch, prune: float, wanted: int) -> list[tuple[float, Shape]]:
        """The best of some plans, as many as are wanted and those close to the best, with their step seconds."""
        values = priced(self.search, self.layout, self.micro_batches, self.settings, batch, prune, wanted)
        found = finite(batch, values, wanted)
        self.good.update((shape, value) for value, shape in found)
        return found


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
    batch: Batch,
    prune: float,
    wanted: int,
) -> Floats:
    """Step seconds of some plans: replayed, or by the formula where a replay is long."""
    if formula_leads(search, micro_batches):
        return search.estimate(layout, micro_batches, settings, batch, prune)
    return search.offer(layout, micro_batches, settings, batch, prune, wanted)


def finite(batch: Batch, values: Floats, most: int) -> list[tuple[float, Shape]]:
    """The best of some plans, and the best of each number of stages, with their step seconds."""
    known = np.nonzero(np.isfinite(values))[0]
    if len(known) == 0:
        return []
    seconds, depths = values[known], np.count_nonzero(batch.counts[known], axis=1)
    chosen = seconds <= (np.partition(seconds, most - 1)[most - 1] if len(known) > most else np.inf)
    for depth in np.unique(depths[~chosen]).tolist():
        best = seconds[depths == depth].min()
        chosen |= (depths == depth) & (seconds == best) & (best <= seconds.min() * CLOSE_DEPTH)
    return [(float(values[at]), shape_of(batch, at)) for at in known[chosen].tolist()]


def ranked(plans: list[tuple[float, Shape]], most: int) -> list[tuple[float, Shape]]:
    """The best plans, and the best of each number of stages that is close; ties by shape."""
    order = sorted(plans, key=lambda one: (one[0], len(one[1][1]), one[1]))
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
