"""A meeting lets other ranks of the process go on while it waits, and draws its random numbers alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from efftra_fx.collectives import Exchange
from efftra_fx.runtime.local_transport import local_transports, run_all
from efftra_fx.runtime.meetings import Company, meet


def draws_twice(number: float) -> Any:
    """Draw before and behind a sum."""
    before = torch.rand(())
    token = yield Exchange("sum"), torch.tensor([number])
    total = yield None, token
    return float(before), float(torch.rand(())), total.item()


def test_ranks_sum_and_draw_alike_and_leave_the_callers_random_state_alone() -> None:
    transports = local_transports(3)
    torch.manual_seed(1)
    expected = torch.rand(())
    torch.manual_seed(1)
    found = run_all([meet(draws_twice(t.rank + 1.0), t, Company((0, 1, 2)), "a test", seed=5) for t in transports])
    assert len(set(found)) == 1
    assert found[0][2] == 6.0
    torch.manual_seed(5)
    assert found[0][:2] == (float(torch.rand(())), float(torch.rand(())))
    torch.manual_seed(1)
    run_all([meet(draws_twice(1.0), t, Company((0, 1, 2)), "a test", seed=5) for t in transports])
    assert torch.equal(torch.rand(()), expected)


def test_groups_meet_apart() -> None:
    transports = local_transports(4)
    groups = {0: (0, 2), 1: (1, 3), 2: (0, 2), 3: (1, 3)}
    found = run_all([meet(draws_twice(t.rank), t, Company(groups[t.rank]), "a test") for t in transports])
    assert [total for *_, total in found] == [2.0, 4.0, 2.0, 4.0]


def gathers_and_scatters(number: int) -> Any:
    """Bring `number + 1` elements to a gather, and all of them to a scatter."""
    token = yield Exchange("gather", (1, 2, 3)), torch.full((number + 1,), float(number))
    whole = yield None, token
    token = yield Exchange("scatter", (1, 2, 3)), whole * (number + 1)
    return whole.tolist(), (yield None, token).tolist()


@pytest.mark.parametrize("ranks", [(0, 1, 2), (2, 0, 1)])
def test_sections_are_in_the_groups_own_order(ranks: tuple[int, ...]) -> None:
    transports = local_transports(3)
    found = run_all([meet(gathers_and_scatters(ranks.index(t.rank)), t, Company(ranks), "a test") for t in transports])
    for rank, (whole, own) in enumerate(found):
        number = ranks.index(rank)
        assert whole == [0.0, 1.0, 1.0, 2.0, 2.0, 2.0]
        assert own == [6.0 * number] * (number + 1)


def joins_and_sums(number: float) -> Any:
    """Put numbers side by side, then add up over the tensor group and over the replicas."""
    beside = yield Exchange("gather", over="replicas"), torch.tensor([number, -number])
    here = yield Exchange("sum"), torch.tensor([number])
    there = yield Exchange("sum", over="replicas"), torch.tensor([number])
    found = []
    for handle in (beside, here, there):
        result = yield None, handle
        found.append(result.tolist())
    return found


def test_a_rank_meets_its_tensor_group_and_the_ranks_beside_it() -> None:
    transports = local_transports(4)
    company = {
        0: Company((0, 1), ((0, 3), (2, 0)), 3),  # replica 1 has no rows, and ranks need not rise with replicas
        1: Company((0, 1), ((0, 2), (2, 1)), 3),
        2: Company((3, 2), ((0, 2), (2, 1)), 3),
        3: Company((3, 2), ((0, 3), (2, 0)), 3),
    }
    found = run_all([meet(joins_and_sums(t.rank + 1.0), t, company[t.rank], "a test") for t in transports])
    assert found[0] == [[[4.0, -4.0], [0.0, 0.0], [1.0, -1.0]], [3.0], [5.0]]
    assert found[2] == [[[3.0, -3.0], [0.0, 0.0], [2.0, -2.0]], [7.0], [5.0]]
    assert found[3][0] == found[0][0] and found[1][2] == found[2][2]


def test_a_replica_alone_with_rows_meets_nobody_beside_it() -> None:
    (transport,) = local_transports(1)
    (found,) = run_all([meet(joins_and_sums(2.0), transport, Company((0,), ((1, 0),), 2), "a test")])
    assert found == [[[0.0, 0.0], [2.0, -2.0]], [2.0], [2.0]]
