"""split-stages: one graph a stage, and the values that cross between them.

A value that needs no parameter is computed again in each stage that reads it, from the
inputs, which every rank has; so only values that depend on parameters cross.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor, fx

from efftra_fx.errors import PlanError
from efftra_fx.meta import BATCH, BLOCK, CONSTANTS, FREE, OUTPUTS, ROLE, STAGE, Role
from efftra_fx.program import Parameter, Value, Wiring


@dataclass(frozen=True)
class StageGraph:
    """The forward graph of one stage.

    Placeholders have roles: parameters, buffers, constants, inputs, and "value" for
    what earlier stages send. Outputs are, in order, the crossing values `sends`, the
    `boundaries` of the loss, new values of `buffers`, and `parts` of what other buffers become.
    """

    gm: fx.GraphModule
    sends: tuple[str, ...]
    boundaries: tuple[str, ...]
    buffers: tuple[str, ...]
    parts: tuple[str, ...] = ()

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of all outputs, in order."""
        return (*self.sends, *self.boundaries, *self.buffers, *self.parts)

    @property
    def roles(self) -> tuple[Role, ...]:
        """Roles of the placeholders, in order."""
        return tuple(ROLE[n] for n in self.gm.graph.nodes if n.op == "placeholder")


@dataclass(frozen=True)
class AssignStages:
    """Write `STAGE` on every node with a block; `stops` are the blocks behind each stage's last."""

    stops: tuple[int, ...]
    name: ClassVar[str] = "split-stages"
    needs: ClassVar[tuple[str, ...]] = ("block",)
    gives: ClassVar[tuple[str, ...]] = ("stage",)

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        for node in gm.graph.nodes:
            if BLOCK.on(node):
                STAGE[node] = next(s for s, stop in enumerate(self.stops) if BLOCK[node] < stop)
        return gm


def split_stages(
    gm: fx.GraphModule,
    stages: int,
    allow_empty: bool = False,
    held: Mapping[str, Collection[int]] = MappingProxyType({}),
) -> tuple[StageGraph, ...]:
    """Return one graph a stage; needs `STAGE` on every node that has a block.

    A stage that is to have `held` a parameter takes it though none of its nodes reads it, as long as another's does.
    Raises PlanError where a stage has no node, unless that is allowed.
    """
    output = next(n for n in reversed(gm.graph.nodes) if n.op == "output")
    outputs = OUTPUTS[gm]
    results = list(output.args[0])
    place = _places(gm, results)
    crossing = _crossing(gm, place)
    parameters = [n for n in gm.graph.nodes if n.op == "placeholder" and ROLE[n].kind == "parameter" and n.users]
    graphs = []
    for stage in range(stages):
        own = [n for n in gm.graph.nodes if STAGE.get(n) == stage and n.op == "call_function"]
        if not own and not allow_empty:
            raise PlanError(f"stage {stage} has no node; use fewer stages")
        sends = [n for n in own if n in crossing]
        bounds = [(n, n.name) for n in results[: outputs.loss] if place[n] == stage]
        last = outputs.loss + len(outputs.buffers)
        news = [(n, m) for n, m in zip(results[outputs.loss : last], outputs.buffers, strict=True) if place[n] == stage]
        parts = [n for n in results[last:] if place[n] == stage]
        wanted = [*sends, *(n for n, _ in bounds), *(n for n, _ in news), *parts]
        graph = extract(gm, own, wanted, [n for n in parameters if stage in held.get(ROLE[n].name, ())])
        graphs.append(
            StageGraph(
                graph,
                tuple(n.name for n in sends),
                tuple(name for _, name in bounds),
                tuple(name for _, name in news),
                tuple(n.name for n in parts),
            )
        )
    return tuple(graphs)


def _places(gm: fx.GraphModule, results: Sequence[fx.Node]) -> dict[fx.Node, int]:
    """Return the stage of each graph output; outputs that are placeholders belong to a stage that reads them."""
    last = max((STAGE[n] for n in gm.graph.nodes if STAGE.on(n)), default=0)
    places = {}
    for node in results:
        if STAGE.on(node):
            places[node] = STAGE[node]
        else:
            readers = [STAGE[u] for u in node.users if STAGE.on(u)]
            places[node] = max(readers, default=last)
    return places


def _crossing(gm: fx.GraphModule, place: dict[fx.Node, int]) -> dict[fx.Node, tuple[int, ...]]:
    crossing: dict[fx.Node, tuple[int, ...]] = {}
    for node in gm.graph.nodes:
        if not STAGE.on(node):
            continue
        readers = {STAGE[u] for u in node.users if STAGE.on(u)} | ({place[node]} if node in place else set())
        later = tuple(sorted(s for s in readers if s > STAGE[node]))
        if later:
            crossing[node] = later
    return crossing


def extract(
    gm: fx.GraphModule, own: Sequence[fx.Node], wanted: Sequence[fx.Node], also: Sequence[fx.Node] = ()
) -> fx.GraphModule:
    """Return a graph that computes `own` nodes; what else it needs is a placeholder or, if free, computed again.

    It takes the placeholders `also` whether or not it reads them.
    """
    inside = set(own)
    needed: set[fx.Node] = set(also)
    pending = [n for node in (*own, *wanted) for n in (node, *node.all_input_nodes)]
    while pending:
        node = pending.pop()
        if node in needed:
            continue
        needed.add(node)
        if node not in inside and FREE[node]:
            pending.extend(node.all_input_nodes)
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        if node in needed and node.op == "placeholder":
            copies[node] = graph.node_copy(node)
    for node in gm.graph.nodes:
        if node in needed and node.op != "placeholder" and node not in inside and not FREE[node]:
            copies[node] = graph.placeholder(node.name)
            copies[node].meta.update(node.meta)
            ROLE[copies[node]] = Role("value", node.name)
    for node in gm.graph.nodes:
        if node in needed and node not in copies and node.op == "call_function":
            copies[node] = graph.node_copy(node, lambda n: copies[n])
            if node.target is torch.ops.aten.view.default:  # what crosses arrives contiguous, so a view may need a copy
                copies[node].target = torch.ops.aten.reshape.default
    graph.output(tuple(copies[n] for n in wanted))
    result = fx.GraphModule(gm, graph)
    CONSTANTS[result] = CONSTANTS[gm]
    return result


def wire(gm: fx.GraphModule, stages: tuple[StageGraph, ...], joined: bool) -> Wiring:
    """Return the distributed graph as plain data: values with their contracts, parameters with their stages."""
    nodes = {n.name: n for n in gm.graph.nodes}
    roles = [{(r.kind, r.name): r for r in stage.roles} for stage in stages]
    moving, useful = needs_gradient(gm), reaches_loss(gm)
    values = []
    for index, stage in enumerate(stages):
        for name in stage.sends:
            node = nodes[name]
            consumers = tuple(s for s in range(len(stages)) if ("value", name) in roles[s])
            gradients = tuple(
                node in moving and _differentiable(node.meta["val"]) and _feeds(node, consumer, useful, stages)
                for consumer in consumers
            )
            values.append(_value(node, index, consumers, gradients))
    parameters = _parameters(gm, roles, useful)
    trained = {p.name for p in parameters if p.trainable}
    returned = {(v.name, c) for v in values for c, g in zip(v.consumers, v.gradients, strict=True) if g}
    backward = tuple(
        any(
            (role.kind == "parameter" and role.name in trained)
            or (role.kind == "value" and (role.name, index) in returned)
            for role in held.values()
        )
        for index, held in enumerate(roles)
    )
    return Wiring(len(stages), tuple(values), parameters, backward, joined)


def needs_gradient(gm: fx.GraphModule) -> set[fx.Node]:
    """Return the nodes that depend on a trainable parameter through differentiable operators."""
    moving: set[fx.Node] = set()
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            if ROLE[node].trainable:
                moving.add(node)
        elif node.op == "call_function" and any(n in moving for n in node.all_input_nodes) and _passes_gradient(node):
            moving.add(node)
    return moving


def reaches_loss(gm: fx.GraphModule) -> set[fx.Node]:
    """Return the nodes to which a gradient comes back from a boundary of the loss."""
    output = next(n for n in reversed(gm.graph.nodes) if n.op == "output")
    reached: set[fx.Node] = set()
    pending = [n for n in output.args[0][: OUTPUTS[gm].loss] if _carries_gradient(n)]
    while pending:
        node = pending.pop()
        if node in reached:
            continue
        reached.add(node)
        if node.op == "call_function" and _passes_gradient(node):
            pending.extend(n for n in node.all_input_nodes if _carries_gradient(n))
    return reached


def _passes_gradient(node: fx.Node) -> bool:
    return node.target is not torch.ops.aten.detach.default and _carries_gradient(node)


def _carries_gradient(node: fx.Node) -> bool:
    value = node.meta.get("val")
    several = value if isinstance(value, (tuple, list)) else (value,)
    return any(isinstance(v, Tensor) and _differentiable(v) for v in several)


def _feeds(node: fx.Node, consumer: int, useful: set[fx.Node], stages: Sequence[StageGraph]) -> bool:
    """Say whether a gradient of the value comes back from one of the stages that read it."""
    if node.name in stages[consumer].boundaries:
        return True
    users = [u for u in node.users if STAGE.get(u) == consumer]
    return any(u in useful and _passes_gradient(u) for u in users)


def _differentiable(value: Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


def _value(node: fx.Node, producer: int, consumers: tuple[int, ...], gradients: tuple[bool, ...]) -> Value:
    split = BATCH[node]
    value = node.meta["val"]
    shape = tuple(
        split.per_row if split.kind == "rows" and d == split.dim else int(size) for d, size in enumerate(value.shape)
    )
    dtype = str(value.dtype).removeprefix("torch.")
    return Value(node.name, dtype, shape, split.kind, split.dim, producer, consumers, gradients)


def _parameters(
    gm: fx.GraphModule, roles: Sequence[dict[tuple[str, str], Role]], useful: set[fx.Node]
) -> tuple[Parameter, ...]:
    result = []
    for node in gm.graph.nodes:
        if node.op != "placeholder" or ROLE[node].kind != "parameter":
            continue
        role, value = ROLE[node], node.meta["val"]
        users = tuple(s for s, held in enumerate(roles) if ("parameter", role.name) in held)
        if users:
            dtype = str(value.dtype).removeprefix("torch.")
            result.append(
                Parameter(
                    role.name, dtype, tuple(int(d) for d in value.shape), users, role.trainable and node in useful
                )
            )
    return tuple(result)
