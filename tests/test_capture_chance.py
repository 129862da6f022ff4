"""What draws from `random` or NumPy runs as it is, on the whole batch, with numbers that follow from torch's seed."""

from __future__ import annotations

import random

import numpy
import pytest
import torch
from against_eager import assert_matches, compiled
from habits import WIDTH, Habit, classes, cross_entropy, features
from rig import assert_close, lay_out
from torch import Tensor, nn

from efftra_fx import CompiledModel
from efftra_fx.capture_chance import draws_in, seeded_from_torch
from efftra_fx.errors import CaptureError


class Masked(nn.Module):
    """Some values of each row, hidden in place as NumPy draws them, and how many a draw for the batch says."""

    def forward(self, h: Tensor) -> Tensor:
        share = numpy.random.uniform(0.2, 0.8)
        hidden = torch.tensor(numpy.random.uniform(size=tuple(h.shape)) < share)
        h[hidden] = 0.1
        return h


class Dropped(nn.Module):
    """Layers of which some are dropped by `random`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, h: Tensor) -> Tensor:
        for layer in self.layers:
            if random.random() < 0.5:
                h = torch.tanh(layer(h))
        return h


class Around(nn.Module):
    """A module between layers; what it has done to its argument counts too."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.a, self.inner, self.c = nn.Linear(4, WIDTH), inner, nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        out: Tensor = self.c(torch.tanh(self.inner(h)) + h.square())
        return out


def made(inner: nn.Module) -> Habit:
    torch.manual_seed(3)
    return Habit(Around(inner).double(), (features(),), classes(), cross_entropy)


def seed_of_step(seed: int) -> int:
    """Return what a step draws where it begins, for all that is computed on the whole batch."""
    torch.manual_seed(seed)
    return int(torch.empty((), dtype=torch.int64).random_().item())


def eagerly(habit: Habit, seed: int) -> tuple[float, dict[str, Tensor]]:
    drawn = seed_of_step(seed)
    with seeded_from_torch(habit.model, ["inner"]):
        torch.manual_seed(drawn)
        loss = cross_entropy(habit.model(*habit.args), habit.target)
    names = [name for name, _ in habit.model.named_parameters()]
    found = torch.autograd.grad(loss, [*habit.model.parameters()], allow_unused=True)
    return float(loss.detach()), {name: g for name, g in zip(names, found, strict=True) if g is not None}


def stepped(program: CompiledModel, habit: Habit, seed: int) -> tuple[float, dict[str, Tensor]]:
    torch.manual_seed(seed)
    loss = float(program.step(*habit.args, target=habit.target))
    found = {name: p.grad for name, p in program.named_parameters() if p.grad is not None}
    for parameter in program.parameters():
        parameter.grad = None
    return loss, found


@pytest.mark.parametrize("inner", [Masked, Dropped])
def test_a_module_that_draws_outside_of_torch_trains_as_on_one_device(
    inner: type[nn.Module], capsys: pytest.CaptureFixture[str]
) -> None:
    habit = made(inner())
    program = compiled(habit, 3)
    said = capsys.readouterr().err
    assert "module 'inner' runs as it is, in one piece: it draws from Python's " in said and "whole batch" in said
    states = random.getstate(), numpy.random.get_state()[1].tolist()  # type: ignore[index]
    losses = set()
    for shape, micro_batches in (((1,), 1), ((2, 1), 2), ((3,), 1)):
        planned = program.with_plan(lay_out(program.plan.blocks, shape[: program.plan.blocks], micro_batches, "gpipe"))
        for seed in range(4):
            expected, found = eagerly(habit, seed), stepped(planned, habit, seed)
            assert found[0] == pytest.approx(expected[0], rel=1e-12)
            assert_close(expected[1], found[1], 1e-9, "gradient")
            losses.add(round(expected[0], 9))
    assert len(losses) > 1
    assert states == (random.getstate(), numpy.random.get_state()[1].tolist())  # type: ignore[index]


def test_no_plan_can_draw_alike_what_is_drawn_outside_of_torch() -> None:
    with pytest.raises(
        CaptureError, match="what 'inner' draws, which runs as it is since it draws from Python's numpy"
    ):
        compiled(made(Masked()), rng="layout_free")


def test_modules_that_draw_are_found_by_their_own_code() -> None:
    class Draws(nn.Sequential):
        def forward(self, h: Tensor) -> Tensor:
            for module in self:
                h = module(h)
            return h * random.random()

    dropped = Dropped()
    dropped.layers = nn.ModuleList([nn.Linear(3, 3)])
    model = nn.Sequential(Around(Dropped()), nn.Linear(3, 4), Around(nn.Identity()), Draws(dropped, nn.ReLU()))
    x = features().float()
    assert draws_in(model, lambda: model(x)) == {"0.inner": "random", "3": "random"}
    assert draws_in(model[2], lambda: model[2](x)) == {}


def test_what_a_loss_draws_outside_of_torch_is_refused() -> None:
    habit = made(nn.Identity())
    for draw in (random.random, numpy.random.uniform):
        with pytest.raises(CaptureError, match="draws from Python's .*random decides the loss"):
            compiled(Habit(habit.model, habit.args, habit.target, lambda o, t, d=draw: cross_entropy(o, t) * d()))


class Slightly(nn.Module):
    """Changes a single value by less than single precision is checked to."""

    def forward(self, h: Tensor) -> Tensor:
        return h * (1 + 1e-6 * numpy.random.uniform())


class InEval(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        return h if self.training else h * (1 + random.random())


def test_what_is_drawn_in_eval_mode_is_drawn_at_each_evaluation() -> None:
    habit = made(InEval())
    program = compiled(habit, 3)
    x = habit.args[0]
    with torch.no_grad():
        least = habit.model.eval()(x)
    scales = set()
    for _ in range(4):
        found = program.evaluate(x)
        assert not torch.allclose(found, least)
        scales.add(round(float(found.sum()), 9))
    assert len(scales) == 4


def test_a_draw_that_changes_little_counts() -> None:
    habit = made(Slightly())
    x, target = habit.args[0].float(), habit.target
    program = compiled(Habit(habit.model.float(), (x,), target, cross_entropy))
    assert program.built.front.captured.seeded == ("inner",)


class Fills(nn.Module):
    """Writes into its argument, and asks for values."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        h.mul_(2.0)
        out: Tensor = self.layer(h) if h.sum() > -1e9 else h
        return out


def test_what_a_module_that_runs_as_it_is_writes_into_its_argument_counts() -> None:
    program = assert_matches(made(Fills()))
    assert [path for path, _ in program.built.front.captured.opaque] == ["inner"]


def test_writing_into_the_models_own_input_is_refused_with_its_line_and_a_way_out() -> None:
    class Inner(Fills):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    model = Inner()
    model.layer = nn.Linear(4, 3)
    habit = Habit(model.double(), (features(),), classes(), cross_entropy)
    with pytest.raises(CaptureError, match=r"input 'x' in place at .*test_capture_chance.py.*gives it x.clone\(\)"):
        compiled(habit)
