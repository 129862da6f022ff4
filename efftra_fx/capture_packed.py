"""Packed sequences while a model is captured: padded values with their lengths, and recurrent nets over them as a node.

Torch packs rows of other lengths into one tensor whose size is the sum of the lengths, step by step across the rows:
no rows can be told in it, and its size depends on values. So while a model is captured `pack_padded_sequence` keeps
what it was given,

    pack_padded_sequence(x, lengths) ── LSTM, GRU, RNN ── pad_packed_sequence          as the user writes it
    (x, lengths)  ── one node: pack, run, pad to x's length ── cut to the longest      as the graph has it

and the recurrent net is one node from padded values to padded values, which each part of the batch can run for its
rows: what a row gives does not depend on how long the others are. The length of the result does, where the model
does not fix it (`total_length=`): that the longest row fills the padding, or how long it is, becomes a guard.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.utils import rnn

from efftra_fx.capture_guards import AsksValuesError
from efftra_fx.opaque import make_operator
from efftra_fx.places import line_of_caller


def _alone(function: Any) -> Any:
    """Return a function as it is now, whatever code it is given later."""
    return FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__)


_PACK_INSIDE = "give padded values and lengths to the model, and pack them (pack_padded_sequence) in its forward"
_PACK, _PAD = _alone(rnn.pack_padded_sequence), _alone(rnn.pad_packed_sequence)
_RUNS: dict[str, Any] = {"LSTM": torch.lstm, "GRU": torch.gru, "RNN_TANH": torch.rnn_tanh, "RNN_RELU": torch.rnn_relu}


class Padded(rnn.PackedSequence):
    """Values [rows, steps, ...] with the rows' lengths [rows], in place of a packed sequence.

    With real values it is that packed sequence; with a tracer's, whoever looks into it is told to pad it first.
    """

    @classmethod
    def of(cls, values: Tensor, lengths: Tensor) -> Padded:
        """Return values with their lengths."""
        return tuple.__new__(cls, (values, lengths, None, None))

    @property
    def content(self) -> tuple[Tensor, Tensor]:
        """The values and the lengths."""
        values, lengths, *_ = tuple.__iter__(self)
        return values, lengths  # type: ignore[return-value]

    @property
    def packed(self) -> rnn.PackedSequence:
        """The packed sequence that this stands for; raises AsksValuesError while a graph is captured."""
        values, lengths = self.content
        if isinstance(values, FakeTensor):
            raise _refused("it looks into a packed sequence, whose size depends on the lengths,")
        packed: rnn.PackedSequence = _PACK(values, lengths, True, False)
        return packed

    @property
    def data(self) -> Any:
        """The packed values."""
        return self.packed.data

    @property
    def batch_sizes(self) -> Any:
        """How many rows there are at each step."""
        return self.packed.batch_sizes

    @property
    def sorted_indices(self) -> Any:
        """The order of rows by length."""
        return self.packed.sorted_indices

    @property
    def unsorted_indices(self) -> Any:
        """The order in which rows were given."""
        return self.packed.unsorted_indices

    @classmethod
    def _make(cls, iterable: Any) -> Any:  # type: ignore[override]
        return rnn.PackedSequence._make(iterable)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.packed)

    def __getitem__(self, index: Any) -> Any:
        return self.packed[index]


def _refused(what: str, way_out: str = "unpack it (pad_packed_sequence) first") -> AsksValuesError:
    error = AsksValuesError(f"the model cannot be captured as a graph: {what} at {line_of_caller()}; {way_out}")
    error.reason = what
    return error


def _pack(input: Tensor, lengths: Any, batch_first: bool, enforce_sorted: bool) -> rnn.PackedSequence:
    """Keep the values with their lengths; raises as torch does where those are none."""
    if not isinstance(lengths, Tensor):
        if isinstance(input, FakeTensor) or len(lengths) != input.shape[0 if batch_first else 1]:
            raise _refused(
                "it packs sequences by lengths that are Python numbers, which no part of the batch can cut",
                "give the lengths as a tensor, an argument of the model, without tolist() or numpy()",
            )
        lengths = torch.as_tensor(lengths)
    values, lengths = input if batch_first else input.transpose(0, 1), lengths.to(torch.int64)
    if ((lengths < 1) | (lengths > values.shape[1])).any():
        raise RuntimeError(
            f"lengths of packed sequences must be from 1 to {values.shape[1]}, as far as they are padded"
        )
    if enforce_sorted:
        if (lengths > lengths.cummin(0).values).any():
            raise RuntimeError("lengths must fall where sequences are packed with enforce_sorted=True")
    return Padded.of(values, lengths)


def _pad(
    sequence: rnn.PackedSequence, batch_first: bool, padding_value: float, total_length: int | None
) -> tuple[Tensor, Tensor]:
    """Return the values of all rows, as far as the longest row or the total length, and the lengths."""
    if not isinstance(sequence, Padded):
        plain: tuple[Tensor, Tensor] = _PAD(sequence, batch_first, padding_value, total_length)
        return plain
    values, lengths = sequence.content
    steps = values.shape[1]
    if total_length is not None:
        if (lengths > total_length).any():
            raise ValueError(f"total_length={total_length} is less than the length of the longest sequence")
        wanted: Any = total_length
    else:
        wanted = steps if lengths.max() == steps else int(lengths.max())
    places = torch.arange(steps, device=values.device).view(1, -1, *(1 for _ in range(values.ndim - 2)))
    inside = places < lengths.to(values.device).view(-1, *(1 for _ in range(values.ndim - 1)))
    out = torch.where(inside, values, padding_value)
    if wanted is not steps:
        rest = wanted - min(wanted, steps)
        out = out.narrow(1, 0, wanted) if not rest else _longer(out, rest, padding_value)
    return (out if batch_first else out.transpose(0, 1)), lengths


def _longer(values: Tensor, rest: int, padding_value: float) -> Tensor:
    return torch.cat([values, values.new_full((values.shape[0], rest, *values.shape[2:]), padding_value)], 1)


def _pack_code(input: Any, lengths: Any, batch_first: bool = False, enforce_sorted: bool = True) -> Any:
    from efftra_fx.capture_packed import _pack  # runs among the names of torch's module

    return _pack(input, lengths, batch_first, enforce_sorted)


def _pad_code(
    sequence: Any, batch_first: bool = False, padding_value: float = 0.0, total_length: int | None = None
) -> Any:
    from efftra_fx.capture_packed import _pad

    return _pad(sequence, batch_first, padding_value, total_length)


@contextmanager
def sequences_kept_padded() -> Iterator[None]:
    """While this lasts, packed sequences are padded values with lengths, and recurrent nets over them one node each."""
    with ExitStack() as stack:
        stack.enter_context(_code_replaced(rnn.pack_padded_sequence, _pack_code))
        stack.enter_context(_code_replaced(rnn.pad_packed_sequence, _pad_code))
        for kind in (nn.LSTM, nn.GRU, nn.RNN):
            stack.enter_context(_over_padded(kind))
        yield


@contextmanager
def _code_replaced(function: Any, other: Any) -> Iterator[None]:
    """Let a function do what another does, also for those who have imported it by name."""
    before = function.__code__
    function.__code__ = other.__code__
    try:
        yield
    finally:
        function.__code__ = before


@contextmanager
def _over_padded(kind: Any) -> Iterator[None]:
    original = kind.forward

    def forward(self: Any, input: Any, hx: Any = None) -> Any:
        if isinstance(input, Padded):
            return _run_padded(self, input, hx)
        if isinstance(input, rnn.PackedSequence) and isinstance(input.data, FakeTensor):
            raise _refused("it is given a packed sequence, in which no rows can be told,", _PACK_INSIDE)
        return original(self, input, hx)

    kind.forward = forward
    try:
        yield
    finally:
        kind.forward = original


def _run_padded(module: Any, sequence: Padded, hx: Any) -> tuple[Padded, Any]:
    """Return what a recurrent net gives for a packed sequence, and its last states, by one node."""
    values, lengths = sequence.content
    two = module.mode == "LSTM"
    given = [] if hx is None else list(hx) if two else [hx]
    weights = [getattr(module, name) for name in module._flat_weights_names]
    results = _operator(module, len(given))([values, lengths, *given, *weights])
    states = tuple(results[1 : 3 if two else 2])
    return Padded.of(results[0], lengths), states if two else states[0]


def _operator(module: Any, given: int) -> Any:
    """Return the operator from values, lengths, first states (as many as are `given`) and weights to padded results."""
    run_packed, two, directions = _RUNS[module.mode], module.mode == "LSTM", 2 if module.bidirectional else 1
    layers, hidden, real = module.num_layers, module.hidden_size, module.proj_size or module.hidden_size
    settings = (module.bias, layers, float(module.dropout), module.training, module.bidirectional)

    def run(operands: Sequence[Tensor]) -> list[Tensor]:
        values, lengths, *rest = operands
        packed = _PACK(values, lengths, True, False)
        rows, order, back = values.shape[0], packed.sorted_indices, packed.unsorted_indices
        first = [state.index_select(1, order) for state in rest[:given]]
        if not first:
            sizes = (real, hidden) if two else (hidden,)
            first = [values.new_zeros(layers * directions, rows, size) for size in sizes]
        start: Any = tuple(first) if two else first[0]
        out, *last = run_packed(packed.data, packed.batch_sizes, start, rest[given:], *settings)
        padded, _ = _PAD(packed._replace(data=out), True, 0.0, values.shape[1])
        return [padded, *(state.index_select(1, back) for state in last)]

    def shape(operands: Sequence[Tensor]) -> list[Tensor]:
        values = operands[0]
        rows, steps, _ = values.shape
        states = [values.new_empty(layers * directions, rows, size) for size in ((real, hidden) if two else (hidden,))]
        return [values.new_empty(rows, steps, directions * real), *states]

    draws = bool(module.dropout and module.training and layers > 1)
    return make_operator(str(module.mode).lower(), run, shape, draws=draws)


__all__ = ["Padded", "sequences_kept_padded"]
