"""Rows that mix only with other values than the example's are found to mix."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from against_eager import assert_matches, compiled, one_device, step
from habits import WIDTH, Habit, Net, classes, cross_entropy, features, plain
from torch import Tensor, fx, nn

from efftra_fx import CompiledModel
from efftra_fx.passes.batch_evaluate import Recorder


def looked_up(model: nn.Module, index: Tensor) -> Tensor:
    return model.get_parameter("b.weight")[index]


HIDDEN: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "a dead unit, turned round": lambda m, h: h + torch.relu(h - 2).flip(0),
    "a dead unit, less its mean": lambda m, h: h + (lambda r: r - r.mean(0))(torch.relu(h - 2)),
    "a limit on a norm": lambda m, h: h / (h.norm() / 100).clamp(min=1),
    "a limit on a statistic": lambda m, h: h + torch.relu(h.abs().mean(0) - 2),
    "a condition on any value": lambda m, h: torch.where((h > 2).any(), 2 * h, h),
    "a condition on any value of a column": lambda m, h: torch.where((h > 2).any(0), 2 * h, h),
    "outliers in place of which stands the mean": lambda m, h: torch.where(h.abs() > 2, h.mean(0), h),
    "the largest of the outliers": lambda m, h: h + torch.where(h > 2, h, torch.zeros_like(h)).amax(0),
    "the sum of the outliers": lambda m, h: h + ((h > 2) * h).sum(0),
    "room for so many rows": lambda m, h: h * ((h[:, :1] > -2).long().cumsum(0) <= 40),
    "room for so many rows of a class": lambda m, h: (lambda one: h * ((one.cumsum(0) * one).sum(1, True) <= 40))(
        F.one_hot(h.argmax(1), WIDTH)
    ),
    "a rounded statistic": lambda m, h: h + (h.mean() * 0.1).round(),
    "a whole number of a statistic": lambda m, h: h + (h.abs().mean(0) * 0.1).long(),
    "the bins of what a statistic is taken from": lambda m, h: (
        h + looked_up(m, torch.bucketize(h.detach() * 5 + h.mean() * 1e-3, torch.arange(-2, 3, dtype=h.dtype)))[..., 0]
    ),
    "the largest of what was divided by a sum": lambda m, h: h + looked_up(m, (h / h.norm()).argmax(1)),
    "a gate that is shut": lambda m, h: h + torch.sigmoid(1000 * (h - 2)) * h.mean(0),
    "attention among the outliers": lambda m, h: h + ((h @ h.t()).softmax(-1) @ h) * (h[:, :1] > 2),
    "rows in place of outliers": lambda m, h: h[torch.where(h[:, 0] > 2, 0, torch.arange(len(h)))],
    "a chance that is the mean's": lambda m, h: h * torch.bernoulli(h.detach().sigmoid().softmax(0)),
    "what is no number anywhere": lambda m, h: torch.where(h.isnan().any(), torch.zeros_like(h), h),
}


def linear(program: CompiledModel) -> bool:
    """Say whether each part's loss goes back at once, so that no rows are seen to mix."""
    return program.built.front.tail.linear


@pytest.mark.parametrize("name", HIDDEN)
def test_rows_that_do_not_mix_on_the_example_but_may_are_computed_together(name: str) -> None:
    torch.manual_seed(3)
    habit = plain(HIDDEN[name])
    assert not linear(compiled(habit))


@pytest.mark.parametrize("name", ["a dead unit, turned round", "a condition on any value", "room for so many rows"])
def test_rows_that_begin_to_mix_in_training_mix_as_on_one_device(name: str) -> None:
    torch.manual_seed(3)
    habit = Habit(Net(HIDDEN[name]).double(), (features(),), classes(), cross_entropy)
    program = compiled(habit, replicas=(2,), micro_batches=2)
    with torch.no_grad():
        for parameter in habit.model.parameters():
            parameter.mul_(30)  # far from where it was compiled
    later = Habit(habit.model, (features().repeat(7, 1),), classes().repeat(7), cross_entropy)
    found, expected = step(program, later), one_device(later)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-9, atol=0)
    for key, gradient in expected[1].items():
        torch.testing.assert_close(found[1][key], gradient, rtol=1e-9, atol=1e-12)


def steps_outside(model: nn.Module, h: Tensor) -> Tensor:
    flat = h.reshape(len(h), 2, -1).transpose(0, 1).reshape(-1, WIDTH // 2)
    return torch.relu(flat * 2 - 0.1).reshape(2, -1, WIDTH // 2).transpose(0, 1).reshape(-1, WIDTH)


def sorted_and_back(model: nn.Module, h: Tensor) -> Tensor:
    order = h[:, 0].detach().argsort()
    return torch.tanh(h[order] * 2)[order.argsort()]


APART: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "rows and steps in one dimension": steps_outside,
    "rows in another order for a while": sorted_and_back,
    "a column by its number": lambda m, h: h * h[torch.arange(len(h)), h.argmax(1)][:, None],
    "a base of each row": lambda m, h: h.flatten()[h.argmax(1) + torch.arange(len(h)) * WIDTH][:, None] + h,
    "a number of each row that is the same for all": lambda m, h: (
        h * ((h > 9).long().cumsum(1)[torch.arange(len(h))[:, None], torch.arange(WIDTH)] == 0)
    ),
    "a table of the type of the rows": lambda m, h: h + torch.ones(1, WIDTH, dtype=torch.float32).type_as(h) / 3,
    "numbers like those of rows": lambda m, h: h - 0 * torch.empty_like(h).exponential_().log().nan_to_num(),
}


@pytest.mark.parametrize("name", APART)
def test_rows_that_do_not_mix_stay_apart(name: str) -> None:
    torch.manual_seed(3)
    assert linear(assert_matches(plain(APART[name])))


def test_a_sum_that_begins_with_zeros_is_one_of_parts() -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        each = F.cross_entropy(output, target, reduction="none")
        per_class = torch.zeros(3, dtype=each.dtype).scatter_add(0, target, each)
        return (torch.zeros(3, dtype=each.dtype) + per_class).sum()

    torch.manual_seed(3)
    assert linear(assert_matches(Habit(Net().double(), (features(),), classes(), loss)))


class Watched(nn.Module):
    """A module that no graph holds, which is told of the batch but lets rows pass as they are."""

    def forward(self, h: Tensor, high: Tensor) -> Tensor:
        rows = h.detach().numpy().copy()
        return h + torch.from_numpy(rows) * 0.5


class Barred(nn.Module):
    """One that does something else to every row once the batch is told to have a high value."""

    def forward(self, h: Tensor, high: Tensor) -> Tensor:
        return h * 3 if bool(high) else h + torch.from_numpy(h.detach().numpy().copy())


@pytest.mark.parametrize(("module", "apart"), [(Watched, True), (Barred, False)])
def test_what_runs_as_it_is_is_told_of_the_batch_where_it_may_feel_it(module: type[nn.Module], apart: bool) -> None:
    torch.manual_seed(3)
    watch = module()
    habit = plain(lambda m, h: m.watch(h, (h > 2).any()))
    habit.model.watch = watch
    program = assert_matches(habit)
    assert linear(program) == apart


def test_what_lies_in_memory_by_chance_tells_nothing() -> None:
    gm = fx.symbolic_trace(lambda x: torch.ops.aten.new_empty.default(x, [2, 3]))
    node = next(n for n in gm.graph.nodes if n.op == "call_function")
    recorder = Recorder(gm)
    for _ in range(3):
        junk = [torch.full((2, 3), 7.0, dtype=torch.float64) for _ in range(50)]
        del junk
        value = recorder.compute(node, {node.args[0]: torch.ones(2, dtype=torch.float64)})
        assert torch.equal(value, torch.zeros(2, 3, dtype=torch.float64))
