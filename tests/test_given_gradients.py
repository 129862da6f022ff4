"""A parameter that one device gives no gradient has none under any plan, so that no optimizer moves it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from against_eager import assert_matches
from habits import WIDTH, Habit, classes, cross_entropy, features
from torch import Tensor, nn

WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "rows apart": lambda h: h,
    "rows together": lambda h: h - h.mean(0),
    "a question": lambda h: h * 2 if bool(h.mean() > 0) else h,
}


class Step(nn.Module):
    def __init__(self, way: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.way = nn.Linear(WIDTH, WIDTH), way

    def forward(self, h: Tensor) -> Tensor:
        return self.way(self.layer(h))


class CutOff(nn.Module):
    """Layers behind a step of which one is read through a detach, and one through whole numbers."""

    def __init__(self, way: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.step, self.c = nn.Linear(4, WIDTH), Step(way), nn.Linear(WIDTH, 3)
        self.cut, self.chosen = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.step(torch.tanh(self.a(x)))
        h = h + self.cut(h).detach() * (1 + self.chosen(h).argmax(-1, keepdim=True))
        out: Tensor = self.c(torch.tanh(h))
        return out


@pytest.mark.parametrize("way", WAYS)
def test_what_is_cut_off_has_no_gradient_wherever_it_is_computed(way: str) -> None:
    torch.manual_seed(3)
    habit = Habit(CutOff(WAYS[way]).double(), (features(),), classes(), cross_entropy)
    program = assert_matches(habit)
    names = {f"{layer}.{kind}" for layer in ("cut", "chosen") for kind in ("weight", "bias")}
    assert program.built.front.captured.never == names
