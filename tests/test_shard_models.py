"""Whole models whose layers are cut: steps of an optimizer are those of one device, whatever the width."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from efftra_fx import Cluster, compile
from efftra_fx.passes import shard
from efftra_fx.passes.shard_choice import Prices
from efftra_fx.plan import Plan, Stage

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

WORDS, WIDTH, HEADS, GROUPS = 37, 24, 6, 2
SIZE = WIDTH // HEADS


@pytest.fixture(autouse=True)
def free_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tiny layers be cut: they would be left whole, since sums cost more than they."""
    monkeypatch.setattr(shard, "Prices", partial(Prices, sum_s=0.0, summed_byte_s=1e-13))


def rotated(x: Tensor) -> Tensor:
    angles = torch.arange(x.shape[-2], dtype=x.dtype).unsqueeze(1) * torch.tensor([1.0, 0.1, 1.0, 0.1], dtype=x.dtype)
    half = x.shape[-1] // 2
    return x * angles.cos() + torch.cat([-x[..., half:], x[..., :half]], -1) * angles.sin()


class LlamaBlock(nn.Module):
    """Grouped heads, rotary positions, a gated MLP of odd width."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.query, self.project = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.key, self.value = (nn.Linear(WIDTH, GROUPS * SIZE, bias=False) for _ in range(2))
        self.gate, self.up, self.down = nn.Linear(WIDTH, 35), nn.Linear(WIDTH, 35), nn.Linear(35, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        query, key, value = (p(y).unflatten(-1, (-1, SIZE)).transpose(1, 2) for p in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(rotated(query), rotated(key), value, is_causal=True, enable_gqa=True)
        x = x + self.project(mixed.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))  # type: ignore[no-any-return]


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(WORDS, WIDTH), nn.RMSNorm(WIDTH)
        self.blocks = nn.Sequential(LlamaBlock())
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embed(tokens))))  # type: ignore[no-any-return]


class Attend(nn.Module):
    """Attention without scale and with a learnt bias for distances, as in T5; to another sequence if there is one."""

    def __init__(self, causal: bool, biased: bool) -> None:
        super().__init__()
        self.causal = causal
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.bias = nn.Embedding(9, HEADS) if biased else None

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        other = x if other is None else other
        query, key, value = (
            p(y).unflatten(-1, (HEADS, SIZE)).transpose(1, 2)
            for p, y in ((self.q, x), (self.k, other), (self.v, other))
        )
        scores = query @ key.transpose(-2, -1)
        if self.bias is not None:
            length = x.shape[1]
            apart = torch.arange(length).unsqueeze(0) - torch.arange(length).unsqueeze(1)
            scores = scores + self.bias(apart.clamp(-4, 4) + 4).permute(2, 0, 1).unsqueeze(0)
            if self.causal:
                scores = scores.masked_fill(apart > 0, float("-inf"))
        return self.o((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class T5(nn.Module):
    """An encoder and a decoder that share their embedding with the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.encode, self.decode, self.cross = Attend(False, True), Attend(True, True), Attend(False, False)
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(5))
        self.up, self.down = nn.Linear(WIDTH, 30, bias=False), nn.Linear(30, WIDTH, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        memory = self.embed(tokens)
        memory = memory + self.encode(self.norms[0](memory))
        memory = self.norms[1](memory + self.down(self.up(memory).relu()))
        x = self.embed(tokens.flip(1))
        x = x + self.decode(self.norms[2](x))
        x = self.norms[4](x + self.cross(self.norms[3](x), memory))
        return F.linear(x * WIDTH**-0.5, self.embed.weight)


MODELS: dict[str, Callable[[], nn.Module]] = {"llama": Llama, "t5": T5}


def token_loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=5)


def made(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    return MODELS[name]().double(), torch.randint(WORDS, (5, 7)), torch.randint(WORDS, (5, 7))


def laid_out(blocks: int, *stages: tuple[int, int]) -> Plan:
    """Return a plan with (replicas, width) a stage."""
    found, device = [], 0
    for index, (replicas, width) in enumerate(stages):
        first, stop = blocks * index // len(stages), blocks * (index + 1) // len(stages)
        found.append(Stage(first, stop, tuple(range(device, device + replicas * width)), width))
        device += replicas * width
    return Plan(tuple(found), 2)


def hold_three_steps(name: str, width: int) -> None:
    """Train as one device does, and hold the whole state against its."""
    model, x, y = made(name)
    options: dict[str, Any] = {"example_inputs": (x,), "example_target": y, "loss_fn": token_loss, "costs": "estimated"}
    program = compile(model, Cluster.local(width), tensor=(width,), micro_batches=2, **options)
    twin, _, _ = made(name)
    optimizers = [torch.optim.AdamW(one.parameters(), lr=1e-2) for one in (program, twin)]
    for _ in range(3):
        program.step(x, target=y)
        token_loss(twin(x), y).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    (sharded,) = program.built.back.sharded
    assert sharded is not None and sum(place.cut is not None for place in sharded.parameters.values()) >= 4
    state = program.state_dict()
    for n, value in twin.state_dict().items():
        torch.testing.assert_close(state[n], value, rtol=0, atol=1e-8)


@pytest.mark.parametrize(("name", "width"), [("llama", 4), ("t5", 2)])
def test_three_steps_are_those_of_one_device(name: str, width: int) -> None:
    hold_three_steps(name, width)


@pytest.mark.long
@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("name", MODELS)
def test_three_steps_under_any_width_are_those_of_one_device(name: str, width: int) -> None:
    hold_three_steps(name, width)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "name", ["gpt2", "llama", "bert", "t5", "mixtral", "clip", "whisper", "mamba", "resnet", "swin"]
)
def test_architectures_that_are_cut_match_one_device(name: str) -> None:
    import architectures
    import coverage

    model, inputs = architectures.build(name)
    loss, gradients = coverage.one_device(model, inputs)
    program = compile(model, Cluster.local(7), example_inputs=(), example_kwargs=inputs, costs="estimated")
    schedule = "1f1b" if program.built.front.tail.linear else "gpipe"
    for shape in ([(1, 2)], [(1, 3)], [(1, 4)], [(2, 2), (1, 3)]):
        plan = laid_out(program.plan.blocks, *shape)
        wide = program.with_plan(Plan(plan.stages, plan.micro_batches, schedule))
        assert coverage.difference(wide, inputs, loss, gradients) <= coverage.NARROW
