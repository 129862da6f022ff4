"""Write each mean over the batch as a sum divided by a count.

The mean over a batch is not the mean of its parts' means once parts differ in size or
in how much of them is ignored. A sum over the batch is the sum of its parts' sums, so
numerator and denominator are carried apart and divided once for the whole batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import sympy
import torch
from torch import fx

from efftra_fx.meta import OUTPUTS

from .insert import batch_symbols, call, expression, size_node

aten = torch.ops.aten
Symbols = Mapping[sympy.Symbol, tuple[fx.Node, int]]
_MEAN, _SUM = 1, 2
_CLASS_LOSSES = frozenset({aten.cross_entropy_loss.default, aten.nll_loss_nd.default, aten.nll_loss.default})
_OWN_MEANING = frozenset({aten.ctc_loss.Tensor, aten.ctc_loss.IntList})


@dataclass(frozen=True)
class SeparateMeans:
    """Rewrite means over the batch into sums and counts."""

    batch_leaves: tuple[int | None, ...]
    name: ClassVar[str] = "separate-means"
    needs: ClassVar[tuple[str, ...]] = ("role", "outputs")
    gives: ClassVar[tuple[str, ...]] = ()

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        symbols = batch_symbols(gm, self.batch_leaves)
        for node in list(gm.graph.nodes):
            if node.op != "call_function":
                continue
            with gm.graph.inserting_before(node):
                new = _rewritten(gm.graph, node, symbols)
            if new is not None:
                node.replace_all_uses_with(new)
                gm.graph.erase_node(node)
        assert OUTPUTS.on(gm)
        gm.recompile()
        return gm


def _rewritten(graph: fx.Graph, node: fx.Node, symbols: Symbols) -> fx.Node | None:
    if node.target in _CLASS_LOSSES:
        return _class_loss(graph, node, symbols)
    if node.target is aten.mean.default or node.target is aten.mean.dim:
        return _mean(graph, node, symbols)
    if node.target not in _OWN_MEANING and argument(node, "reduction") == _MEAN:
        return _reduced_mean(graph, node, symbols)
    return None


def argument(node: fx.Node, name: str) -> Any:
    """Return an operator's argument by its schema name, its default where it is not given, None without it."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return None
    for position, entry in enumerate(schema.arguments):
        if entry.name == name:
            if position < len(node.args) and not entry.kwarg_only:
                return node.args[position]
            return node.kwargs.get(name, entry.default_value)
    return None


def with_argument(node: fx.Node, name: str, value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the operator's arguments with one of them changed."""
    positions = [entry.name for entry in node.target._schema.arguments]  # type: ignore[union-attr]
    where = positions.index(name)
    if where < len(node.args):
        args = list(node.args)
        args[where] = value
        return tuple(args), dict(node.kwargs)
    return tuple(node.args), {**node.kwargs, name: value}


def _on_batch(value: torch.Tensor, symbols: Symbols, dims: tuple[int, ...] | None = None) -> bool:
    sizes = value.shape if dims is None else [value.shape[d] for d in dims]
    return any(expression(size).free_symbols & set(symbols) for size in sizes)


def _count(graph: fx.Graph, sizes: list[Any], symbols: Symbols) -> fx.Node | int | None:
    total = sympy.Integer(1)
    for size in sizes:
        total = total * expression(size)
    return size_node(graph, sympy.expand(total), symbols)


def _mean(graph: fx.Graph, node: fx.Node, symbols: Symbols) -> fx.Node | None:
    x: Any = node.args[0]
    value = x.meta["val"]
    given = argument(node, "dim") if node.target is aten.mean.dim else None
    dims = tuple(range(value.ndim)) if not given else tuple(d % value.ndim for d in given)
    if not dims or not _on_batch(value, symbols, dims):
        return None
    count = _count(graph, [value.shape[d] for d in dims], symbols)
    if count is None:
        return None
    result = node.meta["val"].dtype
    low = result in (torch.float16, torch.bfloat16)
    dtype = torch.float32 if low else result
    keep = bool(argument(node, "keepdim")) if node.target is aten.mean.dim else False
    total = call(graph, aten.sum.dim_IntList, x, list(dims), keep, dtype=dtype, like=node)
    mean = call(graph, aten.div.Scalar, total, count, like=node)
    return call(graph, aten._to_copy.default, mean, dtype=result, like=node) if low else mean


def _reduced_mean(graph: fx.Graph, node: fx.Node, symbols: Symbols) -> fx.Node | None:
    if not node.args or not isinstance(node.args[0], fx.Node) or not _on_batch(node.args[0].meta["val"], symbols):
        return None
    args, kwargs = with_argument(node, "reduction", 0)
    apart = call(graph, node.target, *args, like=node, **kwargs)
    count = _count(graph, list(apart.meta["val"].shape), symbols)
    graph.erase_node(apart)
    if count is None:
        return None
    args, kwargs = with_argument(node, "reduction", _SUM)
    total = call(graph, node.target, *args, like=node, **kwargs)
    return call(graph, aten.div.Scalar, total, count, like=node)


def _class_loss(graph: fx.Graph, node: fx.Node, symbols: Symbols) -> fx.Node | None:
    """Divide the sum over valid elements by their number, or by the sum of their classes' weights.

    The mean of `cross_entropy` with class probabilities divides by the number of rows instead.
    """
    if argument(node, "reduction") != _MEAN:
        return None
    scores: Any = node.args[0]
    target: Any = node.args[1]
    if not _on_batch(scores.meta["val"], symbols):
        return None
    args, kwargs = with_argument(node, "reduction", _SUM)
    if target.meta["val"].is_floating_point():
        shape = list(scores.meta["val"].shape)
        count = _count(graph, shape[:1] + shape[2:], symbols)
        if count is None:
            return None
        total = call(graph, node.target, *args, like=node, **kwargs)
        return call(graph, aten.div.Scalar, total, count, like=node)
    total = call(graph, node.target, *args, like=node, **kwargs)
    valid = call(graph, aten.ne.Scalar, target, argument(node, "ignore_index"), like=node)
    weight: Any = argument(node, "weight")
    if weight is None:
        count_node = call(graph, aten.sum.default, valid, like=node)
    else:
        zero = call(graph, aten.zeros_like.default, target, like=node)
        safe = call(graph, aten.where.self, valid, target, zero, like=node)
        each = call(graph, aten.index.Tensor, weight, [safe], like=node)
        kept = call(graph, aten.mul.Tensor, each, valid, like=node)
        count_node = call(graph, aten.sum.default, kept, like=node)
    return call(graph, aten.div.Tensor, total, count_node, like=node)
