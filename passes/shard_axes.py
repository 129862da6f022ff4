"""What each operator does along the dimensions of its operands, in letters.

    linear   x[..., k]  w[n, k]  b[n]  →  y[..., n]       k is summed, b is added to the sum

Cutting a letter cuts every dimension that has it. An operand without the letter must be copied
(each rank uses all of it, so each contributes to its gradient); a result without the letter is a
partial sum if the letter is summed. All else follows: column, row, head and channel parallelism
are not written down anywhere, they are what letters allow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from .insert import expression

aten = torch.ops.aten
Letter = tuple[str, int] | None  # name, and how many elements one index of it has along the dimension
Letters = tuple[Letter, ...]
_LARGE_PRIME = 1_000_003


@dataclass(frozen=True)
class Axes:
    """Letters of each operand's and each result's dimensions; `None` where a dimension cannot be cut.

    `summed` letters run over a sum, `added` operands (by index) are added to that sum. `seeds` are
    letters along which it pays to try a cut.
    """

    operands: tuple[Letters, ...]
    results: tuple[Letters, ...]
    summed: frozenset[str] = frozenset()
    added: frozenset[int] = frozenset()
    seeds: tuple[str, ...] = ()
    linear: tuple[frozenset[int], ...] = field(default=())  # operands that may be partial sums together


def operands(node: fx.Node) -> list[fx.Node]:
    """Return the tensor operands of a call, one for each place where one stands, in order."""
    found: list[fx.Node] = []

    def take(value: fx.Node) -> fx.Node:
        if isinstance(value.meta.get("val"), Tensor):
            found.append(value)
        return value

    fx.node.map_arg((node.args, node.kwargs), take)
    return found


def results(node: fx.Node) -> tuple[Any, ...]:
    """Return the (fake) values that a call makes; what is no tensor stays in its place."""
    value = node.meta.get("val")
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def extents(value: Tensor) -> tuple[int | None, ...]:
    """Return the sizes of a tensor, None where the size depends on the batch."""
    return tuple(size if isinstance(size, int) else _number(size) for size in value.shape)


def _number(size: Any) -> int | None:
    expr = expression(size)
    return int(expr) if expr.is_Integer else None


def hints(value: Tensor) -> tuple[int, ...]:
    """Return the sizes with a large prime in place of the batch's rows."""
    return tuple(hint(size) for size in value.shape)


def hint(size: Any) -> int:
    """Return a size with a large prime in place of the batch's rows."""
    expr = expression(size)
    return int(expr.subs({symbol: _LARGE_PRIME for symbol in expr.free_symbols}))


def coefficient(size: Any) -> int:
    """Return how many elements of a dimension one row of the batch has; the size where that is fixed.

    >>> coefficient(6)
    6
    """
    return int(expression(size).as_coeff_Mul()[0])


def axes_of(node: fx.Node) -> Axes | None:
    """Return the letters of a call, None where none are known: then it is computed whole."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return None
    made = results(node)
    if not made or not all(v is None or isinstance(v, Tensor) for v in made):
        return None
    maker = _MAKERS.get(target)
    if maker is not None:
        return maker(node, _bound(node))
    if torch.Tag.pointwise in target.tags and torch.Tag.nondeterministic_seeded not in target.tags:
        return pointwise(node)
    return None


def _bound(node: fx.Node) -> dict[str, Any]:
    """Return the call's arguments by their names in the schema, defaults included."""
    assert isinstance(node.target, torch._ops.OpOverload)
    found = {}
    for index, declared in enumerate(node.target._schema.arguments):
        given = node.args[index] if index < len(node.args) else node.kwargs.get(declared.name, declared.default_value)
        found[declared.name] = given
    return found


def value_of(node: Any) -> Tensor:
    """Return an operand's (fake) value."""
    value = node.meta["val"]
    assert isinstance(value, Tensor)
    return value


def rank_of(node: Any) -> int:
    """Return an operand's number of dimensions."""
    return value_of(node).ndim


def letters(prefix: str, count: int) -> Letters:
    """Return so many different letters."""
    return tuple((f"{prefix}{i}", 1) for i in range(count))


def aligned(operand: Any, out: Tensor, names: Letters) -> Letters:
    """Return the letters of an operand that is broadcast to `out`."""
    value = value_of(operand)
    offset = out.ndim - value.ndim
    sizes, full = extents(value), extents(out)
    return tuple(None if sizes[d] == 1 and full[d + offset] != 1 else names[d + offset] for d in range(value.ndim))


_LINEAR_POINTWISE = frozenset(
    {aten.neg.default, aten.clone.default, aten.alias.default, aten.mul.Scalar, aten.div.Scalar}
)
_SUMS = frozenset({aten.add.Tensor, aten.sub.Tensor})
_PRODUCTS = frozenset({aten.mul.Tensor, aten.div.Tensor})


def pointwise(node: fx.Node) -> Axes | None:
    """Each element of a result needs the elements of the operands at its own place."""
    made = [v for v in results(node) if isinstance(v, Tensor)]
    if not made or any(v.shape != made[0].shape for v in made):
        return None
    out, given = made[0], operands(node)
    if any(rank_of(o) > out.ndim for o in given):
        return None
    names = letters("d", out.ndim)
    moving: tuple[frozenset[int], ...] = ()
    if node.target in _LINEAR_POINTWISE or node.target in _SUMS:
        moving = (frozenset(range(len(given))),) if len(given) == len(tensor_places(node)) else ()
    elif node.target in _PRODUCTS:
        moving = (
            (frozenset({0}),) if node.target is aten.div.Tensor or len(given) == 1 else (frozenset({0}), frozenset({1}))
        )
    if node.target in _SUMS and len(given) == 1:
        moving = ()
    return Axes(tuple(aligned(o, out, names) for o in given), (names,) * len(results(node)), linear=moving)


def tensor_places(node: fx.Node) -> list[Any]:
    """Return what stands where the schema wants tensors."""
    assert isinstance(node.target, torch._ops.OpOverload)
    bound = _bound(node)
    return [bound[a.name] for a in node.target._schema.arguments if str(a.type) == "Tensor"]


Maker = Callable[[fx.Node, dict[str, Any]], Axes | None]
_MAKERS: dict[Any, Maker] = {}


def letters_of(*targets: Any) -> Callable[[Maker], Maker]:
    """Enter what finds the letters of calls of these operators; it gets a call's arguments by name."""

    def enter(maker: Maker) -> Maker:
        for target in targets:
            _MAKERS[target] = maker
        return maker

    return enter


def keeping(node: fx.Node, operand: Any, dims: Sequence[int], rest: tuple[Letters, ...] = ()) -> Axes:
    """Return letters for a call that looks along `dims` only and keeps every dimension."""
    count = rank_of(operand)
    along = {d % count for d in dims} if count else set()
    names = tuple(None if d in along else one for d, one in enumerate(letters("d", count)))
    made = tuple(names if isinstance(v, Tensor) and v.ndim == count else () for v in results(node))
    return Axes((names, *rest), made)


__all__ = [
    "Axes",
    "Letter",
    "Letters",
    "axes_of",
    "coefficient",
    "extents",
    "hint",
    "hints",
    "keeping",
    "letters",
    "letters_of",
    "operands",
    "rank_of",
    "results",
    "value_of",
]
