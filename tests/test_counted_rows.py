"""Models that compute something else for other numbers of rows: as they are on the whole batch, or in several forms."""

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
    "three rows": lambda m, h: h * 2 if len(h) == 3 else h,
    "a number of rows between those that are tried at once": lambda m, h: h * 2 if len(h) in (5, 6, 12) else h,
    "a single row": lambda m, h: h * 2 if len(h) == 1 else h,
    "a least number of rows": lambda m, h: torch.where(h[:, :1] > 0, h, h[:4].mean(0)),
}


@pytest.mark.parametrize("name", COUNTING)
def test_a_model_that_counts_rows_is_that_of_one_device_for_any_number_of_them(name: str) -> None:
    torch.manual_seed(3)
    model = Net(COUNTING[name]).double()
    program = compiled(Habit(model, (features(),), classes(), cross_entropy), replicas=(2,), micro_batches=2)
    for rows in (ROWS, 4, 12, 25, 50, 3, 1, 5):
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


SYMBOLIC: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "an upper bound": lambda m, h: h * 2 if h.shape[0] > 16 else h,
    "not one number": lambda m, h: h * 2 if h.shape[0] == 5 else h,
    "even": lambda m, h: h if h.shape[0] % 2 else h * 2,
    "a number of elements": lambda m, h: h * 2 if h.numel() > 16 * 8 else h,
    "several": lambda m, h: h * 2 if h.size(0) > 1 else h,
}


@pytest.mark.parametrize("name", SYMBOLIC)
def test_the_way_of_a_branch_on_rows_is_that_of_the_whole_batch(name: str) -> None:
    """Each part goes the way of the batch that it is of, and a batch that goes another way is another form."""
    torch.manual_seed(3)
    model = Net(SYMBOLIC[name]).double()
    program = compiled(Habit(model, (features(),), classes(), cross_entropy), replicas=(2,), micro_batches=2)
    for rows in (ROWS, 5, 20, 7, 1, 16, 17, 1):
        x, y = torch.randn(rows, 4, dtype=torch.float64), torch.randint(0, 3, (rows,))
        later = Habit(model, (x,), y, cross_entropy)
        assert_same(step(program, later), one_device(later), 1e-9)
        with torch.no_grad():
            expected = model(x)
        torch.testing.assert_close(program.evaluate(x), expected, rtol=1e-9, atol=1e-12)
    assert not program.built.front.captured.opaque


def each(h: Tensor) -> Tensor:
    return torch.stack([row * 2 if float(row.sum()) > 0 else row for row in h])


AS_IT_IS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "few rows": lambda m, h: each(h) * (2 if len(h) in (3, 4) else 1),
    "many rows": lambda m, h: each(h) * (2 if len(h) > 12 else 1),
    "far more rows": lambda m, h: each(h) * (2 if len(h) > 20 else 1),
    "all of them": lambda m, h: each(h) * (2 if len(h) == 14 else 1),
}


@pytest.mark.parametrize("name", AS_IT_IS)
def test_code_as_it_is_that_counts_rows_sees_the_whole_batch(name: str) -> None:
    torch.manual_seed(3)
    model = Net(AS_IT_IS[name]).double()
    program = compiled(Habit(model, (features(),), classes(), cross_entropy), replicas=(2,), micro_batches=2)
    for rows in (ROWS, 14, 8, 25, 24, 30, 1):
        x, y = torch.randn(rows, 4, dtype=torch.float64), torch.randint(0, 3, (rows,))
        later = Habit(model, (x,), y, cross_entropy)
        assert_same(step(program, later), one_device(later), 1e-9)
        with torch.no_grad():
            expected = model(x)
        torch.testing.assert_close(program.evaluate(x), expected, rtol=1e-9, atol=1e-12)


def test_code_as_it_is_that_counts_no_rows_is_divided() -> None:
    torch.manual_seed(3)
    model = Net(lambda m, h: each(h)).double()
    program = compiled(Habit(model, (features(),), classes(), cross_entropy), replicas=(2,), micro_batches=2)
    assert program.built.front.captured.opaque and program.built.front.tail.linear


class Squeezed(nn.Module):
    """Gives a number for each row, and for a single row none of the dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh()).squeeze()  # type: ignore[no-any-return]


def test_an_evaluation_of_a_single_row_has_the_models_shape() -> None:
    torch.manual_seed(3)
    model, x = Squeezed().double(), features()
    program = compiled(Habit(model, (x,), x[:, 0], lambda o, t: (o - t).square().mean()))
    for rows in (ROWS, 1, 3, 1):
        with torch.no_grad():
            expected = model(x[:rows])
        found = program.evaluate(x[:rows])
        assert found.shape == expected.shape
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_batches_of_more_rows_than_were_tried_are_tried_and_captured_once_for_a_length() -> None:
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
    assert met == [1, 2, 3, 3, 3, 3, 3, 3, 3]


def asks_and_counts(model: nn.Module, h: Tensor, mask: Tensor, rule: Callable[[nn.Module, Tensor], Tensor]) -> Tensor:
    return rule(model, h * 2 if bool(mask.any()) else h)


@pytest.mark.parametrize("name", ["the row in the middle", "the best third"])
@pytest.mark.parametrize("marked", [0, 1])
def test_a_model_that_counts_rows_and_asks_for_inputs_is_that_of_one_device(name: str, marked: int) -> None:
    torch.manual_seed(3)
    model = Net(lambda m, h, mask: asks_and_counts(m, h, mask, COUNTING[name])).double()
    habit = Habit(model, (features(), torch.arange(ROWS) >= ROWS - marked), classes(), cross_entropy)
    program = compiled(habit, replicas=(2,), micro_batches=2)
    for rows in (ROWS, 4, 12, 25):
        mask = torch.arange(rows) >= rows - marked
        x, y = torch.randn(rows, 4, dtype=torch.float64), torch.randint(0, 3, (rows,))
        later = Habit(model, (x, mask), y, cross_entropy)
        assert_same(step(program, later), one_device(later), 1e-9)
    with torch.no_grad():
        expected = model.eval()(*later.args)
    torch.testing.assert_close(program.evaluate(*later.args), expected, rtol=1e-9, atol=1e-12)


def test_a_number_of_rows_that_could_not_be_tried_is_captured_apart() -> None:
    def by_count(model: nn.Module, h: Tensor, mask: Tensor) -> Tensor:
        return h * (int(mask.sum()) + len(h) // 2)

    torch.manual_seed(3)
    model = Net(by_count).double()
    habit = Habit(model, (features(), torch.ones(ROWS, dtype=torch.bool)), classes(), cross_entropy)
    program = compiled(habit, replicas=(2,), micro_batches=2)
    for rows in (ROWS, ROWS + 2, 2 * ROWS):
        mask = torch.arange(rows) < ROWS
        later = Habit(
            model, (torch.randn(rows, 4, dtype=torch.float64), mask), torch.randint(0, 3, (rows,)), cross_entropy
        )
        assert_same(step(program, later), one_device(later), 1e-9)


def test_an_example_of_two_rows_of_a_model_that_counts_them_is_enough() -> None:
    torch.manual_seed(3)
    model = Net(lambda m, h: h.reshape(len(h), -1) / len(h)).double()
    x, y = torch.randn(5, 4, dtype=torch.float64), torch.randint(0, 3, (5,))
    program = compiled(Habit(model, (x[:2],), y[:2], cross_entropy), replicas=(2,), micro_batches=2)
    for rows in (2, 1, 5):
        later = Habit(model, (x[:rows],), y[:rows], cross_entropy)
        assert_same(step(program, later), one_device(later), 1e-9)
