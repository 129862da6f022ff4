"""The explanation fills in the formula, names the bottleneck, and plans again for every 'what if'."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st
from strategies_plans import chains, clusters
from torch import nn

from efftra_fx import compile
from efftra_fx.cluster import Cluster, Link
from efftra_fx.cost import Chain, Crossing, NodeCost, Timing
from efftra_fx.errors import MemoryPlanError
from efftra_fx.passes.evaluate import evaluate
from efftra_fx.passes.explain import about_others, changed_clusters, explain, formula_seconds, parts
from efftra_fx.passes.partition import partition
from efftra_fx.passes.rules import Rules
from efftra_fx.plan import Plan, Stage


def chain_of(seconds: list[float], row_bytes: float) -> Chain:
    """Blocks of these forward seconds a row, twice that backward."""
    blocks = tuple(
        NodeCost(f"b{index}", Timing(0, s), Timing(0, 2 * s), 1e6, 1e6, row_bytes, row_bytes)
        for index, s in enumerate(seconds)
    )
    return Chain(blocks, tuple(Crossing(index, (index + 1,), row_bytes) for index in range(len(blocks) - 1)))


def test_what_would_help_is_planned_again() -> None:
    chain = chain_of([1e-3] * 4, 1e5)
    cluster = Cluster.uniform(2, 2, 16, Link(1e10, 1e-5), Link(1e8, 1e-4))
    planned = partition(chain, cluster, 8)
    text = explain(planned, chain, cluster, 8)
    for label, changed in changed_clusters(cluster):
        again = partition(chain, changed, 8).step_s
        assert f"{label}: predicted step {again * 1e3:.4g} ms" in text
    assert "step = " in text and "other plans:" in text and "data parallelism alone" in text
    assert "20 % more memory" in text and "stage 0:" in text


@pytest.mark.parametrize(
    ("seconds", "row_bytes", "words"),
    [
        ([1e-3, 5e-3], 1.0, "compute of stage 1"),
        ([1e-3, 1e-3], 1e9, "transfer between stages 0 and 1|the way from stage 0 to stage 1 and back"),
    ],
)
def test_the_bottleneck_is_named(seconds: list[float], row_bytes: float, words: str) -> None:
    chain, cluster = chain_of(seconds, row_bytes), Cluster.uniform(1, 2, None, Link(1e10))
    plan = Plan((Stage(0, 1, (0,)), Stage(1, 2, (1,))), 8)
    figures = evaluate(plan, chain, cluster, 8)
    assert any(word in parts(plan, figures).bound for word in words.split("|"))


def test_a_bound_that_is_not_the_slowest_stage_says_why() -> None:
    chain, cluster = chain_of([3.1e-3, 3e-3], 1.0), Cluster.uniform(1, 2, None, Link(1e10))
    plan = Plan((Stage(0, 1, (0,)), Stage(1, 2, (1,))), 2)
    figures = evaluate(plan, chain, cluster, 8)
    assert parts(plan, figures).bound.startswith("compute of stage 1: stage 0 is slower, but")
    assert parts(plan, figures).total_s == pytest.approx(formula_seconds(plan, figures))


def test_the_parts_add_up_to_the_formula() -> None:
    chain, cluster = chain_of([1e-3, 2e-3, 1e-3], 1e5), Cluster.uniform(1, 4, None, Link(1e9))
    plan = Plan((Stage(0, 1, (0,)), Stage(1, 2, (1, 2)), Stage(2, 3, (3,))), 4)
    figures = evaluate(plan, chain, cluster, 8)
    assert parts(plan, figures).total_s == pytest.approx(formula_seconds(plan, figures))
    assert 0.9 * figures.step_s <= formula_seconds(plan, figures) <= figures.step_s * (1 + 1e-9)


def test_an_undivided_batch_has_no_steady_state() -> None:
    chain, cluster = chain_of([1e-3], 1e5), Cluster.uniform(1, 2, None, Link(1e9))
    plan = Plan((Stage(0, 1, (0, 1)),), 1)
    figures = evaluate(plan, chain, cluster, 8, Rules(overlap=False))
    assert parts(plan, figures).bound == "the batch is not divided"
    assert formula_seconds(plan, figures) == pytest.approx(figures.step_s)


@settings(max_examples=25)
@drawn(chains(most=6), clusters(), st.integers(1, 8))
def test_no_plan_loses_less_than_nothing(chain: Chain, cluster: Cluster, rows: int) -> None:
    try:
        planned = partition(chain, cluster, rows)
    except MemoryPlanError:
        return
    words = about_others(planned, chain, cluster, rows, Rules())
    assert not [line for line in words if "loses -" in line or "loses 0 ms" in line]


def test_the_facts_are_those_of_the_text_and_sum_to_the_models() -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(6)], nn.Linear(16, 4))
    given: dict[str, Any] = {"example_inputs": (torch.randn(8, 16),), "example_target": torch.randn(8, 4)}
    cluster = Cluster.uniform(1, 4, memory_gb=1, intra=Link(1e9, 1e-5))
    for fixed in ({"stages": 3}, {"cuts": ("3",)}):
        program = compile(model, cluster, loss_fn=nn.functional.mse_loss, costs="estimated", **given, **fixed)
        text, facts = program.plan.explain(), program.plan.explain(as_dict=True)
        assert json.loads(json.dumps(facts)) == facts
        assert Plan.from_json(program.plan.to_json()).explain(as_dict=True) == facts
        stages = facts["stages"]
        assert sum(stage["parameter_count"] for stage in stages) == sum(p.numel() for p in model.parameters())
        assert sum(stage["parameter_bytes"] for stage in stages) == 4 * facts["parameter_count"]
        assert sorted(n for stage in stages for n in stage["parameters"]) == sorted(
            n for n, _ in model.named_parameters()
        )
        assert sum(len(stage["blocks"]) for stage in stages) == program.plan.blocks
        for stage in stages:
            assert f"stage {stage['stage']}: {stage['first']} to {stage['last']} ({len(stage['blocks'])} block" in text
        assert f"the slowest is stage {facts['slowest_stage']}, with " in text
        assert facts["step_s"] == program.plan.predicted_step_s and facts["rows"] == 8 and facts["bound"] in text
        for other in facts["others"]:
            (line,) = [one for one in text.splitlines() if one.startswith(f"  {other['plan']}: ")]
            assert f": {other['step_s'] * 1e3:.4g} ms (" in line
            assert line.endswith("but not with what was fixed") == (
                "stages" in fixed and other["step_s"] < facts["step_s"]
            )
        labels = [other["plan"] for other in facts["others"]]
        assert ("one stage fewer" in labels and "one stage more" in labels) == ("stages" in fixed)
        assert "one device" in labels
