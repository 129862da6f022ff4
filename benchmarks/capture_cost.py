"""Hold the cost of a capture with its check against a plain export and two eager steps, in CPU time.

    python benchmarks/capture_cost.py
    python benchmarks/capture_cost.py gpt2 clip --rounds 5

The plain export is `torch.export.export` with the same symbolic batch, and nothing done to what it gives.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import time
import warnings
from collections.abc import Callable
from statistics import median
from typing import Any

import architectures
import torch
import transformers as hf
from torch import Tensor, nn
from torch.export import Dim

from efftra_fx.example import find_batch, proof_inputs
from efftra_fx.signature import Call, read_call
from efftra_fx.trace import capture
from efftra_fx.trace_check import check_capture

CASES = ("gpt2", "gpt2 of 8 layers, width 256", "bert", "t5", "resnet")


def build(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """Return a model and its batch."""
    if name in architectures.ARCHITECTURES:
        return architectures.build(name)
    config = hf.GPT2Config(vocab_size=2048, n_embd=256, n_layer=8, n_head=8, n_positions=128)
    ids = torch.randint(0, 2048, (16, 128))
    return hf.GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids}


class _Loss(nn.Module):
    def __init__(self, model: nn.Module, call: Call) -> None:
        super().__init__()
        self.model, self.call = model, call

    def forward(self, tensors: list[Tensor]) -> Tensor:
        args, kwargs, _ = self.call.rebuild(tensors)
        loss: Tensor = self.model(*args, **kwargs)["loss"]
        return loss


def cpu_seconds(work: Callable[[], None]) -> float:
    """Return the CPU time that some work takes."""
    begin = time.process_time()
    work()
    return time.process_time() - begin


def hold(name: str, rounds: int) -> tuple[float, float, float]:
    """Return the CPU seconds of a plain export, of an eager step, and of a capture with its check; medians."""
    model, inputs = build(name)
    call, tensors = read_call(model.forward, (), inputs, None)
    rows, dims = find_batch(call, tensors, {})
    auto: Any = Dim.AUTO
    shapes = [None if dim is None else {dim: auto} for dim in dims]
    small = proof_inputs(tensors, dims, rows)

    def export() -> None:
        with contextlib.redirect_stderr(io.StringIO()):
            torch.export.export(_Loss(model, call), (list(tensors),), dynamic_shapes=(shapes,), strict=False)

    def step() -> None:
        loss = model(**inputs)["loss"]
        torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad], allow_unused=True)

    def ours() -> None:
        check_capture(model, capture(model, call, tensors, dims), small, None)

    for work in (export, step, ours):
        work()
    figures = [[cpu_seconds(work) for work in (export, step, ours)] for _ in range(rounds)]
    plain, eager, mine = (median(column) for column in zip(*figures, strict=True))
    return plain, eager, mine


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(CASES), help="architectures")
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    print("| model | plain export | eager step | capture and check | ratio |")
    print("|---|---|---|---|---|")
    for name in chosen.names:
        plain, eager, mine = hold(name, chosen.rounds)
        ratio = mine / (plain + 2 * eager)
        print(f"| {name} | {plain:.2f} s | {eager:.3f} s | {mine:.2f} s | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
