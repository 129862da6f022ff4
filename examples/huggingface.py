"""Train a Hugging Face GPT-2 on Python's own sources; the model computes its loss, the head is tied.

torchrun --nproc-per-node 2 --local-ranks-filter 0 examples/huggingface.py
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import GPT2Config, GPT2LMHeadModel

from efftra_fx import Cluster, compile

LENGTH = 64


def rows(source: Tensor, count: int) -> Tensor:
    """Return `count` random rows of LENGTH bytes, the same on every rank."""
    starts = torch.randint(len(source) - LENGTH, (count, 1))
    return source[starts + torch.arange(LENGTH)]


def main() -> None:
    """Train for some steps and write a checkpoint that plain transformers loads."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save", type=Path, help="write the weights here")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    joined = b"".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("*.py")))
    source = torch.frombuffer(bytearray(joined[:1_000_000]), dtype=torch.uint8).long()
    shape = GPT2Config(vocab_size=256, n_positions=LENGTH, n_embd=64, n_layer=4, n_head=4, use_cache=False)
    shape.bos_token_id = shape.eos_token_id = None
    shape.resid_pdrop = shape.embd_pdrop = shape.attn_pdrop = 0.0
    model = GPT2LMHeadModel(shape)

    batch = rows(source, 16)
    program = compile(model, Cluster.from_env(), example_inputs=(batch,), example_kwargs={"labels": batch})
    print(program.plan.explain())
    optimizer = torch.optim.AdamW(program.parameters(), lr=3e-3)
    bar = tqdm(range(arguments.steps), desc="training", unit="step")
    for _ in bar:
        batch = rows(source, 16)
        loss = program.step(batch, labels=batch)
        program.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        bar.set_postfix(loss=f"{float(loss):.3f}")
    print(f"loss a byte after {arguments.steps} steps: {float(loss):.3f}")

    state = program.state_dict()
    GPT2LMHeadModel(shape).load_state_dict(state)
    if arguments.save and program.rank == 0:
        torch.save(state, arguments.save)


if __name__ == "__main__":
    main()
