"""Time the first step of each new sequence length, in CPU seconds: the second, third and tenth that a program meets.

    python benchmarks/lengths.py

Each length is compiled for, checked against eager, and differentiated when it is first met.
"""

from __future__ import annotations

import argparse
import time
import warnings
from typing import Any

import architectures
import torch
from torch import Tensor, nn

from efftra_fx import Cluster, compile

LENGTHS = (8, 9, 11, 7, 12, 13, 5, 16, 10, 14)


class Recurrent(nn.Module):
    """A language model of two LSTM layers."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(architectures.WORDS, 32), nn.Linear(32, architectures.WORDS)
        self.run = nn.LSTM(32, 32, 2, batch_first=True)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return the loss."""
        scores = self.out(self.run(self.table(input_ids))[0])
        return {"loss": nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())}


def seconds(model: nn.Module) -> list[float]:
    """Return the CPU seconds of the first step of each length; the first of them includes compiling."""
    found: list[float] = []
    program = None
    for length in LENGTHS:
        ids = torch.randint(4, architectures.WORDS, (architectures.ROWS, length))
        batch: dict[str, Any] = {"input_ids": ids, "labels": ids.clone()}
        begin = time.process_time()
        if program is None:
            options: dict[str, Any] = {"stages": 2, "replicas": (2, 1), "micro_batches": 3, "costs": "estimated"}
            program = compile(model, Cluster.local(3), example_inputs=(), example_kwargs=batch, **options)
        program.step(**batch)
        found.append(time.process_time() - begin)
    return found


def main() -> None:
    """Print a table."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    models = {"gpt2": architectures.build("gpt2")[0], "lstm": Recurrent().double()}
    print("| model | compiling, and the first length | second | third | tenth |")
    print("|---|---|---|---|---|")
    for name, model in models.items():
        times = seconds(model)
        shown = " | ".join(f"{times[index]:.2f} s" for index in (0, 1, 2, 9))
        print(f"| {name} | {shown} |", flush=True)


if __name__ == "__main__":
    main()
