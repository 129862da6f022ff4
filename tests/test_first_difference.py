"""A difference planted in a captured graph is found, and the node that was changed is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from habits import Habit, Net, classes, cross_entropy, features, plain
from test_trace import captured
from torch import Tensor, fx, nn

from efftra_fx.captured import Captured
from efftra_fx.errors import CaptureError
from efftra_fx.first_difference import Values
from efftra_fx.meta import CONSTANTS
from efftra_fx.trace_check import check_capture

aten = torch.ops.aten


def error_of(habit: Habit, found: Captured) -> str:
    """Return the words in which the check refuses a graph."""
    found.gm.graph.lint()
    found.gm.recompile()
    with pytest.raises(CaptureError) as caught:
        check_capture(habit.model, found, [*habit.args, habit.target], habit.loss_fn)
    return str(caught.value)


def node_of(found: Captured, target: Any, number: int = 0) -> fx.Node:
    """Return the node with this operator, of several the one with this number."""
    nodes: list[fx.Node] = [n for n in found.gm.graph.nodes if n.target is target]
    return nodes[number]


def test_a_wrong_number_is_named_with_its_line_and_module() -> None:
    class Halves(nn.Module):
        def forward(self, h: Tensor) -> Tensor:
            return h * 0.5  # the line that is named

    habit = plain(lambda m, h: m.halves(h))
    habit.model.add_module("halves", Halves())
    found = captured(habit)
    node = node_of(found, aten.mul.Tensor)
    node.args = (node.args[0], 0.25)
    message = error_of(habit, found)
    assert message.startswith("the loss of the captured graph is not the eager model's: they differ by ")
    assert f"the first node that differs is {node.name} (aten.mul.Tensor) in module 'halves' at File" in message
    assert "test_first_difference.py" in message
    assert "look for a custom autograd.Function, a hook" in message


def test_a_wrong_constant_is_named_with_the_node_that_reads_it() -> None:
    table = torch.arange(6, dtype=torch.float64)
    habit = plain(lambda m, h: h + table)
    found = captured(habit)
    (name,) = CONSTANTS[found.gm]
    CONSTANTS[found.gm] = {name: table + 1}
    reader = node_of(found, aten.add.Tensor)
    message = error_of(habit, found)
    assert f"the first value that differs is the constant '{name}', read by {reader.name} (aten.add.Tensor)" in message


@pytest.mark.parametrize(("number", "path"), [(0, ""), (1, "")])
def test_a_changed_operator_is_named(number: int, path: str) -> None:
    habit = plain()
    found = captured(habit)
    node = node_of(found, aten.tanh.default, number)
    node.target = aten.sigmoid.default
    assert f"the first node that differs is {node.name} (aten.sigmoid.default) at File" in error_of(habit, found)


def test_a_hook_that_a_graph_has_lost_is_found_after_its_module() -> None:
    habit = plain()
    found = captured(habit)
    habit.model.get_submodule("b").register_forward_hook(lambda module, args, out: out * 2)
    message = error_of(habit, found)
    assert "the first node that differs is tanh_1 (aten.tanh.default) at File" in message
    assert "after 'b'" in message


def test_values_written_in_place_are_known() -> None:
    def between(m: nn.Module, h: Tensor) -> Tensor:
        h = h.clone()
        h[:, 1] = h[:, 0] * 2
        h[:, 2:4].add_(1)
        return h.exp()

    habit = plain(between)
    found = captured(habit)
    node_of(found, aten.exp.default).target = aten.sin.default
    assert "the first node that differs is exp (aten.sin.default)" in error_of(habit, found)


def _tripled(module: nn.Module, given: Any, taken: Any) -> Any:
    return (given[0] * 3,)


def test_a_backward_hook_that_a_graph_has_lost_is_found_at_its_value() -> None:
    habit = plain()
    found = captured(habit)
    habit.model.get_submodule("b").register_full_backward_hook(_tripled)
    message = error_of(habit, found)
    assert message.startswith("the gradient of 'a.weight' of the captured graph is not the eager model's")
    assert "the first node whose backward differs is tanh (aten.tanh.default) at File" in message
    assert "in forward, after 'b'; look" in message


def test_a_detach_that_eager_has_not_is_named() -> None:
    habit = plain()
    found = captured(habit)
    graph, linear = found.gm.graph, node_of(found, aten.linear.default)
    with graph.inserting_after(linear):
        cut = graph.call_function(aten.detach.default, (linear,))
    linear.replace_all_uses_with(cut, delete_user_cb=lambda n: n is not cut)
    message = error_of(habit, found)
    assert message.startswith("the gradient of 'a.weight' exists in eager and not in the captured graph")
    assert f"the first node whose backward differs is {cut.name} (aten.detach.default); look" in message


def test_a_detach_that_a_graph_has_lost_is_found() -> None:
    habit = plain(lambda m, h: h + (h * 2).detach())
    found = captured(habit)
    node = node_of(found, aten.detach.default, -1)
    node.replace_all_uses_with(node.all_input_nodes[0])
    mul = node_of(found, aten.mul.Tensor)
    assert f"the first node whose backward differs is {mul.name} (aten.mul.Tensor)" in error_of(habit, found)


def test_a_wrong_backward_of_a_function_is_named() -> None:
    habit = plain(lambda m, h: h.clamp(min=0.0) * 2)
    found = captured(habit)
    node = node_of(found, aten.clamp.default)

    def clamp_with_slope(x: Tensor, least: float) -> Tensor:
        return x * 0.7 + (x.clamp(min=least) - x * 0.7).detach()

    node.target = clamp_with_slope
    assert f"the first node whose backward differs is {node.name} (" in error_of(habit, found)


def test_a_wrong_new_value_of_a_buffer_is_named() -> None:
    habit = Habit(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double(), (features(),))
    habit = Habit(habit.model, habit.args, classes(), cross_entropy)
    found = captured(habit)
    counter = node_of(found, aten.add.Tensor)
    counter.args = (counter.args[0], 2)
    message = error_of(habit, found)
    assert "new value of buffer '1.num_batches_tracked'" in message
    assert f"the first node that differs is {counter.name} (aten.add.Tensor)" in message


def test_a_buffer_that_only_eager_writes_is_named_with_the_line_that_writes() -> None:
    class Counts(Net):
        calls: Tensor
        writes = False

        def forward(self, x: Tensor, *more: Any) -> Tensor:
            if self.writes:
                self.calls.add_(1)
            return super().forward(x)

    model = Counts().double()
    model.register_buffer("calls", torch.zeros(()))
    habit = Habit(model, (features(),), classes(), cross_entropy)
    found = captured(habit)
    model.writes = True
    message = error_of(habit, found)
    assert "forward writes buffer 'calls', and the captured graph does not; it is written at " in message
    assert "test_first_difference.py:" in message


def test_an_operator_that_does_not_run_is_named() -> None:
    habit = plain(lambda m, h: torch.cat([h[:, :3], h[:, 3:]], 1))
    found = captured(habit)
    node = node_of(found, aten.cat.default)
    node.args = ([node.all_input_nodes[0]] * 3, 1)
    assert f"{'linear_1'} (aten.linear.default) in module 'b'" in error_of(habit, found)


_STEPS: tuple[Callable[[Tensor], Tensor], ...] = (
    torch.sin,
    lambda h: h * 1.25,
    lambda h: h + h.flip(-1),
    lambda h: F.layer_norm(h, (6,)),
    lambda h: torch.where(h > 0, h, h * 0.1),
    lambda h: torch.stack(h.chunk(2, -1)[::-1], -1).flatten(-2),
    lambda h: h.cumsum(-1) / 3,
    lambda h: h.clone().index_fill_(1, torch.tensor([2]), 0.5).cos_(),
)


def test_whichever_node_is_changed_is_the_one_that_is_named() -> None:
    def between(m: nn.Module, h: Tensor) -> Tensor:
        for step in _STEPS:
            h = step(h)
        return h

    torch.manual_seed(0)
    habit = plain(between)
    found = captured(habit)
    swaps = {
        aten.sin.default: aten.tan.default,
        aten.mul.Tensor: aten.sub.Tensor,
        aten.div.Tensor: aten.sub.Tensor,
        aten.add.Tensor: aten.sub.Tensor,
        aten.cos.default: aten.sinh.default,
        aten.cumsum.default: aten.softmax.int,
        aten.tanh.default: aten.erf.default,
    }
    nodes = [n for n in found.gm.graph.nodes if n.target in swaps]
    assert len(nodes) == 9
    for node in nodes:
        right = node.target
        node.target = swaps[right]
        assert f" that differs is {node.name} ({node.target})" in error_of(habit, found)
        node.target = right


def test_large_values_are_known_by_some_elements_and_their_means() -> None:
    values, x = Values(), torch.randn(300, 400)
    values.add(x)
    assert values.has(x.clone()) and values.has(x.t().contiguous().t())
    assert not values.has(x + 0.5) and not values.has(x.double())
    other = x.clone()
    other[7, 11] += 1e4
    assert not values.has(other)


def test_values_that_are_conjugated_when_they_are_read_are_known() -> None:
    values, x = Values(), torch.randn(3, dtype=torch.complex128)
    values.add(x.conj())
    assert values.has(x.conj()) and not values.has(x)
