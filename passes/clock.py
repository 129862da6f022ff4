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

from .table import Floats, Ints

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
    stages = line_of[0].shape[1]
    behind = np.arange(stages, 0, -1)
    flying = behind if multiplicity == 1 else 2 * behind - 1  # strictly falling: no backward needs one of its round
    return Clock(line_of, flying, micro_batches).run(0)


class Clock:
    """The times at which all that goes on has ended, after some turns.

    `free` (plans, stages): the stages. `sent` (plans, 2 stages - 1): of the latest
    forward, stages and channels in turn. `returned` (plans, stages - 1): the channels
    back. `arrived` (deep, plans, stages): gradients that wait, in a ring over micro-batches.
    """

    def __init__(self, line_of: Line, flying: Ints, micro_batches: int) -> None:
        self.forward, self.backward, there, self.back = line_of
        self.flying, self.micro_batches = flying, micro_batches
        plans, stages = self.forward.shape
        self.deep = -(-int(flying.max() + 1) // CYCLE) * CYCLE
        line = np.zeros((plans, 2 * stages - 1))
        line[:, 0::2] = self.forward
        line[:, 1::2] = there
        self.through = np.cumsum(line, axis=1)
        self.before = self.through - line
        self.free = np.zeros((plans, stages))
        self.sent = np.zeros((plans, 2 * stages - 1))
        self.returned = np.zeros((plans, max(stages - 1, 1)))
        self.arrived = np.zeros((self.deep, plans, stages))

    def run(self, turn: int) -> Floats:
        """Run all turns from one on; give back when the last backward of each stage ends."""
        full = int(self.flying.max()) - 1  # the first turn in which all stages work there and back
        mark, early = None, self.micro_batches - self.deep
        while turn < self.micro_batches + full:
            self.step(turn)
            turn += 1
            if turn > full and (turn - full - 1) % self.deep == 0 and turn <= early:
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
        rounds = (self.micro_batches - turn) // self.deep
        repeating = self.take(same)
        later = moved[same][:, None] * rounds
        repeating.free += later
        repeating.sent += later
        repeating.returned += later
        repeating.arrived += later
        ends[same] = repeating.run(turn + rounds * self.deep)
        if not same.all():
            ends[~same] = self.take(~same).run(turn)
        return ends

    def take(self, which: NDArray[np.bool_]) -> Clock:
        """The clock of some of the plans."""
        part = object.__new__(Clock)
        part.flying, part.micro_batches, part.deep = self.flying, self.micro_batches, self.deep
        for name in ("forward", "backward", "back", "through", "before", "free", "sent", "returned"):
            setattr(part, name, getattr(self, name)[which])
        part.arrived = self.arrived[:, which]
        return part

    def state(self) -> Floats:
        """All times that later turns depend on, (plans, times)."""
        waiting = np.moveaxis(self.arrived[:, :, :-1], 1, 0).reshape(len(self.free), -1)
        return np.concatenate(
            [self.free, self.sent[:, 1::2], self.returned[:, : self.free.shape[1] - 1], waiting], axis=1
        )

    def step(self, turn: int) -> None:
        """One forward, where there are any left, and one backward on each stage whose turn it is."""
        if turn < self.micro_batches:
            ready = self.sent.copy()
            ready[:, 0::2] = self.free
            self.sent = np.maximum.accumulate(ready - self.before, axis=1) + self.through
            self.free = self.sent[:, 0::2].copy()
        stages, deep = self.free.shape[1], self.deep
        micro = turn - self.flying + 1
        active = np.nonzero((micro >= 0) & (micro < self.micro_batches))[0]
        if len(active) == 0:
            return
        chosen = slice(None) if len(active) == stages else active
        at = micro[active] % deep
        done = np.maximum(self.free[:, chosen], self.arrived[at, :, active].T) + self.backward[:, chosen]
        self.free[:, chosen] = done
        if stages > 1:
            inner = active[active > 0]
            channel = (
                np.maximum(self.returned[:, inner - 1], done[:, len(active) - len(inner) :]) + self.back[:, inner - 1]
            )
            self.returned[:, inner - 1] = channel
            self.arrived[micro[inner] % deep, :, inner - 1] = channel.T
