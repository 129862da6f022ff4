"""Time a stack of GPT blocks under tensor parallelism: this runtime beside torch.distributed.tensor.parallel.

Torch's plan is written by hand, column then row (Megatron's scheme); this runtime finds its own. Both
run in one launch, in alternating rounds, on Gloo ranks with one thread each. A ratio is the median of
the ratios within a round; below 1 this runtime is faster.

    python benchmarks/tensor_parallel.py --ranks 2 4 --json figures.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm

Step = Callable[[], float]
WIDTH, HEADS, LAYERS, ROWS, LENGTH = 256, 8, 4, 8, 128


class Block(nn.Module):
    """A pre-norm transformer block, (rows, length, width) to the same; heads may be a part of all."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.size = width // heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.project = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        y = self.norm1(x)
        query, key, value = (
            made(y).view(rows, length, -1, self.size).transpose(1, 2) for made in (self.query, self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(rows, length, -1))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))  # type: ignore[no-any-return]


def make() -> nn.Module:
    """Return the stack, with the same weights at every call on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block(WIDTH, HEADS) for _ in range(LAYERS)))


def batch() -> tuple[Tensor, Tensor]:
    """Return inputs and targets of (rows, length, width)."""
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(ROWS, LENGTH, WIDTH, generator=generator),
        torch.randn(ROWS, LENGTH, WIDTH, generator=generator),
    )


def by_hand() -> Step:
    """Torch's: column-parallel into attention and MLP, row-parallel out of them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model, (x, y) = make(), batch()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.children():
        columns = dict.fromkeys(("query", "key", "value", "up"), ColwiseParallel())
        parallelize_module(block, mesh, {**columns, **dict.fromkeys(("project", "down"), RowwiseParallel())})

    def step() -> float:
        model.zero_grad()
        loss = functional.mse_loss(model(x), y)
        loss.backward()
        return float(loss.detach())

    return step


def found() -> Step:
    """This runtime's, one stage as wide as there are ranks."""
    from efftra_fx import Cluster, compile

    x, y = batch()
    program = compile(
        make(),
        Cluster.from_env(),
        example_inputs=(x,),
        example_target=y,
        loss_fn=functional.mse_loss,
        tensor=(dist.get_world_size(),),
        micro_batches=1,
        costs="estimated",
        progress=False,
    )
    parameters = list(program.parameters())

    def step() -> float:
        for parameter in parameters:
            parameter.grad = None
        return float(program.step(x, target=y))

    return step


def main() -> None:
    """Run what the command line asks for, print a line for each number of ranks, and write the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4], choices=[2, 4], help="numbers of ranks")
    parser.add_argument("--rounds", type=int, default=7, help="alternating rounds (default 7)")
    parser.add_argument("--steps", type=int, default=3, help="steps a round (default 3)")
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(**json.loads(arguments.worker))
        return
    runs = []
    for ranks in tqdm(arguments.ranks, desc="launches", unit="launch", disable=not sys.stderr.isatty()):
        run = launch(ranks, arguments.rounds, arguments.steps)
        runs.append(run)
        ratio = statistics.median(a / b for a, b in zip(run["found"], run["by hand"], strict=True))
        ours, theirs = statistics.median(run["found"]), statistics.median(run["by hand"])
        tqdm.write(f"{ranks} ranks: {ours:.4f} s here, {theirs:.4f} s by hand in torch, ratio {ratio:.3f} (measured)")
    if arguments.json:
        arguments.json.write_text(json.dumps(runs, indent=1) + "\n", encoding="utf-8")


def launch(ranks: int, rounds: int, steps: int) -> dict[str, Any]:
    """Start the ranks of one measurement and return what rank 0 found."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run.json"
        worker = json.dumps({"out": str(out), "rounds": rounds, "steps": steps})
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        finished = subprocess.run(
            [*command, __file__, "--worker", worker],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=900,
        )
        if finished.returncode:
            raise SystemExit(f"{ranks} ranks failed:\n{finished.stdout}\n{finished.stderr}")
        read: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        return read


def work(out: str, rounds: int, steps: int) -> None:
    """Be one rank: build both, see that they agree, time them, and let rank 0 write the figures."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    contenders = {"found": found(), "by hand": by_hand()}
    losses = {name: step() for name, step in contenders.items()}
    if abs(losses["found"] - losses["by hand"]) > 1e-4 * abs(losses["by hand"]):
        raise SystemExit(f"losses differ: {losses}")
    run: dict[str, Any] = {"ranks": dist.get_world_size(), **{name: [] for name in contenders}}
    for _ in range(rounds):
        for name, step in contenders.items():
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(steps):
                step()
            dist.barrier()
            run[name].append((time.perf_counter() - begin) / steps)
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(run), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
