"""shard: cut a stage over the ranks of a tensor group.

    stage graph ── candidates ── choice ── rewrite ──► one graph a rank

Weights are cut, each rank holds its shares; sums over the group become nodes of the graph, with
their backwards. What crosses to other stages, the loss, and new buffers are whole on every rank, so
nothing outside of the stage needs to know.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from efftra_fx.collectives import COLLECTIVE_FUNCTIONS
from efftra_fx.meta import PATH, PLACED, ROLE
from efftra_fx.program import Wiring

from .shard_axes import axes_of
from .shard_candidates import find_candidates
from .shard_choice import Choice, Prices, choose
from .shard_cuts import COPIED, WHOLE, Placement
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

    def describe(self) -> str:
        """Return as text where each parameter lies, what is moved between the ranks, and what is computed whole."""
        nodes = list(self.stages[0].gm.graph.nodes)
        moves = [n for n in nodes if n.target in COLLECTIVE_FUNCTIONS]
        lines = [f"# {self.width} ranks wide, {len(moves)} changes of placement", ""]
        lines += [f"parameter {name}: {place}" for name, place in self.parameters.items()]
        lines += ["", *(f"{n.target.__name__} {n.args[0]}: {_type(n)}, then {PLACED[n]}" for n in moves)]
        return "\n".join([*lines, "", *self.notes]).rstrip("\n") + "\n"


def _type(node: fx.Node) -> str:
    value = node.meta["val"]
    return f"{str(value.dtype).removeprefix('torch.')}[{', '.join(map(str, value.shape))}]"


def shard_stage(
    stage: StageGraph,
    width: int,
    prices: Prices | None = None,
    forced: Mapping[str, Placement] | None = None,
    trained: frozenset[str] | None = None,
) -> Sharded:
    """Return the graphs of the ranks of a tensor group; `forced` fixes how parameters lie, by name.

    `trained` names the parameters with gradients, if those are fewer than require them.

    Raises PlanError if the choice cannot be solved in time.
    """
    found = find_candidates(stage.gm, width, forced, trained)
    choice = choose(found, prices or Prices())
    graphs = tuple(replace(stage, gm=rewrite(stage.gm, found, choice, rank)) for rank in range(width))
    placed = {
        ROLE[node].name: choice.strategies[node].outputs[0]
        for node in stage.gm.graph.nodes
        if node.op == "placeholder" and ROLE[node].kind == "parameter"
    }
    return Sharded(graphs, placed, choice.cost_s, _notes(choice))


def shard_stages(
    stages: Sequence[StageGraph],
    widths: Sequence[int],
    wiring: Wiring,
    prices: Prices | None = None,
    like: Sequence[Sharded | None] | None = None,
) -> tuple[Wiring, tuple[Sharded | None, ...]]:
    """Shard the stages that are wider than one rank, and write into the wiring whose gradients are partial sums.

    A parameter that several stages read, one of them wide, is held whole by all of their ranks. With `like`,
    parameters lie as they do there.
    """
    tied = {
        p.name: COPIED if p.trainable else WHOLE
        for p in wiring.parameters
        if len(p.stages) > 1 and any(widths[s] > 1 for s in p.stages)
    }
    trained = frozenset(p.name for p in wiring.parameters if p.trainable)
    before = like if like is not None else (None,) * len(stages)
    sharded = tuple(
        shard_stage(stage, width, prices, {**tied, **(one.parameters if one is not None else {})}, trained)
        if width > 1
        else None
        for stage, width, one in zip(stages, widths, before, strict=True)
    )
    partial = {n for one in sharded if one is not None for n, p in one.parameters.items() if p.kind == "copied"}
    parameters = tuple(replace(p, partial=True) if p.name in partial else p for p in wiring.parameters)
    return replace(wiring, parameters=parameters), sharded


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
