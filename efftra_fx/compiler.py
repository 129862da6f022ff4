"""The straight line from a model to programs: what its parts hand on, and the last of them.

front end   capture → (layout-free) → separate-means → prove-batch → tail → annotate-shapes → blocks
plan choice measure → partition
back end    split-stages → wire → (for each batch size) lower → verify
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

from efftra_fx.captured import Captured
from efftra_fx.cluster import Cluster
from efftra_fx.cost import CostTable
from efftra_fx.dump import print_dot, print_graph
from efftra_fx.errors import PlanError
from efftra_fx.parts import Parts
from efftra_fx.passes.batch_evaluate import is_random
from efftra_fx.passes.blocks import block_names
from efftra_fx.passes.facts import with_parameters
from efftra_fx.passes.news import News
from efftra_fx.passes.reduction import Weight
from efftra_fx.passes.shard import Sharded, shard_stages
from efftra_fx.passes.shard_explain import HEADING, explain_groups
from efftra_fx.passes.split import AssignStages, StageGraph, split_stages, wire
from efftra_fx.passes.synced import Synced, sync_stage
from efftra_fx.passes.tail import Tail
from efftra_fx.plan import Plan
from efftra_fx.program import Wiring
from efftra_fx.step_module import LossFn

Progress = Callable[[Iterable[Any], str], Iterable[Any]]


@dataclass(frozen=True)
class Options:
    """What a user may fix of a compilation; None leaves it to the search."""

    loss_fn: LossFn | None = None
    stages: int | None = None
    replicas: tuple[int, ...] | None = None
    micro_batches: int | None = None
    schedule: str | None = None
    plan: Plan | None = None
    cuts: tuple[str, ...] | None = None
    tensor: tuple[int, ...] | None = None
    batch_dims: Mapping[str, int | None] = field(default_factory=dict)
    batch_norm: str = "local"
    loss_reduction: str | Weight | None = None
    loss_as_it_is: str = ""  # why the loss is not to be captured
    costs: CostTable | str = "measured"
    optimizer_states: float = 2.0
    rng: str = "plan"  # or "layout_free"
    backend: str | None = None  # of torch.compile, for the stages
    check_capture: bool = True


@dataclass
class Report:
    """What each part of the compilation took, in seconds, and the text that it left, where that is `kept`."""

    kept: bool = True
    seconds: dict[str, float] = field(default_factory=dict)
    texts: list[tuple[str, str]] = field(default_factory=list)

    def timed(self, name: str, begin: float) -> None:
        """Add the time since `begin` to a part."""
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin

    def graph(self, name: str, gm: fx.GraphModule) -> None:
        """Keep a graph as text and as a drawing."""
        if not self.kept:
            return
        self.texts.append((f"{name}.txt", print_graph(gm, name)))
        self.texts.append((f"{name}.dot", print_dot(gm, name)))

    def table(self) -> str:
        """Return the times as lines of text."""
        width = max((len(name) for name in self.seconds), default=0)
        lines = [f"{name:<{width}}  {seconds:7.3f} s" for name, seconds in self.seconds.items()]
        return "\n".join([*lines, f"{'total':<{width}}  {sum(self.seconds.values()):7.3f} s (measured)"])


@dataclass(frozen=True)
class Front:
    """A captured step, proven and cut into blocks: all that does not depend on the plan."""

    captured: Captured
    gm: fx.GraphModule
    tail: Tail
    dims: dict[str, int | None]
    examples: dict[str, Tensor]
    tensors: dict[tuple[str, str], Tensor]
    rows: int
    loss_dtype: torch.dtype
    notes: tuple[str, ...]
    counters: frozenset[str]
    parts: Parts  # what the model was made of
    news: News | None  # buffers that the whole batch writes, once a step
    pairwise: str | None  # a module that needs two rows or more in every part: it normalises over rows alone
    statistics: str = ""  # over which rows norms take them: "local", "synced" or "exact"; "" where there are none
    alone: fx.GraphModule | None = None  # the step of one device, where it draws the numbers that any plan draws


@dataclass(frozen=True)
class Back:
    """A plan turned into stages."""

    plan: Plan
    stages: tuple[StageGraph, ...]
    wiring: Wiring
    random: tuple[bool, ...]
    sharded: tuple[Sharded | None, ...]  # None for a stage whose replicas are one rank each
    synced: tuple[Synced | None, ...]  # None for a stage whose replicas compute each for itself


def back_end(
    front: Front, plan: Plan, report: Report, like: Back | None = None, cluster: Cluster | None = None
) -> Back:
    """Cut the graph into the plan's stages and describe what crosses between them.

    With `like`, tensor groups hold parameters as they do there. Raises PlanError for a plan that divides a batch
    whose statistics are wanted as a whole.
    """
    if front.statistics == "exact" and plan.micro_batches > 1:
        raise PlanError(undivided(plan.micro_batches))
    begin = time.perf_counter()
    gm = AssignStages(tuple(stage.stop_block for stage in plan.stages))(front.gm)
    stages = split_stages(gm, len(plan.stages), held=_held_alike(like))
    wiring = wire(gm, stages, not front.tail.linear)
    report.graph("split-stages", gm)
    for index, stage in enumerate(stages):
        report.graph(f"stage-{index}", stage.gm)
    report.timed("split", begin)
    names = block_names(gm)
    named = replace(
        plan, stages=tuple(replace(s, names=tuple(names[s.first_block : s.stop_block])) for s in plan.stages)
    )
    random = tuple(any(is_random(n) for n in s.gm.graph.nodes if n.op == "call_function") for s in stages)
    begin = time.perf_counter()
    wiring, sharded = shard_stages(
        stages, tuple(stage.tensor for stage in plan.stages), wiring, like=like.sharded if like else None
    )
    for index, one in enumerate(sharded):
        if one is not None:
            report.texts.append((f"stage-{index}-tensor.txt", one.describe()))
        for rank, graph in enumerate(one.stages if one is not None else ()):
            report.graph(f"stage-{index}-tensor-{rank}", graph.gm)
    if any(one is not None for one in sharded):
        report.timed("shard", begin)
        groups = explain_groups(named, stages, sharded, front.rows, cluster)
        why = named.explanation.split(HEADING)[0].rstrip("\n")
        named = replace(named, explanation=f"{why}\n\n{groups}" if why else groups)
    if named.facts.get("stages"):
        held = [
            [(p.name, math.prod(p.shape)) for p in wiring.parameters if index in p.stages]
            for index in range(len(stages))
        ]
        named = replace(named, facts=with_parameters(dict(named.facts), held))
    synced: tuple[Synced | None, ...] = (None,) * len(stages)
    if front.statistics in ("synced", "exact"):
        synced = tuple(
            sync_stage((graph,) if cut is None else cut.stages, stage.replicas)
            for graph, cut, stage in zip(stages, sharded, plan.stages, strict=True)
        )
        wiring = replace(wiring, synced=tuple(i for i, one in enumerate(synced) if one is not None))
    return Back(named, stages, wiring, random, sharded, synced)


def _held_alike(like: Back | None) -> dict[str, tuple[int, ...]]:
    """Return the stages that hold each parameter, where none of them is wider than a rank.

    A stage of another form holds it too, though it may not read it there: its ranks take part in the sums of
    gradients, and have the same new values.
    """
    if like is None:
        return {}
    wide = {index for index, stage in enumerate(like.plan.stages) if stage.tensor > 1}
    return {p.name: p.stages for p in like.wiring.parameters if not wide.intersection(p.stages)}


def undivided(micro_batches: int) -> str:
    return (
        f"batch_norm='exact' needs the whole batch in one micro-batch, since every norm waits for all rows, but the "
        f"plan has {micro_batches} micro-batches; use micro_batches=1, or batch_norm='synced' for statistics of each "
        "micro-batch"
    )
