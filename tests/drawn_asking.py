"""Drawn layers that ask for values, or that no tracer follows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from drawn_parts import WIDTH, Layer, Side, linear
from torch import Tensor, nn


def by_row(m: Any, h: Tensor, side: Side) -> Any:
    return torch.stack([m.parts[0](row) if bool(row.sum() > 0) else row.sin() for row in h])


def by_item(m: Any, h: Tensor, side: Side) -> Any:
    return m.parts[0](h) / (1.0 + h.detach().abs().max().item())


def by_mean(m: Any, h: Tensor, side: Side) -> Any:
    out: Tensor = m.parts[0](h)
    return out if bool(h.mean() > 0) else -out


def by_any(m: Any, h: Tensor, side: Side) -> Any:
    large = h.abs() > 1.0
    return torch.where(large, h.tanh(), h) if bool(large.any()) else h


def until_small(m: Any, h: Tensor, side: Side) -> Any:
    while bool(h.abs().max() > 2.0):
        h = h / 2
    return m.parts[0](h)


def selected(m: Any, h: Tensor, side: Side) -> Any:
    chosen = h.sum(-1) > 0
    out = h.clone()
    out[chosen] = m.parts[0](h[chosen])
    return out


def by_lengths(m: Any, h: Tensor, side: Side) -> Any:
    return torch.stack([m.parts[0](row) * (n / (1 + n)) for row, n in zip(h, side.lengths.tolist(), strict=True)])


def by_numpy(m: Any, h: Tensor, side: Side) -> Any:
    scale = torch.from_numpy(h.detach().numpy().std(-1, keepdims=True))
    return h * scale


def by_unique(m: Any, h: Tensor, side: Side) -> Any:
    words, places = side.ids.unique(return_inverse=True)
    counts = torch.zeros(len(words), dtype=h.dtype).index_add(0, places.flatten(), torch.ones_like(h[..., 0]).flatten())
    return h / counts[places].unsqueeze(-1)


def derivative(m: Any, h: Tensor, side: Side) -> Any:
    with torch.enable_grad():
        point = h if h.requires_grad else h.detach().requires_grad_()
        slope: Tensor = torch.autograd.grad(m.parts[0](point).tanh().sum(), point, create_graph=True)[0]
    return h + slope


def routed_by_words(m: Any, h: Tensor, side: Side) -> Any:
    flat, out = h.flatten(0, 1), torch.zeros_like(h.flatten(0, 1))
    for number, expert in enumerate(m.parts):
        places = (side.ids.flatten() == number).nonzero()[:, 0]
        if len(places):
            out = out.index_add(0, places, expert(flat[places]))
    return out.view_as(h)


class Router(nn.Module):
    """Experts that tokens choose by values, with a loss of balance that is left on the module."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.gate, self.experts = linear(WIDTH, count), nn.ModuleList(linear() for _ in range(count))
        self.balance: Tensor | None = None

    def forward(self, h: Tensor, side: Side) -> tuple[Tensor, Tensor]:
        flat = h.flatten(0, 1)
        shares = self.gate(flat).softmax(-1)
        value, choice = shares.max(-1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            places = torch.where(choice == number)[0]
            if places.numel() > 0:
                out[places] = expert(flat[places]) * value[places, None]
        used = F.one_hot(choice, len(self.experts)).to(h.dtype).mean(0)
        return out.view_as(h), (used * shares.mean(0)).sum()


class Dense(nn.Module):
    """Experts that all tokens pass, weighted by their two best, with a loss of balance that is left on the module."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.gate, self.experts = linear(WIDTH, count), nn.ModuleList(linear() for _ in range(count))
        self.balance: Tensor | None = None

    def forward(self, h: Tensor, side: Side) -> Tensor:
        shares = self.gate(h).softmax(-1)
        best = torch.zeros_like(shares).scatter(-1, shares.topk(2, -1).indices, 1.0)
        self.balance = (best.mean((0, 1)) * shares.mean((0, 1))).sum()
        outs = torch.stack([expert(h) for expert in self.experts], -1)
        joined: Tensor = (outs * (best * shares).unsqueeze(-2)).sum(-1)
        return joined


ASKING: Mapping[str, Callable[[int], nn.Module]] = {
    "a branch for each row": lambda n: Layer(by_row, linear()),
    "a number by item": lambda n: Layer(by_item, linear()),
    "a branch on the mean": lambda n: Layer(by_mean, linear()),
    "a branch on any": lambda n: Layer(by_any),
    "halved until small": lambda n: Layer(until_small, linear()),
    "tokens selected": lambda n: Layer(selected, linear()),
    "a loop over lengths": lambda n: Layer(by_lengths, linear()),
    "numpy": lambda n: Layer(by_numpy),
    "counts of unique words": lambda n: Layer(by_unique),
    "a derivative": lambda n: Layer(derivative, linear()),
    "experts by words": lambda n: Layer(routed_by_words, *(linear() for _ in range(2 * n))),
    "a router with balance": Router,
    "dense experts": Dense,
}
