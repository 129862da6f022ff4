"""What a width costs at least is no more than what it turns out to cost; over links that crawl none is looked at."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from efftra_fx import Cluster, Link, compile
from efftra_fx.api import CompiledModel
from efftra_fx.cost import Chain
from efftra_fx.passes.shard_bound import block_products, bounded
from efftra_fx.passes.shard_cost import with_tensor

WIDTH, ROWS = 64, 8
ROW_BYTES = WIDTH * 4


class Side(nn.Module):
    """Two layers that read one value, and whose results are added up."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.a, self.b = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.c, self.d = nn.Linear(2 * WIDTH, WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        return x + (self.c(self.a(x).relu()) + self.d(self.b(x).relu()))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))  # type: ignore[no-any-return]


MAKERS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "side": lambda: (Side(), torch.randn(ROWS, WIDTH)),
    "plain": lambda: (
        nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(3))),
        torch.randn(ROWS, WIDTH),
    ),
    "transformer": lambda: (nn.Sequential(Block(), Block()), torch.randn(ROWS, 6, WIDTH)),
    "images": lambda: (
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.Flatten(), nn.Linear(16 * 16, 64)),
        torch.randn(ROWS, 3, 8, 8),
    ),
}


@cache
def made(name: str) -> CompiledModel:
    torch.manual_seed(0)
    model, x = MAKERS[name]()
    with torch.no_grad():
        y = torch.zeros_like(model(x))
    return compile(
        model, Cluster.local(2), example_inputs=(x,), example_target=y, loss_fn=F.mse_loss, costs="estimated"
    )


def test_products_that_share_a_value_or_a_total_share_its_sum() -> None:
    front, chain = made("side").built.front, made("side").built.chain
    products = [p for block in block_products(front.gm, len(chain.blocks), 1) for p in block]
    assert [(p.sums, p.sum_bytes) for p in products] == [
        (0, 0),
        *[(0.5, ROW_BYTES / 2)] * 4,
    ]  # the first has no gradient


def seconds(chain: Chain, width: int, link: Link) -> float:
    """Time of all blocks in one micro-batch of all rows, with what they exchange."""
    total = 0.0
    for block in chain.blocks:
        option = block.option(tensor=width)
        assert option is not None
        ring = option.reduces * link.latency_s + option.reduce_bytes * ROWS / width / link.bandwidth_bytes_per_s
        total += option.forward.at(ROWS) + option.backward.at(ROWS) + 4 * (width - 1) * ring
    return total


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("link", [Link(1e12, 0.0), Link(1e9, 0.0), Link(1e10, 1e-6)], ids=["free", "bytes", "both"])
@pytest.mark.parametrize("name", MAKERS)
def test_no_width_costs_less_than_its_bound(name: str, link: Link, width: int) -> None:
    front, chain = made(name).built.front, made(name).built.chain
    bound = bounded(front.gm, chain, (width,), link, ROWS)
    assert bound != chain  # some block may be faster, or there is nothing to hold
    modelled = with_tensor(front.gm, chain, (width,))
    assert seconds(bound, width, link) <= seconds(modelled, width, link) * (1 + 1e-9)


def test_over_links_that_crawl_no_block_is_faster() -> None:
    front, chain = made("transformer").built.front, made("transformer").built.chain
    assert bounded(front.gm, chain, (2, 4), Link(1e3, 1.0), ROWS) == chain
    assert bounded(front.gm, chain, (2,), Link(1e12), ROWS) != chain
