"""A planned step equals one device's: loss, every gradient, and parameters after three steps, on a zoo of models."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from models import DROPOUT, PENALISED, ZOO
from rig import Rig, assert_close, assert_same, lay_out, rig_of

from efftra_fx.plan import Plan

SHAPES = ((1,), (1, 1), (1, 1, 1), (1, 1, 1, 1), (2,), (4,), (3, 1), (1, 3), (2, 1, 1), (1, 2, 1))
SETTINGS = tuple(product((1, 2, 4, 7), (12, 13), ("1f1b", "gpipe")))  # micro-batches, rows, schedule
LARGE = ("gpt2", "bert", "t5", "lstm")  # take a second a plan: half of the shapes each, `long` has them all
SAMPLE = [
    (name, shape, SETTINGS[(5 * s + 3 * i) % len(SETTINGS)])
    for i, name in enumerate(ZOO)
    for s, shape in enumerate(SHAPES)
    if name not in LARGE or (s + i) % 2
]


def step_equals_one_device(rig: Rig, shape: tuple[int, ...], setting: tuple[int, int, str]) -> None:
    """Train with an even plan and hold it against eager training."""
    micro_batches, rows, schedule = setting
    plan = lay_out(rig.blocks, shape, micro_batches, schedule)
    assert_same(rig.expected(rows), rig.found(plan, rows))


@pytest.mark.parametrize(("name", "shape", "setting"), SAMPLE)
def test_training_as_planned_equals_training_on_one_device(
    name: str, shape: tuple[int, ...], setting: tuple[int, int, str]
) -> None:
    step_equals_one_device(rig_of(ZOO[name]), shape, setting)


@pytest.mark.long
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", ZOO)
def test_all_settings_equal_one_device(name: str, shape: tuple[int, ...]) -> None:
    for setting in SETTINGS:
        step_equals_one_device(rig_of(ZOO[name]), shape, setting)


@pytest.mark.parametrize("name", ["mlp", "unet", "moe"])
def test_stages_that_compute_their_forward_again_equal_one_device(name: str) -> None:
    rig = rig_of(ZOO[name])
    plan = lay_out(rig.blocks, (2, 1), 4, recompute=(True, True))
    assert_same(rig.expected(13), rig.found(plan, 13))


def test_more_stages_than_micro_batches_equal_one_device() -> None:
    rig = rig_of(ZOO["unet"])
    for micro_batches in (1, 2, 3):
        assert_same(rig.expected(12), rig.found(lay_out(rig.blocks, (1, 1, 1, 1), micro_batches), 12))


def test_batches_of_other_sizes_than_the_first_equal_one_device() -> None:
    rig = rig_of(ZOO["mlp"])
    for rows in (1, 2, 3, 5, 29):
        assert_same(rig.expected(rows), rig.found(lay_out(rig.blocks, (2, 1, 1), 4), rows))


@pytest.mark.parametrize("shape", [(1,), (2,), (1, 1), (1, 2)], ids=str)
def test_a_part_of_the_loss_that_is_the_same_for_all_rows_counts_once(shape: tuple[int, ...]) -> None:
    rig = rig_of(PENALISED)
    for micro_batches, rows in ((1, 12), (4, 13)):
        assert_same(rig.expected(rows), rig.found(lay_out(rig.blocks, shape, micro_batches), rows))


def losses(rig: Rig, plan: Plan, seed: int, steps: int = 2) -> list[float]:
    """Run a few steps without an optimizer."""
    program, batch = rig.program(plan), rig.example.data(12)
    torch.manual_seed(seed)
    return [float(program.step(*batch.args, target=batch.target)) for _ in range(steps)]


@pytest.mark.parametrize("shape", [(1,), (1, 1), (2, 1), (1, 3)], ids=str)
def test_a_run_with_dropout_is_the_same_for_the_same_seed_and_plan(shape: tuple[int, ...]) -> None:
    rig = rig_of(DROPOUT)
    plan = lay_out(rig.blocks, shape, 3)
    assert losses(rig, plan, 7) == losses(rig, plan, 7)
    assert losses(rig, plan, 7) != losses(rig, plan, 8)


def test_steps_replicas_and_micro_batches_drop_different_elements() -> None:
    rig = rig_of(DROPOUT)
    first, second = losses(rig, lay_out(rig.blocks, (1,), 1), 7)
    assert first != second
    row, target = torch.ones(1, 6, dtype=torch.float64), torch.ones(1, dtype=torch.int64)
    for plan in (lay_out(rig.blocks, (2,), 1), lay_out(rig.blocks, (1,), 2)):
        program = rig.program(plan)
        torch.manual_seed(0)
        alone = float(rig.program(lay_out(rig.blocks, (1,), 1)).step(row, target=target))
        torch.manual_seed(0)
        both = float(program.step(row.repeat(2, 1), target=target.repeat(2)))
        assert both != pytest.approx(alone, rel=1e-6)


def test_stages_that_compute_their_forward_again_drop_the_same_elements() -> None:
    rig = rig_of(DROPOUT)
    gradients = []
    for again in (False, True):
        program, batch = rig.program(lay_out(rig.blocks, (1, 1), 3, recompute=(again, again))), DROPOUT.data(12)
        rig.model.zero_grad()
        torch.manual_seed(3)
        program.step(*batch.args, target=batch.target)
        gradients.append({n: p.grad for n, p in program.named_parameters() if p.grad is not None})
    assert_close(gradients[0], gradients[1], 1e-12, "gradient")
