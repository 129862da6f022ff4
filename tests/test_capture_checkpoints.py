"""A checkpoint inside the model computes what the model computes, gradients that torch leaves out included."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from against_eager import assert_matches
from habits import Habit, Net, classes, cross_entropy, features
from torch import Tensor
from torch.utils.checkpoint import CheckpointFunction, checkpoint


class Reentrant(Net):
    """Recomputes a layer, or the first of all, to which no gradients come."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.first = first

    def forward(self, x: Tensor, *more: object) -> Tensor:
        h: Tensor = checkpoint(self.start, x, use_reentrant=True) if self.first else self.start(x)
        h = torch.tanh(self.b(h)) if self.first else checkpoint(self.middle, h, use_reentrant=True)
        out: Tensor = self.c(h)
        return out

    def start(self, x: Tensor) -> Tensor:
        """Compute the first layer."""
        return torch.tanh(self.a(x))

    def middle(self, h: Tensor) -> Tensor:
        """Compute the second layer."""
        return torch.tanh(self.b(h))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("first", [False, True])
def test_a_reentrant_checkpoint_trains_as_on_one_device(first: bool) -> None:
    torch.manual_seed(3)
    assert_matches(Habit(Reentrant(first).double(), (features(),), classes(), cross_entropy))
    assert "apply" not in vars(CheckpointFunction)


class Asking(Reentrant):
    """The same, in a model that asks a value, so that it runs as it is."""

    def forward(self, x: Tensor, *more: object) -> Tensor:
        out = super().forward(x)
        return -out if bool(out.sum() > 0) else out


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("first", [False, True])
def test_a_reentrant_checkpoint_in_code_that_runs_as_it_is_trains_as_on_one_device(first: bool) -> None:
    torch.manual_seed(3)
    assert_matches(Habit(Asking(first).double(), (features(),), classes(), cross_entropy), (((1,), 3), ((2,), 2)))
    assert "apply" not in vars(CheckpointFunction)


class Nested(Net):
    """A checkpoint inside another, each of a tuple, with a keyword, and with or without its contexts."""

    entered = 0

    def forward(self, x: Tensor, *more: object) -> Tensor:
        h: Tensor = self.a(x)
        (h,) = checkpoint(self.outer, h, use_reentrant=False, context_fn=self.contexts)
        out: Tensor = self.c(h)
        return out

    def outer(self, h: Tensor) -> tuple[Tensor]:
        """Compute two layers."""
        h = torch.tanh(h)
        inner: Tensor = checkpoint(self.inner, h, scale=2.0, use_reentrant=False)
        return (inner + h[:, :1].sin(),)

    def inner(self, h: Tensor, scale: float) -> Tensor:
        """Compute the second."""
        return F.layer_norm(torch.tanh(self.b(h)) * scale, (6,))

    def contexts(self) -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
        """Return those of forward and of what is computed again."""
        return self.counted(), contextlib.nullcontext()

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Count."""
        Nested.entered += 1
        yield


def test_a_checkpoint_inside_another_trains_as_on_one_device() -> None:
    torch.manual_seed(3)
    plain = torch.utils.checkpoint._checkpoint_without_reentrant_generator
    Nested.entered = 0
    assert_matches(Habit(Nested().double(), (features(),), classes(), cross_entropy))
    assert Nested.entered > 0
    assert torch.utils.checkpoint._checkpoint_without_reentrant_generator is plain
