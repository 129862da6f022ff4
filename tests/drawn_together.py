"""Drawn layers that keep buffers, or compute with several rows together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from drawn_parts import WIDTH, WORDS, Layer, Side, linear
from torch import Tensor, nn


class Codebook(nn.Module):
    """The nearest of some codes, straight through, with codes that follow what is assigned to them."""

    codes: Tensor
    counts: Tensor
    sums: Tensor

    def __init__(self, count: int) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(count, WIDTH))
        self.register_buffer("counts", torch.ones(count))
        self.register_buffer("sums", self.codes.clone())

    def forward(self, h: Tensor, side: Side) -> tuple[Tensor, Tensor]:
        flat = h.flatten(0, 1)
        chosen = F.one_hot(torch.cdist(flat, self.codes).argmin(-1), len(self.codes)).to(h.dtype)
        nearest = (chosen @ self.codes).view_as(h)
        if self.training:
            with torch.no_grad():
                self.counts.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
                self.sums.mul_(0.9).add_(chosen.T @ flat, alpha=0.1)
                self.codes.copy_(self.sums / self.counts.clamp(min=1e-3).unsqueeze(1))
        return h + (nearest - h).detach(), 0.25 * F.mse_loss(h, nearest.detach())


def queue(m: Any, h: Tensor, side: Side) -> Any:
    key = F.normalize(h.mean(1), dim=-1)
    against = key @ m.queue.clone().detach().T
    if m.training:
        with torch.no_grad():
            m.queue.copy_(torch.cat([key.detach(), m.queue])[: len(m.queue)])
    return h, torch.logsumexp(against, -1).mean()


def counted(m: Any, h: Tensor, side: Side) -> Any:
    if m.training:
        m.steps += 1
    return h * (1 + 1 / (1 + m.steps))


def counted_rows(m: Any, h: Tensor, side: Side) -> Any:
    scale = m.steps / (10.0 + m.steps)
    if m.training:
        m.steps += h.shape[0]
    return h * (1 + scale)


def centred_after(m: Any, h: Tensor, side: Side) -> Any:
    if m.training:
        m.mean.lerp_(h.detach().mean((0, 1)), 0.1)
    return h - m.mean


def centred_before(m: Any, h: Tensor, side: Side) -> Any:
    out: Tensor = h - m.mean
    if m.training:
        with torch.no_grad():
            m.mean.mul_(0.9).add_(h.mean((0, 1)) * 0.1)
    return out


def observed(m: Any, h: Tensor, side: Side) -> Any:
    if m.training:
        m.low = torch.minimum(m.low, h.detach().amin((0, 1)))
        m.high = torch.maximum(m.high, h.detach().amax((0, 1)))
    step = (m.high - m.low).clamp(min=0.1) / 15
    rounded = torch.round((h - m.low) / step) * step + m.low
    return h + (rounded - h).detach()


def remembered(m: Any, h: Tensor, side: Side) -> Any:
    out: Tensor = h + m.last
    if m.training:
        m.last = h.detach().mean((0, 1)).tanh()
    return out


def used_words(m: Any, h: Tensor, side: Side) -> Any:
    if m.training:
        with torch.no_grad():
            m.used.index_add_(0, side.ids.flatten(), torch.ones_like(h[..., 0]).flatten())
    return h / (1 + m.used[side.ids] / 10).unsqueeze(-1)


def whole_norm(m: Any, h: Tensor, side: Side) -> Any:
    return m.parts[0](h) / (1 + h.norm())


def over_rows(m: Any, h: Tensor, side: Side) -> Any:
    return h * h.softmax(0)


def between_rows(m: Any, h: Tensor, side: Side) -> Any:
    pooled = h.mean(1)
    return h + ((m.parts[0](pooled) @ pooled.T).softmax(-1) @ pooled)[:, None]


def contrast(m: Any, h: Tensor, side: Side) -> Any:
    one, other = F.normalize(h[:, 0], dim=-1), F.normalize(m.parts[0](h[:, -1]), dim=-1)
    return h, F.cross_entropy(one @ other.T / 0.5, torch.arange(len(h)))


def decorrelated(m: Any, h: Tensor, side: Side) -> Any:
    flat = h.flatten(0, 1)
    centred = flat - flat.mean(0)
    covariance = centred.T @ centred / len(flat)
    return h, 0.1 * (covariance - covariance.diagonal().diag_embed()).square().sum()


def sums_over_rows(m: Any, h: Tensor, side: Side) -> Any:
    return h + 0.1 * h.cumsum(0)


def sorted_rows(m: Any, h: Tensor, side: Side) -> Any:
    order = h.sum((1, 2)).argsort()
    return h[order][order.argsort()] + 0.1 * h[order]


def masked_mean(m: Any, h: Tensor, side: Side) -> Any:
    mask = torch.ones_like(side.ids, dtype=torch.bool) if side.mask is None else side.mask
    return h - (h * mask[..., None]).sum((0, 1)) / mask.sum()


def best_rows(m: Any, h: Tensor, side: Side) -> Any:
    best = h.detach().sum((1, 2)).topk(max(1, len(h) // 2)).indices
    return h.index_add(0, best, m.parts[0](h[best]))


def by_counts(m: Any, h: Tensor, side: Side) -> Any:
    counts = torch.zeros(WORDS, dtype=h.dtype).scatter_add(0, side.ids.flatten(), torch.ones_like(h[..., 0]).flatten())
    return h * (counts / counts.sum())[side.ids].unsqueeze(-1)


def rows_shifted(m: Any, h: Tensor, side: Side) -> Any:
    return 0.7 * h + 0.3 * m.parts[0](h.roll(1, 0).flip(0))


def norm_of(parts: nn.Module) -> Layer:
    return Layer(lambda m, h, side: m.parts[0](h.transpose(1, 2)).transpose(1, 2), parts)


BUFFERS: Mapping[str, Callable[[int], nn.Module]] = {
    "a codebook": lambda n: Codebook(2 * n),
    "a queue": lambda n: Layer(queue, queue=torch.randn(2 * n, WIDTH)),
    "a counter": lambda n: Layer(counted, steps=torch.zeros(())),
    "a counter of rows": lambda n: Layer(counted_rows, steps=torch.zeros((), dtype=torch.long)),
    "centred after writing": lambda n: Layer(centred_after, mean=torch.zeros(WIDTH)),
    "centred before writing": lambda n: Layer(centred_before, mean=torch.zeros(WIDTH)),
    "an observer": lambda n: Layer(observed, low=torch.zeros(WIDTH), high=torch.zeros(WIDTH)),
    "the last batch": lambda n: Layer(remembered, last=torch.zeros(WIDTH)),
    "counts of words": lambda n: Layer(used_words, used=torch.zeros(WORDS)),
}


TOGETHER: Mapping[str, Callable[[int], nn.Module]] = {
    "a batch norm": lambda n: norm_of(nn.BatchNorm1d(WIDTH)),
    "divided by the norm": lambda n: Layer(whole_norm, linear()),
    "softmax over rows": lambda n: Layer(over_rows),
    "attention between rows": lambda n: Layer(between_rows, linear()),
    "a contrast": lambda n: Layer(contrast, linear()),
    "decorrelated": lambda n: Layer(decorrelated),
    "sums over rows": lambda n: Layer(sums_over_rows),
    "rows in order": lambda n: Layer(sorted_rows),
    "the best rows": lambda n: Layer(best_rows, linear()),
    "weights by counts": lambda n: Layer(by_counts),
    "rows shifted": lambda n: Layer(rows_shifted, linear()),
    "a masked mean": lambda n: Layer(masked_mean),
}
