"""insert-comm: the distributed graph, in which every cell is a call and every message a node.

    x ── rows [0:3) ── stage_0 (rank 0) ── send ── recv ── stage_1 (rank 2) ──┐
      └─ rows [3:6) ── stage_0 (rank 1) ── send ── recv ── stage_1 (rank 2) ──┴─ sum over ranks ── tail ── loss

It covers the whole step's forward: all micro-batches on all replicas, with the rows that
unequal numbers of replicas exchange. In one process it can be called like the model's own
graph and gives the same loss; autograd through it gives the same gradients, messages
going back where they came from.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from efftra_fx import ops
from efftra_fx.meta import CONSTANTS, OUTPUTS, ROLE, STAGE, Outputs, Role
from efftra_fx.plan import Plan
from efftra_fx.program import Value, Wiring

from .lower import is_reduced, reduce_group
from .news import News
from .routes import Cell, Route, find_routes, lay_out_cells
from .split import StageGraph
from .tail import Boundary, Tail


@dataclass(frozen=True)
class InsertComm:
    """Lay the stages out over ranks and micro-batches, for a global batch of `rows` rows.

    `dims` says along which dimension each input has its rows (None: it has none); buffers in `once` are
    written once a step and not once a part. The result takes the placeholders of the given graph, in their
    order, and returns the loss, then new values of buffers in the order of their names.
    """

    plan: Plan
    wiring: Wiring
    stages: tuple[StageGraph, ...]
    tail: Tail
    dims: Mapping[str, int | None]
    rows: int
    once: frozenset[str] = frozenset()
    news: News | None = None
    name: ClassVar[str] = "insert-comm"
    needs: ClassVar[tuple[str, ...]] = ("role", "outputs", "stage")
    gives: ClassVar[tuple[str, ...]] = ()

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        builder = _Builder(self, gm)
        for micro_batch in range(len(builder.cells[0])):
            for index in range(len(self.stages)):
                cells = builder.cells[index][micro_batch]
                if index in self.wiring.synced:
                    builder.compute_together(cells)
                    continue
                for cell in cells:
                    builder.compute(cell)
        builder.finish()
        modules = {f"stage_{i}": stage.gm for i, stage in enumerate(self.stages)} | {"tail": self.tail.gm}
        if self.news is not None:
            modules["news"] = self.news.tail.gm
        result = fx.GraphModule(modules, builder.graph)
        names = sorted(builder.buffers)
        OUTPUTS[result] = Outputs(1, tuple(names))
        CONSTANTS[result] = CONSTANTS[gm]
        return result


_Place = tuple[str, int, int]  # value, micro-batch, rank


class _Builder:
    """The graph while it grows, cell by cell in the order of the batch."""

    def __init__(self, options: InsertComm, gm: fx.GraphModule) -> None:
        self.options = options
        self.devices = tuple(stage.devices[:: stage.tensor] for stage in options.plan.stages)
        self.cells = lay_out_cells(self.devices, options.rows, options.plan.micro_batches)
        self.values = {value.name: value for value in options.wiring.values}
        self.graph = fx.Graph()
        self.inputs: dict[tuple[str, str], fx.Node] = {}
        self.computed: dict[_Place, fx.Node] = {}
        self.parts: dict[str, list[tuple[Cell, fx.Node]]] = defaultdict(list)
        self.handed: dict[str, list[tuple[Cell, fx.Node]]] = defaultdict(list)  # what new values of buffers are made of
        self.written: dict[tuple[str, int], fx.Node] = {}  # a rank's latest value of a buffer
        self.buffers: dict[str, fx.Node] = {}
        self.arriving: dict[tuple[str, Cell], list[Route]] = defaultdict(list)
        for route in find_routes(options.wiring, self.cells):
            self.arriving[route.value.name, route.target].append(route)
        self._placeholders(gm)

    def _placeholders(self, gm: fx.GraphModule) -> None:
        for node in gm.graph.nodes:
            if node.op == "placeholder":
                copy = self.graph.node_copy(node)
                self.inputs[ROLE[node].kind, ROLE[node].name] = copy
        for parameter in self.options.wiring.parameters:
            if is_reduced(parameter, self.options.wiring, self.devices):
                key = ("parameter", parameter.name)
                ranks = reduce_group(parameter.stages, self.devices)
                self.inputs[key] = self._call(ops.replicate, self.inputs[key], ranks=ranks)

    def _call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        return self.graph.call_function(function, args, kwargs)

    def compute(self, cell: Cell) -> None:
        """Add the call of one cell, with all that it reads, and remember what it gives."""
        stage = self.options.stages[cell.stage]
        operands = tuple(self._operand(role, cell) for role in stage.roles)
        label = f"stage_{cell.stage}_m{cell.micro_batch}_rank{cell.rank}"
        call = self.graph.create_node("call_module", f"stage_{cell.stage}", operands, name=label)
        STAGE[call] = cell.stage
        for position, name in enumerate(stage.outputs):
            output = self._call(operator.getitem, call, position)
            STAGE[output] = cell.stage
            if position < len(stage.sends):
                value = self.values[name]
                _note(output, value.dtype, value.part_shape(cell.stop - cell.start))
                self.computed[name, cell.micro_batch, cell.rank] = output
            elif position >= len(stage.outputs) - len(stage.parts):
                self.handed[name].append((cell, output))
            elif position < len(stage.sends) + len(stage.boundaries):
                self.parts[name].append((cell, output))
            else:
                self.written[name, cell.rank] = output
                if cell.rank == self._keeper(cell.stage, cell.micro_batch):
                    self.buffers[name] = output

    def compute_together(self, cells: Sequence[Cell]) -> None:
        """Add one call for all replicas of a stage that take statistics over the rows of all, and share it out."""
        stage, last = self.options.stages[cells[0].stage], cells[-1]
        whole = Cell(last.stage, last.micro_batch, last.rank, cells[0].start, last.stop)
        operands = tuple(self._joined_operand(role, whole, cells) for role in stage.roles)
        label = f"stage_{whole.stage}_m{whole.micro_batch}_ranks{'_'.join(str(cell.rank) for cell in cells)}"
        call = self.graph.create_node("call_module", f"stage_{whole.stage}", operands, name=label)
        STAGE[call] = whole.stage
        for position, name in enumerate(stage.outputs):
            output = self._call(operator.getitem, call, position)
            STAGE[output] = whole.stage
            if position < len(stage.sends):
                for cell in cells:
                    part = self._share(output, self.values[name], cell, whole)
                    self.computed[name, cell.micro_batch, cell.rank] = part
            elif position >= len(stage.outputs) - len(stage.parts):
                self.handed[name].append((whole, output))
            elif position < len(stage.sends) + len(stage.boundaries):
                self.parts[name].append((whole, output))
            else:
                self.written[name, whole.rank] = self.buffers[name] = output

    def _joined_operand(self, role: Role, whole: Cell, cells: Sequence[Cell]) -> fx.Node:
        if role.kind != "value":
            return self._operand(role, whole)
        parts, value = [self._received(role.name, cell) for cell in cells], self.values[role.name]
        if len(parts) == 1 or value.kind == "whole":
            return parts[0]
        joined = self._call(ops.join_rows, parts, value.dim) if value.kind == "rows" else self._sum(parts)
        STAGE[joined] = whole.stage
        _note(joined, value.dtype, value.part_shape(whole.stop - whole.start))
        return joined

    def _share(self, node: fx.Node, value: Value, cell: Cell, whole: Cell) -> fx.Node:
        """Return what one replica has of a value that was computed for all of them."""
        if value.kind == "rows":
            width = value.shape[value.dim]
            first, stop = (cell.start - whole.start) * width, (cell.stop - whole.start) * width
            node = self._call(ops.take_rows, node, value.dim, first, stop)
        elif value.kind == "sum" and cell.rank != whole.rank:
            node = self._call(torch.zeros, value.shape, dtype=getattr(torch, value.dtype))
        STAGE[node] = cell.stage
        _note(node, value.dtype, value.part_shape(cell.stop - cell.start))
        return node

    def _keeper(self, stage: int, micro_batch: int) -> int:
        """Return the rank whose buffers count: the first replica that has rows."""
        return self.cells[stage][micro_batch][0].rank

    def _operand(self, role: Role, cell: Cell) -> fx.Node:
        if role.kind == "value":
            return self._received(role.name, cell)
        node = self.inputs[role.kind, role.name]
        if role.kind == "buffer":
            return node if role.name in self.options.once else self.written.get((role.name, cell.rank), node)
        dim = self.options.dims.get(role.name) if role.kind == "input" else None
        if dim is None or (cell.start, cell.stop) == (0, self.options.rows):
            return node
        rows = self._call(ops.take_rows, node, dim, cell.start, cell.stop)
        STAGE[rows] = cell.stage
        return rows

    def _received(self, name: str, cell: Cell) -> fx.Node:
        """Return the value as this cell reads it, put together from all parts that come to it."""
        parts = [self._message(route) for route in self.arriving[name, cell]]
        value = self.values[name]
        if len(parts) == 1:
            return parts[0]
        if not parts:  # a partial sum that another replica counts
            joined = self._call(torch.zeros, value.shape, dtype=getattr(torch, value.dtype))
        elif value.kind == "rows":
            joined = self._call(ops.join_rows, parts, value.dim)
        else:
            joined = self._call(ops.add_parts, parts)
        STAGE[joined] = cell.stage
        _note(joined, value.dtype, value.part_shape(cell.stop - cell.start))
        return joined

    def _message(self, route: Route) -> fx.Node:
        value, source, target = route.value, route.source, route.target
        node = self.computed[value.name, source.micro_batch, source.rank]
        if value.kind == "rows" and (route.start, route.stop) != (source.start, source.stop):
            width = value.shape[value.dim]
            first, last = (route.start - source.start) * width, (route.stop - source.start) * width
            node = self._call(ops.take_rows, node, value.dim, first, last)
            STAGE[node] = source.stage
            _note_message(node, route)
        sent = self._call(ops.send, node, source=source.rank, target=target.rank)
        received = self._call(ops.recv, sent, source=source.rank, target=target.rank)
        STAGE[sent], STAGE[received] = source.stage, target.stage
        _note_message(sent, route)
        _note_message(received, route)
        return received

    def finish(self) -> None:
        """Join what the parts hand to the whole batch, call the loss's tail, and return."""
        loss = self._call_tail("tail", self.options.tail, self.parts)
        if self.options.news is not None:
            made = self._call_tail("news", self.options.news.tail, self.handed)
            for index, name in enumerate(self.options.news.buffers):
                self.buffers[name] = self._call(operator.getitem, made, index)
        self.graph.output((loss, *(self.buffers[name] for name in sorted(self.buffers))))

    def _call_tail(self, name: str, tail: Tail, parts: Mapping[str, list[tuple[Cell, fx.Node]]]) -> fx.Node:
        bounds, operands = {bound.name: bound for bound in tail.boundaries}, []
        for node in tail.gm.graph.nodes:
            if node.op == "placeholder":
                role = ROLE[node]
                boundary = role.kind == "boundary"
                found = self._joined(bounds[role.name], parts[role.name]) if boundary else None
                operands.append(self.inputs[role.kind, role.name] if found is None else found)
        return self.graph.call_module(name, tuple(operands))

    def _joined(self, bound: Boundary, parts: list[tuple[Cell, fx.Node]]) -> fx.Node:
        if bound.kind == "whole":
            return parts[0][1]
        ranks = tuple(dict.fromkeys(cell.rank for cell, _ in parts))
        if bound.kind == "rows":
            if len(parts) == 1:
                return parts[0][1]
            owners = tuple(cell.rank for cell, _ in parts)
            return self._call(ops.all_gather, [node for _, node in parts], bound.dim, ranks=owners)
        sums = [self._sum([node for cell, node in parts if cell.rank == rank]) for rank in ranks]
        return sums[0] if len(sums) == 1 else self._call(ops.all_reduce, sums, ranks=ranks)

    def _sum(self, parts: Sequence[fx.Node]) -> fx.Node:
        return parts[0] if len(parts) == 1 else self._call(ops.add_parts, list(parts))


def _note_message(node: fx.Node, route: Route) -> None:
    _note(node, route.value.dtype, route.value.part_shape(route.stop - route.start))


def _note(node: fx.Node, dtype: str, shape: tuple[int, ...]) -> None:
    node.meta["val"] = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")


def operands_of(gm: fx.GraphModule, tensors: Mapping[tuple[str, str], Any], inputs: Mapping[str, Any]) -> list[Any]:
    """Return what a graph with roles takes, in order: inputs by name, all others by (kind, name)."""
    roles = [ROLE[node] for node in gm.graph.nodes if node.op == "placeholder"]
    return [inputs[r.name] if r.kind == "input" else tensors[r.kind, r.name] for r in roles]


__all__ = ["InsertComm", "operands_of"]
