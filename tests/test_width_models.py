"""Models of many habits under tensor groups of any width: a step is that of one device."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from test_shard_models import laid_out
from width_habits import HABITS

from efftra_fx import Cluster, compile
from efftra_fx.passes import shard
from efftra_fx.passes.shard_choice import Prices
from efftra_fx.plan import Plan

SHAPES = {
    "2 wide": [(1, 2)],
    "3 wide": [(1, 3)],
    "4 wide": [(1, 4)],
    "2 replicas of 2, then 3 wide": [(2, 2), (1, 3)],
}
QUICK = ("qkv by heads first", "linear attention", "experts", "tied and transposed", "groups and shuffle")
WRITES = ("spectral norm", "depthwise, batch")  # statistics that each part of the batch, or each step, writes anew


@pytest.fixture(autouse=True)
def free_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tiny layers be cut: they would be left whole, since sums cost more than they."""
    monkeypatch.setattr(shard, "Prices", partial(Prices, sum_s=0.0, summed_byte_s=1e-13))


def hold(name: str, *shapes: str) -> None:
    """Take a step under each plan, and hold loss and gradients against one device's."""
    habit = HABITS[name]
    torch.manual_seed(0)
    model = habit.make().double()
    x, y = habit.inputs()
    state = {key: value.clone() for key, value in model.state_dict().items()}
    loss = habit.loss(model(x), y)
    named = {key: p for key, p in model.named_parameters() if p.requires_grad}
    gradients = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    whole = max(float(g.abs().max()) for g in gradients if g is not None)
    model.load_state_dict(state)
    program = compile(
        model, Cluster.local(7), example_inputs=(x,), example_target=y, loss_fn=habit.loss, costs="estimated"
    )
    schedule = "1f1b" if program.built.front.tail.linear else "gpipe"
    for shape in shapes:
        if len(SHAPES[shape]) > program.plan.blocks:
            continue
        micro_batches = 1 if name in WRITES else 2
        wide = program.with_plan(Plan(laid_out(program.plan.blocks, *SHAPES[shape]).stages, micro_batches, schedule))
        wide.load_state_dict(state)
        torch.testing.assert_close(wide.step(x, target=y), loss.detach(), rtol=1e-9, atol=0, check_device=False)
        found = {key: p.grad for key, p in wide.named_parameters()}
        for key, expected in zip(named, gradients, strict=True):
            if expected is not None:
                torch.testing.assert_close(found[key], expected, rtol=1e-9, atol=1e-10 * max(whole, 1.0), msg=key)
        for parameter in wide.parameters():
            parameter.grad = None


@pytest.mark.parametrize("name", QUICK)
def test_some_habits_are_those_of_one_device_three_wide(name: str) -> None:
    hold(name, "3 wide")


@pytest.mark.long
@pytest.mark.parametrize("name", HABITS)
def test_every_habit_is_that_of_one_device_under_any_width(name: str) -> None:
    alone = [shape for shape in SHAPES if len(SHAPES[shape]) == 1]
    hold(name, *(alone if name in WRITES else SHAPES))
