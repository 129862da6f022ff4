"""Layers that are dropped by chance, and what they no longer read: gradients that are not there are not zeros."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from against_eager import assert_matches, compiled
from habits import WIDTH, Habit, Net, classes, cross_entropy, features
from rig import assert_close
from torch import Tensor, nn

from efftra_fx.errors import CaptureError


class Decoder(nn.Module):
    """Layers that read a memory, each dropped by a coin; it returns what it has kept of them too, or not."""

    def __init__(self, keeps: bool = False) -> None:
        super().__init__()
        self.layers, self.keeps = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2)), keeps

    def forward(self, h: Tensor, memory: Tensor) -> Any:
        kept = []
        for layer in self.layers:
            if self.training and torch.rand([]) < 0.5:
                continue
            h = h + torch.tanh(layer(h) * memory)
            kept.append(h)
        return (h, kept) if self.keeps else h


class Pair(nn.Module):
    """An encoder, and a decoder of dropped layers; it gives its own loss with all that was kept, if there is a target.

    With `own` the decoder reads its encoder in any case.
    """

    def __init__(self, keeps: bool = False, own: bool = False) -> None:
        super().__init__()
        self.encoder, self.norm = nn.Linear(4, WIDTH), nn.LayerNorm(WIDTH)
        self.start, self.decoder, self.head = nn.Linear(4, WIDTH), Decoder(keeps), nn.Linear(WIDTH, 3)
        self.own = own

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        memory = self.norm(self.encoder(x))
        found = self.decoder(memory if self.own else self.start(x), memory)
        h, kept = found if self.decoder.keeps else (found, [])
        output = self.head(h)
        return output if labels is None else {"loss": cross_entropy(output, labels), "kept": kept}


def habit(model: nn.Module, own_loss: bool = False) -> Habit:
    inputs = (features(), classes()) if own_loss else (features(),)
    return Habit(model.double(), inputs, *(() if own_loss else (classes(), cross_entropy)))


def assert_draws_as_one_device(made: Habit, opaque: tuple[str, ...]) -> None:
    """Fail unless steps of a plan of one part are those of one device with the same numbers, for many draws."""
    program = compiled(made, 1, stages=1, replicas=(1,), micro_batches=1)
    assert tuple(path for path, _ in program.built.front.captured.opaque) == opaque
    lost = set()
    for seed in range(12):
        torch.manual_seed(seed)
        drawn = int(torch.empty((), dtype=torch.int64).random_().item())  # what the end of the loss draws from
        torch.manual_seed(drawn)
        output = made.model(*made.args)
        loss = output["loss"] if made.loss_fn is None else made.loss_fn(output, made.target)
        names = [name for name, _ in made.model.named_parameters()]
        expected = dict(
            zip(names, torch.autograd.grad(loss, [*made.model.parameters()], allow_unused=True), strict=True)
        )
        torch.manual_seed(seed)
        found = program.step(*made.args, target=made.target)
        gradients = {name: p.grad for name, p in program.named_parameters()}
        for parameter in program.parameters():
            parameter.grad = None
        assert float(found) == pytest.approx(float(loss.detach()), rel=1e-12)
        given = {name: g for name, g in gradients.items() if g is not None}
        wanted = {name: g for name, g in expected.items() if g is not None}
        assert_close(wanted, given, 1e-9, "gradient")
        lost.add(frozenset(expected.keys() - wanted.keys()))
    assert len(lost) == 4  # each layer alone, both, and none


def test_a_decoder_that_drops_all_its_layers_leaves_its_encoder_without_gradients() -> None:
    torch.manual_seed(3)
    assert_draws_as_one_device(habit(Pair()), ("",))


def test_a_module_that_drops_its_layers_and_reads_its_argument_in_any_case_stays_alone() -> None:
    torch.manual_seed(3)
    assert_draws_as_one_device(habit(Pair(own=True)), ("decoder",))


@pytest.mark.parametrize("own", [True, False])
def test_what_a_model_returns_beside_its_own_loss_may_change_from_step_to_step(own: bool) -> None:
    torch.manual_seed(3)
    assert_draws_as_one_device(habit(Pair(keeps=True, own=own), own_loss=True), ("",))


def test_what_changes_from_call_to_call_is_refused_where_a_loss_is_given_it() -> None:
    class Gives(Pair):
        def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
            return super().forward(x, classes()[: len(x)])["kept"]

    made = replace(habit(Gives(keeps=True)), loss_fn=lambda output, target: sum(o.sum() for o in output))
    for seed in range(4):
        torch.manual_seed(seed)  # whether or not the draws of the trial runs agree
        with pytest.raises(CaptureError, match=r"returns other things from call to call.*random numbers; .*use_cache"):
            compiled(made)


class Either(nn.Module):
    """One of its arguments, as the values of the first say."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.tanh(a) if a.sum() > -1e9 else torch.tanh(b)


def test_what_values_leave_out_has_no_gradient() -> None:
    class Chosen(Net):
        def __init__(self) -> None:
            super().__init__()
            self.either, self.other = Either(), nn.Linear(4, WIDTH)

        def forward(self, x: Tensor, *more: Any) -> Tensor:
            out: Tensor = self.b(self.either(self.a(x), self.other(x).square()))
            return out

    torch.manual_seed(3)
    program = assert_matches(habit(Chosen()))
    assert program.built.front.captured.opaque[0][0] == ""


def test_capturing_a_step_or_another_form_of_it_draws_nothing() -> None:
    class Counted(Net):
        def __init__(self) -> None:
            super().__init__()
            self.decoder = Decoder()

        def forward(self, x: Tensor, *more: Any) -> Tensor:
            h = self.a(x)
            out: Tensor = self.b(self.decoder(h, h)).mean(1)
            return out

    torch.manual_seed(3)
    longer = features()[:, None] * torch.arange(1, 6)[:, None]
    made = replace(habit(Counted()), args=(longer[:, :3],))
    state = torch.get_rng_state()
    program = compiled(made)
    assert torch.equal(state, torch.get_rng_state())
    losses = []
    for _ in range(2):
        torch.manual_seed(5)
        losses.append(float(program.step(longer, target=made.target)))
    assert losses[0] == losses[1]
