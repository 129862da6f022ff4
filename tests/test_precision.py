"""Lower precision: autocast around the step, and loss scaling that all ranks agree on."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from against_eager import assert_same, compiled, one_device, step
from habits import Habit, Net, classes, cross_entropy, features
from ranks import run_ranks
from torch import Tensor, nn

from efftra_fx import Cluster, compile
from efftra_fx.errors import InputError


def halves(output: Tensor, target: Tensor) -> Tensor:
    """Return a loss in full precision."""
    return F.cross_entropy(output.float(), target)


def test_autocast_around_the_step_holds_in_every_stage() -> None:
    torch.manual_seed(0)
    habit = Habit(Net(), (features().float(),), classes(), halves)
    program = compiled(habit, stages=2, replicas=(2, 1), micro_batches=2)
    exact = one_device(habit)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = one_device(habit)
        found = step(program, habit)
    assert not torch.equal(expected[0], exact[0])
    assert_same(found, expected, 3e-2)
    assert any(v.dtype == "bfloat16" for form in program._forms for v in form.values.values())
    assert_same(step(program, habit), exact, 1e-4)


def overflowing(bad: bool) -> Habit:
    """Return a network whose first layer's scaled gradient overflows for one row while its last layer's does not."""
    torch.manual_seed(163)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    x, y = torch.randn(4, 3) * 0.1, torch.randn(4, 2)
    if bad:
        with torch.no_grad():
            model.get_parameter("0.weight").mul_(1e-38)
        x[0], y[0] = 3e37, 50.0
    return Habit(model, (x,), y, F.mse_loss)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_an_overflow_in_one_stage_skips_the_update_in_all(micro_batches: int) -> None:
    habit = overflowing(True)
    program = compiled(habit, ranks=2, stages=2, replicas=(1, 1), micro_batches=micro_batches)
    before = copy.deepcopy(habit.model.state_dict())
    optimizers = [torch.optim.SGD(program.built.tensors[r].parameters.values(), lr=0.1) for r in (0, 1)]
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**16) for _ in (0, 1)]
    program.step(*habit.args, target=habit.target, scaler=scalers[0])
    last = program.built.tensors[1].parameters["4.weight"].grad
    assert last is not None and torch.isfinite(last).all()
    assert not all(torch.isfinite(p.grad).all() for p in program.parameters() if p.grad is not None)
    scalers[0].step(optimizers[0])
    scalers[0].update()
    assert scalers[0].get_scale() == 2.0**15
    assert all(torch.equal(value, before[name]) for name, value in program.state_dict().items())


def test_scaled_steps_update_as_one_device() -> None:
    habit = overflowing(False)
    twin = copy.deepcopy(habit.model)
    program = compiled(habit, ranks=2, stages=2, replicas=(1, 1), micro_batches=2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    optimizer = torch.optim.SGD(program.parameters(), lr=0.1)
    loss = program.step(*habit.args, target=habit.target, scaler=scaler)
    scaler.step(optimizer)
    scaler.update()
    expected = F.mse_loss(twin(*habit.args), habit.target)
    expected.backward()
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    assert torch.allclose(loss, expected)
    for name, value in twin.state_dict().items():
        assert torch.allclose(program.state_dict()[name], value, rtol=1e-5)


def test_a_scaler_of_another_kind_is_refused() -> None:
    habit = Habit(Net().double(), (features(),), classes(), cross_entropy)
    program = compiled(habit, ranks=1)
    with pytest.raises(InputError, match=r"scaler must be a torch.amp.GradScaler, got int"):
        program.step(*habit.args, target=habit.target, scaler=3)  # type: ignore[arg-type]


Steps = list[tuple[float, float]]  # the norm of the gradients, and the scale after the step
OVERFLOWS = (False, True, False)


def half_frozen() -> tuple[nn.Module, Tensor, Tensor]:
    """Return a net whose first layer, a stage by itself, is not trained, and a batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    model[0].requires_grad_(False)
    return model, torch.randn(8, 4), torch.arange(8) % 3


def scaled_loss(output: Tensor, target: Tensor) -> Tensor:
    """Return a loss that overflows where a target says so."""
    return F.cross_entropy(output, target % 3) * torch.where(target.max() > 2, float("inf"), 1.0)


def train_scaled(unscale: bool) -> tuple[Steps, dict[str, Tensor]]:
    """On a rank of its own: take steps, the second of which overflows; return what was seen, and the state."""
    torch.set_num_threads(1)
    model, x, y = half_frozen()
    options = {"example_target": y, "loss_fn": scaled_loss, "costs": "estimated", "timeout": 60.0}
    program = compile(model, Cluster.from_env(), example_inputs=(x,), cuts=("2",), micro_batches=2, **options)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(program.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    seen: Steps = []
    for overflow in OVERFLOWS:
        program.step(x, target=y + 3 * overflow, scaler=scaler)
        norm = torch.zeros(())
        if unscale:
            scaler.unscale_(optimizer)
            norm = program.clip_grad_norm_(0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        seen.append((float(norm), scaler.get_scale()))
    return seen, dict(program.state_dict())


@pytest.mark.parametrize("unscale", [True, False])
def test_an_overflow_skips_the_step_on_all_ranks_those_that_train_nothing_included(unscale: bool) -> None:
    found = run_ranks(train_scaled, 3, unscale, limit_s=120.0)  # the first trains nothing, the last is idle
    model, x, y = half_frozen()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    expected: Steps = []
    for overflow in OVERFLOWS:
        scaler.scale(scaled_loss(model(x), y + 3 * overflow)).backward()
        norm = torch.zeros(())
        if unscale:
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        expected.append((float(norm), scaler.get_scale()))
    assert expected[1][1] == 512.0
    for seen, state in found:
        assert seen == [(pytest.approx(n, rel=1e-5, nan_ok=True), scale) for n, scale in expected]
        for name, value in model.state_dict().items():
            assert torch.allclose(state[name], value, rtol=1e-5, atol=1e-7), name
