"""Evaluations of many forms come from one trace for all sizes, and are the plain model's."""

from __future__ import annotations

from typing import Any, NoReturn

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn

import efftra_fx.evaluation
import efftra_fx.evaluation_forms
import efftra_fx.varying
from efftra_fx import Cluster, CompiledModel, compile
from efftra_fx.errors import InputError


class Tagger(nn.Module):
    """Attention over a sequence of any length; its output tells the length."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.qkv, self.out = nn.Embedding(9, 6), nn.Linear(6, 18), nn.Linear(6, 9)
        self.scale = 1.0

    def forward(self, ids: Tensor) -> dict[str, Any]:
        q, k, v = self.qkv(self.table(ids)).chunk(3, -1)
        h = self.table(ids) + (q @ k.transpose(-1, -2)).softmax(-1) @ v / ids.shape[1]
        length = ids.shape[1]
        return {"length": length, "scores": self.out(h) * self.scale, "half": length / 2}


class Running(Tagger):
    """A recurrent net, whose length a tracer fixes."""

    def __init__(self) -> None:
        super().__init__()
        self.run = nn.LSTM(6, 6, batch_first=True)

    def forward(self, ids: Tensor) -> dict[str, Any]:
        return {"length": None, "scores": self.out(self.run(self.table(ids))[0]), "half": 0.5}


def loss(output: dict[str, Any], target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output["scores"].flatten(0, 1), target.flatten())


def words(rows: int, length: int) -> Tensor:
    return torch.randint(0, 9, (rows, length))


def program_of(model: nn.Module, cluster: Cluster | None = None) -> CompiledModel:
    """Return a model compiled for a length of 5."""
    return compile(
        model,
        cluster or Cluster.local(3),
        example_inputs=(words(6, 5),),
        example_target=words(6, 5),
        loss_fn=loss,
        stages=2,
        replicas=(2, 1),
        micro_batches=2,
        costs="estimated",
    )


def holds_for(model: nn.Module, program: CompiledModel, *sizes: tuple[int, int]) -> None:
    """Fail unless what is evaluated is what the model gives in eval mode."""
    for rows, length in sizes:
        ids = words(rows, length)
        with torch.no_grad():
            model.eval()
            expected = model(ids)
            model.train()
        found = program.evaluate(ids)
        torch.testing.assert_close(found["scores"], expected["scores"], rtol=1e-10, atol=1e-12)
        assert (found["length"], found["half"]) == (expected["length"], expected["half"])


def forbid_tracing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every trace fail from now on."""

    def traced(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a trace was made")

    monkeypatch.setattr(efftra_fx.evaluation, "capture", traced)
    monkeypatch.setattr(efftra_fx.varying, "capture", traced)


class Plain(Tagger):
    """The scores and the length, but no fraction of it."""

    def forward(self, ids: Tensor) -> dict[str, Any]:
        return {**super().forward(ids), "half": 0.5}


@pytest.mark.parametrize("model", [Plain, Running])
def test_from_the_third_length_on_no_trace_is_made(model: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    net = model().double()
    program = program_of(net)
    holds_for(net, program, (6, 5), (4, 7))
    forbid_tracing(monkeypatch)
    holds_for(net, program, (6, 3), (1, 9), (5, 6), (2, 4), (7, 9))


def test_numbers_in_the_output_are_those_of_each_batch() -> None:
    torch.manual_seed(0)
    net = Tagger().double()
    holds_for(net, program_of(net), (6, 5), (4, 7), (6, 3), (1, 9), (6, 1), (3, 3))


@pytest.mark.parametrize(("scale", "told"), [(3.0, 0), (3, 1)])  # an integer is of another kind than what it was
def test_a_number_that_was_set_since_the_trace_is_seen(
    scale: float, told: int, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    net = Plain().double()
    program = program_of(net)
    holds_for(net, program, (6, 5), (4, 7))
    net.scale = scale
    holds_for(net, program, (6, 3), (6, 4), (6, 6), (6, 8))
    said = capsys.readouterr().err
    assert said.count("this batch to evaluate is captured apart, since in the trace for all sizes output 0") == told


def test_numbers_that_are_set_at_other_lengths_take_one_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    net = Plain().double()
    program = program_of(net)
    holds_for(net, program, (6, 5), (4, 7))
    net.scale = 3.0
    holds_for(net, program, (6, 3))
    monkeypatch.setattr(efftra_fx.varying, "capture_with_settings", _no_capture)
    monkeypatch.setattr(efftra_fx.evaluation, "capture_with_settings", _no_capture)
    monkeypatch.setattr(efftra_fx.evaluation, "capture", _no_capture)
    for scale, *sizes in ((2.0, 4, 6), (1.5, 6, 8), (0.5, 5, 3)):
        net.scale = scale
        holds_for(net, program, (sizes[0], sizes[1]))


def _no_capture(*_: Any, **__: Any) -> NoReturn:
    raise AssertionError("captured again")


def test_many_forms_are_told_once_and_more_than_are_kept_are_let_go(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(efftra_fx.evaluation_forms, "MANY_VARIANTS", 2)
    monkeypatch.setattr(efftra_fx.evaluation_forms, "MOST_VARIANTS", 3)
    torch.manual_seed(0)
    net = Plain().double()
    program = program_of(net)
    holds_for(net, program, (6, 5), (4, 7), (6, 3), (1, 9), (5, 6), (2, 4), (7, 9))
    assert len(program._evaluations.kept) == 3
    assert capsys.readouterr().err.count("2 forms of batch have been met, and capturing them took") == 1


class Weighed(nn.Module):
    """A table of any length that has no rows."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        out: Tensor = self.lin(x) * (table.sum() / table.shape[0])
        return out


def test_another_length_of_what_has_no_rows_is_another_form() -> None:
    torch.manual_seed(0)
    net, x = Weighed().double(), torch.randn(6, 4).double()
    program = compile(
        net,
        Cluster.local(2),
        example_inputs=(x, torch.ones(3).double()),
        loss_fn=lambda output: output.square().mean(),
        batch_dims={"table": None},
        costs="estimated",
        stages=1,
        replicas=(2,),
    )
    for length in (3, 5, 7, 2):
        table = torch.rand(length).double()
        with torch.no_grad():
            torch.testing.assert_close(program.evaluate(x, table), net(x, table), rtol=1e-10, atol=1e-12)


def outputs_here() -> list[Any]:
    """Evaluate several lengths on every rank, and another batch on rank 1 once."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = Plain().double()
    program = program_of(net, Cluster.from_env())
    found: list[Any] = []
    for length in (5, 7, 3, 4):
        ids = torch.arange(6 * length).reshape(6, length) % 9
        found.append(program.evaluate(ids)["scores"])
    try:
        program.evaluate(ids if program.rank != 1 else ids.flip(0))
    except InputError as error:
        found.append(str(error))
    return found


def test_ranks_evaluate_new_lengths_together_and_refuse_different_data_alike() -> None:
    torch.manual_seed(0)
    net = Plain().double().eval()
    for outcome in run_ranks(outputs_here, 3, limit_s=200.0):
        for length, scores in zip((5, 7, 3, 4), outcome, strict=False):
            ids = torch.arange(6 * length).reshape(6, length) % 9
            torch.testing.assert_close(scores, net(ids)["scores"], rtol=1e-10, atol=1e-12)
        assert "the ranks were given different data: of 'ids', rank 0 has" in outcome[-1]


class Deciding(Tagger):
    """A tagger that asks for values, which no trace for all sizes can."""

    def forward(self, ids: Tensor) -> dict[str, Any]:
        scores = self.out(self.table(ids))
        return {"scores": torch.stack([row.nan_to_num() if row.isnan().any() else row for row in scores])}


def test_what_is_captured_anew_is_said_of_steps_and_evaluations_apart(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    net = Deciding().double()
    cluster = Cluster.local(2)
    program = compile(net, cluster, example_inputs=(words(6, 5),), example_target=words(6, 5), loss_fn=loss)
    for length in (7, 8, 9):
        program.step(words(6, length), target=words(6, length))
        ids = words(4, length)
        torch.testing.assert_close(program.evaluate(ids)["scores"], net(ids)["scores"].detach(), rtol=1e-12, atol=0)
    told = capsys.readouterr().err
    for what in ("step", "evaluation"):
        assert told.count(f"the {what} is captured anew for another size of 'ids'") == 1, told


class Windowed(Tagger):
    """Keeps the end of a long sequence, and says of a short one how long it is."""

    def forward(self, ids: Tensor) -> dict[str, Any]:
        found = super().forward(ids)
        length = ids.shape[1]
        return {**found, "kept": found["scores"][:, -6:] if length > 6 else length}


def test_an_output_may_be_a_tensor_for_some_lengths_and_a_number_for_others() -> None:
    model = Windowed().double()
    holds_for(model, program_of(model), (6, 5), (6, 4), (6, 9), (1, 9), (5, 12), (4, 6), (1, 3))


class Queue(nn.Module):
    """Compares rows with those of the batch before, and keeps these in eval mode too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.before: Tensor
        self.register_buffer("before", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x) + self.before
        self.before.copy_(x.detach().mean(0))
        return out


def test_buffers_that_are_written_in_eval_mode_stay_and_that_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    x, model = torch.randn(6, 4).double(), Queue().double()
    program = compile(
        model, Cluster.local(2), example_inputs=(x,), loss_fn=lambda out: out.square().mean(), costs="estimated"
    )
    program.step(x)
    before = model.before.clone()
    assert torch.allclose(before, x.mean(0))
    for rows in (6, 4):
        torch.testing.assert_close(program.evaluate(2 * x[:rows]), model.layer(2 * x[:rows]) + before)
    assert torch.equal(model.before, before)
    assert capsys.readouterr().err.count("in eval mode forward writes 'before', which evaluate leaves as it is") == 1
