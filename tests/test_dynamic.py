"""The dynamic program's plans are plans, keep to its bound, and hold the best where everything is separable."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies_plans import chains, clusters

from efftra_fx.cluster import Cluster, Link
from efftra_fx.cost import Chain, Crossing, NodeCost, Timing
from efftra_fx.passes.candidates import Request, Search, pad
from efftra_fx.passes.dynamic import Program, thinned
from efftra_fx.passes.placement import layouts
from efftra_fx.passes.pricing import IMPOSSIBLE
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


@settings(max_examples=30)
@given(st.lists(st.integers(1, 9), min_size=2, max_size=6), st.integers(2, 8))
def test_with_few_micro_batches_it_finds_the_least_way_through_that_counts_all_work(
    work: list[int], micro_batches: int
) -> None:
    blocks = tuple(NodeCost(f"b{i}", Timing(0, 0.001 * one), Timing(0, 0.002 * one)) for i, one in enumerate(work))
    chain = Chain(blocks, tuple(Crossing(i, (i + 1,), 10) for i in range(len(work) - 1)))
    cluster = Cluster.uniform(1, 4, None, Link(1e5))
    search = search_of(chain, cluster, 24)
    layout = layouts(cluster, search.table)[0]
    pricer = search.pricer(layout, micro_batches)
    answer = Program(search, pricer, np.arange(len(work) + 1), 4).run(IMPOSSIBLE / 2, micro_batches)
    assert answer is not None
    depths = np.count_nonzero(answer[0].counts, axis=1)
    for stages in range(1, min(4, len(work)) + 1):
        best = np.inf
        for inner in itertools.combinations(range(1, len(work)), stages - 1):
            for counts in itertools.product(range(1, 5), repeat=stages):
                if sum(counts) <= 4:
                    prices = pricer.price(pad([((0, *inner, len(work)), counts, (0,) * stages)]))
                    own = (prices.forward_s + prices.backward_s)[0]
                    between = np.append(prices.there_s[0] + prices.back_s[0], 0.0)
                    before = np.cumsum(own + between) - own - between
                    best = min(best, float((before + micro_batches * own).max()))
        found = float(answer[1][depths == stages].min())
        assert found == pytest.approx(best, rel=1e-5)  # the program's numbers are float32


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
