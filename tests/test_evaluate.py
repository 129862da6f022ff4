"""The price of a plan, worked out by hand."""

from __future__ import annotations

import pytest

from efftra_fx.cluster import Cluster, Link
from efftra_fx.cost import Chain, Crossing, NodeCost, Shared, Timing
from efftra_fx.errors import PlanError
from efftra_fx.passes.evaluate import evaluate, flows, row_overlaps
from efftra_fx.passes.rules import Rules
from efftra_fx.plan import Plan, Stage

ONE = NodeCost("a", Timing(0, 1.0), Timing(0, 2.0), 100, 100, 10, 10)
CHAIN = Chain((ONE, ONE, ONE), (Crossing(0, (1, 2), 10), Crossing(1, (2,), 10)))
FOUR = Cluster.uniform(2, 2, None, Link(100.0), Link(10.0))
PLAIN = Rules(overlap=False, whole_rows=False)


def test_data_parallelism_is_compute_and_a_ring_over_the_slow_link() -> None:
    """8 rows on 4 devices: 2 rows * 3 blocks * 3 s = 18 s; ring 2 * 3/4 * 300 / 10 = 45 s."""
    assert evaluate(Plan((Stage(0, 3, (0, 1, 2, 3)),), 1), CHAIN, FOUR, 8, PLAIN).step_s == pytest.approx(63.0)


def test_an_overlapped_ring_starts_with_the_last_block() -> None:
    """The last block's 15 s start 8 s before the end: 3 * 15 - 8 = 37 s are left after 18 s."""
    rules = Rules(overlap=True, whole_rows=False)
    assert evaluate(Plan((Stage(0, 3, (0, 1, 2, 3)),), 1), CHAIN, FOUR, 8, rules).step_s == pytest.approx(55.0)


def test_a_pipeline_of_two_waits_for_its_transfers() -> None:
    """2 rows whole: f = 2, 4; b = 4, 8; 20 + 20 bytes a row pair at 100/s there and back."""
    plan = Plan((Stage(0, 1, (0,)), Stage(1, 3, (1,))), 1)
    assert evaluate(plan, CHAIN, FOUR, 2, PLAIN).step_s == pytest.approx(2 + 0.2 + 4 + 8 + 0.2 + 4)


def test_the_port_between_machines_carries_all_rows_of_a_machine() -> None:
    """Both devices of machine 0 send 1 row of 10 bytes over one port of 10/s: 2 s, not 1."""
    plan = Plan((Stage(0, 1, (0, 1)), Stage(1, 3, (2, 3))), 1)
    assert evaluate(plan, CHAIN, FOUR, 2, PLAIN).stages[0].send_s == pytest.approx(2.0)


def test_a_skip_goes_straight_or_through_every_stage_between() -> None:
    plan = Plan((Stage(0, 1, (0,)), Stage(1, 2, (1,)), Stage(2, 3, (2,))), 1)
    assert [flow.next[0] for flow in flows(plan, CHAIN, Rules())] == [10, 10, 0]
    assert [flow.next[0] for flow in flows(plan, CHAIN, Rules(forwarded_skips=True))] == [10, 20, 0]
    assert [flow.coming[0] for flow in flows(plan, CHAIN, Rules())] == [0, 10, 20]


def test_parameters_held_by_two_stages_are_reduced_once_more() -> None:
    tied = Chain(CHAIN.blocks, CHAIN.crossings, (Shared(50, (0, 2)),))
    plan = Plan((Stage(0, 1, (0,)), Stage(1, 3, (1,))), 1)
    alone = evaluate(plan, CHAIN, FOUR, 2, PLAIN).step_s
    assert evaluate(plan, tied, FOUR, 2, PLAIN).step_s == pytest.approx(alone + 2 * 1 / 2 * 50 / 100)


def test_memory_counts_what_flies() -> None:
    """Stage 0 of 2, 2 rows: 400 bytes of weights, gradients and states, 2 * 2 * 10 kept, 2 * 20 in the buffers."""
    plan = Plan((Stage(0, 1, (0,)), Stage(1, 3, (1,))), 4)
    assert evaluate(plan, CHAIN, FOUR, 8, PLAIN).memory_bytes[0] == 400 + 40 + 40


def test_rows_are_cut_whole_or_not() -> None:
    assert row_overlaps(3, 2, 4, whole=True) == [(0, 0, 1.0), (1, 0, 1.0), (2, 1, 2.0)]
    assert row_overlaps(2, 1, 5, whole=False) == [(0, 0, 2.5), (1, 0, 2.5)]


def test_a_plan_for_something_else_is_an_error() -> None:
    with pytest.raises(PlanError, match="the plan has 2 blocks, model has 3"):
        evaluate(Plan((Stage(0, 2, (0,)),), 1), CHAIN, FOUR, 2)
    with pytest.raises(PlanError, match="the plan uses device 9, the cluster has 4"):
        evaluate(Plan((Stage(0, 3, (9,)),), 1), CHAIN, FOUR, 2)
    with pytest.raises(PlanError, match="block a has no cost for tensor width 2"):
        evaluate(Plan((Stage(0, 3, (0, 1), 2),), 1), CHAIN, FOUR, 2)
