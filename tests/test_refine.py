"""Neighbours of a plan are plans, and refinement never makes a plan worse."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from efftra_fx.cluster import Cluster, Link
from efftra_fx.cost import Chain, Crossing, NodeCost, Timing
from efftra_fx.passes.candidates import Request, Search, Setting
from efftra_fx.passes.neighbours import Neighbourhood, Shape, shape_of, to_batch
from efftra_fx.passes.placement import layouts
from efftra_fx.passes.refine import refine
from efftra_fx.passes.rules import Rules
from efftra_fx.passes.table import Table

BLOCKS, DEVICES = 12, 8


def search_of(**fixed: object) -> Search:
    """Twelve uneven blocks on two machines of four."""
    blocks = tuple(
        NodeCost(f"b{i}", Timing(0, 1e-3 * (1 + i % 4)), Timing(0, 2e-3), 1e7 * (i % 3), 1e7 * (i % 3), 1e4, 1e4)
        for i in range(BLOCKS)
    )
    chain = Chain(blocks, tuple(Crossing(i, (i + 1,), 1e4 * (1 + i % 5)) for i in range(BLOCKS - 1)))
    cluster = Cluster.uniform(2, 4, None, Link(1e10), Link(1e9))
    rules = Rules(whole_rows=False)
    return Search(chain, cluster, rules, Request(64, **fixed), Table(chain, cluster, rules))  # type: ignore[arg-type]


def neighbours(around: Neighbourhood, shape: Shape) -> list[Shape]:
    """All neighbours of a shape."""
    batch = around.of(shape)
    return [shape_of(batch, at) for at in range(len(batch))]


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    """Cuts, counts, ways and unused positions at the front."""
    depth = draw(st.integers(1, 5))
    inner = sorted(draw(st.sets(st.integers(1, BLOCKS - 1), min_size=depth - 1, max_size=depth - 1)))
    ends = sorted(draw(st.sets(st.integers(1, DEVICES), min_size=depth, max_size=depth)))
    counts = tuple(b - a for a, b in zip((0, *ends), ends, strict=False))
    return (0, *inner, BLOCKS), counts, (0,) * depth, draw(st.integers(0, DEVICES - sum(counts)))


@settings(max_examples=60)
@given(shapes())
def test_every_neighbour_is_a_plan(shape: Shape) -> None:
    search = search_of()
    layout = layouts(search.cluster, search.table)[0]
    for cuts, counts, ways, skip in neighbours(Neighbourhood(search, layout), shape):
        assert cuts[0] == 0 and cuts[-1] == BLOCKS and list(cuts) == sorted(set(cuts))
        assert len(counts) == len(ways) == len(cuts) - 1
        assert min(counts) >= 1 and skip >= 0 and skip + sum(counts) <= DEVICES


@settings(max_examples=10)
@given(shapes())
def test_refinement_never_makes_worse(shape: Shape) -> None:
    search = search_of()
    layout, settings_ = layouts(search.cluster, search.table)[0], (Setting(16, "1f1b", 2),)
    before = float(search.offer(layout, 16, settings_, to_batch([shape]))[0])
    front = refine(search, layout, 16, settings_, [shape], 3, 4)
    assert front[0][0] <= before
    assert front == sorted(front, key=lambda one: one[0])


def test_what_is_fixed_stays_fixed() -> None:
    shape = ((0, 4, 12), (3, 1), (0, 0), 0)
    kept = search_of(replicas=(3, 1))
    around = Neighbourhood(kept, layouts(kept.cluster, kept.table)[0])
    assert {counts for _, counts, _, _ in neighbours(around, shape)} == {(3, 1)}
    deep = search_of(stages=2)
    around = Neighbourhood(deep, layouts(deep.cluster, deep.table)[0])
    assert {len(counts) for _, counts, _, _ in neighbours(around, shape)} == {2}


def test_a_shape_survives_the_way_through_a_batch() -> None:
    one, other = ((0, 4, 12), (3, 1), (0, 0), 2), ((0, 12), (8,), (0,), 0)
    batch = to_batch([one, other])
    assert [shape_of(batch, at) for at in range(2)] == [one, other]


@settings(max_examples=60)
@given(st.lists(shapes(), min_size=2, max_size=6, unique=True))
def test_plans_are_told_apart_by_their_marks_in_any_batch(plans: list[Shape]) -> None:
    search = search_of()
    around = Neighbourhood(search, layouts(search.cluster, search.table)[0])
    marks = around.marks(to_batch(plans))
    assert len(set(marks)) == len(plans)
    assert [around.marks(to_batch([plan]))[0] for plan in plans] == marks
