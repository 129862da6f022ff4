"""annotate-shapes: dtype, symbolic shape, operations and bytes of every node."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import sympy
import torch
from torch import Tensor, fx

from efftra_fx.meta import SPEC, Spec
from efftra_fx.opaque import is_opaque

from .insert import expression

aten = torch.ops.aten
FREE_VIEWS = frozenset(
    {
        aten.view.default,
        aten.reshape.default,
        aten.t.default,
        aten.transpose.int,
        aten.permute.default,
        aten.expand.default,
        aten.unsqueeze.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.slice.Tensor,
        aten.select.int,
        aten.split.Tensor,
        aten.split_with_sizes.default,
        aten.detach.default,
        aten.alias.default,
    }
)


@dataclass(frozen=True)
class AnnotateShapes:
    """Write `SPEC` on every node with a tensor value, operations and bytes in the batch symbol."""

    name: ClassVar[str] = "annotate-shapes"
    needs: ClassVar[tuple[str, ...]] = ("role",)
    gives: ClassVar[tuple[str, ...]] = ("spec",)

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        for node in gm.graph.nodes:
            value = node.meta.get("val")
            if isinstance(value, Tensor):
                SPEC[node] = spec_of(value, operations(node))
            elif isinstance(value, (tuple, list)) and value and isinstance(value[0], Tensor):
                SPEC[node] = spec_of(value[0], operations(node))
        return gm


_NOTHING = sympy.Integer(0)


def spec_of(value: Tensor, work: sympy.Expr = _NOTHING) -> Spec:
    """Return the typed contract of a (fake) tensor."""
    shape = tuple(expression(size) for size in value.shape)
    return Spec(str(value.dtype).removeprefix("torch."), shape, work, elements(value) * value.element_size())


def elements(value: Tensor) -> sympy.Expr:
    """Return the number of elements as a sympy expression."""
    return _product(tuple(expression(size) for size in value.shape))


@lru_cache(maxsize=1 << 14)
def _product(sizes: tuple[sympy.Expr, ...]) -> sympy.Expr:
    return sympy.expand(sympy.Mul(*sizes))


def operations(node: fx.Node) -> sympy.Expr:
    """Return the floating-point operations of a node; a multiply-add counts as two, a view as none."""
    if node.op != "call_function" or node.target in FREE_VIEWS:
        return sympy.Integer(0)
    value = node.meta.get("val")
    if isinstance(value, (tuple, list)):
        value = next((v for v in value if isinstance(v, Tensor)), None)
    if not isinstance(value, Tensor):
        return sympy.Integer(0)
    inner = _inner(node)
    return sympy.expand(elements(value) * inner)


def is_heavy(node: fx.Node) -> bool:
    """Say whether a node multiplies matrices or reads a table of weights."""
    if node.op != "call_function":
        return False
    return node.target in _HEAVY or is_opaque(node.target)


def _inner(node: fx.Node) -> sympy.Expr:
    """Return the operations for each element of the output."""

    def size(position: int, dim: int) -> sympy.Expr:
        operand: Any = node.args[position]
        return expression(operand.meta["val"].shape[dim])

    target = node.target
    if target in (aten.mm.default, aten.bmm.default, aten.matmul.default, aten.linear.default):
        return 2 * size(0, -1)
    if target in (aten.addmm.default, aten.baddbmm.default):
        return 2 * size(1, -1)
    if target in (aten.convolution.default, aten.conv2d.default, aten.conv1d.default, aten.conv3d.default):
        weight: Any = node.args[1]
        inner: sympy.Expr = sympy.Integer(2)
        for extent in weight.meta["val"].shape[1:]:
            inner = inner * expression(extent)
        return inner
    if target is aten.scaled_dot_product_attention.default:
        return 4 * size(1, -2)
    if target in (aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input):
        weights: Any = node.args[2]
        return 2 * sum((elements(w.meta["val"]) for w in weights), sympy.Integer(0))
    return sympy.Integer(1)


_HEAVY = frozenset(
    {
        aten.mm.default,
        aten.bmm.default,
        aten.matmul.default,
        aten.linear.default,
        aten.addmm.default,
        aten.baddbmm.default,
        aten.convolution.default,
        aten.conv1d.default,
        aten.conv2d.default,
        aten.conv3d.default,
        aten.conv2d.padding,
        aten.conv1d.padding,
        aten.conv_transpose2d.input,
        aten.conv_transpose1d.default,
        aten.scaled_dot_product_attention.default,
        aten.lstm.input,
        aten.gru.input,
        aten.rnn_tanh.input,
        aten.rnn_relu.input,
        aten.embedding.default,
        aten.einsum.default,
    }
)
