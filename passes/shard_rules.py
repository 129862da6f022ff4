"""Ways to compute a call on a tensor group: placements of its operands and of its results.

Every call may be computed whole, or on copies; then nothing of it changes. What more there is, is
found from one placed value at a time: given that a dimension of an operand or result is cut, a rule
says how all the others must lie (`complete`), or that it can't be. For most operators the letters
of `shard_axes` say it; views, splits and joins, and losses over cut classes have rules of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from . import shard_index as shard_index  # enters its operators' letters
from . import shard_letters as shard_letters
from .shard_axes import Axes, axes_of, coefficient, extents, hint, hints, operands, results, value_of
from .shard_cuts import COPIED, PARTIAL, WHOLE, Cut, Placement, chain_cuts, cut_along

aten = torch.ops.aten


@dataclass(frozen=True)
class Strategy:
    """Placements of the operands (in the order of `operands`) and results of one call.

    `share` is the part of the call's work that the busiest rank does. `sums` are the numbers that the
    call itself sums over the group in its forward, as multiples of its first result's elements.
    """

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    share: float = 1.0
    inner: str = ""


Find = Callable[[bool, int, int], "Cut | None"]  # is it a result, its index, dimension → a cut of the same family


def base_strategies(node: fx.Node) -> list[Strategy]:
    """Return the ways that leave a call as it is."""
    made, given = len(results(node)), len(operands(node))
    found = [Strategy((WHOLE,) * given, (WHOLE,) * made)]
    if not given:
        return found
    found.append(Strategy((COPIED,) * given, (COPIED,) * made))
    axes = axes_of(node) if node.target not in _VIEWS else Axes(((),), ((),), linear=(frozenset({0}),))
    for group in axes.linear if axes is not None else ():
        inputs = tuple(PARTIAL if i in group else COPIED for i in range(given))
        masks = (isinstance(value, Tensor) and value.dtype is torch.bool for value in results(node))
        found.append(Strategy(inputs, tuple(WHOLE if mask else PARTIAL for mask in masks)))
    return found


def complete(node: fx.Node, result: bool, index: int, dim: int, cut: Cut, find: Find) -> Strategy | None:
    """Return how the call is computed when one operand or result is cut this way; None if it cannot be."""
    target = node.target
    if target in _VIEWS:
        return _view(node, result, dim, cut)
    if target in _SPLITS:
        return _split(node, result, index, dim, cut, find)
    if target is aten.cat.default:
        return _cat(node, result, index, dim, cut, find)
    if target is aten.glu.default:
        return _glu(node, result, dim, cut)
    if target is aten.cross_entropy_loss.default:
        return None if result else _cross_entropy(node, index, dim, cut)
    if target is aten.slice.Tensor and (bounds := slice_bounds(node, dim)) is not None:
        return _slice(result, dim, cut, *bounds)
    axes = axes_of(node)
    if axes is None:
        return None
    names = axes.results[index] if result else axes.operands[index]
    one = names[dim] if dim < len(names) else None
    if one is None:
        return None
    base = cut.divide(one[1])
    return None if base is None else cut_letter(node, axes, one[0], base)


def has_own_rule(node: fx.Node) -> bool:
    """Say whether a call is known here beyond its letters."""
    own = (aten.cat.default, aten.glu.default, aten.cross_entropy_loss.default)
    return node.target in _VIEWS or node.target in _SPLITS or node.target in own


def seed_strategies(node: fx.Node, width: int) -> list[Strategy]:
    """Return the ways of a call that are worth trying from scratch, whatever its neighbours do."""
    if node.target in _VIEWS:
        return _view_seeds(node, width)
    if node.target is aten.cross_entropy_loss.default:
        classes = extents(value_of(operands(node)[0]))[1:2]
        cut = Cut.even(classes[0], width) if classes and classes[0] else None
        one = None if cut is None else _cross_entropy(node, 0, 1, cut)
        return [] if one is None else [one]
    axes = axes_of(node)
    found = []
    for name in axes.seeds if axes is not None else ():
        assert axes is not None
        size = _size_of(node, axes, name)
        cut = None if size is None else Cut.even(size, width)
        one = None if cut is None else cut_letter(node, axes, name, cut)
        if one is not None:
            found.append(one)
    return found


def _size_of(node: fx.Node, axes: Axes, name: str) -> int | None:
    for names, operand in zip(axes.operands, operands(node), strict=True):
        for size, one in zip(extents(value_of(operand)), names, strict=False):
            if one is not None and one[0] == name and size is not None:
                return size // one[1]
    return None


def fits(value: Tensor, dim: int, cut: Cut) -> bool:
    """Say whether a dimension can have this cut: its size, or that of a period of it."""
    size = extents(value)[dim]
    return size == cut.size if size is not None else hint(value.shape[dim]) % cut.size == 0


def cut_letter(node: fx.Node, axes: Axes, name: str, cut: Cut) -> Strategy | None:
    """Return how the call is computed when a letter is cut; None where sizes don't fit or a result would be lost."""
    if node.target is aten.embedding.default and name == "v" and not cut.runs:
        return None
    inputs = []
    for index, (names, operand) in enumerate(zip(axes.operands, operands(node), strict=True)):
        place = _placed(value_of(operand), names, name, cut)
        if place is None:
            return None
        if place is COPIED and index in axes.added and name in axes.summed:
            place = PARTIAL
        inputs.append(place)
    outputs = []
    for names, value in zip(axes.results, results(node), strict=True):
        if not isinstance(value, Tensor) or (value.ndim == 1 and extents(value)[0] == 0):
            outputs.append(WHOLE)
            continue
        place = _placed(value, names, name, cut)
        if place is COPIED and name in axes.summed and value.is_floating_point():
            place = PARTIAL
        if place is None or place is COPIED:
            return None
        outputs.append(place)
    return Strategy(tuple(inputs), tuple(outputs), cut.share, name)


def _placed(value: Tensor, names: Sequence[Any], name: str, cut: Cut) -> Placement | None:
    dims = [d for d, one in enumerate(names) if one is not None and one[0] == name]
    if not dims:
        return COPIED
    own = cut.times(names[dims[0]][1])
    return cut_along(dims[0], own) if len(dims) == 1 and fits(value, dims[0], own) else None


# views: a cut of one dimension seen through another shape

_VIEWS = frozenset(
    {
        aten.view.default,
        aten.reshape.default,
        aten._unsafe_view.default,
        aten.flatten.using_ints,
        aten.unflatten.int,
    }
)


def _view(node: fx.Node, result: bool, dim: int, cut: Cut) -> Strategy | None:
    before, after = value_of(operands(node)[0]), results(node)[0]
    source, target = (after, before) if result else (before, after)
    seen = look_through(source, target, dim, cut)
    if seen is None:
        return None
    places = cut_along(dim, cut), seen
    return Strategy((places[result],), (places[not result],), cut.share, "view")


def look_through(source: Tensor, target: Tensor, dim: int, cut: Cut) -> Placement | None:
    """Return the placement of `target`, a reshaped `source` of which `dim` is cut; None where it has no such.

    What is cut repeats with a period of so many elements; a dimension of the other shape has the
    same cut if its own period fits (so 3 × 8 cut along 8 is 24 cut three times).
    """
    for left, right in groups_of(hints(source), hints(target)):
        if dim not in left:
            continue
        inner = [extents(source)[d] for d in left if d > dim]
        if None in inner:
            return None
        flat = cut.times(_product(inner))
        for d in right:
            behind = [extents(target)[e] for e in right if e > d]
            if None in behind or extents(target)[d] == 1:
                continue
            size, step = extents(target)[d], _product(behind)
            found = _period_of(flat, size, step)
            if found is not None and fits(target, d, found):
                return cut_along(d, found)
    return None


def _period_of(flat: Cut, size: int | None, step: int) -> Cut | None:
    if size is None:
        return flat.divide(step)
    period = size * step
    if period % flat.size == 0:
        whole: Cut | None = flat.repeat(period // flat.size)
    else:
        whole = flat.period(period)
    return None if whole is None else whole.divide(step)


def _product(sizes: Sequence[Any]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total


def groups_of(left: Sequence[int], right: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Return which dimensions of one shape are which of another: runs with equal products, as short as can be.

    >>> groups_of((4, 6, 5), (4, 2, 15))
    [([0], [0]), ([1, 2], [1, 2])]
    """
    found: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(left) or j < len(right):
        ours, theirs = ([i] if i < len(left) else []), ([j] if j < len(right) else [])
        a, b = (left[i] if ours else 1), (right[j] if theirs else 1)
        i, j = i + len(ours), j + len(theirs)
        while a != b:
            if a < b and i < len(left):
                ours.append(i)
                a *= left[i]
                i += 1
            elif a > b and j < len(right):
                theirs.append(j)
                b *= right[j]
                j += 1
            else:
                return found
        found.append((ours, theirs))
    return found


def _view_seeds(node: fx.Node, width: int) -> list[Strategy]:
    """Return cuts of the dimensions that a view makes out of others, or merges.

    Positions that are merged with rows of the batch are left alone: cutting them would copy every weight.
    """
    before, after = value_of(operands(node)[0]), results(node)[0]
    found = []
    for left, right in groups_of(hints(before), hints(after)):
        if len(left) == len(right) == 1 or _merges_rows(before, left) or _merges_rows(after, right):
            continue
        for result, value, dims in ((True, after, right), (False, before, left)):
            for d in dims:
                size = extents(value)[d]
                if size is None:
                    size = coefficient(value.shape[d])
                cut = Cut.even(size, width) if size else None
                one = None if cut is None else _view(node, result, d, cut)
                if one is not None:
                    found.append(one)
    return found


def _merges_rows(value: Tensor, dims: Sequence[int]) -> bool:
    return len(dims) == 1 and extents(value)[dims[0]] is None


# splits and joins: a cut along the split dimension consists of cuts of the pieces

_SPLITS = frozenset({aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default, aten.unbind.int})


def _split(node: fx.Node, result: bool, index: int, dim: int, cut: Cut, find: Find) -> Strategy | None:
    whole = value_of(operands(node)[0])
    made = results(node)
    along = int(node.args[-1] if takes_dim(node) else node.kwargs.get("dim", 0)) % whole.ndim  # type: ignore[arg-type]
    gone = node.target is aten.unbind.int
    if gone:
        if not result and dim == along:
            return None
        inside = dim + (dim >= along) if result else dim
        outside = inside - (inside > along)
        places = (cut_along(inside, cut),), (cut_along(outside, cut),) * len(made)
        return Strategy(*places, cut.share, "split")
    if dim != along:
        return Strategy((cut_along(dim, cut),), (cut_along(dim, cut),) * len(made), cut.share, "split")
    sizes = [extents(v)[along] for v in made]
    if None in sizes:
        return None
    pieces = (
        _pieces(cut, sizes) if not result else [cut if j == index else find(True, j, dim) for j in range(len(made))]
    )
    if any(piece is None or piece.size != size for piece, size in zip(pieces, sizes, strict=True)):
        return None
    kept = [piece for piece in pieces if piece is not None]
    joined = chain_cuts(kept)
    return Strategy((cut_along(dim, joined),), tuple(cut_along(dim, p) for p in kept), joined.share, "split")


def takes_dim(node: fx.Node) -> bool:
    return len(node.args) > (1 if node.target is aten.unbind.int else 2)


def _pieces(cut: Cut, sizes: Sequence[Any]) -> list[Cut | None]:
    pieces, at = [], 0
    for size in sizes:
        pieces.append(cut.segment(at, at + size))
        at += size
    return pieces


def _cat(node: fx.Node, result: bool, index: int, dim: int, cut: Cut, find: Find) -> Strategy | None:
    whole, given = results(node)[0], [value_of(o) for o in operands(node)]
    along = int(node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)) % whole.ndim  # type: ignore[arg-type]
    real = [v.ndim == whole.ndim for v in given]  # joining ignores empty vectors
    if not result and not real[index]:
        return None
    if dim != along:
        inputs = tuple(cut_along(dim, cut) if one else COPIED for one in real)
        return Strategy(inputs, (cut_along(dim, cut),), cut.share, "cat")
    sizes = [extents(v)[along] for v, one in zip(given, real, strict=True) if one]
    if None in sizes:
        return None
    places = [i for i, one in enumerate(real) if one]
    pieces = _pieces(cut, sizes) if result else [cut if i == index else find(False, i, dim) for i in places]
    if any(piece is None or piece.size != size for piece, size in zip(pieces, sizes, strict=True)):
        return None
    kept = [piece for piece in pieces if piece is not None]
    joined, found = chain_cuts(kept), iter(kept)
    inputs = tuple(cut_along(dim, next(found)) if one else COPIED for one in real)
    return Strategy(inputs, (cut_along(dim, joined),), joined.share, "cat")


def _glu(node: fx.Node, result: bool, dim: int, cut: Cut) -> Strategy | None:
    whole = value_of(operands(node)[0])
    along = int(node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", -1)) % whole.ndim  # type: ignore[arg-type]
    if dim != along:
        return Strategy((cut_along(dim, cut),), (cut_along(dim, cut),), cut.share, "glu")
    half = cut if result else cut.segment(0, cut.size // 2)
    if half is None or (not result and chain_cuts((half, half)) != cut):
        return None
    return Strategy((cut_along(dim, chain_cuts((half, half))),), (cut_along(dim, half),), half.share, "glu")


def slice_bounds(node: fx.Node, dim: int) -> tuple[int, int, int] | None:
    """Return start, stop and the whole's size where a call slices a dimension in steps of one; None elsewhere."""
    whole = value_of(operands(node)[0])
    given: list[Any] = list(node.args[1:])
    rest: list[Any] = [0, None, None, 1]
    along, start, stop, step = given + rest[len(given) :]
    size = extents(whole)[dim]
    if node.kwargs or along % whole.ndim != dim or size is None or extents(results(node)[0])[dim] in (None, size):
        return None
    if step != 1 or not all(bound is None or isinstance(bound, int) for bound in (start, stop)):
        return None
    first, last, _ = slice(start, stop).indices(size)
    return first, last, size


def _slice(result: bool, dim: int, cut: Cut, start: int, stop: int, size: int) -> Strategy | None:
    """What a rank has of a slice is one run of its share; no rank may be left without."""
    whole = cut.around(start, size) if result else cut
    piece = None if whole is None or whole.size != size else whole.segment(start, stop)
    if whole is None or piece is None or (result and piece != cut):
        return None
    return Strategy((cut_along(dim, whole),), (cut_along(dim, piece),), piece.share, "slice")


def _cross_entropy(node: fx.Node, index: int, dim: int, cut: Cut) -> Strategy | None:
    """Classes may be cut in runs where targets are class numbers and nothing is weighted or smoothed."""
    given = operands(node)
    schema = ("self", "target", "weight", "reduction", "ignore_index", "label_smoothing")
    bound = {**dict(zip(schema, node.args, strict=False)), **node.kwargs}
    plain = bound.get("weight") is None and not bound.get("label_smoothing")
    logits = value_of(given[0])
    if index or dim != 1 or logits.ndim != 2 or not plain or not cut.runs or value_of(given[1]).is_floating_point():
        return None
    return Strategy((cut_along(1, cut), WHOLE), (WHOLE,), cut.share, "classes")


__all__ = [
    "Strategy",
    "base_strategies",
    "complete",
    "cut_letter",
    "fits",
    "groups_of",
    "look_through",
    "seed_strategies",
]
