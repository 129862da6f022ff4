"""Values that come out of mixed ones are proven to follow the rows on more rows than a few."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from against_eager import assert_matches, assert_same, compiled, one_device, step
from habits import ROWS, WIDTH, Habit, Net, features, plain
from torch import Tensor, nn

from efftra_fx.passes import batch_again

Way = Callable[[nn.Module, Tensor], Tensor]


def hardest(output: Tensor, target: Tensor) -> Tensor:
    """Return the hinged mean of the farthest of a class less the nearest of another, as seen by each row."""
    apart, alike = torch.cdist(output, output), target[:, None] == target[None]
    positive = (apart - 1e9 * ~alike).max(1).values
    negative = (apart + 1e9 * alike).min(1).values
    return torch.relu(positive - negative + 0.5).mean()


@pytest.mark.parametrize("classes", [[0, 1, 2, 0, 1, 2, 0], [0, 1, 2, 3, 4, 0, 5]])
def test_a_loss_that_no_few_rows_show_to_compare_rows_is_that_of_one_device(classes: list[int]) -> None:
    torch.manual_seed(3)
    program = assert_matches(Habit(Net().double(), (features(),), torch.tensor(classes), hardest))
    assert not program.built.front.tail.linear


def hinged(output: Tensor, far: float) -> Tensor:
    return torch.relu(torch.cdist(output, output).square().sum(1) - far).mean()


def test_a_loss_that_is_zero_on_the_example_is_computed_on_the_whole_batch() -> None:
    torch.manual_seed(3)
    program = assert_matches(Habit(Net().double(), (features(),), None, lambda output: hinged(output, 1e3)))
    assert not program.built.front.tail.linear
    assert_matches(Habit(Net().double(), (features(),), None, lambda output: hinged(output, 1.0)))


def steps_outside(model: nn.Module, h: Tensor) -> Tensor:
    """Compute with steps and rows in one dimension, the rows inside."""
    flat = h.reshape(len(h), 2, -1).transpose(0, 1).reshape(-1, WIDTH // 2)
    return torch.relu(flat * 2 - 0.1).reshape(2, -1, WIDTH // 2).transpose(0, 1).reshape(-1, WIDTH)


def test_rows_that_are_only_laid_out_in_another_way_for_a_while_still_follow_the_rows() -> None:
    torch.manual_seed(3)
    program = assert_matches(plain(steps_outside))
    assert program.built.front.tail.linear


def test_what_is_made_of_the_number_of_rows_is_not_proven_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_again, "evaluate_nodes", lambda *args: pytest.fail("proven twice"))
    torch.manual_seed(3)
    assert_matches(plain(lambda m, h: h.reshape(len(h) * 2, -1).tanh().reshape(len(h), -1)))


def by_norm(m: nn.Module, h: Tensor) -> Tensor:
    return h * torch.clamp(100 / h.norm(), max=1.0)


def by_choice(m: nn.Module, h: Tensor) -> Tensor:
    return torch.where(h.norm() < 100, h, h / h.norm())


def by_capacity(m: nn.Module, h: Tensor) -> Tensor:
    """Drop what comes later than the fifth row of its kind."""
    kinds = torch.nn.functional.one_hot((h.abs().sum(-1) > 50).long() * 2, 3)
    return h * ((kinds.cumsum(0) * kinds).sum(-1) <= 5 + 1e3 * (h.abs().sum(-1) < 50).double())[:, None]


def by_bound(m: nn.Module, h: Tensor) -> Tensor:
    return torch.minimum(h, h.abs().mean() * 100) + torch.relu(h.mean(0) - 30)


def by_far_rows(m: nn.Module, h: Tensor) -> Tensor:
    return h * (~(h > 50).any()) + torch.where(h > h.mean() + h.std() * 20, h, 0.0)


def late(h: Tensor) -> Tensor:
    return torch.relu(h.abs() - 20)


BEHIND_ZERO: dict[str, Way] = {
    "mean": lambda m, h: h + (late(h) - late(h).mean(0)),
    "cumsum": lambda m, h: h + late(h).cumsum(0),
    "sort": lambda m, h: h + late(h).sort(0).values,
    "flip": lambda m, h: h + late(h).flip(0),
    "roll": lambda m, h: h + late(h).roll(1, 0),
    "matmul": lambda m, h: h + torch.tanh(late(h) @ (late(h).T @ late(h))),
    "distances": lambda m, h: h + torch.cdist(late(h), late(h)).sum(1, keepdim=True).tanh(),
    "share": lambda m, h: h * (1 - (late(h) > 0).double().mean(0)),
    "norm": lambda m, h: h + late(h) / (1 + late(h).norm()),
}
GATED: dict[str, Way] = {
    one.__name__: one for one in (by_norm, by_choice, by_capacity, by_bound, by_far_rows)
} | BEHIND_ZERO


@pytest.mark.parametrize("name", GATED)
def test_a_mixing_that_no_batch_has_shown_yet_is_computed_on_the_whole_batch(name: str) -> None:
    torch.manual_seed(3)
    habit = plain(GATED[name])
    program = compiled(habit, 2, stages=1, replicas=(2,), micro_batches=2)
    assert not program.built.front.tail.linear
    for size in (1.0, 30.0, 1000.0):
        far = replace(habit, args=(size * torch.linspace(0.1, 1, ROWS, dtype=torch.float64)[:, None] * habit.args[0],))
        assert_same(step(program, far), one_device(far), 1e-9)


def in_order(m: nn.Module, h: Tensor) -> Tensor:
    """Compute with rows in the order of their kinds, and put them back."""
    order = h[:, :3].argmax(-1).argsort(stable=True)
    return torch.tanh(h[order])[order.argsort()]


def masked(m: nn.Module, h: Tensor) -> Tensor:
    """Look rows up by their numbers in a mask that masks nothing."""
    mask, rows = h.new_ones(h.shape, dtype=torch.bool) & (h < 1e9), torch.arange(len(h))
    return torch.where(mask[rows], h, 0.0)


APART: dict[str, Way] = {
    "in order": in_order,
    "masked": masked,
    "less the largest": lambda m, h: (h - h.max()).softmax(-1),
    "nothing is late": lambda m, h: h + late(h).softmax(-1) + late(h).cumsum(1),
    "windows": lambda m, h: (
        late(h).contiguous().as_strided((len(h), 2, WIDTH // 2), (WIDTH, WIDTH // 2, 1)).sum(1).repeat(1, 2) + h
    ),
}


@pytest.mark.parametrize("name", APART)
def test_what_is_the_same_for_every_batch_follows_the_rows(name: str) -> None:
    torch.manual_seed(3)
    program = assert_matches(plain(APART[name]), (((2, 1), 3),))
    assert program.built.front.tail.linear
