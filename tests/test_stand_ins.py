"""A module called with other tensors computes with these, and has its own again afterwards."""

from __future__ import annotations

import torch
from against_eager import assert_matches
from habits import WIDTH, Habit, classes, cross_entropy, features
from torch import Tensor, nn

from efftra_fx.stand_ins import call_with, places_of


class Twice(nn.Module):
    """A block under two names, another that has its weight, and a question that no graph answers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.c = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 3)
        self.one, self.tied = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.again, self.tied.weight = self.one, self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.tied(torch.tanh(self.again(torch.tanh(self.one(self.a(x))))))
        out: Tensor = self.c(h if bool(h.sum() > 0) else -h)
        return out


def test_a_block_of_two_names_has_its_parameters_after_the_call() -> None:
    block = nn.Linear(2, 2)
    model = nn.Sequential(block, block)
    weight, ones = block.weight, torch.ones(2, 2)
    put = {place: ones if name == "0.weight" else torch.zeros(2) for place, name in places_of(model).items()}
    assert torch.equal(call_with(model, put, (torch.ones(1, 2),)), torch.full((1, 2), 4.0))
    assert block.weight is weight and isinstance(block.bias, nn.Parameter)


def test_a_model_with_a_block_of_two_names_that_runs_as_it_is_trains_as_on_one_device() -> None:
    torch.manual_seed(3)
    habit = Habit(Twice().double(), (features(),), classes(), cross_entropy)
    assert_matches(habit, (((1,), 3), ((2,), 2)))
    assert all(isinstance(parameter, nn.Parameter) for parameter in habit.model.parameters())


def test_a_loss_with_a_block_of_two_names_that_runs_as_it_is_keeps_its_parameters() -> None:
    class Judge(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = self.again = nn.Linear(3, 3).requires_grad_(False)

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            kept = target > 0
            return cross_entropy(self.again(torch.tanh(self.one(output[kept]))), target[kept])

    torch.manual_seed(3)
    judge = Judge().double()
    assert_matches(Habit(nn.Linear(4, 3).double(), (features(),), classes(), judge), (((2,), 2),))
    assert isinstance(judge.one.weight, nn.Parameter)
