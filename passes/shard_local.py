"""The call of one rank of a tensor group: sizes among its arguments become the rank's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from .shard_axes import extents, operands, results, value_of
from .shard_cuts import Placement
from .shard_parts import (
    attention_part,
    cross_entropy_part,
    dropout_part,
    embedding_part,
    mean_part,
    native_dropout_part,
)
from .shard_rules import Strategy, slice_bounds, takes_dim

aten = torch.ops.aten


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
    along = int(node.args[-1] if takes_dim(node) else node.kwargs.get("dim", 0)) % whole.ndim  # type: ignore[arg-type]
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


__all__ = ["localise"]
