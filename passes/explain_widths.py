"""Say what tensor groups would make of a plan: at each width that may be chosen, or why none was looked at."""

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


def about_widths(plan: Plan, step_s: float, chain: Chain, cluster: Cluster, rows: int, rules: Rules) -> list[str]:
    """Price each other width that the chain has times for: the plan's own stages so wide, or one such stage."""
    present = {stage.tensor for stage in plan.stages}
    known = {option.tensor for block in chain.blocks for option in block.options if option.tensor > 1}
    widths = sorted(known - (present if len(present) == 1 else set()))
    lines = [
        f"  {width} wide: {_priced(list(_plans(plan, width, cluster)), step_s, chain, cluster, rows, rules)}"
        for width in widths
    ]
    return ["other tensor widths, predicted:", *lines] if lines else []


def why_no_widths(cluster: Cluster, least_bytes_per_s: float) -> list[str]:
    """Say that links are too slow for tensor groups to be looked at, where machines have several devices."""
    links = [link.bandwidth_bytes_per_s for link in cluster.links.intra if link is not None]
    if not links or max(links) >= least_bytes_per_s:
        return []
    return [
        f"no tensor groups: they sum at every layer, and the links inside machines have at most {max(links) / 1e9:.3g} "
        f"GB/s; under {least_bytes_per_s / 1e9:g} GB/s groups are tried only where nothing fits without (or by tensor=)"
    ]


def _plans(plan: Plan, width: int, cluster: Cluster) -> Iterator[Plan]:
    """Yield the plan with its devices in groups, and one stage over all devices in groups."""
    same = tuple(
        replace(stage, tensor=width) if _groups(stage.devices, width, cluster) else stage for stage in plan.stages
    )
    if any(stage.tensor == width for stage in same):
        yield replace(plan, stages=same)
    for count in range(len(cluster.devices) // width * width, 0, -width):
        devices = tuple(range(count))
        if _groups(devices, width, cluster):
            yield replace(plan, stages=(Stage(0, plan.blocks, devices, width),))
            return


def _groups(devices: tuple[int, ...], width: int, cluster: Cluster) -> bool:
    return len(devices) % width == 0 and not leaves_machine(devices, width, cluster)


def _priced(plans: list[Plan], step_s: float, chain: Chain, cluster: Cluster, rows: int, rules: Rules) -> str:
    found = [(evaluate(plan, chain, cluster, rows, rules), plan) for plan in plans]
    fitting = [(figures.step_s, plan) for figures, plan in found if shortage(plan, cluster, figures) is None]
    if not found:
        return "no group of so many devices lies inside a machine"
    if not fitting:
        return "does not fit the memory"
    best_s, best = min(fitting, key=lambda one: one[0])
    replicas = ", ".join(str(stage.replicas) for stage in best.stages)
    return f"{len(best.stages)} stage(s) of {replicas} replica(s), {best_s * 1e3:.4g} ms ({best_s / step_s - 1:+.1%})"


__all__ = ["about_widths", "why_no_widths"]
