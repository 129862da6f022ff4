"""A loss that cannot be in the graph runs as it is on the whole batch, and what only raises is no branch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from against_eager import assert_matches, compiled
from habits import ROWS, Habit, Net, classes, features
from ranks import run_ranks
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from efftra_fx import Cluster, compile
from efftra_fx.errors import CaptureError, EfftraError, PlanError

torch.manual_seed(0)  # the same targets on every rank
MASK = torch.tensor([True, False, True, True, False, False, True])
Loss = Callable[..., Tensor]


def habit(loss: Any, target: Any, model: nn.Module | None = None) -> Habit:
    """Return a net with this loss."""
    return Habit(model or Net().double(), (features(),), target, loss)


def matched(output: Tensor, target: Tensor) -> Tensor:
    """Return the squares after the cheapest matching of rows with targets, found outside of torch."""
    cost = torch.cdist(output, target).detach().numpy()
    rows, columns = linear_sum_assignment(cost)
    return (output[torch.as_tensor(rows)] - target[torch.as_tensor(columns)]).pow(2).mean()


def hardest(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean of the losses that are above their mean."""
    each = F.cross_entropy(output, target, reduction="none")
    return each[each > each.mean()].mean()


def loop(output: Tensor, target: Tensor) -> Tensor:
    """Return a sum that Python makes row by row, deciding by the row."""
    total = output.new_zeros(())
    for row, label in zip(output, target, strict=True):
        total = total + (row[int(label)] if float(row.detach().sum()) > 0 else row.pow(2).sum())
    return total / len(output)


CHOOSING: Mapping[str, tuple[Any, Loss]] = {
    "a mean over a mask": ((features(3), MASK), lambda o, t: (o - t[0])[t[1]].pow(2).mean()),
    "a sum over a mask by its count": ((features(3), MASK), lambda o, t: (o - t[0]).pow(2)[t[1]].sum() / t[1].sum()),
    "a masked selection": ((features(3), MASK), lambda o, t: (o - t[0]).pow(2).masked_select(t[1][:, None]).mean()),
    "classes of chosen rows": ((classes(), MASK), lambda o, t: F.cross_entropy(o[t[1]], t[0][t[1]])),
    "rows by number": ((classes(), MASK), lambda o, t: F.cross_entropy(*(v[t[1].nonzero()[:, 0]] for v in (o, t[0])))),
    "the hardest": (classes(), hardest),
    "the worst three": (classes(), lambda o, t: F.cross_entropy(o, t, reduction="none").topk(3).values.mean()),
    "a matching": (features(3), matched),
    "a loop with a branch": (classes(), loop),
}


@pytest.mark.parametrize("name", CHOOSING)
def test_a_loss_that_decides_by_values_trains_as_on_one_device(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(3)
    target, loss = CHOOSING[name]
    assert_matches(habit(loss, target))
    assert "the loss runs as it is, once a step on the whole batch's output: " in capsys.readouterr().err


def test_rows_that_are_not_chosen_have_no_part_in_it_whatever_they_hold() -> None:
    class Breaks(Net):
        def forward(self, x: Tensor, *more: Any) -> Tensor:
            return super().forward(x) / (x[:, :1] != 0)

    x = features()
    x[~MASK] = 0.0  # their outputs are not finite
    target = (features(3), MASK)
    found = Habit(Breaks().double(), (x,), target, lambda o, t: (o[t[1]] - t[0][t[1]]).pow(2).mean())
    program = compiled(found, replicas=(2, 1), micro_batches=3)
    assert torch.isfinite(program.step(x, target=target))
    twin = Net().double()
    twin.load_state_dict(found.model.state_dict())
    (twin(x[MASK]) - target[0][MASK]).pow(2).mean().backward()
    for name, parameter in program.named_parameters():
        other = twin.get_parameter(name).grad
        assert parameter.grad is not None and other is not None
        finite = torch.isfinite(parameter.grad)
        assert torch.allclose(parameter.grad[finite], other[finite], rtol=1e-9)


class Tempered(nn.Module):
    """A loss with a parameter of its own, that decides by values."""

    def __init__(self, **also: bool) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))
        self.also = also

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        if self.also.get("writes"):
            self.seen += output.detach().mean()
        if self.also.get("draws"):
            output = output * torch.rand_like(output)
        return hardest(output * self.temperature, target)


def test_a_loss_with_parameters_of_its_own_trains_them() -> None:
    found = habit(Tempered(), classes())
    program = compiled(found, replicas=(2, 1), micro_batches=3)
    loss = program.step(*found.args, target=found.target)
    criterion = Tempered()
    expected = criterion(found.model(*found.args), found.target)
    expected.backward()
    own = dict(program.named_parameters())["loss_fn.temperature"].grad
    assert torch.allclose(loss, expected.detach(), rtol=1e-12) and own is not None
    assert criterion.temperature.grad is not None and torch.allclose(own, criterion.temperature.grad, rtol=1e-9)


@pytest.mark.parametrize(("also", "words"), [("writes", "writes its buffers"), ("draws", "draws random numbers")])
def test_a_loss_that_does_more_than_compute_cannot_run_twice_and_is_refused(also: str, words: str) -> None:
    with pytest.raises(CaptureError, match=f"nor can the loss run as it is: the loss function {words}"):
        compiled(habit(Tempered(**{also: True}), classes()))


def test_a_loss_that_reads_parameters_behind_the_compilers_back_is_refused() -> None:
    model = Net().double()
    with pytest.raises(CaptureError, match="nor can the loss run as it is: the gradient of 'a.weight'"):
        compiled(habit(lambda o, t: hardest(o, t) + model.a.weight.pow(2).mean(), classes(), model))


def test_such_a_loss_needs_all_forwards_first() -> None:
    with pytest.raises(PlanError, match="schedule '1f1b' cannot be had"):
        compiled(habit(hardest, classes()), schedule="1f1b")


def test_what_only_raises_is_no_branch() -> None:
    class Careful(Net):
        def forward(self, x: Tensor, *more: Any) -> Tensor:
            out = super().forward(x)
            assert torch.isfinite(out).all(), "not finite"
            if out.abs().max() > 1e6:
                raise ValueError("too large")
            return out

    found = habit(lambda o, t: F.gaussian_nll_loss(o[:, :1], t, F.softplus(o[:, 1:2])), features(1), Careful().double())
    assert compiled(found).built.front.tail.linear
    assert_matches(found)


def test_a_wrong_answer_of_a_check_on_inputs_still_raises() -> None:
    def checked(output: Tensor, target: Tensor) -> Tensor:
        if (target < 0).any():
            raise ValueError("negative")
        return F.mse_loss(output, target)

    found = habit(checked, features(3).abs())
    program = compiled(found)
    with pytest.raises((EfftraError, ValueError), match="negative"):
        program.step(*found.args, target=-found.target)


def train_here(name: str) -> tuple[float, dict[str, Tensor]]:
    """On a rank of its own: one step of a loss that decides by values."""
    torch.set_num_threads(1)
    torch.manual_seed(3)
    target, loss = CHOOSING[name]
    model = Net().double()
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, 4, generator=generator, dtype=torch.float64)
    options: dict[str, Any] = {"example_target": target, "loss_fn": loss, "costs": "estimated", "timeout": 60.0}
    program = compile(model, Cluster.from_env(), example_inputs=(x,), replicas=(1, 2), micro_batches=2, **options)
    value = program.step(x, target=target)
    return float(value), {n: p.grad.clone() for n, p in program.named_parameters() if p.grad is not None}


def test_ranks_of_their_own_compute_such_a_loss_once_for_all() -> None:
    found = run_ranks(train_here, 3, "classes of chosen rows", limit_s=120.0)
    torch.manual_seed(3)
    model = Net().double()
    x = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    target, loss = CHOOSING["classes of chosen rows"]
    expected = loss(model(x), target)
    expected.backward()
    for value, gradients in found:
        assert value == pytest.approx(float(expected), rel=1e-9)
        for name, gradient in gradients.items():
            other = model.get_parameter(name).grad
            assert other is not None and torch.allclose(gradient, other, rtol=1e-9, atol=1e-12)
