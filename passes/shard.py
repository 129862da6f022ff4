"""shard: cut a stage over the ranks of a tensor group.

    stage graph ── candidates ── choice ── rewrite ──► one graph a rank

Weights are cut, each rank holds its shares; sums over the group become nodes of the graph, with
their backwards. What crosses to other stages, the loss, and new buffers are whole on every rank, so
nothing outside of the stage needs to know.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import fx

from efftra_fx.meta import PATH, ROLE

from .shard_axes import axes_of
from .shard_candidates import find_candidates
from .shard_choice import Choice, Prices, choose
from .shard_cuts import Placement
from .shard_rewrite import rewrite
from .shard_rules import base_strategies, has_own_rule
from .split import StageGraph


@dataclass(frozen=True, eq=False)
class Sharded:
    """A stage cut over `width` ranks: a graph for each, where each parameter lies, and what could not be cut."""

    stages: tuple[StageGraph, ...]
    parameters: Mapping[str, Placement]
    cost_s: float
    notes: tuple[str, ...]

    @property
    def width(self) -> int:
        """Number of ranks of the group."""
        return len(self.stages)


def shard_stage(
    stage: StageGraph, width: int, prices: Prices | None = None, forced: Mapping[str, Placement] | None = None
) -> Sharded:
    """Return the graphs of the ranks of a tensor group; `forced` fixes how parameters lie, by name.

    Raises PlanError if the choice cannot be solved in time.
    """
    found = find_candidates(stage.gm, width, forced)
    choice = choose(found, prices or Prices())
    graphs = tuple(replace(stage, gm=rewrite(stage.gm, found, choice, rank)) for rank in range(width))
    placed = {
        ROLE[node].name: choice.strategies[node].outputs[0]
        for node in stage.gm.graph.nodes
        if node.op == "placeholder" and ROLE[node].kind == "parameter"
    }
    return Sharded(graphs, placed, choice.cost_s, _notes(choice))


def _notes(choice: Choice) -> tuple[str, ...]:
    """Say which operators are computed whole because nobody knows how to cut them."""
    names: dict[str, list[str]] = {}
    for node in choice.strategies:
        if node.op == "call_function" and not _has_rule(node):
            names.setdefault(str(node.target), []).append(PATH.get(node) or node.name)
    return tuple(
        f"{target.removeprefix('aten.')} has no rule, so it is computed whole on every rank ({places[0]}"
        + (f" and {len(places) - 1} more)" if len(places) > 1 else ")")
        for target, places in names.items()
    )


def _has_rule(node: fx.Node) -> bool:
    return has_own_rule(node) or axes_of(node) is not None or not base_strategies(node)[1:]


__all__ = ["Sharded", "shard_stage"]
