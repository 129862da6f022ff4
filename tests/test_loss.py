"""Whatever a loss is made of, the parts of the batch give the whole batch's loss and gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
import torch.nn.functional as F
from against_eager import assert_matches, compiled
from habits import ROWS, Habit, Net, classes, features
from torch import Tensor, nn

from efftra_fx import Cluster, compile
from efftra_fx.errors import BatchError, LossError

WEIGHTS = torch.tensor([0.2, 0.5, 2.0], dtype=torch.float64)


def some_ignored() -> Tensor:
    """Return classes of which several are to be ignored, all of the last rows among them."""
    target = classes()
    target[[1, 4, 5, 6]] = -100
    return target


def contrastive(output: Tensor, target: Tensor) -> Tensor:
    """Return a loss in which every row is compared with every other."""
    left, right = F.normalize(output, dim=-1), F.normalize(target, dim=-1)
    return F.cross_entropy(4.0 * left @ right.T, torch.arange(output.shape[0]))


def dice(output: Tensor, target: Tensor) -> Tensor:
    """Return a quotient of two sums over the batch."""
    inside = output.sigmoid()
    return 1 - 2 * (inside * target).sum() / (inside.sum() + target.sum())


Loss = Callable[[Tensor, Tensor], Tensor]
Target = Callable[[], Tensor]


def values() -> Tensor:
    """Return real targets."""
    return features(3)


def shares() -> Tensor:
    """Return targets between 0 and 1."""
    return features(3).sigmoid()


DIVIDED: Mapping[str, tuple[Target, Loss]] = {
    "mean of squares": (values, F.mse_loss),
    "sum of squares": (values, lambda o, t: ((o - t) ** 2).sum()),
    "ignored classes": (some_ignored, F.cross_entropy),
    "class weights": (classes, lambda o, t: F.cross_entropy(o, t, weight=WEIGHTS)),
    "weights, smoothing, ignored": (
        some_ignored,
        lambda o, t: F.cross_entropy(o, t, weight=WEIGHTS, label_smoothing=0.1),
    ),
    "class shares": (lambda: shares().softmax(-1), F.cross_entropy),
    "negative log likelihood": (classes, lambda o, t: F.nll_loss(o.log_softmax(-1), t, weight=WEIGHTS)),
    "two terms": (classes, lambda o, t: F.cross_entropy(o, t) + 0.1 * o.pow(2).mean()),
    "mask as a divisor": (shares, lambda o, t: (o.pow(2) * (t > 0.4)).sum() / (t > 0.4).sum()),
    "batch mean of divergence": (
        lambda: shares().softmax(-1),
        lambda o, t: F.kl_div(o.log_softmax(-1), t, reduction="batchmean"),
    ),
    "binary cross entropy": (shares, lambda o, t: F.binary_cross_entropy_with_logits(o, t, pos_weight=WEIGHTS)),
    "focal": (
        classes,
        lambda o, t: (
            (1 - o.softmax(-1).gather(1, t[:, None])[:, 0]) ** 2 * F.cross_entropy(o, t, reduction="none")
        ).mean(),
    ),
    "divided by len": (values, lambda o, t: ((o - t) ** 2).sum() / len(o)),
    "divided by a number from the targets": (values, lambda o, t: ((o - t) ** 2).sum() / t.abs().sum().item()),
    "connectionist": (
        lambda: torch.randint(1, 3, (ROWS, 1)),
        lambda o, t: F.ctc_loss(
            o[None].log_softmax(-1), t, torch.ones(o.shape[0]).long(), torch.ones(o.shape[0]).long()
        ),
    ),
}
TOGETHER: Mapping[str, tuple[Target, Loss]] = {
    "contrastive": (values, contrastive),
    "root of the mean": (values, lambda o, t: F.mse_loss(o, t).sqrt()),
    "quotient of sums": (shares, dice),
    "variance over the batch": (values, lambda o, t: F.mse_loss(o, t) + o.var()),
    "worst row": (values, lambda o, t: (o - t).abs().max()),
}


def habit(target: Target, loss: Loss) -> Habit:
    """Return a small network with this loss."""
    torch.manual_seed(5)
    return Habit(Net().double(), (features(),), target(), loss)


@pytest.mark.parametrize("name", sorted(DIVIDED))
def test_a_loss_that_adds_up_needs_no_meeting_of_the_parts(name: str) -> None:
    assert assert_matches(habit(*DIVIDED[name])).built.front.tail.linear


@pytest.mark.parametrize("name", sorted(TOGETHER))
def test_a_loss_over_the_batch_together_is_computed_once_on_all_parts(name: str) -> None:
    assert not assert_matches(habit(*TOGETHER[name])).built.front.tail.linear


def test_a_micro_batch_with_nothing_valid_counts_as_nothing() -> None:
    torch.manual_seed(5)
    target = classes()
    target[2:] = -100
    found = assert_matches(
        Habit(Net().double(), (features(),), target, F.cross_entropy), plans=(((1, 1), 7), ((2,), 2))
    )
    assert torch.isfinite(found.step(features(), target=target))


def test_a_term_of_the_parameters_alone_counts_once() -> None:
    torch.manual_seed(5)
    model = Net().double()
    assert_matches(
        Habit(model, (features(),), classes(), lambda o, t: F.cross_entropy(o, t) + 0.01 * model.b.weight.pow(2).sum())
    )


def test_a_loss_module_may_have_parameters() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            return F.cross_entropy(output * self.scale, target)

    torch.manual_seed(5)
    program = assert_matches(Habit(Net().double(), (features(),), classes(), Scaled()))
    assert "loss_fn.scale" in dict(program.named_parameters())


def test_a_loss_that_is_a_vector_is_refused_with_its_shape() -> None:
    with pytest.raises(LossError, match=r"shape \[7\], expected a scalar"):
        compiled(habit(classes, lambda o, t: F.cross_entropy(o, t, reduction="none")))


def test_a_model_without_a_loss_is_refused() -> None:
    class Gives(Net):
        def forward(self, x: Tensor, *more: object) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            return super().forward(x), x

    with pytest.raises(LossError, match=r"returned tuple without a loss \(it begins with shape \[7, 3\]\); give loss"):
        compiled(Habit(Gives().double(), (features(),)))


def test_a_tuple_that_begins_with_a_scalar_gives_the_models_own_loss(capsys: pytest.CaptureFixture[str]) -> None:
    class Gives(Net):
        def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            output = super().forward(x)
            return F.cross_entropy(output, labels), output

    habit = Habit(Gives().double(), (features(), classes()))
    program = assert_matches(habit)
    assert "its first element, a scalar, is taken as the loss" in capsys.readouterr().err
    loss, output = habit.model(*habit.args)
    torch.testing.assert_close(program.step(*habit.args), loss.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(program.evaluate(*habit.args), (loss.detach(), output.detach()))


def test_a_loss_of_no_parameter_is_refused() -> None:
    with pytest.raises(LossError, match="depends on no parameter"):
        compiled(habit(values, lambda o, t: t.mean()))


def test_a_batch_without_rows_is_refused() -> None:
    with pytest.raises(BatchError, match="no argument carries a batch"):
        compiled(
            Habit(
                Net().double(),
                (features(),),
                classes(),
                F.cross_entropy,
                options={"batch_dims": {"x": None, "target": None}},
            )
        )


def test_a_size_that_is_read_off_an_output_binds_no_target_to_it() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(7, 4)

        def forward(self, words: Tensor) -> Tensor:
            return torch.tanh(self.embed(words)) @ self.embed.weight.t()

    weights = torch.rand(7, dtype=torch.float64) + 0.2
    words = torch.randint(7, (5, 3), generator=torch.Generator().manual_seed(0))

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), target.flatten(), weight=weights, label_smoothing=0.1)

    program = compile(
        Words().double(), Cluster.local(2), example_inputs=(words,), example_target=words, loss_fn=loss_fn,
        stages=2, schedule="1f1b", micro_batches=3, costs="estimated",
    )  # fmt: skip
    assert program.built.front.tail.linear
    assert program.check(words, target=words, repeats=1, show=False).matches
