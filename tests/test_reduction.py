"""What the user says of a loss is proven before it is believed, and then parts make the whole by it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from against_eager import assert_matches, compiled
from habits import Habit, Net, classes, features
from test_capture_loss import MASK, loop
from torch import Tensor

from efftra_fx.errors import LossError

Reduction = Any
LATE = torch.tensor([True, True, True, False, False, False, False])  # nothing counts in the last micro-batches


def counted(args: tuple[Any, ...], kwargs: Mapping[str, Any], target: Any) -> Tensor:
    """Return how many rows of a part count."""
    return target[1].sum()  # type: ignore[no-any-return]


def chosen(output: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean over chosen rows."""
    return F.cross_entropy(output[target[1]], target[0][target[1]])


def per_row(output: Tensor, target: Tensor) -> Tensor:
    """Return a loss for each row."""
    return F.cross_entropy(output, target, reduction="none")


def habit(loss: Callable[..., Tensor], target: Any, reduction: Reduction) -> Habit:
    """Return a net with this loss, and what is said of it."""
    return Habit(Net().double(), (features(),), target, loss, options={"loss_reduction": reduction})


RIGHT: Mapping[str, tuple[Callable[..., Tensor], Any, Reduction]] = {
    "a loop's mean": (loop, classes(), "mean"),
    "a loop's sum": (lambda o, t: loop(o, t) * len(o), classes(), "sum"),
    "chosen rows": (chosen, (classes(), MASK), counted),
    "rows of which some parts have none": (chosen, (classes(), LATE), counted),
    "a quotient by logarithms, of which some parts have none": (
        lambda o, t: ((per_row(o, t[0]) * t[1]).sum().log() - t[1].double().sum().log()).exp(),
        (classes(), LATE),
        counted,
    ),
    "what the graph shows anyway": (F.mse_loss, features(3), "mean"),
    "an eager quotient": (lambda o, t: (o - t).norm(dim=1).sum().square().sqrt() / len(o), features(3), "mean"),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_true_claim_lets_parts_go_back_at_once(name: str) -> None:
    torch.manual_seed(3)
    assert assert_matches(habit(*RIGHT[name])).plan.schedule in ("1f1b", "gpipe")
    assert compiled(habit(*RIGHT[name])).built.front.tail.linear


def contrastive(output: Tensor, target: Tensor) -> Tensor:
    """Return a loss in which each row is compared with all."""
    return F.cross_entropy(output @ target.T, torch.arange(len(output)))


WRONG: Mapping[str, tuple[Callable[..., Tensor], Any, Reduction, str]] = {
    "a mean called a sum": (F.mse_loss, features(3), "sum", "'sum' is wrong for this loss: the parts' losses do not"),
    "a loop's mean called a sum": (loop, classes(), "sum", "'sum' is wrong"),
    "a contrastive loss": (contrastive, features(3), "mean", "'mean' is wrong"),
    "a root": (lambda o, t: F.mse_loss(o, t).sqrt(), features(3), "mean", "'mean' is wrong"),
    "the worst row": (lambda o, t: (o - t).pow(2).sum(1).max(), features(3), "mean", "'mean' is wrong"),
    "a mean over rows that count": (chosen, (classes(), MASK), "mean", "'mean' is wrong"),
    "weights that do not add up": (
        chosen,
        (classes(), MASK),
        lambda args, kwargs, target: target[1].double().mean(),
        "parts' weights do not add up",
    ),
    "a hinge that the example does not reach": (
        lambda o, t: F.relu(o @ t.T - 1e3).mean(),
        features(3),
        "mean",
        "cannot be checked: the loss of the example is 0",
    ),
    "a loss that needs more rows": (
        lambda o, t: F.cross_entropy(o, t, reduction="none").topk(3).values.mean(),
        classes(),
        "mean",
        "cannot be computed for a few rows of the example",
    ),
    "a weight for each row": (F.mse_loss, features(3), lambda args, kwargs, target: target, r"expected a number"),
    "a word": (F.mse_loss, features(3), "median", "loss_reduction must be 'mean', 'sum' or a function"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_claim_is_refused_with_what_was_found(name: str) -> None:
    torch.manual_seed(3)
    *case, words = WRONG[name]
    with pytest.raises(LossError, match=words) as caught:
        compiled(habit(*case))
    assert "While executing" not in str(caught.value)


def test_a_claim_holds_for_a_loss_of_the_models_own() -> None:
    class Own(Net):
        def forward(self, x: Tensor, *more: Any, labels: Tensor | None = None) -> Any:
            assert labels is not None
            out = super().forward(x)
            valid = (labels > 0).to(out.dtype)
            each = F.cross_entropy(out, labels, reduction="none") * valid
            return {"loss": (each.sum().square() / valid.sum().square()).sqrt()}

    labels = torch.tensor([1, 2, 2, 1, 1, 0, 2])  # some count in every part
    found = Habit(
        Own().double(),
        (features(),),
        kwargs={"labels": labels},
        options={"loss_reduction": lambda args, kwargs, target: (kwargs["labels"] > 0).sum()},
    )
    assert assert_matches(found).built.front.tail.linear
