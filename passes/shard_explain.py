"""Say what a tensor group shares: where it is, what is cut, and what moves between its ranks in a micro-batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import fx

from efftra_fx import collectives
from efftra_fx.cluster import Cluster
from efftra_fx.cost import Exchanged
from efftra_fx.meta import ROLE
from efftra_fx.plan import Plan, Stage
from efftra_fx.units import size_text

from .blocks import size_at
from .shapes import elements, operations
from .shard import Sharded
from .shard_parts import cross_entropy_part
from .split import StageGraph

HEADING = "tensor groups, for one micro-batch:"
_SHOWN = 4

# what each graph function exchanges, forward and backward
_KINDS: dict[Any, tuple[str, str]] = {
    collectives.copy: ("", "sum"),
    collectives.reduce: ("sum", ""),
    collectives.share: ("", "gather"),
    collectives.gather: ("gather", ""),
    collectives.gather_copy: ("gather", "scatter"),
    collectives.reduce_share: ("scatter", "gather"),
}


@dataclass(frozen=True)
class Moved:
    """One exchange of a micro-batch: its kind, the bytes of the whole value, and whether it is in the backward."""

    kind: str
    size_bytes: int
    backward: bool


def exchanges(sharded: Sharded, rows: int) -> tuple[Moved, ...]:
    """Return what the ranks of a group exchange for a micro-batch part of so many rows, in the order of the graph."""
    return tuple(
        Moved(kind, size, backward)
        for node in sharded.stages[0].gm.graph.nodes
        for backward in (False, True)
        for kind, size in _exchanged(node, sharded.width, rows, backward)
    )


def timed_exchanges(sharded: Sharded, rows: int, backward: bool) -> tuple[Exchanged, ...]:
    """Return what a simulation needs: each exchange of a forward or backward, and how much is computed before it.

    A backward goes through the graph from its end.
    """
    nodes = [node for node in sharded.stages[0].gm.graph.nodes if node.op == "call_function"]
    work = {node: float(size_at(operations(node), rows)) for node in nodes}
    total, done = sum(work.values()), 0.0
    found: list[Exchanged] = []
    for node in reversed(nodes) if backward else nodes:
        at = min(done / total, 1.0) if total else 0.0
        found += [Exchanged(at, kind, size) for kind, size in _exchanged(node, sharded.width, rows, backward)]
        done += work[node]
    return tuple(found)


def _exchanged(node: fx.Node, width: int, rows: int, backward: bool) -> list[tuple[str, int]]:
    """Return kinds and bytes of what a node of a rank's graph exchanges."""
    if node.target is cross_entropy_part and not backward:
        logits, target = (n.meta["val"] for n in node.all_input_nodes[:2])
        column = int(size_at(elements(target), rows)) * int(logits.element_size())
        return [("gather", width * column), ("sum", 2 * column)]
    kind = _KINDS.get(node.target, ("", ""))[backward]
    return [(kind, _bytes(node, rows))] if kind else []


def _bytes(node: fx.Node, rows: int) -> int:
    value = node.meta["val"]
    return int(size_at(elements(value), rows)) * int(value.element_size())


def explain_groups(
    plan: Plan, stages: Sequence[StageGraph], sharded: Sequence[Sharded | None], rows: int, cluster: Cluster | None
) -> str:
    """Return the text on all stages that are wider than one rank; empty where there is none."""
    lines: list[str] = []
    size = -(-rows // plan.micro_batches)
    for index, (stage, graph, one) in enumerate(zip(plan.stages, stages, sharded, strict=True)):
        if one is not None:
            part = -(-size // stage.replicas)
            lines += [f"stage {index}: {_places(stage, cluster)}", f"  {_cut(graph, one)}"]
            moved = exchanges(one, part)
            lines += [f"  {name} of {part} row(s): {_moved(moved, name == 'backward')}" for name in _DIRECTIONS]
            lines += [f"  {note}" for note in one.notes]
    return "\n".join([HEADING, *lines]) + "\n" if lines else ""


_DIRECTIONS = ("forward", "backward")


def _places(stage: Stage, cluster: Cluster | None) -> str:
    groups = [stage.devices[at : at + stage.tensor] for at in range(0, len(stage.devices), stage.tensor)]
    text = " and ".join(f"[{', '.join(map(str, group))}]" for group in groups)
    if cluster is None:
        return f"ranks {text}"
    inside = all(len({cluster.devices[device].machine for device in group}) == 1 for group in groups)
    link = min(
        (cluster.link(a, b) for group in groups for a, b in zip(group, group[1:], strict=False)),
        key=lambda one: one.bandwidth_bytes_per_s,
    )
    where = "inside a machine" if inside else "between machines"
    return f"ranks {text}, {where}, over {link.bandwidth_bytes_per_s / 1e9:.3g} GB/s"


def _cut(graph: StageGraph, sharded: Sharded) -> str:
    sizes = {
        ROLE[node].name: prod(node.meta["val"].shape) * node.meta["val"].element_size()
        for node in graph.gm.graph.nodes
        if node.op == "placeholder" and ROLE[node].kind == "parameter"
    }
    cut = [name for name, place in sharded.parameters.items() if place.cut is not None]
    whole = sorted((n for n in sizes if n not in cut), key=lambda n: -sizes[n])
    total = sum(sizes.values())
    share = sum(sizes[n] for n in cut) / total if total else 0.0
    text = f"{len(cut)} of {len(sizes)} parameters are cut, {share:.1%} of their bytes"
    shown = ", ".join(whole[:_SHOWN]) + (f" and {len(whole) - _SHOWN} more" if len(whole) > _SHOWN else "")
    return text + (f"; whole on every rank: {shown}" if whole else "")


def _moved(moved: Sequence[Moved], backward: bool) -> str:
    mine = [one for one in moved if one.backward == backward]
    counts = Counter((one.kind, one.size_bytes) for one in mine)
    parts = [f"{count} {kind}{'s' if count > 1 else ''} of {size_text(size)}" for (kind, size), count in counts.items()]
    return ", ".join(parts) or "nothing is exchanged"


__all__ = ["HEADING", "Moved", "exchanges", "explain_groups", "timed_exchanges"]
