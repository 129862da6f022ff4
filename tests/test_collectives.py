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


WHERE = [(1, CUT.parts, CUT.size, rank) for rank in range(WIDTH)]
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
    wanted = torch.zeros_like(whole)
    for rank, (value, _) in enumerate(found):
        indices = [index for a, b in CUT.parts[rank] for index in range(a, b)]
        wanted[:, indices] = fixed(value, 0) * (rank + 1)
    for rank, (value, gradient) in enumerate(found):
        torch.testing.assert_close(value, shares(whole)[rank])
        torch.testing.assert_close(gradient, wanted)


def test_spread_makes_shares_partial_sums_and_takes_its_gradient_apart() -> None:
    whole = drawn()[0]
    found = ranks_run(collectives.spread, WHERE, shares(whole))
    torch.testing.assert_close(sum(value for value, _ in found), whole)
    for rank, (_, gradient) in enumerate(found):
        torch.testing.assert_close(gradient, shares(fixed(whole, 0) * (rank + 1))[rank])


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
@given(st.integers(1, 3), st.integers(0, 2), st.sampled_from((2, 3, 4)), st.booleans())
def test_shares_put_together_are_the_whole(periods: int, dim: int, width: int, mixed: bool) -> None:
    cut = CUT if mixed else Cut.even(5, width)
    assert cut is not None
    sizes = [2, 3, 4]
    sizes[dim] = cut.size * periods
    whole = torch.randn(sizes)
    graphs = []
    for rank, part in enumerate(cut.parts):
        maker = Maker()
        value = maker.value(collectives.take(whole, dim, part, cut.size).contiguous())
        node = maker.graph.call_function(collectives.gather, (value, dim, cut.parts, cut.size, rank))
        node.meta["val"] = torch.empty(sizes)
        graphs.append((maker.finish(node), maker.tensors))
    for outcome in run([gm for gm, _ in graphs], [tensors for _, tensors in graphs]):
        assert torch.equal(outcome.outputs[0], whole)
        assert outcome.meetings[0].startswith("gather float32")


@pytest.mark.parametrize(
    ("function", "forward", "backward"),
    [
        (collectives.share, [], ["gather"]),
        (collectives.gather, ["gather"], []),
        (collectives.gather_copy, ["gather"], ["scatter"]),
        (collectives.reduce_share, ["scatter"], ["gather"]),
    ],
)
def test_shares_travel_once(function: Function, forward: list[str], backward: list[str]) -> None:
    whole = drawn()[0]
    held = [whole] * WIDTH if function in (collectives.share, collectives.reduce_share) else shares(whole)
    graphs, operands = [], []
    for rank in range(WIDTH):
        maker = Maker()
        node = maker.graph.call_function(function, (maker.value(held[rank]), *WHERE[rank]))
        node.meta["val"] = whole if function in (collectives.gather, collectives.gather_copy) else shares(whole)[rank]
        graphs.append(maker.finish(node))
        operands.append(maker.tensors)
    for outcome in run(graphs, operands):
        asked = [one.split(" ")[0] for one in outcome.meetings]
        assert asked == [*forward, "|", *backward]
