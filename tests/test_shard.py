"""Sharding finds what is known to be best, and whatever it finds computes what one device does."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from shard_rig import Maker, hold_against_one_device, whole_choice
from torch import Tensor, fx, nn

from efftra_fx import collectives
from efftra_fx.compiler import Options, Report, back_end
from efftra_fx.front_end import front_end
from efftra_fx.passes.blocks import block_names
from efftra_fx.passes.shard import Sharded, shard_stage
from efftra_fx.passes.shard_candidates import find_candidates
from efftra_fx.passes.shard_choice import Choice, Prices, choose
from efftra_fx.passes.shard_cuts import Cut
from efftra_fx.passes.shard_explain import Moved, exchanges
from efftra_fx.passes.shard_rules import complete
from efftra_fx.passes.split import StageGraph
from efftra_fx.plan import Plan, Stage
from efftra_fx.signature import read_call

aten = torch.ops.aten


class Block(nn.Module):
    """A transformer block with a fused qkv weight, (rows, length, width) to the same."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        parts = self.qkv(self.norm1(x)).split(width, 2)
        query, key, value = (p.view(rows, length, self.heads, -1).transpose(1, 2) for p in parts)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))  # type: ignore[no-any-return]


class Gated(nn.Module):
    """A block with grouped key and value heads, rotated queries and keys, and a gated MLP."""

    def __init__(self, width: int, heads: int, groups: int) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query, self.project = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.key, self.value = (nn.Linear(width, groups * self.size, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)

    def rotate(self, x: Tensor) -> Tensor:
        angles = torch.arange(x.shape[2], dtype=x.dtype).unsqueeze(1) * torch.ones(x.shape[3], dtype=x.dtype)
        first, second = x.chunk(2, -1)
        return x * angles.cos() + torch.cat([-second, first], -1) * angles.sin()

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        y = self.norm1(x)
        query = self.rotate(self.query(y).view(rows, length, self.heads, self.size).transpose(1, 2))
        key = self.rotate(self.key(y).view(rows, length, self.groups, self.size).transpose(1, 2))
        value = self.value(y).view(rows, length, self.groups, self.size).transpose(1, 2)
        times = self.heads // self.groups
        shape = (rows, self.heads, length, self.size)
        key, value = (p.unsqueeze(2).expand(-1, -1, times, -1, -1).reshape(shape) for p in (key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(rows, length, width))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))  # type: ignore[no-any-return]


class Language(nn.Module):
    """Embedding, blocks, and a head over the vocabulary."""

    def __init__(self, vocabulary: int, width: int, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(blocks)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def token_loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def stage_of(model: nn.Module, inputs: tuple[Any, ...], target: Tensor, loss: Any) -> StageGraph:
    """Capture a step as one stage."""
    call, tensors = read_call(model.forward, inputs, {}, target)
    front = front_end(model, call, tensors, Options(loss_fn=loss, check_capture=False), Report())
    blocks = len(block_names(front.gm))
    return back_end(front, Plan((Stage(0, blocks, (0,)),), 1), Report()).stages[0]


def language(blocks: list[nn.Module], vocabulary: int = 4096, width: int = 256) -> StageGraph:
    tokens = torch.randint(vocabulary, (2, 64))
    return stage_of(Language(vocabulary, width, blocks), (tokens,), tokens, token_loss)


def changes(sharded: Sharded) -> Counter[str]:
    """Count the collectives' functions in a rank's graph."""
    functions = collectives.COLLECTIVE_FUNCTIONS - {
        collectives.first,
        collectives.part,
        collectives.spread,
        collectives.keep,
    }
    return Counter(n.target.__name__ for n in sharded.stages[0].gm.graph.nodes if n.target in functions)


@pytest.mark.parametrize("make", [lambda: Block(256, 8), lambda: Gated(256, 8, 4)], ids=["fused qkv", "grouped heads"])
def test_a_block_has_one_sum_each_way_for_attention_and_for_its_mlp(make: Any) -> None:
    one, three = (shard_stage(language([make() for _ in range(count)]), 2) for count in (1, 3))
    more = changes(three)
    more.subtract(changes(one))
    assert +more == {"copy": 4, "reduce": 4}  # two blocks more: forward sums in reduce, backward sums in copy
    rows = 3
    moved = [Counter(exchanges(one, rows)) for one in (one, three)]
    moved[1].subtract(moved[0])
    size = rows * 64 * 256 * 4  # what Megatron sums, twice each way
    assert +moved[1] == {Moved("sum", size, False): 4, Moved("sum", size, True): 4}
    weights = {
        n.rpartition(".")[0]: str(p) for n, p in three.parameters.items() if n.endswith(("up.weight", "down.weight"))
    }
    assert all(place.startswith("cut dim 0" if "up" in name else "cut dim 1") for name, place in weights.items())


class Variant(nn.Module):
    """A block as others write it: how qkv is laid out, attention in parallel to the MLP, norms behind, dropout."""

    def __init__(self, layout: str = "chunk", order: str = "before", bias: bool = True, drop: float = 0.0) -> None:
        super().__init__()
        self.layout, self.order, self.drop = layout, order, nn.Dropout(drop)
        self.norm1, self.norm2 = nn.LayerNorm(256), nn.LayerNorm(256)
        self.qkv, self.project = nn.Linear(256, 768, bias=bias), nn.Linear(256, 256, bias=bias)
        self.up, self.down = nn.Linear(256, 1024, bias=bias), nn.Linear(1024, 256, bias=bias)

    def attend(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        y = self.qkv(x)
        if self.layout == "chunk":
            query, key, value = (t.view(rows, length, 8, 32).transpose(1, 2) for t in y.chunk(3, -1))
        elif self.layout == "unbind":
            query, key, value = y.view(rows, length, 3, 8, 32).permute(2, 0, 3, 1, 4).unbind(0)
        elif self.layout == "heads first":
            query, key, value = y.view(rows, length, 8, 96).transpose(1, 2).chunk(3, -1)
        else:  # three last
            query, key, value = y.view(rows, length, 8, 32, 3).permute(0, 2, 1, 3, 4).unbind(-1)
        scores = query @ key.transpose(-1, -2) * 32**-0.5
        scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), float("-inf"))
        mixed = self.drop(scores.softmax(-1)) @ value
        return self.drop(self.project(mixed.transpose(1, 2).reshape(rows, length, 256)))  # type: ignore[no-any-return]

    def grow(self, x: Tensor) -> Tensor:
        return self.drop(self.down(F.gelu(self.up(x))))  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        if self.order == "parallel":
            y = self.norm1(x)
            return x + self.attend(y) + self.grow(y)
        if self.order == "parallel, two norms":
            return x + self.attend(self.norm1(x)) + self.grow(self.norm2(x))
        if self.order == "behind":
            x = self.norm1(x + self.attend(x))
            return self.norm2(x + self.grow(x))  # type: ignore[no-any-return]
        x = x + self.attend(self.norm1(x))
        return x + self.grow(self.norm2(x))


class SequenceFirst(nn.Module):
    """PyTorch's own layer with positions before rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(256, 8, 1024, 0.1, norm_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.transpose(0, 1)).transpose(0, 1)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("make", "width", "sums"),
    [
        (lambda: Variant("unbind", bias=False), 2, 4),
        (lambda: Variant("heads first", "behind"), 4, 4),
        (lambda: Variant("three last", drop=0.1), 4, 4),
        (lambda: Variant(order="parallel", drop=0.1), 2, 2),
        (lambda: Variant(order="parallel", bias=False), 4, 2),
        (lambda: Variant(order="parallel, two norms"), 4, 2),
        (SequenceFirst, 2, 4),
    ],
    ids=["unbind", "heads first", "three last", "parallel, dropout", "parallel", "two norms", "positions first"],
)
def test_a_block_of_any_spelling_sums_no_more_than_by_hand(make: Any, width: int, sums: int) -> None:
    """Megatron sums twice each way for a block, or once where attention and MLP are added up."""
    moved = [Counter(exchanges(shard_stage(language([make() for _ in range(n)]), width), 3)) for n in (2, 4)]
    moved[1].subtract(moved[0])
    whole = sum((1.0 if one.kind == "sum" else 0.5) * one.size_bytes * count for one, count in moved[1].items())
    assert whole == 2 * sums * 3 * 64 * 256 * 4


def test_logits_over_a_large_vocabulary_are_never_put_together() -> None:
    sharded = shard_stage(language([Block(64, 4)], vocabulary=50257, width=64), 4)
    assert str(sharded.parameters["head.weight"]).startswith("cut dim 0 at 0:12565|")
    gathered = [
        n for n in sharded.stages[0].gm.graph.nodes if n.target in (collectives.gather, collectives.gather_copy)
    ]
    assert all(50257 not in n.meta["val"].shape for n in gathered)
    assert any(getattr(n.target, "__name__", "") == "cross_entropy_part" for n in sharded.stages[0].gm.graph.nodes)
    rows, length, width = 2, 64, 64
    largest = max(one.size_bytes for one in exchanges(sharded, rows))
    assert largest <= rows * length * width * 4  # hidden values at most, 785 times smaller than the logits


def test_heads_that_do_not_divide_are_dealt_out_unevenly_and_never_split() -> None:
    sharded = shard_stage(language([Block(240, 5)], width=240), 2, Prices(sum_s=2e-3))  # few sums before equal shares
    place = sharded.parameters["blocks.0.project.weight"]
    assert place.cut is not None and place.dim == 1
    assert place.cut.lengths == (144, 96)  # 3 and 2 heads of 48


def test_a_block_alone_and_the_same_block_many_times_are_cut_alike() -> None:
    few, many = (shard_stage(language([Block(128, 4) for _ in range(n)], width=128), 2) for n in (2, 5))
    for name, place in few.parameters.items():
        if name.startswith("blocks.1."):
            assert many.parameters[name.replace("blocks.1.", "blocks.3.")] == place


def test_slow_sums_leave_everything_whole() -> None:
    slow = Prices(sum_s=10.0)
    sharded = shard_stage(language([Block(64, 4)], vocabulary=64, width=64), 2, slow)
    assert not changes(sharded)


def test_what_has_no_rule_is_computed_whole_and_said() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.out = nn.LSTM(16, 16, batch_first=True), nn.Linear(16, 64)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.net(x)[0])  # type: ignore[no-any-return]

    stage = stage_of(Recurrent(), (torch.randn(3, 4, 16),), torch.randn(3, 4, 64), F.mse_loss)
    assert any("lstm.input has no rule" in note for note in shard_stage(stage, 2).notes)


def test_what_a_float64_model_computes_in_float32_stays_whole() -> None:
    maker = Maker()
    value = maker.value(torch.randn(3, 8, dtype=torch.float64), 0)
    made = maker.call(aten.linear.default, value, maker.parameter(torch.randn(8, 8, dtype=torch.float64)))
    coarse = maker.call(aten._to_copy.default, made, dtype=torch.float32)
    scaled = maker.call(aten.mul.Tensor, coarse, coarse)
    fine = maker.call(aten._to_copy.default, scaled, dtype=torch.float64)
    found = find_candidates(maker.finish(fine), 2)
    assert len(found.strategies[made]) > 2
    assert [len(found.strategies[node]) for node in (coarse, scaled, fine)] == [1, 1, 1]


def test_a_sharded_stage_describes_itself() -> None:
    text = shard_stage(language([Block(64, 4)], width=64), 2).describe()
    assert "parameter blocks.0.up.weight: cut dim 0 at 0:128|128:256" in text
    assert "copy layer_norm_2: float32[" in text


# random graphs


def draw_graph(rng: random.Random) -> tuple[Maker, fx.GraphModule]:
    """Draw a graph of calls with rules: widths that do not divide, skips, values read several times."""
    torch.manual_seed(rng.randrange(1000))
    maker = Maker()
    size = rng.choice((6, 8, 10))
    values: list[fx.Node] = [maker.value(torch.randn(3, 2, size, dtype=torch.float64), 0)]
    for _ in range(rng.randint(3, 6)):
        x = rng.choice(values[-3:])
        width = int(x.meta["val"].shape[-1])
        like = [v for v in values if v.meta["val"].shape == x.meta["val"].shape]
        match rng.randrange(12):
            case 0 | 1:
                out = rng.choice((5, 6, 8))
                weight, bias = torch.randn(out, width, dtype=torch.float64), torch.randn(out, dtype=torch.float64)
                made = maker.call(aten.linear.default, x, maker.parameter(weight), maker.parameter(bias))
            case 2:
                made = maker.call(aten.tanh.default, x)
            case 3:
                made = maker.call(rng.choice((aten.add.Tensor, aten.mul.Tensor)), x, rng.choice(like))
            case 4:
                norm = [maker.parameter(torch.randn(width, dtype=torch.float64)) for _ in range(2)]
                made = maker.call(aten.layer_norm.default, x, [width], *norm)
            case 5:
                made = maker.call(aten.cat.default, [x, maker.call(aten.relu.default, x)], 2)
            case 6 if width % 2 == 0:
                heads = maker.call(aten.view.default, x, [-1, 2, width // 2, 2])
                turned = maker.call(aten.transpose.int, heads, 1, 2)
                mixed = maker.call(aten.scaled_dot_product_attention.default, turned, turned, turned)
                back = maker.call(aten.transpose.int, mixed, 1, 2)
                made = maker.call(aten.reshape.default, back, [-1, 2, width])
            case 7 if width % 2 == 0:
                heads = maker.call(aten.transpose.int, maker.call(aten.view.default, x, [-1, 2, width // 2, 2]), 1, 2)
                mixed = maker.call(aten.scaled_dot_product_attention.default, heads, heads, heads, None, 0.5)
                back = maker.call(aten.transpose.int, mixed, 1, 2)
                made = maker.call(aten.reshape.default, back, [-1, 2, width])
            case 8:
                start = rng.randrange(width // 2)
                made = maker.call(aten.slice.Tensor, x, 2, start, start + width // 2)
            case 9:
                where = maker.input(torch.randint(width, (width,)))
                made = maker.call(aten.index.Tensor, x, [None, None, where])
            case 10:
                made = maker.call(aten.cumsum.default, x, 1)
            case 11:
                matrix = maker.parameter(torch.randn(width, 6, dtype=torch.float64))
                made = maker.call(aten.einsum.default, "...d,df->...f", [x, matrix])
            case _ if width % 2 == 0:
                halves = maker.call(aten.split.Tensor, x, width // 2, 2)
                made = maker.call(aten.mul.Tensor, maker.item(halves, 0), maker.item(halves, 1))
            case _:
                made = maker.call(aten.softmax.int, x, -1)
        values.append(made)
    total = maker.call(aten.sum.default, values[-1])
    return maker, maker.finish(values[-1], total, values[len(values) // 2])


def hold_random(seed: int, width: int) -> None:
    rng = random.Random(seed)
    maker, gm = draw_graph(rng)
    found = find_candidates(gm, width)
    drawn = {node: rng.choice(some) for node, some in found.strategies.items()}
    hold_against_one_device(maker, gm, found, Choice(drawn, 0.0))
    cheap = Prices(rows=3, sum_s=rng.choice((0.0, 1e-7)), summed_byte_s=rng.choice((0.0, 1e-10)))
    hold_against_one_device(maker, gm, found, choose(found, cheap))


@settings(max_examples=8, deadline=None, derandomize=True, database=None)
@given(st.integers(0, 10**6), st.integers(2, 4))
def test_any_mixture_of_strategies_computes_what_one_device_does(seed: int, width: int) -> None:
    hold_random(seed, width)


def test_values_that_are_the_same_on_one_rank_alone_are_exchanged_as_often_on_all() -> None:
    maker = Maker()
    value = maker.value(torch.randn(3, 8, dtype=torch.float64), 0)
    slices = [maker.call(aten.slice.Tensor, value, 1, start, start + 4) for start in (3, 2)]
    gm = maker.finish(*(maker.call(aten.tanh.default, one) for one in slices))
    cut = Cut(8, (((0, 1), (2, 4), (6, 7)), ((1, 2), (4, 6), (7, 8))))  # rank 1 has the same of both slices
    found = find_candidates(gm, 2)
    ways = {node: complete(node, False, 0, 1, cut, lambda *_: None) for node in slices}
    assert all(ways.values()) and ways[slices[0]] != ways[slices[1]]
    chosen = {**whole_choice(found).strategies, **{node: way for node, way in ways.items() if way is not None}}
    hold_against_one_device(maker, gm, found, Choice(chosen, 0.0))


@pytest.mark.long
@settings(max_examples=1000, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 5))
def test_a_thousand_mixtures_of_strategies_compute_what_one_device_does(seed: int, width: int) -> None:
    hold_random(seed, width)


@settings(max_examples=15, deadline=None, derandomize=True, database=None)
@given(st.integers(0, 10**6))
def test_the_choice_is_as_cheap_as_leaving_everything_whole_or_cheaper(seed: int) -> None:
    _, gm = draw_graph(random.Random(seed))
    found = find_candidates(gm, 2)
    only_whole = {node: some[:1] for node, some in found.strategies.items()}
    best, plain = choose(found, Prices()), choose(replace(found, strategies=only_whole), Prices())
    assert best.cost_s <= plain.cost_s * (1 + 1e-5)
    assert plain.strategies == whole_choice(found).strategies
