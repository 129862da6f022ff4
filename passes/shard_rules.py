"""Ways to compute a call on a tensor group: placements of its operands and of its results.

Every call may be computed whole, or on copies; then nothing of it changes. What more there is, is
found from one placed value at a time: given that a dimension of an operand or result is cut, a rule
says how all the others must lie (`complete`), or that it can't be. For most operators the letters
of `shard_axes` say it; views, splits and joins, and losses over cut classes have rules of their own.

`localise` then writes the call of one rank: sizes among its arguments become the rank's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from . import shard_index as shard_index  # enters its operators' letters
from .shard_axes import Axes, axes_of, coefficient, extents, hint, hints, operands, results, value_of
from .shard_cuts import COPIED, PARTIAL, WHOLE, Cut, Placement, chain_cuts, cut_along
from .shard_parts import (
    attention_part,
    cross_entropy_part,
    dropout_part,
    embedding_part,
    mean_part,
    native_dropout_part,
)

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
    along = int(node.args[-1] if _takes_dim(node) else node.kwargs.get("dim", 0)) % whole.ndim  # type: ignore[arg-type]
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


def _takes_dim(node: fx.Node) -> bool:
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


# one rank's call


def localise(
    node: fx.Node, strategy: Strategy, rank: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return function and arguments of the rank's call; `args` and `kwargs` hold the rank's own operands."""
    target: Any = node.target
    cuts = [place for place in (*strategy.inputs, *strategy.outputs) if place.cut is not None]
    if not cuts:
        return target, args, kwargs
    maker = _LOCAL.get(target)
    return (target, args, kwargs) if maker is None else maker(node, strategy, rank, args, kwargs)


Local = Callable[[fx.Node, Strategy, int, tuple[Any, ...], dict[str, Any]], tuple[Any, tuple[Any, ...], dict[str, Any]]]
_LOCAL: dict[Any, Local] = {}


def _local(*targets: Any) -> Callable[[Local], Local]:
    def enter(maker: Local) -> Local:
        for target in targets:
            _LOCAL[target] = maker
        return maker

    return enter


def _length(place: Placement, rank: int) -> int:
    assert place.cut is not None
    return place.cut.lengths[rank]


def _own_size(entry: Any, place: Placement, value: Tensor, rank: int) -> Any:
    """Return a size argument for the rank; sizes that are left open stay so, and so do multiples of the batch."""
    if isinstance(entry, int) and entry == -1:
        return entry
    if extents(value)[place.dim] is None:
        return -1
    return _length(place, rank)


@_local(aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.expand.default)
def _resized(node: fx.Node, s: Strategy, rank: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    place = s.outputs[0]
    if place.cut is None:
        return node.target, args, kwargs
    sizes = list(args[1])
    sizes[place.dim] = _own_size(sizes[place.dim], place, results(node)[0], rank)
    if list(sizes).count(-1) > 1 and node.target is not aten.expand.default:
        sizes = [_length(place, rank) if d == place.dim else e for d, e in enumerate(sizes)]
    target = node.target if node.target is aten.expand.default else aten.reshape.default
    return target, (args[0], sizes), kwargs


@_local(aten.unflatten.int)
def _unflattened(node: fx.Node, s: Strategy, rank: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    place = s.outputs[0]
    first = args[1] % value_of(operands(node)[0]).ndim
    sizes = list(args[2])
    at = place.dim - first
    if place.cut is not None and 0 <= at < len(sizes):
        sizes[at] = _own_size(sizes[at], place, results(node)[0], rank)
    return node.target, (args[0], args[1], sizes), kwargs


@_local(aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default)
def _split_apart(node: fx.Node, s: Strategy, rank: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    whole = value_of(operands(node)[0])
    along = int(node.args[-1] if _takes_dim(node) else node.kwargs.get("dim", 0)) % whole.ndim  # type: ignore[arg-type]
    if s.inputs[0].dim != along:
        return node.target, args, kwargs
    return aten.split_with_sizes.default, (args[0], [_length(p, rank) for p in s.outputs], along), {}


@_local(aten.slice.Tensor)
def _own_slice(node: fx.Node, s: Strategy, rank: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    place = s.inputs[0]
    bounds = None if place.cut is None else slice_bounds(node, place.dim)
    if bounds is None or place.cut is None:
        return node.target, args, kwargs
    first, stop = (sum(max(0, min(b, at) - a) for a, b in place.cut.parts[rank]) for at in bounds[:2])
    return node.target, (args[0], place.dim, first, stop), {}


@_local(aten.scaled_dot_product_attention.default)
def _own_attention(node: fx.Node, s: Strategy, rank: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    schema = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    bound = {**dict(zip(schema, args, strict=False)), **kwargs}
    place = s.outputs[0]
    if not bound.get("dropout_p") or place.cut is None:
        return node.target, args, kwargs
    options = (bound.get("is_causal", False), bound.get("scale"), bound.get("enable_gqa", False))
    where = (place.dim, place.cut.parts[rank], place.cut.size)
    return attention_part, (*args[:3], bound.get("attn_mask"), bound["dropout_p"], *options, *where), {}


@_local(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
def _squeezed(node: fx.Node, s: Strategy, rank: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Squeeze what the whole value would: a rank's share of length one stays."""
    sizes = extents(value_of(operands(node)[0]))
    asked = args[1] if len(args) > 1 else range(len(sizes))
    dims = {d % len(sizes) for d in ([asked] if isinstance(asked, int) else asked)}
    return aten.squeeze.dims, (args[0], sorted(d for d in dims if sizes[d] == 1)), {}


@_local(aten.group_norm.default)
def _own_groups(node: fx.Node, s: Strategy, rank: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    place = s.outputs[0]
    channels = extents(results(node)[0])[1]
    if place.dim != 1 or channels is None:
        return node.target, args, kwargs
    return node.target, (args[0], args[1] * _length(place, rank) // channels, *args[2:]), kwargs


@_local(aten.conv1d.default, aten.conv2d.default, aten.conv3d.default, aten.conv1d.padding, aten.conv2d.padding,
        aten.conv3d.padding, aten.convolution.default, aten.conv_transpose1d.default, aten.conv_transpose2d.input,
        aten.conv_transpose3d.input)  # fmt: skip
def _own_channels(node: fx.Node, s: Strategy, rank: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if s.inner != "g":
        return node.target, args, kwargs
    at = 8 if node.target is aten.convolution.default else 6
    groups = args[at] if len(args) > at else kwargs["groups"]
    channels = extents(results(node)[0])[1]
    assert channels is not None
    own = groups * _length(s.outputs[0], rank) // channels
    if len(args) > at:
        return node.target, (*args[:at], own, *args[at + 1 :]), kwargs
    return node.target, args, {**kwargs, "groups": own}


@_local(aten.mean.default, aten.mean.dim)
def _mean(node: fx.Node, s: Strategy, rank: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    place = s.inputs[0]
    if s.outputs[0].kind != "partial" or place.cut is None:
        return node.target, args, kwargs
    dims = list(args[1]) if len(args) > 1 and args[1] is not None else []
    keep = bool(args[2]) if len(args) > 2 else bool(kwargs.get("keepdim", False))
    return mean_part, (args[0], dims, keep, _length(place, rank) / place.cut.size), {}


@_local(aten.embedding.default)
def _own_rows(node: fx.Node, s: Strategy, rank: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if s.inner != "v":
        return node.target, args, kwargs
    cut = s.inputs[0].cut
    assert cut is not None
    ((start, stop),) = cut.parts[rank]
    padding = args[2] if len(args) > 2 else kwargs.get("padding_idx", -1)
    return embedding_part, (args[0], args[1], padding, start, stop, cut.size), {}


@_local(aten.cross_entropy_loss.default)
def _own_classes(node: fx.Node, s: Strategy, rank: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    cut = s.inputs[0].cut
    assert cut is not None
    ((start, stop),) = cut.parts[rank]
    reduction = args[3] if len(args) > 3 else kwargs.get("reduction", 1)
    ignored = args[4] if len(args) > 4 else kwargs.get("ignore_index", -100)
    return cross_entropy_part, (args[0], args[1], reduction, ignored, start, stop, cut.width, cut.size), {}


@_local(aten.dropout.default, aten.native_dropout.default)
def _own_mask(node: fx.Node, s: Strategy, rank: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    place = s.inputs[0]
    train = args[2] if len(args) > 2 else kwargs.get("train", True)
    if not args[1] or train is False or place.cut is None:
        return node.target, args, kwargs
    function = dropout_part if node.target is aten.dropout.default else native_dropout_part
    return function, (args[0], args[1], place.dim, place.cut.parts[rank], place.cut.size), {}


__all__ = [
    "Strategy",
    "base_strategies",
    "complete",
    "cut_letter",
    "fits",
    "groups_of",
    "localise",
    "look_through",
    "seed_strategies",
]
