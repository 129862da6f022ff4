"""The clock for many plans at once keeps the time of one event after another."""

from __future__ import annotations

import numpy as np
import plan_oracle as oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from efftra_fx.passes.clock import ends
from efftra_fx.plan import Plan, Stage

NUMBERS = st.lists(st.sampled_from([0.0, 0.1, 0.5, 1.0, 1.7, 4.0]), min_size=5, max_size=5)


@settings(max_examples=300)
@given(st.integers(1, 5), NUMBERS, NUMBERS, NUMBERS, NUMBERS, st.integers(1, 12), st.integers(0, 2))
def test_all_ends_are_those_of_the_event_loop(
    depth: int, f: list[float], b: list[float], c: list[float], d: list[float], micro_batches: int, order: int
) -> None:
    schedule, deep = (("1f1b", 1), ("1f1b", 2), ("gpipe", 1))[order]
    plan = Plan(tuple(Stage(s, s + 1, (s,)) for s in range(depth)), micro_batches, schedule, deep)
    times = list(zip(f[:depth], b[:depth], strict=True))
    expected = oracle.last_backwards(plan, times, c[: depth - 1], d[: depth - 1])
    line = (np.array([f[:depth]]), np.array([b[:depth]]), np.array([c[: depth - 1]]), np.array([d[: depth - 1]]))
    assert ends(line, micro_batches, schedule, deep)[0].tolist() == pytest.approx(expected, abs=1e-9)


def test_empty_stages_at_the_front_change_nothing() -> None:
    short = tuple(np.array([row]) for row in ([2.0, 1.0], [3.0, 2.0], [0.5], [0.25]))
    long = tuple(np.array([row]) for row in ([0.0, 2.0, 1.0], [0.0, 3.0, 2.0], [0.0, 0.5], [0.0, 0.25]))
    for schedule, deep in (("1f1b", 1), ("1f1b", 2), ("gpipe", 1)):
        one = ends((short[0], short[1], short[2], short[3]), 6, schedule, deep)[0]
        other = ends((long[0], long[1], long[2], long[3]), 6, schedule, deep)[0]
        assert other[1:].tolist() == pytest.approx(one.tolist())


def test_two_stages_of_gpipe_by_hand() -> None:
    """Forwards 1 + 1, two micro-batches: 3 s; backwards 2 + 2: 4 s and 2 s more to stage 0."""
    line = (np.array([[1.0, 1.0]]), np.array([[2.0, 2.0]]), np.zeros((1, 1)), np.zeros((1, 1)))
    assert ends(line, 2, "gpipe", 1)[0].tolist() == [9.0, 7.0]


@settings(max_examples=100)
@given(st.integers(1, 5), NUMBERS, NUMBERS, NUMBERS, NUMBERS, st.integers(40, 200), st.integers(1, 2))
def test_turns_that_repeat_themselves_are_counted(
    depth: int, f: list[float], b: list[float], c: list[float], d: list[float], micro_batches: int, deep: int
) -> None:
    plan = Plan(tuple(Stage(s, s + 1, (s,)) for s in range(depth)), micro_batches, "1f1b", deep)
    times = list(zip(f[:depth], b[:depth], strict=True))
    expected = oracle.last_backwards(plan, times, c[: depth - 1], d[: depth - 1])
    rows = np.array([f[:depth], [2.0] * depth]), np.array([b[:depth], [1.0] * depth])  # beside another plan
    line = (*rows, np.array([c[: depth - 1], [0.0] * (depth - 1)]), np.array([d[: depth - 1], [3.5] * (depth - 1)]))
    assert ends(line, micro_batches, "1f1b", deep)[0].tolist() == pytest.approx(expected, rel=1e-9)
