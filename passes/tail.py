"""Where micro-batches end: the boundary between what parts compute and what the whole batch computes once.

    parts of the batch:   ... -> S_1, S_2, ...        (partial sums, one set a part)
    whole batch, once:    loss = T(sum of S_1, sum of S_2, ..., inputs)

Where T is linear in every S that depends on a parameter, the derivatives dT/dS are known
before any forward has run, and each part's backward can start at once. Otherwise all
forwards come first, the parts are joined, and then all backwards run.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from efftra_fx.errors import LossError
from efftra_fx.meta import BATCH, CONSTANTS, FREE, OUTPUTS, PATH, ROLE, SOURCE, Role
from efftra_fx.walks import ancestors

from .slices import draws

aten = torch.ops.aten
_KEEPS = frozenset(
    {
        aten.neg.default,
        aten._to_copy.default,
        aten.clone.default,
        aten.alias.default,
        aten.view.default,
        aten.reshape.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.unsqueeze.default,
        aten.expand.default,
        aten.select.int,
        aten.slice.Tensor,
        aten.sum.default,
        aten.sum.dim_IntList,
        aten.mean.default,
        aten.mean.dim,
        aten.stack.default,
        aten.cat.default,
        aten.permute.default,
        aten.transpose.int,
        aten.add.Tensor,
        aten.sub.Tensor,
        aten.add.Scalar,
        aten.sub.Scalar,
        aten.rsub.Scalar,
        aten.rsub.Tensor,
        operator.getitem,
    }
)
_PRODUCTS = frozenset({aten.mul.Tensor, aten.mul.Scalar})
_QUOTIENTS = frozenset({aten.div.Tensor, aten.div.Scalar})


@dataclass(frozen=True)
class Boundary:
    """A value that parts hand to the whole: partial sums, rows, or a value that is the same for all parts."""

    name: str
    kind: str  # "sum" | "rows" | "whole"
    dim: int = 0
    buffer: bool = False  # it is a buffer of the model as the step found it


@dataclass(frozen=True)
class Tail:
    """The part of the loss that is computed once for the whole batch.

    `gm` takes what its placeholders' roles say; role kind "boundary" stands for the
    joined value of the boundary with that name. It returns the loss, a scalar.
    """

    gm: fx.GraphModule
    boundaries: tuple[Boundary, ...]
    linear: bool

    @property
    def random(self) -> bool:
        """Say whether it draws random numbers."""
        return any(n.op == "call_function" and draws(n) for n in self.gm.graph.nodes)

    @property
    def needs_inputs(self) -> bool:
        """Say whether dT/dS depends on the batch's values and not just on its size."""
        return any(n.op == "placeholder" and ROLE[n].kind == "input" for n in self.gm.graph.nodes)


def split_tail(gm: fx.GraphModule, training: bool = True) -> tuple[fx.GraphModule, Tail]:
    """Cut the loss's tail off; the returned graph gives the boundary values, then what else it gave.

    Needs `BATCH` and `FREE`. For an evaluation graph (`training=False`) the tail returns the list of all
    outputs of the model. Raises LossError where the loss depends on no parameter.
    """
    output = next(n for n in reversed(gm.graph.nodes) if n.op == "output")
    roots = OUTPUTS[gm].loss
    results = list(output.args[0][:roots])
    if training and FREE[results[0]]:
        raise LossError("the loss depends on no parameter of the model; nothing can be trained")
    inside, boundary = _walk([r for r in results if isinstance(r, fx.Node)])
    tail_gm = extract_tail(gm, results[0] if training else results, inside, boundary)
    kept = [n for n in gm.graph.nodes if n in boundary]
    linear = all(BATCH[n].kind != "rows" for n in kept) and _is_linear(inside, boundary)
    held = [n.op == "placeholder" and ROLE[n].kind == "buffer" for n in kept]
    if not linear:
        kept = _at_the_end(gm, tail_gm, kept, output)
    output.args = ((*kept, *output.args[0][roots:]),)
    OUTPUTS[gm] = replace(OUTPUTS[gm], loss=len(kept))
    gm.graph.eliminate_dead_code()
    gm.recompile()
    boundaries = tuple(Boundary(n.name, BATCH[n].kind, BATCH[n].dim, b) for n, b in zip(kept, held, strict=True))
    return gm, Tail(tail_gm, boundaries, linear)


def is_separable(gm: fx.GraphModule) -> bool:
    """Say whether the loss is linear in sums over parts of the batch; needs `BATCH` and `FREE`."""
    output = next(n for n in reversed(gm.graph.nodes) if n.op == "output")
    inside, boundary = _walk([n for n in output.args[0][:1] if isinstance(n, fx.Node)])
    return all(BATCH[n].kind != "rows" for n in boundary) and _is_linear(inside, boundary)


def _at_the_end(gm: fx.GraphModule, tail: fx.GraphModule, kept: list[fx.Node], output: fx.Node) -> list[fx.Node]:
    """Carry boundary values to the end of the chain, so that the last stage has all of them when parts are joined."""
    holders = {ROLE[n].name: n for n in tail.graph.nodes if n.op == "placeholder" and ROLE[n].kind == "boundary"}
    carried = []
    for node in kept:
        with gm.graph.inserting_before(output):
            copy = gm.graph.call_function(aten.alias.default, (node,))
        copy.meta.update(node.meta)
        ROLE[holders[node.name]] = Role("boundary", copy.name)
        carried.append(copy)
    return carried


def _walk(roots: Sequence[fx.Node]) -> tuple[set[fx.Node], set[fx.Node]]:
    inside: set[fx.Node] = set()
    boundary: set[fx.Node] = set()
    pending = list(roots)
    while pending:
        node = pending.pop()
        if node in inside or node in boundary or FREE[node]:
            continue
        several = isinstance(node.meta.get("val"), (tuple, list))
        if not several and BATCH[node].kind in ("sum", "whole", "rows"):
            boundary.add(node)
        elif node.op == "placeholder":
            boundary.add(node)
        else:
            inside.add(node)
            pending.extend(node.all_input_nodes)
    return inside, boundary


def extract_tail(gm: fx.GraphModule, result: Any, inside: set[fx.Node], boundary: set[fx.Node]) -> fx.GraphModule:
    """Return the graph of a result, or of a list of them, from boundary values."""
    needed = ancestors(_nodes(result), boundary)
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        if node in boundary:
            copies[node] = graph.placeholder(node.name)
            copies[node].meta["val"] = node.meta.get("val")
            ROLE[copies[node]] = Role("boundary", node.name)
        elif node in needed:
            copies[node] = graph.node_copy(node, lambda n: copies[n])
    graph.output(fx.node.map_arg(result, lambda n: copies[n]))
    tail = fx.GraphModule(gm, graph)
    CONSTANTS[tail] = CONSTANTS[gm]
    return tail


def _nodes(result: Any) -> list[fx.Node]:
    items = result if isinstance(result, list) else [result]
    return [item for item in items if isinstance(item, fx.Node)]


def _is_linear(inside: set[fx.Node], boundary: set[fx.Node]) -> bool:
    """Say whether the tail is affine in its boundary values, by the operators that it is made of."""
    moving = inside | boundary
    for node in inside:
        operands = [n for n in node.all_input_nodes if n in moving]
        if not operands:
            continue
        if node.target in _KEEPS:
            continue
        if node.target in _PRODUCTS and sum(a in moving for a in node.args if isinstance(a, fx.Node)) == 1:
            continue
        if node.target in _QUOTIENTS and node.args[1] not in moving:
            continue
        return False
    return True


def mixing_node(tail: Tail) -> str:
    """Name the first node of the tail that looks at several samples together, with its place."""
    for node in tail.gm.graph.nodes:
        if node.op == "call_function" and not FREE.get(node):
            place = SOURCE.get(node) or PATH.get(node) or "the loss"
            return f"{node.name} ({place})"
    return "the loss"
