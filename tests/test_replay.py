"""Many plans priced at once cost what `evaluate` says of each, and no plan is below its bound."""

from __future__ import annotations

import plan_oracle as oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies_plans import chains, clusters, plans

from efftra_fx.cluster import Cluster, Link
from efftra_fx.cost import Chain, Crossing, NodeCost, Timing
from efftra_fx.passes.candidates import pad
from efftra_fx.passes.evaluate import evaluate
from efftra_fx.passes.pricing import Pricer
from efftra_fx.passes.replay import formula_steps, in_flight, lower_bounds, memory_bytes, queues, steps
from efftra_fx.passes.rules import Rules
from efftra_fx.passes.table import Layout, Table
from efftra_fx.plan import Plan

RULES = st.builds(Rules, overlap=st.booleans(), whole_rows=st.booleans(), forwarded_skips=st.booleans())
LEAST = 0.7  # of formula / replay; `benchmarks/formula_ratio.py` measures it


@settings(max_examples=200)
@given(st.data(), chains(), clusters(), st.integers(1, 9), RULES)
def test_a_batch_of_plans_costs_what_each_costs_alone(
    data: st.DataObject, chain: Chain, cluster: Cluster, rows: int, rules: Rules
) -> None:
    plan: Plan = data.draw(plans(len(chain.blocks), len(cluster.devices), rows))
    order = tuple(device for stage in plan.stages for device in stage.devices)
    table = Table(chain, cluster, rules)
    layout = Layout(cluster, "any", (order,), table)
    cuts = (*[stage.first_block for stage in plan.stages], plan.blocks)
    counts, zeros = tuple(len(stage.devices) for stage in plan.stages), (0,) * len(plan.stages)
    filler = ((0, plan.blocks), (len(order),), (0,))
    batch = pad([(cuts, counts, zeros), filler])
    pricer = Pricer(table, layout, rows, plan.micro_batches)
    prices = pricer.price(batch)
    flying = in_flight(batch.counts.shape[1], plan.micro_batches, plan.schedule, plan.in_flight)
    figures = evaluate(plan, chain, cluster, rows, rules)
    meeting = sum(len(stage.machines) > 1 and bool(stage.reduces) for stage in figures.stages) > 1
    seconds = float(steps(prices, plan.micro_batches, plan.schedule, plan.in_flight, layout, meet=False)[0])
    if meeting:
        assert seconds <= figures.step_s * (1 + 1e-9)
    else:
        assert seconds == pytest.approx(figures.step_s, rel=1e-9, abs=1e-12)
    assert pricer.within(batch, figures.step_s * (1 + 1e-9) + 1e-12)[0]
    assert lower_bounds(prices, plan.micro_batches)[0] <= figures.step_s * (1 + 1e-9) + 1e-12
    own = memory_bytes(prices, flying)[0][-len(counts) :]
    assert own.tolist() == pytest.approx(list(figures.memory_bytes), abs=2)
    alone = float(formula_steps(prices, plan.micro_batches, plan.schedule, plan.in_flight)[0])
    assert LEAST * seconds <= alone <= seconds * (1 + 1e-9) + 1e-12
    queue = queues(prices, layout, rules.overlap)
    formula = float(formula_steps(prices, plan.micro_batches, plan.schedule, plan.in_flight, queue)[0])
    assert alone <= formula <= figures.step_s * (1 + 1e-9) + 1e-12
    met = float(steps(prices, plan.micro_batches, plan.schedule, plan.in_flight, layout)[0])
    assert formula <= met * (1 + 1e-9) + 1e-12


@settings(max_examples=150)
@given(st.data(), chains(), clusters(), st.integers(1, 9), RULES)
def test_one_plan_costs_what_the_plain_oracle_says(
    data: st.DataObject, chain: Chain, cluster: Cluster, rows: int, rules: Rules
) -> None:
    plan: Plan = data.draw(plans(len(chain.blocks), len(cluster.devices), rows))
    expected = oracle.step_seconds(plan, chain, cluster, rows, rules.overlap, rules.whole_rows, rules.forwarded_skips)
    assert evaluate(plan, chain, cluster, rows, rules).step_s == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_plans_whose_busiest_stage_alone_takes_too_long_are_not_priced() -> None:
    blocks = tuple(NodeCost(f"b{i}", Timing(0.0, 1.0), Timing(0.0, 2.0), 0, 0, 0, 0) for i in range(4))
    chain = Chain(blocks, tuple(Crossing(i, (i + 1,), 1.0) for i in range(3)))
    cluster = Cluster.uniform(1, 4, None, Link(1e12))
    table = Table(chain, cluster, Rules())
    pricer = Pricer(table, Layout(cluster, "line", ((0, 1, 2, 3),), table), 8, 2)
    batch = pad([((0, 4), (4,), (0,)), ((0, 1, 4), (1, 3), (0, 0)), ((0, 3, 4), (1, 3), (0, 0))])
    busiest = [24.0, 24.0, 72.0]  # seconds: 8 rows of 3 s a block, on the stage's devices
    assert [bool(pricer.within(batch, at)[index]) for index, at in enumerate(busiest)] == [True] * 3
    assert pricer.within(batch, 30.0).tolist() == [True, True, False]
    assert not pricer.within(batch, 23.9).any()
