"""Each habit of users either matches one device under every plan, or is refused by name."""

from __future__ import annotations

import copy

import pytest
import torch
from against_eager import assert_matches, compiled
from habits import HABITS, Habit, classes, cross_entropy, features
from rig import lay_out
from torch import Tensor, nn

from efftra_fx.program import micro_batch_rows, replica_rows


@pytest.mark.parametrize("name", sorted(HABITS))
def test_a_habit_trains_as_on_one_device(name: str) -> None:
    torch.manual_seed(3)
    assert_matches(HABITS[name]())


@pytest.mark.parametrize(("replicas", "micro_batches"), [((1, 1), 3), ((2, 1), 2), ((1, 2), 2)])
def test_batch_norm_is_that_of_one_device_running_the_same_parts_in_order(
    replicas: tuple[int, ...], micro_batches: int, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3)).double()
    x, target = torch.randn(8, 4, dtype=torch.float64) * torch.linspace(0.2, 4, 8)[:, None], torch.arange(8) % 3
    habit = Habit(model, (x,), target, cross_entropy)
    program = compiled(habit)
    assert "batch statistics of 1 are those of each micro-batch" in capsys.readouterr().err
    program = program.with_plan(lay_out(program.plan.blocks, replicas, micro_batches, cuts=(2,)))
    model, twin = copy.deepcopy(model), copy.deepcopy(model)
    total = torch.zeros((), dtype=torch.float64)
    for low, high in micro_batch_rows(8, micro_batches):
        for replica in range(replicas[0]):
            first, stop = replica_rows(low, high, replica, replicas[0])
            total = total + cross_entropy(twin(x[first:stop]), target[first:stop]) * (stop - first) / 8
    total.backward()
    loss = program.step(x, target=target)
    assert torch.allclose(loss, total.detach(), rtol=1e-12)
    state = program.state_dict()
    for name, parameter in program.named_parameters():
        other = twin.get_parameter(name).grad
        assert parameter.grad is not None and other is not None
        assert torch.allclose(parameter.grad, other, rtol=1e-9, atol=1e-12), name
    runs = []
    for replica in range(replicas[0]):
        alone = copy.deepcopy(model)
        for low, high in micro_batch_rows(8, micro_batches):
            alone(x[slice(*replica_rows(low, high, replica, replicas[0]))])
        runs.append(dict(alone.named_buffers()))
    for name in runs[0]:
        mean = torch.stack([run[name].double() for run in runs]).mean(0)
        assert torch.allclose(state[name].double(), mean, rtol=1e-12), name


def test_weights_with_equal_gradients_have_gradients_of_their_own() -> None:
    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.one, self.two = nn.Linear(4, 8), nn.Linear(8, 3), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.tanh(self.body(x))
            result: Tensor = (self.one(h) + self.two(h)) / 2
            return result

    torch.manual_seed(0)
    plans = [((1,), 1), ((1,), 2), ((1,), 3), ((1, 1), 2), ((2, 1), 3)]
    habit = Habit(TwoHeads().double(), (features(),), classes(), cross_entropy)
    program = assert_matches(habit, plans)
    program.with_plan(lay_out(program.plan.blocks, (1,), 1)).step(*habit.args, target=habit.target)
    held = [p.grad.data_ptr() for p in program.parameters() if p.grad is not None]
    assert len(set(held)) == len(held) == 6
