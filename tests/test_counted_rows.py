"""Models that compute something else for other numbers of rows run as they are, on the whole batch."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from against_eager import assert_same, compiled, one_device, step
from habits import ROWS, Habit, Net, classes, cross_entropy, features
from torch import Tensor, nn

COUNTING: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "a branch between the example and fewer rows": lambda m, h: h * 2 if len(h) > 4 else h,
    "a branch between the example and more rows": lambda m, h: h * 2 if len(h) > 10 else h,
    "an odd number of rows": lambda m, h: h * 2 if len(h) % 2 else h * 3,
    "room for some of the rows": lambda m, h: h * ((h[:, :1] > -2).cumsum(0) <= math.ceil(len(h) / 4)),
    "the row in the middle": lambda m, h: h + h[len(h) // 2],
    "halves of the batch": lambda m, h: torch.cat([h[: len(h) // 2] * 2, h[len(h) // 2 :]]),
    "the best third": lambda m, h: h + h.topk(max(1, len(h) // 3), 0).values.mean(0),
    "a root of their number": lambda m, h: h / math.sqrt(len(h)),
    "a branch far from the example": lambda m, h: h.reshape(len(h), -1) * (2 if len(h) > 20 else 1),
    "a least number of rows": lambda m, h: torch.where(h[:, :1] > 0, h, h[:4].mean(0)),
}


@pytest.mark.parametrize("name", COUNTING)
def test_a_model_that_counts_rows_is_that_of_one_device_for_any_number_of_them(name: str) -> None:
    torch.manual_seed(3)
    model = Net(COUNTING[name]).double()
    program = compiled(Habit(model, (features(),), classes(), cross_entropy), replicas=(2,), micro_batches=2)
    for rows in (ROWS, 4, 12, 25, 50):
        x, y = torch.randn(rows, 4, dtype=torch.float64), torch.randint(0, 3, (rows,))
        later = Habit(model, (x,), y, cross_entropy)
        assert_same(step(program, later), one_device(later), 1e-9)
    with torch.no_grad():
        expected = model.eval()(*later.args)
    torch.testing.assert_close(program.evaluate(*later.args), expected, rtol=1e-9, atol=1e-12)


def test_a_model_that_counts_rows_as_they_are_is_divided() -> None:
    torch.manual_seed(3)
    model = Net(lambda m, h: h.reshape(len(h), 2, -1).tanh().reshape(len(h), -1)).double()
    program = compiled(Habit(model, (features(),), classes(), cross_entropy))
    assert program.built.front.tail.linear
    assert not program.built.front.captured.opaque


class Reads(nn.Module):
    """Takes the number of rows into Python, and a net of steps that fixes their number."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.out = nn.LSTM(4, 6, batch_first=True), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h, _ = self.net(x)
        return self.out(h.reshape(int(len(x)), -1, 6).mean(1))  # type: ignore[no-any-return]


def test_batches_of_more_rows_than_were_tried_are_captured_once_for_a_length() -> None:
    torch.manual_seed(3)
    model = Reads().double()
    first = Habit(model, (features(5, 4),), classes(), cross_entropy)
    program = compiled(first, 2, stages=1, replicas=(2,), micro_batches=2)
    met = []
    for rows, steps in ((ROWS, 5), (ROWS, 6), (ROWS, 7), (20, 5), (20, 6), (20, 7), (20, 7), (20, 7), (ROWS, 7)):
        x, y = torch.randn(rows, steps, 4, dtype=torch.float64), torch.randint(0, 3, (rows,))
        later = Habit(model, (x,), y, cross_entropy)
        assert_same(step(program, later), one_device(later), 1e-9)
        met.append(len(program._forms))
    assert met == [1, 2, 3, 4, 5, 6, 6, 6, 6]
