"""Every block of a captured step as a stage of its own."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, fx

from efftra_fx.meta import ROLE, STAGE
from efftra_fx.program import Value

from .split import AssignStages, StageGraph, split_stages, wire
from .stage_code import Flags


@dataclass(frozen=True)
class BlockGraph:
    """A block as a stage of its own, with the flags of what it differentiates and a key of its content."""

    stage: StageGraph
    flags: Flags
    values: dict[str, Value]
    key: str


def block_graphs(gm: fx.GraphModule, blocks: int, joined: bool) -> tuple[BlockGraph, ...]:
    """Return every block as a stage of its own; leaves no `STAGE` behind."""
    AssignStages(tuple(range(1, blocks + 1)))(gm)
    stages = split_stages(gm, blocks)
    wiring = wire(gm, stages, joined)
    for node in gm.graph.nodes:
        node.meta.pop(f"efftra.{STAGE.name}", None)
    values = {value.name: value for value in wiring.values}
    trainable = {p.name for p in wiring.parameters if p.trainable}
    graphs = []
    for index, stage in enumerate(stages):
        flags = Flags(stage, values, trainable, index)
        graphs.append(BlockGraph(stage, flags, values, _content(stage.gm, flags)))
    return tuple(graphs)


def _content(gm: fx.GraphModule, flags: Flags) -> str:
    """Return a text that is the same for blocks that compute the same from values of the same types."""
    index: dict[fx.Node, int] = {}
    lines = [f"{flags.wrt} {flags.outputs}"]
    for number, node in enumerate(gm.graph.nodes):
        index[node] = number
        value = node.meta.get("val")
        kind = f"{value.dtype} {tuple(map(str, value.shape))}" if isinstance(value, Tensor) else ""
        if node.op == "placeholder":
            lines.append(f"{ROLE[node].kind} {kind}")
        else:
            arguments = fx.node.map_arg((node.args, node.kwargs), lambda n: f"%{index[n]}")
            lines.append(f"{node.target} {arguments} {kind}")
    return "\n".join(lines)
