"""prove-batch-again: what was proven to follow the rows although it is made of what mixes them, on more rows.

The few rows of the first proof may hide a mixing: the hardest negative of a row, hinged, is zero with the others
and without them while all are far away. So values that come out of mixed ones are computed for more of the
example's rows and their parts. One that is the same number everywhere tells nothing, and is called mixed too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor, fx

from efftra_fx.errors import CaptureError
from efftra_fx.meta import BATCH, FREE, REDUCED, Split

from .adding import adds_up
from .batch import reads_rows
from .batch_evaluate import evaluate_nodes, moved, take_rows
from .batch_relation import relation

_MOST_ROWS = 16


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
        rows = next(t.shape[d] for t, d in zip(self.inputs, dims, strict=True) if d is not None)
        if rows < 2:
            return gm
        rows = min(rows, _MOST_ROWS)
        inputs = take_rows(self.inputs, dims, slice(0, rows))
        values = {key: moved(tensor) for key, tensor in self.values.items()}
        try:
            whole = evaluate_nodes(gm, values, inputs, doubtful)
            cuts = [
                (sizes, [evaluate_nodes(gm, values, take_rows(inputs, dims, part), doubtful) for part in _parts(sizes)])
                for sizes in dict.fromkeys(((1, rows - 1), (rows // 2, rows - rows // 2), (rows - 1, 1)))
            ]
        except (RuntimeError, IndexError, ValueError, CaptureError):
            return gm  # the first proof was of these rows already, since fewer do not stand alone
        reading = reads_rows(gm, dims)
        for node in gm.graph.nodes:
            if node not in doubtful or not any(map(_mixes, node.all_input_nodes)):
                continue
            if BATCH[node].kind == "sum" and not REDUCED.on(node) and not adds_up(node, reading):
                BATCH[node] = Split("mixed")
            elif BATCH[node].kind == "rows":
                found = {
                    relation(whole[node], [part[node] for part in parts], rows, sizes, node in reading)
                    for sizes, parts in cuts
                }
                if found != {BATCH[node]} or (not FREE[node] and _tells_nothing(whole[node])):
                    BATCH[node] = Split("mixed")
        return gm


def _mixes(node: fx.Node) -> bool:
    """Say whether a tensor is mixed, or, where it is several in one, made of such; a number of rows is no tensor."""
    value = node.meta.get("val")
    if isinstance(value, (tuple, list)):
        return any(map(_mixes, node.all_input_nodes))
    return isinstance(value, Tensor) and BATCH[node].kind == "mixed"


def _parts(sizes: tuple[int, int]) -> tuple[slice, slice]:
    return slice(0, sizes[0]), slice(sizes[0], sum(sizes))


def _after_mixed(gm: fx.GraphModule) -> set[fx.Node]:
    """Return the nodes that are said not to be mixed, and come after one that is."""
    after: set[fx.Node] = set()
    for node in gm.graph.nodes:
        if node.op == "call_function" and any(n in after or _mixes(n) for n in node.all_input_nodes):
            after.add(node)
    return {n for n in after if BATCH[n].kind in ("rows", "sum") and isinstance(n.meta.get("val"), Tensor)}


def _tells_nothing(value: Tensor) -> bool:
    if not value.is_floating_point() or value.numel() < 2:
        return False
    least, most = value.aminmax()
    return bool(least == most)


__all__ = ["ProveAgain"]
