"""Bring weight gradients into shape: apart from input gradients, in their own memory, laid out like weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from efftra_fx.walks import descendants

from .joint import Joint
from .slices import storages

aten = torch.ops.aten


def separate(graph: fx.Graph) -> None:
    """Compute the weight gradients of convolutions by calls of their own, so that they may run later.

    Torch computes them by separate kernels anyway. Normalisations keep their single call: it
    reads everything once, and their weights are small.
    """
    for node in list(graph.nodes):
        if node.target is not aten.convolution_backward.default:
            continue
        *args, (data, weight, bias) = node.args
        if not data or not (weight or bias):
            continue
        with graph.inserting_after(node):
            apart = graph.create_node(
                "call_function", node.target, (*args, [False, weight, bias]), name=f"{node.name}_weight"
            )
        node.args = (*args, [True, False, False])
        value = node.meta["val"]
        apart.meta = {**node.meta, "val": (None, *value[1:])}
        node.meta["val"] = (value[0], None, None)
        for item in list(node.users):
            if item.args[1] != 0:
                item.args = (apart, item.args[1])


def own_gradients(joint: Joint, weights: tuple[bool, ...]) -> list[fx.Node | None]:
    """Return the weights' gradients, each in memory of its own and laid out like its weight.

    So a caller may add to them in place and reduce them over ranks.
    """
    wanted = [(node, grad) for node, grad, flag in zip(joint.inputs, joint.gradients, weights, strict=True) if flag]
    others = [grad for grad, flag in zip(joint.gradients, weights, strict=True) if not flag]
    given = [node for node in (*joint.inputs, *joint.tangents) if node is not None]
    used = {key for node in (*given, *others, *joint.outputs) if isinstance(node, fx.Node) for key in storages(node)}
    tangential = descendants(joint.graph, {node for node in joint.tangents if node is not None})
    used |= {key for node in joint.graph.nodes if node not in tangential for key in storages(node)}
    result: list[fx.Node | None] = []
    for weight, grad in wanted:
        if grad is not None:
            if not used.isdisjoint(storages(grad)) or grad.meta["val"].stride() != weight.meta["val"].stride():
                grad = _clone(joint.graph, grad, weight)
            used.update(storages(grad))
        result.append(grad)
    return result


def _clone(graph: fx.Graph, grad: fx.Node, weight: fx.Node) -> fx.Node:
    """Copy a gradient into memory of its own, its dimensions in the order in which the weight's lie in memory."""
    stride = weight.meta["val"].stride()
    order = sorted(range(len(stride)), key=lambda dim: -stride[dim])
    back = [order.index(dim) for dim in range(len(order))]
    plain = order == back == list(range(len(order)))
    node = grad if plain else _call(graph, aten.permute.default, grad, order)
    node = _call(graph, aten.clone.default, node, memory_format=torch.contiguous_format)
    return node if plain else _call(graph, aten.permute.default, node, back)


def _call(graph: fx.Graph, target: torch._ops.OpOverload, value: fx.Node, *args: Any, **kwargs: Any) -> fx.Node:
    name = f"{value.name}_{target._schema.name.rpartition('::')[2]}"
    node = graph.create_node("call_function", target, (value, *args), kwargs, name=name)
    node.meta = {**value.meta, "val": target(value.meta["val"], *args, **kwargs)}
    return node
