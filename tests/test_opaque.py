"""What runs as it is, as one node: it may draw random numbers, write buffers, and return more than tensors."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from against_eager import assert_matches, compiled
from habits import WIDTH, Experts, Habit, Net, WithExperts, classes, cross_entropy, features, plain
from rig import assert_close, lay_out
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from efftra_fx import CompiledModel
from efftra_fx.errors import CaptureError
from efftra_fx.opaque import make_operator
from efftra_fx.passes.batch_evaluate import is_random
from efftra_fx.program import micro_batch_rows
from efftra_fx.runtime.executor import _mix

Found = tuple[float, dict[str, Tensor]]


class Noisy(Experts):
    """Experts that drop some of what they give."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.5) + 0.1 * torch.randn_like(x)


class Used(Experts):
    """Experts that count their calls, how often each was chosen, and keep a mean of what they saw."""

    calls: Tensor
    chosen: Tensor
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("chosen", torch.zeros(3))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.chosen.index_add_(0, self.gate(x).argmax(-1), torch.ones(len(x), dtype=x.dtype))
        self.seen = 0.9 * self.seen + 0.1 * x.detach().mean()
        return super().forward(x)


class Mixed(Experts):
    """Experts that return a tuple with a name, a number and nothing in it."""

    def forward(self, x: Tensor) -> Any:
        return {"name": "experts", "count": 3, "none": None, "values": super().forward(x)}


def with_first(first: nn.Module) -> Habit:
    torch.manual_seed(3)
    model = WithExperts()
    model.first = first  # type: ignore[assignment]
    return Habit(model.double(), (features(),), classes(), cross_entropy)


def step(program: CompiledModel, habit: Habit, seed: int) -> Found:
    torch.manual_seed(seed)
    loss = float(program.step(*habit.args, target=habit.target))
    gradients = {n: p.grad for n, p in program.named_parameters() if p.grad is not None}
    for parameter in program.parameters():
        parameter.grad = None
    return loss, gradients


def eagerly(habit: Habit, seed: int) -> Found:
    """Run the step on one device, drawing what the plan of one stage and one micro-batch draws."""
    torch.manual_seed(seed)
    drawn = int(torch.empty((), dtype=torch.int64).random_().item())
    torch.manual_seed(_mix(drawn, 0, 0, 0))
    assert habit.loss_fn is not None
    loss = habit.loss_fn(habit.model(*habit.args), habit.target)
    found = torch.autograd.grad(loss, list(habit.model.parameters()), allow_unused=True)
    names = [n for n, _ in habit.model.named_parameters()]
    return float(loss.detach()), {n: g for n, g in zip(names, found, strict=True) if g is not None}


@pytest.mark.parametrize("recompute", [False, True])
def test_the_backward_sees_the_numbers_that_the_forward_drew(recompute: bool) -> None:
    habit = with_first(Noisy())
    program = compiled(habit, 1, stages=1, replicas=(1,), micro_batches=1)
    program = program.with_plan(lay_out(program.plan.blocks, (1,), 1, recompute=(recompute,)))
    expected = eagerly(habit, 5)
    found = step(program, habit, 5)
    assert found[0] == pytest.approx(expected[0], rel=1e-12)
    assert_close(expected[1], found[1], 1e-9, "gradient")
    assert step(program, habit, 6)[0] != found[0] == step(program, habit, 5)[0]


def test_stages_and_replicas_draw_the_same_for_the_same_seed_and_plan() -> None:
    habit = with_first(Noisy())
    program = compiled(habit, 3)
    program = program.with_plan(lay_out(program.plan.blocks, (2, 1), 3))
    first, again, other = (step(program, habit, seed) for seed in (1, 1, 2))
    assert first[0] == again[0] != other[0]
    assert_close(first[1], again[1], 1e-12, "gradient")


class Masked(torch.autograd.Function):
    """A dropout of one's own, whose backward takes the mask that its forward drew."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        mask = torch.rand_like(x) < 0.5
        ctx.save_for_backward(mask)
        return x * mask * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (mask,) = ctx.saved_tensors
        return gradient * mask * 2


def test_a_custom_function_that_draws_is_run_again_with_the_same_numbers() -> None:
    torch.manual_seed(3)
    habit = plain(lambda m, h: Masked.apply(h))  # type: ignore[no-untyped-call]
    program = compiled(habit, 1, stages=1, replicas=(1,), micro_batches=1)
    assert sum(is_random(n) for n in program.built.front.gm.graph.nodes if n.op == "call_function") == 1
    expected, found = eagerly(habit, 5), step(program, habit, 5)
    assert found[0] == pytest.approx(expected[0], rel=1e-12)
    assert_close(expected[1], found[1], 1e-9, "gradient")


@pytest.mark.parametrize(("shape", "micro_batches"), [((1,), 1), ((1,), 3), ((1, 1), 2)])
def test_buffers_are_those_of_one_device_that_runs_the_same_parts_in_order(
    shape: tuple[int, ...], micro_batches: int, capsys: pytest.CaptureFixture[str]
) -> None:
    habit = with_first(Used())
    twin, (x,) = copy.deepcopy(habit.model), habit.args
    program = compiled(habit, 2)
    assert "buffers first.calls, first.chosen, first.seen" in capsys.readouterr().err
    program = program.with_plan(lay_out(program.plan.blocks, shape, micro_batches))
    loss, gradients = step(program, habit, 0)
    total = torch.zeros((), dtype=torch.float64)
    for low, high in micro_batch_rows(len(x), micro_batches):
        total = total + cross_entropy(twin(x[low:high]), habit.target[low:high]) * (high - low) / len(x)
    total.backward()
    assert loss == pytest.approx(float(total.detach()), rel=1e-12)
    wanted = {n: p.grad for n, p in twin.named_parameters() if p.grad is not None}
    assert_close(wanted, gradients, 1e-9, "gradient")
    state = program.state_dict()
    for name, buffer in twin.named_buffers():
        torch.testing.assert_close(state[name], buffer, rtol=1e-12, atol=0)


def test_what_is_no_tensor_in_its_result_is_kept() -> None:
    class Unpacks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Mixed()

        def forward(self, x: Tensor) -> Tensor:
            found = self.inner(x)
            assert found["name"] == "experts" and found["none"] is None
            out: Tensor = found["values"] * found["count"]
            return out

    habit = with_first(Unpacks())
    program = compiled(habit, 1, stages=1, replicas=(1,), micro_batches=2)
    found, expected = step(program, habit, 0), eagerly(habit, 0)
    assert found[0] == pytest.approx(expected[0], rel=1e-12)
    assert_close(expected[1], found[1], 1e-9, "gradient")


class Slope(nn.Module):
    """The derivative of a layer by what it is given, as autograd gives it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            point = x if x.requires_grad else x.detach().requires_grad_()
            return torch.autograd.grad(torch.tanh(self.layer(point)).sum(), point, create_graph=True)[0]


class Mapped(nn.Module):
    """A layer written for one row, and mapped over all."""

    def __init__(self, inner: bool) -> None:
        super().__init__()
        self.layer, self.inner = nn.Linear(WIDTH, WIDTH), inner

    def forward(self, x: Tensor) -> Tensor:
        layer, slope = self.layer, torch.func.grad(lambda v: torch.tanh(self.layer(v)).sum())
        row = slope if self.inner else lambda v: layer.weight @ v
        return torch.vmap(row)(x)  # type: ignore[no-any-return]


class RowByRow(nn.Module):
    """A layer that takes the rows one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([torch.tanh(self.layer(row)) for row in x])


def test_a_module_that_loops_over_rows_trains_as_on_one_device(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, WIDTH), RowByRow(), nn.Linear(WIDTH, 3)).double()
    assert_matches(Habit(model, (features(),), classes(), cross_entropy))
    said = "module '1' runs as it is, in one piece: it computes other operators for other numbers of rows at File"
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("what", ["slope", "mapped", "mapped slope"])
def test_a_module_that_no_tracer_can_follow_trains_as_on_one_device(
    what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Linear(4, WIDTH), nn.Tanh(), Slope() if what == "slope" else Mapped(what != "mapped"), nn.Linear(WIDTH, 3)
    )
    assert_matches(Habit(model.double(), (features(),), classes(), cross_entropy))
    assert "module '2' runs as it is, in one piece: it cannot be traced" in capsys.readouterr().err


def test_what_it_draws_cannot_be_drawn_alike_by_any_plan() -> None:
    where = r"since it .* at .*\.py:\d+; .*rng=.plan"
    with pytest.raises(CaptureError, match=rf"cannot draw what 'first' draws, which runs as it is {where}"):
        compiled(with_first(Noisy()), 1, rng="layout_free")
    habit = with_first(Noisy())
    inner = habit.model

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.inner(x)
            return F.dropout(out, 0.5) * (2 if out.sum() > 0 else 1)

    with pytest.raises(CaptureError, match=rf"cannot draw what the model draws, which runs as it is {where}"):
        compiled(replace(habit, model=Whole()), 1, rng="layout_free")
    function = plain(lambda m, h: Masked.apply(h))  # type: ignore[no-untyped-call]
    with pytest.raises(CaptureError, match=r"draw what 'Masked' draws, which runs as it is \(File .*, line \d+"):
        compiled(function, 1, rng="layout_free")


def test_gradients_of_what_runs_as_it_is_are_computed_in_its_own_precision() -> None:
    torch.manual_seed(0)
    x, w = (torch.randn(6, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True))

    def run(operands: Any) -> list[Tensor]:
        return [torch.tanh(operands[0] @ operands[1])]

    operator = make_operator("narrow", run, lambda operands: [torch.empty_like(operands[0])])
    expected = torch.autograd.grad(run([x, w])[0].sum(), [x, w])
    for a, b in zip(torch.autograd.grad(operator([x, w])[0].sum(), [x, w]), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    with torch.autocast("cpu", torch.bfloat16):
        cast = make_operator("cast", run, lambda operands: [torch.empty_like(operands[0], dtype=torch.bfloat16)])
        result, own = cast([x, w])[0], run([x, w])[0]
    for a, b in zip(torch.autograd.grad(result.sum(), [x, w]), torch.autograd.grad(own.sum(), [x, w]), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


class Doubled(torch.autograd.Function):
    """A custom function that calls a module."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, inner: nn.Module) -> Tensor:
        result: Tensor = x + inner(x).detach()
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


class Reversible(nn.Module):
    """A module that decides by values, called inside a custom function."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Experts()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = Doubled.apply(x, self.inner)  # type: ignore[no-untyped-call]
        return result * 2


def test_a_module_that_decides_by_values_inside_a_custom_function_is_kept_with_what_calls_it() -> None:
    assert_matches(with_first(Reversible()))


class Inner(torch.autograd.Function):
    """A custom function whose backward runs a module again and lets its gradients add up by themselves."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, inner: nn.Module) -> Tensor:
        ctx.save_for_backward(x)
        ctx.inner = inner
        result: Tensor = inner(x).detach()
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            ctx.inner(x).backward(gradient)
        return x.grad, None


def test_a_backward_that_writes_gradients_itself_is_refused_by_the_parameters_name() -> None:
    class Reruns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = Inner.apply(x, self.inner)  # type: ignore[no-untyped-call]
            return result

    habit = with_first(Reruns())
    with pytest.raises(CaptureError, match=r"custom backward writes the gradient of '\S+inner.weight' itself"):
        compiled(habit)
    assert all(p.grad is None for p in habit.model.parameters())


def test_what_gives_another_number_of_tensors_than_when_it_was_captured_is_named() -> None:
    given = [1]
    operator = make_operator("layers.kept", lambda t: [t[0]] * given[0], lambda t: [torch.empty_like(t[0])])
    x = torch.ones(2)
    with FakeTensorMode() as mode:
        operator([mode.from_tensor(x)])
    assert torch.equal(operator([x])[0], x)
    given[0] = 3
    with pytest.raises(CaptureError, match="'layers.kept' runs as it is and gave 3 tensors, where it gave 1 when"):
        operator([x])


class Penalised(nn.Module):
    """A critic of which the derivative with respect to what it was given is wanted."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    def forward(self, x: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad(self.critic(x).sum(), x, create_graph=True)
        out: Tensor = (slope.norm(dim=-1, keepdim=True) - 1).square()
        return out


def test_a_module_that_differentiates_by_what_it_is_given_trains_as_on_one_device() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.penalty, self.c = nn.Linear(4, WIDTH), Penalised(), nn.Linear(WIDTH, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.tanh(self.a(x))
            out: Tensor = self.c(h) + self.penalty(h)
            return out

    torch.manual_seed(3)
    program = assert_matches(Habit(Model().double(), (features(),), classes(), cross_entropy))
    assert [path for path, _ in program.built.front.captured.opaque] == ["penalty"]


def test_a_batch_norm_in_code_that_runs_as_it_is_keeps_its_statistics() -> None:
    class Asking(Net):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(WIDTH)

        def forward(self, x: Tensor, *more: Any) -> Tensor:
            h = self.norm(self.b(self.a(x)))
            out: Tensor = self.c(h * 2 if bool(h.sum() > 3) else h)
            return out

    torch.manual_seed(3)
    habit = Habit(Asking().double(), (features(),), classes(), cross_entropy)
    twin = copy.deepcopy(habit.model)
    program = assert_matches(habit, (((2,), 2),))
    program.step(*habit.args, target=habit.target)
    twin(*habit.args)
    assert_close(
        dict(twin.named_buffers()), {n: program.state_dict()[n] for n in dict(twin.named_buffers())}, 1e-12, ""
    )
