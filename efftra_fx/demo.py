"""Train two small models on four local ranks, and show the plan, the prediction and the proof.

`python -m efftra_fx demo` starts the ranks. Each part prints what the planner knows, in
the model's own names, with what data parallelism alone and GPipe alone would cost
(simulated); trains; and prints the measured step time beside the predicted one and the
check against one device.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm

from efftra_fx.api import CompiledModel, compile
from efftra_fx.cluster import Cluster
from efftra_fx.errors import EfftraError

GOAL = 0.97  # held-out accuracy on the digits
HELD_OUT = 360  # digits that training does not see
ROW_BYTES = 64  # bytes of text in a row of a batch
TEXT_BYTES = 2_000_000  # how much of the standard library's sources is read


def main(arguments: list[str] | None = None) -> int:
    """Start the ranks, or be one of them; return 0 if both parts did what they promise."""
    parser = argparse.ArgumentParser(prog="efftra demo", description="train two small models on local ranks")
    parser.add_argument("--ranks", type=int, default=4, help="local ranks (default 4)")
    parser.add_argument("--part", choices=("digits", "text", "both"), default="both")
    options = parser.parse_args(arguments)
    if "RANK" not in os.environ:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.ranks}"]
        command += ["-m", "efftra_fx.demo", "--part", options.part]
        return subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False).returncode
    torch.set_num_threads(1)
    cluster = Cluster.from_env()
    good = options.part == "text" or digits(cluster)
    return 0 if (options.part == "digits" or text(cluster)) and good else 1


def digits(cluster: Cluster) -> bool:
    """Train a convolutional network on handwritten digits; say whether it reads 97 % of unseen ones."""
    images, classes = load_digits()
    torch.manual_seed(0)
    model = nn.Sequential()
    model.add_module("conv1", nn.Sequential(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU()))
    model.add_module("conv2", nn.Sequential(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)))
    model.add_module("hidden", nn.Sequential(nn.Flatten(), nn.Linear(64 * 4 * 4, 128), nn.ReLU()))
    model.add_module("classes", nn.Linear(128, 10))
    seen = (images[HELD_OUT:], classes[HELD_OUT:])
    batches = [(x, y) for _ in range(15) for x, y in shuffled(*seen, rows=128)]

    say("\n== digits: a convolutional network ==")
    program = compile(
        model, cluster, example_inputs=(images[:128],), example_target=classes[:128], loss_fn=functional.cross_entropy
    )
    train(program, batches, rate=2e-3)
    guesses = program.evaluate(images[:HELD_OUT]).argmax(1)
    accuracy: float = (guesses == classes[:HELD_OUT]).double().mean().item()
    say(f"held-out accuracy {accuracy:.1%} on {HELD_OUT} digits, promised {GOAL:.0%}")
    return accuracy >= GOAL


def text(cluster: Cluster) -> bool:
    """Train a small GPT on the bytes of Python's standard library; say whether it learned and equals one device."""
    source = load_text()
    held, seen = source[: 32 * (ROW_BYTES + 1)].view(32, -1), source[32 * (ROW_BYTES + 1) :]
    torch.manual_seed(0)
    model = GPT(vocabulary=256, length=ROW_BYTES, width=96, layers=4, heads=4)
    generator = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(300):
        starts = torch.randint(len(seen) - ROW_BYTES, (16, 1), generator=generator)
        rows = seen[starts + torch.arange(ROW_BYTES + 1)]
        batches.append((rows[:, :-1], rows[:, 1:]))

    say("\n== text: a small GPT on the standard library's sources, byte by byte, in two stages at our wish ==")
    x, y = batches[0]
    program = compile(model, cluster, example_inputs=(x,), example_target=y, loss_fn=token_loss, stages=2)
    before = token_loss(program.evaluate(held[:, :-1]), held[:, 1:]).item()
    train(program, batches, rate=2e-3)
    after = token_loss(program.evaluate(held[:, :-1]), held[:, 1:]).item()
    say(f"held-out loss a byte {before:.2f} before, {after:.2f} after (an even guess: 5.55)")
    return after < 0.6 * before


def train(program: CompiledModel, batches: list[tuple[Tensor, Tensor]], rate: float) -> None:
    """Print the plan, check a step against one device, train, and compare prediction and measurement."""
    say(program.plan.explain())
    program.check(batches[0][0], target=batches[0][1])
    optimizer = torch.optim.AdamW(program.parameters(), lr=rate)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, len(batches))
    seconds = []
    bar = tqdm(
        batches, desc="training", unit="step", disable=not first(), mininterval=1.0 if sys.stderr.isatty() else 5.0
    )
    for x, y in bar:
        begin = time.perf_counter()
        loss = program.step(x, target=y)
        seconds.append(time.perf_counter() - begin)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        bar.set_postfix(loss=f"{float(loss):.3f}", refresh=False)
    predicted = program.plan.predicted_step_s
    told = "" if predicted is None else f", {predicted * 1e3:.1f} ms predicted"
    say(f"step time: {statistics.median(seconds) * 1e3:.1f} ms measured (median of {len(seconds)}){told}")


def load_digits() -> tuple[Tensor, Tensor]:
    """Return 1,797 images (float32, 1 × 8 × 8, from 0 to 1) and their classes, in a fixed random order."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise EfftraError('the digits are part of scikit-learn, found none; pip install "efftra-fx[demo]"') from error
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    return images[order], torch.tensor(data.target)[order]


def load_text() -> Tensor:
    """Return the first 2 MB of the standard library's own sources as int64 bytes."""
    folder = Path(os.__file__).parent
    joined = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    return torch.frombuffer(bytearray(joined[:TEXT_BYTES]), dtype=torch.uint8).long()


def shuffled(images: Tensor, classes: Tensor, rows: int) -> list[tuple[Tensor, Tensor]]:
    """Return one epoch of batches, alike on every rank; the last is smaller."""
    order = torch.randperm(len(images))
    return [(images[part], classes[part]) for part in torch.split(order, rows)]


def token_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross-entropy a byte, in nats."""
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


class Block(nn.Module):
    """A pre-norm transformer block with causal attention, (rows, length, width) to the same."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        heads = self.query_key_value(self.norm1(x)).view(rows, length, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """A small GPT with a tied head: (rows, length) int64 to logits (rows, length, vocabulary)."""

    def __init__(self, vocabulary: int, length: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        for table in (self.token, self.position):
            nn.init.normal_(table.weight, std=0.1)
        self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def first() -> bool:
    """Say whether this rank is the one that talks."""
    return os.environ.get("RANK", "0") == "0"


def say(words: str) -> None:
    """Print once, not once a rank."""
    if first():
        print(words, flush=True)


if __name__ == "__main__":
    sys.exit(main())
