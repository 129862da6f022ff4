"""Run the schedules of many plans at once, and bound their step times from below.

The times of the stages go through `clock.py`; the all-reduces come after.
"""

from __future__ import annotations

import numpy as np

from .clock import ends, gpipe_ends
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


def formula_steps(
    prices: Prices, micro_batches: int, schedule: str, multiplicity: int, queue: Floats | None = None
) -> Floats:
    """The formula of the step (see `formulas.py`): no replay is below it.

    One entry a plan; arrays (plans, stages) on the way. `k` are micro-batches in flight.
    `queue` (plans, stages): when the all-reduces of a stage and of those before it that
    wait for it are done, after its last backward; without it they are on their own.
    """
    line = prices.forward_s, prices.backward_s, prices.there_s, prices.back_s
    forward, backward = line[:2]
    plans, stages = forward.shape
    if schedule == "gpipe" or stages == 1:
        last = gpipe_ends(line, micro_batches)
        reduced_s = prices.extra_s if queue is None else np.maximum(prices.extra_s, queue)
        return np.asarray(np.maximum((last + reduced_s).max(axis=1), tied_end(prices, last)))
    none = np.zeros((plans, 1))
    there, back = np.concatenate([prices.there_s, none], axis=1), np.concatenate([prices.back_s, none], axis=1)
    left = prices.extra_s.copy()
    holder = np.arange(plans), prices.tied_stage
    left[holder] = np.maximum(left[holder], prices.tied_s)
    if queue is not None:
        np.maximum(left, queue, out=left)
    own, more = forward + backward, micro_batches - 1
    arrive, home = before(forward + there), before(backward + back)
    rest = home + np.maximum.accumulate(left - home, axis=1)
    k = in_flight(stages, micro_batches, schedule, multiplicity)
    ahead, behind = longest_so_far(forward, there), longest_so_far(backward, back)
    begin = longest_behind(arrive + own + (k - 1) * ahead + home) - home
    wind_down = backward + np.maximum((k - 1) * backward + rest, (k - 1) * behind + home)
    end = longest_behind(arrive + forward + wind_down) - arrive
    found = np.maximum(begin + more * backward + rest, arrive + more * forward + end)
    np.maximum(found, arrive + micro_batches * own + rest, out=found)
    np.maximum(found[:, 1:], arrive[:, 1:] + more * there[:, :-1] + end[:, 1:], out=found[:, 1:])
    np.maximum(
        found[:, :-1],
        begin[:, 1:] + micro_batches * back[:, :-1] + (backward + rest)[:, :-1],
        out=found[:, :-1],
    )
    between = more - k
    looping = int(np.argmax(between >= 0)) if between[-1] >= 0 else stages  # the first stage with a loop
    if looping < stages:
        latency = np.cumsum((own + there + back)[:, ::-1], axis=1)[:, ::-1]  # from a stage to the end and back
        loops = between * own
        for reach in range(1, stages - looping):
            part = slice(looping, stages - reach)
            trip = latency[:, part] - latency[:, looping + reach :] + own[:, looping + reach :]
            times, odd = np.divmod(between[part], multiplicity * reach + 1)
            np.maximum(loops[:, part], times * trip + odd * own[:, part], out=loops[:, part])
        np.maximum(found[:, looping:], (begin + loops + end)[:, looping:], out=found[:, looping:])
    whole: Floats = found.max(axis=1)
    return whole


def queues(prices: Prices, layout: Layout, overlap: bool) -> Floats | None:
    """Seconds from the last backward of each stage until all-reduces that wait in line from it on are done, at least.

    Rings that share a machine's port go one after another, those of late stages first, since
    their gradients are ready first. (plans, stages); `None` where no two meet.
    """
    using = prices.spans & (prices.reduce_s > 0)
    if not (using.sum(axis=1) > 1).any():
        return None
    takes = np.where(using, prices.reduce_s, 0.0)
    if layout.shared_groups:
        sums = np.cumsum(takes, axis=1)
    else:
        first, stop = prices.first, prices.stop
        both = using[:, :-1] & using[:, 1:] & layout.meet(first[:, :-1], stop[:, :-1], first[:, 1:], stop[:, 1:])
        sums = takes.copy()
        for stage in range(1, takes.shape[1]):
            ahead = takes if overlap else sums  # overlapped parts of three rings need not come in this order
            sums[:, stage] += np.where(both[:, stage - 1], ahead[:, stage - 1], 0.0)
    started = prices.backward_s if overlap else 0.0
    return np.where(using, sums - started, 0.0)


def before(terms: Floats) -> Floats:
    """For each stage the sum over all stages before it."""
    return np.asarray(np.cumsum(terms, axis=1) - terms)


def longest_so_far(work: Floats, channel: Floats) -> Floats:
    """For each stage the longest work up to it, and channel before it."""
    longest = work.copy()
    longest[:, 1:] = np.maximum(work[:, 1:], channel[:, :-1])
    return np.asarray(np.maximum.accumulate(longest, axis=1))


def longest_behind(terms: Floats) -> Floats:
    """For each stage the largest term of it and all stages behind."""
    return np.asarray(np.maximum.accumulate(terms[:, ::-1], axis=1)[:, ::-1])
