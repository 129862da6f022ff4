"""Losses of several terms, on batches of any size: fewer rows than micro-batches, one row, nothing valid."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from against_eager import assert_same, compiled, one_device, step
from habits import Habit
from torch import Tensor, nn

from efftra_fx import Cluster, compile
from efftra_fx.errors import BatchError, InputError

ROWS = 8
WEIGHTS = torch.tensor([1.0, 2.0, 0.5, 1.0], dtype=torch.float64)


class Segmenter(nn.Module):
    """Classes for every pixel, by a main head and by an auxiliary one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1)
        self.head, self.auxiliary = nn.Conv2d(6, 4, 1), nn.Conv2d(6, 4, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        early = F.relu(self.first(x))
        return {"out": self.head(F.relu(self.second(early))), "aux": self.auxiliary(early)}


def segmentation(output: Mapping[str, Tensor], target: Tensor) -> Tensor:
    """Return weighted, smoothed cross entropy that leaves a class out, and a share of the auxiliary one."""
    main = F.cross_entropy(output["out"], target, weight=WEIGHTS, ignore_index=255, label_smoothing=0.1)
    return main + 0.4 * F.cross_entropy(output["aux"], target, ignore_index=255)


class Experts(nn.Module):
    """A mixture of experts that returns its balancing term, a product of two means over the batch, and another."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.gate, self.last = nn.Linear(4, 8), nn.Linear(8, 3), nn.Linear(8, 3)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = torch.tanh(self.first(x))
        scores = self.gate(hidden)
        shares = scores.softmax(-1)
        chosen = F.one_hot(shares.argmax(-1), 3).to(shares.dtype)
        mixed = torch.stack([shares[:, i : i + 1] * expert(hidden) for i, expert in enumerate(self.experts)]).sum(0)
        return self.last(mixed), 3 * (chosen.mean(0) * shares.mean(0)).sum(), scores.logsumexp(-1).square().mean()


class Language(nn.Module):
    """A language model that computes its own loss, shifted by one, with its table as its head."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(11, 8), nn.Linear(8, 8)

    def forward(self, tokens: Tensor, labels: Tensor) -> dict[str, Tensor]:
        scores = F.linear(torch.tanh(self.layer(self.table(tokens))), self.table.weight)
        loss = F.cross_entropy(scores[:, :-1].reshape(-1, 11), labels[:, 1:].reshape(-1), ignore_index=-100)
        return {"loss": loss, "scores": scores}


class Supervised(nn.Module):
    """A net that gives the values behind each of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> list[Tensor]:
        found = []
        for layer in self.layers:
            x = torch.tanh(layer(x))
            found.append(x)
        return found


@dataclass(frozen=True)
class Kind:
    """A model, its batch and its loss."""

    model: Callable[[], nn.Module]
    args: tuple[Tensor, ...]
    target: Any = None
    loss: Callable[..., Tensor] | None = None
    kwargs: Mapping[str, Tensor] = field(default_factory=dict)


def pixels() -> Tensor:
    target = torch.randint(0, 4, (ROWS, 5, 5))
    target[target == 3] = 255
    target[5:] = 255  # the last rows have nothing valid
    return target


def labels(valid: bool) -> Tensor:
    found = torch.randint(0, 11, (ROWS, 6))
    found[:, 3:] = -100
    found[2 if valid else 0 :] = -100
    return found


torch.manual_seed(0)
FEATURES, VALUES = torch.randn(ROWS, 4, dtype=torch.float64), torch.randn(ROWS, 4, dtype=torch.float64)
TOKENS, CLASSES = torch.randint(0, 11, (ROWS, 6)), torch.arange(ROWS) % 3
ROW_WEIGHTS = torch.tensor([0, 0, 0, 1, 1, 0, 2, 1], dtype=torch.float64)
KINDS: Mapping[str, Kind] = {
    "segmentation": Kind(Segmenter, (torch.randn(ROWS, 3, 5, 5, dtype=torch.float64),), pixels(), segmentation),
    "experts": Kind(Experts, (FEATURES,), CLASSES, lambda o, t: F.cross_entropy(o[0], t) + 0.1 * o[1] + 0.01 * o[2]),
    "language": Kind(Language, (TOKENS,), kwargs={"labels": labels(True)}),
    "nothing valid at all": Kind(Language, (TOKENS,), kwargs={"labels": labels(False)}),
    "deep supervision": Kind(
        Supervised, (FEATURES,), VALUES, lambda o, t: F.mse_loss(o[2], t) + 0.5 * F.l1_loss(o[0], t) + o[1].abs().sum()
    ),
    "rows with weights": Kind(
        Supervised,
        (FEATURES,),
        (VALUES, ROW_WEIGHTS),
        lambda o, t: ((o[2] - t[0]).square().mean(1) * t[1]).sum() / t[1].sum().clamp(min=1),
    ),
    "terms weighed by each other": Kind(
        Supervised,
        (FEATURES,),
        VALUES,
        lambda o, t: (m := F.mse_loss(o[2], t)) + (k := F.l1_loss(o[0], t)) * (m.detach() / k.detach()),
    ),
}  # fmt: skip


def first(value: Any, rows: int) -> Any:
    """Return the first rows of a tensor, or of each in a tuple."""
    return tuple(v[:rows] for v in value) if isinstance(value, tuple) else None if value is None else value[:rows]


@pytest.mark.parametrize("name", KINDS)
def test_batches_of_any_size_train_as_on_one_device(name: str) -> None:
    torch.manual_seed(1)
    kind = KINDS[name]
    program = compile(
        kind.model().double(),
        Cluster.local(3),
        example_inputs=kind.args,
        example_kwargs=kind.kwargs,
        example_target=kind.target,
        loss_fn=kind.loss,
        replicas=(2, 1),
        micro_batches=4,
        costs="estimated",
    )
    for rows in (ROWS, 7, 3, 1):
        given = {key: value[:rows] for key, value in kind.kwargs.items()}
        args, target = first(kind.args, rows), first(kind.target, rows)
        report = program.check(*args, target=target, repeats=1, show=False, **given)
        assert report.matches, f"{rows} rows: {report}"
        assert name == "nothing valid at all" or report.loss == report.loss


def test_a_norm_of_pooled_images_says_that_one_row_is_too_few() -> None:
    layers = (nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 3))
    x, target = torch.randn(ROWS, 3, 5, 5), torch.arange(ROWS) % 3
    options: dict[str, Any] = {"example_target": target, "loss_fn": F.cross_entropy, "costs": "estimated"}
    program = compile(
        nn.Sequential(*layers), Cluster.local(2), example_inputs=(x,), replicas=(2,), micro_batches=2, **options
    )
    program.step(x, target=target)
    with pytest.raises(BatchError, match="'2' normalises over the rows of a part, but rank . gets only row"):
        program.step(x[:3], target=target[:3])


class Pieces(nn.Module):
    """Pieces of the batch, weighed apart: of few rows there are fewer."""

    def __init__(self, count: int, exactly: bool = False) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)
        self.count, self.exactly = count, exactly

    def forward(self, x: Tensor) -> Tensor:
        pieces = self.a(x).tanh().chunk(self.count, 0)
        if self.exactly:
            first, second = pieces
            pieces = (first, second)
        out: Tensor = self.b(torch.cat([piece * (index + 1) for index, piece in enumerate(pieces)]))
        return out


def test_a_batch_that_the_model_does_not_take_is_named_and_the_next_one_trains() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(8, 6, dtype=torch.float64), torch.randint(0, 3, (8,))
    habit = Habit(Pieces(2, exactly=True).double(), (x,), y, F.cross_entropy)
    program = compiled(habit, stages=1, replicas=(2,), micro_batches=1)
    with pytest.raises(InputError, match=r"needs the whole batch does not take 1 row\(s\), as it was captured: list"):
        program.step(x[:1], target=y[:1])
    for parameter in program.parameters():
        parameter.grad = None
    assert_same(step(program, habit), one_device(habit), 1e-9)
    with pytest.raises(InputError, match=r"does not take 1 row\(s\)"):
        program.evaluate(x[:1])


@pytest.mark.parametrize("count", [2, 4])
def test_few_rows_for_which_the_model_computes_other_operators_are_a_form_of_their_own(count: int) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(8, 6, dtype=torch.float64), torch.randint(0, 3, (8,))
    habit = Habit(Pieces(count).double(), (x,), y, F.cross_entropy)
    program = compiled(habit, stages=1, replicas=(2,), micro_batches=1)
    few = Habit(habit.model, (x[: count // 2],), y[: count // 2], F.cross_entropy)
    for one in (few, habit, few):
        assert_same(step(program, one), one_device(one), 1e-9)
        torch.testing.assert_close(program.evaluate(*one.args), habit.model(*one.args).detach(), rtol=0, atol=1e-12)
