"""What a script does to the model's own parameters holds for those that ranks train, or is refused by name."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import outcomes_of, run_ranks
from torch import nn

from efftra_fx import Cluster, CompiledModel, EfftraError, compile
from efftra_fx.passes import shard
from efftra_fx.passes.shard_choice import Prices

X, Y = torch.linspace(-1, 1, 32, dtype=torch.float64).reshape(8, 4).sin(), torch.arange(8) % 4
PLANS: dict[str, dict[str, Any]] = {
    "stages": {"replicas": (1, 1), "micro_batches": 2},
    "width": {"replicas": (1,), "tensor": (2,), "micro_batches": 1},
}


def net() -> nn.Sequential:
    """Return a net."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def compiled(plan: str) -> CompiledModel:
    """Compile for the launched ranks."""
    torch.set_num_threads(1)
    if plan == "width":  # tiny layers are cut too
        shard.Prices = partial(Prices, sum_s=0.0, summed_byte_s=1e-13)  # type: ignore[attr-defined, assignment]
    program = compile(
        net(), Cluster.from_env(), example_inputs=(X,), example_target=Y, loss_fn=F.cross_entropy, costs="estimated",
        **PLANS[plan],
    )  # fmt: skip
    assert bool(program.built.shares(program.rank)) == (plan == "width")
    return program


def switched(plan: str, through: str) -> dict[str, Any]:
    """Train with the first layer frozen for two steps in the middle, through the model or the program."""
    program = compiled(plan)
    optimizer = torch.optim.SGD(program.parameters(), lr=0.1)
    for step in range(5):
        if step in (1, 3):
            listed = program.model.named_parameters() if through == "model" else program.named_parameters()
            for name, parameter in listed:
                if name.startswith("0."):
                    parameter.requires_grad_(step == 3)
        program.step(X, target=Y)
        optimizer.step()
        optimizer.zero_grad()
    return {name: tensor.numpy() for name, tensor in program.state_dict().items()}


@pytest.mark.parametrize("through", ["model", "program"])
@pytest.mark.parametrize("plan", PLANS)
def test_parameters_may_be_frozen_through_the_model_and_the_program(plan: str, through: str) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        model[0].requires_grad_(step not in (1, 2))
        F.cross_entropy(model(X), Y).backward()
        optimizer.step()
        optimizer.zero_grad()
    for found in run_ranks(switched, 2, plan, through, limit_s=120.0):
        for name, tensor in model.state_dict().items():
            assert torch.allclose(torch.from_numpy(found[name]), tensor, rtol=1e-9), name


def halved(program: CompiledModel, past_autograd: bool) -> None:
    """Halve a weight of the model, by an operation that autograd sees or as averages of weights are put in."""
    weight = program.model.get_parameter("2.weight")
    with torch.no_grad():
        (weight.data if past_autograd else weight).mul_(0.5)


def written(plan: str, past_autograd: bool) -> list[Any]:
    """Write new values into the model before the first step, and once more later."""
    program = compiled(plan)
    halved(program, past_autograd)
    said: list[Any] = [float(program.step(X, target=Y))]
    optimizer = torch.optim.SGD(program.parameters(), lr=0.1)
    optimizer.step()
    optimizer.zero_grad()
    halved(program, past_autograd)
    for _ in range(2):
        try:
            said.append(float(program.step(X, target=Y)))
        except EfftraError as error:
            said.append(str(error))
    program.load_state_dict({"2.weight": torch.zeros(8, 8)}, strict=False)
    program.model.state_dict()
    said.append(float(program.evaluate(X).sum()))
    sys.stderr.flush()
    return said


@pytest.mark.parametrize("past_autograd", [False, True])
@pytest.mark.parametrize("plan", PLANS)
def test_values_written_into_the_model_are_taken_or_refused(plan: str, past_autograd: bool) -> None:
    model: Any = net()
    expected = []
    with torch.no_grad():
        model[2].weight.mul_(0.5)
    loss = F.cross_entropy(model(X), Y)
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter -= 0.1 * parameter.grad
        expected = [float(loss), float(F.cross_entropy(model(X), Y))]
        model[2].weight.mul_(0.5)
        expected.append(float(F.cross_entropy(model(X), Y)))
        model[2].weight.zero_()
        expected.append(float(model(X).sum()))
    for outcome in outcomes_of(written, 2, plan, past_autograd, limit_s=120.0):
        assert not outcome.error, outcome.error
        first, again, more, zero = outcome.value
        assert first == pytest.approx(expected[0], rel=1e-9) and zero == pytest.approx(expected[3], rel=1e-9)
        if plan == "width":
            assert "the model's own '2.weight' was written, but it has not the values that were trained" in again
            assert more == pytest.approx(expected[1], rel=1e-9)
        else:
            assert again == more == pytest.approx(expected[2], rel=1e-9)
        assert outcome.output.count("model.state_dict() has old values of what other ranks have trained") == 1


def test_anomaly_mode_is_no_hindrance() -> None:
    with torch.autograd.set_detect_anomaly(True):
        program = compile(
            net(), Cluster.local(2), example_inputs=(X,), example_target=Y, loss_fn=F.cross_entropy, costs="estimated",
            stages=2,
        )  # fmt: skip
        assert float(program.step(X, target=Y)) == pytest.approx(F.cross_entropy(net()(X), Y).item(), rel=1e-12)
        assert torch.is_anomaly_enabled()
