"""The order of work: what each stage computes when, under GPipe and 1F1B.

Two questions are answered here and nothing else. In which order does a stage do its
forwards and backwards? And how do all stages' works line up in one order of time?
From the second, lowering derives where receives stand in each program.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Literal, TypeAlias, assert_never

from efftra_fx.errors import PlanError
from efftra_fx.plan import SCHEDULES, Plan
from efftra_fx.program import Wiring

Kind: TypeAlias = Literal["forward", "backward", "backward_input", "backward_weight"]
Times: TypeAlias = tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Work:
    """One computation of a stage; only `backward_weight` may hold several micro-batches."""

    kind: Kind
    micro_batches: tuple[int, ...]


def warm_up(schedule: str, behind: int, micro_batches: int, in_flight: int = 1) -> int:
    """Return how many forwards a stage does before its first backward, `behind` stages from the end.

    The last stage has `behind` 1. It is also the most micro-batches that the stage
    keeps between forward and backward.

    >>> [warm_up("1f1b", behind, 8) for behind in (4, 3, 2, 1)]
    [4, 3, 2, 1]
    >>> [warm_up("1f1b", behind, 8, in_flight=2) for behind in (4, 3, 2, 1)]
    [7, 5, 3, 1]
    """
    if schedule not in SCHEDULES:
        raise PlanError(f"schedule must be one of {', '.join(SCHEDULES)}, got {schedule!r}")
    if in_flight not in (1, 2):
        raise PlanError(f"in_flight must be 1 or 2, got {in_flight}")
    if schedule == "gpipe":
        return micro_batches
    return min(micro_batches, behind if in_flight == 1 else 2 * behind - 1)


def stage_work(warm: int, micro_batches: int, defer_weights: int = 1) -> tuple[Work, ...]:
    """Return a stage's work in order: `warm` forwards, then backward and forward in turn, then the other backwards.

    With `defer_weights` above 1, weight gradients are computed apart, once for so
    many micro-batches and for the rest at the end.

    >>> [f"{work.kind[0]}{work.micro_batches[0]}" for work in stage_work(2, 4)]
    ['f0', 'f1', 'b0', 'f2', 'b1', 'f3', 'b2', 'b3']
    """
    work = [Work("forward", (k,)) for k in range(warm)]
    waiting: tuple[int, ...] = ()
    for k in range(micro_batches):
        if defer_weights == 1:
            work.append(Work("backward", (k,)))
        else:
            work.append(Work("backward_input", (k,)))
            waiting += (k,)
            if len(waiting) == defer_weights or k == micro_batches - 1:
                work.append(Work("backward_weight", waiting))
                waiting = ()
        if warm + k < micro_batches:
            work.append(Work("forward", (warm + k,)))
    return tuple(work)


def order_of_work(
    plan: Plan, wiring: Wiring, micro_batches: int, times: Times | None = None, defer_weights: int = 1
) -> tuple[tuple[int, Work], ...]:
    """Return the work of all stages, as (stage, work), in one order of time.

    It is the order in which works end on an imaginary cluster without transfer
    times; `times` are each stage's seconds (forward, backward), by default 1 and 2.
    A work stands behind everything that it depends on. Stages that have nothing to
    differentiate keep their backwards here, as pauses: so they run no further ahead
    of the others than a stage with gradients would.
    """
    stages = wiring.stages
    durations = times if times is not None else ((1.0, 2.0),) * stages
    works = [
        stage_work(
            warm_up(plan.schedule, stages - stage, micro_batches, plan.in_flight),
            micro_batches,
            defer_weights if wiring.has_weights(stage) and stage not in wiring.synced else 1,
        )
        for stage in range(stages)
    ]
    needs = _dependencies(wiring, works)
    unmet = {key: len(sources) for key, sources in needs.items()}
    followers: dict[tuple[int, int], list[tuple[int, int]]] = {key: [] for key in needs}
    for key, sources in needs.items():
        for source in sources:
            followers[source].append(key)
    end_s: dict[tuple[int, int], float] = {}
    ready: list[tuple[float, bool, int, int]] = []

    def push(key: tuple[int, int]) -> None:
        stage, at = key
        work = works[stage][at]
        start = max((end_s[source] for source in needs[key]), default=0.0)
        end_s[key] = start + _seconds(work, *durations[stage])
        is_forward = work.kind == "forward"
        heapq.heappush(ready, (end_s[key], not is_forward, stage if is_forward else -stage, at))

    for key, count in unmet.items():
        if not count:
            push(key)
    order: list[tuple[int, Work]] = []
    while ready:
        _, _, stage, at = heapq.heappop(ready)
        stage = abs(stage)
        order.append((stage, works[stage][at]))
        for follower in followers[stage, at]:
            unmet[follower] -= 1
            if not unmet[follower]:
                push(follower)
    assert len(order) == len(needs), "a schedule waits for itself"
    return tuple(order)


def _seconds(work: Work, forward_s: float, backward_s: float) -> float:
    match work.kind:
        case "forward":
            return forward_s
        case "backward":
            return backward_s
        case "backward_input":
            return backward_s / 2
        case "backward_weight":
            return backward_s / 2 * len(work.micro_batches)
        case _:
            assert_never(work.kind)


def _dependencies(wiring: Wiring, works: list[tuple[Work, ...]]) -> dict[tuple[int, int], set[tuple[int, int]]]:
    """Return for each work, by (stage, place in its order), the works that must have ended before it."""
    forwards: list[dict[int, int]] = [{} for _ in works]
    backwards: list[dict[int, int]] = [{} for _ in works]
    for stage, line in enumerate(works):
        for at, work in enumerate(line):
            if work.kind == "forward":
                forwards[stage][work.micro_batches[0]] = at
            elif work.kind != "backward_weight":
                backwards[stage][work.micro_batches[0]] = at
    needs: dict[tuple[int, int], set[tuple[int, int]]] = {
        (stage, at): {(stage, at - 1)} if at else set() for stage, line in enumerate(works) for at in range(len(line))
    }
    for producer, consumer in sorted({(value.producer, c) for value in wiring.values for c in value.consumers}):
        for k, at in forwards[consumer].items():
            needs[consumer, at].add((producer, forwards[producer][k]))
        for k, at in backwards[producer].items():
            needs[producer, at].add((consumer, backwards[consumer][k]))
    return needs
