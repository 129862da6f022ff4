"""A backward that mixes rows is found, and computed once on the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from against_eager import assert_same, compiled, one_device, step
from habits import Habit
from torch import Tensor, nn

from efftra_fx.errors import PlanError
from efftra_fx.meta import BATCH
from efftra_fx.opaque import is_opaque

WRITTEN: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {  # a backward, and whether it mixes rows
    "reversed": (lambda g: -g, False),
    "each row alone": (lambda g: g / g.norm(dim=1, keepdim=True), False),
    "by its norm": (lambda g: g / g.norm(), True),
    "clipped": (lambda g: g * (50 / g.norm()).clamp(max=1.0), True),
    "centred": (lambda g: g - g.mean(0), True),
    "by the number of rows": (lambda g: g / len(g), True),
}


def module_with(backward: Callable[[Tensor], Tensor], asks: bool = False) -> nn.Module:
    """Return a network with a function of this backward, inside a module that runs as it is if it `asks` for values."""

    class Written(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return backward(gradient)

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            if asks and torch.isnan(x).any():
                x = torch.nan_to_num(x)
            out: Tensor = Written.apply(self.line(x))  # type: ignore[no-untyped-call]
            return out

    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), Inner(), nn.Tanh(), nn.Linear(8, 3)).double()


def batch(rows: int = 12) -> tuple[Tensor, Tensor]:
    """Return features and classes."""
    torch.manual_seed(1)
    return torch.randn(rows, 6, dtype=torch.float64), torch.randint(0, 3, (rows,))


@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("name", WRITTEN)
def test_a_written_backward_gives_what_one_device_gives(name: str, asks: bool) -> None:
    backward, mixes = WRITTEN[name]
    x, y = batch()
    habit = Habit(module_with(backward, asks), (x,), y, F.cross_entropy)
    program = compiled(habit, stages=1, replicas=(2,), micro_batches=2)
    assert_same(step(program, habit), one_device(habit), 1e-9)
    (node,) = [n for n in program.built.front.captured.gm.graph.nodes if is_opaque(n.target)]
    assert any(is_opaque(n.target) for n in program.built.front.tail.gm.graph.nodes) is mixes, node
    assert not any(is_opaque(n.target) and BATCH[n].kind == "mixed" for n in program.built.front.gm.graph.nodes)


def test_what_goes_row_by_row_is_cut_and_what_does_not_is_not() -> None:
    x, y = batch()
    rows = Habit(module_with(WRITTEN["reversed"][0]), (x,), y, F.cross_entropy)
    assert len(compiled(rows, stages=2, replicas=(2, 1), micro_batches=3).plan.stages) == 2
    mixed = Habit(module_with(WRITTEN["centred"][0]), (x,), y, F.cross_entropy)
    with pytest.raises(PlanError, match="schedule '1f1b' cannot be had: .* needs the whole batch's values"):
        compiled(mixed, stages=1, replicas=(1,), schedule="1f1b")


class Looking(nn.Module):
    """Words looked up, and their mean."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(20, 8, **options), nn.Linear(8, 3)

    def forward(self, words: Tensor) -> Tensor:
        out: Tensor = self.out(self.table(words).mean(1))
        return out


class Bags(Looking):
    """Words looked up and summed at once."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(20, 8, mode="sum", **options)  # type: ignore[assignment]

    def forward(self, words: Tensor) -> Tensor:
        out: Tensor = self.out(self.table(words))
        return out


@pytest.mark.parametrize("kind", [Looking, Bags])
@pytest.mark.parametrize("frozen", [False, True])
def test_gradients_by_how_often_a_word_occurs_are_the_whole_batchs(kind: type[Looking], frozen: bool) -> None:
    torch.manual_seed(0)
    model = kind(scale_grad_by_freq=True).double()
    model.table.weight.requires_grad_(not frozen)
    words, y = torch.randint(0, 20, (12, 5)), batch()[1]
    habit = Habit(model, (words,), y, F.cross_entropy)
    assert_same(step(compiled(habit, stages=1, replicas=(2,), micro_batches=3), habit), one_device(habit), 1e-9)


@pytest.mark.parametrize("kind", [Looking, Bags])
def test_sparse_gradients_are_dense_and_that_is_said(kind: type[Looking], capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    model = kind(sparse=True).double()
    words, y = torch.randint(0, 20, (12, 5)), batch()[1]
    habit = Habit(model, (words,), y, F.cross_entropy)
    program = compiled(habit, stages=1, replicas=(3,), micro_batches=2)
    assert "is dense, where the model asks for a sparse one" in capsys.readouterr().err
    loss = program.step(words, target=y)
    wanted = F.cross_entropy(model(words), y)
    gradients = torch.autograd.grad(wanted, list(model.parameters()))
    assert gradients[0].is_sparse and abs(loss - wanted) < 1e-12
    for own, one in zip(program.parameters(), gradients, strict=True):
        assert own.grad is not None
        torch.testing.assert_close(own.grad, one.to_dense() if one.is_sparse else one, rtol=1e-9, atol=1e-12)
    assert program.check(words, target=y, show=False).matches
