"""How long planning takes: published profiles, and made-up chains of growing length on growing clusters.

    python benchmarks/plan_time.py [FOLDER] [--large] [--plot FILE.svg]

Times are of one process with one thread (set OMP_NUM_THREADS=1); both wall time and
processor time are printed. `--large` adds 10,000 nodes on 4,096 devices.
"""

from __future__ import annotations

import argparse
import random
import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from efftra_fx.cluster import Cluster, Link
from efftra_fx.cost import Chain, Crossing, NodeCost, Timing
from efftra_fx.passes.partition import partition
from efftra_fx.workload import load_workload

FOLDER = Path(__file__).parent.parent.parent / "shared" / "workloads"
CLUSTERS = Path(__file__).parent.parent / "examples" / "clusters"
GROWTH = ((50, 64), (100, 64), (200, 64), (500, 64), (1000, 64), (200, 16), (200, 256), (200, 1024), (1000, 1024))


@dataclass(frozen=True)
class Timed:
    """One planning run."""

    name: str
    blocks: int
    devices: int
    wall_s: float
    processor_s: float
    gap: float
    peak_mb: float


def main() -> int:
    """Print the tables."""
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("folder", nargs="?", type=Path, default=FOLDER)
    words.add_argument("--large", action="store_true", help="add 10,000 nodes on 4,096 devices")
    words.add_argument("--plot", type=Path, help="write the growth as an SVG picture")
    options = words.parse_args()
    print(f"{'what':34}{'blocks':>8}{'devices':>9}{'wall s':>9}{'cpu s':>8}{'gap':>8}{'peak MB':>9}")
    for path in sorted((options.folder / "pipedream").glob("*.json*")):
        show(timed_profile(path, Cluster.load(CLUSTERS / "4x4_pcie_10g.toml").without_memory_limits(), 64))
    path = options.folder / "piper" / "bert32a100.json"
    if path.exists():
        for devices in (64, 1024):
            show(timed_profile(path, big_cluster(devices), None))
    found = [timed(f"made-up {blocks} x {devices}", made_up(blocks), big_cluster(devices), 8 * devices, None, True)
             for blocks, devices in GROWTH]  # fmt: skip
    for one in found:
        show(one)
    if options.large:
        show(timed("made-up 10000 x 4096", made_up(10_000), big_cluster(4096), 8 * 4096, None, True))
    if options.plot:
        options.plot.write_text(drawing(found), encoding="utf-8")
        print(f"wrote {options.plot}")
    return 0


def timed_profile(path: Path, cluster: Cluster, micro_batches: int | None) -> Timed:
    """Plan a published profile; reading the file counts."""
    started, processor = time.perf_counter(), time.process_time()
    workload = load_workload(path)
    chain, _ = workload.chain()
    rows = workload.rows_per_profile * max(len(cluster.devices), workload.micro_batches or 1)
    read = time.perf_counter() - started, time.process_time() - processor
    one = timed(workload.name, chain, cluster, rows, micro_batches, False)
    return Timed(
        one.name, one.blocks, one.devices, one.wall_s + read[0], one.processor_s + read[1], one.gap, one.peak_mb
    )


def timed(name: str, chain: Chain, cluster: Cluster, rows: int, micro_batches: int | None, overlap: bool) -> Timed:
    """Plan once."""
    started, processor = time.perf_counter(), time.process_time()
    planned = partition(
        chain, cluster, rows, micro_batches=micro_batches, overlap=overlap, whole_rows=False, forwarded_skips=True,
        undivided_alone=True,
    )  # fmt: skip
    wall, used = time.perf_counter() - started, time.process_time() - processor
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    gap = planned.step_s / planned.lower_bound_s - 1 if planned.lower_bound_s > 0 else float("nan")
    return Timed(name, len(chain.blocks), len(cluster.devices), wall, used, gap, peak)


def show(one: Timed) -> None:
    """One row of the table."""
    print(
        f"{one.name:34}{one.blocks:8d}{one.devices:9d}{one.wall_s:9.2f}{one.processor_s:8.2f}{one.gap:8.1%}{one.peak_mb:9.0f}",
        flush=True,
    )


def made_up(blocks: int) -> Chain:
    """A chain with uneven blocks, weights heavy at its end, so that no simple plan is the best."""
    rng = random.Random(blocks)
    costs = []
    for index in range(blocks):
        weight = 4e8 / blocks * rng.uniform(0.2, 1.8) * (12 if index > 0.9 * blocks else 1)
        seconds = 0.4 / blocks * rng.uniform(0.5, 1.5) * (0.2 if index > 0.9 * blocks else 1)
        costs.append(
            NodeCost(f"block{index}", Timing(0, seconds / 50), Timing(0, seconds / 25), weight, weight, 1e5, 1e5)
        )
    crossings = tuple(Crossing(index, (index + 1,), 4e5 * rng.uniform(0.2, 2)) for index in range(blocks - 1))
    return Chain(tuple(costs), crossings, name=f"made-up-{blocks}")


def big_cluster(devices: int) -> Cluster:
    """Machines of eight devices with 80 GB, 300 GB/s inside, 12.5 GB/s between."""
    return Cluster.uniform(devices // 8, 8, 80, Link(300e9, 3e-6), Link(12.5e9, 1e-5), kind="A100")


def drawing(found: list[Timed]) -> str:
    """Growth with blocks (64 devices) and with devices (200 blocks) as a small SVG, seconds of processor time."""
    width, height, left = 640, 260, 50
    top = max(one.processor_s for one in found) * 1.1
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-size="11">']
    panels = [("blocks, 64 devices", "blocks", [one for one in found if one.devices == 64]),
              ("devices, 200 blocks", "devices", [one for one in found if one.blocks == 200])]  # fmt: skip
    for panel, (title, field, ones) in enumerate(panels):
        base, span = left + panel * 310, 240
        ones = sorted(ones, key=lambda one: int(getattr(one, field)))
        most = max(int(getattr(one, field)) for one in ones)
        points = [(base + span * getattr(one, field) / most, 220 - 190 * one.processor_s / top) for one in ones]
        path = " ".join(f"{x:.0f},{y:.0f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="black"/><text x="{base}" y="245">{title}</text>')
        for (x, y), one in zip(points, ones, strict=True):
            label = f"{getattr(one, field)}: {one.processor_s:.2f} s"
            parts.append(
                f'<circle cx="{x:.0f}" cy="{y:.0f}" r="3"/><text x="{x - 40:.0f}" y="{y - 8:.0f}">{label}</text>'
            )
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    sys.exit(main())
