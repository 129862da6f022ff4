"""Programs over the same modules train what one device trains, whichever ranks hold a parameter."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from ranks import run_ranks
from torch import Tensor, nn

from efftra_fx import Cluster, CompiledModel, EfftraError, compile

X = torch.linspace(-1, 1, 48, dtype=torch.float64).reshape(12, 4).sin()
ONES = torch.ones(12, 3, dtype=torch.float64)


def net(seed: int, width: int = 3) -> nn.Sequential:
    """Two layers with a norm that keeps statistics."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, width)).double()


def target_of(model: nn.Sequential) -> Tensor:
    """Return ones as wide as the model's output."""
    *_, last = (module for module in model.modules() if isinstance(module, nn.Linear))
    return torch.ones(12, last.out_features, dtype=torch.float64)


def compiled(model: nn.Sequential, cuts: list[str], cluster: Cluster) -> CompiledModel:
    """Compile with these cuts."""
    return compile(
        model,
        cluster,
        example_inputs=(X,),
        example_target=target_of(model),
        loss_fn=F.mse_loss,
        cuts=cuts,
        micro_batches=1,
        costs="estimated",
    )


def update(parameters: Any, rate: float = 0.3) -> None:
    """Take a step of gradient descent and clear the gradients."""
    with torch.no_grad():
        for parameter in list(parameters):
            if parameter.grad is not None:
                parameter -= rate * parameter.grad
                parameter.grad = None


def two_nets_against_each_other() -> dict[str, Tensor]:
    """Train a judge alone and a maker through it, in turns."""
    torch.set_num_threads(1)
    cluster = Cluster.from_env()
    maker, judge = net(0, 4), net(1)
    both = nn.Sequential(maker, judge)
    alone, through = compiled(judge, ["3"], cluster), compiled(both, ["1.0"], cluster)
    for _ in range(3):
        alone.step(X, target=ONES)
        update(alone.parameters())
        through.step(X, target=-ONES)
        update(p for name, p in through.named_parameters() if name.startswith("0."))
        for parameter in through.parameters():
            parameter.grad = None
    return {**through.state_dict(), **{f"alone.{name}": t for name, t in alone.state_dict().items()}}


def test_two_programs_over_one_net_see_each_others_updates() -> None:
    both = nn.Sequential(net(0, 4), net(1))
    for _ in range(3):
        F.mse_loss(both[1](X), ONES).backward()
        update(both[1].parameters())
        F.mse_loss(both(X), -ONES).backward()
        update(both[0].parameters())
        both.zero_grad()
    for found in run_ranks(two_nets_against_each_other, 2, limit_s=120.0):
        for name, expected in both.state_dict().items():
            assert torch.allclose(found[name].double(), expected.double(), rtol=1e-9), name
            assert not name.startswith("1.") or torch.equal(found[name], found[f"alone.{name[2:]}"]), name


def a_new_head_on_a_trained_body() -> dict[str, Tensor]:
    """Train a net, then a larger one that has it inside, cut elsewhere."""
    torch.set_num_threads(1)
    cluster = Cluster.from_env()
    body = net(0, 4)
    first = compiled(body, ["3"], cluster)
    first.step(X, target=target_of(body))
    update(first.parameters())
    second = compiled(nn.Sequential(body, nn.Tanh(), nn.Linear(4, 3).double()), ["2"], cluster)
    return second.state_dict()


def test_a_program_starts_from_what_another_has_trained_in_a_part_of_its_model() -> None:
    body = net(0, 4)
    F.mse_loss(body(X), target_of(body)).backward()
    update(body.parameters())
    for found in run_ranks(a_new_head_on_a_trained_body, 2, limit_s=120.0):
        for name, expected in body.state_dict().items():
            assert name == "1.num_batches_tracked" or torch.allclose(found[f"0.{name}"], expected, rtol=1e-9), name


def the_same_weight_written_twice() -> str:
    """Update one parameter through two programs between two steps."""
    torch.set_num_threads(1)
    cluster = Cluster.from_env()
    judge = net(1)
    alone, through = compiled(judge, ["3"], cluster), compiled(nn.Sequential(net(0, 4), judge), ["1.0"], cluster)
    alone.step(X, target=ONES)
    through.step(X, target=ONES)
    update(alone.parameters())
    with torch.no_grad():
        for parameter in through.parameters():
            parameter.add_(1.0)
    try:
        alone.step(X, target=ONES)
    except EfftraError as error:
        return str(error)
    return "nothing"


def test_a_weight_that_two_programs_update_apart_is_refused_by_name() -> None:
    for said in run_ranks(the_same_weight_written_twice, 2, limit_s=120.0):
        assert "'0.weight' was written on rank 0 and on rank 1" in said, said
