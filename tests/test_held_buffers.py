"""Buffers that forward writes: once a step as one device would, or as announced, however they are written."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from against_eager import assert_matches, compiled
from habits import WIDTH, Habit, Net, classes, cross_entropy, features
from rig import lay_out
from torch import Tensor, nn

from efftra_fx import CompiledModel
from efftra_fx.errors import CaptureError
from efftra_fx.held_buffers import HeldBuffers

PLANS = (((1,), 1), ((2, 1), 1), ((1,), 3), ((2, 1), 3), ((1, 2), 2))
Write = Callable[[Any, Tensor], Tensor]


def made(write: Write, **buffers: Tensor) -> Habit:
    torch.manual_seed(3)
    model = Net(write)
    for name, value in buffers.items():
        model.register_buffer(name, value.clone())
    return Habit(model.double(), (features(),), classes(), cross_entropy)


def trained(program: CompiledModel, habit: Habit, plan: Any, start: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the state after two steps as planned."""
    planned = program.with_plan(plan)
    planned.load_state_dict(start)
    for _ in range(2):
        planned.step(*habit.args, target=habit.target)
    return planned.state_dict()


def _add(m: Any, h: Tensor) -> Tensor:
    m.n += 1
    m.power.mul_(2)
    out: Tensor = h * (1 + 0.1 * m.n)
    return out


def _assign(m: Any, h: Tensor) -> Tensor:
    before = m.n
    m.n = m.n + 1
    m.n = m.n * 2
    m.power = m.power * 2
    out: Tensor = h * (1 + 0.1 * m.n + 0.01 * before)
    return out


def _norms(m: Any, h: Tensor) -> Tensor:
    m.n += 1
    m.power.copy_(m.b.weight.detach().norm())
    return h


@pytest.mark.parametrize("write", [_add, _assign, _norms])
def test_what_does_not_depend_on_the_batch_is_written_once_a_step(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    habit = made(write, n=torch.zeros((), dtype=torch.long), power=torch.ones(()))
    twin, start = copy.deepcopy(habit.model), copy.deepcopy(habit.model.state_dict())
    for _ in range(2):
        twin(*habit.args)
    program = compiled(habit)
    assert "buffers" not in capsys.readouterr().err
    for name, value in habit.model.named_buffers():
        assert torch.equal(value, start[name])  # compiling leaves them alone
    for shape, micro_batches in PLANS:
        state = trained(program, habit, lay_out(program.plan.blocks, shape, micro_batches), start)
        for name, value in twin.named_buffers():
            torch.testing.assert_close(state[name], value, rtol=1e-12, atol=0)


def test_tensors_and_values_are_put_back() -> None:
    inner = nn.BatchNorm1d(3)
    model = nn.Sequential(inner, nn.ModuleList([inner]))
    held, mean, value = HeldBuffers(model), inner.running_mean, torch.tensor([1.0, 2.0, 3.0])
    assert mean is not None
    mean.add_(1)
    inner.running_mean = value
    inner.num_batches_tracked = None
    held.restore()
    assert inner.running_mean is mean and not mean.any() and inner.num_batches_tracked is not None


def test_a_buffer_that_forward_gives_a_shape_is_put_back_without_it() -> None:
    model = nn.Module()
    model.register_buffer("least", torch.empty(0))
    held = HeldBuffers(model)
    least = model.least
    assert isinstance(least, Tensor)
    least.resize_(3).copy_(torch.ones(3))
    held.restore()
    assert least.shape == (0,) and model.least is least


def test_what_was_registered_since_is_taken_away() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    held = HeldBuffers(model)
    model[0].register_buffer("late", torch.ones(2), persistent=False)
    held.restore()
    assert not list(model.named_buffers()) and not hasattr(model[0], "late")


def _register_late(m: Any, h: Tensor) -> Tensor:
    if not hasattr(m, "scale"):
        m.register_buffer("scale", torch.arange(h.shape[1], dtype=h.dtype), persistent=False)
    out: Tensor = h * m.scale
    return out


def _register_again(m: Any, h: Tensor) -> Tensor:
    if h.shape[1] > m.reached:
        m.register_buffer("scale", torch.arange(h.shape[1], dtype=h.dtype))
        m.reached = h.shape[1]
    out: Tensor = h * m.scale
    return out


@pytest.mark.parametrize("late", [True, False])
def test_a_buffer_that_forward_registers_is_refused_until_it_has_done_so(late: bool) -> None:
    buffers = {} if late else {"scale": torch.ones(WIDTH)}
    habit = made(_register_late if late else _register_again, **buffers)
    habit.model.reached = 0  # type: ignore[assignment]
    with pytest.raises(CaptureError, match=r"registers buffer 'scale' at .*test_held_buffers.py:\d+.*before compile"):
        compiled(habit)
    assert dict(habit.model.named_buffers()).keys() == buffers.keys()
    habit.model(*habit.args)
    assert_matches(habit)


def test_a_buffer_that_forward_gives_another_form_is_refused_by_name() -> None:
    def grow(m: Any, h: Tensor) -> Tensor:
        m.seen = torch.cat([m.seen, m.seen])
        out: Tensor = h * m.seen[0]
        return out

    habit = made(grow, seen=torch.ones(2))
    with pytest.raises(CaptureError, match=r"puts float64 \[4\] in the place of buffer 'seen', which is float64 \[2\]"):
        compiled(habit)
    assert torch.equal(habit.model.seen, torch.ones(2).double())  # type: ignore[arg-type]
