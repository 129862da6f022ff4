"""Operators write over an operand only when nobody can tell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch.utils._pytree import tree_map

from efftra_fx import reuse
from efftra_fx.emit import emit
from efftra_fx.reuse import InPlace, find_reuse

aten = torch.ops.aten


def graph_of(build: Callable[[fx.Graph, fx.Node, fx.Node], Any]) -> fx.GraphModule:
    """Return a graph over two 4 × 4 matrices, with values on its nodes."""
    graph = fx.Graph()
    graph.output(build(graph, graph.placeholder("x"), graph.placeholder("y")))
    for node in graph.nodes:
        if node.op == "placeholder":
            node.meta["val"] = torch.empty(4, 4)
        elif node.op == "call_function":
            args = tree_map(lambda value: value.meta["val"] if isinstance(value, fx.Node) else value, node.args)
            node.meta["val"] = node.target(*args, **node.kwargs)
    return fx.GraphModule(torch.nn.Module(), graph)


def product(graph: fx.Graph, x: fx.Node, y: fx.Node) -> fx.Node:
    return graph.call_function(aten.mm.default, (x, y), name="product")


def reused(build: Callable[[fx.Graph, fx.Node, fx.Node], Any]) -> dict[str, InPlace]:
    """Return what is reused, having seen that the function still computes its graph and leaves its inputs alone."""
    gm = graph_of(build)
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    wanted = gm(x, y)
    before = x.clone(), y.clone()
    for one, other in zip(emit(gm)(x, y), wanted, strict=True):
        assert torch.equal(one, other)
    assert torch.equal(x, before[0]) and torch.equal(y, before[1])
    return {node.name: choice for node, choice in find_reuse(gm.graph).items()}


def test_a_value_that_is_used_no_more_is_written_over() -> None:
    def build(graph: fx.Graph, x: fx.Node, y: fx.Node) -> Any:
        total = graph.call_function(aten.add.Tensor, (x, product(graph, x, y)), name="total")
        return (graph.call_function(aten.relu.default, (total,), name="last"),)

    assert reused(build) == {"total": InPlace(1, "add_"), "last": InPlace(0, "relu_")}
    assert "last = total.relu_()" in emit(graph_of(build)).source


def test_a_view_is_written_over_when_its_memory_is_used_no_more() -> None:
    def build(graph: fx.Graph, x: fx.Node, y: fx.Node) -> Any:
        seen = graph.call_function(aten.view.default, (product(graph, x, y), [4, 4]))
        return (graph.call_function(aten.sub.Tensor, (seen, x), {"alpha": 2}, name="last"),)

    assert reused(build) == {"last": InPlace(0, "sub_")}


def later_use(graph: fx.Graph, x: fx.Node, y: fx.Node) -> Any:
    made = product(graph, x, y)
    total = graph.call_function(aten.mul.Tensor, (made, 2))
    return (graph.call_function(aten.mm.default, (total, made)),)


def later_view(graph: fx.Graph, x: fx.Node, y: fx.Node) -> Any:
    made = product(graph, x, y)
    seen = graph.call_function(aten.t.default, (made,))
    total = graph.call_function(aten.mul.Tensor, (made, 2))
    return (total, graph.call_function(aten.mm.default, (total, seen)))


def both_operands(graph: fx.Graph, x: fx.Node, y: fx.Node) -> Any:
    made = product(graph, x, y)
    return (graph.call_function(aten.mul.Tensor, (made, graph.call_function(aten.t.default, (made,)))),)


def handed_out(graph: fx.Graph, x: fx.Node, y: fx.Node) -> Any:
    made = product(graph, x, y)
    return (made, graph.call_function(aten.tanh.default, (made,)))


def input_itself(graph: fx.Graph, x: fx.Node, y: fx.Node) -> Any:
    return (graph.call_function(aten.add.Tensor, (graph.call_function(aten.view.default, (x, [4, 4])), y)),)


def broadcast(graph: fx.Graph, x: fx.Node, y: fx.Node) -> Any:
    row = graph.call_function(aten.sum.dim_IntList, (x, [0], True))
    return (graph.call_function(aten.sub.Tensor, (row, y)),)


def expanded(graph: fx.Graph, x: fx.Node, y: fx.Node) -> Any:
    wide = graph.call_function(aten.expand.default, (graph.call_function(aten.sum.dim_IntList, (x, [0], True)), [4, 4]))
    return (graph.call_function(aten.relu.default, (wide,)),)


def unknown(graph: fx.Graph, x: fx.Node, y: fx.Node) -> Any:
    made = product(graph, x, y)
    other = graph.call_function(aten.positive.default, (made,))
    passed = graph.call_function(aten.roll.default, (other, [0]))
    return (graph.call_function(aten.relu.default, (made,)), passed)


@pytest.mark.parametrize(
    "build", [later_use, later_view, both_operands, handed_out, input_itself, broadcast, expanded, unknown]
)
def test_nothing_that_somebody_sees_is_written_over(build: Any) -> None:
    assert reused(build) == {}


# What each operator is given behind the gradient that it writes over; "saved" is a tensor from the forward.
INTO: dict[Any, tuple[Any, ...]] = {
    aten.gelu_backward.default: ("saved",),
    aten.silu_backward.default: ("saved",),
    aten.threshold_backward.default: ("saved", 0.5),
    aten.tanh_backward.default: ("saved",),
    aten.sigmoid_backward.default: ("saved",),
    aten.leaky_relu_backward.default: ("saved", 0.1, False),
    aten.elu_backward.default: (1.0, 1.0, 1.0, False, "saved"),
    aten.softplus_backward.default: ("saved", 1.0, 20.0),
    aten.hardtanh_backward.default: ("saved", -0.5, 0.5),
    aten.hardsigmoid_backward.default: ("saved",),
    aten.hardswish_backward.default: ("saved",),
    aten.native_dropout_backward.default: ("mask", 2.0),
    aten._softmax_backward_data.default: ("saved", 1, torch.float32),
    aten._log_softmax_backward_data.default: ("saved", 1, torch.float32),
}


def test_every_operator_that_writes_over_a_gradient_is_tried() -> None:
    assert set(INTO) == {*reuse._INTO, *reuse._INTO_ON_CPU}


@pytest.mark.parametrize("target", INTO, ids=str)
@pytest.mark.parametrize("shape", [(4, 4), (3, 1000), (2, 5, 70), (1, 1), (5, 33, 2, 3), (300, 7)])
def test_an_operator_that_writes_over_a_gradient_changes_no_bit(target: Any, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    given = {"saved": torch.randn(shape), "mask": torch.rand(shape) < 0.5}
    graph = fx.Graph()
    x, other = graph.placeholder("x"), graph.placeholder("other")
    made = graph.call_function(aten.neg.default, (x,))
    values = [other if isinstance(value, str) else value for value in INTO[target]]
    last = graph.call_function(target, (made, *values), name="last")
    graph.output((last,))
    operand = next(given[value] for value in INTO[target] if isinstance(value, str))
    x.meta["val"], other.meta["val"] = torch.randn(shape), operand
    made.meta["val"] = last.meta["val"] = torch.empty(shape)
    gm = fx.GraphModule(torch.nn.Module(), graph)
    run = emit(gm)
    assert find_reuse(gm.graph)[last].out in run.source
    gradient = torch.randn(shape)
    assert torch.equal(run(gradient, operand)[0], gm(gradient, operand)[0])
