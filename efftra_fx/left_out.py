"""Find code that runs as it is and leaves out, by chance, what comes to it.

A decoder that drops all its layers reads nothing of its encoder, whose parameters then have no gradient on one
device (None). In a graph they would have zeros, since what stands between the two passes zeros on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from efftra_fx.chance import EXTREMES
from efftra_fx.first_difference import run_nodes
from efftra_fx.meta import OUTPUTS, PATH, ROLE
from efftra_fx.opaque import draws, is_opaque, pulled_back
from efftra_fx.walks import ancestors

Edge = tuple[fx.Node, fx.Node]


def may_leave_out(gm: fx.GraphModule, operands: Sequence[Any]) -> tuple[str, str] | None:
    """Return the path of code that runs as it is, and a parameter that gets no gradient where it leaves things out.

    Such code is tried on these operands with the least and the most that it may draw.
    """
    drawing = [n for n in gm.graph.nodes if is_opaque(n.target) and draws(n.target)]
    if not drawing:
        return None
    runs = run_nodes(gm, operands)
    if isinstance(runs, str):
        return None
    results = next(n for n in reversed(gm.graph.nodes) if n.op == "output").args[0][: OUTPUTS[gm].loss]
    every = _parameters(ancestors(results))
    for node in drawing:
        lost = every - _parameters(_reached(results, {(node, n) for n in _left_out(node, runs.values)}))
        if lost:
            return PATH.get(node) or "", min(lost)
    return None


def _left_out(node: fx.Node, values: dict[fx.Node, Any]) -> set[fx.Node]:
    """Return the operands, parameters aside, that get no gradient with some draw."""
    operands: Any = node.args[0]
    given = [values[n].detach() for n in operands]
    found: set[fx.Node] = set()
    for unit in EXTREMES:
        try:
            gradients = pulled_back(node.target, given, lambda results: [torch.ones_like(r) for r in results], unit)
        except (RuntimeError, ValueError, IndexError):  # such draws need not be possible
            continue
        reached = {n for n, g in zip(operands, gradients, strict=True) if g is not None}
        asked = {n for n, t in zip(operands, given, strict=True) if n.op == "call_function" and _differentiable(t)}
        found |= asked - reached
    return found


def _reached(results: Sequence[Any], cut: set[Edge]) -> set[fx.Node]:
    """Return the nodes from which a way leads to the results that takes none of these edges."""
    waiting = [value for value in results if isinstance(value, fx.Node)]
    found: set[fx.Node] = set()
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting.extend(n for n in node.all_input_nodes if (node, n) not in cut)
    return found


def _parameters(nodes: set[fx.Node]) -> set[str]:
    return {ROLE[n].name for n in nodes if n.op == "placeholder" and ROLE[n].trainable}


def _differentiable(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


__all__ = ["may_leave_out"]
