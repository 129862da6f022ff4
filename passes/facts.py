"""What an explanation says, as plain data: dictionaries, lists, texts and numbers, the units in the names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from efftra_fx.cluster import Cluster
from efftra_fx.cost import Chain
from efftra_fx.plan import Plan

from .evaluate import Figures, flows, largest_micro_batch
from .rules import Rules

Other = tuple[str, float | None]  # what it is, and its step in seconds; None where no plan fits


def facts_of(plan: Plan, figures: Figures, chain: Chain, cluster: Cluster, rows: int, rules: Rules) -> dict[str, Any]:
    """Return the plan's step, and for each stage where it is, what it holds, computes, sends and needs."""
    size = largest_micro_batch(rows, min(plan.micro_batches, rows), rules.whole_rows)
    crossing = flows(plan, chain, rules)
    stages: list[dict[str, Any]] = []
    for index, (stage, found) in enumerate(zip(plan.stages, figures.stages, strict=True)):
        blocks = [chain.blocks[block] for block in stage.blocks]
        limits = [cluster.devices[device].memory_bytes for device in stage.devices]
        last = index + 1 == len(plan.stages)
        stages.append(
            {
                "stage": index,
                "first": blocks[0].name,
                "last": blocks[-1].name,
                "blocks": [block.name for block in blocks],
                "devices": list(stage.devices),
                "replicas": stage.replicas,
                "tensor": stage.tensor,
                "recompute": stage.recompute,
                "parameter_bytes": sum(block.parameter_bytes for block in blocks),
                "memory_bytes": figures.memory_bytes[index],
                "memory_limit_bytes": min((limit for limit in limits if limit is not None), default=None),
                "micro_batches_in_flight": plan.warm_up(index),
                "forward_s": found.forward_s,
                "backward_s": found.backward_s,
                "transfer_s": found.send_s,
                "return_s": found.return_s,
                "all_reduce_s": found.reduce_s,
                "sent_bytes": 0.0 if last else crossing[index].going[0] * size + crossing[index].going[1],
            }
        )
    computing = [stage["forward_s"] + stage["backward_s"] for stage in stages]
    return {
        "step_s": figures.step_s,
        "rows": rows,
        "micro_batches": plan.micro_batches,
        "schedule": plan.schedule,
        "slowest_stage": computing.index(max(computing)),
        "stages": stages,
    }


def others_of(others: Iterable[Other], step_s: float) -> list[dict[str, Any]]:
    """Return what else was looked at, and how many times the plan's own step it takes."""
    return [
        {"plan": label, "step_s": other_s, "times": None if other_s is None or not step_s else other_s / step_s}
        for label, other_s in others
    ]


def with_parameters(facts: dict[str, Any], held: Sequence[Sequence[tuple[str, int]]]) -> dict[str, Any]:
    """Return facts that also say which parameters each stage holds, and how many numbers; `held` is by stage."""
    stages = [
        {**stage, "parameters": [name for name, _ in one], "parameter_count": sum(count for _, count in one)}
        for stage, one in zip(facts["stages"], held, strict=True)
    ]
    every = {name: count for one in held for name, count in one}
    return {**facts, "stages": stages, "parameter_count": sum(every.values())}
