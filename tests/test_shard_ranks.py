"""Stages several ranks wide on ranks of their own, which talk over Gloo."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from ranks import run_ranks
from torch import Tensor, nn

WIDTH, HEADS = 48, 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        parts = self.qkv(self.norm1(x)).split(width, 2)
        query, key, value = (p.view(rows, length, HEADS, -1).transpose(1, 2) for p in parts)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)
        x = x + self.project(mixed.reshape(rows, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))  # type: ignore[no-any-return]


class Language(nn.Module):
    """Blocks between an embedding and a head that share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(37, WIDTH), nn.LayerNorm(WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 37, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def make() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    return Language().double(), torch.randint(37, (8, 6)), torch.randint(37, (8, 6))


def token_loss(out: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), target.flatten())


PLANS: tuple[dict[str, Any], ...] = (
    {"tensor": (2,), "replicas": (2,), "micro_batches": 2},
    {"tensor": (4,), "micro_batches": 1},
    {"tensor": (1, 3), "micro_batches": 3, "cuts": ("blocks.1",)},
    {"tensor": (2, 2), "micro_batches": 4, "cuts": ("blocks.1",)},
)


def train(clip: bool) -> list[dict[str, Any]]:
    """Train three steps by each plan; load each plan's state from the one before."""
    from efftra_fx import Cluster, compile

    cluster = Cluster.from_env()
    found = []
    before: dict[str, Tensor] | None = None
    for options in PLANS:
        model, x, y = make()
        program = compile(
            model, cluster, example_inputs=(x,), example_target=y, loss_fn=token_loss, costs="estimated", **options
        )
        matches = program.check(x, target=y, repeats=1, show=False).matches
        optimizer = torch.optim.AdamW(program.parameters(), lr=1e-3)
        for _ in range(3):
            program.step(x, target=y)
            norm = program.clip_grad_norm_(0.1) if clip else 0.0
            optimizer.step()
            optimizer.zero_grad()
        state = program.state_dict()
        output = program.evaluate(x)
        loads = True
        if before is not None:
            program.load_state_dict(before)
            again = program.state_dict()
            loads = all(torch.equal(again[name], value) for name, value in before.items())
        before = state
        held = {name: parameter.numel() for name, parameter in program.named_parameters()}
        moments = {
            name: sum(t.numel() for t in optimizer.state[p].values() if t.ndim)
            for name, p in program.named_parameters()
        }
        found.append({"matches": matches, "loads": loads, "norm": float(norm), "held": held, "moments": moments,
                      "state": {n: v.tolist() for n, v in state.items()}, "output": output.tolist()})  # fmt: skip
    return found


def test_ranks_of_tensor_groups_train_as_one_device_and_hold_their_part() -> None:
    outcomes = run_ranks(train, 4, True, limit_s=200.0)
    model, x, y = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(3):
        token_loss(model(x), y).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    for rank, plans in enumerate(outcomes):
        for options, plan in zip(PLANS, plans, strict=True):
            assert plan["matches"] and plan["loads"], (rank, options)
            assert abs(plan["norm"] - float(norm)) < 1e-9 * float(norm)
            for name, value in model.state_dict().items():
                found = torch.tensor(plan["state"][name], dtype=torch.float64)
                torch.testing.assert_close(found, value, rtol=0, atol=1e-8)
            output = torch.tensor(plan["output"], dtype=torch.float64)
            torch.testing.assert_close(output, model(x), rtol=0, atol=1e-7)
    whole = {name: parameter.numel() for name, parameter in model.named_parameters()}
    for width, index in ((2, 0), (4, 1)):
        for plans in outcomes:
            layers = [n for n in whole if n.endswith(("up.weight", "down.weight"))]
            for kind, times in (("held", 1), ("moments", 2)):
                part = sum(plans[index][kind][n] for n in layers) / sum(times * whole[n] for n in layers)
                assert part <= 1 / width + 0.05
