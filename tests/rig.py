"""One model captured once and run by many plans, against the same model on one device."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from models import Batch, Example
from torch import Tensor, nn

from efftra_fx import CompiledModel, compile
from efftra_fx.cluster import Cluster
from efftra_fx.plan import Plan, Stage

ROWS = 12
STEPS = 3
LEARNING_RATE = 0.01


@dataclass(frozen=True)
class Trained:
    """What training gave: losses and gradients of the first step, and parameters after the last."""

    losses: tuple[float, ...]
    gradients: Mapping[str, Tensor]
    parameters: Mapping[str, Tensor]
    loss_eps: float  # rounding of the loss: some models compute theirs in float32 whatever their own dtype


def lay_out(
    blocks: int,
    replicas: Sequence[int],
    micro_batches: int = 1,
    schedule: str = "1f1b",
    cuts: Sequence[int] | None = None,
    recompute: Sequence[bool] | None = None,
) -> Plan:
    """Return a plan with so many replicas a stage; the blocks are shared out evenly unless `cuts` says where."""
    count = len(replicas)
    inner = [blocks * (i + 1) // count for i in range(count - 1)] if cuts is None else list(cuts)
    edges, device, stages = [0, *inner, blocks], 0, []
    for index, number in enumerate(replicas):
        devices = tuple(range(device, device + number))
        again = bool(recompute and recompute[index])
        stages.append(Stage(edges[index], edges[index + 1], devices, recompute=again))
        device += number
    return Plan(tuple(stages), micro_batches, schedule)


def train_eagerly(example: Example, model: nn.Module, batch: Batch, steps: int = STEPS) -> Trained:
    """Train a copy of the model on one device."""
    twin = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(twin.parameters(), lr=LEARNING_RATE)
    losses, gradients, eps = [], {}, 0.0
    for step in range(steps):
        optimizer.zero_grad()
        loss = example.loss(twin, batch)
        loss.backward()
        losses.append(float(loss.detach()))
        eps = torch.finfo(loss.dtype).eps
        if step == 0:
            gradients = {n: p.grad.clone() for n, p in twin.named_parameters() if p.grad is not None}
        optimizer.step()
    return Trained(tuple(losses), gradients, {n: p.detach().clone() for n, p in twin.named_parameters()}, eps)


def train_planned(program: CompiledModel, batch: Batch, steps: int = STEPS) -> Trained:
    """Train with a program from its present weights; gradients and parameters are this process's."""
    for parameter in program.parameters():
        parameter.grad = None
    optimizer = torch.optim.AdamW(program.parameters(), lr=LEARNING_RATE)
    losses, gradients, eps = [], {}, 0.0
    for step in range(steps):
        loss = program.step(*batch.args, target=batch.target, **batch.kwargs)
        losses.append(float(loss))
        eps = torch.finfo(loss.dtype).eps
        if step == 0:
            gradients = {n: p.grad.clone() for n, p in program.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    return Trained(tuple(losses), gradients, {n: p.detach().clone() for n, p in program.named_parameters()}, eps)


def assert_same(expected: Trained, found: Trained, tolerance: float = 1e-9) -> None:
    """Hold loss and gradients to `tolerance`, relative, and parameters after training to ten times that."""
    assert expected.loss_eps == found.loss_eps
    for a, b in zip(expected.losses, found.losses, strict=True):
        assert abs(a - b) <= max(tolerance, 8 * found.loss_eps) * max(abs(a), 1e-3), f"loss {b}, expected {a}"
    assert_close(expected.gradients, found.gradients, tolerance, "gradient")
    assert_close(expected.parameters, found.parameters, 10 * tolerance, "parameter")


def assert_close(
    expected: Mapping[str, Tensor], found: Mapping[str, Tensor], tolerance: float, what: str, some: bool = False
) -> None:
    """Hold tensors equal, relative to the largest value of each, or a millionth of the largest value of all.

    `some`: only those that were found are compared, as on a rank that holds a part of the model.
    """
    overall = max((float(t.detach().abs().max()) for t in expected.values() if t.numel()), default=0.0)
    for name in found if some else {**expected, **found}:
        a, b = expected.get(name), found.get(name)
        if a is None or b is None:
            only = b if a is None else a
            assert only is not None and not only.any(), f"{what} of {name} is on one side only"
            continue
        a, b = a.detach(), b.detach()
        scale = max(float(a.abs().max()) if a.numel() else 0.0, 1e-6 * overall)
        gap = float((a - b).abs().max()) if a.numel() else 0.0
        assert gap <= tolerance * scale, f"{what} of {name}: {gap / max(scale, 1e-300):.3g} apart, relative"


class Rig:
    """A captured model on several ranks of this process, and what one device makes of it."""

    def __init__(self, example: Example, ranks: int = 4, cluster: Cluster | None = None) -> None:
        self.example, self.model, self.rows = example, example.build(), ROWS
        batch = example.data(ROWS)
        self.first = compile(
            self.model,
            cluster or Cluster.local(ranks),
            example_inputs=batch.args,
            example_kwargs=batch.kwargs,
            example_target=batch.target,
            loss_fn=example.loss_fn,
            costs="estimated",
            stages=1,
            replicas=(1,),
            micro_batches=1,
        )
        self.start = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        self.expected = cache(self._expected)

    @property
    def blocks(self) -> int:
        """Number of blocks of the model."""
        return self.first.plan.blocks

    def _expected(self, rows: int, steps: int = STEPS) -> Trained:
        twin = copy.deepcopy(self.model)
        twin.load_state_dict(self.start)
        return train_eagerly(self.example, twin, self.example.data(rows), steps)

    def program(self, plan: Plan) -> CompiledModel:
        """Return the program of a plan, at the first weights."""
        self.model.load_state_dict(self.start)
        program = self.first.with_plan(plan)
        program.load_state_dict(self.start)
        return program

    def found(self, plan: Plan, rows: int) -> Trained:
        """Train as planned from the first weights."""
        return train_planned(self.program(plan), self.example.data(rows))


@cache
def rig_of(example: Example, ranks: int = 4) -> Rig:
    """Return the rig of an example, captured once a test run."""
    return Rig(example, ranks)
