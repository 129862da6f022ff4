"""On real ranks: new forms of batches, guards and wrong batches, without a hang and alike on every rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from habits import ROWS, Branches, Experts, Habit, TripleGradient, classes, cross_entropy, features
from ranks import run_ranks
from torch import Tensor, nn

from efftra_fx import Cluster, compile
from efftra_fx.errors import InputError

MASKS = (torch.ones(ROWS, dtype=torch.bool), torch.arange(ROWS) > 2, torch.ones(ROWS, dtype=torch.bool))


class Both(Branches):
    """A branch on a mask, experts that stay whole, and a custom function."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = Experts(4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return super().forward(x + self.experts(TripleGradient.apply(x, 0.5)), mask)  # type: ignore[no-untyped-call]


def build() -> Habit:
    """Return the model and its first batch, the same everywhere."""
    torch.manual_seed(0)
    return Habit(Both().double(), (features(), MASKS[0]), classes(), cross_entropy)


def gradients_here() -> list[Any]:
    """Train on several forms of batch, give rank 1 another batch once, and return losses, gradients and messages."""
    torch.set_num_threads(1)
    habit = build()
    program = compile(
        habit.model,
        Cluster.from_env(),
        example_inputs=habit.args,
        example_target=habit.target,
        loss_fn=habit.loss_fn,
        costs="estimated",
        stages=2,
        replicas=(2, 1),
        micro_batches=2,
        timeout=60.0,
    )
    results: list[Any] = []
    for mask in MASKS:
        loss = program.step(habit.args[0], mask, target=habit.target)
        found = {n: p.grad for n, p in program.named_parameters() if p.grad is not None}
        results.append((float(loss), found))
        for parameter in program.parameters():
            parameter.grad = None
        wrong = mask if program.rank != 1 else torch.arange(ROWS) > 3
        try:
            program.step(habit.args[0], wrong, target=habit.target)
        except InputError as error:
            results[-1] += (str(error),)
        for parameter in program.parameters():
            parameter.grad = None
    return results


def test_ranks_take_new_forms_together_and_refuse_different_batches_alike() -> None:
    outcomes = run_ranks(gradients_here, 3, limit_s=200.0)
    habit = build()
    for index, mask in enumerate(MASKS):
        output = habit.model(habit.args[0], mask)
        expected = cross_entropy(output, habit.target)
        own = dict(habit.model.named_parameters())
        gradients = dict(zip(own, torch.autograd.grad(expected, list(own.values()), allow_unused=True), strict=True))
        for outcome in outcomes:
            loss, found, message = outcome[index]
            assert abs(loss - float(expected)) <= 1e-9
            assert "the ranks were given different batches" in message and "rank 1" in message
            for name, gradient in found.items():
                other = gradients[name]
                assert (other is None and not gradient.any()) or torch.allclose(gradient, other, rtol=1e-8, atol=1e-12)


class Tasks(nn.Module):
    """A body with a head for each of two tasks."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.heads = nn.Linear(4, 6), nn.ModuleDict({name: nn.Linear(6, 3) for name in "ab"})

    def forward(self, x: Tensor, task: str) -> Tensor:
        out: Tensor = self.heads[task](self.body(x).tanh())
        return out


TASKS = "abbaab"


def _task(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(6, 4, generator=generator, dtype=torch.float64), torch.randint(0, 3, (6,), generator=generator)


def tasks_on_ranks() -> dict[str, Tensor]:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model, programs = Tasks().double(), {}
    for task in "ab":
        x, y = _task(0)
        programs[task] = compile(
            model,
            Cluster.from_env(),
            example_inputs=(x, task),
            example_target=y,
            loss_fn=F.cross_entropy,
            costs="estimated",
            cuts=["heads"],
            replicas=(1, 1),
            micro_batches=2,
            timeout=60.0,
        )
    more = [p for name, p in programs["b"].named_parameters() if name.startswith("heads.b")]
    optimizer = torch.optim.AdamW([*programs["a"].parameters(), *more])
    for number, task in enumerate(TASKS):
        x, y = _task(number)
        optimizer.zero_grad()
        programs[task].step(x, task, target=y)
        optimizer.step()
    return programs["b"].state_dict()


def test_programs_of_several_tasks_train_one_model_on_ranks() -> None:
    torch.manual_seed(0)
    model = Tasks().double()
    optimizer = torch.optim.AdamW(model.parameters())
    for number, task in enumerate(TASKS):
        x, y = _task(number)
        optimizer.zero_grad()
        F.cross_entropy(model(x, task), y).backward()
        optimizer.step()
    for state in run_ranks(tasks_on_ranks, 2, limit_s=120.0):
        for name, value in model.state_dict().items():
            assert torch.allclose(state[name], value, rtol=1e-9, atol=1e-10), name
