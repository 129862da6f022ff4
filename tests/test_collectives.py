"""Collectives, each with its backward, on ranks in lockstep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shard_rig import Maker, fixed, run
from torch import Tensor

from efftra_fx import collectives
from efftra_fx.errors import EmitError
from efftra_fx.passes.shard_cuts import Cut

Function = Callable[..., Tensor]
WIDTH = 3
CUT = Cut(5, (((0, 1), (4, 5)), ((1, 3),), ((3, 4),)))


def ranks_run(
    function: Function, arguments: Sequence[tuple[Any, ...]], tensors: Sequence[Tensor]
) -> list[tuple[Tensor, Tensor]]:
    """Return each rank's value and the gradient of its operand; the value's gradient is `fixed`, times rank + 1."""
    graphs, operands = [], []
    for rank in range(WIDTH):
        maker = Maker()
        value = maker.value(tensors[rank])
        node = maker.graph.call_function(function, (value, *arguments[rank]))
        node.meta["val"] = value.meta["val"]
        scaled = maker.graph.call_function(torch.ops.aten.mul.Tensor, (node, float(rank + 1)))
        scaled.meta["val"] = value.meta["val"]
        graphs.append(maker.finish(scaled))
        operands.append(maker.tensors)
    found = run(graphs, operands)
    return [(o.outputs[0] / (r + 1), next(iter(o.gradients.values()))) for r, o in enumerate(found)]


def drawn() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, 5, dtype=torch.float64) for _ in range(WIDTH)]


def shares(whole: Tensor) -> list[Tensor]:
    return [collectives.take(whole, 1, part, CUT.size).contiguous() for part in CUT.parts]


WHERE = [(1, part, CUT.size) for part in CUT.parts]
NONE: list[tuple[object, ...]] = [()] * WIDTH
SCALES = range(1, WIDTH + 1)


def test_copy_is_itself_and_its_gradients_add_up() -> None:
    tensors = [drawn()[0]] * WIDTH
    for value, gradient in ranks_run(collectives.copy, NONE, tensors):
        torch.testing.assert_close(value, tensors[0])
        torch.testing.assert_close(gradient, fixed(value, 0) * sum(SCALES))


def test_reduce_adds_up_and_hands_its_gradient_on() -> None:
    tensors = drawn()
    for rank, (value, gradient) in enumerate(ranks_run(collectives.reduce, NONE, tensors)):
        torch.testing.assert_close(value, sum(tensors))
        torch.testing.assert_close(gradient, fixed(value, 0) * (rank + 1))


def test_gather_puts_shares_together_and_takes_its_gradient_apart() -> None:
    whole = drawn()[0]
    for rank, (value, gradient) in enumerate(ranks_run(collectives.gather, WHERE, shares(whole))):
        torch.testing.assert_close(value, whole)
        torch.testing.assert_close(gradient, shares(fixed(whole, 0) * (rank + 1))[rank])


def test_gather_copy_takes_the_sum_of_its_gradients_apart() -> None:
    whole = drawn()[0]
    for rank, (value, gradient) in enumerate(ranks_run(collectives.gather_copy, WHERE, shares(whole))):
        torch.testing.assert_close(value, whole)
        torch.testing.assert_close(gradient, shares(fixed(whole, 0) * sum(SCALES))[rank])


def test_share_takes_apart_and_puts_its_gradients_together() -> None:
    whole = drawn()[0]
    found = ranks_run(collectives.share, WHERE, [whole] * WIDTH)
    wanted = sum(
        collectives.spread(fixed(value, 0) * (rank + 1), *WHERE[rank]) for rank, (value, _) in enumerate(found)
    )
    for rank, (value, gradient) in enumerate(found):
        torch.testing.assert_close(value, shares(whole)[rank])
        torch.testing.assert_close(gradient, wanted)


def test_reduce_share_takes_the_sum_apart() -> None:
    tensors = drawn()
    for rank, (value, _) in enumerate(ranks_run(collectives.reduce_share, WHERE, tensors)):
        torch.testing.assert_close(value, shares(sum(tensors[1:], tensors[0]))[rank])


def test_first_and_keep_count_a_value_and_a_gradient_once() -> None:
    whole, ranks = drawn()[0], [(rank,) for rank in range(WIDTH)]
    values = ranks_run(collectives.first, ranks, [whole] * WIDTH)
    torch.testing.assert_close(sum(value for value, _ in values), whole)
    kept = ranks_run(collectives.keep, ranks, [whole] * WIDTH)
    torch.testing.assert_close(sum(gradient for _, gradient in kept), fixed(whole, 0))


def test_a_sum_outside_of_a_stage_is_an_error() -> None:
    with pytest.raises(EmitError, match="runs only inside a stage's code"):
        collectives.tensor_sum(torch.ones(2))


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 3), st.integers(0, 2))
def test_spread_and_take_undo_each_other(periods: int, rank: int) -> None:
    share = torch.randn(2, periods * CUT.lengths[rank], 2)
    whole = collectives.spread(share, 1, CUT.parts[rank], CUT.size)
    assert whole.shape[1] == periods * CUT.size
    assert torch.equal(collectives.take(whole, 1, CUT.parts[rank], CUT.size), share)
