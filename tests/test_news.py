"""Buffers that forward writes from the batch are what one device with the whole batch writes, read at once or not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from against_eager import compiled
from habits import Habit, Net, classes, cross_entropy, features
from ranks import run_ranks
from rig import lay_out
from torch import Tensor, nn

from efftra_fx import Cluster, CompiledModel, compile
from efftra_fx.meta import OUTPUTS, ROLE
from efftra_fx.passes.comm import operands_of

Write = Callable[[Any, Tensor], Any]
SHAPES: tuple[tuple[tuple[int, ...], int], ...] = (((1,), 3), ((2,), 1), ((1, 1), 2), ((2, 1), 3), ((1, 2), 2))
STEPS = 3


def average(m: Any, h: Tensor) -> Any:
    m.seen.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
    return h


def average_of_before(m: Any, h: Tensor) -> Any:
    out = h - m.seen
    m.seen = 0.9 * m.seen + 0.1 * h.detach().mean(0)
    return out


def average_at_once(m: Any, h: Tensor) -> Any:
    m.seen.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
    return h - m.seen.clone()


def normalised(m: Any, h: Tensor) -> Any:
    mean, spread = h.mean(0), h.var(0, unbiased=False)
    with torch.no_grad():
        m.seen.mul_(0.9).add_(mean, alpha=0.1)
        m.power.mul_(0.9).add_(spread.sum(), alpha=0.1)
    out: Tensor = (h - mean) / (spread + 1e-5).sqrt()
    return out


def largest(m: Any, h: Tensor) -> Any:
    m.seen.copy_(torch.maximum(m.seen, h.detach().abs().amax(0)))
    return h


def largest_at_once(m: Any, h: Tensor) -> Any:
    m.power.copy_(torch.maximum(m.power, h.detach().abs().amax()))
    out: Tensor = h / m.power.clone()
    return out


def rows_counted(m: Any, h: Tensor) -> Any:
    m.count += h.shape[0]
    m.seen += (h.detach() - m.seen).sum(0) / m.count
    return h


def kinds_counted(m: Any, h: Tensor) -> Any:
    m.kinds.index_add_(0, h.detach().argmax(1), torch.ones(h.shape[0], dtype=torch.long))
    return h


def queue(m: Any, h: Tensor) -> Any:
    out = h + 0.1 * (h @ m.queue.clone().t()).softmax(-1) @ m.queue.clone()
    m.queue.copy_(torch.cat([h.detach(), m.queue])[:20])
    return out


def ring(m: Any, h: Tensor) -> Any:
    out = h + 0.1 * (h @ m.queue.clone().t()).softmax(-1) @ m.queue.clone()
    m.queue.index_copy_(0, (torch.arange(h.shape[0]) + m.count) % 20, h.detach())
    m.count.copy_((m.count + h.shape[0]) % 20)
    return out


def codes(m: Any, h: Tensor) -> Any:
    chosen = torch.cdist(h.detach(), m.book).argmin(1)
    one, code = F.one_hot(chosen, 5).to(h.dtype), m.book[chosen]
    with torch.no_grad():
        m.size.mul_(0.9).add_(one.sum(0), alpha=0.1)
        m.total.mul_(0.9).add_(one.t() @ h.detach(), alpha=0.1)
        m.book.copy_(m.total / ((m.size + 1e-5) / (m.size.sum() + 5e-5) * m.size.sum())[:, None])
    return h + (code - h).detach() + 0.3 * (h - code)


def held_in_range(m: Any, h: Tensor) -> Any:
    m.any |= (h.detach() > 0.5).any(0)
    m.low += (h.detach() > 0).sum(0).to(torch.uint8)
    return h


def steps_then_average(m: Any, h: Tensor) -> Any:
    m.count += 1
    keep = torch.clamp((1 + m.count) / (10 + m.count), max=0.99)
    m.seen.copy_(keep * m.seen + (1 - keep) * h.detach().mean(0))
    return h - m.seen.clone()


LATER = (average, average_of_before, codes, kinds_counted, held_in_range, rows_counted, largest, queue, ring)
AT_ONCE = (average_at_once, normalised, largest_at_once, steps_then_average)


def made(write: Write | None, kind: type[Net] = Net) -> Habit:
    torch.manual_seed(3)
    model = kind(write)
    shapes = {"seen": (6,), "queue": (20, 6), "size": (5,), "total": (5, 6), "book": (5, 6)}
    for name, shape in shapes.items():
        model.register_buffer(name, torch.randn(shape) if name in ("queue", "total", "book") else torch.zeros(shape))
    model.register_buffer("power", torch.full((), 0.3))
    model.register_buffer("count", torch.zeros((), dtype=torch.long))
    model.register_buffer("kinds", torch.zeros(6, dtype=torch.long))
    model.register_buffer("any", torch.zeros(6, dtype=torch.bool))
    model.register_buffer("low", torch.zeros(6, dtype=torch.uint8))
    return Habit(model.double(), (features() * torch.linspace(0.3, 2, 7).double()[:, None],), classes(), cross_entropy)


def trained_alone(habit: Habit, steps: int = STEPS) -> tuple[list[float], dict[str, Tensor]]:
    """Train a copy on one device; return losses and state."""
    twin, losses = copy.deepcopy(habit.model), []
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.05)
    for _ in range(steps):
        loss = cross_entropy(twin(*habit.args), habit.target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, twin.state_dict()


def trained(program: CompiledModel, habit: Habit, steps: int = STEPS) -> tuple[list[float], dict[str, Tensor]]:
    optimizer, losses = torch.optim.SGD(program.parameters(), lr=0.05), []
    for _ in range(steps):
        losses.append(float(program.step(*habit.args, target=habit.target)))
        optimizer.step()
        optimizer.zero_grad()
    return losses, program.state_dict()


def assert_alike(found: tuple[list[float], dict[str, Tensor]], expected: tuple[list[float], dict[str, Tensor]]) -> None:
    torch.testing.assert_close(found[0], expected[0], rtol=1e-11, atol=0)
    for name, value in expected[1].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-10, atol=1e-13, msg=name)


def assert_trains_as_one_device(habit: Habit, program: CompiledModel, start: dict[str, Tensor]) -> None:
    expected = trained_alone(habit)
    schedule = "1f1b" if program.built.front.tail.linear else "gpipe"
    for replicas, micro_batches in SHAPES:
        if len(replicas) <= program.plan.blocks:
            planned = program.with_plan(lay_out(program.plan.blocks, replicas, micro_batches, schedule))
            planned.load_state_dict(start)
            assert_alike(trained(planned, habit), expected)
            planned.load_state_dict(start)


def parts(program: CompiledModel) -> dict[str, str]:
    news = program.built.front.news
    return {} if news is None else {b.name: b.kind for b in news.tail.boundaries}


@pytest.mark.parametrize("write", [*LATER, *AT_ONCE])
def test_buffers_losses_and_weights_are_those_of_one_device(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    habit = made(write)
    start = copy.deepcopy(habit.model.state_dict())
    program = compiled(habit)
    assert "buffers" not in capsys.readouterr().err
    assert_trains_as_one_device(habit, program, start)


@pytest.mark.parametrize("write", [average, average_of_before, codes])
def test_an_average_is_carried_as_sums_and_nothing_waits_for_it(write: Write) -> None:
    program = compiled(made(write))
    assert program.built.front.tail.linear and set(parts(program).values()) == {"sum"}


def test_what_every_rank_can_count_is_handed_over_by_none() -> None:
    assert parts(compiled(made(ring))) == {"detach": "rows"}


class Late(Net):
    """Counts behind all layers what it reads before them, and keeps a mean of weights that it reads early."""

    count: Tensor
    book: Tensor
    seen: Tensor

    def forward(self, x: Tensor, *more: Any) -> Tensor:
        x = x * (1 + 0.1 * self.count) + x @ self.book[:4, :4].clone()
        out = super().forward(x, *more)
        self.count += 1
        self.book.lerp_(self.b.weight.detach()[:5], 0.1)
        return out if self.training else out * self.seen[:3]


class Weighted(Net):
    """Keeps a mean of weights on one stage, which goes into a mean over rows that every rank keeps."""

    book: Tensor
    seen: Tensor

    def forward(self, x: Tensor, *more: Any) -> Tensor:
        book, seen = self.book.clone(), self.seen.clone()
        out = super().forward(x - seen[:4], *more)
        self.seen.mul_(0.9).add_(x.detach().mean() * book.sum(0))
        self.book[:3].lerp_(self.c.weight.detach(), 0.1)
        return out


class Switched(Net):
    """Keeps a mean of weights, which it reads before all layers, in some steps and not in others."""

    book: Tensor

    def forward(self, x: Tensor, *more: Any, write: bool = True) -> Tensor:
        out = super().forward(x + x @ self.book[:4, :4].clone())
        if write:
            self.book.lerp_(self.b.weight.detach()[:5], 0.5)
        return out


WRITES = (False, True, False, False, True)


def switched_on_ranks() -> Any:
    torch.set_num_threads(1)
    habit = made(None, Switched)
    program = compile(
        habit.model,
        Cluster.from_env(),
        example_inputs=habit.args,
        example_kwargs={"write": False},
        example_target=habit.target,
        loss_fn=cross_entropy,
        costs="estimated",
        timeout=60.0,
        cuts=["b"],  # links that are measured would say elsewhere, where the form that writes may not fit
        replicas=(1, 1),
        micro_batches=1,
    )
    losses = [float(program.step(*habit.args, write=write, target=habit.target)) for write in WRITES]
    report = program.check(*habit.args, write=False, target=habit.target, repeats=1, show=False)
    return losses, program.state_dict(), report.matches, program.state_dict()


def test_a_buffer_that_some_forms_of_step_write_is_the_same_for_all_forms() -> None:
    habit = made(None, Switched)
    losses = [float(cross_entropy(habit.model(*habit.args, write=w), habit.target).detach()) for w in WRITES]
    for found, state, matches, later in run_ranks(switched_on_ranks, 2, limit_s=120.0):
        assert matches
        assert_alike((found, state), (losses, habit.model.state_dict()))
        assert_alike((found, later), (losses, habit.model.state_dict()))


class Told(Net):
    """Every rank computes the end with a buffer that the rank of one stage writes from a weight."""

    book: Tensor

    def forward(self, x: Tensor, *more: Any) -> Tensor:
        out = super().forward(x)
        out = (out - out.mean(0)) * (1 + self.book[0, :3])
        if self.training:
            self.book[:3].lerp_(self.c.weight.detach(), 0.5)
        return out


PLANNED: tuple[tuple[Write | None, type[Net], tuple[int, ...]], ...] = (
    (codes, Net, (2, 1)),
    (queue, Net, (1, 1)),
    (average, Late, (1, 1)),
    (None, Weighted, (1, 1)),
    (None, Told, (1, 1)),
)


def on_ranks() -> list[Any]:
    torch.set_num_threads(1)
    found = []
    for write, kind, replicas in PLANNED:
        habit = made(write, kind)
        program = compile(
            habit.model,
            Cluster.from_env(),
            example_inputs=habit.args,
            example_target=habit.target,
            loss_fn=cross_entropy,
            costs="estimated",
            timeout=60.0,
            stages=2,
            replicas=replicas,
            micro_batches=2,
        )
        losses, state = trained(program, habit)
        found.append((losses, state, program.evaluate(*habit.args)))
    return found


def test_ranks_of_their_own_hold_the_same_buffers_whichever_stage_writes_them() -> None:
    outcomes = run_ranks(on_ranks, 3, limit_s=240.0)
    for index, (write, kind, _) in enumerate(PLANNED):
        habit = made(write, kind)
        expected = trained_alone(habit)
        habit.model.load_state_dict(expected[1])
        with torch.no_grad():
            evaluated = habit.model.eval()(*habit.args)
        for outcome in outcomes:
            losses, state, output = outcome[index]
            assert_alike((losses, state), expected)
            torch.testing.assert_close(output, evaluated, rtol=1e-10, atol=1e-12)


def test_statistics_behind_what_mixes_rows_are_the_whole_batchs(capsys: pytest.CaptureFixture[str]) -> None:
    norm = nn.BatchNorm1d(6).double()
    habit = made(lambda m, h: m.norm(h - h.mean(0) + 0.1 * h))
    habit.model.norm = norm
    start = copy.deepcopy(habit.model.state_dict())
    program = compiled(habit)
    assert "statistics" not in capsys.readouterr().err
    assert_trains_as_one_device(habit, program, start)


def test_running_statistics_of_instances_are_those_of_the_whole_batch() -> None:
    norm = nn.InstanceNorm1d(2, affine=True, track_running_stats=True).double()
    habit = made(lambda m, h: m.norm(h.unflatten(1, (2, 3))).flatten(1))
    habit.model.norm = norm
    start = copy.deepcopy(habit.model.state_dict())
    assert_trains_as_one_device(habit, compiled(habit), start)


class Decides(nn.Module):
    """Keeps a mean, and decides by values, so that it runs as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(6))

    def forward(self, h: Tensor) -> Tensor:
        self.kept.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)  # type: ignore[operator]
        return h.nan_to_num() if h.isnan().any() else h


def test_what_a_module_writes_that_runs_as_it_is_stays_announced(capsys: pytest.CaptureFixture[str]) -> None:
    habit = made(lambda m, h: average(m, m.decides(h)))
    habit.model.decides = Decides().double()
    compiled(habit)
    said = capsys.readouterr().err
    assert "buffers decides.kept, seen are written by each part" in said or "buffers seen, decides.kept" in said


def test_what_is_drawn_for_the_loss_too_stays_with_the_parts(capsys: pytest.CaptureFixture[str]) -> None:
    def write(m: Any, h: Tensor) -> Any:
        mixed = F.dropout(h - h.mean(0), 0.5)
        m.seen += mixed.detach().mean(0)
        return mixed

    compiled(made(write))
    assert "buffers seen are written by each part of the batch in order" in capsys.readouterr().err


def test_the_distributed_graph_makes_the_same_values() -> None:
    habit = made(codes)
    program = compiled(habit, stages=2, replicas=(2, 1), micro_batches=2)
    twin = copy.deepcopy(habit.model)
    twin(*habit.args)
    gm = program.graph
    values: dict[tuple[str, str], Tensor] = {("parameter", n): p for n, p in habit.model.named_parameters()}
    values |= {("buffer", n): b for n, b in habit.model.named_buffers()}
    names = [ROLE[n].name for n in gm.graph.nodes if n.op == "placeholder" and ROLE[n].kind == "input"]
    given = dict(zip(names, (*habit.args, habit.target), strict=True))
    _, *news = gm(*operands_of(gm, values, given))
    for name, value in zip(OUTPUTS[gm].buffers, news, strict=True):
        torch.testing.assert_close(value, twin.get_buffer(name), rtol=1e-10, atol=1e-12)


@cache
def _program() -> tuple[Habit, CompiledModel]:
    habit = made(codes)
    return habit, compiled(habit, stages=2, replicas=(2, 1), micro_batches=2)


@pytest.mark.parametrize("rows", [7, 5, 2, 1])
def test_batches_of_any_size_write_what_one_device_writes(rows: int) -> None:
    habit, program = _program()
    twin = copy.deepcopy(habit.model)
    twin(habit.args[0][:rows])
    program.step(habit.args[0][:rows], target=habit.target[:rows])
    for name, value in program.state_dict().items():
        torch.testing.assert_close(value, twin.state_dict()[name], rtol=1e-10, atol=1e-12)
