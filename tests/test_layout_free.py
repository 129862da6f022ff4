"""With rng="layout_free" any plan draws what any other draws, and so does one device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from noisy import ROWS, batch, compiled, two_steps
from ranks import run_ranks
from rig import assert_close, lay_out
from strategies_plans import plans
from torch import Tensor, nn

from efftra_fx import Cluster, CompiledModel, compile
from efftra_fx.errors import CaptureError, PlanError
from efftra_fx.plan import Plan


@cache
def program() -> CompiledModel:
    return compiled(Cluster.local(4), stages=1, replicas=(1,), micro_batches=1)


@cache
def expected(seed: int, rows: int = ROWS) -> tuple[list[float], Mapping[str, Tensor]]:
    """Return what the plan with one stage makes of two steps."""
    return two_steps(program(), seed, rows)


@st.composite
def any_plans(draw: st.DrawFn, blocks: int) -> Plan:
    """Any plan for 4 devices: wide stages and stages that compute their forward again too."""
    plan = draw(plans(blocks, 4, ROWS))
    stages = []
    for stage in plan.stages:
        widths = [w for w in (1, 2, 3, 4) if len(stage.devices) % w == 0]
        devices = tuple(sorted(stage.devices))
        stages.append(
            replace(stage, devices=devices, tensor=draw(st.sampled_from(widths)), recompute=draw(st.booleans()))
        )
    return replace(plan, stages=tuple(stages))


def assert_alike(
    found: tuple[list[float], Mapping[str, Tensor]], one: tuple[list[float], Mapping[str, Tensor]]
) -> None:
    assert found[0] == pytest.approx(one[0], rel=1e-9)
    assert_close(one[1], found[1], 1e-9, "gradient")


@settings(max_examples=8, deadline=None)
@given(st.data())
def test_every_plan_gives_the_same_loss_and_gradients(data: st.DataObject) -> None:
    plan = data.draw(any_plans(program().plan.blocks))
    assert_alike(two_steps(program().with_plan(plan), 5), expected(5))


def test_rows_keep_their_masks_in_batches_of_any_size() -> None:
    split = program().with_plan(lay_out(program().plan.blocks, (3, 1), 2))
    for rows in (2, 11):
        assert_alike(two_steps(split, 6, rows), expected(6, rows))


def test_steps_and_seeds_draw_different_numbers_and_a_seed_the_same_again() -> None:
    (first, second), _ = expected(5)
    assert first != second
    assert two_steps(program(), 5)[0] == [first, second]
    assert two_steps(program(), 6)[0][0] not in (first, second)


@pytest.mark.parametrize("recompute", [False, True])
def test_it_is_the_step_of_one_device_with_the_same_numbers(recompute: bool) -> None:
    blocks = program().plan.blocks
    split = program().with_plan(lay_out(blocks, (2, 1), 3, recompute=(recompute, recompute)))
    x, target = batch()
    report = split.check(x, target=target, repeats=1, show=False)
    assert report.matches and report.tolerance == 1e-9, report


def test_what_a_model_draws_in_eval_mode_any_plan_draws_alike() -> None:
    x, _ = batch()
    outputs = []
    for plan in (program().plan, lay_out(program().plan.blocks, (1, 2), 2)):
        torch.manual_seed(2)
        outputs.append(program().with_plan(plan).evaluate(x))
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-11, atol=1e-13)


def test_eval_drops_nothing() -> None:
    made, x, _ = plain(nn.Dropout(0.5))
    with torch.no_grad():
        expected = made.model.eval()(x)
    made.model.train()
    torch.testing.assert_close(made.evaluate(x), expected, rtol=1e-12, atol=0)


class Plain(nn.Module):
    """A dropout between two layers, or something else."""

    def __init__(self, between: Any) -> None:
        super().__init__()
        self.first, self.second, self.between = nn.Linear(4, 5), nn.Linear(5, 3), between

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.between(self.first(x)))
        return out


def plain(between: Any, **options: Any) -> tuple[CompiledModel, Tensor, Tensor]:
    x, target = torch.randn(6, 4, dtype=torch.float64), torch.arange(6) % 3
    fixed = {"loss_fn": F.cross_entropy, "costs": "estimated", "progress": False, "rng": "layout_free", **options}
    return (
        compile(Plain(between).double(), Cluster.local(2), example_inputs=(x,), example_target=target, **fixed),
        x,
        target,
    )


def test_a_model_that_draws_nothing_leaves_the_random_state_alone() -> None:
    made, x, target = plain(nn.Dropout(0.0))
    state = torch.get_rng_state()
    made.step(x, target=target)
    assert torch.equal(state, torch.get_rng_state())


def test_rows_that_are_shuffled_are_shuffled_alike() -> None:
    made, x, target = plain(lambda h: 0.3 * h + 0.7 * h[torch.randperm(h.shape[0])])
    assert not made.built.front.tail.linear
    losses = []
    for shape, micro_batches in (((1,), 1), ((1,), 3), ((2,), 2)):
        torch.manual_seed(4)
        losses.append(float(made.with_plan(lay_out(1, shape, micro_batches, "gpipe")).step(x, target=target)))
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-12)


def test_what_cannot_be_drawn_alike_is_refused_by_name() -> None:
    with pytest.raises(CaptureError, match=r"cannot draw what aten.poisson.default draws \(File .*rng='plan'"):
        plain(lambda h: h + torch.poisson(h.detach().exp()))


def test_another_word_for_it_is_refused() -> None:
    with pytest.raises(PlanError, match="rng must be 'plan' .* or 'layout_free' .*, got 'free'"):
        plain(nn.Dropout(0.1), rng="free")


def draw_here() -> list[Any]:
    """Train by two plans on ranks whose own random states differ."""
    torch.set_num_threads(1)
    made = compiled(Cluster.from_env(), replicas=(2, 1), micro_batches=3, timeout=60.0)
    wide = lay_out(made.plan.blocks, (1, 2), 2)
    wide = replace(wide, stages=(wide.stages[0], replace(wide.stages[1], tensor=2)))
    results = []
    for one in (made, made.with_plan(wide)):
        losses, gradients = two_steps(one, 5 + 1000 * one.rank)
        results.append((losses, gradients))
    return results


def test_ranks_of_their_own_draw_alike_from_rank_0s_seed() -> None:
    losses, gradients = expected(5)
    shapes = {name: gradient.shape for name, gradient in gradients.items()}
    for rank in run_ranks(draw_here, 3, limit_s=240.0):
        for found, mine in rank:
            assert found == pytest.approx(losses, rel=1e-9)
            whole = {name: g for name, g in mine.items() if name in shapes and g.shape == shapes[name]}
            assert_close(gradients, whole, 1e-9, "gradient", some=True)
