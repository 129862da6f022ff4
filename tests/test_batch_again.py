"""Values that come out of mixed ones are proven to follow the rows on more rows than a few."""

from __future__ import annotations

import pytest
import torch
from against_eager import assert_matches
from habits import WIDTH, Habit, Net, features, plain
from torch import Tensor, nn

from efftra_fx.passes import batch_again


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
