"""Weights with equal gradients keep sums of their own, in stages of every kind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from against_eager import assert_same, compiled, one_device, step
from habits import Habit
from torch import Tensor, nn


class Equal(nn.Module):
    """Heads that are averaged, and a cell whose input is its state: several weights have the same gradient."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.first, self.cell = nn.Linear(6, 8), nn.LSTMCell(8, 8)
        self.norm = nn.BatchNorm1d(8) if norm else nn.Identity()
        self.one, self.two = nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.first(x))
        h = self.cell(h, (h, h))[0]
        out: Tensor = (self.one(h) + self.two(h)) / 2
        return out


PLANS: dict[str, tuple[bool, dict[str, Any]]] = {
    "plain": (False, {"stages": 2, "replicas": (2, 1)}),
    "two wide": (False, {"tensor": (2,), "replicas": (1,)}),
    "three wide": (False, {"tensor": (3,), "replicas": (1,)}),
    "wide and plain": (False, {"tensor": (2, 1), "replicas": (1, 1)}),
    "synced": (True, {"stages": 1, "replicas": (3,), "batch_norm": "synced"}),
}


@pytest.mark.parametrize("name", PLANS)
def test_weights_with_equal_gradients_train_as_on_one_device_in_every_kind_of_stage(name: str) -> None:
    norm, plan = PLANS[name]
    torch.manual_seed(0)
    model = Equal(norm).double()
    x, y = torch.randn(12, 6, dtype=torch.float64), torch.randint(0, 3, (12,))
    habit = Habit(model, (x,), y, F.cross_entropy)
    micro_batches = 1 if norm else 3  # statistics are those of a micro-batch
    program = compiled(habit, micro_batches=micro_batches, **plan)
    found, expected = step(program, habit), one_device(habit)
    assert_same(found, expected, 1e-9)
    again = step(program, habit)  # sums of the step before are not added to
    assert_same(again, expected, 1e-9)
