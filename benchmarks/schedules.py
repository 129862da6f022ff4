"""Time steps while a number that the loss reads stays, and while it is another one at each step.

    python benchmarks/schedules.py

A weight of a term of the loss is annealed, as the divergence of a variational autoencoder is: eager PyTorch takes it
as it comes. The model is a tiny GPT-2 on 3 ranks in one process; steps with both weights are taken in turn.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from statistics import median
from typing import Any

import architectures
import torch
from torch import Tensor

from efftra_fx import Cluster, compile

WEIGHT = 0.0


def loss(output: Any) -> Tensor:
    """Return the model's loss, and a share of how large its scores are."""
    found: Tensor = output.loss + WEIGHT * output.logits.square().mean()
    return found


def seconds(step: Callable[[], Any]) -> float:
    """Return the seconds of a step."""
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="steps with each weight")
    count = parser.parse_args().steps
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    model, batch = architectures.build("gpt2")
    plan: dict[str, Any] = {"stages": 2, "replicas": (2, 1), "micro_batches": 3, "costs": "estimated"}
    program = compile(model, Cluster.local(3), example_inputs=(), example_kwargs=batch, loss_fn=loss, **plan)
    stays, moves, first = [], [], 0.0
    for number in range(count):
        globals()["WEIGHT"] = 0.0
        stays.append(seconds(lambda: program.step(**batch)))
        globals()["WEIGHT"] = 0.1 + number / count
        moves.append(seconds(lambda: program.step(**batch)))
        first = first or moves[0]
    print(f"a step with the weight it was compiled for   {1e3 * median(stays):8.2f} ms")
    print(f"the first with another                       {1e3 * first:8.2f} ms")
    print(f"with another weight at each step             {1e3 * median(moves[1:]):8.2f} ms")
    print(f"torch {torch.__version__}, 1 thread, medians of {count} steps")


if __name__ == "__main__":
    main()
