"""Hold a compiled step against the same model on one device, by several plans from one capture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from habits import Habit
from rig import lay_out
from torch import Tensor

from efftra_fx import Cluster, CompiledModel, compile
from efftra_fx.step_module import loss_of

PLANS: tuple[tuple[tuple[int, ...], int], ...] = (((2, 1), 3), ((1, 2), 2))


def one_device(habit: Habit) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Return loss and gradients of the whole batch; buffers and random numbers are left as they were."""
    before = [b.clone() for b in habit.model.buffers()]
    for parameter in habit.model.parameters():
        parameter.grad = None
    with torch.random.fork_rng():
        torch.manual_seed(0)
        output = habit.model(*habit.args, **habit.kwargs)
        loss = loss_of(output, habit.loss_fn, habit.target, habit.target is not None)
        loss.backward()
    gradients = {name: p.grad for name, p in habit.model.named_parameters()}
    for parameter in habit.model.parameters():
        parameter.grad = None
    with torch.no_grad():
        for buffer, value in zip(habit.model.buffers(), before, strict=True):
            buffer.copy_(value)
    return loss.detach(), gradients


def compiled(habit: Habit, ranks: int = 3, **options: Any) -> CompiledModel:
    """Compile a habit's model for ranks inside this process, nothing measured."""
    return compile(
        habit.model,
        Cluster.local(ranks),
        example_inputs=habit.args,
        example_kwargs=habit.kwargs,
        example_target=habit.target,
        loss_fn=habit.loss_fn,
        costs="estimated",
        progress=False,
        **{**habit.options, **options},
    )


def step(program: CompiledModel, habit: Habit) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Return loss and gradients of one step; buffers are left as they were."""
    before = [b.clone() for b in habit.model.buffers()]
    loss = program.step(*habit.args, target=habit.target, **habit.kwargs)
    gradients = {name: p.grad for name, p in program.named_parameters()}
    for parameter in program.parameters():
        parameter.grad = None
    with torch.no_grad():
        for buffer, value in zip(habit.model.buffers(), before, strict=True):
            buffer.copy_(value)
    return loss, gradients


def assert_same(
    found: tuple[Tensor, dict[str, Tensor | None]], expected: tuple[Tensor, dict[str, Tensor | None]], tolerance: float
) -> None:
    """Fail where a loss or a gradient differs, or a gradient is there on one side alone."""
    assert torch.allclose(found[0], expected[0], rtol=tolerance, atol=0), f"loss {found[0]} is not {expected[0]}"
    largest = max(float(g.abs().max()) for g in expected[1].values() if g is not None)
    for name, gradient in expected[1].items():
        other = found[1][name]
        if gradient is None or other is None:
            assert gradient is other, f"{name} has a gradient on one side alone"
            continue
        scale = max(float(gradient.abs().max()), 1e-6 * largest)
        worst = float((gradient - other).abs().max())
        assert worst <= tolerance * scale, f"gradient of {name} differs by {worst:.3g} where it reaches {scale:.3g}"


def assert_matches(habit: Habit, plans: Sequence[tuple[tuple[int, ...], int]] = PLANS, ranks: int = 3) -> CompiledModel:
    """Fail unless every plan's step is the one device's step; return the program."""
    expected = one_device(habit)
    program = compiled(habit, ranks)
    schedule = "1f1b" if program.built.front.tail.linear else "gpipe"
    for replicas, micro_batches in plans:
        if len(replicas) <= program.plan.blocks:
            plan = lay_out(program.plan.blocks, replicas, micro_batches, schedule)
            assert_same(step(program.with_plan(plan), habit), expected, habit.tolerance)
    return program
