"""One graph for any number of rows from two graphs for two numbers of rows.

Some models fix the number of rows while they are traced (`len(x)`, `int(x.shape[0])`, sizes
kept in Python objects). Traced twice, at two sizes, they give the same operators with other
numbers; a number that follows the rows is then computed from the rows.

    rows 6:  reshape(h, [6, 17, 4])   div(s, 6)        rows n:  reshape(h, [n, 17, 4])   div(s, n)
    rows 5:  reshape(h, [5, 17, 4])   div(s, 5)
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from efftra_fx.capture_guards import NotCapturedError
from efftra_fx.errors import CaptureError
from efftra_fx.meta import CONSTANTS, OUTPUTS, PATH, ROLE, SOURCE
from efftra_fx.opaque import kind_of


class OtherOperatorsError(CaptureError):
    """Raise where a model computes other operators for other numbers of rows; `path` is the module that does."""

    path: str = ""


def align(
    first: fx.GraphModule, second: fx.GraphModule, rows: tuple[int, int], place: tuple[str, int]
) -> fx.GraphModule:
    """Return the graph of `first` with every number that follows the rows computed from an input's size.

    `rows` are the two traces' rows, `place` is an input's name and the dimension of its rows.
    Raises CaptureError where the two graphs differ in more than such numbers.
    """
    ones, others = list(first.graph.nodes), list(second.graph.nodes)
    if [(n.op, _target(n)) for n in ones] != [(n.op, _target(n)) for n in others]:
        path, line = _where(ones, others)
        error = OtherOperatorsError(
            f"the model computes other operators for {rows[0]} rows than for {rows[1]}{line}, so its batch cannot be "
            "cut; do not loop over rows, or put that part into a module of its own, which then runs as it is"
        )
        error.path = path
        raise error
    graph = fx.Graph()
    writer = _Writer(graph, rows)
    for node, other in zip(ones, others, strict=True):
        if node.op == "placeholder":
            copy = graph.node_copy(node)
            writer.copies[node] = copy
            if ROLE[node].kind == "input" and ROLE[node].name == place[0]:
                writer.origin = (copy, place[1])
        elif node.op == "output":
            graph.output(writer.both(node, node.args[0], other.args[0]))
        else:
            args, kwargs = writer.both(node, (node.args, node.kwargs), (other.args, other.kwargs))
            copy = graph.create_node(node.op, node.target, tuple(args), dict(kwargs), node.name)
            copy.meta.update(node.meta)
            writer.copies[node] = copy
    aligned = fx.GraphModule(first, graph)
    CONSTANTS[aligned] = CONSTANTS[first]
    if OUTPUTS.on(first):  # a graph of guards has none
        OUTPUTS[aligned] = OUTPUTS[first]
    return aligned


def _where(ones: Sequence[fx.Node], others: Sequence[fx.Node]) -> tuple[str, str]:
    """Return the smallest module outside of which two graphs have the same operators, and the line in it."""
    found, line = "", ""
    for path in sorted({PATH.get(n) or "" for n in ones}, key=len):
        parts = path.split(".")
        for prefix in (".".join(parts[:count]) for count in range(1, len(parts) + 1)):
            outside = [[_target(n) for n in nodes if not _lies_in(n, prefix)] for nodes in (ones, others)]
            if outside[0] == outside[1] and len(prefix) > len(found):
                found = prefix
    differing = next((a for a, b in zip(ones, others, strict=False) if _target(a) != _target(b)), None)
    if differing is not None and SOURCE.get(differing):
        line = f" at {SOURCE.get(differing)}"
    return found, line


def _lies_in(node: fx.Node, path: str) -> bool:
    return f"{PATH.get(node) or ''}.".startswith(f"{path}.")


def keep_places(aligned: fx.GraphModule, exported: fx.GraphModule) -> None:
    """Write on a graph that was exported from an aligned one where its nodes come from."""
    source = (n for n in aligned.graph.nodes if n.op == "call_function")
    for node in exported.graph.nodes:
        if node.op != "call_function":
            continue
        like = next((n for n in source if n.target is node.target), None)
        if like is None:
            return
        for key in (PATH, SOURCE):
            if key.on(like):
                key[node] = key[like]


def _target(node: fx.Node) -> Any:
    return (ROLE[node].kind, ROLE[node].name) if node.op == "placeholder" else kind_of(node.target)


class _Writer:
    """Copy arguments of two graphs that differ in numbers only."""

    def __init__(self, graph: fx.Graph, rows: tuple[int, int]) -> None:
        self.graph, self.rows = graph, rows
        self.copies: dict[fx.Node, fx.Node] = {}
        self.origin: tuple[fx.Node, int] | None = None
        self.size: fx.Node | None = None

    def both(self, node: fx.Node, one: Any, other: Any) -> Any:
        """Return the argument that stands for both."""
        if isinstance(one, fx.Node):
            return self.copies[one]
        if isinstance(one, (tuple, list)) and len(one) == len(other):
            items = [self.both(node, a, b) for a, b in zip(one, other, strict=True)]
            return tuple(items) if isinstance(one, tuple) else items
        if isinstance(one, dict):
            return {key: self.both(node, one[key], other[key]) for key in one}
        if isinstance(one, slice):
            return slice(*(self.both(node, getattr(one, k), getattr(other, k)) for k in ("start", "stop", "step")))
        if type(one) is type(other) and (one == other or (one != one and other != other)):
            return one
        return self.number(node, one, other)

    def number(self, node: fx.Node, one: Any, other: Any) -> fx.Node:
        """Return a node that computes a number from the rows: k·rows + c, or k / rows."""
        a, b = self.rows
        if isinstance(one, int) and isinstance(other, int) and (one - other) % (a - b) == 0:
            factor = (one - other) // (a - b)
            rest = one - factor * a
            result = self.rows_node()
            if factor != 1:
                result = self.graph.call_function(operator.mul, (result, factor))
            return self.graph.call_function(operator.add, (result, rest)) if rest else result
        if isinstance(one, float) and isinstance(other, float):
            if abs(one * a - other * b) <= 1e-12 * abs(one * a):
                return self.graph.call_function(operator.truediv, (one * a, self.rows_node()))
            factor_ = (one - other) / (a - b)
            if abs(one - factor_ * a) <= 1e-12 * abs(one):
                return self.graph.call_function(operator.mul, (self.rows_node(), factor_))
        line = SOURCE.get(node) or node.name
        raise NotCapturedError(
            f"a number at {line} is {one} for {a} rows and {other} for {b}, which does not follow the rows; "
            "take sizes from the tensors (x.shape[0]) and not from Python numbers"
        )

    def rows_node(self) -> fx.Node:
        """Return the node that has the number of rows."""
        if self.size is None:
            assert self.origin is not None, "the input that has the rows is in the graph"
            self.size = self.graph.call_function(torch.ops.aten.sym_size.int, self.origin)
        return self.size
