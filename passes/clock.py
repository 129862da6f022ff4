"""When each stage's last backward ends, for many plans at once.

Arrays have shape (plans, stages), those of the boundaries (plans, stages - 1); seconds.
A stage works in the fixed order of its schedule; a boundary is one
first-in-first-out channel each way and overlaps with computation.

    forward  i:  each stage waits for micro-batch i, for itself, and for the backward
                 that must come first; a running maximum along the line of stages and
                 channels gives all ends at once
    backward:    after forward i, stage s (at most K_s in flight) may run backward i - K_s + 1

Once all stages are busy each turn does the same as the one before, and soon all times
move on by the same number of seconds every few turns: the turns left are then counted, not run.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .table import Floats

CYCLE = 12  # turns after which times are compared, or a multiple: most cycles of a schedule divide it

Line = tuple[Floats, Floats, Floats, Floats]  # forward, backward, there, back


def ends(line: Line, micro_batches: int, schedule: str, multiplicity: int) -> Floats:
    """When the last backward of each stage ends."""
    if schedule == "gpipe" or line[0].shape[1] == 1:
        return gpipe_ends(line, micro_batches)
    return alternating_ends(line, micro_batches, multiplicity)


def gpipe_ends(line: Line, micro_batches: int) -> Floats:
    """All forwards, then all backwards: two flow shops, each with a closed form."""
    forward, backward, there, back = line
    more = micro_batches - 1
    ahead = np.maximum(forward.max(axis=1), there.max(axis=1, initial=0.0))
    start = forward.sum(axis=1) + there.sum(axis=1) + more * ahead
    returning = np.concatenate([back, np.zeros((len(start), 1))], axis=1)[:, ::-1]
    behind = backward[:, ::-1]
    found = np.cumsum(returning + behind, axis=1) + more * np.maximum.accumulate(np.maximum(returning, behind), axis=1)
    whole: Floats = (start[:, None] + found)[:, ::-1]
    return whole


def alternating_ends(line_of: Line, micro_batches: int, multiplicity: int) -> Floats:
    """1F1B with at most S - s micro-batches in flight on stage s, or 2(S - s) - 1."""
    return Clock(line_of, micro_batches, multiplicity).run(0)


class Clock:
    """The times at which all that goes on has ended, after some turns.

    `sent` (plans, 2 stages - 1): of the latest forward, channels at odd places; the stages
    between them (`free`, a view) have ended their backward too. `returned` (plans, stages - 1):
    the channels back. A stage runs the backward of a micro-batch `multiplicity` turns after
    the stage behind it, so it waits for what `returned` was one turn ago, or two (`older`).
    """

    def __init__(self, line_of: Line, micro_batches: int, multiplicity: int) -> None:
        self.forward, self.backward, there, self.back = line_of
        self.micro_batches, self.multiplicity = micro_batches, multiplicity
        plans, stages = self.forward.shape
        line = np.zeros((plans, 2 * stages - 1))
        line[:, 0::2] = self.forward
        line[:, 1::2] = there
        self.through = np.cumsum(line, axis=1)
        self.before = self.through - line
        self.sent = np.zeros((plans, 2 * stages - 1))
        self.free = self.sent[:, 0::2]
        self.returned = np.zeros((plans, stages - 1))
        self.older = self.returned if multiplicity == 1 else self.returned.copy()

    def run(self, turn: int) -> Floats:
        """Run all turns from one on; give back when the last backward of each stage ends."""
        stages = self.free.shape[1]
        full = self.multiplicity * (stages - 1)  # the first turn in which all stages work there and back
        mark, early = None, self.micro_batches - CYCLE
        while turn < self.micro_batches + full:
            self.step(turn)
            turn += 1
            if turn > full and (turn - full - 1) % CYCLE == 0 and turn <= early:
                now = self.state()
                if mark is not None:
                    moved = now - mark
                    same = np.ptp(moved, axis=1) <= 1e-12 * np.abs(now).max(axis=1)
                    if same.any():
                        return self.split(same, moved[:, 0], turn)
                mark = now
        return self.free

    def split(self, same: NDArray[np.bool_], moved: Floats, turn: int) -> Floats:
        """Count the turns of the plans that repeat themselves, run those of the rest."""
        ends = np.zeros(self.free.shape)
        rounds = (self.micro_batches - turn) // CYCLE
        repeating = self.take(same)
        later = moved[same][:, None] * rounds
        for times in repeating.times():
            times += later
        ends[same] = repeating.run(turn + rounds * CYCLE)
        if not same.all():
            ends[~same] = self.take(~same).run(turn)
        return ends

    def take(self, which: NDArray[np.bool_]) -> Clock:
        """The clock of some of the plans."""
        part = object.__new__(Clock)
        part.micro_batches, part.multiplicity = self.micro_batches, self.multiplicity
        for name in ("forward", "backward", "back", "through", "before", "sent", "returned"):
            setattr(part, name, getattr(self, name)[which])
        part.free = part.sent[:, 0::2]
        part.older = part.returned if self.multiplicity == 1 else self.older[which]
        return part

    def times(self) -> list[Floats]:
        """All times that later turns depend on, arrays (plans, …)."""
        return [self.sent, self.returned] if self.multiplicity == 1 else [self.sent, self.returned, self.older]

    def state(self) -> Floats:
        """The same as one array."""
        return np.concatenate(self.times(), axis=1)

    def step(self, turn: int) -> None:
        """One forward, where there are any left, and one backward on each stage whose turn it is."""
        if turn < self.micro_batches:
            np.subtract(self.sent, self.before, out=self.sent)
            np.maximum.accumulate(self.sent, axis=1, out=self.sent)
            np.add(self.sent, self.through, out=self.sent)
        stages, every = self.free.shape[1], self.multiplicity
        first = max(0, stages - 1 - turn // every)  # with a backward in this turn: stages [first, stop)
        stop = stages - max(0, (turn - self.micro_batches) // every + 1)
        if first < stop:
            inner = min(stop, stages - 1)
            np.maximum(self.free[:, first:inner], self.older[:, first:inner], out=self.free[:, first:inner])
            self.free[:, first:stop] += self.backward[:, first:stop]
        if every > 1:
            np.copyto(self.older, self.returned)
        if stop <= first:
            return
        part = slice(max(first, 1) - 1, stop - 1)
        returned = np.maximum(self.returned[:, part], self.free[:, part.start + 1 : stop], out=self.returned[:, part])
        returned += self.back[:, part]
