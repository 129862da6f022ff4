"""Put operators into a traced graph so that the new nodes are typed like the old ones."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import sympy
import torch
from torch import fx

from efftra_fx.meta import PATH, ROLE, SOURCE


def call(graph: fx.Graph, target: Any, *args: Any, like: fx.Node | None = None, **kwargs: Any) -> fx.Node:
    """Insert a call at the graph's insertion point and compute its fake value."""
    node = graph.call_function(target, args, kwargs)
    values = fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
    mode = torch._guards.detect_fake_mode([v for v in _flat(values) if isinstance(v, torch.Tensor)])
    if mode is None:
        node.meta["val"] = target(*values[0], **values[1])
    else:
        with mode:
            node.meta["val"] = target(*values[0], **values[1])
    if like is not None:
        for key in (PATH, SOURCE):
            if key.on(like):
                key[node] = key[like]
    return node


def _flat(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return [leaf for item in value.values() for leaf in _flat(item)]
    if isinstance(value, (tuple, list)):
        return [leaf for item in value for leaf in _flat(item)]
    return [value]


def batch_symbols(gm: fx.GraphModule, batch_leaves: tuple[int | None, ...]) -> dict[sympy.Symbol, tuple[fx.Node, int]]:
    """Map each symbol that stands for the number of rows to an input and the dimension that has it."""
    symbols: dict[sympy.Symbol, tuple[fx.Node, int]] = {}
    inputs = [n for n in gm.graph.nodes if n.op == "placeholder" and ROLE[n].kind == "input"]
    for node, dim in zip(inputs, batch_leaves, strict=True):
        if dim is None:
            continue
        size = node.meta["val"].shape[dim]
        if not isinstance(size, int):
            symbols.setdefault(size.node.expr, (node, dim))
    return symbols


def expression(size: Any) -> sympy.Expr:
    """Return a dimension as a sympy expression."""
    return sympy.Integer(size) if isinstance(size, int) else size.node.expr


def size_node(
    graph: fx.Graph, expr: sympy.Expr, symbols: Mapping[sympy.Symbol, tuple[fx.Node, int]]
) -> fx.Node | int | None:
    """Insert nodes that compute a polynomial in the batch symbols from the inputs' sizes; None for others."""
    if expr.is_Integer:
        return int(expr)
    if expr in symbols:
        node, dim = symbols[expr]
        return call(graph, torch.ops.aten.sym_size.int, node, dim)
    if not (expr.is_Add or expr.is_Mul):
        return None
    join = operator.add if expr.is_Add else operator.mul
    result: fx.Node | int | None = None
    for term in expr.args:
        part = size_node(graph, term, symbols)
        if part is None:
            return None
        if result is None:
            result = part
        elif isinstance(result, int) and isinstance(part, int):
            result = join(result, part)
        else:
            result = call(graph, join, result, part)
    return result
