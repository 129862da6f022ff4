"""Time `compile` by its parts, for the models of the step-time benchmark, on as many ranks as were launched.

    torchrun --nproc-per-node 4 benchmarks/compile_time.py --case gpt

Costs are measured anew: what earlier runs have kept is not looked at.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time

import torch
from baselines import model_of
from step_models import CASES

from efftra_fx import Cluster, compile


def main() -> None:
    """Compile one model as its user would, and let rank 0 print the seconds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", default="gpt", choices=[case.name for case in CASES])
    arguments = parser.parse_args()
    case = next(case for case in CASES if case.name == arguments.case)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as fresh:
        os.environ["EFFTRA_FX_CACHE"] = fresh
        begin = time.perf_counter()
        cluster = Cluster.from_env()
        connected = time.perf_counter()
        x, y = case.batch()
        program = compile(model_of(case), cluster, example_inputs=(x,), example_target=y, loss_fn=case.loss)
        end = time.perf_counter()
    if program.rank == 0:
        print(f"{case.name} on {len(cluster.devices)} rank(s), {torch.__version__}")
        print(program.report.table())
        print(f"measure the links: {connected - begin:.2f} s, compile: {end - connected:.2f} s (measured)")


if __name__ == "__main__":
    main()
