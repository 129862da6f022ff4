"""Run the schedules of many plans at once, and bound their step times from below.

The times of the stages go through `clock.py`; the all-reduces come after.
"""

from __future__ import annotations

import numpy as np

from .clock import ends
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


def steps(
    prices: Prices, micro_batches: int, schedule: str, multiplicity: int, layout: Layout, meet: bool = True
) -> Floats:
    """Step seconds of each plan: the replayed schedule and the all-reduces after it.

    Without `meet`, all-reduces that share a machine's port are not made to wait: a lower bound.
    """
    line = prices.forward_s, prices.backward_s, prices.there_s, prices.back_s
    last = ends(line, micro_batches, schedule, multiplicity)
    return np.maximum(reduced(prices, last, layout, meet), tied_end(prices, last))


def tied_end(prices: Prices, last: Floats) -> Floats:
    """When the parameters that several stages hold are reduced; 0 without any."""
    return np.where(prices.tied_s > 0, last[np.arange(len(last)), prices.tied_stage] + prices.tied_s, 0.0)


def reduced(prices: Prices, done_s: Floats, layout: Layout, meet: bool) -> Floats:
    """When the last all-reduce ends; rings that share a machine's port wait for one another, late stages first."""
    stages = done_s.shape[1]
    last: Floats = (done_s + prices.extra_s).max(axis=1)
    sharing = prices.spans.sum(axis=1) > 1
    if not meet or not sharing.any():
        return last
    picked = np.nonzero(sharing)[0]
    end, extra, takes = done_s[picked], prices.extra_s[picked], prices.reduce_s[picked]
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
    behind = np.cumsum((backward + back)[:, ::-1], axis=1)[:, ::-1]  # backward from the end to stage s
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
