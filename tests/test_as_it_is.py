"""Models and modules that are no graph run as they are, and train as on one device."""

from __future__ import annotations

import builtins
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from against_eager import assert_matches, assert_same, compiled, one_device, step
from habits import WIDTH, Habit, Net, classes, cross_entropy, features, plain
from torch import Tensor, nn

from efftra_fx.errors import CaptureError, PlanError
from efftra_fx.opaque import is_opaque

WHOLE_MODEL = (((1,), 3), ((2,), 2), ((3,), 1))  # one block: replicas alone


class Chosen(nn.Module):
    """Experts of which each row takes its best; one that no row takes is not called."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(width, 4), nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.nobody = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        weight, choice = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (choice == number).nonzero()[:, 0]
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * weight[rows, None])
        return out


def each_row(model: nn.Module, h: Tensor) -> Tensor:
    return torch.stack([torch.tanh(row) for row in h])


def chosen(model: nn.Module, h: Tensor) -> Tensor:
    weight, choice = h[:, :2].softmax(-1).max(-1)
    out = torch.zeros_like(h)
    for number in range(2):
        rows = (choice == number).nonzero()[:, 0]
        out = out.index_add(0, rows, torch.tanh((number + 1) * h[rows]) * weight[rows, None])
    return out


def slope(model: nn.Module, h: Tensor) -> Tensor:
    with torch.enable_grad():
        point = h if h.requires_grad else h.detach().requires_grad_()
        return torch.autograd.grad(torch.tanh(point).pow(2).sum(), point, create_graph=True)[0]


def by_sign(model: nn.Module, h: Tensor) -> Tensor:
    return h * 2 if h.sum() > 0 else h


def by_size(model: nn.Module, h: Tensor) -> Tensor:
    return h / h.norm() if h.norm() > 100 else h


ROOTS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "a loop over rows": each_row,
    "rows chosen by values": chosen,
    "a derivative": slope,
    "a branch on all rows": by_sign,
    "a branch that is never taken": by_size,
}


@pytest.mark.parametrize("name", ROOTS)
def test_a_model_whose_own_forward_is_no_graph_runs_as_it_is(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(3)
    habit = plain(ROOTS[name])
    program = assert_matches(habit, WHOLE_MODEL)
    assert program.plan.blocks == 1
    assert "efftra_fx: the model runs as it is, in one piece: " in capsys.readouterr().err
    with torch.no_grad():
        assert torch.allclose(program.evaluate(*habit.args), habit.model(*habit.args), rtol=1e-12)
    with pytest.raises(PlanError, match="stages=2 but model has 1 blocks"):
        compiled(habit, 3, stages=2)


def test_a_model_that_gives_its_own_loss_and_a_loss_that_is_no_graph_run_as_they_are() -> None:
    torch.manual_seed(3)

    class Own(Net):
        def forward(self, x: Tensor, *more: Tensor) -> Tensor:
            return cross_entropy(super().forward(x), *more)

    assert_matches(Habit(Own(chosen).double(), (features(), classes())), WHOLE_MODEL)
    habit = plain(chosen)
    apart = Habit(habit.model, habit.args, habit.target, lambda out, y: F.cross_entropy(out[y > 0], y[y > 0]))
    assert_matches(apart, WHOLE_MODEL)


def test_neither_way_out_that_works_is_said_for_model_and_loss() -> None:
    def fixed(model: nn.Module, h: Tensor) -> Tensor:
        return each_row(model, h) * torch.ones(7, 1, dtype=h.dtype)

    with pytest.raises(CaptureError, match=r"nor can the model run as it is: .* but not on 6 of its 7 rows"):
        compiled(plain(fixed), 1)


class Deciding(nn.Module):
    """A module with a branch on a value of all rows."""

    def __init__(self, decide: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.decide = nn.Linear(WIDTH, WIDTH), decide

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.layer(x)
        return -h if bool(self.decide(h)) else h


def with_inner(inner: Callable[[], nn.Module]) -> Habit:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, WIDTH), nn.Tanh(), inner(), nn.Tanh(), nn.Linear(WIDTH, 3))
    return Habit(model.double(), (features(),), classes(), cross_entropy)


TOGETHER: dict[str, Callable[[Tensor], Tensor]] = {
    "a mean": lambda h: h.mean() > 0,
    "far from every batch so far": lambda h: h.abs().mean() > 10,
    "a norm that is not reached": lambda h: h.norm() < 100,
    "any that is not so far": lambda h: (h > 10).any(),
    "all that is so far": lambda h: (h < 10).all(),
    "a share of the rows": lambda h: (h > 10).double().mean() > 0.5,
    "a number": lambda h: torch.tensor(h.norm().item() > 100),
}


@pytest.mark.parametrize("name", TOGETHER)
def test_what_decides_for_all_rows_is_computed_on_the_whole_batch(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    habit = with_inner(lambda: Deciding(TOGETHER[name]))
    program = assert_matches(habit, (((2, 1), 3), ((1, 1), 2)))
    assert "module '2' computes with several rows together, or decides by them, so it" in capsys.readouterr().err
    far = Habit(habit.model, (30 * habit.args[0],), habit.target, cross_entropy)
    assert_same(step(program, far), one_device(far), 1e-9)
    inner = habit.model[2]  # type: ignore[index]
    with torch.no_grad():
        inner.layer.weight.mul_(50)
    some = Habit(habit.model, (features() * torch.tensor([1e-3] * 6 + [10.0])[:, None],), habit.target, cross_entropy)
    assert_same(step(program, some), one_device(some), 1e-9)


class Rescued(nn.Module):
    """Questions whose answer changes nothing for the rows that it is not about."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.layer(x)
        if torch.isnan(h).any():
            h = torch.nan_to_num(h)
        if (h.abs() > 1e4).any():
            h = h.clamp(-1e4, 1e4)
        low = h < 0
        if low.any():
            h = torch.where(low, h * 0.1, h)
        if low.sum() == 0:
            return h
        return torch.stack([-row if row.sum() > 0 else row for row in h])


@pytest.mark.parametrize("inner", [Rescued, Chosen])
def test_what_decides_for_each_row_is_cut(inner: type[nn.Module], capsys: pytest.CaptureFixture[str]) -> None:
    program = assert_matches(with_inner(inner), (((2, 1), 3), ((1, 1), 2)))
    assert program.built.front.tail.linear
    assert "runs as it is" in (said := capsys.readouterr().err)
    assert "computes with several rows together" not in said


@pytest.mark.parametrize(("replicas", "micro_batches"), [((1,), 1), ((3,), 2), ((2, 1), 2), ((1, 2), 3)])
def test_what_no_row_has_used_keeps_no_gradient(replicas: tuple[int, ...], micro_batches: int) -> None:
    habit = with_inner(lambda: nn.Sequential(Chosen(), Chosen()))
    x, y = habit.args[0], habit.target
    twin, other = (torch.optim.AdamW(habit.model.parameters(), lr=0.05, weight_decay=0.3) for _ in range(2))
    program = compiled(habit, 3, stages=len(replicas), replicas=replicas, micro_batches=micro_batches)
    start = {name: value.clone() for name, value in habit.model.state_dict().items()}
    counts, ends = [], []
    for optimizer, steps in ((twin, one_device), (other, lambda part: step(program, part))):
        habit.model.load_state_dict(start)
        for rows in (7, 2, 1, 5):
            part = Habit(habit.model, (x[:rows],), y[:rows], cross_entropy)
            _, gradients = steps(part)
            counts.append(sum(g is None for g in gradients.values()))
            for name, parameter in habit.model.named_parameters():
                parameter.grad = gradients[name]
            optimizer.step()
            optimizer.zero_grad()
        ends.append({name: value.clone() for name, value in habit.model.state_dict().items()})
    assert counts[:4] == counts[4:] and max(counts) > min(counts) >= 4
    for name, value in ends[0].items():
        torch.testing.assert_close(ends[1][name], value, rtol=1e-9, atol=1e-12, msg=name)


class Coin(nn.Module):
    """Turns all rows round or none, by chance."""

    def forward(self, x: Tensor) -> Tensor:
        return x if torch.rand(()) < 0.5 else -x


def test_a_coin_for_the_whole_batch_is_thrown_once() -> None:
    habit = with_inner(Coin)
    program = compiled(habit, 3, stages=1, replicas=(3,), micro_batches=2)
    coin: Any = habit.model[2]  # type: ignore[index]
    sides = []
    for sign in (1.0, -1.0):
        coin.forward = lambda x, sign=sign: sign * x
        sides.append(one_device(habit)[0])
    del coin.forward
    found = []
    for seed in range(8):
        torch.manual_seed(seed)
        loss, _ = step(program, habit)
        found.append([bool(torch.isclose(loss, side, rtol=1e-12)) for side in sides])
    assert all(sum(one) == 1 for one in found) and [True, False] in found and [False, True] in found


class Select(nn.Module):
    """The rows that have a positive sum, and which they are: its results' sizes depend on values."""

    def __init__(self, listed: bool) -> None:
        super().__init__()
        self.layer, self.listed = nn.Linear(WIDTH, WIDTH), listed

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | list[int]]:
        rows = (x.sum(1) > 0).nonzero()[:, 0]
        return self.layer(x[rows]), rows.tolist() if self.listed else rows


class Around(nn.Module):
    """What uses a selection, with results as large as its arguments."""

    def __init__(self, listed: bool) -> None:
        super().__init__()
        self.select = Select(listed)

    def forward(self, x: Tensor) -> Tensor:
        found, rows = self.select(x)
        return torch.zeros_like(x).index_copy(0, torch.as_tensor(rows, dtype=torch.long), found)


@pytest.mark.parametrize("listed", [False, True])
def test_the_module_around_a_selection_runs_as_it_is(listed: bool, capsys: pytest.CaptureFixture[str]) -> None:
    habit = with_inner(lambda: Around(listed))
    with torch.no_grad():  # the whole and all but one row select as many: a pair of sizes does not show the selection
        habit.model[0].bias.zero_()  # type: ignore[index]
        habit.args[0][-1] = -habit.args[0][:-1].mean(0) * 0
    program = assert_matches(habit, (((2, 1), 3), ((1, 1), 2)))
    assert "module '2' runs as it is, in one piece: " in capsys.readouterr().err
    front = program.built.front
    assert sum(is_opaque(n.target) for n in front.captured.gm.graph.nodes) == 1 and front.tail.linear
    for parameter in habit.model.parameters():
        parameter.data.neg_()
    assert_same(step(program, habit), one_device(habit), 1e-9)


class Warm(nn.Module):
    """Another way through the first steps, and a mean of all that was seen; each row by itself, in Python."""

    seen: Tensor
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        h: Tensor = self.layer(x * 2 if self.seen < 3 else x)
        self.mean.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
        return torch.stack([row * (1 + self.seen) for row in h]) - self.mean


@pytest.mark.parametrize(("replicas", "micro_batches"), [((1,), 1), ((1,), 3), ((3,), 1), ((2,), 2)])
def test_a_branch_on_a_buffer_that_the_step_counts_up_is_taken_as_on_one_device(
    replicas: tuple[int, ...], micro_batches: int, capsys: pytest.CaptureFixture[str]
) -> None:
    habit = with_inner(Warm)
    twin, x, y = copy.deepcopy(habit.model), habit.args[0], habit.target
    program = compiled(habit, 3, stages=1, replicas=replicas, micro_batches=micro_batches)
    assert "are written by each part" not in (said := capsys.readouterr().err)
    assert "module '2' runs as it is" in said
    for rows in (7, 3, 5, 6):
        loss = program.step(x[:rows], target=y[:rows])
        assert float(loss) == pytest.approx(float(cross_entropy(twin(x[:rows]), y[:rows])), rel=1e-12)
        state = program.state_dict()
        for name, buffer in twin.named_buffers():
            torch.testing.assert_close(state[name], buffer, rtol=1e-12, atol=1e-15)


TYPED = """
class Typed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def forward(self, x):
        self.seen = self.seen + 1
        h = self.layer(x)
        if (h > 0).any():
            h = torch.where(h > 0, h, 0.1 * h)
        return h
"""


@pytest.mark.parametrize("file", ["<stdin>", "<string>", "<ipython-input-3-abc>", "/tmp/ipykernel_1/2.py"])
def test_modules_that_were_typed_in_are_found_like_those_in_files(
    file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {"nn": nn, "torch": torch, "WIDTH": WIDTH, "__name__": "typed"}
    exec(builtins.compile(TYPED, file, "exec"), names)
    habit = with_inner(names["Typed"])  # type: ignore[arg-type]
    program = assert_matches(habit, (((2, 1), 3),))
    assert f"module '2' runs as it is, in one piece: it asks for values at {file}:11" in capsys.readouterr().err
    assert program.plan.blocks > 1
