"""Time each block as one rank of a tensor group computes it: with its shares' true shapes, and alone.

What other ranks would bring is made up on the spot, so that everything is run but the way between
the ranks; that is priced by the links. Equal blocks that are cut alike are timed once a width.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from efftra_fx.cost import Chain, CostTable, NodeCost
from efftra_fx.meta import ROLE, Role

from .block_graphs import BlockGraph, block_graphs
from .measure import digest, sample_rows
from .shard_candidates import Candidates, is_item, moving_values, place_of
from .shard_choice import Choice
from .shard_code import MeetingCode, MeetingForward
from .shard_cost import width_costs, with_costs
from .shard_cuts import WHOLE, Placement
from .shard_rewrite import rewrite
from .shard_rules import Strategy
from .shard_segments import run_alone
from .stage_code import Example, example_of
from .time_blocks import Item, Progress, time_blocks

_RANK = 0  # the rank with the largest shares


@dataclass(frozen=True)
class _Cut:
    """One rank's block: its graph, and where what it is given lies."""

    graph: BlockGraph
    placed: Mapping[str, Placement]
    key: str


def measure_widths(
    gm: fx.GraphModule,
    chain: Chain,
    widths: Iterable[int],
    tensors: dict[tuple[str, str], Tensor],
    inputs: dict[str, tuple[Tensor, int | None]],
    rows: int,
    *,
    joined: bool = False,
    device: str = "cpu",
    repeats: int = 3,
    progress: Progress | None = None,
    known: CostTable | None = None,
) -> tuple[Chain, CostTable]:
    """Return the chain with a measured option for each width, and the table of what was measured, to keep.

    Blocks of which a width cuts nothing keep their own times.
    """
    costs = tuple(width_costs(gm, chain, widths))
    graphs = block_graphs(gm, len(chain.blocks), joined)
    cuts = {
        (cost.width, index): cut_block(graph, cost.found, cost.choice)
        for cost in costs
        for index, graph in enumerate(graphs)
        if cost.parts[index].work < 1.0
    }
    found: dict[str, NodeCost] = {}
    counts = Counter(cut.key for cut in cuts.values())
    for width in dict.fromkeys(width for width, _ in cuts):
        items = []
        for cut in {cut.key: cut for (own, _), cut in cuts.items() if own == width}.values():
            before = known.find(cut.key) if known is not None else None
            if before is not None:
                found[cut.key] = before
            elif cut.key not in found:
                example = _local(example_of(cut.graph.values, tensors, inputs), cut.placed)
                items.append(
                    Item(cut.key, cut.graph, partial(_make, cut.graph, example, device), example, counts[cut.key])
                )
        found |= time_blocks(items, sample_rows(rows), device, repeats, progress, f"measuring width {width}")
    measured = {place: found[cut.key] for place, cut in cuts.items()}
    return with_costs(chain, costs, measured), CostTable(f"widths, rows {sample_rows(rows)}", tuple(found.values()))


def cut_block(graph: BlockGraph, found: Candidates, choice: Choice) -> _Cut:
    """Return a block as rank 0 of a group computes it, by what was chosen for the whole model."""
    whole = {node.name: node for node in choice.strategies}
    items = {n.name: n for n in next(iter(choice.strategies)).graph.nodes if is_item(n)}
    parameters = {ROLE[n].name: s.outputs[0] for n, s in choice.strategies.items() if n.op == "placeholder"}

    def arrives(name: str) -> Placement:
        node, index = place_of(items[name]) if name in items else (whole.get(name), 0)
        return WHOLE if node is None else choice.strategies[node].outputs[index]

    strategies: dict[fx.Node, Strategy] = {}
    placed: dict[str, Placement] = {}
    for node in graph.stage.gm.graph.nodes:
        if node.op == "placeholder":
            name, kind = ROLE[node].name, ROLE[node].kind
            placed[name] = arrives(name) if kind == "value" else parameters.get(name, WHOLE)
            strategies[node] = Strategy((), (placed[name],))
        elif node.name in whole and node.op == "call_function":
            strategies[node] = choice.strategies[whole[node.name]]
    trained = frozenset(r.name for r, flag in zip(graph.stage.roles, graph.flags.wrt, strict=True) if flag)
    moving = frozenset(moving_values(graph.stage.gm, trained))
    gm = rewrite(
        graph.stage.gm, Candidates({}, {}, moving, (), found.width), Choice(strategies, 0.0), _RANK, whole=False
    )
    text = "\n".join([graph.key, str(found.width), *map(str, strategies.values())])
    return _Cut(replace(graph, stage=replace(graph.stage, gm=gm)), placed, digest(text))


def _local(example: Example, placed: Mapping[str, Placement]) -> Example:
    """Return a maker of examples of the rank's own shapes."""

    def local(role: Role, rows: int) -> Any:
        value, place = example(role, rows), placed.get(role.name, WHOLE)
        if place.cut is None:
            return value
        size = value.shape[place.dim] // place.cut.size * place.cut.lengths[_RANK]
        shape = (*value.shape[: place.dim], size, *value.shape[place.dim + 1 :])
        return torch.empty(shape, dtype=value.dtype, device=value.device)

    return local


class _Alone:
    """A rank's code that runs without the others of its group."""

    def __init__(self, code: MeetingCode | MeetingForward) -> None:
        self.code = code

    @property
    def saved_bytes(self) -> int:
        return self.code.saved_bytes

    def forward(self, operands: list[Any]) -> Any:
        return run_alone(self.code.forward(operands), _RANK)

    def backward(self, saved: Any, gradients: list[Tensor | None], sums: Any, defer: bool) -> Any:
        return run_alone(self.code.backward(saved, gradients, sums, defer), _RANK)


def _make(graph: BlockGraph, example: Example, device: str, rows: int) -> _Alone:
    if not graph.flags.any:
        return _Alone(MeetingForward(graph.stage, device))
    return _Alone(MeetingCode(graph.stage, graph.flags, example, rows, False, device))


__all__ = ["cut_block", "measure_widths"]
