"""Arrays of the chain and lines of devices say what the chain and the cluster say."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies_plans import chains

from efftra_fx.cluster import Cluster, Link
from efftra_fx.cost import Chain, NodeCost, Timing
from efftra_fx.errors import PlanError
from efftra_fx.passes.rules import Rules
from efftra_fx.passes.table import Layout, RangeMax, Table

EMPTY = Chain((NodeCost("a", Timing(), Timing()),))


@given(st.lists(st.integers(-50, 50), min_size=1, max_size=40), st.data())
def test_the_largest_of_any_run(values: list[int], data: st.DataObject) -> None:
    first = data.draw(st.integers(0, len(values) - 1))
    stop = data.draw(st.integers(first + 1, len(values)))
    ranges = RangeMax(np.array(values, dtype=float))
    assert ranges.of(np.array([first]), np.array([stop]))[0] == max(values[first:stop])


@settings(max_examples=50)
@given(chains())
def test_a_cut_carries_each_value_once(chain: Chain) -> None:
    table = Table(chain, Cluster.local(1), Rules(forwarded_skips=True))
    for cut in range(1, len(chain.blocks)):
        over = [c for c in chain.crossings if c.producer_block < cut <= max(c.consumer_blocks)]
        assert table.cut_bytes[cut] == pytest.approx(sum(c.bytes_per_row for c in over))
        assert table.back_bytes[cut] == pytest.approx(sum(c.bytes_per_row for c in over if c.gradient))


def test_rings_leave_a_machine_where_the_line_does() -> None:
    cluster = Cluster.uniform(2, 3, None, Link(1e10), Link(1e9))
    table = Table(EMPTY, cluster, Rules())
    line = Layout(cluster, "contiguous", ((0, 1, 2, 3, 4, 5),), table)
    first, count = np.array([0, 0, 2, 3, 1]), np.array([3, 4, 2, 3, 1])
    assert line.spans(first, count).tolist() == [False, True, True, False, False]
    halves = Layout(cluster, "repeated", ((0, 1, 2), (3, 4, 5)), table)
    assert halves.spans(np.array([0]), np.array([1])).tolist() == [True]
    assert halves.devices(1, 2) == (1, 2, 4, 5)
    mixed = Layout(cluster, "spread", ((0, 3, 1, 4, 2, 5),), table)
    one, two = np.array([0]), np.array([2])
    assert mixed.meet(one, one + 1, two, two + 1).tolist() == [True]
    assert mixed.meet(one, one + 1, two + 1, two + 2).tolist() == [False]


def test_a_width_without_costs_is_an_error() -> None:
    with pytest.raises(PlanError, match="tensor=4: .* costs for tensor width 1 only"):
        Table(EMPTY, Cluster.local(4), Rules(), tensor=4)
