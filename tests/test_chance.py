"""Operators that draw, with rng="plan": their own numbers, drawn once; and without chance while the batch is proven."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from against_eager import compiled, one_device, step
from habits import Habit, plain
from rig import assert_close, lay_out
from torch import Tensor

from efftra_fx.chance import NoChance
from efftra_fx.runtime.executor import _mix
from efftra_fx.step_module import loss_of

DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "rrelu": lambda h: F.rrelu(h, training=True),
    "randint_like": lambda h: h + torch.randint_like(h, 3),
    "geometric": lambda h: h + torch.empty_like(h).geometric_(0.3),
    "alpha dropout": lambda h: F.alpha_dropout(h, 0.3, True),
    "feature dropout": lambda h: F.dropout1d(h[:, :, None], 0.3, True)[:, :, 0],
    "attention": lambda h: _attend(h.view(-1, 2, 3)).flatten(1),
}


def _attend(h: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(h, h, h, dropout_p=0.3)


def drawn(habit: Habit, seed: int, *salt: int) -> tuple[float, dict[str, Tensor]]:
    """Run one device's step with the numbers that a plan draws from this seed."""
    torch.manual_seed(seed)
    start = int(torch.empty((), dtype=torch.int64).random_().item())
    torch.manual_seed(_mix(start, *salt) if salt else start)
    loss = loss_of(habit.model(*habit.args), habit.loss_fn, habit.target, True)
    names = [n for n, _ in habit.model.named_parameters()]
    found = torch.autograd.grad(loss, list(habit.model.parameters()))
    return float(loss.detach()), dict(zip(names, found, strict=True))


@pytest.mark.parametrize("name", DRAWS)
def test_a_plan_of_one_part_draws_as_one_device_with_the_steps_seed(name: str) -> None:
    torch.manual_seed(3)
    habit = plain(lambda m, h: DRAWS[name](h))
    program = compiled(habit, 1, stages=1, replicas=(1,), micro_batches=1)
    for recompute in (False, True):
        one = program.with_plan(lay_out(program.plan.blocks, (1,), 1, recompute=(recompute,)))
        expected = drawn(habit, 5, 0, 0, 0)
        torch.manual_seed(5)
        loss, gradients = step(one, habit)
        assert float(loss) == pytest.approx(expected[0], rel=1e-12)
        assert_close(expected[1], {n: g for n, g in gradients.items() if g is not None}, 1e-9, "gradient")


@pytest.mark.parametrize("shape", [(1,), (2,), (3,)], ids=str)
def test_all_ranks_that_compute_the_end_of_a_loss_draw_alike(shape: tuple[int, ...]) -> None:
    torch.manual_seed(3)
    habit = plain(lambda m, h: 0.5 * h + h[torch.randperm(h.shape[0])] + h[torch.randint(0, len(h), (len(h),))])
    program = compiled(habit, 3, stages=1, replicas=(1,), micro_batches=1)
    split = program.with_plan(lay_out(program.plan.blocks, shape, 2, "gpipe"))
    expected = drawn(habit, 5)
    torch.manual_seed(5)
    loss, gradients = step(split, habit)
    assert float(loss) == pytest.approx(expected[0], rel=1e-12)
    assert_close(expected[1], {n: g for n, g in gradients.items() if g is not None}, 1e-9, "gradient")


def test_what_a_dropout_of_features_hides_is_seen_while_the_batch_is_proven() -> None:
    torch.manual_seed(3)
    habit = plain(lambda m, h: (c := F.dropout1d(h[:, :, None], 1e-9, True)[:, :, 0]) - c.mean(0))
    program = compiled(habit)
    assert not program.built.front.tail.linear
    planned = program.with_plan(lay_out(program.plan.blocks, (2,), 3, "gpipe"))
    loss, _ = step(planned, habit)
    assert float(loss) == pytest.approx(float(one_device(habit)[0]), rel=1e-9)


def test_without_chance_nothing_is_dropped_and_draws_are_one_half() -> None:
    x = torch.arange(6.0).view(2, 3)
    with torch.no_grad(), NoChance():
        assert torch.equal(F.dropout(x, 0.9) * 0.2, x)  # in eval's form a half is kept, scaled by ten
        assert torch.equal(torch.native_dropout(x, 0.9, True)[0], x)
        assert torch.equal(torch.rand(2), torch.full((2,), 0.5))
        assert torch.equal(torch.empty(2).normal_(), torch.full((2,), 0.5))
        assert torch.equal(torch.randint(5, 9, (2,)), torch.full((2,), 8))
        assert torch.equal(torch.randint_like(x, 4), torch.full((2, 3), 3.0))
        assert torch.equal(torch.empty(2).uniform_(1, 3), torch.full((2,), 0.5))
        assert torch.equal(torch.multinomial(x + 1, 2), torch.full((2, 2), 2))
        assert torch.equal(torch.randperm(3), torch.tensor([2, 1, 0]))
        assert torch.equal(F.rrelu(-x, 0.2, 0.4, True), -0.3 * x)


def test_the_least_and_the_most_that_may_be_drawn() -> None:
    with torch.no_grad(), NoChance(0.0):
        assert torch.equal(torch.rand(2), torch.zeros(2)) and float(torch.randn(())) == -4
        assert torch.equal(torch.randint(5, 9, (2,)), torch.full((2,), 5)) and not torch.bernoulli(torch.tensor(0.5))
    with torch.no_grad(), NoChance(0.75):
        assert torch.equal(torch.rand(2), torch.full((2,), 0.75)) and float(torch.empty(()).normal_()) == 2
        assert torch.equal(torch.randint(5, 9, (2,)), torch.full((2,), 8)) and torch.bernoulli(torch.tensor(0.5))


def test_code_that_draws_until_a_number_fits_ends() -> None:
    with torch.no_grad(), NoChance(0.0):
        while float(torch.rand(())) < 0.5:
            pass
