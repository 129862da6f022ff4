"""prove-batch: how each node's value follows the batch.

Every node is computed for a small batch as a whole and for its parts, in double precision,
with parameters moved off special values (a zero gain would hide what is behind it) and
random masks fixed. How whole and parts relate is written down: rows, whole, sum, or mixed.
The dimension comes from the shapes; equality of values is the proof that the rows of a
part do not feel the rows of another. The batch is cut in two ways, so that no row stands
alone by chance. A value that is computed from rows is never called the same for all parts
because it happens to be: only what reads no row, or just the shape of rows, is. An operator
that cannot be computed of a part (the two best rows of one) needs the whole batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, fx

from efftra_fx.meta import BATCH, FREE, OUTPUTS, REDUCED, ROLE, Split
from efftra_fx.opaque import needs_whole_batch
from efftra_fx.signature import rows_of, take_rows

from .adding import adds_up
from .batch_backward import mixing_backwards
from .batch_evaluate import EMPTY, NOT_ALONE, Recorder, evaluate, evaluate_nodes, is_random, moved
from .batch_opaque import deciding_together, operands_of_opaque
from .batch_relation import relation
from .batch_values import mixing_with_other_values

_MOST_ROWS = 16
_SHAPE_ONLY = EMPTY | frozenset(
    {
        torch.ops.aten.sym_size.int,
        torch.ops.aten.zeros_like.default,
        torch.ops.aten.ones_like.default,
        torch.ops.aten.full_like.default,
        torch.ops.aten.new_zeros.default,
        torch.ops.aten.new_ones.default,
        torch.ops.aten.new_full.default,
    }
)
_LIKE_ANOTHER = frozenset(
    {
        torch.ops.aten.type_as.default,
        torch.ops.aten.expand_as.default,
        torch.ops.aten.view_as.default,
        torch.ops.aten.reshape_as.default,
        torch.ops.aten.to.other,
    }
)


@dataclass(frozen=True)
class ProveBatch:
    """Write `BATCH` and `FREE` on every node.

    `values` has the real tensor of every parameter, buffer and constant by (kind, name);
    `inputs` a few of the example's rows, at least two; `every` all of them, which are taken where the few do not
    stand alone (rows that name each other by number). What `trains` must go row by row backward too.
    """

    values: Mapping[tuple[str, str], Tensor] = field(repr=False)
    inputs: Sequence[Tensor] = field(repr=False)
    batch_leaves: tuple[int | None, ...] = ()
    every: Sequence[Tensor] = field(default=(), repr=False)
    trains: bool = True
    name: ClassVar[str] = "prove-batch"
    needs: ClassVar[tuple[str, ...]] = ("role", "outputs")
    gives: ClassVar[tuple[str, ...]] = ("batch", "free")

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        values = {key: moved(tensor) for key, tensor in self.values.items()}
        inputs = self.inputs
        try:
            whole = evaluate_nodes(gm, values, inputs)
        except NOT_ALONE:
            if not self.every:
                raise
            inputs = self.every
            whole = evaluate_nodes(gm, values, inputs)
        rows = rows_of(inputs, self.batch_leaves)
        mark_free(gm)
        reading = reads_rows(gm, self.batch_leaves)
        alike, refused = self.rows_alike(gm, inputs), set[fx.Node]()
        for middle in dict.fromkeys((1, rows - 1)):
            cut = (slice(0, middle), slice(middle, rows))
            parts = []
            for part in cut:
                recorder = Recorder(gm, whole=whole)
                parts.append(evaluate(recorder, gm, values, take_rows(inputs, self.batch_leaves, part)))
                refused |= recorder.refused
            undivided = _undivided(gm, refused)
            for node in gm.graph.nodes:
                if node.op == "output":
                    continue
                if node in undivided:
                    BATCH[node] = Split("mixed")
                    continue
                sizes = [middle, rows - middle]
                found = relation(whole[node], [p[node] for p in parts], rows, sizes, node in reading)
                unsure = found.kind == "sum" and node in alike  # rows mixed up give the same sum while they are alike
                if unsure and any(BATCH[n].kind == "mixed" for n in node.all_input_nodes):
                    found = Split("mixed")
                if found.kind == "sum" and not REDUCED.on(node) and not adds_up(node, reading):
                    found = Split("mixed")
                if middle == 1 or BATCH[node] == found:
                    BATCH[node] = found
                else:
                    BATCH[node] = Split("mixed")
        for node in _undivided(gm, mixing_backwards(gm, whole, parts, sizes)) if self.trains else ():
            if node.op != "output":
                BATCH[node] = Split("mixed")
        for node in _undivided(gm, self.deciding(gm, values)):
            if node.op != "output":
                BATCH[node] = Split("mixed")
        compute = Recorder(gm).compute
        for node in mixing_with_other_values(gm, whole, parts, sizes, reading, compute):
            BATCH[node] = Split("mixed")
        return gm

    def deciding(self, gm: fx.GraphModule, values: Mapping[tuple[str, str], Tensor]) -> set[fx.Node]:
        """Return the nodes whose own code decides by several rows at once, as more rows than the first few show."""
        read = operands_of_opaque(gm)
        if not read:
            return set()
        inputs = self.every or self.inputs
        rows = every = rows_of(inputs, self.batch_leaves)
        if self.every and rows > _MOST_ROWS:
            rows = _MOST_ROWS
            inputs = take_rows(inputs, self.batch_leaves, slice(0, rows))
        try:
            whole = evaluate_nodes(gm, values, inputs, read)
        except NOT_ALONE:
            return set()  # the first proof was of all rows already, since fewer do not stand alone
        return deciding_together(gm, whole, rows, every)

    def rows_alike(self, gm: fx.GraphModule, inputs: Sequence[Tensor]) -> set[fx.Node]:
        """Return the nodes that read an input whose rows are all the same."""
        same = [
            d is not None and bool((t == t.narrow(d, 0, 1)).all())
            for t, d in zip(inputs, self.batch_leaves, strict=True)
        ]
        return reads_rows(gm, [0 if alike else None for alike in same])


def _undivided(gm: fx.GraphModule, refused: AbstractSet[fx.Node]) -> set[fx.Node]:
    """Return the nodes that must see the whole batch, or `refused` a part of it, and all that follows from them."""
    found: set[fx.Node] = set(refused)
    for node in gm.graph.nodes:
        whole = node.op == "call_function" and needs_whole_batch(node.target)
        if whole or any(n in found for n in node.all_input_nodes):
            found.add(node)
    return found


def reads_rows(gm: fx.GraphModule, batch_leaves: Sequence[int | None]) -> set[fx.Node]:
    """Return the nodes whose values are computed from rows of the batch, and not just from how many there are."""
    leaves = iter(batch_leaves)
    reading: set[fx.Node] = set()
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            if ROLE[node].kind == "input" and next(leaves) is not None:
                reading.add(node)
        elif node.target not in _SHAPE_ONLY and any(n in reading for n in _read(node)):
            reading.add(node)
    return reading


def _read(node: fx.Node) -> list[fx.Node]:
    """Return the operands whose values a node reads; of some it takes the type or the size alone."""
    if node.target in _LIKE_ANOTHER:
        return [n for n in node.args[:1] if isinstance(n, fx.Node)]
    return node.all_input_nodes


def mark_free(gm: fx.GraphModule) -> None:
    """Write `FREE` on nodes that need only inputs, constants and buffers that the step does not change."""
    written = set(OUTPUTS[gm].buffers)
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            role = ROLE[node]
            FREE[node] = role.kind in ("input", "constant") or (role.kind == "buffer" and role.name not in written)
        elif node.op != "output":
            FREE[node] = not is_random(node) and all(FREE[n] for n in node.all_input_nodes)


__all__ = ["ProveBatch", "mark_free", "reads_rows"]
