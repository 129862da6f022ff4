"""A model that draws in many ways, for tests of random numbers that any plan draws alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from efftra_fx import Cluster, CompiledModel, compile

ROWS = 7


class Noisy(nn.Module):
    """Attention and a recurrent net with dropouts, paths dropped row by row, noise, and a mask of a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.drop = nn.Linear(4, 8), nn.Dropout(0.2)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.net = nn.GRU(8, 8, 2, dropout=0.4)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(self.embed(x))
        h = h + self.attention(h, h, h, need_weights=False)[0]
        path = torch.rand(h.shape[0], 1, 1, dtype=h.dtype) < 0.8
        h = h + path * self.down(F.alpha_dropout(F.gelu(self.up(h)), 0.1, self.training))
        out, _ = self.net(h.transpose(0, 1))
        h = F.dropout1d(out.permute(1, 2, 0), 0.2, self.training).mean(-1)
        noise = torch.randn_like(h) * torch.rand(8, dtype=h.dtype)
        return F.linear(h + 0.1 * noise, F.dropout(self.head.weight, 0.2, self.training), self.head.bias)


def batch(rows: int = ROWS) -> tuple[Tensor, Tensor]:
    """Return features [rows, 3, 4] in float64 and classes."""
    torch.manual_seed(rows)
    return torch.randn(rows, 3, 4, dtype=torch.float64), torch.arange(rows) % 3


def compiled(cluster: Cluster, **options: Any) -> CompiledModel:
    """Compile the model for masks that do not depend on the plan, nothing measured."""
    torch.manual_seed(0)
    x, target = batch()
    settings = {"loss_fn": F.cross_entropy, "costs": "estimated", "rng": "layout_free", "progress": False, **options}
    return compile(Noisy().double(), cluster, example_inputs=(x,), example_target=target, **settings)


def two_steps(program: CompiledModel, seed: int, rows: int = ROWS) -> tuple[list[float], Mapping[str, Tensor]]:
    """Return two steps' losses, and the sums of their gradients, from this process's random state."""
    x, target = batch(rows)
    torch.manual_seed(seed)
    losses = [float(program.step(x, target=target)) for _ in range(2)]
    gradients = {n: p.grad for n, p in program.named_parameters() if p.grad is not None}
    for parameter in program.parameters():
        parameter.grad = None
    return losses, gradients
