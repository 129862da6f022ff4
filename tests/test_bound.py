"""No plan is below the bound, and the bound sees what compute alone does not."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies_plans import chains, clusters

from efftra_fx.cluster import Cluster, Link
from efftra_fx.cost import Chain, Crossing, NodeCost, Timing
from efftra_fx.passes import bound as bounds
from efftra_fx.passes.bound import lower_bound, tight_bound
from efftra_fx.passes.candidates import Request, Search
from efftra_fx.passes.partition import partition
from efftra_fx.passes.rules import Rules
from efftra_fx.passes.table import Table


def search_of(chain: Chain, cluster: Cluster, rules: Rules, request: Request) -> Search:
    """A fresh search."""
    return Search(chain, cluster, rules, request, Table(chain, cluster, rules))


def bound_of(search: Search, step_s: float) -> float:
    """The bound, sought up to twice a step."""
    return tight_bound(search, lower_bound(search), 2 * step_s)


@pytest.mark.parametrize(("states", "cells"), [(bounds.MOST_STATES, bounds.MOST_CELLS), (0, bounds.MOST_CELLS), (0, 3)])
@settings(max_examples=40)
@given(st.data())
def test_no_plan_at_all_is_below_the_bound(states: int, cells: int, data: st.DataObject) -> None:
    chain = data.draw(chains(most=5, recompute=data.draw(st.booleans())))
    cluster = data.draw(clusters(most=4, limits=False))
    rows, overlap, forwarded = data.draw(st.integers(1, 6)), data.draw(st.booleans()), data.draw(st.booleans())
    micro = data.draw(st.one_of(st.none(), st.integers(1, rows)))
    alone = data.draw(st.booleans())
    best = partition(
        chain, cluster, rows, micro_batches=micro, overlap=overlap, forwarded_skips=forwarded, undivided_alone=alone
    )
    assert best.proven
    rules = Rules(overlap=overlap, forwarded_skips=forwarded)
    request = Request(rows, micro_batches=micro, undivided_alone=alone)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bounds, "MOST_STATES", states)
        patch.setattr(bounds, "MOST_CELLS", cells)
        assert bound_of(search_of(chain, cluster, rules, request), best.step_s) <= best.step_s * (1 + 1e-9)


def test_a_heavy_block_that_can_neither_be_replicated_nor_split_sets_the_bound() -> None:
    """Its 16 rows of 2 ms on one device; 2 rows of the rest, 4 ms, go through the other three before."""
    light = NodeCost("light", Timing(0, 1e-3 / 3), Timing(0, 2e-3 / 3), 0.0, 0.0, 0.0, 0.0)
    heavy = NodeCost("heavy", Timing(0, 2e-3 / 3), Timing(0, 4e-3 / 3), 1e12, 1e12, 0.0, 0.0)
    chain = Chain((light, light, heavy), tuple(Crossing(index, (index + 1,), 0.0) for index in range(2)))
    cluster = Cluster.uniform(1, 4, None, Link(1e9))
    search = search_of(chain, cluster, Rules(), Request(16, micro_batches=8))
    assert lower_bound(search) == pytest.approx(0.016)
    assert 0.98 < bound_of(search, 0.032) / (0.032 + 0.004 / 3) <= 1


def test_a_cut_cannot_be_faster_than_the_port_behind_it() -> None:
    """Two machines of one device: split, 10 MB a row over 1 GB/s take 10 ms a row; alone, a device takes 6 ms a row."""
    block = NodeCost("b", Timing(0, 1e-3), Timing(0, 2e-3), 1e12, 1e12, 1e7, 0.0)
    chain = Chain((block, block), (Crossing(0, (1,), 1e7),))
    cluster = Cluster.uniform(2, 1, None, None, Link(1e9))
    search = search_of(chain, cluster, Rules(), Request(8, micro_batches=4))
    assert 0.98 < bound_of(search, 0.048) / 0.048 <= 1


def test_no_bound_is_sought_above_the_plan() -> None:
    chain = Chain((NodeCost("b", Timing(0, 1e-3), Timing(0, 2e-3), 1e6, 1e6, 1e3, 1e3),))
    search = search_of(chain, Cluster.local(2), Rules(), Request(4))
    assert tight_bound(search, 0.006, 0.006) == 0.006


@pytest.mark.parametrize("states", [bounds.MOST_STATES, 0])
@pytest.mark.parametrize(("machines", "step_s"), [(1, 0.016), (2, 0.018)])
def test_replicas_must_reduce_their_gradients(
    monkeypatch: pytest.MonkeyPatch, states: int, machines: int, step_s: float
) -> None:
    """8 rows of 3 ms on two devices: 12 ms, and 4 MB by a ring over 1 GB/s inside a machine, 2/3 GB/s between."""
    monkeypatch.setattr(bounds, "MOST_STATES", states)
    chain = Chain((NodeCost("b", Timing(0, 1e-3), Timing(0, 2e-3), 4e6, 4e6, 0.0, 0.0),))
    cluster = Cluster.uniform(machines, 2 // machines, None, Link(1e9), Link(1e9 * 2 / 3))
    search = search_of(chain, cluster, Rules(overlap=False), Request(8))
    assert partition(chain, cluster, 8, overlap=False).step_s == pytest.approx(step_s)
    assert 0.98 < bound_of(search, step_s) / step_s <= 1 + 1e-9
