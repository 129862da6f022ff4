"""What a step costs, and the plan for it: searched, or made of what is given."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from efftra_fx.cluster import Cluster
from efftra_fx.compiler import Front, Options, Progress, Report, undivided
from efftra_fx.cost import Chain, CostTable
from efftra_fx.errors import CostError, CoverageError, EfftraError, MemoryPlanError, PlacementError, PlanError
from efftra_fx.hooks import has_hooks
from efftra_fx.meta import BLOCK, PATH
from efftra_fx.passes.blocks import block_names, chain_nodes
from efftra_fx.passes.evaluate import evaluate
from efftra_fx.passes.explain import explain_given, explained
from efftra_fx.passes.explain_widths import about_widths, why_no_widths
from efftra_fx.passes.measure import measure_chain
from efftra_fx.passes.measure_widths import measure_widths
from efftra_fx.passes.partition import partition, shortage
from efftra_fx.passes.planned import Planned
from efftra_fx.passes.rules import Rules
from efftra_fx.passes.shapes import is_heavy
from efftra_fx.passes.shard_cost import with_tensor
from efftra_fx.passes.shard_groups import leaves_machine, place_groups
from efftra_fx.passes.tail import mixing_node
from efftra_fx.passes.verify import verify_plan
from efftra_fx.passes.width_search import known_widths, possible_widths, search_widths
from efftra_fx.plan import Plan, Stage


def cost_chain(
    front: Front, options: Options, device: str, report: Report, progress: Progress | None, known: CostTable | None
) -> tuple[Chain, CostTable]:
    """Return the planner's chain, measured on this rank or taken from what is known."""
    begin = time.perf_counter()
    estimated = options.costs == "estimated"
    table = options.costs if isinstance(options.costs, CostTable) else known
    inputs = {name: (front.examples[name], dim) for name, dim in front.dims.items()}
    chain, fresh = measure_chain(
        front.gm,
        front.tensors,
        inputs,
        front.rows,
        joined=not front.tail.linear,
        device=device,
        repeats=0 if estimated else 3,
        progress=progress,
        known=table,
        synced=front.statistics in ("synced", "exact"),
    )
    report.timed("measure", begin)
    if isinstance(options.costs, CostTable) and not any(options.costs.find(cost.name) for cost in fresh.costs):
        raise CostError(
            f"costs: the table has none of the model's {len(fresh.costs)} different blocks among its "
            f"{len(options.costs.costs)} entries; give one that was measured for this model, or leave it out"
        )
    return chain, fresh


def cost_widths(
    front: Front,
    chain: Chain,
    widths: set[int],
    device: str,
    report: Report,
    progress: Progress | None,
    known: CostTable | None,
) -> tuple[Chain, CostTable]:
    """Return the chain with measured costs of these tensor widths beside those of one device."""
    begin = time.perf_counter()
    inputs = {name: (front.examples[name], dim) for name, dim in front.dims.items()}
    chain, fresh = measure_widths(
        front.gm,
        chain,
        widths,
        front.tensors,
        inputs,
        front.rows,
        joined=not front.tail.linear,
        device=device,
        progress=progress,
        known=known,
    )
    report.timed("measure widths", begin)
    return chain, fresh


def candidate_widths(options: Options) -> set[int]:
    """Return the tensor widths, above 1, that were asked for and whose costs have a say in the plan."""
    if options.tensor is None:
        return set()
    settled = options.replicas is not None and len(options.tensor) == 1
    return set() if settled else {width for width in options.tensor if width > 1}


def promising_widths(front: Front, chain: Chain, cluster: Cluster, options: Options, report: Report) -> list[int]:
    """Return the widths that the best plan would have and that are to be measured first; none where it is fixed."""
    if any(one is not None for one in (options.plan, options.cuts, options.tensor)):
        return []
    begin = time.perf_counter()
    try:
        options, schedule = _settled(front, options)
        widths, _ = _possible_widths(front, cluster, options)
        find = _search(front, cluster, options, schedule)
        searched = search_widths(front.gm, chain, cluster, front.rows, find, widths, measurable=True)
        return sorted(searched.wanted)
    except EfftraError:
        return []  # it is raised again, on all ranks, where the plan is chosen
    finally:
        report.timed("plan", begin)


def choose_plan(front: Front, chain: Chain, cluster: Cluster, options: Options, report: Report) -> Planned | Plan:
    """Return the plan that the user gave, or the best one for what the user fixed."""
    begin = time.perf_counter()
    names = block_names(front.gm)
    options, schedule = _settled(front, options)
    try:
        if options.plan is not None:
            if options.plan.blocks != len(names):
                raise CoverageError(
                    f"the plan is for a model of {options.plan.blocks} blocks, but this one has {len(names)}; "
                    "give a plan of this model, or leave plan= out to search for one"
                )
            verify_plan(options.plan, len(names), cluster)
            chain = _with_widths(front, chain, {stage.tensor for stage in options.plan.stages})
            return _priced(options.plan, chain, cluster, front.rows, options)
        if options.tensor is not None:
            chain = _with_widths(front, chain, set(options.tensor))
            plan = _wide_plan(front, names, chain, cluster, options, schedule)
            return _priced(plan, chain, cluster, front.rows, options)
        if options.cuts is not None:
            plan = _cut_plan(front.gm, names, cluster, options, schedule)
            return _priced(plan, chain, cluster, front.rows, options)
        return _searched(front, chain, cluster, options, schedule)
    finally:
        report.timed("plan", begin)


def _settled(front: Front, options: Options) -> tuple[Options, str | None]:
    """Return the options with what the step's own nature leaves no choice of, and the schedule."""
    schedule = options.schedule
    if front.statistics == "exact":
        asked = options.plan.micro_batches if options.plan is not None else options.micro_batches or 1
        if asked > 1:
            raise PlanError(undivided(asked))
        options = replace(options, micro_batches=1)
    if not front.tail.linear:
        if schedule == "1f1b" or (options.plan is not None and options.plan.schedule == "1f1b"):
            raise PlanError(
                f"schedule '1f1b' cannot be had: {mixing_node(front.tail)} needs the whole batch's values, so all "
                "forwards come before the first backward; use schedule='gpipe'"
            )
        schedule = "gpipe"
    return options, schedule


def _fixed(options: Options, schedule: str | None) -> dict[str, Any]:
    return {
        "stages": options.stages,
        "replicas": options.replicas,
        "micro_batches": options.micro_batches,
        "schedule": schedule,
        "optimizer_bytes_per_parameter_byte": options.optimizer_states,
    }


def _search(front: Front, cluster: Cluster, options: Options, schedule: str | None) -> Callable[[Chain], Planned]:
    return lambda chain: partition(chain, cluster, front.rows, **_fixed(options, schedule))


def _searched(front: Front, chain: Chain, cluster: Cluster, options: Options, schedule: str | None) -> Planned:
    find = _search(front, cluster, options, schedule)
    measurable = options.costs == "measured" and cluster.where != "described"  # what is measured, was
    possible, why_none = _possible_widths(front, cluster, options)
    searched = search_widths(front.gm, chain, cluster, front.rows, find, possible, measurable=measurable)
    planned = searched.planned
    told = explained(planned, searched.chain, cluster, front.rows, **_fixed(options, schedule))
    why = told.text
    rules = Rules(optimizer_bytes_per_parameter_byte=options.optimizer_states)
    one_stage = options.stages in (None, 1) and options.replicas is None
    widths = about_widths(planned.plan, searched.chain, searched.every, cluster, front.rows, rules, one_stage)
    if not known_widths(searched.every):
        widths = [f"no tensor groups: {why_none}"] if why_none else why_no_widths(cluster)
    why += "\n".join(["", *widths, ""]) if widths else ""
    return replace(planned, plan=replace(planned.plan, explanation=why, facts=told.facts))


def _possible_widths(front: Front, cluster: Cluster, options: Options) -> tuple[set[int], str]:
    """Return the widths that the planner may choose, or none, and why: what it chooses must run."""
    if options.backend is not None:
        return set(), "stages that meet other ranks on their way cannot be compiled (compile_stages)"
    hooked = next((name for (kind, name), t in front.tensors.items() if kind == "parameter" and has_hooks(t)), None)
    if hooked is not None:
        return set(), f"hooks on parameters need whole gradients, and '{hooked}' has some"
    return possible_widths(cluster), ""


def _with_widths(front: Front, chain: Chain, widths: set[int]) -> Chain:
    return with_tensor(front.gm, chain, widths) if max(widths, default=1) > 1 else chain


def _wide_plan(
    front: Front, names: Sequence[str], chain: Chain, cluster: Cluster, options: Options, schedule: str | None
) -> Plan:
    """Return the fastest plan with these tensor widths by stage that fits, or one that does not if none does.

    Cuts are chosen as for as many replicas; numbers of replicas that are not given are tried.
    """
    assert options.tensor is not None
    rules = Rules(optimizer_bytes_per_parameter_byte=options.optimizer_states)
    best: tuple[bool, float] | None = None
    chosen: Plan | None = None
    misplaced: PlanError | None = None
    for replicas in _replicas_to_try(cluster, options):
        try:
            plan = _wide_plan_of(front, names, chain, cluster, options, schedule, replicas)
        except PlacementError as error:
            misplaced = misplaced or error
            continue
        figures = evaluate(plan, chain, cluster, front.rows, rules)
        found = (shortage(plan, cluster, figures) is not None, figures.step_s)
        if best is None or found < best:
            best, chosen = found, plan
    if chosen is None and misplaced is not None:
        raise misplaced
    assert chosen is not None
    return chosen


def _replicas_to_try(cluster: Cluster, options: Options) -> list[tuple[int, ...]]:
    widths = options.tensor
    assert widths is not None
    least = options.replicas or (1,) * len(widths)
    needed, devices = sum(r * t for r, t in zip(least, widths, strict=True)), len(cluster.devices)
    if needed > devices:
        raise PlanError(f"tensor={widths} with replicas={least} needs {needed} devices, the cluster has {devices}")
    if options.replicas is not None:
        return [options.replicas]
    most = devices // needed
    return [(count,) * len(widths) for count in sorted({*(2**k for k in range(most.bit_length())), most})]


def _wide_plan_of(
    front: Front,
    names: Sequence[str],
    chain: Chain,
    cluster: Cluster,
    options: Options,
    schedule: str | None,
    replicas: tuple[int, ...],
) -> Plan:
    widths = options.tensor
    assert widths is not None
    counts = tuple(r * t for r, t in zip(replicas, widths, strict=True))
    asked = replace(options, stages=len(widths), replicas=counts, tensor=None)
    if options.cuts is not None:
        plan = _cut_plan(front.gm, names, cluster, asked, schedule)
    else:
        plan = partition(
            chain,
            cluster.without_memory_limits(),
            front.rows,
            stages=len(widths),
            replicas=counts,
            micro_batches=options.micro_batches,
            schedule=schedule,
            tensor=1,
        ).plan
    places = tuple(tuple(sorted(stage.devices)) for stage in plan.stages)
    if any(leaves_machine(devices, width, cluster) for devices, width in zip(places, widths, strict=True)):
        places = place_groups(list(zip(replicas, widths, strict=True)), cluster)
    wide = tuple(
        replace(stage, devices=devices, tensor=width)
        for stage, devices, width in zip(plan.stages, places, widths, strict=True)
    )
    return replace(
        plan, stages=wide, predicted_step_s=None, lower_bound_s=None, placement="tensor", explanation="", facts={}
    )


def _priced(plan: Plan, chain: Chain, cluster: Cluster, rows: int, options: Options) -> Plan:
    """Return a given plan with its step and memory, explained; raise MemoryPlanError where a device has too little."""
    rules = Rules(optimizer_bytes_per_parameter_byte=options.optimizer_states)
    if any(stage.recompute for stage in plan.stages):
        chain = replace(chain, blocks=tuple(block.with_recompute() for block in chain.blocks))
    figures = evaluate(plan, chain, cluster, rows, rules)
    short = shortage(plan, cluster, figures)
    if short is not None:
        raise MemoryPlanError(f"the given plan does not fit: {short[1]}")
    told = explain_given(plan, figures, chain, cluster, rows, rules)
    step_s, memory = figures.step_s, figures.memory_bytes
    return replace(
        plan, predicted_step_s=step_s, lower_bound_s=None, memory_bytes=memory, explanation=told.text, facts=told.facts
    )


def _cut_plan(
    gm: fx.GraphModule, names: Sequence[str], cluster: Cluster, options: Options, schedule: str | None
) -> Plan:
    assert options.cuts is not None
    stops = [*(_first_block(gm, path) for path in options.cuts), len(names)]
    starts = [0, *stops[:-1]]
    replicas = options.replicas or (1,) * len(stops)
    if len(replicas) != len(stops):
        raise PlanError(f"cuts={options.cuts} make {len(stops)} stages, but replicas={replicas} is for {len(replicas)}")
    if sum(replicas) > len(cluster.devices):
        raise PlanError(f"cuts={options.cuts} need {sum(replicas)} devices, the cluster has {len(cluster.devices)}")
    stages, device = [], 0
    for path, start, stop, count in zip(("the start", *options.cuts), starts, stops, replicas, strict=True):
        if not start < stop:
            raise PlanError(f"a stage that starts at '{path}' would have no block; cuts must be in the model's order")
        stages.append(Stage(start, stop, tuple(range(device, device + count)), names=tuple(names[start:stop])))
        device += count
    return Plan(tuple(stages), options.micro_batches or 2 * len(stages), schedule or "1f1b", placement="cuts")


def _first_block(gm: fx.GraphModule, path: str) -> int:
    found = [BLOCK[n] for n in chain_nodes(gm) if is_heavy(n) and ((PATH.get(n) or "") + ".").startswith(path + ".")]
    if not found:
        paths = sorted({PATH.get(n) or "" for n in chain_nodes(gm) if is_heavy(n)} - {""})
        raise PlanError(f"no block lies in '{path}'; modules with blocks are {', '.join(paths[:12])}")
    return min(found)
