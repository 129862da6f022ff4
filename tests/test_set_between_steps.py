"""What a user sets between steps, wherever forward or the loss takes it from, holds from the next step on."""

from __future__ import annotations

import copy
import os
import types
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from efftra_fx import Cluster, CompiledModel, compile

Loss = Callable[[Tensor, Tensor], Tensor]
SCALE = 1.0
TABLE = torch.ones(8, dtype=torch.float64)
WEIGHT = torch.ones(3, dtype=torch.float64)
WEIGHTS = [1.0, 0.5]
ELSEWHERE: Any = types.ModuleType("elsewhere")
ELSEWHERE.__file__ = "elsewhere.py"
ELSEWHERE.scale = 1.0


class Net(nn.Module):
    """A classifier with something between its layers, and attributes."""

    def __init__(self, between: Callable[[Any, Tensor], Tensor], **attributes: Any) -> None:
        super().__init__()
        self.first, self.between, self.last = nn.Linear(4, 8), between, nn.Linear(8, 3)
        vars(self).update(attributes)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.between(self, self.first(x).tanh()))
        return out


class Global(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * SCALE


class ByTable(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x * TABLE, self.weight, self.bias)


class FromElsewhere(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x) * ELSEWHERE.scale
        return out


def _scaled(x: Tensor) -> Tensor:
    return x * SCALE


class ByHelper(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return _scaled(super().forward(x))


class Settings:
    """Holds a scale beside what nobody reads, and what forward counts."""

    def __init__(self) -> None:
        self.scale, self.step, self.calls = 1.0, 0, 0
        self.inner = types.SimpleNamespace(scale=1.0)


class Answering:
    """Gives settings from a dictionary of its own, as objects for configurations do."""

    def __init__(self) -> None:
        self.__dict__["held"] = {"scale": 1.0}

    def __getattr__(self, name: str) -> float:
        if name.startswith("__") or name not in self.__dict__["held"]:
            raise AttributeError(name)
        found: float = self.__dict__["held"][name]
        return found

    def __setattr__(self, name: str, value: float) -> None:
        self.__dict__["held"][name] = value


@dataclass(slots=True)
class Slotted:
    scale: float = 1.0

    def doubled(self) -> float:
        return 2.0 * self.scale


HELD = Slotted()


class OfClass(nn.Linear):
    scale = 1.0

    def factor(self) -> float:
        return 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale * self.factor()


class ByMethodAround(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * HELD.doubled()


def _head(kind: type[nn.Linear]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), kind(8, 3))


def _hooked() -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    net[1].register_forward_hook(lambda _, __, out: out * SCALE)
    return net


def _set_global(name: str, value: Callable[[float], Any]) -> Callable[[Any, float], None]:
    def change(_: Any, number: float) -> None:
        globals()[name] = value(number)

    return change


def _set(path: str, value: Callable[[float], Any] = float) -> Callable[[Any, float], None]:
    def change(model: Any, number: float) -> None:
        *owners, name = path.split(".")
        for owner in owners:
            model = getattr(model, owner)
        setattr(model, name, value(number))

    return change


def _set_item(path: str, key: Any, value: Callable[[float], Any] = float) -> Callable[[Any, float], None]:
    return lambda model, number: getattr(model, path).__setitem__(key, value(number))


def _set_environment(_: Any, number: float) -> None:
    os.environ["OWN_SCALE"] = str(number)


def _set_unless_one(_: Any, number: float) -> None:
    if number == 1.0:
        os.environ.pop("OWN_SCALE", None)
    else:
        _set_environment(_, number)


def _full(number: float) -> Tensor:
    return torch.full((8,), number, dtype=torch.float64)


FACTORS = {number: partial(float, number) for number in (0.5, 1.0, 2.0)}
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, float], None]]] = {
    "a tensor": (lambda: Net(lambda m, h: h * m.t, t=_full(1.0)), _set("t", _full)),
    "a tensor, written": (lambda: Net(lambda m, h: h * m.t, t=_full(1.0)), lambda m, number: m.t.fill_(number)),
    "another list": (lambda: Net(lambda m, h: h * m.t[0], t=[_full(1.0)]), _set("t", lambda n: [_full(n)])),
    "a tensor in a list": (lambda: Net(lambda m, h: h * m.t[0], t=[_full(1.0)]), _set_item("t", 0, _full)),
    "a number in a list": (lambda: Net(lambda m, h: h * m.t[0], t=[1.0]), _set_item("t", 0)),
    "a number in a dictionary": (lambda: Net(lambda m, h: h * m.t["a"], t={"a": 1.0}), _set_item("t", "a")),
    "a setting": (lambda: Net(lambda m, h: h * m.s.scale, s=Settings()), _set("s.scale")),
    "a setting of a setting": (lambda: Net(lambda m, h: h * m.s.inner.scale, s=Settings()), _set("s.inner.scale")),
    "a setting in a slot": (lambda: Net(lambda m, h: h * m.s.scale, s=Slotted()), _set("s.scale")),
    "a setting that is looked up": (lambda: Net(lambda m, h: h * m.s.scale, s=Answering()), _set("s.scale")),
    "a setting in a list": (
        lambda: Net(lambda m, h: h * m.s[0].scale, s=[Settings()]),
        lambda m, number: setattr(m.s[0], "scale", number),
    ),
    "an array": (lambda: Net(lambda m, h: h * float(m.t[0]), t=numpy.ones(2)), _set_item("t", 0)),
    "an attribute that comes": (lambda: Net(lambda m, h: h * getattr(m, "more", 3.0)), _set("more")),
    "a number of a class": (_head(OfClass), lambda _, number: setattr(OfClass, "scale", number)),
    "a method": (_head(OfClass), lambda m, number: setattr(m[2], "factor", FACTORS[number])),
    "a number in a method's object around a module": (_head(ByMethodAround), lambda _, n: setattr(HELD, "scale", n)),
    "a function": (
        lambda: Net(lambda m, h: m.f(h), f=torch.sigmoid),
        _set("f", {0.5: torch.tanh, 1.0: torch.sigmoid, 2.0: torch.relu}.__getitem__),
    ),
    "a number around a module": (_head(Global), _set_global("SCALE", float)),
    "a tensor around a module": (_head(ByTable), _set_global("TABLE", _full)),
    "a number of another module of code": (_head(FromElsewhere), lambda _, n: setattr(ELSEWHERE, "scale", n)),
    "a number around a function that is called": (_head(ByHelper), _set_global("SCALE", float)),
    "a number around a hook": (_hooked, _set_global("SCALE", float)),
    "the environment": (lambda: Net(lambda m, h: h * float(os.environ["OWN_SCALE"])), _set_environment),
    "the environment, asked for": (lambda: Net(lambda m, h: h * float(os.getenv("OWN_SCALE", "3"))), _set_environment),
    "the environment, where it may lack": (
        lambda: Net(lambda m, h: h * 2.0 if "OWN_SCALE" in os.environ else h),
        _set_unless_one,
    ),
}


CANNOT_BE_GIVEN = (
    "an array", "a number of a class", "a method", "a function", "the environment", "the environment, asked for",
    "the environment, where it may lack",
)  # fmt: skip


class Criterion:
    """A loss that is an object with a tensor and a list of weights."""

    def __init__(self) -> None:
        self.weight, self.shares = torch.ones(3, dtype=torch.float64), [1.0, 0.5]

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        return self.shares[0] * F.cross_entropy(output, target, weight=self.weight)


def _by_class(number: float) -> Tensor:
    return torch.tensor([number, 1.0, 2.0], dtype=torch.float64)


def _around(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, weight=WEIGHT)


def _listed(output: Tensor, target: Tensor) -> Tensor:
    return WEIGHTS[0] * F.cross_entropy(output, target)


def _calling(output: Tensor, target: Tensor) -> Tensor:
    return _around(output, target) + 0.0


def _by_environment(output: Tensor, target: Tensor) -> Tensor:
    return float(os.environ.get("OWN_SCALE", 1.0)) * F.cross_entropy(output, target)


LOSSES: dict[str, tuple[Callable[[], Loss], Callable[[Any, float], None]]] = {
    "a tensor around it": (lambda: _around, _set_global("WEIGHT", _by_class)),
    "a list around it": (lambda: _listed, lambda _, number: WEIGHTS.__setitem__(0, number)),
    "a tensor around what it calls": (lambda: _calling, _set_global("WEIGHT", _by_class)),
    "a tensor of its own": (Criterion, _set("weight", _by_class)),
    "a list of its own": (Criterion, _set_item("shares", 0)),
    "the environment": (lambda: _by_environment, _set_environment),
}


def _compiled(model: nn.Module, loss: Loss) -> CompiledModel:
    x, y = _batch()
    return compile(
        model,
        Cluster.local(2),
        example_inputs=(x,),
        example_target=y,
        loss_fn=loss,
        stages=2,
        micro_batches=2,
        costs="estimated",
    )


def _batch() -> tuple[Tensor, Tensor]:
    return torch.randn(6, 4, dtype=torch.float64), torch.randint(0, 3, (6,))


def _holds(model: nn.Module, plain: nn.Module, program: CompiledModel, loss: Loss) -> None:
    x, y = _batch()
    for one in (model, plain):
        one.zero_grad()
    expected = loss(plain(x), y)
    expected.backward()
    assert torch.allclose(program.step(x, target=y), expected.detach(), rtol=1e-12, atol=0)
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None
        assert torch.allclose(a.grad, b.grad, rtol=1e-10, atol=1e-13)
    assert torch.allclose(program.evaluate(x), plain(x), rtol=1e-12, atol=1e-13)


@pytest.fixture(autouse=True)
def _environment_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OWN_SCALE", "1.0")


@pytest.mark.parametrize("what", MODELS)
def test_what_forward_takes_from_anywhere_is_what_it_is_now(what: str) -> None:
    make, change = MODELS[what]
    model = make().double()
    plain = copy.deepcopy(model)
    change(model, 1.0), change(plain, 1.0)
    program = _compiled(model, F.cross_entropy)
    for number in (1.0, 0.5, 2.0, 0.5):
        change(model, number), change(plain, number)
        _holds(model, plain, program, F.cross_entropy)
    forms = 1 if "written" in what else 3 if what in CANNOT_BE_GIVEN else 2  # a value that comes back has its form
    assert len(program._forms) == forms


@pytest.mark.parametrize("what", LOSSES)
def test_what_the_loss_takes_from_anywhere_is_what_it_is_now(what: str) -> None:
    make, change = LOSSES[what]
    loss, model = make(), _head(nn.Linear)().double()
    plain = copy.deepcopy(model)
    program = _compiled(model, loss)
    for number in (1.0, 0.5, 2.0):
        change(loss, number)
        _holds(model, plain, program, loss)


class Counting(nn.Linear):
    """Counts its calls where nothing is put back, and in a dictionary, which is."""

    def __init__(self) -> None:
        super().__init__(8, 3)
        self.settings, self.seen = Settings(), {"calls": 0}

    def forward(self, x: Tensor) -> Tensor:
        self.settings.calls += 1
        self.seen["calls"] = self.settings.calls
        return super().forward(x) * self.settings.scale


def test_what_nobody_reads_and_what_forward_counts_takes_no_capture() -> None:
    head = Counting()
    program = _compiled(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), head).double(), F.cross_entropy)
    for number in range(4):
        head.settings.step = number
        x, y = _batch()
        program.step(x, target=y)
        program.evaluate(x)
    assert len(program._forms) == 1 and program._evaluations.count == 1
    assert head.seen == {"calls": 0}
    assert "__getattribute__" not in vars(Settings)
