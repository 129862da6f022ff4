"""Put the bodies of no_grad and enable_grad regions into the graph around them.

An exporter keeps such a region as a call of a nested graph, and forgets what the call meant
when it lowers the graph further: outputs stay right and gradients become wrong. So regions
are inlined first. What enters a no_grad region is detached there, so nothing that is computed
inside carries a gradient; what an enable_grad region inside it reads is not.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

_WRAP = torch.ops.higher_order.wrap_with_set_grad_enabled


def inline_grad_regions(gm: fx.GraphModule) -> None:
    """Inline every region that sets the gradient mode, in this graph and in the graphs that it calls."""
    for module in list(gm.modules()):
        if isinstance(module, fx.GraphModule):
            _inline(module)


def _inline(gm: fx.GraphModule) -> None:
    for node in list(gm.graph.nodes):
        if node.op != "call_function" or node.target is not _WRAP:
            continue
        enabled, body, *operands = node.args
        with gm.graph.inserting_before(node):
            values = _put_body(gm, getattr(gm, str(body.target)), operands, bool(enabled))
        for user in list(node.users):
            assert user.target is operator.getitem, "a region's results are taken one by one"
            value = values[user.args[1]]
            if isinstance(user.meta.get("val"), Tensor):
                user.target, user.args = torch.ops.aten.alias.default, (value,)  # keeps the name that outputs go by
            else:  # a size
                user.replace_all_uses_with(value)
                gm.graph.erase_node(user)
        gm.graph.erase_node(node)
        if not body.users:
            gm.graph.erase_node(body)
    gm.graph.lint()
    gm.recompile()


def _put_body(gm: fx.GraphModule, body: fx.GraphModule, operands: Sequence[fx.Node], enabled: bool) -> list[Any]:
    """Copy a body to the insertion point; return the nodes that stand for its results."""
    outside: dict[fx.Node, fx.Node] = {}
    inside: dict[fx.Node, Any] = {}
    source = iter(operands)
    for node in body.graph.nodes:
        if node.op == "placeholder":
            outside[node] = next(source)
            inside[node] = outside[node] if enabled else _detached(gm.graph, outside[node])
        elif node.op == "output":
            results = fx.node.map_arg(node.args[0], lambda n: outside.get(n, inside[n]))
            return list(results)
        elif node.op == "get_attr":
            inside[node] = _attribute(gm, getattr(body, str(node.target)), node)
        elif node.target is _WRAP:
            again, inner, *rest = node.args
            given = [outside.get(n, inside[n]) if again else inside[n] for n in rest]
            inside[node] = _put_body(gm, getattr(body, str(inner.target)), given, bool(again))
        elif node.target is operator.getitem and isinstance(inside[node.args[0]], list):
            inside[node] = inside[node.args[0]][node.args[1]]
        else:
            inside[node] = gm.graph.node_copy(node, lambda n: inside[n])
    raise AssertionError("a graph ends with its output")


def _attribute(gm: fx.GraphModule, value: Any, node: fx.Node) -> fx.Node:
    name = f"region_{node.name}"
    while hasattr(gm, name):
        name += "_"
    setattr(gm, name, value)
    copy = gm.graph.get_attr(name)
    copy.meta.update(node.meta)
    return copy


def _detached(graph: fx.Graph, value: fx.Node) -> fx.Node:
    example = value.meta.get("val")
    if not isinstance(example, Tensor) or not (example.is_floating_point() or example.is_complex()):
        return value
    node = graph.call_function(torch.ops.aten.detach.default, (value,))
    node.meta.update({k: v for k, v in value.meta.items() if k in ("val", "nn_module_stack", "stack_trace")})
    return node
