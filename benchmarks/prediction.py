"""Hold predicted step times against measured ones, for several plans of one model, in turn on the launched ranks.

    torchrun --nproc-per-node 4 --local-ranks-filter 0 benchmarks/prediction.py --case gpt --replicas 1 2 4 1,1 2,1

Each entry of `--replicas` fixes the replicas of every stage; the planner chooses the rest. Costs are measured anew.
The first row is the plan that it chooses by itself.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time

import torch
from baselines import model_of
from step_models import CASES, Case

from efftra_fx import Cluster, CompiledModel, compile


def main() -> None:
    """Compile every plan, let them step in turn, and let rank 0 print predicted and measured milliseconds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", default="gpt", choices=[case.name for case in CASES])
    parser.add_argument("--replicas", nargs="*", default=["1"], help="replicas of each stage, such as 2,1")
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    case = next(case for case in CASES if case.name == arguments.case)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as fresh:
        os.environ["EFFTRA_FX_CACHE"] = fresh
        cluster = Cluster.from_env()
        fixed = [None, *(tuple(map(int, text.split(","))) for text in arguments.replicas)]
        programs = [compiled(case, cluster, replicas) for replicas in fixed]
    measured: list[list[float]] = [[] for _ in programs]
    x, y = case.batch()
    for _ in range(arguments.rounds + 1):
        for program, seconds in zip(programs, measured, strict=True):
            begin = time.perf_counter()
            program.step(x, target=y)
            seconds.append(time.perf_counter() - begin)
            for parameter in program.parameters():
                parameter.grad = None
    if programs[0].rank == 0:
        slots = f", {cluster.slots[0]:g} at once" if cluster.slots and cluster.slots[0] else ""
        print(f"{case.name} on {len(cluster.devices)} rank(s){slots}, {torch.__version__}\n")
        print("| replicas | devices at work | micro-batches | predicted | measured | measured / predicted |")
        print("|---|---|---|---|---|---|")
        for program, seconds in zip(programs, measured, strict=True):
            print(row(program, statistics.median(seconds[1:])))


def compiled(case: Case, cluster: Cluster, replicas: tuple[int, ...] | None) -> CompiledModel:
    """Compile a model of its own by these replicas."""
    x, y = case.batch()
    return compile(
        model_of(case),
        cluster,
        example_inputs=(x,),
        example_target=y,
        loss_fn=case.loss,
        replicas=replicas,
        progress=False,
    )


def row(program: CompiledModel, seconds: float) -> str:
    """Return a plan's row of the table."""
    plan = program.plan
    replicas = ", ".join(str(stage.replicas) for stage in plan.stages)
    predicted = plan.predicted_step_s
    if predicted is None:
        return f"| {replicas} | {len(plan.devices)} | {plan.micro_batches} | – | {seconds * 1e3:.2f} ms | – |"
    return (
        f"| {replicas} | {len(plan.devices)} | {plan.micro_batches} | {predicted * 1e3:.2f} ms |"
        f" {seconds * 1e3:.2f} ms | {seconds / predicted:.2f} |"
    )


if __name__ == "__main__":
    main()
