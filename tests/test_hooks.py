"""Hooks are part of the captured step, are called by it, or are refused by name; none is ignored without a word."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from against_eager import assert_same, compiled, one_device, step
from habits import Habit, Net, classes, cross_entropy, features
from rig import lay_out
from torch import Tensor, nn
from torch.nn.modules import module as every

from efftra_fx import private
from efftra_fx.errors import CaptureError, InputError, PlanError
from efftra_fx.plan import Plan

PLANS = (((1,), 1), ((2, 1), 3), ((1, 2), 2))


def with_hooks(register: Callable[[Net], object], between: Any = None) -> Habit:
    torch.manual_seed(3)
    model = Net(between).double()
    register(model)
    return Habit(model, (features(),), classes(), cross_entropy)


KEPT: dict[str, Callable[[Net], object]] = {
    "forward": lambda m: m.b.register_forward_hook(lambda mod, args, out: out * 2),
    "before forward": lambda m: m.b.register_forward_pre_hook(lambda mod, args: (args[0] + 1,)),
    "before forward, with names": lambda m: m.b.register_forward_pre_hook(
        lambda mod, args, named: ((args[0] + 1,), named), with_kwargs=True
    ),
    "forward, with names": lambda m: m.b.register_forward_hook(lambda mod, args, named, out: out * 3, with_kwargs=True),
    "forward of the model": lambda m: m.register_forward_hook(lambda mod, args, out: out * 3),
    "a parameter's gradient": lambda m: m.b.weight.register_hook(lambda g: g * 2 + g.norm()),
    "two on one parameter": lambda m: [m.b.weight.register_hook(lambda g: g * 2), m.b.weight.register_hook(torch.sin)],
    "after accumulation": lambda m: m.b.weight.register_post_accumulate_grad_hook(_halve),
}


def _halve(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


@pytest.mark.parametrize("name", KEPT)
def test_what_hooks_compute_is_part_of_the_step(name: str) -> None:
    habit = with_hooks(KEPT[name])
    expected = one_device(habit)
    program = compiled(habit)
    for shape, micro_batches in PLANS:
        planned = program.with_plan(lay_out(program.plan.blocks, shape, micro_batches))
        assert_same(step(planned, habit), expected, 1e-9)
    if name != "after accumulation":  # a check leaves `.grad` alone
        assert planned.check(*habit.args, target=habit.target, show=False, repeats=1).matches


def test_a_parameters_hooks_are_called_once_a_step_with_the_whole_gradient() -> None:
    seen: list[Tensor] = []
    habit = with_hooks(lambda m: m.b.weight.register_hook(lambda g: seen.append(g.clone())))
    program = compiled(habit)
    program = program.with_plan(lay_out(program.plan.blocks, (2, 1), 3))
    seen.clear()
    _, gradients = step(program, habit)
    assert len(seen) == 1
    assert torch.equal(seen[0], gradients["b.weight"])  # type: ignore[arg-type]
    _, expected = one_device(habit)
    torch.testing.assert_close(seen[0], expected["b.weight"], rtol=1e-9, atol=1e-12)


def test_what_forward_hooks_do_besides_is_announced(capsys: pytest.CaptureFixture[str]) -> None:
    calls: list[str] = []
    habit = with_hooks(lambda m: m.b.register_forward_hook(lambda mod, args, out: calls.append("b")))
    program = compiled(habit)
    words = capsys.readouterr().err
    assert "forward hooks of b are part of the captured step" in words and "not at each step" in words
    calls.clear()
    step(program, habit)
    assert not calls


def test_torchs_own_hooks_are_not_announced(capsys: pytest.CaptureFixture[str]) -> None:
    compiled(with_hooks(lambda m: nn.utils.spectral_norm(m.b).eval()))
    assert "hooks" not in capsys.readouterr().err


REFUSED: dict[str, tuple[Callable[[Net], object], Any, str]] = {
    "backward": (lambda m: m.b.register_full_backward_hook(lambda mod, i, o: None), None, "module 'b' has a backward"),
    "before backward": (lambda m: m.b.register_full_backward_pre_hook(lambda mod, o: None), None, "module 'b' has a"),
    "backward of the model": (
        lambda m: m.register_full_backward_hook(lambda mod, i, o: None),
        None,
        "the model has a backward hook",
    ),
    "a tensor's gradient": (lambda m: None, lambda m, h: _registered(h), r"test_hooks.py:\d+ calls register_hook on a"),
    "a tensor that keeps its gradient": (
        lambda m: None,
        lambda m, h: _retained(h),
        r"test_hooks.py:\d+ calls retain_g",
    ),
}


def _registered(h: Tensor) -> Tensor:
    if h.requires_grad:
        h.register_hook(lambda g: g * 2)
    return h


def _retained(h: Tensor) -> Tensor:
    if h.requires_grad:
        h.retain_grad()
    return h


@pytest.mark.parametrize("name", REFUSED)
def test_hooks_that_no_captured_step_would_call_are_refused_by_name(name: str) -> None:
    register, between, words = REFUSED[name]
    with pytest.raises(CaptureError, match=words):
        compiled(with_hooks(register, between))


@pytest.fixture
def everywhere() -> Iterator[None]:
    handle = every.register_module_full_backward_hook(lambda mod, i, o: None)
    yield
    handle.remove()


def test_backward_hooks_of_all_modules_are_refused(everywhere: None) -> None:
    with pytest.raises(CaptureError, match="a hook on the backward of all modules is registered"):
        compiled(with_hooks(lambda m: None))


def test_a_hook_that_comes_later_is_captured_or_refused_then() -> None:
    habit = with_hooks(lambda m: None)
    program = compiled(habit)
    handle = habit.model.b.register_forward_hook(lambda mod, args, out: out * 2)  # type: ignore[union-attr]
    assert_same(step(program, habit), one_device(habit), 1e-9)
    handle.remove()
    assert_same(step(program, habit), one_device(habit), 1e-9)
    habit.model.b.register_full_backward_hook(lambda mod, i, o: None)  # type: ignore[union-attr]
    with pytest.raises(InputError, match="module 'b' has a backward hook"):
        step(program, habit)


def test_hooks_of_a_parameter_that_is_cut_are_refused_by_name() -> None:
    model = Net(width=1024).double()
    for parameter in model.parameters():
        parameter.register_hook(lambda g: g)
    program = compiled(Habit(model, (features(),), classes(), cross_entropy), 2)
    stage = lay_out(program.plan.blocks, (2,), 1).stages[0]
    with pytest.raises(PlanError, match=r"parameter '\w.\w+' has hooks, which need its whole gradient, but stage 0 cu"):
        program.with_plan(Plan((replace(stage, tensor=2),), 1))


def test_hooks_are_found_where_torch_keeps_them() -> None:
    layer, weight = nn.Linear(2, 2), nn.Parameter(torch.ones(1))
    found = [layer.register_forward_hook(print), layer.register_forward_pre_hook(len)]  # type: ignore[arg-type]
    found += [layer.register_full_backward_hook(abs), layer.register_full_backward_pre_hook(sum)]  # type: ignore[arg-type]
    assert private.module_hooks(layer) == [print, len]
    assert private.module_hooks(layer, backward=True) == [abs, sum]
    assert private.hook_numbers(nn.Sequential(layer)) == tuple(one.id for one in found)
    weight.register_hook(abs)
    weight.register_post_accumulate_grad_hook(print)
    assert private.tensor_hooks(weight) == ([abs], [print])
    handle = every.register_module_forward_hook(print)
    assert private.global_hooks() == [print] and not private.global_hooks(backward=True)
    handle.remove()
