"""What forward keeps in Python is refused where it counts, said where it does not, and otherwise left alone."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch
from against_eager import assert_matches, compiled
from habits import Habit, Net, classes, cross_entropy, features
from torch import Tensor, nn

from efftra_fx import Cluster, compile
from efftra_fx.errors import CaptureError
from efftra_fx.python_reads import variables_of
from efftra_fx.python_state import PythonState, reads_noted

SETTINGS = {"weight": 1.0}
SHARE = 0.1


def made(between: Callable[..., Tensor], **attributes: Any) -> Habit:
    """Return a classifier with something between its layers, and attributes."""
    torch.manual_seed(3)
    model = Net(between)
    for name, value in attributes.items():
        setattr(model, name, value)
    return Habit(model.double(), (features(),), classes(), cross_entropy)


def _counted(m: Any, h: Tensor) -> Tensor:
    m.calls += 1
    return h


def _warmed_up(m: Any, h: Tensor) -> Tensor:
    m.calls += 1
    return h.mul(min(1.0, m.calls / 10))


def _listed(m: Any, h: Tensor) -> Tensor:
    m.calls.append(1)
    return h * len(m.calls)


def _drawn(m: Any, h: Tensor) -> Tensor:
    return h if random.random() < m.share else -h


REFUSED: dict[str, tuple[Habit, str]] = {
    "a warm-up": (
        made(_warmed_up, calls=0),
        "forward writes 'calls' of the model and computes another loss .* in a buffer",
    ),
    "a list": (made(_listed, calls=[]), "forward writes 'calls' of the model and computes another loss"),
    "a factor by chance": (
        replace(made(lambda m, h: h), loss_fn=lambda o, t: cross_entropy(o, t) * numpy.random.uniform(1.0, 2.0)),
        "draws from Python's numpy.random decides the loss",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_decides_the_loss_is_refused_by_name(what: str) -> None:
    habit, words = REFUSED[what]
    states = random.getstate(), numpy.random.get_state()[1].tolist()  # type: ignore[index]
    with pytest.raises(CaptureError, match=words):
        compiled(habit)
    assert states == (random.getstate(), numpy.random.get_state()[1].tolist())  # type: ignore[index]
    assert what != "a warm-up" or habit.model.calls == 0


def test_what_does_not_is_said_and_left_as_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    habit = made(_counted, calls=0)
    assert_matches(habit, plans=(((2, 1), 3),))
    assert habit.model.calls == 1  # that of the eager step that it was held against
    assert "forward writes 'calls' of the model in Python, which happens while the model is captured" in (
        capsys.readouterr().err
    )


def test_a_draw_that_decides_nothing_is_let_pass() -> None:
    assert_matches(made(_drawn, share=-1.0), plans=(((1, 2), 2),))


def test_what_is_set_between_steps_holds_from_the_next_on() -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.0), nn.Linear(6, 3)).double()
    x, target = features(), classes()
    program = compiled(Habit(model, (x,), target, cross_entropy))
    dropout: Any = model[1]
    plain = program.step(x, target=target)
    torch.testing.assert_close(plain, cross_entropy(model(x), target).detach(), rtol=1e-12, atol=0)
    dropout.p = 1.0
    torch.testing.assert_close(
        program.step(x, target=target), cross_entropy(model(x), target).detach(), rtol=1e-12, atol=0
    )
    dropout.p = 0.0
    assert torch.equal(program.step(x, target=target), plain)
    assert len(program._compiled.more) == 1


def test_a_weight_in_the_loss_that_is_changed_between_steps_counts() -> None:
    weight = 1.0

    def weighted(output: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(output, target) * weight + output.square().mean() * SHARE

    torch.manual_seed(3)
    model, x, target = Net().double(), features(), classes()
    program = compiled(Habit(model, (x,), target, weighted), stages=2, micro_batches=2)
    for number in (1.0, 0.5, 1.0):
        weight = number
        expected = weighted(model(x), target).detach()
        torch.testing.assert_close(program.step(x, target=target), expected, rtol=1e-12, atol=0)
    assert len(program._compiled.more) == 1
    assert {str(read) for read in variables_of(weighted)} == {
        "variable 'weight' of the loss",
        "variable 'SHARE' of the loss",
    }


class Weighted:
    """A loss that is an object, with a share of its own, and one in its settings."""

    def __init__(self) -> None:
        self.share, self.calls = 0.5, 0

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        small: Tensor = self.share * output.square().mean() + SETTINGS["weight"] * output.abs().mean()
        return cross_entropy(output, target) + small


def test_weights_in_a_dictionary_or_an_object_count_too() -> None:
    torch.manual_seed(3)
    model, x, target, loss_fn = Net().double(), features(), classes(), Weighted()
    program = compiled(Habit(model, (x,), target, loss_fn), stages=2, micro_batches=2)
    for share, weight in ((0.5, 1.0), (0.25, 1.0), (0.25, 2.0), (0.5, 1.0)):
        loss_fn.share, SETTINGS["weight"] = share, weight
        expected = loss_fn(model(x), target).detach()
        torch.testing.assert_close(program.step(x, target=target), expected, rtol=1e-12, atol=0)
    assert len(program._compiled.more) == 2
    SETTINGS["other"] = 3.0
    names = {str(read) for read in variables_of(loss_fn)}
    assert names == {"'self.share' of the loss", "'SETTINGS['weight']' of the loss"}


def test_reads_and_writes_are_told_apart() -> None:
    model: Any = made(_counted, calls=0, share=0.5).model
    state = PythonState(model)
    with reads_noted(state) as noted:
        _counted(model, torch.zeros(1))
        assert model.share == 0.5
    use = state.use(noted)
    assert [str(read) for read in use.reads] == ["'share' of the model"]
    assert use.writes == ("'calls' of the model",)
    assert use.moved() is None
    state.restore()
    assert model.calls == 0
    model.share = 0.25
    assert use.moved() == "'share' of the model was 0.5 when it was captured and is 0.25 now"
    assert "__getattribute__" not in vars(nn.Module)


class _Collecting(nn.Module):
    """Collects hidden states by hooks that forward sets up at its first call and marks as set up."""

    def __init__(self, marked: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.out = nn.Linear(4, 3)
        self.marked = marked
        self.into: list[Tensor] = []

    def forward(self, x: Tensor) -> dict[str, Any]:
        held: list[Tensor] = []
        if not hasattr(self, "set_up"):
            for layer in self.layers:
                layer.register_forward_hook(lambda _, __, out: self.into.append(out))
            if self.marked:
                self.set_up = True
        before, self.into = self.into, held
        h = x
        for layer in self.layers:
            h = layer(h).tanh()
        self.into = before
        return {"logits": self.out(h), "states": tuple(held), "reach": sum(s.square().mean() for s in held)}


def _with_reach(output: dict[str, Any], target: Tensor) -> Tensor:
    reach: Tensor = output["reach"]
    return nn.functional.cross_entropy(output["logits"], target) + reach


def test_hooks_that_forward_sets_up_once_are_set_up_once() -> None:
    torch.manual_seed(0)
    model = _Collecting().double()
    habit = Habit(model, (features(),), classes(), _with_reach)
    program = compiled(habit)
    assert program.check(*habit.args, target=habit.target).matches
    assert len(program.evaluate(*habit.args)["states"]) == 3
    assert not any(layer._forward_hooks for layer in model.layers) and not hasattr(model, "set_up")
    assert_matches(habit)
    assert len(model(*habit.args)["states"]) == 3, "the user's own call has set them up"
    program.step(*habit.args, target=habit.target)
    assert len(program.evaluate(*habit.args)["states"]) == 3
    assert len(model(*habit.args)["states"]) == 3


def test_hooks_that_each_forward_adds_to_are_refused() -> None:
    habit = Habit(_Collecting(marked=False).double(), (features(),), classes(), _with_reach)
    with pytest.raises(CaptureError, match="forward writes hooks of 'layers.0', .* computes another loss"):
        compiled(habit)


class _Longest(nn.Module):
    """Divides by the longest length so far; may keep a table up to it, and a table for the last length."""

    def __init__(self, tables: bool) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(9, 6), nn.Linear(6, 9)
        self.longest, self.last, self.tables = 4, 0, tables

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        self.length = length
        h: Tensor = self.words(ids)
        if self.tables:
            if length > self.longest or self.last == 0:
                self.longest = max(length, self.longest)
                self.table = torch.arange(self.longest, dtype=h.dtype).sin()[:, None].expand(-1, 6)
            if length != self.last:
                self.last, self.ramp = length, torch.linspace(0, 1, length, dtype=h.dtype)[:, None]
            h = h + self.table[: self.length] + self.ramp
        elif length > self.longest:
            self.longest = length
        h = self.out(h)
        return h if self.tables else h / self.longest


def _token_loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


@pytest.mark.parametrize("tables", [False, True])
def test_what_forward_leaves_for_later_batches_is_there(tables: bool, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    model = _Longest(tables).double()
    plain = copy.deepcopy(model)
    ids = torch.randint(0, 9, (6, 5))
    program = compile(
        model,
        Cluster.local(2),
        example_inputs=(ids,),
        example_target=ids,
        loss_fn=_token_loss,
        stages=2,
        micro_batches=2,
        costs="estimated",
    )
    for length in (5, 4, 8, 5, 3, 11, 8, 4, 5, 8):
        ids = torch.randint(0, 9, (6, length))
        expected = _token_loss(plain.train()(ids), ids)
        found = program.step(ids, target=ids)
        assert float((found - expected.detach()).abs()) <= 1e-12
        assert {n: v for n, v in vars(model).items() if isinstance(v, int)} == {
            n: v for n, v in vars(plain).items() if isinstance(v, int)
        }
        assert torch.allclose(program.evaluate(ids), plain.eval()(ids), rtol=1e-12, atol=1e-12)
    assert program.check(ids, target=ids).matches
    said = capsys.readouterr().err
    assert "forward writes" not in said
    assert not tables or "is captured" not in said.replace("captured anew for another size", "")


class _FollowsRows(nn.Module):
    """Leaves what follows its batch, which no later call may find as if it were that of all."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 3)
        self.count, self.top, self.calls = 0, -1.0, 0
        self.seen: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.count, self.calls = len(x), self.calls + 1
        self.seen = x.detach().amax(0)
        h: Tensor = self.out(x)
        return h


def test_what_follows_the_batch_is_not_left_and_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    model = _FollowsRows().double()
    habit = Habit(model, (features(),), classes(), cross_entropy)
    compiled(habit).step(*habit.args, target=habit.target)
    assert (model.count, model.calls) == (0, 0) and model.seen is None
    assert "forward writes 'count' of the model, 'calls' of the model, 'seen' of the model in Python" in " ".join(
        capsys.readouterr().err.split()
    )
