"""Say what tensor groups would make of a plan: at each width that may be chosen, or what they would take at least."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from efftra_fx.cluster import Cluster
from efftra_fx.cost import Chain
from efftra_fx.plan import Plan, Stage

from .evaluate import evaluate
from .partition import shortage
from .rules import Rules
from .shard_groups import leaves_machine
from .width_search import LEAST_GAIN


def about_widths(
    plan: Plan, chain: Chain, every: Chain, cluster: Cluster, rows: int, rules: Rules, one_stage: bool
) -> list[str]:
    """Price each other width that was looked at: the plan's own stages so wide, or (`one_stage`) one such stage.

    `chain` has options for widths that were worked out, `every` for those too of which only a bound is known.
    """
    present = {stage.tensor for stage in plan.stages}
    same = present if len(present) == 1 else set()
    known, looked_at = _widths(chain), _widths(every)

    def tell(widths: set[int], given: Chain, least: str) -> Iterator[str]:
        for width in sorted(widths - same):
            plans = list(_plans(plan, width, cluster, one_stage))
            if plans:
                yield f"  {width} wide: {_priced(plan, plans, given, cluster, rows, rules, least)}"

    lines, bounds = list(tell(known, chain, "")), list(tell(looked_at - known, every, "at least "))
    found = ["other tensor widths, predicted:", *lines] if lines else []
    return found + (
        [f"tensor widths that gain less than {LEAST_GAIN:.0%} at best, by a bound:", *bounds] if bounds else []
    )


def why_no_widths(cluster: Cluster) -> list[str]:
    """Say that groups were dismissed at once, where machines have several devices."""
    links = [link.bandwidth_bytes_per_s for link in cluster.links.intra if link is not None]
    if not links:
        return []
    return [
        f"no tensor groups: over links of at most {max(links) / 1e9:.3g} GB/s inside machines, what they must sum "
        "takes longer than what they save, in every block"
    ]


def _widths(chain: Chain) -> set[int]:
    return {option.tensor for block in chain.blocks for option in block.options if option.tensor > 1}


def _plans(plan: Plan, width: int, cluster: Cluster, one_stage: bool) -> Iterator[Plan]:
    """Yield the plan with its devices in groups, and one stage over all devices in groups."""
    same = tuple(
        replace(stage, tensor=width) if _groups(stage.devices, width, cluster) else stage for stage in plan.stages
    )
    if any(stage.tensor == width for stage in same):
        yield replace(plan, stages=same)
    for count in range(len(cluster.devices) // width * width, 0, -width) if one_stage else ():
        devices = tuple(range(count))
        if _groups(devices, width, cluster):
            yield replace(plan, stages=(Stage(0, plan.blocks, devices, width),))
            return


def _groups(devices: tuple[int, ...], width: int, cluster: Cluster) -> bool:
    return len(devices) % width == 0 and not leaves_machine(devices, width, cluster)


def _priced(plan: Plan, plans: list[Plan], chain: Chain, cluster: Cluster, rows: int, rules: Rules, least: str) -> str:
    assert plan.predicted_step_s is not None
    found = [(evaluate(one, chain, cluster, rows, rules), one) for one in plans]
    fitting = [(figures.step_s, one) for figures, one in found if shortage(one, cluster, figures) is None]
    if not fitting:
        return "does not fit the memory"
    best_s, best = min(fitting, key=lambda one: one[0])
    replicas = ", ".join(str(stage.replicas) for stage in best.stages)
    more = best_s / plan.predicted_step_s - 1
    return f"{len(best.stages)} stage(s) of {replicas} replica(s), {least}{best_s * 1e3:.4g} ms ({more:+.1%})"


__all__ = ["about_widths", "why_no_widths"]
