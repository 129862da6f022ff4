"""Predict measured iteration times of GPT models, and see how good the planner's pick is.

    python benchmarks/ground_truth.py [FILE.csv] [--fit-layers 16]

The file holds measured Megatron-DeepSpeed iterations on A100 machines of eight: GPUs,
global batch, micro-batch, hidden size, heads, layers, sequence, tensor, data, pipeline
width, milliseconds. The rows of one layer count are the profile: for each hidden size,
tensor width and micro-batch, the seconds of a layer, of embedding and head, and of
what a step costs beside them are fitted to them; all other layer counts are predicted
by the planner's own price of the plan. "Pick": in each group of settings that do the same
work on the same number of GPUs, the setting with the least predicted time.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from efftra_fx.cluster import Cluster, Link
from efftra_fx.cost import Chain, Crossing, NodeCost, Option, Timing
from efftra_fx.passes.evaluate import evaluate
from efftra_fx.passes.rules import Rules
from efftra_fx.plan import Plan, Stage

FILE = Path(__file__).parent.parent.parent / "shared" / "workloads" / "ground_truth" / "vtrain_ground_truth_single.csv"
VOCABULARY = 51_200
RULES = Rules(overlap=False, whole_rows=True)
LINK = Link(230e9, 8e-6)  # NVLink inside the machine


@dataclass(frozen=True)
class Measured:
    """One row of the file; `micro` is the micro-batch of one replica, in rows."""

    gpus: int
    batch: int
    micro: int
    hidden: int
    layers: int
    sequence: int
    tensor: int
    data: int
    pipeline: int
    seconds: float

    @property
    def micro_batches(self) -> int:
        """How many a replica works through."""
        return self.batch // (self.micro * self.data)

    @property
    def profile(self) -> tuple[int, int, int]:
        """What a profile is fitted for."""
        return self.hidden, self.tensor, self.micro

    @property
    def group(self) -> tuple[int, int, int, int]:
        """Settings that compete: the same work on the same number of GPUs."""
        return self.gpus, self.batch, self.hidden, self.layers


@dataclass(frozen=True)
class Profile:
    """Fitted seconds: of a layer, of embedding and head together (a micro-batch there and back), of a step beside."""

    layer_s: float
    ends_s: float
    step_s: float


def main() -> int:
    """Fit, predict, print."""
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("file", nargs="?", type=Path, default=FILE)
    words.add_argument("--fit-layers", type=int, default=16, help="layer count whose rows are the profile (default 16)")
    options = words.parse_args()
    rows = read(options.file)
    known = [row for row in rows if row.layers == options.fit_layers]
    others = [row for row in rows if row.layers != options.fit_layers]
    if not known or not others:
        print(f"no rows with {options.fit_layers} layers, or no others")
        return 1
    profiles = fit_all(known)
    report("fitted rows", known, profiles)
    good = report("predicted rows", others, profiles)
    return 0 if good else 1


def read(path: Path) -> list[Measured]:
    """The rows of the file."""
    with path.open(encoding="utf-8") as file:
        lines = list(csv.reader(file))[1:]
    found = []
    for line in lines:
        gpus, batch, micro, hidden, _, layers, sequence, tensor, data, pipeline = (int(float(x)) for x in line[:10])
        seconds = float(line[10]) / 1e3
        found.append(Measured(gpus, batch, micro, hidden, layers, sequence, tensor, data, pipeline, seconds))
    return found


def layer_bytes(hidden: int) -> float:
    """Half-precision weights of one transformer layer."""
    return 2.0 * (12 * hidden * hidden + 13 * hidden)


def fit_all(rows: Sequence[Measured]) -> dict[tuple[int, int, int], Profile]:
    """A profile for each (hidden size, tensor width, micro-batch)."""
    keys = sorted({row.profile for row in rows})
    return {key: fit([row for row in rows if row.profile == key]) for key in keys}


def fit(rows: Sequence[Measured]) -> Profile:
    """Least squares on relative errors, nothing negative: the price is linear in what is unknown."""
    weights = 1 / np.array([row.seconds for row in rows])
    target = np.array([row.seconds - fixed_seconds(row) for row in rows])
    solved = non_negative(np.array([unknowns(row) for row in rows]) * weights[:, None], target * weights)
    return Profile(*solved)


def non_negative(table: NDArray[np.float64], target: NDArray[np.float64]) -> list[float]:
    """Least squares with no negative part, by coordinate descent on the normal equations."""
    scale = np.sqrt((table**2).sum(axis=0)) + 1e-30
    normal, right = (table / scale).T @ (table / scale), (table / scale).T @ target
    found = np.zeros(table.shape[1])
    for _ in range(4000):
        for column in range(len(found)):
            rest = right[column] - normal[column] @ found + normal[column, column] * found[column]
            found[column] = max(0.0, rest / normal[column, column]) if normal[column, column] > 1e-12 else 0.0
    return [float(value) for value in found / scale]


def unknowns(row: Measured) -> list[float]:
    """How often each unknown counts in the step: all layers once, those of a stage again for each more micro-batch."""
    more = row.micro_batches - 1
    share = 1.0 if row.pipeline == 1 else 2 / 3  # the head's part of both ends
    return [row.layers + more * row.layers / row.pipeline, 1.0 + more * share, 1.0]


def fixed_seconds(row: Measured) -> float:
    """What the planner adds by itself: transfers and the gradient all-reduce."""
    return predict(row, Profile(0.0, 0.0, 0.0))


def chain_of(row: Measured, profile: Profile) -> Chain:
    """The model as a chain: embedding, layers, head; times of one tensor-parallel rank, collectives included."""
    weight = layer_bytes(row.hidden)
    table = 2.0 * VOCABULARY * row.hidden
    boundary = 2.0 * row.sequence * row.hidden
    blocks = [block("embedding", profile.ends_s / 3 / row.micro, table, row.tensor)]
    blocks += [block(f"layer{index}", profile.layer_s / row.micro, weight, row.tensor) for index in range(row.layers)]
    blocks.append(block("head", profile.ends_s * 2 / 3 / row.micro, table, row.tensor))
    crossings = tuple(Crossing(index, (index + 1,), boundary) for index in range(len(blocks) - 1))
    return Chain(tuple(blocks), crossings, name="gpt")


def block(name: str, row_s: float, weight: float, tensor: int) -> NodeCost:
    """A block whose forward takes a third of its time."""
    forward, backward = Timing(0.0, row_s / 3), Timing(0.0, row_s * 2 / 3)
    own = Option(forward, backward, weight / tensor, weight / tensor, tensor=tensor)
    return NodeCost(name, forward, backward, weight, weight, options=(own,) if tensor > 1 else ())


def plan_of(row: Measured) -> Plan:
    """The measured setting as a plan: equal stages, the ends with the outer ones."""
    size = row.tensor * row.data
    bounds = [1 + index * row.layers // row.pipeline for index in range(row.pipeline + 1)]
    bounds[0], bounds[-1] = 0, row.layers + 2
    stages = tuple(
        Stage(bounds[s], bounds[s + 1], tuple(range(s * size, (s + 1) * size)), row.tensor)
        for s in range(row.pipeline)
    )  # fmt: skip
    return Plan(stages, row.micro_batches, "1f1b")


def predict(row: Measured, profile: Profile) -> float:
    """Predicted seconds of an iteration by the planner's price of the plan."""
    cluster = Cluster.uniform(1, row.gpus, None, LINK)
    figures = evaluate(plan_of(row), chain_of(row, profile), cluster, row.batch, RULES)
    return figures.step_s + profile.step_s


def report(label: str, rows: Sequence[Measured], profiles: dict[tuple[int, int, int], Profile]) -> bool:
    """Print errors and picks; give back whether the targets are met."""
    predicted = {row: predict(row, profiles[row.profile]) for row in rows}
    errors = sorted(abs(predicted[row] / row.seconds - 1) for row in rows)
    groups: dict[tuple[int, int, int, int], list[Measured]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)
    ratios = []
    for members in groups.values():
        if len(members) > 1:
            pick = min(members, key=lambda row: (predicted[row], row.tensor, row.pipeline, row.micro))
            ratios.append(pick.seconds / min(row.seconds for row in members))
    within = sum(ratio <= 1.05 for ratio in ratios) / len(ratios)
    median, ninetieth = statistics.median(errors), errors[int(0.9 * len(errors))]
    print(f"{label}: {len(rows)} measured, {len(ratios)} groups with a choice")
    print(
        f"  error of the predicted step: median {median:.1%}, 90th percentile {ninetieth:.1%}, worst {errors[-1]:.1%}"
    )
    print(
        f"  pick within 5 % of the fastest measured: {within:.1%}; mean loss {statistics.mean(ratios) - 1:.2%},"
        f" worst {max(ratios) - 1:.1%}"
    )
    for tensor in sorted({row.tensor for row in rows}):
        own = [abs(predicted[row] / row.seconds - 1) for row in rows if row.tensor == tensor]
        print(f"    tensor width {tensor}: median error {statistics.median(own):.1%} of {len(own)}")
    return median <= 0.08 and within >= 0.9


if __name__ == "__main__":
    sys.exit(main())
