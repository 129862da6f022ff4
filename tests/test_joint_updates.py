"""Optimizers that need more than a rank holds are found by trying them, and refused by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import run_ranks
from torch import Tensor, nn

from efftra_fx import Cluster, EfftraError, compile
from efftra_fx.joint_updates import Manner, manner_of
from efftra_fx.passes import shard
from efftra_fx.passes.shard_choice import Prices


class Scaled(torch.optim.Optimizer):
    """Gradient descent by gradients over a norm: of all parameters, of each, or of none; or with noise."""

    def __init__(self, parameters: Any, over: str) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.over = over

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        total = torch.stack([p.grad.norm() for p in held]).norm()
        for p in held:
            scale = {"all": total, "each": p.grad.norm()}.get(self.over, torch.ones(()))
            noise = torch.randn_like(p) if self.over == "noise" else 0.0
            p -= self.param_groups[0]["lr"] * (p.grad + noise) / scale


def weights() -> list[nn.Parameter]:
    """Return two parameters."""
    return [nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(2))]


OPTIMIZERS: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], Manner]] = {
    "sgd": (lambda p: torch.optim.SGD(p, lr=0.0, momentum=0.9), Manner(True, True)),
    "adamw": (lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.0), amsgrad=True), Manner(True, True)),
    "foreach": (lambda p: torch.optim.Adam(p, foreach=True), Manner(True, True)),
    "fused": (lambda p: torch.optim.Adam(p, fused=True), Manner(True, True)),
    "adadelta": (lambda p: torch.optim.Adadelta(p), Manner(True, True)),
    "rprop": (lambda p: torch.optim.Rprop(p), Manner(True, True)),
    "adafactor": (lambda p: torch.optim.Adafactor(p), Manner(True, False)),
    "muon": (lambda p: torch.optim.Muon(p[:1]), Manner(True, False)),
    "lbfgs": (lambda p: torch.optim.LBFGS(p), Manner(None, None)),
    "none": (lambda p: Scaled(p, "none"), Manner(True, True)),
    "each": (lambda p: Scaled(p, "each"), Manner(True, False)),
    "all": (lambda p: Scaled(p, "all"), Manner(False, False)),
    "noise": (lambda p: Scaled(p, "noise"), Manner(True, True, True)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_how_an_optimizer_updates_is_found_and_leaves_no_trace(name: str) -> None:
    make, expected = OPTIMIZERS[name]
    parameters = weights()
    optimizer = make(parameters)
    hooked: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: hooked.append(1))
    torch.optim.lr_scheduler.StepLR(optimizer, 3)
    before, state = repr(optimizer.state_dict()), torch.get_rng_state()
    assert manner_of(optimizer) == expected
    assert repr(optimizer.state_dict()) == before and torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(p, torch.ones_like(p)) for p in parameters) and not hooked


X, Y = torch.linspace(-1, 1, 32, dtype=torch.float64).reshape(8, 4).sin(), torch.arange(8) % 4


def net() -> nn.Sequential:
    """Return a net."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def steps_of(options: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """Take two steps with each optimizer, or say why not."""
    torch.set_num_threads(1)
    if "tensor" in options:  # tiny layers are cut too
        shard.Prices = partial(Prices, sum_s=0.0, summed_byte_s=1e-13)  # type: ignore[attr-defined, assignment]
    found: dict[str, Any] = {}
    program = compile(
        net(),
        Cluster.from_env(),
        example_inputs=(X,),
        example_target=Y,
        loss_fn=F.cross_entropy,
        costs="estimated",
        micro_batches=1,
        **options,
    )
    for name in names:
        program.load_state_dict(net().state_dict())
        optimizer = OPTIMIZERS[name][0](list(program.parameters()))
        try:
            for _ in range(2):
                program.step(X, target=Y)
                optimizer.step()
                optimizer.zero_grad()
            found[name] = {key: tensor.numpy() for key, tensor in program.state_dict().items()}
        except EfftraError as error:
            found[name] = f"{type(error).__name__}: {error}"
            optimizer.zero_grad()
    return found


def stepped(name: str) -> dict[str, Tensor]:
    """Return what one device has after two steps."""
    model = net()
    optimizer = OPTIMIZERS[name][0](list(model.parameters()))
    for _ in range(2):
        F.cross_entropy(model(X), Y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


@pytest.mark.parametrize("options", [{"replicas": (1, 1)}, {"replicas": (1,), "tensor": (2,)}, {"replicas": (2,)}])
def test_an_optimizer_takes_one_devices_steps_or_is_refused(options: dict[str, Any]) -> None:
    names = ["adafactor", "each", "all", "none"]
    refused = {(1, 1): ["all"], (2,): []}.get(options["replicas"], ["adafactor", "each", "all"])
    for found in run_ranks(steps_of, 2, options, names, limit_s=120.0):
        for name in names:
            if name in refused:
                what = "all parameters together" if name == "all" else "a parameter's numbers together"
                assert f"updates {what}" in found[name] and "InputError" in found[name], found[name]
                continue
            for key, tensor in stepped(name).items():
                assert torch.allclose(torch.from_numpy(found[name][key]), tensor, rtol=1e-9), f"{name}: {key}"
