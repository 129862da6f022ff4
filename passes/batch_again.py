"""prove-batch-again: what was proven to follow the rows although it is made of what mixes them, on more rows.

The few rows of the first proof may hide a mixing: the hardest negative of a row, hinged, is zero with the others
and without them while all are far away. So values that come out of mixed ones are computed for more of the
example's rows and their parts, and that they follow the rows must mean something (see batch_evidence).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor, fx

from efftra_fx.errors import CaptureError
from efftra_fx.meta import BATCH, REDUCED, Split
from efftra_fx.opaque import is_opaque
from efftra_fx.signature import rows_of, take_rows

from .adding import adds_up
from .batch import reads_rows
from .batch_evaluate import Recorder, evaluate_nodes, is_random, moved
from .batch_evidence import differs, feels, read_by
from .batch_relation import relation

_MOST_ROWS = 16
_TOGETHER = ("mixed", "sum")  # what no row has for itself


@dataclass(frozen=True)
class ProveAgain:
    """Write `BATCH` anew on nodes that follow the rows, or seem to, and are made of mixed ones.

    `values` and `inputs` as for `ProveBatch`, with all rows of the example.
    """

    values: Mapping[tuple[str, str], Tensor] = field(repr=False)
    inputs: Sequence[Tensor] = field(repr=False)
    batch_leaves: tuple[int | None, ...] = ()
    name: ClassVar[str] = "prove-batch-again"
    needs: ClassVar[tuple[str, ...]] = ("batch", "free")
    gives: ClassVar[tuple[str, ...]] = ("batch",)

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        doubtful, dims = _after_mixed(gm), self.batch_leaves
        if not doubtful or not self.inputs:
            return gm
        rows = rows_of(self.inputs, dims)
        if rows < 2:
            return gm
        rows = min(rows, _MOST_ROWS)
        inputs = take_rows(self.inputs, dims, slice(0, rows))
        values = {key: moved(tensor) for key, tensor in self.values.items()}
        needed = {*doubtful, *(operand for node in doubtful for operand in read_by(node))}
        try:
            whole = evaluate_nodes(gm, values, inputs, needed)
            cuts = [
                (sizes, [evaluate_nodes(gm, values, take_rows(inputs, dims, part), needed) for part in _parts(sizes)])
                for sizes in dict.fromkeys(((1, rows - 1), (rows // 2, rows - rows // 2), (rows - 1, 1)))
            ]
        except (RuntimeError, IndexError, ValueError, CaptureError):
            return gm  # the first proof was of these rows already, since fewer do not stand alone
        reading, compute = reads_rows(gm, dims), Recorder(gm).compute

        def follows(node: fx.Node) -> set[Split]:
            return {
                relation(whole[node], [part[node] for part in parts], rows, sizes, node in reading)
                for sizes, parts in cuts
            }

        def shown(node: fx.Node) -> bool:
            read = read_by(node)
            other = is_random(node) or any(is_opaque(n.target) for n in (node, *read))  # these got other values already
            for n in () if other else read:
                if BATCH[n].kind not in _TOGETHER or not isinstance(whole[n], Tensor):
                    continue
                others = [part[n] for _, parts in cuts for part in parts]
                if not differs(whole[n], others, follows(n)) or not feels(compute, node, n, whole):
                    return False
            return follows(node) == {BATCH[node]}

        for node in gm.graph.nodes:
            if node not in doubtful or not any(map(_mixes, node.all_input_nodes)):
                continue
            if BATCH[node].kind == "sum" and not REDUCED.on(node) and not adds_up(node, reading):
                BATCH[node] = Split("mixed")
            elif BATCH[node].kind == "rows" and not shown(node):
                BATCH[node] = Split("mixed")
        return gm


def _mixes(node: fx.Node) -> bool:
    """Say whether a tensor is mixed, or, where it is several in one, made of such; a number of rows is no tensor."""
    value = node.meta.get("val")
    if isinstance(value, (tuple, list)):
        return any(map(_mixes, node.all_input_nodes))
    return isinstance(value, Tensor) and BATCH[node].kind in _TOGETHER


def _parts(sizes: tuple[int, int]) -> tuple[slice, slice]:
    return slice(0, sizes[0]), slice(sizes[0], sum(sizes))


def _after_mixed(gm: fx.GraphModule) -> set[fx.Node]:
    """Return the nodes that are said not to be mixed, and come after one that is."""
    after: set[fx.Node] = set()
    for node in gm.graph.nodes:
        if node.op == "call_function" and any(n in after or _mixes(n) for n in node.all_input_nodes):
            after.add(node)
    return {n for n in after if BATCH[n].kind in ("rows", "sum") and isinstance(n.meta.get("val"), Tensor)}


__all__ = ["ProveAgain"]
