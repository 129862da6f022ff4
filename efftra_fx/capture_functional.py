"""Take the writes out of an exported graph: what was written in place becomes a new value.

The exporter's own pass for this traces the whole graph anew, twice. But most nodes neither write nor
stand for other operators, and are copied here as they are; those that do are traced alone, once for
all nodes alike. Where something is written of which another view is read later, the whole graph is traced.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from efftra_fx.private import (
    batches_inside,
    changes_shape_in_place,
    functional_rules,
    storage_of,
    takes_part,
    trace_functional,
)

aten = torch.ops.aten
_PLACES = ("nn_module_stack", "stack_trace")
_OF_FEW_PARTS = frozenset(  # none of their parts stands for other operators itself, so no rules are needed for them
    {
        *(aten.add_, aten.batch_norm, aten.contiguous, aten.detach_, aten.div_, aten.dropout, aten.flatten),
        *(aten.lift_fresh_copy, aten.masked_fill_, aten.mul_, aten.relu_, aten.reshape, aten.sub_, aten.to),
    }
)


@dataclass(frozen=True)
class Functional:
    """A graph that writes nothing; its first results are the new values of the `written` placeholders, by number."""

    gm: fx.GraphModule
    written: tuple[int, ...]


class _WrittenThroughViewError(Exception):
    """Something is written of which another view is read later."""


def functional(gm: fx.GraphModule) -> Functional:
    """Return an exported graph without its writes, and with operators that may alias taken apart.

    Every placeholder must have its example in `val`; places in the user's code are kept.
    """
    with ExitStack() as stack:
        rules = _Once(lambda: stack.enter_context(functional_rules({n.target for n in gm.graph.nodes})))
        casts = any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda"))  # where a graph is traced
        if not casts and not any(batches_inside(n.target) for n in gm.graph.nodes):
            with suppress(_WrittenThroughViewError):
                return _Rewrite(gm, rules).result()
        rules()
        return traced(gm)


def traced(gm: fx.GraphModule) -> Functional:
    """Return the graph without its writes, traced as a whole; to be called under `functional_rules`."""
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    found, written = trace_functional(gm, [n.meta["val"] for n in placeholders])
    for old, new in zip(placeholders, (n for n in found.graph.nodes if n.op == "placeholder"), strict=True):
        new.name = new.target = old.name
        new.meta = dict(old.meta)
    return Functional(found, tuple(written))


class _Once:
    """Do something at the first call."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.work, self.done = work, False

    def __call__(self) -> None:
        if not self.done:
            self.work()
            self.done = True


class _Rewrite:
    """Copy a graph node by node; `values` are what stands for each node now, through all writes so far."""

    def __init__(self, gm: fx.GraphModule, rules: _Once) -> None:
        self.gm, self.rules = gm, rules
        self.root, self.graph = torch.nn.Module(), fx.Graph()
        self.values: dict[fx.Node, Any] = {}
        self.itself: dict[fx.Node, fx.Node] = {}  # what an operator in place returns is what it wrote
        self.sizes: dict[Any, fx.Node] = {}
        self.pieces: dict[Any, Functional] = {}
        order = {node: index for index, node in enumerate(gm.graph.nodes)}
        self.order = order
        self.last_read = {n: max((order[u] for u in n.users), default=-1) for n in gm.graph.nodes}
        self.views: dict[int, list[fx.Node]] = {}
        for node in gm.graph.nodes:
            for storage in {storage_of(t) for t in _tensors(node)}:
                self.views.setdefault(storage, []).append(node)

    def result(self) -> Functional:
        """Return the graph; raises _WrittenThroughViewError where nodes cannot be taken one by one."""
        for node in self.gm.graph.nodes:
            if node.op == "output":
                return self.ended(node)
            if node.op == "get_attr" and isinstance(getattr(self.gm, str(node.target)), fx.GraphModule):
                continue  # a region: what it computes is put in its place
            if node.op == "call_function" and takes_part(node.target):
                self.put_piece(node)
            elif node.target is operator.getitem and isinstance(self.value(node.args[0]), list):
                self.values[node] = self.value(node.args[0])[node.args[1]]
            elif node.op == "get_attr":
                self.values[node] = self.held(self.gm, node)
            else:
                self.values[node] = self.noted(self.graph.node_copy(node, self.value))
        raise AssertionError("a graph ends with its output")

    def value(self, node: Any) -> Any:
        """Return what stands for a node now."""
        return self.values[self.itself.get(node, node)]

    def noted(self, node: fx.Node) -> fx.Node:
        """Remember a size, so that it is not computed again."""
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt):
            self.sizes.setdefault(value.node.expr, node)
        return node

    def ended(self, output: fx.Node) -> Functional:
        placeholders = [n for n in self.gm.graph.nodes if n.op == "placeholder"]
        written = [i for i, n in enumerate(placeholders) if self.values[n].op != "placeholder" or self._moved(n)]
        news = [self.values[placeholders[i]] for i in written]
        results = fx.node.map_arg(output.args[0], self.value)
        self.graph.output((*news, *results))  # type: ignore[misc]
        return Functional(fx.GraphModule(self.root, self.graph), tuple(written))

    def _moved(self, placeholder: fx.Node) -> bool:
        return bool(self.values[placeholder].name != placeholder.name)

    def put_piece(self, node: fx.Node) -> None:
        """Put what an operator stands for in its place."""
        operands = [n for n in node.all_input_nodes if n.op != "get_attr"]
        if changes_shape_in_place(node.target):
            raise _WrittenThroughViewError
        piece = self.piece(node, operands)
        for number in piece.written:
            self.check_views(node, operands[number])
        found = self.inlined(node, operands, piece)
        count = len(piece.written)
        news, results = found[:count], found[count:]
        several = isinstance(node.meta.get("val"), (tuple, list))
        self.values[node] = results if several else results[0] if results else None
        for number, new in zip(piece.written, news, strict=True):
            operand = self.itself.get(operands[number], operands[number])
            self.values[operand] = new
            if not several and results and results[0] is new:
                self.itself[node] = operand

    def check_views(self, node: fx.Node, operand: fx.Node) -> None:
        """Raise _WrittenThroughViewError where another view of what a node writes is read later."""
        mine = self.itself.get(operand, operand)
        for other in self.views[storage_of(operand.meta["val"])]:
            if self.order[other] >= self.order[node] or self.itself.get(other, other) is mine:
                continue
            if other.op == "placeholder" or self.last_read[other] > self.order[node]:
                raise _WrittenThroughViewError

    def piece(self, node: fx.Node, operands: Sequence[fx.Node]) -> Functional:
        """Return what an operator alone is without writes; from before where there was one alike."""
        key = _key(node, operands)
        known = self.pieces.get(key)
        if key is not None and known is not None:
            return known
        graph = fx.Graph()
        inside = {n: graph.placeholder(n.name) for n in operands}
        for one, copy in inside.items():
            copy.meta = {"val": one.meta["val"]}
        for attribute in (n for n in node.all_input_nodes if n.op == "get_attr"):
            inside[attribute] = graph.get_attr(str(attribute.target))
        graph.output((graph.node_copy(node, lambda n: inside[n]),))
        if not (_is_operator(node) and node.target.overloadpacket in _OF_FEW_PARTS):  # type: ignore[union-attr]
            self.rules()
        found = traced(fx.GraphModule(self.gm, graph))
        if key is not None:
            self.pieces[key] = found
        return found

    def inlined(self, node: fx.Node, operands: Sequence[fx.Node], piece: Functional) -> list[Any]:
        """Copy a piece; return the nodes that stand for its results."""
        outside: dict[fx.Node, Any] = {}
        given = iter(operands)
        places = {k: node.meta[k] for k in _PLACES if k in node.meta}
        for one in piece.gm.graph.nodes:
            if one.op == "placeholder":
                outside[one] = self.value(next(given))
            elif one.op == "output":
                return pytree.tree_leaves(fx.node.map_arg(one.args[0], lambda n: outside[n]))
            elif one.op == "get_attr":
                outside[one] = self.held(piece.gm, one)
            else:
                size = one.meta.get("val")
                known = self.sizes.get(size.node.expr) if isinstance(size, torch.SymInt) else None
                if known is None:
                    known = self.noted(self.graph.node_copy(one, lambda n: outside[n]))
                    known.meta = {"val": size, **(places if _is_operator(node) else _places_of(one, places))}
                outside[one] = known
        raise AssertionError("a graph ends with its output")

    def held(self, gm: fx.GraphModule, node: fx.Node) -> fx.Node:
        """Hold a constant of a piece."""
        name = f"held_{len(list(self.root.buffers()))}_{node.name}"
        self.root.register_buffer(name, getattr(gm, str(node.target)))
        copy = self.graph.get_attr(name)
        copy.meta = dict(node.meta)
        return copy


def _is_operator(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload)


def _places_of(node: fx.Node, places: dict[str, Any]) -> dict[str, Any]:
    """Return a node's own places in the user's code where it has any."""
    return {**places, **{k: node.meta[k] for k in _PLACES if node.meta.get(k)}}


def _tensors(node: fx.Node) -> list[Tensor]:
    value = node.meta.get("val")
    return [one for one in (value if isinstance(value, (tuple, list)) else (value,)) if isinstance(one, Tensor)]


def _key(node: fx.Node, operands: Sequence[fx.Node]) -> Any:
    """Return what nodes have in common that stand for the same operators; None where it is not known."""
    if not _is_operator(node):
        return None
    numbers = {n: i for i, n in enumerate(operands)}
    leaves, structure = pytree.tree_flatten((node.args, node.kwargs))
    given = tuple(("operand", numbers[a]) if isinstance(a, fx.Node) else (type(a), repr(a)) for a in leaves)
    kinds = []
    for operand in operands:
        value = operand.meta.get("val")
        if isinstance(value, Tensor):
            sizes = (*value.shape, *value.stride(), value.storage_offset())
            kinds.append((value.dtype, value.device, value.ndim, *(_expression(s) for s in sizes)))
        elif isinstance(value, torch.SymInt):
            kinds.append((_expression(value),))
        else:
            return None
    return node.target, str(structure), given, tuple(kinds)


def _expression(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else size
