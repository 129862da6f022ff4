"""When each stage's last backward ends, for many plans at once.

Arrays have shape (plans, stages), those of the boundaries (plans, stages - 1); seconds.
A stage works in the fixed order of its schedule; a boundary is one
first-in-first-out channel each way and overlaps with computation.

    forward  i:  each stage waits for micro-batch i, for itself, and for the backward
                 that must come first; a running maximum along the line of stages and
                 channels gives all ends at once
    backward:    after forward i, stage s (at most K_s in flight) may run backward i - K_s + 1
"""

from __future__ import annotations

import numpy as np

from .table import Floats

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
    forward, backward, there, back = line_of
    plans, stages = forward.shape
    behind = np.arange(stages, 0, -1)
    flying = behind if multiplicity == 1 else 2 * behind - 1  # strictly falling: no backward needs one of its round
    line = np.zeros((plans, 2 * stages - 1))
    line[:, 0::2] = forward
    line[:, 1::2] = there
    through = np.cumsum(line, axis=1)
    before = through - line
    free = np.zeros((plans, stages))
    ends = np.zeros((plans, 2 * stages - 1))  # of the latest forward: stages and channels in turn
    returning = np.zeros((plans, max(stages - 1, 1)))
    rounds = micro_batches + int(flying.max()) - 1
    # forward ends are needed only through `free`; gradients wait in a ring of `deep` columns
    deep = int(flying.max()) + 1
    arrived = np.zeros((deep, plans, stages))
    order = np.arange(stages)
    for turn in range(rounds):
        if turn < micro_batches:
            ready = ends.copy()
            ready[:, 0::2] = free
            ends = np.maximum.accumulate(ready - before, axis=1) + through
            free = ends[:, 0::2].copy()
        micro = turn - flying + 1
        active = order[(micro >= 0) & (micro < micro_batches)]
        if len(active) == 0:
            continue
        whole = len(active) == stages
        chosen = slice(None) if whole else active
        at = micro[chosen] % deep
        done = np.maximum(free[:, chosen], arrived[at, :, order[chosen]].T) + backward[:, chosen]
        free[:, chosen] = done
        if stages > 1:
            inner = active[active > 0]
            start = len(active) - len(inner)
            channel = np.maximum(returning[:, inner - 1], done[:, start:]) + back[:, inner - 1]
            returning[:, inner - 1] = channel
            arrived[micro[inner] % deep, :, inner - 1] = channel.T
    return free
