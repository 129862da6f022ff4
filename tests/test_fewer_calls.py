"""A module that several stages hold trains in batches whose form calls it less often than there are stages."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from ranks import run_ranks
from rig import lay_out
from torch import Tensor, nn

from efftra_fx import Cluster, compile

VIEWS = (3, 2, 1, 4, 3)


class Views(nn.Module):
    """One encoder for any number of views."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, views: Sequence[Tensor]) -> Tensor:
        seen = [self.second(self.first(view).tanh()) for view in views]
        out: Tensor = self.head(torch.stack(seen).mean(0))
        return out


def _made() -> tuple[nn.Module, list[tuple[list[Tensor], Tensor]]]:
    torch.manual_seed(0)
    batches = [([torch.randn(6, 4).double() for _ in range(count)], torch.arange(6) % 3) for count in VIEWS]
    return Views().double(), batches


def _alone() -> dict[str, Tensor]:
    model, batches = _made()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for views, target in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(views), target).backward()
        optimizer.step()
    return model.state_dict()


def _planned(cluster: Cluster, replicas: tuple[int, ...]) -> dict[str, Tensor]:
    torch.set_num_threads(1)
    model, batches = _made()
    views, target = batches[0]
    program = compile(
        model, cluster, example_inputs=(views,), example_target=target, loss_fn=F.cross_entropy,
        costs="estimated", progress=False, timeout=60.0,
    )  # fmt: skip
    program = program.with_plan(lay_out(program.plan.blocks, replicas, 2))
    held = {parameter.name for parameter in program.wiring.parameters if len(parameter.stages) > 1}
    assert held & {"first.weight", "second.weight"}
    optimizer = torch.optim.AdamW(program.parameters(), lr=1e-2)
    for views, target in batches:
        optimizer.zero_grad()
        program.step(views, target=target)
        optimizer.step()
    found: dict[str, Tensor] = program.state_dict()
    return found


def _here() -> dict[str, Tensor]:
    return _planned(Cluster.from_env(), (1, 1, 1))


def _assert_same(found: dict[str, Tensor]) -> None:
    for name, expected in _alone().items():
        torch.testing.assert_close(found[name], expected, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize("replicas", [(1, 1), (2, 1), (1, 1, 1)])
def test_each_form_trains_as_on_one_device(replicas: tuple[int, ...]) -> None:
    _assert_same(_planned(Cluster.local(3), replicas))


def test_ranks_that_do_not_call_it_hold_the_same_values() -> None:
    for found in run_ranks(_here, 3, limit_s=200.0):
        _assert_same(found)
