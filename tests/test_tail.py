"""Where micro-batches end: which values parts hand over, and what is computed once for the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from against_eager import compiled
from habits import Habit, Net, classes, cross_entropy, features, squares
from torch import Tensor

from efftra_fx import CompiledModel
from efftra_fx.errors import PlanError
from efftra_fx.meta import ROLE
from efftra_fx.passes.tail import mixing_node

Loss = Callable[[Tensor, Tensor], Tensor]


def root(output: Tensor, target: Tensor) -> Tensor:
    """Return a loss that is not a sum over rows."""
    return F.mse_loss(output, target).sqrt()


def spread(output: Tensor, target: Tensor) -> Tensor:
    """Return a loss that needs every row at once."""
    return F.mse_loss(output, target) + output.var()


@cache
def program(loss: Loss) -> CompiledModel:
    """Return a small network compiled with this loss."""
    torch.manual_seed(0)
    target = classes() if loss is cross_entropy else features(3)
    return compiled(Habit(Net().double(), (features(),), target, loss), ranks=2)


@pytest.mark.parametrize(
    ("loss", "kinds"), [(squares, {"sum"}), (cross_entropy, {"sum"}), (root, {"sum"}), (spread, {"rows", "sum"})]
)
def test_parts_hand_over_no_more_than_the_loss_needs(loss: Loss, kinds: set[str]) -> None:
    assert {b.kind for b in program(loss).built.front.tail.boundaries} <= kinds


def test_a_mean_is_divided_once_for_the_whole_batch() -> None:
    tail = program(squares).built.front.tail
    assert tail.linear and len(tail.boundaries) == 1
    assert [n.target for n in tail.gm.graph.nodes if n.op == "call_function"][-1] is not torch.ops.aten.mean.default


def test_ignored_targets_are_counted_from_the_inputs() -> None:
    roles = [ROLE[n] for n in program(cross_entropy).built.front.tail.gm.graph.nodes if n.op == "placeholder"]
    assert [r.name for r in roles if r.kind == "input"] == ["target"]


def test_a_loss_over_all_rows_names_the_place_that_joins_them() -> None:
    front = program(spread).built.front
    assert not front.tail.linear
    assert "test_tail.py" in mixing_node(front.tail)


def test_alternating_forwards_and_backwards_is_refused_where_parts_must_meet_first() -> None:
    torch.manual_seed(0)
    with pytest.raises(PlanError, match=r"schedule '1f1b' cannot be had: .*test_tail.py.* use schedule='gpipe'"):
        compiled(Habit(Net().double(), (features(),), features(3), spread), ranks=2, schedule="1f1b", stages=2)
