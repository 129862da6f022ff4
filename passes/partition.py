"""Choose the plan: stages, replicas, devices, micro-batches and schedule for a chain on a cluster."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from efftra_fx.cluster import Cluster
from efftra_fx.cost import Chain
from efftra_fx.errors import MemoryPlanError, PlanError
from efftra_fx.plan import SCHEDULES, Plan, Stage

from .evaluate import Figures, Rules, evaluate


@dataclass(frozen=True)
class Alternative:
    """Another plan, what it is, and its predicted step; `plan=None` when it does not fit."""

    label: str
    step_s: float
    plan: Plan | None


@dataclass(frozen=True)
class Planned:
    """The best plan found, the bound below which no plan can be, and what else was looked at."""

    plan: Plan
    figures: Figures
    lower_bound_s: float
    candidates: int
    alternatives: tuple[Alternative, ...] = ()
    limited: str = ""

    @property
    def step_s(self) -> float:
        """Predicted seconds of one step."""
        return self.figures.step_s

    @property
    def memory_bytes(self) -> tuple[int, ...]:
        """Bytes on the fullest device of each stage."""
        return self.figures.memory_bytes


def partition(
    chain: Chain,
    cluster: Cluster,
    rows: int,
    *,
    stages: int | None = None,
    replicas: tuple[int, ...] | None = None,
    micro_batches: int | None = None,
    schedule: str | None = None,
    tensor: int | None = None,
    optimizer_bytes_per_parameter_byte: float = 2.0,
    overlap: bool = True,
) -> Planned:
    """Choose the plan for a global batch of `rows`; what is given is kept, the rest is searched.

    Raise PlanError when a given part cannot be had, MemoryPlanError when nothing fits.
    """
    check_request(chain, cluster, rows, stages, replicas, micro_batches, schedule)
    if tensor not in (None, 1):
        raise PlanError(f"tensor width {tensor}: {chain.name} has no cost for it")
    rules = Rules(overlap=overlap, optimizer_bytes_per_parameter_byte=optimizer_bytes_per_parameter_byte)
    best: tuple[float, Plan, Figures] | None = None
    closest: tuple[float, str] | None = None
    count = 0
    for counts in replica_choices(len(chain.blocks), len(cluster.devices), stages, replicas):
        for micro in [micro_batches] if micro_batches else micro_choices(rows, len(counts)):
            cuts = balanced_cuts(chain, counts, rows / micro)
            for name in [schedule] if schedule else SCHEDULES if len(counts) > 1 else SCHEDULES[:1]:
                plan = contiguous_plan(chain, counts, cuts, micro, name)
                figures = evaluate(plan, chain, cluster, rows, rules)
                count += 1
                short = shortage(plan, cluster, figures)
                if short is not None:
                    closest = min(closest, short) if closest else short
                elif best is None or figures.step_s < best[0]:
                    best = figures.step_s, plan, figures
    if best is None:
        assert closest is not None
        raise MemoryPlanError(f"no plan fits the memory of the devices; the closest: {closest[1]}")
    _, plan, figures = best
    plan = replace(plan, predicted_step_s=figures.step_s, memory_bytes=figures.memory_bytes)
    return Planned(plan, figures, 0.0, count)


def check_request(
    chain: Chain,
    cluster: Cluster,
    rows: int,
    stages: int | None,
    replicas: tuple[int, ...] | None,
    micro_batches: int | None,
    schedule: str | None,
) -> None:
    """Raise PlanError when a fixed part cannot be had."""
    blocks, devices = len(chain.blocks), len(cluster.devices)
    if rows < 1:
        raise PlanError(f"rows must be 1 or more, got {rows}")
    if replicas is not None:
        if not replicas or min(replicas) < 1:
            raise PlanError(f"replicas must be 1 or more for each stage, got {replicas}")
        if stages is not None and stages != len(replicas):
            raise PlanError(f"stages={stages} but replicas={replicas} is for {len(replicas)} stages")
        if sum(replicas) > devices:
            raise PlanError(f"replicas={replicas} need {sum(replicas)} devices, the cluster has {devices}")
        stages = len(replicas)
    if stages is not None and not 1 <= stages <= devices:
        raise PlanError(f"stages={stages} needs as many devices, the cluster has {devices}")
    if stages is not None and stages > blocks:
        raise PlanError(f"stages={stages} but {chain.name} has {blocks} blocks; ask for at most {blocks}")
    if micro_batches is not None and not 1 <= micro_batches <= rows:
        raise PlanError(f"micro_batches={micro_batches} but the batch has {rows} rows; ask for 1 to {rows}")
    if schedule is not None and schedule not in SCHEDULES:
        raise PlanError(f"schedule must be one of {', '.join(SCHEDULES)}, got {schedule!r}")


def replica_choices(
    blocks: int, devices: int, stages: int | None, replicas: tuple[int, ...] | None
) -> Iterator[tuple[int, ...]]:
    """Replica counts to try: what is fixed, else even ones with what is left over going to early stages."""
    if replicas is not None:
        yield replicas
        return
    for depth in [stages] if stages else range(1, min(blocks, devices) + 1):
        for used in sorted({depth, devices}):
            yield tuple(used // depth + (index < used % depth) for index in range(depth))


def micro_choices(rows: int, depth: int) -> list[int]:
    """Numbers of micro-batches to try."""
    if depth == 1:
        return [1]
    return [micro for micro in (1, 2, 4, 8, 16, 32, 64) if micro <= rows]


def balanced_cuts(chain: Chain, counts: tuple[int, ...], rows: float) -> tuple[int, ...]:
    """Cut the chain so that the slowest stage, for its replicas, is fastest; exact, by dynamic program."""
    total = [0.0]
    for block in chain.blocks:
        total.append(total[-1] + block.forward.at(rows) + block.backward.at(rows))
    blocks, depth = len(chain.blocks), len(counts)
    best = [total[stop] / counts[0] for stop in range(blocks + 1)]
    choice = []
    for index in range(1, depth):
        row = [float("inf")] * (blocks + 1)
        cut = [0] * (blocks + 1)
        for stop in range(index + 1, blocks + 1):
            row[stop], cut[stop] = min(
                (max(best[at], (total[stop] - total[at]) / counts[index]), at) for at in range(index, stop)
            )
        best = row
        choice.append(cut)
    cuts = [blocks]
    for cut in reversed(choice):
        cuts.append(cut[cuts[-1]])
    return (0, *reversed(cuts))


def contiguous_plan(chain: Chain, counts: tuple[int, ...], cuts: tuple[int, ...], micro: int, schedule: str) -> Plan:
    """Stages on devices in order."""
    starts = [sum(counts[:index]) for index in range(len(counts))]
    stages = tuple(
        Stage(
            cuts[index],
            cuts[index + 1],
            tuple(range(starts[index], starts[index] + count)),
            names=tuple(block.name for block in chain.blocks[cuts[index] : cuts[index + 1]]),
        )
        for index, count in enumerate(counts)
    )
    return Plan(stages, micro, schedule, placement="contiguous")


def shortage(plan: Plan, cluster: Cluster, figures: Figures) -> tuple[float, str] | None:
    """How many bytes are missing on the fullest device, in words; `None` when the plan fits."""
    worst: tuple[float, str] | None = None
    for index, (stage, needed) in enumerate(zip(plan.stages, figures.memory_bytes, strict=True)):
        for device in stage.devices:
            limit = cluster.devices[device].memory_bytes
            if limit is not None and needed > limit and (worst is None or needed - limit > worst[0]):
                words = (
                    f"stage {index} of {len(plan.stages)} needs {needed / 1e9:.3g} GB but device {device} has"
                    f" {limit / 1e9:.3g} GB ({(needed - limit) / 1e9:.3g} GB are missing);"
                    f" add devices, memory or micro-batches"
                )
                worst = needed - limit, words
    return worst
