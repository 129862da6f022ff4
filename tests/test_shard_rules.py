"""Each rule alone, on random shapes: whatever way of a call it allows computes what one device does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shard_rig import Maker, hold_against_one_device, run_group, whole_choice
from torch import Tensor, fx

from efftra_fx.passes.shard_axes import extents, operands, results, value_of
from efftra_fx.passes.shard_candidates import find_candidates
from efftra_fx.passes.shard_choice import Choice
from efftra_fx.passes.shard_cuts import PARTIAL, WHOLE, Cut
from efftra_fx.passes.shard_rules import Strategy, complete, groups_of

aten = torch.ops.aten
Sizes = Callable[[], int]
Build = Callable[[Maker, Sizes], fx.Node]


def tensor(*sizes: int) -> Tensor:
    return torch.randn(sizes, dtype=torch.float64)


def linear(m: Maker, n: Sizes) -> fx.Node:
    k, o = n(), n()
    return m.call(aten.linear.default, m.value(tensor(3, 2, k), 0), m.parameter(tensor(o, k)), m.parameter(tensor(o)))


def addmm(m: Maker, n: Sizes) -> fx.Node:
    k, o = n(), n()
    return m.call(aten.addmm.default, m.parameter(tensor(o)), m.value(tensor(3, k), 0), m.parameter(tensor(k, o)))


def mm(m: Maker, n: Sizes) -> fx.Node:
    k, o = n(), n()
    return m.call(aten.mm.default, m.value(tensor(3, k), 0), m.parameter(tensor(k, o)))


def square(m: Maker, n: Sizes) -> fx.Node:
    weight = m.parameter(tensor(size := n(), size))
    return m.call(aten.mm.default, weight, weight)


def bmm(m: Maker, n: Sizes) -> fx.Node:
    b, k, o = n(), n(), n()
    return m.call(aten.bmm.default, m.value(tensor(b, 3, k)), m.parameter(tensor(b, k, o)))


def baddbmm(m: Maker, n: Sizes) -> fx.Node:
    b, k, o = n(), n(), n()
    extra = m.parameter(tensor(b, 1, o))
    return m.call(aten.baddbmm.default, extra, m.value(tensor(b, 3, k)), m.parameter(tensor(b, k, o)))


def matmul(m: Maker, n: Sizes) -> fx.Node:
    h, k, o = n(), n(), n()
    return m.call(aten.matmul.default, m.value(tensor(3, h, 2, k), 0), m.parameter(tensor(h, k, o)))


def einsum(m: Maker, n: Sizes) -> fx.Node:
    e, d, f = max(n(), 2), max(n(), 2), max(n(), 2)
    return m.call(aten.einsum.default, "bd,edf->bef", [m.value(tensor(3, d), 0), m.parameter(tensor(e, d, f))])


def embedding(m: Maker, n: Sizes) -> fx.Node:
    v, d = n(), n()
    tokens = m.input(torch.randint(v, (3, 4)), 0)
    return m.call(aten.embedding.default, m.parameter(tensor(v, d)), tokens, v // 2)


def attention(m: Maker, n: Sizes) -> fx.Node:
    h = n()
    query, key, value = (m.value(tensor(2, h, 3, 4), 0) for _ in range(3))
    mask = m.input(torch.randn(1, h, 3, 3, dtype=torch.float64))
    return m.call(aten.scaled_dot_product_attention.default, query, key, value, mask)


def grouped_attention(m: Maker, n: Sizes) -> fx.Node:
    h = n()
    query, key, value = (
        m.value(tensor(2, 2 * h, 3, 4), 0),
        m.value(tensor(2, h, 3, 4), 0),
        m.value(tensor(2, h, 3, 4), 0),
    )
    return m.call(aten.scaled_dot_product_attention.default, query, key, value, is_causal=True, enable_gqa=True)


def softmax(m: Maker, n: Sizes) -> fx.Node:
    return m.call(aten.softmax.int, m.value(tensor(3, n(), n()), 0), -1)


def layer_norm(m: Maker, n: Sizes) -> fx.Node:
    d = n()
    return m.call(
        aten.layer_norm.default, m.value(tensor(3, n(), d), 0), [d], m.parameter(tensor(d)), m.parameter(tensor(d))
    )


def group_norm(m: Maker, n: Sizes) -> fx.Node:
    g = n()
    return m.call(
        aten.group_norm.default,
        m.value(tensor(3, 2 * g, 3), 0),
        g,
        m.parameter(tensor(2 * g)),
        m.parameter(tensor(2 * g)),
    )


def convolution(m: Maker, n: Sizes) -> fx.Node:
    i, o = n(), n()
    weight, bias = m.parameter(tensor(o, i, 2, 2)), m.parameter(tensor(o))
    return m.call(aten.conv2d.default, m.value(tensor(3, i, 4, 4), 0), weight, bias, [1, 1], [1, 1])


def grouped_convolution(m: Maker, n: Sizes) -> fx.Node:
    g = n()
    weight, bias = m.parameter(tensor(3 * g, 2, 2, 2)), m.parameter(tensor(3 * g))
    stride = [1, 1]
    return m.call(aten.conv2d.default, m.value(tensor(3, 2 * g, 4, 4), 0), weight, bias, stride, [0, 0], [1, 1], g)


def turned_convolution(m: Maker, n: Sizes) -> fx.Node:
    i, o = n(), n()
    weight, bias = m.parameter(tensor(i, o, 2)), m.parameter(tensor(o))
    return m.call(aten.conv_transpose1d.default, m.value(tensor(3, i, 4), 0), weight, bias)


def pooling(m: Maker, n: Sizes) -> fx.Node:
    return m.call(aten.max_pool2d.default, m.value(tensor(3, n(), 4, 4), 0), [2, 2])


def product(m: Maker, n: Sizes) -> fx.Node:
    d = n()
    return m.call(aten.mul.Tensor, m.value(tensor(3, n(), d), 0), m.parameter(tensor(d)))


def addition(m: Maker, n: Sizes) -> fx.Node:
    d = n()
    return m.call(aten.add.Tensor, m.value(tensor(3, d), 0), m.parameter(tensor(1, d)), alpha=2)


def activation(m: Maker, n: Sizes) -> fx.Node:
    return m.call(aten.gelu.default, m.value(tensor(3, n()), 0), approximate="tanh")


def gated(m: Maker, n: Sizes) -> fx.Node:
    return m.call(aten.glu.default, m.value(tensor(3, 2 * n()), 0), -1)


def chosen(m: Maker, n: Sizes) -> fx.Node:
    d = n()
    return m.call(aten.where.self, m.input(torch.rand(3, d) > 0.5, 0), m.value(tensor(3, d), 0), m.parameter(tensor(d)))


def chosen_or_none(m: Maker, n: Sizes) -> fx.Node:
    value = m.value(tensor(3, n()), 0)
    return m.call(aten.where.ScalarOther, m.call(aten.gt.Scalar, value, 0.0), value, 0.5)


def total(m: Maker, n: Sizes) -> fx.Node:
    return m.call(aten.sum.dim_IntList, m.value(tensor(3, n(), n()), 0), [-1])


def average(m: Maker, n: Sizes) -> fx.Node:
    return m.call(aten.mean.dim, m.value(tensor(3, n(), n()), 0), [1, 2], True)


def largest(m: Maker, n: Sizes) -> fx.Node:
    return m.call(aten.amax.default, m.value(tensor(3, n(), n()), 0), [-1])


def split_heads(m: Maker, n: Sizes) -> fx.Node:
    h = n()
    return m.call(aten.view.default, m.value(tensor(3, 2 * h), 0), [3, h, 2])


def split_fused(m: Maker, n: Sizes) -> fx.Node:
    h = n()
    return m.call(aten.view.default, m.value(tensor(3, 3 * h * 2), 0), [3, 3, h, 2])


def merge_heads(m: Maker, n: Sizes) -> fx.Node:
    h = n()
    return m.call(aten.reshape.default, m.value(tensor(3, h, 2), 0), [3, -1])


def merge_with_rows(m: Maker, n: Sizes) -> fx.Node:
    return m.call(aten.reshape.default, m.value(tensor(3, n(), 2), 0), [-1, 2])


def flattened(m: Maker, n: Sizes) -> fx.Node:
    return m.call(aten.flatten.using_ints, m.value(tensor(3, n(), 2, 2), 0), 1)


def transposed(m: Maker, n: Sizes) -> fx.Node:
    return m.call(aten.permute.default, m.value(tensor(3, n(), n()), 0), [2, 0, 1])


def expanded(m: Maker, n: Sizes) -> fx.Node:
    h = n()
    return m.call(aten.expand.default, m.value(tensor(3, h, 1), 0), [-1, h, n()])


def repeated(m: Maker, n: Sizes) -> fx.Node:
    return m.call(aten.repeat_interleave.self_int, m.value(tensor(3, n(), 2), 0), 3, 1)


def squeezed(m: Maker, n: Sizes) -> fx.Node:
    return m.call(aten.squeeze.default, m.value(tensor(3, n(), 1), 0))


def selected(m: Maker, n: Sizes) -> fx.Node:
    return m.call(aten.select.int, m.value(tensor(3, n(), n()), 0), 1, 0)


def split_piece(m: Maker, n: Sizes) -> fx.Node:
    a, b = n(), n()
    pieces = m.call(aten.split_with_sizes.default, m.value(tensor(3, a + b), 0), [a, b], 1)
    first = m.call(aten.tanh.default, m.item(pieces, 0))
    return m.call(aten.cat.default, [m.item(pieces, 1), first], 1)


def chunked(m: Maker, n: Sizes) -> fx.Node:
    pieces = m.call(aten.chunk.default, m.value(tensor(3, 2 * n()), 0), 2, -1)
    return m.call(aten.mul.Tensor, m.item(pieces, 0), m.item(pieces, 1))


def joined(m: Maker, n: Sizes) -> fx.Node:
    return m.call(aten.cat.default, [m.value(tensor(3, n()), 0), m.value(tensor(3, n()), 0)], 1)


def stacked(m: Maker, n: Sizes) -> fx.Node:
    d = n()
    return m.call(aten.stack.default, [m.value(tensor(3, d), 0), m.value(tensor(3, d), 0)], 1)


def gathered(m: Maker, n: Sizes) -> fx.Node:
    h, d = n(), n()
    return m.call(aten.gather.default, m.value(tensor(3, h, d), 0), 2, m.input(torch.randint(d, (3, h, 2)), 0))


def indexed(m: Maker, n: Sizes) -> fx.Node:
    r, d = n(), n()
    return m.call(aten.index.Tensor, m.parameter(tensor(r, d)), [m.input(torch.randint(r, (3,)), 0)])


def dropped(m: Maker, n: Sizes) -> fx.Node:
    return m.call(aten.dropout.default, m.value(tensor(3, n(), 2), 0), 0.5, True)


def cross_entropy(m: Maker, n: Sizes) -> fx.Node:
    c = n()
    target = torch.randint(c, (5,))
    target[1] = -100
    return m.call(aten.cross_entropy_loss.default, m.value(tensor(5, c), 0), m.input(target, 0), None, 2)


def squared_error(m: Maker, n: Sizes) -> fx.Node:
    d = n()
    return m.call(aten.mse_loss.default, m.value(tensor(3, d), 0), m.input(tensor(3, d), 0), 2)


def doubled(m: Maker, n: Sizes) -> fx.Node:
    value = m.value(tensor(3, n()), 0)
    return m.call(aten.mul.Tensor, value, value)


def implicit_einsum(m: Maker, n: Sizes) -> fx.Node:
    d, f = n(), n()
    return m.call(aten.einsum.default, "ad, db", [m.value(tensor(3, d), 0), m.parameter(tensor(d, f))])


def dotted_einsum(m: Maker, n: Sizes) -> fx.Node:
    d, f = n(), n()
    return m.call(aten.einsum.default, "...d,...fd->...f", [m.value(tensor(3, 2, d), 0), m.parameter(tensor(1, f, d))])


def summing_einsum(m: Maker, n: Sizes) -> fx.Node:
    d, f = n(), n()
    given = [m.value(tensor(3, d), 0), m.parameter(tensor(d, f)), m.parameter(tensor(1, f))]
    return m.call(aten.einsum.default, "ad,df,bf->a", given)


def matrix_times_vector(m: Maker, n: Sizes) -> fx.Node:
    d = n()
    return m.call(aten.matmul.default, m.value(tensor(3, n(), d), 0), m.parameter(tensor(d)))


def depthwise_convolution(m: Maker, n: Sizes) -> fx.Node:
    c = n()
    weight, bias = m.parameter(tensor(c, 1, 3)), m.parameter(tensor(c))
    return m.call(aten.conv1d.default, m.value(tensor(3, c, 5), 0), weight, bias, [1], [1], [1], c)


def turned_grouped_convolution(m: Maker, n: Sizes) -> fx.Node:
    g = n()
    weight, bias = m.parameter(tensor(2 * g, 3, 2, 2)), m.parameter(tensor(3 * g))
    options = ([2, 2], [0, 0], [1, 1], g)
    return m.call(aten.conv_transpose2d.input, m.value(tensor(3, 2 * g, 3, 3), 0), weight, bias, *options)


def sliced(m: Maker, n: Sizes) -> fx.Node:
    a, b, c = n(), n(), n()
    return m.call(aten.slice.Tensor, m.value(tensor(3, a + b + c), 0), 1, a, a + b)


def sliced_third(m: Maker, n: Sizes) -> fx.Node:
    d = n()
    return m.call(aten.slice.Tensor, m.value(tensor(3, 2, 3 * d), 0), -1, d, 2 * d)


def sliced_with_steps(m: Maker, n: Sizes) -> fx.Node:
    return m.call(aten.slice.Tensor, m.value(tensor(3, n(), 2 * n()), 0), 2, 0, 9223372036854775807, 2)


def indexed_inside(m: Maker, n: Sizes) -> fx.Node:
    a, r, d = n(), n(), n()
    where = m.input(torch.randint(r, (2, 2)))
    return m.call(aten.index.Tensor, m.value(tensor(3, a, r, d), 0), [None, None, where])


def indexed_apart(m: Maker, n: Sizes) -> fx.Node:
    a, r, d = n(), n(), n()
    first, last = m.input(torch.randint(r, (2,))), m.input(torch.randint(d, (2,)))
    return m.call(aten.index.Tensor, m.parameter(tensor(r, a, d)), [first, None, last])


def put(m: Maker, n: Sizes) -> fx.Node:
    r, d = n(), n()
    where = m.input(torch.arange(r)[: max(r // 2, 1)])
    fresh = m.parameter(tensor(len(where.meta["val"]), d))
    return m.call(aten.index_put.default, m.value(tensor(3, r, d), 0), [None, where], fresh)


def scattered(m: Maker, n: Sizes) -> fx.Node:
    h, d = n(), n()
    where = m.input(torch.rand(3, h, d).argsort(2), 0)
    return m.call(aten.scatter.src, m.value(tensor(3, h, d), 0), 2, where, m.value(tensor(3, h, d), 0))


def scattered_sum(m: Maker, n: Sizes) -> fx.Node:
    h, d = n(), n()
    where = m.input(torch.randint(d, (3, h, 2)), 0)
    return m.call(aten.scatter_add.default, m.value(tensor(3, h, d), 0), 2, where, m.value(tensor(3, h, 2), 0))


def added_by_index(m: Maker, n: Sizes) -> fx.Node:
    r, d = n(), n()
    where = m.input(torch.randint(r, (4,)))
    return m.call(aten.index_add.default, m.value(tensor(3, r, d), 0), 1, where, m.value(tensor(3, 4, d), 0))


def summed_up(m: Maker, n: Sizes) -> fx.Node:
    return m.call(aten.cumsum.default, m.value(tensor(3, n(), n()), 0), 1)


def sorted_values(m: Maker, n: Sizes) -> fx.Node:
    return m.item(m.call(aten.sort.default, m.value(tensor(3, n(), n()), 0), 2), 0)


def top_values(m: Maker, n: Sizes) -> fx.Node:
    return m.item(m.call(aten.topk.default, m.value(tensor(3, n(), 4), 0), 2, -1), 0)


def median(m: Maker, n: Sizes) -> fx.Node:
    return m.item(m.call(aten.median.dim, m.value(tensor(3, n(), 5), 0), 2), 0)


def rolled(m: Maker, n: Sizes) -> fx.Node:
    return m.call(aten.roll.default, m.value(tensor(3, n(), 4), 0), [1], [2])


def tiled(m: Maker, n: Sizes) -> fx.Node:
    return m.call(aten.repeat.default, m.value(tensor(3, n(), 2), 0), [2, 1, 1, 3])


def sloped(m: Maker, n: Sizes) -> fx.Node:
    c = n()
    return m.call(aten.prelu.default, m.value(tensor(3, c, 2), 0), m.parameter(tensor(c)))


def dropping_attention(m: Maker, n: Sizes) -> fx.Node:
    h = n()
    query, key, value = (m.value(tensor(2, h, 3, 4), 0) for _ in range(3))
    mask = m.input(torch.rand(1, 1, 3, 3) > 0.3)
    return m.call(aten.scaled_dot_product_attention.default, query, key, value, mask, 0.5)


def dropping_grouped_attention(m: Maker, n: Sizes) -> fx.Node:
    h = n()
    query, key, value = (m.value(tensor(2, times * h, 3, 4), 0) for times in (2, 1, 1))
    options = {"is_causal": True, "enable_gqa": True, "scale": 0.3}
    return m.call(aten.scaled_dot_product_attention.default, query, key, value, None, 0.5, **options)


def unknown(m: Maker, n: Sizes) -> fx.Node:
    return m.call(aten.pixel_shuffle.default, m.value(tensor(3, 4 * n(), 2, 2), 0), 2)


BUILDS = (
    linear, addmm, mm, square, bmm, baddbmm, matmul, einsum, embedding, attention, grouped_attention, softmax,
    layer_norm, group_norm, convolution, grouped_convolution, turned_convolution, pooling, product, addition,
    activation, gated, chosen, chosen_or_none,
    total, average, largest, split_heads, split_fused, merge_heads, merge_with_rows,
    flattened, transposed, expanded, repeated, squeezed, selected, split_piece, chunked, joined, stacked, gathered,
    implicit_einsum, dotted_einsum, summing_einsum, matrix_times_vector, depthwise_convolution,
    turned_grouped_convolution, sliced, sliced_third, sliced_with_steps, indexed_inside, indexed_apart, put, scattered,
    scattered_sum, added_by_index, summed_up, sorted_values, top_values, median, rolled, tiled, sloped,
    dropping_attention, dropping_grouped_attention, indexed, dropped, cross_entropy, squared_error, doubled, unknown,
)  # fmt: skip


def all_ways(node: fx.Node, known: Sequence[Strategy], width: int) -> list[Strategy]:
    """Return the ways of a call that its neighbours could ask for, by a cut of any operand's dimension."""
    given = operands(node)

    def even(result: bool, index: int, dim: int) -> Cut | None:
        size = extents(results(node)[index] if result else value_of(given[index]))[dim]
        return None if size is None else Cut.even(size, width)

    ways = dict.fromkeys(known[1:])
    for result, values in ((False, [value_of(o) for o in given]), (True, results(node))):
        for index, value in enumerate(values):
            for dim in range(value.ndim):
                cut = even(result, index, dim)
                way = None if cut is None else complete(node, result, index, dim, cut, even)
                if way is not None:
                    ways.setdefault(way)
    return list(ways)


@pytest.mark.parametrize("build", BUILDS, ids=lambda build: build.__name__)
def test_every_way_of_a_call_computes_what_one_device_does(build: Build) -> None:
    hold_all_ways(build, 2, [5, 4, 3, 4])


@pytest.mark.long
@pytest.mark.parametrize("build", BUILDS, ids=lambda build: build.__name__)
def test_every_way_of_a_call_of_any_size_computes_what_one_device_does(build: Build) -> None:
    @settings(max_examples=20, deadline=None)
    @given(st.integers(2, 4), st.lists(st.integers(1, 9), min_size=4, max_size=4))
    def hold(width: int, sizes: list[int]) -> None:
        hold_all_ways(build, width, sizes)

    hold()


def hold_all_ways(build: Build, width: int, sizes: list[int]) -> None:
    torch.manual_seed(0)
    maker, rest = Maker(), iter(sizes)
    gm = maker.finish(build(maker, lambda: next(rest)))
    found = find_candidates(gm, width)
    plain = whole_choice(found)
    for node in found.strategies:
        for strategy in all_ways(node, found.strategies[node], width) if node.op == "call_function" else ():
            hold_against_one_device(maker, gm, found, Choice({**plain.strategies, node: strategy}, 0.0))


@pytest.mark.parametrize("build", BUILDS, ids=lambda build: build.__name__)
def test_a_call_with_large_sizes_can_be_cut_unless_it_is_unknown(build: Build) -> None:
    maker = Maker()
    gm = maker.finish(build(maker, lambda: 8))
    strategies = find_candidates(gm, 2).strategies
    ways = [way for n, some in strategies.items() if n.op == "call_function" for way in all_ways(n, some, 2)]
    cut = any(p.cut is not None for way in ways for p in (*way.inputs, *way.outputs))
    assert cut == (build is not unknown)


def test_shapes_are_matched_by_their_products() -> None:
    assert groups_of((4, 6, 5), (4, 2, 15)) == [([0], [0]), ([1, 2], [1, 2])]
    assert groups_of((6, 1, 4), (2, 3, 4)) == [([0], [0, 1]), ([1, 2], [2])]


def test_a_dropout_that_is_cut_draws_the_mask_of_the_whole() -> None:
    maker = Maker()
    value = maker.value(tensor(3, 6), 0)
    weight = maker.parameter(tensor(6, 6))
    grown = maker.call(aten.linear.default, value, weight)
    gm = maker.finish(maker.call(aten.dropout.default, grown, 0.5, True))
    found = find_candidates(gm, 2)
    ways = {n: s for n, some in found.strategies.items() for s in some if s.outputs[0].cut is not None}
    assert len(ways) == 3
    hold_against_one_device(
        maker, gm, found, replace(whole_choice(found), strategies={**whole_choice(found).strategies, **ways})
    )


def test_partial_sums_are_dropped_alike_before_they_are_added_up() -> None:
    for target in (aten.dropout.default, aten.native_dropout.default):
        maker = Maker()
        grown = maker.call(aten.linear.default, maker.value(tensor(3, 6), 0), maker.parameter(tensor(6, 6)))
        dropped = maker.call(target, grown, 0.5, True)
        gm = maker.finish(*([dropped] if target is aten.dropout.default else [maker.item(dropped, i) for i in (0, 1)]))
        found = find_candidates(gm, 2)
        rows = next(s for s in found.strategies[grown] if s.outputs[0] == PARTIAL and s.inputs[1].cut is not None)
        sums = next(s for s in found.strategies[dropped] if s.outputs[0] == PARTIAL)
        assert sums.outputs[1:] in ((), (WHOLE,))  # the mask is the same on all ranks
        ways = {grown: rows, dropped: sums}
        hold_against_one_device(maker, gm, found, Choice({**whole_choice(found).strategies, **ways}, 0.0))


def test_a_dropout_that_nobody_reads_still_draws() -> None:
    maker = Maker()
    value = maker.value(tensor(3, 6), 0)
    unread = maker.call(aten.dropout.default, value, 0.5, True)
    gm = maker.finish(maker.call(aten.dropout.default, value, 0.5, True))
    found, halves = find_candidates(gm, 2), Cut.even(6, 2)
    assert halves is not None
    way = complete(unread, False, 0, 1, halves, lambda *_: None)
    assert way is not None
    hold_against_one_device(maker, gm, found, Choice({**whole_choice(found).strategies, unread: way}, 0.0))


def cut_along_vocabulary(build: Build, hold: Callable[..., Any]) -> None:
    """Do something with a call whose first operand has its words, or classes, cut over two ranks."""
    torch.manual_seed(0)
    maker = Maker()
    gm = maker.finish(build(maker, lambda: 6))
    found = find_candidates(gm, 2)
    node = next(n for n in gm.graph.nodes if n.op == "call_function")
    way = next(
        one for one in found.strategies[node] if one.inner == "v" or (one.inner == "classes" and one.inputs[0].cut)
    )
    hold(maker, gm, found, Choice({**whole_choice(found).strategies, node: way}, 0.0))


def looked_up(indices: Tensor) -> Build:
    return lambda m, n: m.call(aten.embedding.default, m.parameter(tensor(n(), 3)), m.input(indices, 0))


def classed(target: Tensor, logits: Tensor) -> Build:
    return lambda m, n: m.call(aten.cross_entropy_loss.default, m.value(logits, 0), m.input(target, 0), None, 1, 5)


MASKED = tensor(3, 6)
MASKED[:, [0, 3]] = float("-inf")  # the first class of each rank


def test_classes_that_are_masked_by_minus_infinity_may_be_cut() -> None:
    cut_along_vocabulary(classed(torch.tensor([1, 4, 5]), MASKED), hold_against_one_device)


@pytest.mark.parametrize("wrong", [6, 99, -1])
def test_a_word_or_class_that_is_none_is_refused_where_they_are_cut_too(wrong: int) -> None:
    with pytest.raises(IndexError):
        cut_along_vocabulary(looked_up(torch.tensor([[0, 5], [3, wrong]])), run_group)
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        cut_along_vocabulary(classed(torch.tensor([1, 4, wrong]), tensor(3, 6)), run_group)
