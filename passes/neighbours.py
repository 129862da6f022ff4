"""The plans near a plan, as arrays: cuts move, devices change stage, stages join and split, ways change.

Arrays are those of `Batch`, one stage deeper than the plan itself so that a stage may be
split; unused columns are at the front. The same neighbour may come out more than once.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .candidates import Search, pad
from .dynamic import thinned
from .pricing import Batch
from .table import Ints, Layout

Shape = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int]  # cuts, counts, ways, skip
STEPS = (1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377, 610, 987)
PAIRED = np.array([-8, -3, -2, -1, 1, 2, 3, 8])  # blocks that two cuts move by
TOGETHER = np.array([-13, -8, -5, -3, -2, -1, 1, 2, 3, 5, 8, 13])
BESIDE = np.array([-5, -3, -2, -1, 1, 2, 3, 5])  # blocks that a cut moves by when devices cross it
ALONE = np.array([1, -1, 2, -2, 4, -4])  # replicas that a stage takes from those unused, or leaves unused
PAIRS = 12  # up to so many stages a device may move between any two


class Neighbourhood:
    """The moves from a plan under one layout.

    All neighbours make whole replicas, use no more devices than there are, and keep to
    what the request fixes.
    """

    def __init__(self, search: Search, layout: Layout) -> None:
        table = search.table
        self.request, self.size, self.widths = search.request, layout.size, table.widths
        self.coarse = thinned(table, 40)
        self.work = table.forward_row[0, 0] + table.backward_row[0, 0]
        self.coarse_work = self.work[self.coarse]
        self.signs = signs(min(layout.size, table.blocks) + 2)

    def of(self, shape: Shape) -> Batch:
        """All neighbours."""
        return together(list(self.parts(Around(self, shape))))

    def parts(self, plan: Around) -> Iterator[Batch]:
        """The moves that the request leaves."""
        yield plan.moved_cuts()
        yield plan.moved_cuts_by_pairs()
        yield plan.moved_cuts_together()
        if self.request.replicas is None:
            devices = plan.moved_devices()
            yield devices
            yield plan.shifted(devices)
            yield plan.more_or_less()
            yield plan.other_skips()
        if self.request.replicas is None and self.request.stages is None:
            yield plan.joined()
            yield from plan.split()
            if plan.stages <= PAIRS // 2:
                yield from plan.split_with_help()
        if len(self.widths) > 1:
            yield plan.other_ways()

    def marks(self, batch: Batch) -> list[int]:
        """A number for each plan, shared by no other but by chance (1 in 2^64); empty stages do not count."""
        depth = batch.counts.shape[1]
        cuts, counts, ways, skip = self.signs
        found = (batch.cuts * cuts[-depth - 1 :]).sum(axis=1) + (batch.counts * counts[-depth:]).sum(axis=1)
        found += (batch.ways * ways[-depth:]).sum(axis=1) + batch.skip * skip[-1]
        marks: list[int] = found.tolist()
        return marks


class Around:
    """One plan, and its neighbours by kind of move. Each gives a batch, of any number of stages."""

    def __init__(self, near: Neighbourhood, shape: Shape) -> None:
        self.near = near
        self.cuts, self.counts, self.ways = (np.array(part, dtype=np.int64) for part in shape[:3])
        self.skip = shape[3]
        self.stages = len(self.counts)
        self.few = self.stages <= PAIRS
        self.width = near.widths[self.ways]
        self.unused = near.size - int(self.counts.sum())

    def batch(
        self, number: int, cuts: Ints | None = None, counts: Ints | None = None, skip: Ints | int | None = None
    ) -> Batch:
        """Plans that differ from this one in some columns."""
        return Batch(
            np.broadcast_to(self.cuts, (number, self.stages + 1)) if cuts is None else cuts,
            np.broadcast_to(self.counts, (number, self.stages)) if counts is None else counts,
            np.broadcast_to(self.ways, (number, self.stages)),
            np.broadcast_to(np.asarray(self.skip if skip is None else skip, dtype=np.int64), (number,)),
        )

    def moved_cuts(self) -> Batch:
        """One cut elsewhere between its neighbours, near or at a coarse position."""
        steps = np.array(STEPS if self.few else STEPS[:6:2])
        at = self.cuts[1:-1, None]
        spots = np.concatenate([at - steps, at + steps], axis=1)
        if self.few:
            spots = np.concatenate([spots, np.broadcast_to(self.near.coarse, (len(at), len(self.near.coarse)))], axis=1)
        index, which = np.nonzero((spots > self.cuts[:-2, None]) & (spots < self.cuts[2:, None]) & (spots != at))
        cuts = rows(self.cuts, len(index))
        cuts[np.arange(len(index)), index + 1] = spots[index, which]
        return self.batch(len(cuts), cuts)

    def moved_cuts_by_pairs(self) -> Batch:
        """Two neighbouring cuts by as many blocks."""
        steps = PAIRED if self.few else PAIRED[2:6]
        left, right = self.cuts[1:-2, None] + steps, self.cuts[2:-1, None] + steps
        index, which = np.nonzero((left > self.cuts[:-3, None]) & (right < self.cuts[3:, None]))
        cuts, row = rows(self.cuts, len(index)), np.arange(len(index))
        cuts[row, index + 1] += steps[which]
        cuts[row, index + 2] += steps[which]
        return self.batch(len(cuts), cuts)

    def moved_cuts_together(self) -> Batch:
        """All cuts up to one, or from one on, by as many blocks: each alone would unbalance its stage."""
        last = self.stages
        runs = dict.fromkeys(
            [(1, stop) for stop in range(3, last + 1)] + [(start, last) for start in range(2, last - 1)]
        )
        start, stop = np.array(list(runs), dtype=np.int64).reshape(-1, 2).T
        low, high = (self.cuts[start] - self.cuts[start - 1])[:, None], (self.cuts[stop] - self.cuts[stop - 1])[:, None]
        index, which = np.nonzero((TOGETHER > -low) & (TOGETHER < high))
        place = np.arange(self.stages + 1)
        moved = (place >= start[index, None]) & (place < stop[index, None])
        return self.batch(len(index), self.cuts + moved * TOGETHER[which][:, None])

    def moved_devices(self) -> Batch:
        """Devices from one stage to another."""
        amounts = np.array((1, 2, 3, 4, 6, 8, 16, 32, 64, 128, 256) if self.few else (1, 4, 16, 64))
        stage = np.arange(self.stages)
        apart = np.abs(stage[:, None] - stage)
        giver, taker = np.nonzero((apart > 0) & (self.few | (apart == 1)))
        left, more = self.counts[giver, None] - amounts, self.counts[taker, None] + amounts
        whole = (left % self.width[giver, None] == 0) & (more % self.width[taker, None] == 0)
        pair, which = np.nonzero((left > 0) & whole)
        counts, row = rows(self.counts, len(pair)), np.arange(len(pair))
        counts[row, giver[pair]] -= amounts[which]
        counts[row, taker[pair]] += amounts[which]
        return self.batch(len(counts), None, counts)

    def shifted(self, moved: Batch) -> Batch:
        """Where two neighbours exchanged devices, the cut between them moves: a little, or as the work asks for."""
        change = moved.counts - self.counts
        index = np.argmax(change != 0, axis=1) + 1  # the cut behind the first of the two
        close = np.nonzero((change[np.arange(len(index)), index % self.stages] != 0) & (index < self.stages))[0]
        if self.stages > PAIRS // 2:
            close = close[np.abs(change[close]).max(axis=1) <= 2]
        index, counts = index[close], moved.counts[close]
        row = np.arange(len(close))
        low, at, high = self.cuts[index - 1], self.cuts[index], self.cuts[index + 1]
        share = counts[row, index - 1] / (counts[row, index - 1] + counts[row, index])
        work, coarse = self.near.work, self.near.coarse
        middle = np.searchsorted(self.near.coarse_work, work[low] + share * (work[high] - work[low]))
        beside, reach = (BESIDE, 3) if self.few else (BESIDE[3:5], 1)
        near = np.clip(middle[:, None] + np.arange(-reach, reach), 0, len(coarse) - 1)
        spots = np.concatenate([at[:, None] + beside, coarse[near]], axis=1)
        hit, which = np.nonzero((spots > low[:, None]) & (spots < high[:, None]) & (spots != at[:, None]))
        cuts = rows(self.cuts, len(hit))
        cuts[np.arange(len(hit)), index[hit]] = spots[hit, which]
        return self.batch(len(cuts), cuts, counts[hit])

    def more_or_less(self) -> Batch:
        """Replicas of one stage from those unused, or to them; those left unused at the front or at the end."""
        changes = ALONE * self.width[:, None]
        stage, which = np.nonzero((self.counts[:, None] + changes >= 1) & (changes <= self.unused))
        counts, change = rows(self.counts, len(stage)), changes[stage, which]
        counts[np.arange(len(stage)), stage] += change
        left = self.unused - change
        other = np.where(self.skip > 0, np.where(left >= self.skip, 0, -1), np.where(left > 0, left, -1))
        skip = np.concatenate([np.minimum(self.skip, left), other])
        counts = np.concatenate([counts, counts])
        return self.batch(int((skip >= 0).sum()), None, counts[skip >= 0], skip[skip >= 0])

    def other_skips(self) -> Batch:
        """Those unused all at the other end."""
        skips = np.array(sorted({0, self.unused} - {self.skip}), dtype=np.int64)
        return self.batch(len(skips), skip=skips)

    def joined(self) -> Batch:
        """Two neighbours as one stage."""
        cuts, counts, ways = (part.tolist() for part in (self.cuts, self.counts, self.ways))
        found: list[Shape] = []
        for index in range(self.stages - 1):
            count = counts[index] + counts[index + 1]
            for way in sorted({ways[index], ways[index + 1]}):
                if count % self.near.widths[way] == 0:
                    parts = (*cuts[: index + 1], *cuts[index + 2 :]), (*counts[:index], count, *counts[index + 2 :])
                    found.append((*parts, (*ways[:index], way, *ways[index + 2 :]), self.skip))
        return to_batch(found) if found else self.batch(0)

    def split(self) -> Iterator[Batch]:
        """One stage as two, its devices shared by work, one more or less."""
        for index in range(self.stages):
            yield self.split_one(index, self.counts[None], np.array([self.skip]), 12 if self.few else 3)

    def split_with_help(self) -> Iterator[Batch]:
        """One stage as two, with a device from another stage or an unused one."""
        place = np.arange(self.stages)
        for index in range(self.stages):
            given = self.width[index]
            counts = rows(self.counts, self.stages + 1)
            counts[:, index] += given
            counts[place, place] -= given  # the last row takes an unused one
            left = self.counts - given
            whole = np.append((left >= 1) & (left % self.width == 0), given <= self.unused)
            whole[index] = False
            counts = counts[whole]
            room = self.near.size - counts.sum(axis=1)
            yield self.split_one(index, counts, np.minimum(self.skip, room), 6)

    def split_one(self, index: int, counts: Ints, skip: Ints, most: int) -> Batch:
        """Stage `index` as two under each of some counts, all alike there, at no more than about `most` spots."""
        low, high, width = self.cuts[index], self.cuts[index + 1], int(self.width[index])
        coarse = self.near.coarse
        spots = coarse[np.searchsorted(coarse, low, side="right") : np.searchsorted(coarse, high)]
        if len(spots) > most:
            spots = np.append(spots[:: -(-len(spots) // most)], spots[-1])
        if high - low > 1 and len(spots) == 0:
            spots = np.array([(low + high) // 2])
        count = int(counts[0, index]) if len(counts) else 0
        work = self.near.work
        total = work[high] - work[low]
        part = (work[spots] - work[low]) / total if total > 0 else np.full(len(spots), 0.5)
        first = (np.rint(part * count / width) * width).astype(np.int64)[:, None] + np.array([-width, 0, width])
        spot, which = np.nonzero((first > 0) & (first < count))
        each, number = len(spot), len(counts)
        cuts = np.empty((number, each, self.stages + 2), dtype=np.int64)
        cuts[:, :, : index + 1], cuts[:, :, index + 2 :] = self.cuts[: index + 1], self.cuts[index + 1 :]
        cuts[:, :, index + 1] = spots[spot]
        found = np.empty((number, each, self.stages + 1), dtype=np.int64)
        found[:, :, :index], found[:, :, index + 2 :] = counts[:, None, :index], counts[:, None, index + 1 :]
        found[:, :, index] = first[spot, which]
        found[:, :, index + 1] = counts[:, None, index] - found[:, :, index]
        ways = np.concatenate([self.ways[: index + 1], self.ways[index:]])
        return Batch(
            cuts.reshape(number * each, self.stages + 2),
            found.reshape(number * each, self.stages + 1),
            np.broadcast_to(ways, (number * each, len(ways))),
            np.repeat(skip, each),
        )

    def other_ways(self) -> Batch:
        """Another width, or recompute, for one stage or for all."""
        kinds = np.arange(len(self.near.widths))
        whole = self.counts % self.near.widths[:, None] == 0  # (ways, stages)
        found = [np.repeat(kinds[whole.all(axis=1), None], self.stages, axis=1)]
        if self.few:
            way, stage = np.nonzero(whole & (kinds[:, None] != self.ways))
            each = rows(self.ways, len(way))
            each[np.arange(len(way)), stage] = way
            found.append(each)
        ways = np.concatenate(found)
        same = self.batch(len(ways))
        return Batch(same.cuts, same.counts, ways, same.skip)


def signs(columns: int) -> Ints:
    """Odd multipliers for the cuts, counts, ways and skip of so many columns: the same in every process."""
    state, found = 0x9E3779B97F4A7C15, []
    for _ in range(4 * columns):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64  # Knuth's MMIX generator
        found.append((state ^ (state >> 29)) | 1)
    return np.array(found, dtype=np.uint64).astype(np.int64).reshape(4, columns)


def rows(part: Ints, number: int) -> Ints:
    """So many copies of one row, to be changed."""
    return np.repeat(part[None], number, axis=0)


def together(parts: list[Batch]) -> Batch:
    """Batches of different depths as one, filled up at the front."""
    number, depth = sum(len(part) for part in parts), max((part.counts.shape[1] for part in parts), default=1)
    cuts, counts, ways = (np.zeros((number, depth + more), dtype=np.int64) for more in (1, 0, 0))
    skip = np.zeros(number, dtype=np.int64)
    row = 0
    for part in parts:
        rows, fill = slice(row, row + len(part)), depth - part.counts.shape[1]
        cuts[rows, fill:], counts[rows, fill:], ways[rows, fill:], skip[rows] = (
            part.cuts,
            part.counts,
            part.ways,
            part.skip,
        )
        row += len(part)
    return Batch(cuts, counts, ways, skip)


def shape_of(batch: Batch, at: int) -> Shape:
    """One plan of a batch without its empty stages, which are at the front."""
    empty = batch.counts.shape[1] - int(np.count_nonzero(batch.counts[at]))
    cuts, counts, ways = (tuple(part[at, empty:].tolist()) for part in (batch.cuts, batch.counts, batch.ways))
    return cuts, counts, ways, int(batch.skip[at])


def to_batch(shapes: list[Shape]) -> Batch:
    """Several shapes as one batch."""
    return pad([(cuts, counts, ways) for cuts, counts, ways, _ in shapes], [skip for *_, skip in shapes])
