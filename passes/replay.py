"""Run the schedules of many plans at once, and bound their step times from below.

The replay follows every micro-batch through stages and channels exactly as
`evaluate` does for one plan, with one array operation for all plans:

    forward  i:  each stage waits for micro-batch i, for itself, and for the backward
                 that must come first; a running maximum along the line of stages and
                 channels gives all ends at once
    backward:    after forward i, stage s (at most K_s in flight) may run backward i - K_s + 1
"""

from __future__ import annotations

import numpy as np

from .pricing import Prices
from .table import Floats, Ints, Layout


def in_flight(stages: int, micro_batches: int, schedule: str, multiplicity: int) -> Ints:
    """Most micro-batches between forward and backward on each stage."""
    if schedule == "gpipe":
        return np.full(stages, micro_batches, dtype=np.int64)
    behind = np.arange(stages, 0, -1)
    return np.minimum(micro_batches, behind if multiplicity == 1 else 2 * behind - 1)


def memory_bytes(prices: Prices, flying: Ints) -> Floats:
    """Bytes on a device of each stage."""
    return prices.fixed_bytes + flying * prices.flying_bytes


def missing_bytes(prices: Prices, flying: Ints) -> Floats:
    """By how much the worst device of each plan is too small; 0 or less: the plan fits."""
    missing: Floats = (memory_bytes(prices, flying) - prices.limit_bytes).max(axis=1)
    return missing


def gpipe_ends(prices: Prices, micro_batches: int) -> Floats:
    """When the last backward of each stage ends under GPipe: two flow shops, each with a closed form."""
    more = micro_batches - 1
    ahead = np.maximum(prices.forward_s.max(axis=1), prices.there_s.max(axis=1, initial=0.0))
    start = prices.forward_s.sum(axis=1) + prices.there_s.sum(axis=1) + more * ahead
    back = np.concatenate([prices.back_s, np.zeros((len(start), 1))], axis=1)[:, ::-1]
    backward = prices.backward_s[:, ::-1]
    ends = np.cumsum(back + backward, axis=1) + more * np.maximum.accumulate(np.maximum(back, backward), axis=1)
    found: Floats = (start[:, None] + ends)[:, ::-1]
    return found


def backward_ends(prices: Prices, micro_batches: int, multiplicity: int) -> Floats:
    """When the last backward of each stage ends under 1F1B, shape (plans, stages)."""
    forward, backward, back = prices.forward_s, prices.backward_s, prices.back_s
    plans, stages = forward.shape
    behind = np.arange(stages, 0, -1)
    flying = behind if multiplicity == 1 else 2 * behind - 1  # strictly falling: no backward needs one of its round
    line = np.zeros((plans, 2 * stages - 1))
    line[:, 0::2] = forward
    line[:, 1::2] = prices.there_s
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


def steps(
    prices: Prices, micro_batches: int, schedule: str, multiplicity: int, layout: Layout, meet: bool = True
) -> Floats:
    """Step seconds of each plan: the replayed schedule and the all-reduces after it.

    Without `meet`, all-reduces that share a machine's port are not made to wait: a lower bound.
    """
    gpipe = schedule == "gpipe" or prices.forward_s.shape[1] == 1
    ends = gpipe_ends(prices, micro_batches) if gpipe else backward_ends(prices, micro_batches, multiplicity)
    return np.maximum(reduced(prices, ends, layout, meet), tied_end(prices, ends))


def tied_end(prices: Prices, ends: Floats) -> Floats:
    """When the parameters that several stages hold are reduced; 0 without any."""
    return np.where(prices.tied_s > 0, ends[np.arange(len(ends)), prices.tied_stage] + prices.tied_s, 0.0)


def reduced(prices: Prices, ends: Floats, layout: Layout, meet: bool) -> Floats:
    """When the last all-reduce ends; rings that share a machine's port wait for one another, late stages first."""
    stages = ends.shape[1]
    last: Floats = (ends + prices.extra_s).max(axis=1)
    sharing = prices.spans.sum(axis=1) > 1
    if not meet or not sharing.any():
        return last
    picked = np.nonzero(sharing)[0]
    end, extra, takes = ends[picked], prices.extra_s[picked], prices.reduce_s[picked]
    spans, first, stop = prices.spans[picked], prices.first[picked], prices.stop[picked]
    done = np.zeros(end.shape)
    for stage in range(stages - 1, -1, -1):
        start = end[:, stage] + extra[:, stage] - takes[:, stage]
        for later in range(stage + 1, min(stages, stage + 9)):
            both = spans[:, stage] & spans[:, later]
            if not layout.shared_groups:
                both &= layout.meet(first[:, stage], stop[:, stage], first[:, later], stop[:, later])
            start = np.where(both, np.maximum(start, done[:, later]), start)
        done[:, stage] = np.where(takes[:, stage] > 0, start + takes[:, stage], end[:, stage])
    last[picked] = done.max(axis=1)
    return last


def lower_bounds(prices: Prices, micro_batches: int) -> Floats:
    """No schedule of these stages ends earlier: each stage's work between the way to it and the way back.

    For each stage s: the first micro-batch must come to it, it works through all of
    them, and the last gradient must go all the way back; each all-reduce on the way
    starts no earlier. The same for each channel.
    """
    forward, backward = prices.forward_s, prices.backward_s
    plans, stages = forward.shape
    there = np.concatenate([prices.there_s, np.zeros((plans, 1))], axis=1)
    back = np.concatenate([prices.back_s, np.zeros((plans, 1))], axis=1)
    arrive = np.cumsum(forward + there, axis=1) - forward - there
    home = np.cumsum(backward + back, axis=1) - backward - back  # backward seconds of the stages before
    rest = home + np.maximum.accumulate(prices.extra_s - home, axis=1)  # after s ends: way back and all-reduces
    work = micro_batches * (forward + backward)
    bound = (arrive + work + rest).max(axis=1)
    whole = (forward + there + backward + back).sum(axis=1)
    bound = np.maximum(bound, whole + (prices.extra_s - home).max(axis=1))
    channel = arrive + forward + (micro_batches - 1) * np.maximum(there, back) + there
    after = whole[:, None] - arrive - forward - there - home - backward - back  # behind the channel, there and back
    bound = np.maximum(bound, (channel + after + back + backward + rest).max(axis=1))
    holder = work[np.arange(plans), prices.tied_stage]
    found: Floats = np.maximum(bound, np.where(prices.tied_s > 0, holder + prices.tied_s, 0.0))
    return found


def formula_steps(prices: Prices, micro_batches: int, flying: Ints, gpipe: bool, multiplicity: int = 1) -> Floats:
    """The closed form of the step (see `formulas.py`), all-reduces without contention."""
    forward, backward = prices.forward_s, prices.backward_s
    plans, stages = forward.shape
    there = np.concatenate([prices.there_s, np.zeros((plans, 1))], axis=1)
    back = np.concatenate([prices.back_s, np.zeros((plans, 1))], axis=1)
    whole = forward + there + backward + back
    latency = np.cumsum(whole[:, ::-1], axis=1)[:, ::-1]  # of one micro-batch from stage s on, there and back
    behind = np.cumsum((backward + back)[:, ::-1], axis=1)[:, ::-1] - back  # backward from the end to stage s
    if gpipe:
        ahead = np.maximum(forward, there).max(axis=1)
        period = ahead + np.maximum(backward, back).max(axis=1)
    else:
        period = np.maximum(forward + backward, np.maximum(there, back)).max(axis=1)
        for reach in range(1, min(3, stages)):  # neighbours wait for one another: 1F1B alternates strictly
            trip = latency[:, :-reach] - latency[:, reach:] + (forward + backward)[:, reach:]
            period = np.maximum(period, trip.max(axis=1) / (multiplicity * reach + 1))
        period = np.maximum(period, (latency / flying).max(axis=1))
    tail = np.maximum(behind[:, 0], (behind + prices.extra_s).max(axis=1))
    total: Floats = (forward + there).sum(axis=1) + (micro_batches - 1) * period + tail
    return total
