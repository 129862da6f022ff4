"""Generated code that meets other ranks starts its sums early and waits for them late."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from efftra_fx.collectives import TENSOR_SUM, Exchange
from efftra_fx.passes.shard_segments import Segments, run_together

aten = torch.ops.aten


def two_sums() -> fx.GraphModule:
    """y = 2 sum(3 x), z = x + 1 (needs no sum), w = sum(x)."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    tripled = graph.call_function(aten.mul.Tensor, (x, 3.0))
    first = graph.call_function(TENSOR_SUM, (tripled,))
    y = graph.call_function(aten.mul.Tensor, (first, 2.0))
    z = graph.call_function(aten.add.Tensor, (x, 1.0))
    w = graph.call_function(TENSOR_SUM, (x,))
    graph.output((y, z, w, None))
    for node in graph.nodes:
        node.meta["val"] = torch.empty(2, device="meta")
    return fx.GraphModule(torch.nn.Module(), graph)


def pieces() -> Segments:
    return Segments("two_sums", two_sums(), (1,), (2, 2), (False,))


def test_ranks_compute_what_the_graph_says() -> None:
    x = [torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0])]
    for mine, ((y, z), (w, none)) in zip(x, run_together([pieces()([one]) for one in x]), strict=True):
        assert y.tolist() == [66.0, 132.0]
        assert torch.equal(z, mine + 1)
        assert w.tolist() == [11.0, 22.0]
        assert none is None
    assert x[0].tolist() == [1.0, 2.0]  # operands are never overwritten


def test_both_sums_are_started_before_the_first_is_waited_for() -> None:
    meeting = pieces()([torch.ones(2)])
    starts = [meeting.send(None)]
    starts.append(meeting.send("first"))
    waited = meeting.send("second")
    assert [exchange for exchange, _ in starts] == [Exchange("sum"), Exchange("sum")]
    assert waited == (None, "first")


def test_sums_are_told_in_order() -> None:
    assert pieces().sums == ("sum float32[2]", "sum float32[2]")


def test_a_group_that_is_consumed_is_emptied() -> None:
    group = [torch.ones(2)]
    run_together([Segments("one", two_sums(), (1,), (2, 2), (True,))(group)])
    assert not group


def test_ranks_that_meet_in_different_sums_are_caught() -> None:
    def other() -> object:
        yield None, torch.ones(2)

    with pytest.raises(AssertionError, match="different orders"):
        run_together([pieces()([torch.ones(2)]), other()])  # type: ignore[list-item]


def test_random_numbers_are_drawn_in_the_order_of_the_graph() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    total = graph.call_function(TENSOR_SUM, (x,))
    first = graph.call_function(aten.bernoulli.p, (total, 0.5))  # waits for the sum
    second = graph.call_function(aten.bernoulli.p, (x, 0.5))
    graph.output((first, second))
    for node in graph.nodes:
        node.meta["val"] = torch.empty(100, device="meta")
    gm = fx.GraphModule(torch.nn.Module(), graph)
    torch.manual_seed(0)
    expected = [aten.bernoulli.p(torch.zeros(100), 0.5) for _ in range(2)]
    torch.manual_seed(0)
    (found,) = run_together([Segments("draws", gm, (1,), (2,), (False,))([torch.zeros(100)])])
    assert all(torch.equal(mine, one) for mine, one in zip(found, expected, strict=True))
