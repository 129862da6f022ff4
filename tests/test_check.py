"""The proof on the user's own model says what is so, finds what differs, and leaves no trace."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from models import NORMED, ZOO
from rig import lay_out, rig_of
from torch import nn

from efftra_fx import Cluster, compile
from efftra_fx.check import CheckReport, compare_gradients
from efftra_fx.differences import apart

MLP = ZOO["mlp"]


def test_a_sound_program_matches_one_device_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    program = rig_of(MLP).program(lay_out(4, (2, 1), 3))
    batch = MLP.data(12)
    report = program.check(*batch.args, target=batch.target)
    assert report.matches and report.worst_gradient <= 1e-9 and report.step_s > 0 and report.step_one_device_s > 0
    assert report.loss == pytest.approx(report.loss_one_device, rel=1e-12)
    text = capsys.readouterr().out
    assert text == f"{report}\n" and "check against one device: match" in text and "measured" in text
    program.check(*batch.args, target=batch.target, show=False)
    assert capsys.readouterr().out == ""


def test_a_wrong_gradient_is_found_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = rig_of(MLP)
    program = rig.program(lay_out(4, (1, 1), 1))
    batch = MLP.data(12)
    honest = program._whole_gradients

    def wrong(results: object) -> dict[str, torch.Tensor]:
        gradients = honest(results)  # type: ignore[arg-type]
        gradients["2.bias"] = gradients["2.bias"] * (1 + 1e-6)
        return gradients

    monkeypatch.setattr(program, "_whole_gradients", wrong)
    report = program.check(*batch.args, target=batch.target, show=False)
    assert not report.matches and report.worst_parameter == "2.bias"
    assert report.worst_gradient == pytest.approx(1e-6, rel=1e-3)
    assert "DIFFER: '2.bias'" in str(report)


def test_a_check_leaves_gradients_buffers_parameters_and_random_state_alone() -> None:
    rig = rig_of(NORMED)
    program, batch = rig.program(lay_out(rig.blocks, (1, 1), 2)), NORMED.data(12)
    for parameter in rig.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = copy.deepcopy(rig.model.state_dict())
    torch.manual_seed(5)
    random = torch.random.get_rng_state()
    program.check(*batch.args, target=batch.target, show=False)
    assert torch.equal(torch.random.get_rng_state(), random)
    assert all(torch.equal(before[n], t) for n, t in rig.model.state_dict().items())
    assert all(p.grad is not None and bool((p.grad == 1).all()) for p in rig.model.parameters())
    rig.model.zero_grad()


def test_gradients_are_compared_relative_to_their_own_size() -> None:
    a, b = torch.tensor([1.0, 100.0], dtype=torch.float64), torch.tensor([1e-3], dtype=torch.float64)
    same = compare_gradients({"a": a, "b": b}, {"a": a, "b": b})
    assert same == (0.0, "a", 1e-9)
    worst, name, _ = compare_gradients({"a": a, "b": b}, {"a": a + 1e-5, "b": b * 1.01})
    assert name == "b" and worst == pytest.approx(0.01)


def test_a_gradient_of_one_side_alone_differs_unless_it_is_zero() -> None:
    one, zero = torch.ones(2), torch.zeros(2)
    assert compare_gradients({"a": one}, {"a": one, "b": zero})[0] == 0.0
    assert compare_gradients({"a": one, "b": zero}, {"a": one})[0] == 0.0
    assert compare_gradients({"a": one}, {"a": one, "b": one})[:2] == (float("inf"), "b")
    assert compare_gradients({"a": one, "c": one}, {"a": one})[:2] == (float("inf"), "c")


def test_numbers_that_are_none_match_only_their_like() -> None:
    nan, one = torch.tensor([float("nan"), 1.0]), torch.ones(2)
    assert compare_gradients({"a": nan}, {"a": nan.clone()})[0] == 0.0
    assert compare_gradients({"a": nan}, {"a": one})[0] == float("inf")
    partly, other = torch.tensor([float("nan"), 1.0, float("inf")]), torch.tensor([float("nan"), 1.5, float("inf")])
    assert compare_gradients({"a": partly}, {"a": partly.clone()})[0] == 0.0
    assert compare_gradients({"a": partly}, {"a": other})[0] == 0.5
    assert compare_gradients({"a": partly}, {"a": -other})[0] == float("inf")
    noise = {"a": partly.double(), "b": torch.tensor([1e-17]).double()}
    assert compare_gradients(noise, {**noise, "b": -noise["b"]})[0] <= 1e-9


def test_a_report_matches_only_if_loss_and_gradients_do() -> None:
    report = CheckReport(2.0, 2.0, 1e-12, "w", 1e-9, 1.0, 2.0)
    assert report.matches and "x2.00" in str(report)
    assert not CheckReport(2.1, 2.0, 1e-12, "w", 1e-9, 1.0, 2.0).matches
    assert not CheckReport(2.0, 2.0, 1e-3, "w", 1e-9, 1.0, 2.0).matches
    noted = CheckReport(2.0, 2.0, 0.0, "w", 1e-9, 1.0, 2.0, ("statistics of each part",))
    assert "note              statistics of each part" in str(noted)


def test_a_gradient_that_is_nothing_but_rounding_may_be_other_rounding() -> None:
    large = torch.tensor([1.0, -2.0], dtype=torch.float64)
    noise, other = torch.tensor([3e-16], dtype=torch.float64), torch.tensor([-8e-16], dtype=torch.float64)
    worst, _, tolerance = compare_gradients({"w": large, "b": noise}, {"w": large, "b": other})
    assert worst <= tolerance
    worst, name, tolerance = compare_gradients({"w": large, "b": noise}, {"w": large, "b": other * 1e4})
    assert worst > tolerance and name == "b"


@pytest.mark.parametrize("rng", ["plan", "layout_free"])
def test_a_step_that_draws_by_parts_says_why_it_is_not_that_of_one_device(rng: str) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2)).double()
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.randn(6, 2, dtype=torch.float64)
    fixed: Any = dict(stages=2, micro_batches=2, costs="estimated", rng=rng)
    loss = nn.functional.mse_loss
    program = compile(model, Cluster.local(2), example_inputs=(x,), example_target=y, loss_fn=loss, **fixed)
    report = program.check(x, target=y, show=False)
    assert report.matches == (rng == "layout_free")
    assert any("random numbers of 1 are drawn by each part" in note for note in report.notes) == (rng == "plan")


def test_imaginary_parts_count_when_a_capture_is_compared() -> None:
    value = torch.tensor([1 + 2j, 3 - 1j])
    assert apart("a gradient", value, value.clone()) is None
    assert apart("a gradient", value, value.conj()) is not None
    assert apart("a gradient", value.real, value) is not None
    assert apart("a gradient", value.conj(), value.conj().resolve_conj()) is None
