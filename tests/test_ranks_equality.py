"""The same equality on real ranks: processes that talk over Gloo, several models and plans in one launch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import DROPOUT, ZOO, Example
from ranks import run_ranks
from rig import Trained, assert_close, lay_out, train_eagerly, train_planned

from efftra_fx import Cluster, compile

Setting = tuple[tuple[int, ...], int, int, str]  # replicas, micro-batches, rows, schedule

SETTINGS: tuple[Setting, ...] = (
    ((1, 1, 1, 1), 4, 12, "1f1b"),
    ((2,), 2, 13, "gpipe"),
    ((4,), 1, 12, "1f1b"),
    ((3, 1), 7, 13, "1f1b"),
    ((1, 3), 2, 12, "gpipe"),
    ((2, 1, 1), 7, 12, "gpipe"),
    ((1, 2, 1), 4, 13, "1f1b"),
)


def start(example: Example, **fixed: Any) -> Any:
    """Compile an example for the ranks that were launched."""
    batch = example.data(12)
    return compile(
        example.build(),
        Cluster.from_env(),
        example_inputs=batch.args,
        example_kwargs=batch.kwargs,
        example_target=batch.target,
        loss_fn=example.loss_fn,
        costs="estimated",
        timeout=60.0,
        **fixed,
    )


def train_here(name: str, settings: tuple[Setting, ...]) -> list[tuple[Trained, dict[str, Any]]]:
    """Train by every plan from the first weights; return what this rank has, and the whole state."""
    torch.set_num_threads(1)
    example = ZOO[name]
    first = start(example, stages=1, replicas=(1,), micro_batches=1)
    weights = {key: tensor.clone() for key, tensor in first.model.state_dict().items()}
    results = []
    program = first
    for shape, micro_batches, rows, schedule in settings:
        program = program.with_plan(lay_out(first.plan.blocks, shape, micro_batches, schedule))
        program.load_state_dict(weights)
        trained = train_planned(program, example.data(rows))
        results.append((trained, dict(program.state_dict())))
    return results


def ranks_train_as_one_device(name: str) -> None:
    """Launch four ranks once, train by every plan on them, and compare what each has."""
    example = ZOO[name]
    outcomes = run_ranks(train_here, 4, name, SETTINGS, limit_s=240.0)
    for index, (shape, _, rows, _) in enumerate(SETTINGS):
        expected = train_eagerly(example, example.build(), example.data(rows))
        found = [outcome[index] for outcome in outcomes]
        for trained, state in found:
            for a, b in zip(expected.losses, trained.losses, strict=True):
                assert abs(a - b) <= max(1e-9, 8 * expected.loss_eps) * abs(a)
            assert_close(expected.gradients, trained.gradients, 1e-9, "gradient", some=True)
            assert_close(expected.parameters, {n: state[n] for n in expected.parameters}, 1e-8, "parameter")
        held = {n for trained, _ in found[: sum(shape)] for n in trained.gradients}
        assert held >= {n for n, g in expected.gradients.items() if g.any()}
        assert all(trained.losses == found[0][0].losses for trained, _ in found)


@pytest.mark.parametrize("name", ["mlp", "unet"])
def test_ranks_of_their_own_train_as_one_device_does(name: str) -> None:
    ranks_train_as_one_device(name)


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(set(ZOO) - {"mlp", "unet"}))
def test_any_model_trains_on_ranks_as_on_one_device(name: str) -> None:
    ranks_train_as_one_device(name)


def drop_here() -> list[list[float]]:
    """Run a model with dropout three times, the last time with another seed."""
    torch.set_num_threads(1)
    program = start(DROPOUT, replicas=(2, 1), micro_batches=3)
    batch, runs = DROPOUT.data(12), []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        runs.append([float(program.step(*batch.args, target=batch.target)) for _ in range(2)])
    return runs


def test_dropout_on_ranks_is_the_same_for_the_same_seed_and_plan() -> None:
    outcomes = run_ranks(drop_here, 3, limit_s=120.0)
    for first, again, other in outcomes:
        assert first == again != other
    assert all(outcome == outcomes[0] for outcome in outcomes)


def go_on_here() -> dict[str, Any]:
    """Train by one plan, and then, from where that ended, by another."""
    torch.set_num_threads(1)
    example = ZOO["mlp"]
    program = start(example, replicas=(2, 1), micro_batches=3)
    batch = example.data(12)
    for plan in (None, lay_out(program.plan.blocks, (1, 1, 1), 2)):
        program = program if plan is None else program.with_plan(plan)
        optimizer = torch.optim.SGD(program.parameters(), lr=0.1)
        for _ in range(2):
            program.step(*batch.args, target=batch.target)
            optimizer.step()
            optimizer.zero_grad()
    return dict(program.state_dict())


def test_another_plan_goes_on_from_the_weights_that_ranks_have_trained() -> None:
    example = ZOO["mlp"]
    model, batch = example.build(), example.data(12)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        example.loss(model, batch).backward()
        optimizer.step()
    for state in run_ranks(go_on_here, 3, limit_s=120.0):
        assert_close(dict(model.named_parameters()), state, 1e-8, "parameter")
