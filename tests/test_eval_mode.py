"""Modules that do more than switch when they go into eval mode are refused by `evaluate`, and left as they were."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from efftra_fx import Cluster, CompiledModel, compile
from efftra_fx.errors import CaptureError

WIDTH = 6


class Merging(nn.Linear):
    """A layer with a small addition to its weights, which eval mode merges and training takes out again."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.first, self.second = nn.Parameter(torch.randn(2, inputs)), nn.Parameter(torch.randn(outputs, 2))
        self.merged = False

    def train(self, mode: bool = True) -> Merging:
        super().train(mode)
        if mode == self.merged:
            self.merge(-1.0 if mode else 1.0)
            self.merged = not mode
        return self

    def merge(self, sign: float) -> None:
        self.weight.data += sign * (self.second @ self.first)

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out if self.merged else out + x @ self.first.T @ self.second.T


class MergingAnew(Merging):
    """The same, with a new tensor under the parameter."""

    def merge(self, sign: float) -> None:
        self.weight.data = self.weight.data + sign * (self.second @ self.first)


class Replacing(Merging):
    """The same, with a new parameter."""

    def merge(self, sign: float) -> None:
        self.weight = nn.Parameter(self.weight.detach() + sign * (self.second @ self.first).detach())


class Keeping(nn.Linear):
    """A layer that keeps a product of its weights for evaluations."""

    kept: Any = None

    def train(self, mode: bool = True) -> Keeping:
        super().train(mode)
        self.kept = None if mode else {"weight": (2 * self.weight).detach()}
        return self

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, 2 * self.weight if self.kept is None else self.kept["weight"], self.bias)


class Partly(nn.Module):
    """A frozen norm stays in eval mode, and says how often it was switched; nothing is wrong with that."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.layer, self.norm, self.switched = nn.Linear(inputs, outputs), nn.BatchNorm1d(outputs), 0

    def train(self, mode: bool = True) -> Partly:
        super().train(mode)
        self.norm.eval()
        self.switched += 1
        return self

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.layer(x))
        return out


def _compiled(kind: Callable[[int, int], nn.Module]) -> tuple[nn.Sequential, CompiledModel, Tensor, Tensor]:
    torch.manual_seed(0)
    x, y = torch.randn(6, 4).double(), torch.arange(6) % 3
    model = nn.Sequential(kind(4, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3)).double()
    program = compile(
        model.train(), Cluster.local(2), example_inputs=(x,), example_target=y, loss_fn=F.cross_entropy,
        stages=2, micro_batches=2, costs="estimated", progress=False,
    )  # fmt: skip
    return model, program, x, y


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Merging, r"writes '0\.weight', which would stay for the next step"),
        (MergingAnew, r"writes '0\.weight', which would stay for the next step"),
        (Replacing, r"replaces parameters, buffers or modules"),
        (Keeping, r"keeps a tensor in 'kept', which later evaluations would find as it is now"),
    ],
)
def test_what_eval_mode_writes_is_refused_and_put_back_and_a_copy_gives_it(
    kind: Callable[[int, int], nn.Module], words: str
) -> None:
    model, program, x, y = _compiled(kind)
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(program.parameters(), 0.1)
    alone = torch.optim.SGD(plain.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        alone.zero_grad()
        loss = F.cross_entropy(plain(x), y)
        loss.backward()
        torch.testing.assert_close(program.step(x, target=y), loss.detach(), rtol=1e-9, atol=1e-12)
        optimizer.step()
        alone.step()
        with pytest.raises(CaptureError, match=f"when module '0' goes into eval mode, its own .* {words}.*a copy"):
            program.evaluate(x)
    for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12, msg=name)
    twin = copy.deepcopy(model)
    twin.load_state_dict(program.state_dict())
    torch.testing.assert_close(twin.eval()(x), plain(x))


def test_a_norm_that_stays_in_eval_mode_is_evaluated() -> None:
    model, program, x, y = _compiled(Partly)
    partly = model[0]
    assert isinstance(partly, Partly)
    switched = partly.switched
    program.step(x, target=y)
    torch.testing.assert_close(program.evaluate(x), copy.deepcopy(model).eval()(x))
    assert partly.training and not partly.norm.training and partly.switched == switched
