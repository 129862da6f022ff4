"""The equations, the numeric form made from them, and the arrays that the search uses agree."""

from __future__ import annotations

import numpy as np
import pytest
import sympy as sp
from hypothesis import given, settings
from hypothesis import strategies as st

from efftra_fx.cluster import Link
from efftra_fx.formulas import StageTerms, numeric_step, ring_all_reduce, stage_memory, step
from efftra_fx.passes.clock import ends
from efftra_fx.passes.evaluate import ring_seconds
from efftra_fx.passes.pricing import Prices
from efftra_fx.passes.replay import formula_steps, in_flight

SECONDS = st.sampled_from([0.0, 0.1, 0.5, 1.0, 1.7, 4.0])
NUMBERS = st.lists(SECONDS, min_size=4, max_size=4)
LEAST = 0.7  # of formula / replay; `benchmarks/formula_ratio.py` measures it


def prices(f: list[float], b: list[float], c: list[float], d: list[float], a: list[float]) -> Prices:
    """Prices of one plan with these seconds."""
    row = [np.array([values]) for values in (f, b, c, d, a)]
    zero = np.zeros((1, len(f)))
    none, whole = np.zeros(1), np.zeros((1, len(f)), dtype=np.int64)
    return Prices(
        row[0], row[1], row[2], row[3], row[4], row[4], none, whole[:, 0], zero, zero, zero, zero > 0, whole, whole
    )


@settings(max_examples=40)
@given(st.integers(1, 3), NUMBERS, NUMBERS, NUMBERS, NUMBERS, NUMBERS, st.integers(1, 9), st.integers(0, 2))
def test_the_arrays_of_the_search_are_the_sympy_formula(
    depth: int, f: list[float], b: list[float], c: list[float], d: list[float], a: list[float], m: int, order: int
) -> None:
    schedule, deep = (("1f1b", 1), ("1f1b", 2), ("gpipe", 1))[order]
    flying = in_flight(depth, m, schedule, deep).tolist()
    parts = prices(f[:depth], b[:depth], c[: depth - 1], d[: depth - 1], a[:depth])
    array = float(formula_steps(parts, m, schedule, deep)[0])
    there, back = [*c[: depth - 1], 0.0], [*d[: depth - 1], 0.0]
    numbers = [number for s in range(depth) for number in (f[s], b[s], there[s], back[s], a[s], float(flying[s]))]
    assert numeric_step(depth, schedule, deep)(m, *numbers) == pytest.approx(array, rel=1e-12)
    stages = [StageTerms(f[s], b[s], there[s], back[s], a[s], flying[s]) for s in range(depth)]
    assert float(step(stages, schedule, deep, m)) == pytest.approx(array, rel=1e-12)


@settings(max_examples=300)
@given(st.integers(1, 8), st.data(), st.integers(1, 24), st.integers(0, 2))
def test_no_schedule_ends_before_the_formula(depth: int, data: st.DataObject, m: int, order: int) -> None:
    schedule, deep = (("1f1b", 1), ("1f1b", 2), ("gpipe", 1))[order]
    numbers = st.lists(SECONDS, min_size=depth, max_size=depth)
    f, b, c, d, a = (data.draw(numbers) for _ in range(5))
    parts = prices(f, b, c[:-1], d[:-1], a)
    line = parts.forward_s, parts.backward_s, parts.there_s, parts.back_s
    replayed = float((ends(line, m, schedule, deep) + parts.extra_s).max())
    formula = float(formula_steps(parts, m, schedule, deep)[0])
    assert formula <= replayed * (1 + 1e-9)
    assert formula >= replayed * LEAST
    if schedule == "gpipe" or depth == 1:
        assert formula == pytest.approx(replayed, rel=1e-12)


def test_whole_loops_are_counted_without_rounding() -> None:
    """Of four micro-batches three are in flight: no loop of three more is left, whatever a third rounds to."""
    first, last = (0.0, 0.1, 0.0, 0.0, 0.0), (0.0, 0.0, 0.0, 0.0, 0.0)
    assert numeric_step(2, "1f1b", 2)(4, *first, 3.0, *last, 1.0) == pytest.approx(0.4, rel=1e-12)


def test_two_equal_stages_without_transfers_are_the_textbook_pipeline() -> None:
    """(m + S - 1) (f + b) for f = 1, b = 2, S = 2, m = 4, and nothing reduced."""
    stage = (1.0, 2.0, 0.0, 0.0, 0.0)
    assert numeric_step(2, "1f1b")(4, *stage, 2.0, *stage, 1.0) == 15.0


def test_the_ring_is_the_one_that_plans_are_priced_with() -> None:
    r, n, bandwidth, latency = sp.symbols("r n B L", positive=True)
    value = ring_all_reduce().subs({r: 4, n: 1e9, bandwidth: 1e10, latency: 1e-5})
    assert float(value) == pytest.approx(ring_seconds(1e9, 4, Link(1e10, 1e-5)))
    assert ring_seconds(1e9, 1, Link(1e10)) == 0.0


def test_memory_counts_weights_gradients_states_and_micro_batches_in_flight() -> None:
    w, g, z, flying, x, s, v, i, o = sp.symbols("w g z K x s v i o", nonnegative=True)
    value = stage_memory().subs({w: 10, g: 8, z: 2, flying: 3, x: 4, s: 5, v: 1, i: 2, o: 3})
    assert value == 10 + 24 + 4 * 16 + 10
