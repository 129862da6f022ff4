"""Cuts deal out every index once, and views of them say the same of the same elements."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from efftra_fx.collectives import take
from efftra_fx.passes.shard_cuts import Cut, chain_cuts


@st.composite
def cuts(draw: st.DrawFn) -> Cut:
    """Draw cuts whose shares are several ranges of unequal length."""
    width = draw(st.integers(1, 4))
    owners = draw(st.permutations([*range(width), *draw(st.lists(st.integers(0, width - 1), max_size=8))]))
    parts: list[list[tuple[int, int]]] = [[] for _ in range(width)]
    for index, owner in enumerate(owners):
        if parts[owner] and parts[owner][-1][1] == index:
            parts[owner][-1] = (parts[owner][-1][0], index + 1)
        else:
            parts[owner].append((index, index + 1))
    return Cut(len(owners), tuple(map(tuple, parts)))


def indices(cut: Cut) -> list[list[int]]:
    return [[i for a, b in part for i in range(a, b)] for part in cut.parts]


def test_seven_indices_on_three_ranks() -> None:
    cut = Cut.even(7, 3)
    assert cut is not None
    assert indices(cut) == [[0, 1, 2], [3, 4], [5, 6]]
    assert cut.lengths == (3, 2, 2)


def test_fewer_indices_than_ranks_are_not_cut() -> None:
    assert Cut.even(2, 3) is None


@given(cuts())
def test_every_index_is_dealt_out_once(cut: Cut) -> None:
    assert sorted(sum(indices(cut), [])) == list(range(cut.size))
    assert sum(cut.lengths) == cut.size


@given(cuts(), st.integers(1, 4))
def test_merging_with_an_inner_dimension_can_be_undone(cut: Cut, inner: int) -> None:
    merged = cut.times(inner)
    assert indices(merged) == [[i * inner + j for i in part for j in range(inner)] for part in indices(cut)]
    assert merged.divide(inner) == cut


@given(cuts(), st.integers(1, 4))
def test_merging_with_an_outer_dimension_can_be_undone(cut: Cut, outer: int) -> None:
    merged = cut.repeat(outer)
    assert indices(merged) == [[o * cut.size + i for o in range(outer) for i in part] for part in indices(cut)]
    assert merged.period(cut.size) == cut


@given(st.lists(cuts(), min_size=1, max_size=3))
def test_cuts_behind_one_another_come_apart_again(some: list[Cut]) -> None:
    some = [cut for cut in some if cut.width == some[0].width]
    joined, at = chain_cuts(some), 0
    for cut in some:
        assert joined.segment(at, at + cut.size) == cut
        at += cut.size


@given(cuts(), st.integers(1, 3), st.integers(1, 3))
def test_shares_have_every_element_once(cut: Cut, periods: int, other: int) -> None:
    whole = torch.arange(other * cut.size * periods * 2).view(other, cut.size * periods, 2)
    shares = [take(whole, 1, part, cut.size) for part in cut.parts]
    assert torch.equal(torch.cat([share.flatten() for share in shares]).sort().values, whole.flatten())
