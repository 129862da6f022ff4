"""Say why a plan was chosen: the formula filled in, what bounds it, why others lose, what would help.

What would help is found by planning again on a changed cluster, never by a guess.
All times here are predicted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from efftra_fx.cluster import Cluster, Device, Link
from efftra_fx.cost import Chain
from efftra_fx.errors import MemoryPlanError, PlanError
from efftra_fx.formulas import Route, StageTerms, routes
from efftra_fx.formulas import step as step_formula
from efftra_fx.plan import Plan, Stage
from efftra_fx.units import size_text

from .evaluate import Figures, StageFigures, evaluate, flows, largest_micro_batch
from .facts import facts_of, others_of
from .partition import partition, shortage
from .planned import Alternative, Planned
from .rules import Rules
from .slots import about_slots


@dataclass(frozen=True)
class Part:
    """The parts of a filled-in formula, seconds: its longest path repeats one thing `periods` times."""

    fill_s: float
    period_s: float
    periods: int
    tail_s: float
    bound: str

    @property
    def total_s(self) -> float:
        """The formula's step."""
        return self.fill_s + self.periods * self.period_s + self.tail_s


@dataclass(frozen=True)
class Change:
    """A change of the cluster and the step predicted after planning again; `None` where no plan fits."""

    label: str
    step_s: float | None


@dataclass(frozen=True)
class Explained:
    """An explanation as text and as plain data."""

    text: str
    facts: dict[str, Any]


def explain(planned: Planned, chain: Chain, cluster: Cluster, rows: int, **fixed: Any) -> str:
    """The whole explanation as text; `fixed` are the keyword arguments that `partition` was given."""
    return explained(planned, chain, cluster, rows, **fixed).text


def explained(planned: Planned, chain: Chain, cluster: Cluster, rows: int, **fixed: Any) -> Explained:
    """The whole explanation; `fixed` are the keyword arguments that `partition` was given."""
    rules = rules_of(fixed)
    depths = list(other_depths(planned.plan, chain, cluster, rows, fixed))
    changed = list(changes(chain, cluster, rows, fixed))
    lines = [
        *about_stages(planned.plan, chain, rows, rules),
        *about_slots(planned.plan, cluster),
        "",
        *about_formula(planned.plan, planned.figures),
        "",
        *about_memory(planned.plan, planned.figures, cluster),
        "",
        *about_others(planned, chain, cluster, rows, rules),
        *about_depths(planned, depths),
        "",
        *about_changes(planned, iter(changed)),
    ]
    facts = facts_of(planned.plan, planned.figures, chain, cluster, rows, rules)
    others = [(one.label, None if one.plan is None else one.step_s) for one in (*planned.alternatives[:6], *depths)]
    facts["bound"] = parts(planned.plan, planned.figures).bound
    facts["others"] = others_of(others, planned.step_s)
    facts["changes"] = others_of([(change.label, change.step_s) for change in changed], planned.step_s)
    return Explained("\n".join(lines) + "\n", facts)


def other_depths(plan: Plan, chain: Chain, cluster: Cluster, rows: int, fixed: dict[str, Any]) -> Iterator[Alternative]:
    """Plan again with one stage fewer, and with one more."""
    for label, depth in (("one stage fewer", len(plan.stages) - 1), ("one stage more", len(plan.stages) + 1)):
        if not 1 <= depth <= min(len(cluster.devices), len(chain.blocks)):
            continue
        try:
            found = partition(chain, cluster, rows, **{**fixed, "stages": depth, "replicas": None})
            yield Alternative(label, found.step_s, found.plan)
        except MemoryPlanError:
            yield Alternative(label, 0.0, None)
        except PlanError:
            continue  # what was fixed does not go with so many


def about_depths(planned: Planned, depths: Sequence[Alternative]) -> list[str]:
    """What the best plans of other numbers of stages would take."""
    lines = []
    for one in depths:
        if one.plan is None:
            lines.append(f"  {one.label}: does not fit the memory")
            continue
        fixed = ", but not with what was fixed" if one.step_s < planned.step_s else ""
        lines.append(f"  {one.label}: {milli(one.step_s)} ms ({share(one.step_s, planned.step_s):+.1%}){fixed}")
    return lines


def explain_given(plan: Plan, figures: Figures, chain: Chain, cluster: Cluster, rows: int, rules: Rules) -> Explained:
    """What is known of a plan that was not searched for: its stages, the formula filled in, memory, plain plans."""
    plain = list(plain_plans(chain, cluster, rows, rules))
    lines = [
        *about_stages(plan, chain, rows, rules),
        *about_slots(plan, cluster),
        "",
        *about_formula(plan, figures),
        "",
        *about_memory(plan, figures, cluster),
        "",
        *about_plain(figures, plain),
    ]
    facts = facts_of(plan, figures, chain, cluster, rows, rules)
    facts["bound"] = parts(plan, figures).bound
    facts["others"] = others_of(
        [(one.label, None if one.plan is None else one.step_s) for one in plain], figures.step_s
    )
    facts["changes"] = []
    return Explained("\n".join(lines) + "\n", facts)


def plain_plans(chain: Chain, cluster: Cluster, rows: int, rules: Rules) -> Iterator[Alternative]:
    """The plans without stages, to compare a given plan with."""
    count, blocks = len(cluster.devices), len(chain.blocks)
    fastest = max(range(count), key=lambda device: cluster.devices[device].speed)
    for label, devices in (("one device", (fastest,)), ("data parallelism alone", tuple(range(count)))):
        plain = Plan((Stage(0, blocks, devices),), 1)
        found = evaluate(plain, chain, cluster, rows, rules)
        yield Alternative(label, found.step_s, plain if shortage(plain, cluster, found) is None else None)


def about_plain(figures: Figures, plain: Sequence[Alternative]) -> list[str]:
    """What the plans without stages would take."""
    lines = ["this plan was given; no other was searched for"]
    for one in plain:
        fits = "" if one.plan is not None else ", but does not fit the memory"
        lines.append(f"  {one.label}: {milli(one.step_s)} ms ({share(one.step_s, figures.step_s):+.1%}){fits}")
    return lines


def rules_of(fixed: dict[str, Any]) -> Rules:
    """The rules that `partition` makes of its keyword arguments."""
    names = ("overlap", "whole_rows", "forwarded_skips", "optimizer_bytes_per_parameter_byte")
    return Rules(**{name: fixed[name] for name in names if name in fixed})


def about_stages(plan: Plan, chain: Chain, rows: int, rules: Rules) -> list[str]:
    """Where the blocks went, under their own names, and what leaves each stage."""
    size = largest_micro_batch(rows, min(plan.micro_batches, rows), rules.whole_rows)
    sent = [size_text(flow.going[0] * size + flow.going[1]) for flow in flows(plan, chain, rules)]
    lines = [f"{plan.micro_batches} micro-batch(es), schedule {plan.schedule}"]
    for index, stage in enumerate(plan.stages):
        blocks = [chain.blocks[block] for block in stage.blocks]
        held = size_text(sum(block.parameter_bytes for block in blocks))
        width = f", {stage.tensor} wide" if stage.tensor > 1 else ""
        going = f"; sends {sent[index]} a micro-batch" if index + 1 < len(plan.stages) else ""
        where = f"{'device' if len(stage.devices) == 1 else 'devices'} {', '.join(map(str, stage.devices))}{width}"
        lines.append(
            f"stage {index}: {blocks[0].name} to {blocks[-1].name} ({len(blocks)} block(s), {held} held)"
            f" on {where}{going}"
        )
    return lines


def terms(plan: Plan, stages: tuple[StageFigures, ...]) -> list[StageTerms]:
    """The numbers of the formula."""
    return [
        StageTerms(
            stage.forward_s, stage.backward_s, stage.send_s, stage.return_s, left_over(stage), plan.warm_up(index)
        )
        for index, stage in enumerate(stages)
    ]


def left_over(stage: StageFigures) -> float:
    """Seconds of the all-reduce after the last backward, nobody else on the ports."""
    end = float("-inf")
    for before, takes in stage.reduces:
        end = max(end, -before) + takes
    return max(0.0, end)


def parts(plan: Plan, figures: Figures) -> Part:
    """Fill in the formula."""
    every = routes(terms(plan, figures.stages), plan.schedule, plan.in_flight, plan.micro_batches)
    longest = max(every, key=lambda route: float(route.total))
    return Part(
        float(longest.before),
        float(longest.each),
        longest.times,
        float(longest.after),
        bottleneck(plan, figures, longest),
    )


def bottleneck(plan: Plan, figures: Figures, longest: Route) -> str:
    """What the longest path repeats, in words."""
    s, far = longest.stage, longest.far
    if plan.micro_batches == 1:
        return "the batch is not divided"
    if longest.kind == "gpipe":
        times = [stage.forward_s + stage.backward_s for stage in figures.stages]
        return f"the slowest forwards and backwards, stage {times.index(max(times))} foremost"
    match longest.kind:
        case "there":
            return f"transfer between stages {s} and {far}"
        case "back":
            return f"transfer of gradients between stages {s} and {far}"
        case "forward" | "backward":
            return f"the {longest.kind}s of stage {s}"
        case "loop" if far > s:
            tie = f", with {plan.warm_up(s)} micro-batches in flight" if far == len(plan.stages) - 1 else ""
            return f"the way from stage {s} to stage {far} and back, transfers included{tie}"
        case _:
            times = [stage.forward_s + stage.backward_s for stage in figures.stages]
            slowest = times.index(max(times))
            more = f": stage {slowest} is slower, but with what comes before and after, this way is longer"
            return f"compute of stage {s}" + (more if times[s] < times[slowest] else "")


def about_formula(plan: Plan, figures: Figures) -> list[str]:
    """The stages' numbers, the formula, and its sum."""
    part = parts(plan, figures)
    lines = ["step = the way to where the longest path repeats + times * period + what is left after it   [predicted]"]
    lines.append("stage  forward  backward  transfer  return  all-reduce (left over)   milliseconds a micro-batch")
    for index, stage in enumerate(figures.stages):
        lines.append(
            f"{index:5d} {milli(stage.forward_s):>8} {milli(stage.backward_s):>9} {milli(stage.send_s):>9}"
            f" {milli(stage.return_s):>7} {milli(stage.reduce_s):>11} ({milli(left_over(stage))})"
        )
    computing = [stage.forward_s + stage.backward_s for stage in figures.stages]
    if len(computing) > 1:
        slowest = computing.index(max(computing))
        lines.append(f"the slowest is stage {slowest}, with {milli(computing[slowest])} ms of computing a micro-batch")
    lines.append(
        f"step = {milli(part.fill_s)} + {part.periods} * {milli(part.period_s)} + {milli(part.tail_s)}"
        f" = {milli(part.total_s)} ms by the formula, {milli(figures.step_s)} ms by replaying the schedule"
    )
    shares = {
        "the steady state": part.periods * part.period_s,
        "filling the pipeline": part.fill_s,
        "the last way back and the all-reduces": part.tail_s,
    }
    largest = max(shares, key=lambda name: shares[name])
    bound = part.bound if plan.micro_batches == 1 else f"the period is bound by {part.bound}"
    lines.append(f"most of it is {largest}; {bound}")
    waits = figures.step_s - figures.compute_end_s
    if waits > 0.005 * figures.step_s:
        lines.append(f"all-reduces last {milli(waits)} ms longer than all computing")
    return lines


def about_memory(plan: Plan, figures: Figures, cluster: Cluster) -> list[str]:
    """Memory of a device of each stage, and what is the limit."""
    lines = []
    for index, (stage, needed) in enumerate(zip(plan.stages, figures.memory_bytes, strict=True)):
        limits = [cluster.devices[device].memory_bytes for device in stage.devices]
        least = min((limit for limit in limits if limit is not None), default=None)
        of = "no limit" if least is None else f"of {size_text(least)} ({needed / least:.0%})"
        lines.append(f"stage {index}: {size_text(needed)} {of}, {plan.warm_up(index)} micro-batches in flight")
    return lines


def about_others(planned: Planned, chain: Chain, cluster: Cluster, rows: int, rules: Rules) -> list[str]:
    """The next best plans, how much slower, and the part of the formula that makes them so."""
    mine = parts(planned.plan, planned.figures)
    lines = ["other plans:"]
    for other in planned.alternatives[:6]:
        if other.plan is None:
            lines.append(f"  {other.label}: does not fit the memory")
            continue
        figures = evaluate(other.plan, chain, cluster, rows, rules)
        ratio = f"{milli(figures.step_s)} ms ({share(figures.step_s, planned.step_s):+.1%})"
        if figures.step_s < planned.step_s:
            lines.append(f"  {other.label}: {ratio}, but not with what was fixed")
            continue
        part = parts(other.plan, figures)
        more = {
            "its steady state": part.periods * part.period_s - mine.periods * mine.period_s,
            "filling the pipeline": part.fill_s - mine.fill_s,
            "its last way back and all-reduces": part.tail_s - mine.tail_s,
            "waits that only the replay shows": (figures.step_s - part.total_s) - (planned.step_s - mine.total_s),
        }
        worst = max(more, key=lambda name: more[name])
        lost = f"; loses {milli(more[worst])} ms in {worst} ({part.bound})" if figures.step_s > planned.step_s else ""
        lines.append(f"  {other.label}: {ratio}{lost}")
    return lines


def changes(chain: Chain, cluster: Cluster, rows: int, fixed: dict[str, Any]) -> Iterator[Change]:
    """Plan again on each changed cluster."""
    for label, changed in changed_clusters(cluster):
        try:
            yield Change(label, partition(chain, changed, rows, **fixed).step_s)
        except MemoryPlanError:
            yield Change(label, None)


def changed_clusters(cluster: Cluster) -> Iterator[tuple[str, Cluster]]:
    """Single changes that money can buy."""
    links = cluster.links
    if links.inter is not None and cluster.machines > 1:
        faster = Link(links.inter.bandwidth_bytes_per_s * 2, links.inter.latency_s)
        yield "twice the bandwidth between machines", replace(cluster, links=replace(links, inter=faster))
        if links.inter.latency_s > 0:
            nearer = Link(links.inter.bandwidth_bytes_per_s, links.inter.latency_s / 2)
            yield "half the latency between machines", replace(cluster, links=replace(links, inter=nearer))
    if any(link is not None for link in links.intra):
        doubled = tuple(link and Link(link.bandwidth_bytes_per_s * 2, link.latency_s) for link in links.intra)
        yield "twice the bandwidth inside machines", replace(cluster, links=replace(links, intra=doubled))
    if any(device.memory_bytes is not None for device in cluster.devices):
        yield "20 % more memory", replace(cluster, devices=tuple(roomier(device) for device in cluster.devices))
    if cluster.crowded:
        yield "slots for all devices", replace(cluster, slots=())
    quicker = tuple(replace(device, speed=device.speed * 1.2) for device in cluster.devices)
    yield "devices 20 % faster", replace(cluster, devices=quicker)


def roomier(device: Device) -> Device:
    """The device with 20 % more memory."""
    return device if device.memory_bytes is None else replace(device, memory_bytes=int(device.memory_bytes * 1.2))


def about_changes(planned: Planned, found: Iterator[Change]) -> list[str]:
    """What would help, most first."""
    known = sorted(found, key=lambda change: (change.step_s is None, change.step_s or 0.0, change.label))
    lines = ["planned again with:"]
    for change in known:
        if change.step_s is None:
            lines.append(f"  {change.label}: no plan fits")
            continue
        gain = share(planned.step_s, change.step_s)
        lines.append(f"  {change.label}: predicted step {milli(change.step_s)} ms ({gain:+.1%} speed)")
    return lines


def share(longer_s: float, shorter_s: float) -> float:
    """How much longer, as a share of the shorter; 0 where nothing takes time."""
    return longer_s / shorter_s - 1 if shorter_s > 0 else 0.0


def milli(seconds: float) -> str:
    """Milliseconds with four figures."""
    return f"{seconds * 1e3:.4g}"


def formula_seconds(plan: Plan, figures: Figures) -> float:
    """The step by the formula."""
    return float(step_formula(terms(plan, figures.stages), plan.schedule, plan.in_flight, plan.micro_batches))
