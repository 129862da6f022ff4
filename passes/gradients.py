"""Bring weight gradients into shape: apart from input gradients, in their own memory, laid out like weights."""

from __future__ import annotations

import torch
from torch import fx

from .joint import Joint
from .slices import descendants, storages

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
    like = weight.meta["val"]
    formats = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)
    fits = (
        form
        for form in formats
        if like.dim() == _RANKS.get(form, like.dim()) and like.is_contiguous(memory_format=form)
    )
    layout = next(fits, torch.preserve_format)
    clone = graph.create_node(
        "call_function", aten.clone.default, (grad,), {"memory_format": layout}, name=f"{grad.name}_clone"
    )
    clone.meta = {**grad.meta, "val": grad.meta["val"].clone(memory_format=layout)}
    return clone


_RANKS = {torch.channels_last: 4, torch.channels_last_3d: 5}
