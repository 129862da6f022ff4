"""`efftra plan WORKLOAD.json --cluster CLUSTER.toml`: plan a published profile and print the plan."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from efftra_fx.cluster import Cluster
from efftra_fx.cost import Chain
from efftra_fx.errors import EfftraError, PlanError
from efftra_fx.passes.explain import explained
from efftra_fx.passes.partition import partition
from efftra_fx.passes.planned import Planned
from efftra_fx.plan import Stage
from efftra_fx.units import size_text
from efftra_fx.workload import load_workload

Ids = tuple[tuple[int, ...], ...]


def plan_command(argv: Sequence[str]) -> int:
    """Run the command and return the exit status; what goes wrong is one line on stderr."""
    options = parser().parse_args(list(argv))
    try:
        print(planned_text(options), end="")
    except EfftraError as error:
        print(f"efftra: {error}", file=sys.stderr)
        return 1
    return 0


def parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    made = argparse.ArgumentParser(prog="efftra plan", description="Plan a published profile on a described cluster.")
    made.add_argument("workload", help="profile, schema workload/1, gzipped or not")
    made.add_argument("--cluster", required=True, help="cluster file (TOML), see examples/clusters")
    made.add_argument("--batch", type=int, help="rows of the global batch; default: a profile batch for each device")
    made.add_argument("--micro-batches", type=int, help="default: searched")
    made.add_argument("--schedule", choices=("1f1b", "gpipe"), help="default: searched")
    made.add_argument("--stages", type=int, help="default: searched")
    made.add_argument("--replicas", help="replicas of each stage, such as 7,1; default: searched")
    made.add_argument("--tensor", type=int, help="tensor-parallel width of every stage; default: searched")
    made.add_argument("--no-overlap", action="store_true", help="all-reduces start after a stage's last backward")
    made.add_argument("--no-memory-limit", action="store_true", help="take the devices' memory as unlimited")
    made.add_argument(
        "--direct-skips", action="store_true", help="skips go straight to their readers, not stage by stage"
    )
    made.add_argument("--recompute", action="store_true", help="allow stages to compute their forward again")
    made.add_argument("--whole-rows", action="store_true", help="rows are never cut in two among replicas")
    made.add_argument("--limit-s", type=float, default=60.0, help="stop searching after so many seconds (default 60)")
    made.add_argument("--json", action="store_true", help="print JSON with the same content")
    made.add_argument("--explain", action="store_true", help="say why, and what would help")
    return made


def planned_text(options: argparse.Namespace) -> str:
    """Plan and print; raise the package's errors."""
    started = time.perf_counter()
    if not options.limit_s >= 0:
        raise PlanError(f"--limit-s must be 0 or more seconds, got {options.limit_s}")
    workload = load_workload(options.workload)
    cluster = Cluster.load(options.cluster)
    if options.no_memory_limit:
        cluster = cluster.without_memory_limits()
    chain, ids = workload.chain()
    if options.recompute:
        chain = replace(chain, blocks=tuple(block.with_recompute() for block in chain.blocks))
    usual = workload.rows_per_profile * max(len(cluster.devices), workload.micro_batches or 1)
    rows = usual if options.batch is None else options.batch
    fixed: dict[str, Any] = {
        "stages": options.stages,
        "replicas": read_replicas(options.replicas),
        "micro_batches": options.micro_batches,
        "schedule": options.schedule,
        "tensor": options.tensor,
        "overlap": not options.no_overlap,
        "whole_rows": options.whole_rows,
        "forwarded_skips": not options.direct_skips,
        "undivided_alone": True,
        "limit_s": options.limit_s,
    }
    planned = partition(chain, cluster, rows, **fixed)
    seconds = time.perf_counter() - started
    told = explained(planned, chain, cluster, rows, **fixed) if options.explain else None
    why = told.text if told is not None else ""
    data = as_data(planned, chain, cluster, ids, rows, seconds)
    if options.json:
        return (
            json.dumps({**data, "explanation": why, "facts": told.facts} if told is not None else data, indent=1) + "\n"
        )
    return as_table(planned, data, cluster) + (f"\n{why}" if why else "")


def read_replicas(text: str | None) -> tuple[int, ...] | None:
    """Numbers with commas between."""
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise PlanError(f"--replicas must be numbers with commas between, such as 7,1, got {text!r}") from None


def as_data(planned: Planned, chain: Chain, cluster: Cluster, ids: Ids, rows: int, seconds: float) -> dict[str, Any]:
    """The plan and what was found on the way, as JSON data; all times are predicted seconds."""
    plan = planned.plan
    stages = [
        {
            "nodes": [node for block in stage.blocks for node in ids[block]],
            "names": [chain.blocks[block].name for block in stage.blocks],
            "replicas": stage.replicas,
            "tensor": stage.tensor,
            "recompute": stage.recompute,
            "devices": list(stage.devices),
            "memory_bytes": memory,
            "forward_s": figures.forward_s,
            "backward_s": figures.backward_s,
            "send_s": figures.send_s,
            "reduce_s": figures.reduce_s,
        }
        for stage, memory, figures in zip(plan.stages, planned.memory_bytes, planned.figures.stages, strict=True)
    ]
    return {
        "stages": stages,
        "micro_batches": plan.micro_batches,
        "schedule": plan.schedule,
        "in_flight": plan.in_flight,
        "placement": plan.placement,
        "batch": rows,
        "devices_used": len(plan.devices),
        "devices_given": len(cluster.devices),
        "step_s": planned.step_s,
        "lower_bound_s": planned.lower_bound_s,
        "gap": planned.step_s / planned.lower_bound_s - 1 if planned.lower_bound_s > 0 else None,
        "proven": planned.proven,
        "limited": planned.limited,
        "candidates": planned.candidates,
        "planning_s": seconds,
        "alternatives": [
            {
                "label": other.label,
                "step_s": other.step_s,
                "slower": slower(other.step_s, planned.step_s),
                "fits": other.plan is not None,
                "replicas": [stage.replicas for stage in other.plan.stages] if other.plan else None,
                "micro_batches": other.plan.micro_batches if other.plan else None,
            }
            for other in planned.alternatives
        ],
    }


def slower(step_s: float, best_s: float) -> float:
    """How much slower than the best, as a share; nothing is slower than a model that takes no time."""
    return step_s / best_s - 1 if best_s > 0 else 0.0


def as_table(planned: Planned, data: dict[str, Any], cluster: Cluster) -> str:
    """The same content to read."""
    plan = planned.plan
    order = plan.schedule + (", deep warm-up" if plan.in_flight == 2 else "")
    lines = [
        f"predicted step {planned.step_s * 1e3:.2f} ms for {data['batch']} rows"
        f" in {plan.micro_batches} micro-batches ({order}, {plan.placement})",
        gap_line(planned),
        used_line(data),
        "",
        "stage  replicas  tensor   memory  devices          nodes",
    ]
    for index, stage in enumerate(plan.stages):
        memory = size_text(planned.memory_bytes[index])
        nodes = data["stages"][index]["nodes"]
        lines.append(
            f"{index:5d}  {stage.replicas:8d}  {stage.tensor:6d}  {memory:>7}  {device_range(stage):15}  "
            f"{len(nodes)} nodes, ids {shortened(nodes)}"
        )
        lines.append(f"{'':42}{first_words(data['stages'][index]['names'])}")
    lines += ["", "alternatives (predicted)"]
    for other in data["alternatives"]:
        what = f"{other['step_s'] * 1e3:10.2f} ms  {other['slower']:+8.1%}" if other["fits"] else f"{'':16}does not fit"
        lines.append(f"  {other['label']:42} {what}")
    lines.append(f"\nplanned in {data['planning_s']:.2f} s, {planned.candidates} plans priced")
    return "\n".join(lines) + "\n"


def gap_line(planned: Planned) -> str:
    """The bound, and whether the plan is proven."""
    if planned.proven:
        return "proven: every plan was looked at"
    gap = planned.step_s / planned.lower_bound_s - 1 if planned.lower_bound_s > 0 else 0.0
    stopped = f"; {planned.limited}" if planned.limited else ""
    return f"no plan can be below {planned.lower_bound_s * 1e3:.2f} ms: at most {gap:.1%} from the best{stopped}"


def used_line(data: dict[str, Any]) -> str:
    """Whether devices stay idle."""
    if data["devices_used"] == data["devices_given"]:
        return f"all {data['devices_given']} devices are used"
    return f"{data['devices_used']} of {data['devices_given']} devices are used: more would not be faster"


def device_range(stage: Stage) -> str:
    """The devices, runs shortened."""
    return shortened(list(stage.devices))


def shortened(numbers: list[int]) -> str:
    """Numbers with runs joined: 0-3, 8."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    words = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    return ", ".join(words if len(words) <= 6 else [*words[:5], "…", words[-1]])


def first_words(names: list[str]) -> str:
    """The first and the last name, long ones cut off."""
    short = [name if len(name) <= 34 else name[:33] + "…" for name in (names[0], names[-1])]
    return short[0] if len(names) == 1 else f"{short[0]} … {short[1]}"
