"""Numbers and tensors that follow a schedule are given to one captured step, which computes with them as eager does."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy
import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F

from efftra_fx import Cluster, CompiledModel, compile
from efftra_fx.errors import InputError
from efftra_fx.python_reads import Read, as_it_is
from efftra_fx.settings import Setting, may_be_set, stood_in

Loss = Callable[[Tensor, Tensor], Tensor]
BETA = 0.25


class Net(nn.Module):
    """A classifier with something between its layers that reads `t`."""

    def __init__(self, between: Callable[[Any, Tensor], Tensor], t: Any = 0.25) -> None:
        super().__init__()
        self.first, self.between, self.last, self.t = nn.Linear(4, 8), between, nn.Linear(8, 3), t

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.between(self, self.first(x).tanh()))
        return out


@dataclass(frozen=True)
class Frozen:
    scale: float = 0.25


def _branch(m: Any, h: Tensor) -> Tensor:
    return h * 2 if m.t > 0.6 else h * m.t


def _by_numpy(m: Any, h: Tensor) -> Tensor:
    return h * 2 if numpy.exp(m.t) > 1.8 else h * numpy.exp(m.t)


def _full(number: float) -> Tensor:
    return torch.full((8,), number, dtype=torch.float64)


def _pair(number: float) -> tuple[float, list[float]]:
    return number, [1 - number, 2.0]


def _named(number: float) -> dict[str, Any]:
    return {"kl": number, "name": "a", "mask": _full(number)}


GIVEN: dict[str, tuple[Callable[[Any, Tensor], Tensor], Callable[[float], Any]]] = {
    "a factor": (lambda m, h: h * m.t, float),
    "a divisor": (lambda m, h: (h / m.t).softmax(1), float),
    "its opposite": (lambda m, h: h * m.t + h.sin() * (1.0 - m.t) ** 2, float),
    "an exponent": (lambda m, h: h.abs() ** m.t, float),
    "a bound": (lambda m, h: h.clamp(-1.0, 1.0) + m.t, float),
    "a number of NumPy": (lambda m, h: h * m.t, numpy.float64),
    "a tensor": (lambda m, h: h * m.t, _full),
    "the larger of two": (lambda m, h: h * max(m.t, 0.5), float),
    "a factor of integers": (lambda m, h: h * (torch.ones(8, dtype=torch.int64) * m.t).double(), float),
    "a choice of two": (lambda m, h: h * torch.where(h > 0, m.t, 1.0), float),
    "a pair": (lambda m, h: h * m.t[0] + m.t[1][0] * m.t[1][1], _pair),
    "a dictionary": (lambda m, h: h * m.t["kl"] + m.t["mask"], _named),
}
WHOLE: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "a share": lambda m, h: h * (m.t / (m.t + 1)) + h.sin() * 0.9**m.t,
    "the smaller of two": lambda m, h: h * min(1.0, m.t / 10),
    "a remainder": lambda m, h: h * (1 + m.t % 3 + m.t // 2),
    "a power": lambda m, h: h**m.t,
}
ASKED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "by a branch": _branch,
    "by a dictionary": lambda m, h: h * m.t * {0.9: 2.0}.get(m.t, 1.0),
    "by a set": lambda m, h: h * m.t if m.t not in {0.75, 1.0} else h,
    "by NumPy": _by_numpy,
    "by a rounded number": lambda m, h: h * int(8 * m.t),
    "by a function of numbers": lambda m, h: h * math.exp(m.t),
    "by the larger of several": lambda m, h: h * sorted([m.t, 0.5, 0.6])[-1],
    "by a slice": lambda m, h: torch.cat([h[:, : int(8 * m.t)], h[:, int(8 * m.t) :].sin()], 1),
    "by an argument that is a number": lambda m, h: torch.add(h, h.sin(), alpha=m.t),
    "by a filled tensor": lambda m, h: h * torch.full((8,), m.t, dtype=torch.float64),
    "by its kind": lambda m, h: h * m.t if isinstance(m.t, float) else h,
    "by a tensor of it": lambda m, h: h * torch.tensor(m.t),
    "by a bound that is not met": lambda m, h: h * m.t + F.threshold(h, 50 * m.t, 0.0),
    "by an interpolation": lambda m, h: h * m.t + numpy.interp(m.t, [0.0, 1.0], [0.5, 2.0]),
}
SCHEDULE = (0.25, 0.5, 0.75, 0.9, 0.3, 1.0)


def _compiled(model: nn.Module, loss: Loss = F.cross_entropy, **plan: Any) -> CompiledModel:
    x, y = _batch()
    usual = {"example_inputs": (x,), "example_target": y, "stages": 2, "replicas": (2, 1), "micro_batches": 2}
    return compile(model, Cluster.local(3), loss_fn=loss, costs="estimated", **{**usual, **plan})


def _batch() -> tuple[Tensor, Tensor]:
    return torch.randn(6, 4, dtype=torch.float64), torch.randint(0, 3, (6,))


def _holds(
    model: nn.Module, plain: nn.Module, program: CompiledModel, loss: Loss = F.cross_entropy, evaluates: bool = True
) -> None:
    x, y = _batch()
    for one in (model, plain):
        one.zero_grad()
    expected = loss(plain(x), y)
    expected.backward()
    assert torch.allclose(program.step(x, target=y), expected.detach(), rtol=1e-12, atol=0)
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None
        assert torch.allclose(a.grad, b.grad, rtol=1e-10, atol=1e-13)
    assert not evaluates or torch.allclose(program.evaluate(x), plain(x), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("what", GIVEN)
def test_a_schedule_takes_one_more_capture_for_all_its_values(what: str) -> None:
    between, value = GIVEN[what]
    torch.manual_seed(0)
    model = Net(between, value(SCHEDULE[0])).double()
    plain = copy.deepcopy(model)
    program = _compiled(model)
    for number in SCHEDULE:
        own = model.t = value(number)
        plain.t = value(number)
        _holds(model, plain, program)
        assert model.t is own and repr(own) == repr(value(number))  # and what is in it
    assert len(program._forms) == 2 and program._evaluations.count == 2


@pytest.mark.parametrize("what", WHOLE)
def test_whole_numbers_that_count_up_take_one_more_capture(what: str) -> None:
    torch.manual_seed(0)
    model = Net(WHOLE[what], 1).double()
    plain = copy.deepcopy(model)
    program = _compiled(model)
    for number in (1, 2, 3, 4, 9, 20):
        model.t = plain.t = number
        _holds(model, plain, program)
    assert len(program._forms) == 2


@cache
def _kept(number: int) -> float:
    return 2.0 if number == 4 else 1.0


LOOKED_UP: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "by an index": lambda m, h: h * [1.0, 2.0, 3.0, 4.0, 5.0][m.t],
    "by a range": lambda m, h: h * sum(range(m.t)),
    "by a slice": lambda m, h: h[:, : m.t].sum(1, keepdim=True) * h * m.t,
    "by a remainder": lambda m, h: h * m.t if m.t % 3 else h,
    "by a dictionary": lambda m, h: h * m.t * {4: 2.0}.get(m.t, 1.0),
    "by a name": lambda m, h: h * m.t * {"t4": 2.0}.get(f"t{m.t}", 1.0),
    "by its text": lambda m, h: h * m.t * {"4": 2.0}.get(str(m.t), 1.0),
    "by a format": lambda m, h: h * m.t * {"04": 2.0}.get(f"{m.t:02d}", 1.0),
    "by a copy": lambda m, h: h * copy.deepcopy(m.t),
    "by a kept function": lambda m, h: h * m.t * _kept(m.t),
    "by repetition": lambda m, h: torch.cat([h] * m.t, 1)[:, -8:] * m.t,
    "by a shift": lambda m, h: h * (m.t << 1),
    "by a shape": lambda m, h: h.repeat(1, m.t)[:, -8:] * m.t,
    "by whole numbers": lambda m, h: h * (torch.arange(8) * m.t // 3),
}


@pytest.mark.parametrize("what", LOOKED_UP)
def test_a_whole_number_that_python_or_whole_numbers_meet_is_captured_for_each_value(what: str) -> None:
    torch.manual_seed(0)
    model = Net(LOOKED_UP[what], 1).double()
    plain = copy.deepcopy(model)
    program = _compiled(model)
    for number in (1, 2, 3, 4):
        model.t = plain.t = number
        _holds(model, plain, program, evaluates=False)
    assert len(program._forms) == 4


@pytest.mark.parametrize("what", ASKED)
def test_a_number_that_python_asks_for_is_captured_for_each_value(what: str) -> None:
    torch.manual_seed(0)
    model = Net(ASKED[what]).double()
    plain = copy.deepcopy(model)
    program = _compiled(model)
    for number in SCHEDULE[:4]:
        model.t = plain.t = number
        _holds(model, plain, program, evaluates=False)
    assert len(program._forms) == 4


def test_a_number_of_a_frozen_object_is_captured_for_each_value() -> None:
    torch.manual_seed(0)
    model = Net(lambda m, h: h * m.t.scale, Frozen()).double()
    plain = copy.deepcopy(model)
    program = _compiled(model)
    for number in SCHEDULE[:3]:
        model.t = plain.t = Frozen(number)
        _holds(model, plain, program)


def _annealed(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target) + BETA * output.square().sum(1).mean()


def test_a_weight_of_the_loss_that_rises_from_zero_takes_one_more_capture() -> None:
    torch.manual_seed(0)
    model = Net(lambda m, h: h).double()
    plain = copy.deepcopy(model)
    globals()["BETA"] = 0.0
    program = _compiled(model, _annealed)
    for number in (0.0, 0.1, 0.2, 0.3):
        globals()["BETA"] = number
        _holds(model, plain, program, _annealed)
    assert len(program._forms) == 2


@pytest.mark.parametrize("what", ["a factor", "its opposite", "a choice of two"])
def test_single_precision_stays_single(what: str) -> None:
    torch.manual_seed(0)
    model = Net(GIVEN[what][0])
    plain = copy.deepcopy(model)
    x, y = _batch()
    globals()["BETA"] = SCHEDULE[0]
    program = _compiled(model, _annealed, example_inputs=(x.float(),), example_target=y)
    for number in SCHEDULE:
        globals()["BETA"] = model.t = plain.t = number
        for one in (model, plain):
            one.zero_grad()
        expected = _annealed(plain(x.float()), y)
        expected.backward()
        found = program.step(x.float(), target=y)
        assert found.dtype == expected.dtype == torch.float32
        assert torch.allclose(found, expected.detach(), rtol=1e-6)  # single precision, sums in parts
        for a, b in zip(model.parameters(), plain.parameters(), strict=True):
            assert a.grad is not None and b.grad is not None
            assert torch.allclose(a.grad, b.grad, rtol=1e-4, atol=1e-6)  # single precision, sums in parts
    assert len(program._forms) == 2


def test_two_schedules_take_two_more_captures_and_other_batches_their_own() -> None:
    torch.manual_seed(0)
    globals()["BETA"] = 0.2
    model = Net(lambda m, h: h * m.t).double()
    plain = copy.deepcopy(model)
    program = _compiled(model, _annealed)
    for step in range(5):
        globals()["BETA"] = 0.2 + step / 10 * (step > 1)
        model.t = plain.t = 0.5 + step / 10
        _holds(model, plain, program, _annealed)
    assert len(program._forms) == 3


def test_a_dictionary_in_another_order_is_captured_again() -> None:
    torch.manual_seed(0)
    model = Net(lambda m, h: h * m.t["a"] + h.sin() * list(m.t.values())[0] * m.t["b"], {"a": 1.0, "b": 2.0}).double()
    plain = copy.deepcopy(model)
    program = _compiled(model)
    for value in ({"a": 0.5, "b": 3.0}, {"a": 0.25, "b": 4.0}, {"b": 4.0, "a": 0.25}, {"b": 5.0, "a": 0.75}):
        model.t = plain.t = value
        _holds(model, plain, program)
    assert len(program._forms) == 4


def test_a_value_of_another_kind_is_captured_again() -> None:
    torch.manual_seed(0)
    model = Net(lambda m, h: h * m.t).double()
    plain = copy.deepcopy(model)
    program = _compiled(model)
    values: tuple[Any, ...] = (0.25, 0.5, 2, _full(0.5), _full(0.25), _full(0.5)[:1], 0.75, True)
    for value in values:
        model.t = plain.t = value
        _holds(model, plain, program)


def _on_ranks(same: bool) -> str:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Net(lambda m, h: h * m.t).double()
    x, y = _batch()
    program = compile(
        model,
        Cluster.from_env(),
        example_inputs=(x,),
        example_target=y,
        loss_fn=F.cross_entropy,
        costs="estimated",
        stages=2,
        replicas=(1, 1),
        micro_batches=2,
        timeout=60.0,
    )
    plain = copy.deepcopy(model)
    try:
        for number in SCHEDULE:
            model.t = number + (0.0 if same or number < 0.6 else 1e-9 * program.rank)
            loss = F.cross_entropy(plain(x) * 0 + plain.last(plain.first(x).tanh() * number), y)
            assert torch.allclose(program.step(x, target=y), loss.detach(), rtol=1e-12, atol=0)
    except InputError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("same", [True, False])
def test_ranks_that_were_given_other_values_are_told(same: bool) -> None:
    for said in run_ranks(partial(_on_ranks, same), 2, limit_s=120.0):
        assert bool(said) != same
        assert same or ("the ranks were given different batches" in said and "'t' of the model=0.75" in said)


def test_only_numbers_and_tensors_that_can_be_reached_are_given() -> None:
    def read(before: Any, now: Any) -> Read:
        holder = {"t": now}
        return Read("'t'", "t", as_it_is(before), partial(holder.get, "t"), holder=holder)

    trained = torch.zeros(2, requires_grad=True)
    others: list[tuple[Any, Any]] = [(trained, torch.ones(2)), (torch.ones(2), torch.ones(3))]
    others += [(torch.ones(2), torch.ones(2).int()), (1.0, 2), (True, False), (1.0, None), ([1.0], [1.0, 2.0])]
    for before, now in others:
        assert not may_be_set(read(before, now))
    assert may_be_set(read([1.0, 2], [0.5, 3])) and not may_be_set(read([1.0, "a"], [0.5, "b"]))
    place = read({"a": 1.0}, {"a": 2.0})
    assert may_be_set(read([0.5] * 64, [1.0] * 64)) and not may_be_set(read([0.5] * 65, [1.0] * 65))
    setting, tensor = Setting.of(place), torch.tensor(7.0)
    with stood_in([setting], [tensor]):
        assert place.look()["a"] is tensor
    assert place.look() == {"a": 2.0} and float(setting.tensors[0]) == 2.0 and setting.fits
    place.holder["t"] = {"a": 3.0}
    setting.feed()
    assert float(setting.tensors[0]) == 3.0
    place.holder["t"] = {"a": 3}
    assert not setting.fits
