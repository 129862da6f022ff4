"""The dynamic program's plans are plans, keep to its bound, and hold the best where everything is separable."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies_plans import chains, clusters

from efftra_fx.cluster import Cluster, Link
from efftra_fx.cost import Chain, Crossing, NodeCost, Timing
from efftra_fx.passes.candidates import Request, Search
from efftra_fx.passes.dynamic import Program, thinned
from efftra_fx.passes.placement import layouts
from efftra_fx.passes.rules import Rules
from efftra_fx.passes.scan import scan
from efftra_fx.passes.table import Table


def search_of(chain: Chain, cluster: Cluster, rows: int) -> Search:
    """A fresh search."""
    rules = Rules(whole_rows=False)
    return Search(chain, cluster, rules, Request(rows), Table(chain, cluster, rules))


@settings(max_examples=25)
@given(chains(), clusters(), st.integers(1, 6))
def test_every_plan_it_gives_covers_the_chain_with_devices_that_are_there(
    chain: Chain, cluster: Cluster, micro_batches: int
) -> None:
    search = search_of(chain, cluster, 6)
    for layout in layouts(cluster, search.table):
        for batch in scan(search, layout, micro_batches, 28, 4, 3):
            assert (batch.cuts[:, 0] == 0).all() and (batch.cuts[:, -1] == len(chain.blocks)).all()
            used = batch.counts > 0
            assert (np.diff(batch.cuts, axis=1)[used] > 0).all()
            assert (batch.skip + batch.counts.sum(axis=1) <= layout.size).all()


def test_no_stage_is_above_the_bound_on_the_period() -> None:
    blocks = tuple(NodeCost(f"b{i}", Timing(0, 0.001 * (1 + i % 3)), Timing(0, 0.002)) for i in range(9))
    chain = Chain(blocks, tuple(Crossing(i, (i + 1,), 10) for i in range(8)))
    cluster = Cluster.uniform(1, 5, None, Link(1e9))
    search = search_of(chain, cluster, 32)
    layout = layouts(cluster, search.table)[0]
    pricer = search.pricer(layout, 8)
    for period in (0.02, 0.04, 0.08):
        answer = Program(search, pricer, np.arange(10), 5).run(period)
        if answer is not None:
            prices = pricer.price(answer[0])
            assert ((prices.forward_s + prices.backward_s) <= period * (1 + 1e-9)).all()


def test_an_impossible_bound_gives_no_plan() -> None:
    chain = Chain((NodeCost("a", Timing(0, 1.0), Timing(0, 1.0)),))
    cluster = Cluster.local(2)
    search = search_of(chain, cluster, 4)
    layout = layouts(cluster, search.table)[0]
    assert Program(search, search.pricer(layout, 2), np.arange(2), 1).run(1e-6) is None


def test_thinning_keeps_both_ends_and_the_cheapest_cuts() -> None:
    blocks = tuple(NodeCost(f"b{i}", Timing(0, 0.001), Timing(0, 0.002)) for i in range(200))
    chain = Chain(blocks, tuple(Crossing(i, (i + 1,), 1 if i % 10 == 9 else 1000) for i in range(199)))
    table = Table(chain, Cluster.local(1), Rules())
    kept = thinned(table, 21)
    assert kept[0] == 0 and kept[-1] == 200 and len(kept) <= 22
    cheap = sum(at % 10 == 0 for at in kept.tolist())
    assert cheap >= 16  # of 22; a slice between two cheap cuts has none
    assert thinned(table, 300).tolist() == list(range(201))
