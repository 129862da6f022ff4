"""Packed sequences: recurrent nets over rows of other lengths, in the model's own forward and in modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from against_eager import assert_matches, assert_same, compiled, one_device, step
from habits import Habit, cross_entropy
from rig import lay_out
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence, pad_packed_sequence, unpack_sequence

from efftra_fx.errors import CaptureError, InputError

ROWS, STEPS, WORDS, WIDTH, HIDDEN = 7, 5, 11, 4, 3
LENGTHS = torch.tensor([3, 5, 1, 4, 2, 5, 2])
FALLING = LENGTHS.sort(descending=True).values
Way = Callable[..., Tensor]


class Classifier(nn.Module):
    """An embedding, a recurrent net and a layer; `way` leads through them."""

    def __init__(self, way: Way, kind: Any = nn.LSTM, **options: Any) -> None:
        super().__init__()
        self.way = way
        self.embed, self.rnn = nn.Embedding(WORDS, WIDTH), kind(WIDTH, HIDDEN, **{"batch_first": True, **options})
        width = (options.get("proj_size") or HIDDEN) * (2 if options.get("bidirectional") else 1)
        self.second, self.fc = nn.GRU(width, width, batch_first=True), nn.Linear(width, 3)

    def forward(self, words: Tensor, *lengths: Any) -> Tensor:
        return self.way(self, words, *lengths)


def packed(model: Any, words: Tensor, lengths: Any, **options: Any) -> PackedSequence:
    """Pack embedded words."""
    return pack_padded_sequence(
        model.embed(words), lengths, **{"batch_first": True, "enforce_sorted": False, **options}
    )


def last_states(model: Any, words: Tensor, lengths: Tensor, **options: Any) -> Tensor:
    """Classify by the last states of the last layer."""
    _, states = model.rnn(packed(model, words, lengths, **options))
    hidden = states[0] if isinstance(states, tuple) else states
    last = torch.cat([hidden[-2], hidden[-1]], -1) if model.rnn.bidirectional else hidden[-1]
    out: Tensor = model.fc(last)
    return out


def outputs(joined: Callable[[Tensor, Tensor], Tensor], **options: Any) -> Way:
    """Classify by what is made of padded outputs and lengths."""

    def way(model: Any, words: Tensor, lengths: Tensor) -> Tensor:
        padded, found = pad_packed_sequence(model.rnn(packed(model, words, lengths))[0], batch_first=True, **options)
        out: Tensor = model.fc(joined(padded, found))
        return out

    return way


def steps_first(model: Any, words: Tensor, lengths: Tensor) -> Tensor:
    """Classify by a net that has the steps in dimension 0, with first states that are not zero."""
    values = model.embed(words).transpose(0, 1)
    first = 0.1 + torch.zeros(2, len(lengths), HIDDEN, dtype=values.dtype) + values.mean((0, 2))[:, None]
    out, _ = model.rnn(pack_padded_sequence(values, lengths.cpu(), enforce_sorted=False), first)
    padded, _ = pad_packed_sequence(out)
    result: Tensor = model.fc(padded.amax(0))
    return result


def two_nets(model: Any, words: Tensor) -> Tensor:
    """Lead the packed output of a net into another, and attend to what is no padding; lengths are counted."""
    lengths = (words != 0).sum(1).cpu()
    out, _ = model.second(model.rnn(packed(model, words, lengths))[0])
    padded, _ = pad_packed_sequence(out, batch_first=True)
    inside = torch.arange(padded.shape[1])[None] < lengths[:, None]
    weights = torch.where(inside, padded.sum(-1), -torch.inf).softmax(1)
    result: Tensor = model.fc((padded * weights[..., None]).sum(1))
    return result


def mean(padded: Tensor, lengths: Tensor) -> Tensor:
    """Return the mean over all steps, those of padding too: it depends on how far rows are padded."""
    return padded.mean(1)


def by_lengths(padded: Tensor, lengths: Tensor) -> Tensor:
    """Return the mean over the steps of each row."""
    return padded.sum(1) / lengths[:, None]


def habit(model: nn.Module, lengths: Tensor | None = LENGTHS, steps: int = STEPS) -> Habit:
    """Return a model with a batch of words; without lengths, what is behind a row's end is zero."""
    words = torch.randint(1, WORDS, (ROWS, steps))
    if lengths is None:
        words, lengths = words * (torch.arange(steps) < LENGTHS[:, None]), None
    args = (words,) if lengths is None else (words, lengths)
    return Habit(model.double(), args, torch.arange(ROWS) % 3, cross_entropy)


MODELS: Mapping[str, Callable[[], Habit]] = {
    "last states": lambda: habit(Classifier(last_states)),
    "rows that are sorted": lambda: habit(
        Classifier(lambda *given: last_states(*given, enforce_sorted=True), num_layers=2), FALLING
    ),
    "both ways, projected": lambda: habit(Classifier(last_states, bidirectional=True, proj_size=2)),
    "outputs, padding included": lambda: habit(Classifier(outputs(mean))),
    "outputs, none so long as the padding": lambda: habit(Classifier(outputs(mean)), LENGTHS.clamp(max=4)),
    "a longer total length": lambda: habit(Classifier(outputs(mean, total_length=8, padding_value=-2.0), nn.RNN)),
    "a shorter total length": lambda: habit(
        Classifier(outputs(mean, total_length=4), nn.RNN, nonlinearity="relu"), LENGTHS.clamp(max=3)
    ),
    "means by lengths": lambda: habit(Classifier(outputs(by_lengths), nn.GRU, num_layers=2)),
    "steps in dimension 0": lambda: habit(Classifier(steps_first, nn.GRU, bidirectional=True, batch_first=False)),
    "two nets, lengths that are counted": lambda: habit(Classifier(two_nets), None),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_net_over_packed_rows_trains_as_on_one_device(name: str) -> None:
    torch.manual_seed(3)
    program = assert_matches(MODELS[name](), (((1, 1, 1), 2), ((2, 1), 2), ((1, 2), 3)))
    assert not program.built.front.captured.opaque and program.built.front.tail.linear


def test_batches_of_other_lengths_train_and_evaluate_as_on_one_device() -> None:
    torch.manual_seed(3)
    model = Classifier(outputs(mean), bidirectional=True)
    first = habit(model)
    program = compiled(first, 2)
    program = program.with_plan(lay_out(program.plan.blocks, (1, 1), 3))
    for steps, lengths in ((5, LENGTHS.flip(0)), (5, LENGTHS.clamp(max=3)), (9, LENGTHS + 4), (6, LENGTHS)):
        other = habit(model, lengths, steps)
        assert_same(step(program, other), one_device(other), 1e-9)
        with torch.no_grad():
            assert torch.allclose(program.evaluate(*other.args), model(*other.args), rtol=1e-12)


@pytest.mark.parametrize(
    ("lengths", "sorts", "error"),
    [(LENGTHS + 1, False, "from 1 to 5"), (LENGTHS - 1, False, "from 1 to 5"), (LENGTHS, True, "lengths must fall")],
)
def test_lengths_that_torch_does_not_take_are_refused_before_a_step(lengths: Tensor, sorts: bool, error: str) -> None:
    torch.manual_seed(3)
    model = Classifier(lambda *given: last_states(*given, enforce_sorted=sorts))
    program = compiled(habit(model, FALLING), 2)
    with pytest.raises(InputError, match=error):
        program.step(*habit(model, lengths).args, target=torch.arange(ROWS) % 3)


def _halved(sequence: PackedSequence) -> PackedSequence:
    return sequence._replace(data=sequence.data / 2)


REFUSED: Mapping[str, tuple[Way, str]] = {
    "the data": (lambda m, w, n: m.fc(m.rnn(packed(m, w, n))[0].data), "looks into a packed sequence"),
    "a part": (lambda m, w, n: m.fc(m.rnn(packed(m, w, n))[0][0]), r"unpack it \(pad_packed_sequence\) first"),
}
AS_IT_IS: Mapping[str, Way] = {
    "a copy": lambda m, w, n: m.fc(m.rnn(_halved(packed(m, w, n)))[1][0][-1]),
    "numbers": lambda m, w, n: last_states(m, w, n.tolist()),
}


@pytest.mark.parametrize("name", AS_IT_IS)
def test_a_model_that_looks_into_packed_rows_runs_as_it_is(name: str) -> None:
    torch.manual_seed(3)
    program = assert_matches(habit(Classifier(AS_IT_IS[name])), (((1,), 2), ((2,), 2)))
    assert [path for path, _ in program.built.front.captured.opaque] == [""]


@pytest.mark.parametrize("name", REFUSED)
def test_what_depends_on_the_lengths_of_other_rows_is_refused_with_its_line(name: str) -> None:
    way, message = REFUSED[name]
    model = habit(Classifier(way))
    other = Habit(model.model, model.args, None, lambda output: output.square().mean())
    with pytest.raises(CaptureError, match=rf"{message}") as found:
        compiled(other, 1)
    assert "test_capture_packed.py:" in str(found.value)


def test_lengths_in_a_list_and_sequences_that_come_packed_are_refused() -> None:
    with pytest.raises(CaptureError, match="give the lengths as a tensor"):
        compiled(Habit(Classifier(last_states).double(), (habit(nn.Identity()).args[0], LENGTHS.tolist()), *_LOSS), 1)
    rows = pack_sequence([torch.randn(int(n), WIDTH, dtype=torch.float64) for n in FALLING])
    with pytest.raises(CaptureError, match="give padded values and lengths to the model"):
        compiled(Habit(Classifier(lambda m, w: m.fc(m.rnn(w)[1][0][-1])).double(), (rows,), *_LOSS), 1)


_LOSS = (torch.arange(ROWS) % 3, cross_entropy)


class Inside(Classifier):
    """A module in which a packed sequence is looked into: its parts are embedded, or lengths are numbers."""

    def __init__(self, numbers: bool) -> None:
        super().__init__(last_states)
        self.numbers = numbers

    def forward(self, words: Tensor, *lengths: Any) -> Tensor:
        if self.numbers:
            out, _ = self.rnn(packed(self, words, lengths[0].tolist()))
        else:
            sequence = pack_padded_sequence(words, lengths[0], True, False)
            out, _ = self.rnn(sequence._replace(data=self.embed(sequence.data)))
        padded, _ = pad_packed_sequence(out, batch_first=True)
        return padded


@pytest.mark.parametrize("numbers", [True, False])
def test_a_module_that_looks_into_a_packed_sequence_runs_as_it_is_on_the_whole_batch(numbers: bool) -> None:
    torch.manual_seed(3)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside, self.fc = Inside(numbers), nn.Linear(HIDDEN, 3)

        def forward(self, words: Tensor, lengths: Tensor) -> Tensor:
            out: Tensor = self.fc(self.inside(words, lengths).sum(1))
            return out

    program = assert_matches(habit(Model()), (((1,), 3), ((3,), 1)))
    assert [path for path, _ in program.built.front.captured.opaque] == ["inside"]
    assert not program.built.front.tail.linear


def test_what_was_packed_can_be_imported_and_used_as_ever_after_a_capture() -> None:
    torch.manual_seed(3)
    compiled(habit(Classifier(last_states)), 1)
    rows = [torch.randn(n, 2) for n in (2, 4, 1)]
    sequence = pack_sequence(rows, enforce_sorted=False)
    assert type(sequence) is PackedSequence and sequence.data.shape == (7, 2)
    assert all(torch.equal(a, b) for a, b in zip(unpack_sequence(sequence), rows, strict=True))
    assert F.dropout(sequence.data, 0.0).shape == nn.GRU(2, 3)(sequence)[0].data[:, :2].shape
