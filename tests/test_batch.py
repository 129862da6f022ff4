"""prove-batch says of each value how it follows the batch, and never by coincidence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from against_eager import assert_matches
from habits import plain
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from efftra_fx.example import proof_inputs
from efftra_fx.meta import BATCH, FREE, Split
from efftra_fx.passes.batch import ProveBatch
from efftra_fx.passes.batch_relation import relation
from efftra_fx.signature import read_call
from efftra_fx.trace import capture


class Gives(nn.Module):
    """A model whose output is a function of a row's features and a weight."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 3, dtype=torch.float64))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.function(x, self.weight)
        return out


def proven(function: Callable[..., Any], x: Tensor | None = None) -> tuple[Split, bool]:
    """Return how a function's value follows the batch, and whether it needs no parameter."""
    torch.manual_seed(0)
    x = torch.randn(5, 3, dtype=torch.float64) if x is None else x
    model = Gives(function)
    call, tensors = read_call(model.forward, (x,), {}, None)
    gm = capture(model, call, tensors, (0,), want="output").gm
    ProveBatch({("parameter", "weight"): model.weight}, [x[:3]], (0,))(gm)
    output = next(n for n in reversed(gm.graph.nodes) if n.op == "output").args[0][0]
    return BATCH[output], FREE[output]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x, w: x @ w, Split("rows", 0, 1)),
        (lambda x, w: (x @ w).t(), Split("rows", 1, 1)),
        (lambda x, w: (x @ w).flatten(), Split("rows", 0, 3)),
        (lambda x, w: (x @ w).sum(0), Split("sum")),
        (lambda x, w: (x @ w).sum(), Split("sum")),
        (lambda x, w: w.softmax(-1), Split("whole")),
        (lambda x, w: torch.zeros_like(x).sum() + w.sum(), Split("whole")),
        (lambda x, w: (x @ w).mean(0), Split("mixed")),
        (lambda x, w: (x @ w).softmax(0), Split("mixed")),
        (lambda x, w: (x @ w) @ (x @ w).t(), Split("mixed")),
        (lambda x, w: (x @ w).amax(), Split("mixed")),
        (lambda x, w: (x @ w).flip(0), Split("mixed")),
        (lambda x, w: (x @ w).topk(2, 0).values.sum(0) + x[:, :3], Split("mixed")),  # a part of one row has no two
        (lambda x, w: x.square().sum().abs() + w.sum() * 0, Split("mixed")),  # sums of one sign, this time
        (lambda x, w: (x.square().sum() + w.sum() * 0).square().sqrt(), Split("mixed")),
        (lambda x, w: (lambda s: s * s.sign())(x.square().sum() + w.sum() * 0), Split("mixed")),
        (lambda x, w: torch.where(x.square().sum() > 0, x.square().sum(), w.sum()), Split("mixed")),
        (lambda x, w: (x[:, 0] * (x[:, 0] == x[0, 0]) * w[0, 0]).relu().max(), Split("mixed")),  # one row, this time
    ],
)
def test_a_value_follows_the_batch_as_proven(function: Callable[..., Any], expected: Split) -> None:
    found, free = proven(function)
    assert found == expected or found.kind == expected.kind == "sum" or found.kind == expected.kind == "whole"
    assert not free


def test_rows_that_name_each_other_by_number_need_the_whole_batch() -> None:
    torch.manual_seed(3)
    order = torch.tensor([6, 0, 1, 5, 4, 2, 3])
    habit = plain(lambda m, h, i: h + 0.5 * h[i], order)
    program = assert_matches(habit)
    with torch.no_grad():
        expected = habit.model.eval()(*habit.args)
    torch.testing.assert_close(program.evaluate(*habit.args), expected, rtol=1e-9, atol=1e-12)


def test_equal_rows_do_not_make_a_mean_the_same_for_all_parts() -> None:
    x = torch.ones(5, 3, dtype=torch.float64)
    assert proven(lambda x, w: (x @ w).mean(0), x)[0].kind == "mixed"
    assert proven(lambda x, w: (x @ w).amax(0), x)[0].kind == "mixed"


def test_rows_that_prove_how_values_follow_the_batch_differ() -> None:
    features, classes = torch.randn(7, 2), torch.tensor([0, 1, 2, 0, 1, 2, 0])
    first, found = proof_inputs([features, classes], (0, 0), 7)
    assert len(set(found.tolist())) == 3
    assert [features.tolist().index(row) for row in first.tolist()] == [0, 2, 4]


def test_nearly_equal_losses_in_low_precision_are_told_apart() -> None:
    x = 1 + 1e-5 * torch.arange(15.0).view(5, 3)
    found, _ = proven(lambda x, w: (x @ w.float()).mean(), x)
    assert found.kind == "mixed"


def test_what_needs_inputs_alone_is_free() -> None:
    assert proven(lambda x, w: x.cumsum(1))[1]
    assert not proven(lambda x, w: x + w[0])[1]


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(0, 2))
def test_parts_that_join_to_the_whole_are_rows(first: int, second: int, per_row: int, dim: int) -> None:
    shape = [2, 2, 2]
    shape[dim] = (first + second) * per_row
    whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
    parts = list(whole.split([first * per_row, second * per_row], dim))
    assert relation(whole, parts, first + second, [first, second], True) == Split("rows", dim, per_row)
    assert relation(whole + 1, parts, first + second, [first, second], True) == Split("mixed")
