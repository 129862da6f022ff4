"""Which parameters get no gradient, always or in some batches: on one device theirs stays None, which is not zero.

An optimizer leaves a parameter without a gradient alone, and lets one of zeros decay.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from efftra_fx.meta import OUTPUTS, ROLE
from efftra_fx.opaque import is_opaque


def never_given(gm: fx.GraphModule) -> frozenset[str]:
    """Return the parameters from which every way to the loss leads through a detach, or through whole numbers."""
    output = next(n for n in reversed(gm.graph.nodes) if n.op == "output")
    reached: set[fx.Node] = set()
    waiting = [value for value in output.args[0][: OUTPUTS[gm].loss] if isinstance(value, fx.Node)]
    while waiting:
        node = waiting.pop()
        if node in reached or not _differentiable(node):
            continue
        reached.add(node)
        waiting.extend(node.all_input_nodes)
    return frozenset(ROLE[n].name for n in _parameters(gm) if n not in reached)


def seldom_given(gm: fx.GraphModule) -> frozenset[str]:
    """Return the parameters that may get no gradient in some batches: only code that runs as it is reads them."""
    found = set()
    for node in _parameters(gm):
        readers = [n for n in node.users if n.target is not torch.ops.aten.detach.default]
        if readers and all(is_opaque(n.target) for n in readers):
            found.add(ROLE[node].name)
    return frozenset(found)


def _parameters(gm: fx.GraphModule) -> list[fx.Node]:
    return [n for n in gm.graph.nodes if n.op == "placeholder" and ROLE[n].kind == "parameter"]


def _differentiable(node: fx.Node) -> bool:
    value = node.meta.get("val")
    whole = isinstance(value, Tensor) and not (value.is_floating_point() or value.is_complex())
    return node.target is not torch.ops.aten.detach.default and not whole


__all__ = ["never_given", "seldom_given"]
