"""Later batches of another form match one device, or are refused with both forms in the message."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from against_eager import assert_same, compiled, one_device, step
from habits import ROWS, Branches, Habit, Net, classes, cross_entropy, features
from rig import lay_out
from torch import Tensor, nn

import efftra_fx.captured_step
import efftra_fx.evaluation_forms
import efftra_fx.step_forms
import efftra_fx.varying
from efftra_fx import CompiledModel
from efftra_fx.errors import InputError
from efftra_fx.signature import read_call
from efftra_fx.variants import choose


class Mixer(nn.Module):
    """Attention over a sequence of any length, with a mask, a flag and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.qkv, self.out = nn.Embedding(9, 6), nn.Linear(6, 18), nn.Linear(6, 9)

    def forward(self, ids: Tensor, mask: Tensor | None = None, *, twice: bool = False, scale: float = 1.0) -> Tensor:
        h = self.table(ids) * scale
        for _ in range(2 if twice else 1):
            q, k, v = self.qkv(h).chunk(3, -1)
            h = h + (q @ k.transpose(-1, -2)).softmax(-1) @ v
            if mask is not None:
                h = h * mask[..., None]
        out: Tensor = self.out(h).flatten(0, 1)
        return out


def tokens(length: int, **kwargs: Any) -> tuple[tuple[Tensor, ...], dict[str, Any], Tensor]:
    """Return a batch of this length."""
    ids = torch.randint(0, 9, (4, length))
    return (ids,), kwargs, ids.roll(-1, 1)


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean over tokens."""
    return F.cross_entropy(output, target.flatten())


@pytest.fixture(scope="module")
def mixer() -> tuple[nn.Module, CompiledModel]:
    torch.manual_seed(0)
    model = Mixer().double()
    args, kwargs, target = tokens(5)
    habit = Habit(model, args, target, loss, kwargs)
    return model, compiled(habit, stages=2, replicas=(2, 1), micro_batches=2)


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"twice": True},
        {"scale": 0.5},
        {"mask": torch.tensor([[1.0] * 7] * 3 + [[1.0] * 2 + [0.0] * 5], dtype=torch.float64)},
    ],
)
def test_another_length_flag_number_or_mask_is_captured_again(
    mixer: tuple[nn.Module, CompiledModel], kwargs: dict[str, Any]
) -> None:
    model, program = mixer
    args, kwargs, target = tokens(7, **kwargs)
    habit = Habit(model, args, target, loss, kwargs)
    assert_same(step(program, habit), one_device(habit), 1e-9)


def test_a_form_that_was_met_is_not_captured_again(mixer: tuple[nn.Module, CompiledModel]) -> None:
    model, program = mixer
    for length in (3, 5, 3, 5):
        args, kwargs, target = tokens(length)
        habit = Habit(model, args, target, loss, kwargs)
        assert_same(step(program, habit), one_device(habit), 1e-9)
    forms = len(program._forms)
    program.step(*tokens(3)[0], target=tokens(3)[2])
    assert len(program._forms) == forms


def forbid_tracing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every trace fail from now on."""

    def traced(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a trace was made")

    monkeypatch.setattr(efftra_fx.captured_step, "capture", traced)
    monkeypatch.setattr(efftra_fx.varying, "capture", traced)


class Recurrent(nn.Module):
    """A recurrent net, whose length a tracer fixes."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.run, self.out = nn.Embedding(9, 6), nn.LSTM(6, 6, batch_first=True), nn.Linear(6, 9)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.out(self.run(self.table(ids))[0]).flatten(0, 1)
        return out


class Longer(Mixer):
    """Another way from a length of eight on."""

    def forward(self, ids: Tensor, mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        out = super().forward(ids, mask)
        return out * 3 if ids.shape[1] >= 8 else out


class Looping(Mixer):
    """A loop over the length."""

    def forward(self, ids: Tensor, mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        out = super().forward(ids, mask)
        for _ in range(ids.shape[1] - 2):
            out = out + torch.sin(out)
        return out


def holds_for(model: nn.Module, program: CompiledModel, *lengths: int) -> None:
    """Fail unless a step of each length is one device's."""
    for length in lengths:
        args, kwargs, target = tokens(length)
        habit = Habit(model, args, target, loss, kwargs)
        assert_same(step(program, habit), one_device(habit), 1e-9)


def program_of(model: nn.Module, length: int) -> CompiledModel:
    """Return a model compiled for a length."""
    torch.manual_seed(0)
    args, kwargs, target = tokens(length)
    return compiled(Habit(model.double(), args, target, loss, kwargs), stages=2, replicas=(2, 1), micro_batches=2)


@pytest.mark.parametrize("model", [Mixer(), Recurrent()])
def test_from_the_third_length_on_no_trace_is_made(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    program = program_of(model, 5)
    holds_for(model, program, 7)
    forbid_tracing(monkeypatch)
    holds_for(model, program, 3, 9, 2)


def test_a_length_that_takes_another_way_and_a_length_of_one_are_captured_apart() -> None:
    model = Longer()
    holds_for(model, program_of(model, 5), 6, 8, 1, 6)


def test_a_loop_over_the_length_is_captured_for_each_and_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    model = Looping()
    holds_for(model, program_of(model, 3), 4, 5)
    told = "the step is captured anew for another size of 'ids', 'target', since it fixes dimension 1 of 'ids'"
    assert capsys.readouterr().err.count(told) == 1


def test_a_trace_for_all_sizes_that_is_not_the_model_is_not_used(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Mixer()
    program = program_of(model, 5)
    holds_for(model, program, 6)
    (trace,) = program._compiled.traces.known
    node = next(n for n in trace.captured.gm.graph.nodes if n.target is torch.ops.aten.softmax.int)
    node.target = torch.ops.aten.log_softmax.int
    holds_for(model, program, 7)
    assert "this batch is captured apart, since in the trace for all sizes the loss" in capsys.readouterr().err


def test_a_batch_that_takes_another_branch_is_captured_again() -> None:
    torch.manual_seed(0)
    model, x, target = Branches().double(), features(), classes()
    masks = [torch.ones(ROWS, dtype=torch.bool), torch.arange(ROWS) > 2, torch.arange(ROWS) > 4]
    program = compiled(Habit(model, (x, masks[0]), target, cross_entropy), stages=2, replicas=(2, 1), micro_batches=2)
    for mask in (*masks, masks[0]):
        habit = Habit(model, (x, mask), target, cross_entropy)
        assert_same(step(program, habit), one_device(habit), 1e-9)
    assert len(program._forms) == 3


def test_a_number_that_changes_with_every_batch_is_refused_in_the_end() -> None:
    torch.manual_seed(0)
    model = Branches().double()
    program = compiled(Habit(model, (features(), torch.arange(ROWS)), classes(), cross_entropy), ranks=1)
    with pytest.raises(InputError, match=r"answers were captured already; a value that changes from batch to batch"):
        for power in range(2, 12):
            program.step(features(), torch.arange(ROWS) * power, target=classes())


@pytest.fixture(scope="module")
def net() -> tuple[Habit, CompiledModel]:
    torch.manual_seed(0)
    habit = Habit(Net().double(), (features(),), classes(), cross_entropy)
    return habit, compiled(habit, ranks=2, stages=2, micro_batches=2)


X = torch.zeros(ROWS, 4, dtype=torch.float64)
Y = torch.zeros(ROWS, dtype=torch.long)


@pytest.mark.parametrize(
    ("args", "kwargs", "words"),
    [
        (
            (X[:, :3],),
            {"target": Y},
            r"'x': compiled for float64 \[rows, 4\], got float64 \[7, 3\].*captured again.*habits.py",
        ),
        ((X.float(),), {"target": Y}, r"'x': compiled for float64 \[rows, 4\], got float32 \[7, 4\]"),
        ((X[0],), {"target": Y}, r"'x': compiled for float64 \[rows, 4\], got float64 \[4\]"),
        ((X,), {"target": Y[:5]}, r"'target' has 5 rows but 'x' has 7; give the same batch to both"),
        ((X[:0],), {"target": Y[:0]}, r"has 0 rows, expected at least 1"),
        ((X,), {}, r"target: compiled with a target, got none"),
        ((), {"target": Y}, r"missing a required argument: 'x'"),
        ((X,), {"target": Y, "size": 3}, r"unexpected keyword argument 'size'"),
    ],
)
def test_a_wrong_batch_is_refused_by_name_and_the_next_right_one_trains(
    net: tuple[Habit, CompiledModel], args: Any, kwargs: Any, words: str
) -> None:
    habit, program = net
    with pytest.raises(InputError, match=words):
        program.step(*args, **kwargs)
    assert_same(step(program, habit), one_device(habit), 1e-9)


def test_a_model_that_is_switched_after_compiling_is_captured_again() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.9), nn.Linear(6, 6), nn.Linear(6, 3)).double()
    model[0].requires_grad_(False)
    habit = Habit(model, (features(),), classes(), cross_entropy)
    program = compiled(habit, stages=2, replicas=(2, 1), micro_batches=2)
    model[1].eval()
    model[0].requires_grad_(True)
    assert_same(step(program, habit), one_device(habit), 1e-9)


def test_many_lengths_are_told_once_and_more_than_are_kept_still_train(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(efftra_fx.step_forms, "MANY_VARIANTS", 2)
    for module in (efftra_fx.step_forms, efftra_fx.evaluation_forms):
        monkeypatch.setattr(module, "MOST_VARIANTS", 3)
    model = Mixer()
    program = program_of(model, 5)
    holds_for(model, program, 3, 6, 7, 8, 3, 5, 8, 8)
    assert len(program._compiled.more) == 2  # 8 and 3: the others were let go when 8 came
    told = "2 forms of batch have been met, and capturing them took"
    assert capsys.readouterr().err.count(told) == 1
    met = len(program._evaluations.kept)
    for length in (3, 4, 5, 6):
        assert program.evaluate(tokens(length)[0][0]).shape == (4 * length, 9)
    assert met == 0 and len(program._evaluations.kept) == 1


def test_what_is_kept_of_other_forms_and_sizes_is_bounded_and_holds_no_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (efftra_fx.step_forms, efftra_fx.evaluation_forms):
        monkeypatch.setattr(module, "MOST_VARIANTS", 3)
    monkeypatch.setattr(efftra_fx.step_forms, "MOST_DESCRIBED", 3)
    model = Mixer()
    program = program_of(model, 5)
    holds_for(model, program, 6, 7)
    assert all(t.device.type == "meta" for one in program._compiled.more for t in one.front.examples.values())
    assert all(t.device.type == "meta" for one in program._compiled.traces.known for t in one.example)
    for rows in (2, 3, 4, 5, 6, 2, 4):
        ids = torch.randint(0, 9, (rows, 7))
        habit = Habit(model, (ids,), ids.roll(-1, 1), loss)
        assert_same(step(program, habit), one_device(habit), 1e-9)
    assert len(program._compiled.executors) <= 3 and len(program._compiled.met) <= 3


def test_the_form_that_a_batch_had_last_is_looked_at_first(mixer: tuple[nn.Module, CompiledModel]) -> None:
    _, program = mixer
    args, _, target = tokens(5)
    call, tensors = read_call(program.model.forward, args, {}, target)
    buffers = next(iter(program.built.tensors.values())).buffers
    forms = [program.built] * 3
    assert [
        choose(forms, program.model, program.options.loss_fn, call, tensors, buffers, likely) for likely in (0, 2, 7)
    ] == [0, 2, 0]


class Positions(nn.Module):
    """Attention with a table that Python keeps and makes longer, and no parameters between the first and the last."""

    def __init__(self) -> None:
        super().__init__()
        self.qk, self.out = nn.Linear(4, 8), nn.Linear(4, 3)
        self.table = torch.zeros(0, 4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        if len(self.table) < length:
            self.table = torch.outer(torch.arange(length), torch.arange(4)).double().cos()
        q, k = (self.qk(x).unflatten(-1, (2, 4)) * self.table[:length, None]).unbind(2)
        out: Tensor = self.out((q @ k.transpose(1, 2)).softmax(-1) @ x).mean(1)
        return out


def test_a_stage_without_parameters_computes_other_lengths_too() -> None:
    torch.manual_seed(0)
    model = Positions().double()
    habits = [
        Habit(model, (torch.randn(ROWS, length, 4, dtype=torch.float64),), classes(), cross_entropy)
        for length in (3, 6, 2, 5)
    ]
    program = compiled(habits[0])
    blocks = program.plan.blocks
    planned = program.with_plan(lay_out(blocks, (1, 1, 1), 2, cuts=(1, blocks - 1)))
    assert all(role.kind != "parameter" for role in planned.built.back.stages[1].roles)
    for habit in habits:
        assert_same(step(planned, habit), one_device(habit), 1e-9)


class Crosswise(nn.Module):
    """A product of two layers' weights, or layers in another order, where an argument asks for it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor, way: str = "") -> Tensor:
        if way in ("backwards", "again"):
            first: Tensor = self.b(self.a(x) if way == "again" else x)
            out: Tensor = self.c(self.a(first.tanh()).tanh())
            return out
        weight = self.a.weight @ self.b.weight if way == "product" else self.a.weight
        out = self.c(self.b(F.linear(x, weight, self.a.bias).tanh()).tanh())
        return out


@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("product", r"computes in one piece with 'a\.(bias|weight)' of stage 0 and 'b\.weight' of stage 1; cut the"),
        ("again", r"'a' computes in one piece with 'a\.(bias|weight)' of stage 0, after what stage 1 computes; cut"),
        ("backwards", r"'b' computes in one piece with 'b\.weight' of stage 1, which leaves nothing to do for stage 0"),
    ],
)
def test_a_form_that_no_cut_fits_says_which_parameters_are_where(way: str, words: str) -> None:
    torch.manual_seed(0)
    model = Crosswise().double()
    program = compiled(Habit(model, (features(),), classes(), cross_entropy), stages=2, replicas=(1, 1), cuts=["b"])
    step(program, Habit(model, (features(),), classes(), cross_entropy))
    with pytest.raises(InputError, match=words):
        program.step(features(), way=way, target=classes())


class Tasks(nn.Module):
    """A body with a head for each of two tasks."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.heads = nn.Linear(4, 6), nn.ModuleDict({name: nn.Linear(6, 3) for name in "ab"})

    def forward(self, x: Tensor, task: str) -> Tensor:
        out: Tensor = self.heads[task](self.body(x).tanh())
        return out


def test_tasks_of_one_model_take_a_program_each_as_the_refusal_says() -> None:
    torch.manual_seed(0)
    model = Tasks().double()
    habits = {task: Habit(model, (features(), task), classes(), cross_entropy) for task in "ab"}
    programs = {task: compiled(habit, stages=2, replicas=(2, 1)) for task, habit in habits.items()}
    with pytest.raises(InputError, match=r"uses 'heads\.b\.(bias|weight)', which the batch .* 'Several programs'"):
        programs["a"].step(*habits["b"].args, target=habits["b"].target)
    for task in "abba":
        assert_same(step(programs[task], habits[task]), one_device(habits[task]), 1e-9)
