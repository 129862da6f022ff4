"""What no graph can have is refused with its line or module, and what to do."""

from __future__ import annotations

import pytest
import torch
from against_eager import assert_matches, compiled
from habits import WIDTH, Habit, Net, classes, cross_entropy, features, plain
from torch import Tensor, nn

from efftra_fx.errors import CaptureError

GENERATOR = torch.Generator()


def with_own_noise(model: nn.Module, h: Tensor) -> Tensor:
    return h + torch.randn(h.shape[-1], generator=GENERATOR, dtype=h.dtype)


def with_own_seed(model: nn.Module, h: Tensor) -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return h * torch.rand(WIDTH, dtype=h.dtype)


def test_random_numbers_that_are_not_the_plans_are_refused_with_their_line() -> None:
    seed, before = torch.manual_seed, torch.initial_seed()
    for between, words in ((with_own_noise, "draws from a torch.Generator"), (with_own_seed, "seeds torch's random")):
        with pytest.raises(CaptureError, match=rf"test_capture_refused.py:\d+ {words}.*in a buffer"):
            compiled(plain(between), 1)
    assert torch.manual_seed is seed and torch.initial_seed() == before


def test_torchscript_is_refused_by_its_path() -> None:
    model = Net().double()
    model.b = torch.jit.trace(model.b, torch.ones(2, WIDTH, dtype=torch.float64))
    with pytest.raises(CaptureError, match=r"module 'b' is TorchScript .*; give the module that it was made of"):
        compiled(Habit(model, (features(),), classes(), cross_entropy), 1)


def every_row(model: nn.Module, h: Tensor) -> Tensor:
    """Compute with one row at a time, as seen from inside, and with values of none."""
    shared = torch.linspace(0, 1, WIDTH, dtype=h.dtype)
    of_one = torch.func.vmap(lambda row: torch.outer(row, row).sum(0) * row.norm())
    with_shared = torch.func.vmap(lambda row, by: torch.func.vmap(lambda e: e.sin() * row.sum())(row) + by, (0, None))
    return of_one(h) + with_shared(h, shared)  # type: ignore[no-any-return]


def test_vmap_over_rows_is_captured() -> None:
    torch.manual_seed(3)
    program = assert_matches(plain(every_row))
    assert program.built.front.tail.linear and not program.built.front.captured.opaque


def test_vmap_over_weights_is_captured() -> None:
    class Ensemble(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.w = nn.Linear(4, WIDTH), nn.Parameter(torch.randn(5, WIDTH, 3))

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            out: Tensor = torch.vmap(lambda w: torch.tanh(h @ w))(self.w).mean(0)
            return out

    torch.manual_seed(3)
    assert_matches(Habit(Ensemble().double(), (features(),), classes(), cross_entropy))


class FirstBatch(nn.Module):
    """A layer that takes shift and gain from its first batch, as flows do, where autograd does not see it."""

    started: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.gain = nn.Parameter(torch.zeros(WIDTH)), nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("started", torch.tensor(False))

    def forward(self, h: Tensor) -> Tensor:
        if not self.started.item():
            self.shift.data.copy_(-h.mean(0))
            self.gain.data.copy_(1 / h.std(0))
            self.started.fill_(True)
        return (h + self.shift) * self.gain


@pytest.mark.parametrize("module", ["a module", "the model"])
def test_a_forward_that_writes_parameters_where_autograd_does_not_see_it_is_refused(module: str) -> None:
    first = FirstBatch().double()
    if module == "a module":
        model = Net().double()
        model.b = nn.Sequential(first, model.b)  # type: ignore[assignment]
        habit = Habit(model, (features(),), classes(), cross_entropy)
    else:
        habit = Habit(first, (features(WIDTH),), torch.arange(7) % WIDTH, cross_entropy)
    before = {name: value.clone() for name, value in habit.model.state_dict().items()}
    with pytest.raises(CaptureError, match="forward writes parameter '.*shift' in place, .* write it between steps"):
        compiled(habit, 1)
    assert all(torch.equal(value, before[name]) for name, value in habit.model.state_dict().items())
    habit.model(*habit.args)  # it does so at its first call alone
    assert_matches(habit)
