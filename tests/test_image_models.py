"""The characteristic parts of networks for images train, and say in eval mode, what one device does."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from against_eager import assert_matches, assert_same, compiled, one_device, step
from image_models import IMAGE_MODELS, ConvNext, image_habit
from rig import lay_out
from torch import Tensor, nn
from torch.utils import _pytree as pytree

PLANS = (((2, 1), 3), ((1, 2), 2))
NORMED = [
    name for name in IMAGE_MODELS if any(isinstance(m, nn.BatchNorm2d) for m in IMAGE_MODELS[name][0]().modules())
]


def outputs(value: Any) -> list[Tensor]:
    """Return the tensors of an output."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


@pytest.mark.parametrize("name", IMAGE_MODELS)
def test_an_image_model_with_fixed_statistics_is_that_of_one_device(name: str) -> None:
    habit = image_habit(name)
    program = assert_matches(habit, (((1, 1, 1), 4),))
    with torch.no_grad():
        expected = outputs(copy.deepcopy(habit.model).eval()(*habit.args))
    found = outputs(program.evaluate(*habit.args))
    assert [f.shape for f in found] == [e.shape for e in expected]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


@pytest.mark.long
@pytest.mark.parametrize("name", IMAGE_MODELS)
def test_an_image_model_is_that_of_one_device_under_more_plans(name: str) -> None:
    assert_matches(image_habit(name), (((1, 1), 1), *PLANS, ((2,), 4), ((1, 1), 9)))


def holds_exactly(name: str) -> None:
    """Fail unless statistics over the whole batch give one device's step, and its running statistics."""
    habit = image_habit(name, training=True, batch_norm="exact")
    expected, twin = one_device(habit), copy.deepcopy(habit.model)
    twin(*habit.args)
    program = compiled(habit)
    for replicas in ((2, 1), (1, 2)):
        planned = program.with_plan(lay_out(program.plan.blocks, replicas, 1))
        assert_same(step(planned, habit), expected, habit.tolerance)
    planned.step(*habit.args, target=habit.target)
    state = planned.state_dict()
    for key, buffer in twin.named_buffers():
        if key in state:
            assert torch.allclose(state[key].double(), buffer.double(), rtol=1e-9, atol=1e-12), key


def test_statistics_of_the_whole_batch_are_those_of_one_device() -> None:
    holds_exactly("inception with a second head")


@pytest.mark.long
@pytest.mark.parametrize("name", [n for n in NORMED if n != "inception with a second head"])
def test_statistics_of_the_whole_batch_are_those_of_one_device_in_all_models(name: str) -> None:
    holds_exactly(name)


def test_statistics_over_all_replicas_are_those_of_one_device_with_one_micro_batch() -> None:
    habit = image_habit("inverted residuals", training=True, batch_norm="synced")
    program = compiled(habit)
    planned = program.with_plan(lay_out(program.plan.blocks, (2, 1), 1))
    assert_same(step(planned, habit), one_device(habit), habit.tolerance)


def test_a_path_that_is_dropped_by_chance_is_dropped_alike_by_every_plan() -> None:
    habit = image_habit("convnext", rng="layout_free")
    for module in habit.model.modules():
        if isinstance(module, ConvNext):
            module.drop = 0.5
    program = compiled(habit)
    losses = []
    for replicas, micro_batches in (((1,), 1), *PLANS):
        torch.manual_seed(0)
        losses.append(step(program.with_plan(lay_out(program.plan.blocks, replicas, micro_batches)), habit)[0])
    assert all(torch.allclose(loss, losses[0], rtol=1e-12, atol=0) for loss in losses)
