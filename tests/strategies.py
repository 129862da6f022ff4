"""Random whole models, as a user might write them, and random plans for them.

A model is a random DAG of small operations: skips, shared and frozen and unused parameters,
detached values, integer values, values with the rows along another dimension or several
elements a row, values that depend on parameters alone, sums over the batch, several losses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from models import Batch, Example
from torch import Tensor, nn

from efftra_fx.plan import Plan, Stage

WIDTH = 4
CLASSES = 3

Operation: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]  # two values [rows, 4] and a weight [4, 4]


def _lookup(a: Tensor, b: Tensor, weight: Tensor) -> Tensor:
    return F.embedding(a.argmax(-1), weight) + b  # integers may cross a cut


def _masked(a: Tensor, b: Tensor, weight: Tensor) -> Tensor:
    return torch.where(a > 0, b @ weight, a)  # booleans may cross


def _across(a: Tensor, b: Tensor, weight: Tensor) -> Tensor:
    return (weight @ a.T).tanh().T + b  # the rows lie along dimension 1


def _halves(a: Tensor, b: Tensor, weight: Tensor) -> Tensor:
    return (a.reshape(-1, WIDTH // 2) @ weight[: WIDTH // 2, : WIDTH // 2]).reshape(-1, WIDTH) * b.tanh()  # two a row


def _without(a: Tensor, b: Tensor, weight: Tensor) -> Tensor:
    with torch.no_grad():
        gate = (a @ weight).sigmoid()
    return b * gate


def _attend(a: Tensor, b: Tensor, weight: Tensor) -> Tensor:
    query = (a @ weight).unsqueeze(-1)
    return (torch.softmax(query * b.unsqueeze(1), -1) * a.unsqueeze(1)).sum(-1)


def _normed(a: Tensor, b: Tensor, weight: Tensor) -> Tensor:
    return F.layer_norm(a @ weight, (WIDTH,)) + b


def _by_weights_alone(a: Tensor, b: Tensor, weight: Tensor) -> Tensor:
    return a * (weight @ weight).tanh().sum(0) + b  # a value that is the same for all rows


OPERATIONS: Mapping[str, Operation] = {
    "linear": lambda a, b, w: a @ w,
    "tanh": lambda a, b, w: torch.tanh(a @ w),
    "add": lambda a, b, w: a + b,
    "multiply": lambda a, b, w: a * torch.tanh(b),
    "relu": lambda a, b, w: F.relu(a - b),
    "detached": lambda a, b, w: a.detach() @ w + b,
    "normed": _normed,
    "lookup": _lookup,
    "masked": _masked,
    "across": _across,
    "halves": _halves,
    "without": _without,
    "attend": _attend,
    "by weights": _by_weights_alone,
}

Loss: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]  # a value [rows, 4], a weight [4, 4], labels [rows]

LOSSES: Mapping[str, Loss] = {
    "mean": lambda a, w, y: (a - 0.3).pow(2).mean(),
    "classes": lambda a, w, y: F.cross_entropy(a @ w, y),
    "some": lambda a, w, y: F.cross_entropy(a, torch.where(y > 0, y, -100)),
    "total": lambda a, w, y: (a.sum(0) @ w).sum() / a.shape[0],
    "weights": lambda a, w, y: 0.1 * w.pow(2).sum(),
    "sum": lambda a, w, y: a.sigmoid().sum(),
}
JOINED: Mapping[str, Loss] = {
    "root": lambda a, w, y: F.mse_loss(a, torch.ones_like(a)).sqrt(),
    "square of mean": lambda a, w, y: a.mean(0).pow(2).sum(),
    "ratio": lambda a, w, y: (a @ w).tanh().exp().sum() / (1.0 + a.pow(2).sum()),
}


@dataclass(frozen=True)
class Line:
    """One line of a model: what is computed, of which earlier values, with which weight."""

    operation: str
    first: int
    second: int
    weight: int


@dataclass(frozen=True)
class Head:
    """One loss, of which value and with which weight."""

    loss: str
    value: int
    weight: int


@dataclass(frozen=True)
class Recipe:
    """A whole model as data."""

    lines: tuple[Line, ...]
    heads: tuple[Head, ...]
    frozen: tuple[bool, ...]  # a flag for each weight


class Drawn(nn.Module):
    """The model of a recipe; returns its losses' sum."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe
        self.weights = nn.ParameterList(
            nn.Parameter(0.8 * torch.randn(WIDTH, WIDTH), requires_grad=not frozen) for frozen in recipe.frozen
        )

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        values = [x @ self.weights[0]]
        for line in self.recipe.lines:
            a, b = values[line.first], values[line.second]
            values.append(OPERATIONS[line.operation](a, b, self.weights[line.weight]))
        losses = {**LOSSES, **JOINED}
        heads = [losses[h.loss](values[h.value], self.weights[h.weight], labels) for h in self.recipe.heads]
        return torch.stack(heads).sum()


@st.composite
def recipes(draw: st.DrawFn, longest: int = 6) -> Recipe:
    """Draw a model of a few lines, with one loss of the last value and perhaps others of earlier ones."""
    weights = draw(st.integers(2, 5))
    pick = st.integers(0, weights - 1)
    lines: list[Line] = []
    for index in range(draw(st.integers(2, longest))):
        recent = st.integers(max(0, index - 2), index)
        name = draw(st.sampled_from(sorted(OPERATIONS)))
        lines.append(Line(name, draw(recent), draw(st.integers(0, index)), draw(pick)))
    plain = st.sampled_from(sorted(LOSSES))
    any_loss = st.one_of(plain, plain, plain, st.sampled_from(sorted(JOINED)))
    heads = [Head(draw(st.sampled_from(["mean", "classes", *sorted(JOINED)])), len(lines), draw(pick))]
    for _ in range(draw(st.integers(0, 3))):
        heads.append(Head(draw(any_loss), draw(st.integers(0, len(lines))), draw(pick)))
    frozen = (False, *(draw(st.sampled_from((False, False, False, True))) for _ in range(weights - 1)))
    return Recipe(tuple(lines), tuple(heads), frozen)


def example_of_recipe(recipe: Recipe) -> Example:
    """Return the model of a recipe with its batches."""

    def batch(rows: int) -> Batch:
        labels = torch.randint(0, CLASSES, (rows,))
        labels[0] = 1
        return Batch((torch.randn(rows, WIDTH, dtype=torch.float64), labels))

    return Example("drawn", lambda: Drawn(recipe), batch)


@st.composite
def plans(draw: st.DrawFn, blocks: int, ranks: int, joined: bool = False, widest: int = 1) -> Plan:
    """Draw any plan for a chain of so many blocks: any cuts, replicas, ranks in any order, some of them idle.

    Where `widest` is above 1, stages are in tensor groups of up to so many ranks where their ranks allow.
    """
    count = draw(st.integers(1, min(blocks, ranks, 5)))
    inner = draw(st.sets(st.integers(1, blocks - 1), min_size=count - 1, max_size=count - 1)) if count > 1 else set()
    edges = [0, *sorted(inner), blocks]
    order = draw(st.permutations(range(ranks)))
    left, stages = list(order), []
    for index in range(count):
        most = min(4, len(left) - (count - 1 - index))
        number = draw(st.integers(1, most))
        devices, left = tuple(left[:number]), left[number:]
        again = draw(st.sampled_from((False, False, True)))
        widths = [width for width in range(1, widest + 1) if number % width == 0]
        width = draw(st.sampled_from(widths[1:] or widths)) if widest > 1 else 1
        stages.append(Stage(edges[index], edges[index + 1], devices, width, again))
    schedule = "gpipe" if joined else draw(st.sampled_from(("1f1b", "gpipe")))
    return Plan(tuple(stages), draw(st.integers(1, 7)), schedule, draw(st.integers(1, 2)))
