"""What runs is written down in functional form, writes into memory included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from efftra_fx.errors import DifferentiateError
from efftra_fx.passes.record import Recorder, functional
from efftra_fx.passes.simplify import simplify

aten = torch.ops.aten


def record(function: Callable[[Tensor], Tensor], shape: tuple[int, ...] = (4, 4)) -> fx.GraphModule:
    """Return the simplified graph of a function of one tensor."""
    recorder = Recorder()
    with FakeTensorMode():
        x = torch.empty(shape)
        recorder.placeholder("x", x)
        with recorder:
            out = function(x)
    replaced = simplify(recorder.graph)
    node = recorder.find(out)
    while node in replaced:
        node = replaced[node]
    recorder.graph.output(node)
    return fx.GraphModule(recorder.module, recorder.graph)


def assert_same(function: Callable[[Tensor], Tensor]) -> fx.GraphModule:
    x = torch.randn(4, 4)
    gm = record(function)
    for node in gm.graph.nodes:
        assert not (isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable)
    assert torch.equal(gm(x.clone()), function(x.clone()))
    return gm


def written_through_a_view(x: Tensor) -> Tensor:
    zeros = torch.zeros_like(x)
    flat = zeros.view(16)
    zeros[1:3].copy_(x[:2])
    zeros.t()[0].add_(1)
    return flat * 2 + zeros.reshape(16)


def looked_at_before_and_after(x: Tensor) -> Tensor:
    made = x + 1
    before = made.t() * 2
    made.mul_(3)
    return before + made.t() * 2


def turned_in_place(x: Tensor) -> Tensor:
    made = x[:2] + 1
    before = made.t()
    made.transpose_(0, 1)
    return before + made


@pytest.mark.parametrize("function", [written_through_a_view, looked_at_before_and_after, turned_in_place])
def test_writes_are_seen_by_all_that_look_at_the_memory(function: Callable[[Tensor], Tensor]) -> None:
    assert_same(function)


STEPS: list[Callable[[Tensor, Tensor], Any]] = [
    lambda a, b: a[1:3].copy_(b[:2]),
    lambda a, b: a.t().add_(b),
    lambda a, b: a.view(16)[3:7].mul_(2),
    lambda a, b: a.diagonal().zero_(),
    lambda a, b: a.masked_fill_(b > 0, 0.5),
    lambda a, b: a.sub_(b, alpha=2),
    lambda a, b: b.add_(a[0]),
    lambda a, b: b.select(1, 2).copy_(a.sum(0)),
]


@settings(max_examples=60)
@given(st.lists(st.integers(0, len(STEPS) - 1), min_size=1, max_size=6))
def test_any_sequence_of_writes_is_recorded_faithfully(steps: list[int]) -> None:
    def run(x: Tensor) -> Tensor:
        a, b = x * 2, (x.t() + 1).contiguous()
        rows = a[2:]
        for step in steps:
            STEPS[step](a, b)
        return torch.cat([a, b, rows, a.t(), b.view(16)[:4].unsqueeze(0)])

    assert_same(run)


def test_a_view_of_a_view_that_looks_alike_is_the_value_itself() -> None:
    gm = record(lambda x: x.t().t().view(4, 4).view(16).view(2, 8) + 1)
    assert [str(node.target) for node in gm.graph.nodes if node.users] == ["x", "aten.view.default", "aten.add.Tensor"]


def test_the_same_call_twice_is_made_once_unless_it_is_random() -> None:
    gm = record(lambda x: x.sin() * x.sin() + torch.bernoulli(x) * torch.bernoulli(x))
    targets = [str(node.target) for node in gm.graph.nodes]
    assert targets.count("aten.sin.default") == 1 and targets.count("aten.bernoulli.default") == 2


def test_a_sum_that_keeps_dimensions_for_nothing_does_not() -> None:
    gm = record(lambda x: x.sum([0], keepdim=True).view(4) * 2)
    assert [str(n.target) for n in gm.graph.nodes if n.users] == ["x", "aten.sum.dim_IntList", "aten.mul.Tensor"]
    x = torch.randn(4, 4)
    assert torch.equal(gm(x), x.sum(0) * 2)


def test_what_has_no_functional_form_is_refused() -> None:
    with pytest.raises(
        DifferentiateError, match="aten._foreach_add_.Scalar writes in place and has no functional form"
    ):
        functional(aten._foreach_add_.Scalar)


def test_writes_of_another_type_than_the_memory_are_refused() -> None:
    def write(x: Tensor) -> Tensor:
        pair = torch.view_as_complex(torch.zeros_like(x).view(4, 2, 2))
        return torch.view_as_real(pair.mul_(2))

    with pytest.raises(DifferentiateError, match="complex64"):
        record(write)
