"""Time one training step of this runtime beside eager PyTorch, DDP and torch.distributed.pipelining.

All that is compared runs in one launch, in alternating rounds, on Gloo ranks with one
thread each. A ratio is the median of the ratios within a round; below 1 this runtime is
faster. Peak memory is taken from fresh processes: resident memory above what the
process had before the model was built, and the tensors allocated within a step.

    python benchmarks/step_time.py --cases gpt vgg --ranks 1 2 4 --json figures.json
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from baselines import PAIRS, Step, contenders
from step_models import CASES, Case
from torch._C._profiler import _ExtraFields_Allocation
from tqdm import tqdm

WARM_UP = 2


def main() -> None:
    """Run what the command line asks for, print tables, and write the figures as JSON."""
    names = [case.name for case in CASES]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=names, choices=names, help="models (default: all)")
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 4], choices=[1, 2, 4], help="numbers of ranks")
    parser.add_argument("--rounds", type=int, default=7, help="alternating rounds (default 7)")
    parser.add_argument("--steps", type=int, default=3, help="steps a round (default 3; tiny: 20 times as many)")
    parser.add_argument("--rivals-only", action="store_true", help="leave this runtime out")
    parser.add_argument("--no-memory", action="store_true", help="leave out peak memory, which takes extra launches")
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(**json.loads(arguments.worker))
        return
    figures: dict[str, Any] = {"machine": machine(), "rounds": arguments.rounds, "steps": arguments.steps, "runs": []}
    runs = [(case, ranks) for case in CASES if case.name in arguments.cases for ranks in arguments.ranks]
    print(figures["machine"])
    for case, ranks in tqdm(runs, desc="launches", unit="launch", disable=not sys.stderr.isatty()):
        steps = arguments.steps * (20 if case.name == "tiny" else 1)
        run = launch(case, ranks, mode="time", rounds=arguments.rounds, steps=steps, rivals_only=arguments.rivals_only)
        if not arguments.no_memory:
            for name in run["seconds"]:
                run["memory"][name] = launch(case, ranks, mode="memory", only=name)["memory"][name]
        figures["runs"].append(run)
        tqdm.write(table(run))
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def machine() -> str:
    """Return one line on the processor, its cores and the versions."""
    model = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), model)
    load = os.getloadavg()[0]
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    return f"{model}, {os.cpu_count()} cores, load at the start {load:.1f}, {versions}"


def launch(case: Case, ranks: int, **options: Any) -> dict[str, Any]:
    """Start the ranks of one measurement and return what rank 0 found."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run.json"
        worker = json.dumps({"case_name": case.name, "out": str(out), **options})
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command += [__file__, "--worker", worker]
        finished = subprocess.run(
            command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=1800
        )
        if finished.returncode:
            raise SystemExit(f"{case.name} on {ranks} ranks failed:\n{finished.stdout}\n{finished.stderr}")
        found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        return found


def work(
    case_name: str,
    out: str,
    mode: str,
    only: str | None = None,
    rounds: int = 0,
    steps: int = 0,
    rivals_only: bool = False,
) -> None:
    """Be one rank: build the contenders, time or weigh them, and let rank 0 write the figures."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    case = next(case for case in CASES if case.name == case_name)
    makers = contenders(case, dist.get_world_size())
    run: dict[str, Any] = {"case": case.name, "ranks": dist.get_world_size(), "micro_batches": case.micro_batches}
    run |= {"seconds": {}, "build_s": {}, "losses": {}, "memory": {}}
    if mode == "memory":
        assert only is not None
        toy = list(contenders(CASES[-1], dist.get_world_size()).values())[list(makers).index(only)]
        run["memory"][only] = weigh(makers[only], toy)
    else:
        built: dict[str, Step] = {}
        for name, make in makers.items():
            if rivals_only and name.startswith("ours"):
                continue
            begin = time.perf_counter()
            built[name] = make()
            run["losses"][name] = known([built[name]() for _ in range(WARM_UP)][-1])
            run["build_s"][name] = time.perf_counter() - begin
        same(run["losses"])
        run["seconds"] = {name: [] for name in built}
        for _ in range(rounds):
            for name, step in built.items():
                run["seconds"][name].append(timed(step, steps))
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(run), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def timed(step: Step, steps: int) -> float:
    """Return the seconds a step takes, from a common start to a common end."""
    gc.collect()
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    dist.barrier()
    return (time.perf_counter() - begin) / steps


def known(loss: float | None) -> float:
    """Return the loss on every rank, where only some ranks know it."""
    told: list[float | None] = [None] * dist.get_world_size()
    dist.all_gather_object(told, loss)
    return next(value for value in reversed(told) if value is not None)


def same(losses: dict[str, float]) -> None:
    """Refuse to compare contenders that do not compute the same thing."""
    low, high = min(losses.values()), max(losses.values())
    if high - low > 1e-3 * abs(high):
        raise SystemExit(f"the contenders disagree on the loss: {losses}")


def weigh(make: Callable[[], Step], toy: Callable[[], Step]) -> list[dict[str, int]]:
    """Return for each rank the peak of resident memory and of tensors over two steps.

    The toy of the same kind goes first, so that the code it loads is not counted.
    """
    toy()()
    settle()
    base = resident("VmRSS")
    step = make()
    for _ in range(WARM_UP):
        step()
    settle()
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak starts anew
    dist.barrier()
    for _ in range(2):
        step()
    peak = resident("VmHWM") - base
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, {"resident_bytes": peak, "step_tensor_bytes": highest(profile)})
    return told


def settle() -> None:
    """Give memory that nobody uses back to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def resident(field: str) -> int:
    """Return a memory figure of this process in bytes, from /proc."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def highest(profile: torch.profiler.profile) -> int:
    """Return the most bytes of tensors that were alive at once among those a profile saw allocated."""
    assert profile.profiler is not None and profile.profiler.kineto_results is not None
    waiting, changes = list(profile.profiler.kineto_results.experimental_event_tree()), []
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if isinstance(event.extra_fields, _ExtraFields_Allocation):
            changes.append((event.start_time_ns, event.extra_fields.alloc_size))
    level = most = 0
    for _, change in sorted(changes, key=lambda pair: pair[0]):
        level += change
        most = max(most, level)
    return most


def table(run: dict[str, Any]) -> str:
    """Return one launch's figures as a Markdown table."""
    head = f"\n{run['case']}, {run['ranks']} rank(s), {run['micro_batches']} micro-batches in pipelines"
    lines = [
        head,
        "",
        "| | step, median | a micro-batch | peak resident | tensors in a step |",
        "|---|---|---|---|---|",
    ]
    for name, seconds in run["seconds"].items():
        middle = statistics.median(seconds)
        weights = run["memory"].get(name, [])
        columns = [max(row[key] for row in weights) / 1e6 if weights else None for key in WEIGHTS]
        megabytes = " | ".join("–" if value is None else f"{value:.0f} MB" for value in columns)
        lines.append(f"| {name} | {middle * 1e3:.2f} ms | {middle * 1e3 / run['micro_batches']:.3f} ms | {megabytes} |")
    lines.append("")
    for ours, theirs in PAIRS:
        if ours in run["seconds"] and theirs in run["seconds"]:
            pairs = zip(run["seconds"][ours], run["seconds"][theirs], strict=True)
            lines.append(f"{ours} / {theirs}: {statistics.median(a / b for a, b in pairs):.3f}")
    return "\n".join(lines)


WEIGHTS = ("resident_bytes", "step_tensor_bytes")

if __name__ == "__main__":
    main()
