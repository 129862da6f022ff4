"""Take from a joint graph what costs time and changes no bit: views of views, repeated work."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import fx

from efftra_fx.collectives import exchange_of
from efftra_fx.operators import is_view

from .record import is_blank
from .slices import argument, is_random

aten = torch.ops.aten

_RESHAPES = frozenset({aten.view.default, aten._unsafe_view.default})


def simplify(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Rewrite `graph` in place; return for each node that was replaced what stands for it now.

    Removed are views that look at their memory as an earlier value does, intermediate reshapes,
    reshapes that only drop the dimension that a sum has kept, and repetitions of the same call.
    Exchanges with other ranks all stay: what is the same on this rank may differ on another, whose shares
    have other bounds, and each must be met as often on all.
    """
    replaced: dict[fx.Node, fx.Node] = {}
    seen: dict[Hashable, fx.Node] = {}
    looks: dict[Hashable, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op in ("output", "placeholder", "get_attr"):
            if "look" in node.meta:
                looks.setdefault(node.meta["look"], node)
            continue
        _skip_reshape(node)
        _sum_without_kept(node)
        key = _call_key(node)
        earlier = looks.get(node.meta.get("look")) if _is_view_node(node) else seen.get(key)
        if earlier is not None:
            node.replace_all_uses_with(earlier)
            graph.erase_node(node)
            replaced[node] = earlier
            continue
        seen[key] = node
        if "look" in node.meta:
            looks.setdefault(node.meta["look"], node)
    return replaced


def _is_view_node(node: fx.Node) -> bool:
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and is_view(target) and target is not aten.as_strided.default


def _call_key(node: fx.Node) -> Hashable:
    if is_random(node) or is_blank(node) or node.op != "call_function" or exchange_of(node.target, node.args):
        return node
    return (node.target, _freeze(node.args), _freeze(node.kwargs))


def _freeze(value: Any) -> Hashable:
    if isinstance(value, (list, tuple)):
        return tuple(_freeze(item) for item in value)
    if isinstance(value, dict):
        return tuple((key, _freeze(item)) for key, item in sorted(value.items()))
    if isinstance(value, slice):
        return ("slice", value.start, value.stop, value.step)
    return value if isinstance(value, fx.Node) else (type(value), str(value))


def _skip_reshape(node: fx.Node) -> None:
    """Reshape what an earlier reshape has looked at, if that can be seen without a copy."""
    while node.target in _RESHAPES and isinstance(base := node.args[0], fx.Node) and base.target in _RESHAPES:
        below = base.args[0]
        assert isinstance(below, fx.Node)
        value, wanted = below.meta["val"], node.meta["val"]
        try:
            direct = value.view(wanted.shape)
        except RuntimeError:
            return
        if direct.stride() != wanted.stride():
            return
        node.replace_input_with(base, below)


def _sum_without_kept(node: fx.Node) -> None:
    """Turn a sum that keeps its dimensions and a reshape that drops them into one sum."""
    total = node.args[0] if node.target in _RESHAPES else None
    if not isinstance(total, fx.Node) or total.target is not aten.sum.dim_IntList or len(total.users) != 1:
        return
    dims = argument(total, "dim")
    if not dims or not argument(total, "keepdim"):
        return
    kept = total.meta["val"].shape
    summed = {dim % len(kept) for dim in dims}
    if tuple(size for dim, size in enumerate(kept) if dim not in summed) != tuple(node.meta["val"].shape):
        return
    node.target = aten.sum.dim_IntList
    node.args = (total.args[0], dims, False)
    node.kwargs = dict(total.kwargs)
