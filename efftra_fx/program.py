"""Rank programs: what each rank does in one training step, as plain data.

A program is a straight line of instructions. Three things read the very same
line: the verifier, the simulator (a clock and a cluster) and the executor
(tensors and a process group). Programs print as text, one instruction a line,
and parse back to equal ones (`program_text.py`):

    rank 0, stage 0                             rank 1, stage 1
    load s0 m0 [0:4]
    forward s0 m0                               recv x m0 [0:4] <- 0 float32[4, 16]
    recv x m0 [0:4] <- 1 float32[4, 16] gradient load s1 m0 [0:4]
    send x m0 [0:4] -> 1 float32[4, 16]         forward s1 m0
    backward s0 m0                              backward s1 m0
    reduce_loss [0, 1]                          send x m0 [0:4] -> 0 float32[4, 16] gradient
    update                                      reduce_loss [0, 1]
                                                update
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from efftra_fx.errors import ProgramError

KINDS = ("rows", "whole", "sum")

DTYPE_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int16": 2,
    "uint16": 2,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "uint32": 4,
    "float32": 4,
    "complex32": 4,
    "int64": 8,
    "uint64": 8,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}


@dataclass(frozen=True)
class Value:
    """A value that crosses a cut: a typed contract between stages.

    `shape` is the shape for one row of the batch; along `dim` a part with b rows
    has `shape[dim] * b` elements (`kind == "rows"`). A `"whole"` value is the same
    for every row and has exactly `shape`; a `"sum"` value is a partial sum over the
    rows of a part, has exactly `shape`, and parts add up.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    kind: str  # "rows" | "whole" | "sum"
    dim: int
    producer: int
    consumers: tuple[int, ...]
    gradients: tuple[bool, ...]  # for each consumer: does a gradient come back

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ProgramError(f"value {self.name!r} has kind {self.kind!r}, expected one of {', '.join(KINDS)}")
        if self.kind == "rows" and not 0 <= self.dim < len(self.shape):
            raise ProgramError(f"value {self.name!r} splits along dimension {self.dim} but has shape {self.shape}")
        if len(self.gradients) != len(self.consumers):
            raise ProgramError(
                f"value {self.name!r} has {len(self.consumers)} consumers but {len(self.gradients)} gradient flags"
            )

    def part_shape(self, rows: int) -> tuple[int, ...]:
        """Return the concrete shape of a part with `rows` rows."""
        if self.kind != "rows":
            return self.shape
        return (*self.shape[: self.dim], self.shape[self.dim] * rows, *self.shape[self.dim + 1 :])


@dataclass(frozen=True)
class Parameter:
    """A parameter under the model's own name and the stages that read it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    stages: tuple[int, ...]
    trainable: bool
    partial: bool = False  # in a stage wider than one rank: each rank of a replica has a part of the gradient

    @property
    def size_bytes(self) -> int:
        """Bytes of one copy of the parameter, and of its gradient."""
        return math.prod(self.shape) * dtype_bytes(self.dtype)


@dataclass(frozen=True)
class Wiring:
    """The distributed graph as plain data: all that lowering needs to know."""

    stages: int
    values: tuple[Value, ...]
    parameters: tuple[Parameter, ...]
    backward: tuple[bool, ...]  # for each stage: has it anything to differentiate
    joined: bool  # the loss needs all forwards before any backward
    loss: bool = True  # every rank learns the loss at the end of the step
    synced: tuple[int, ...] = ()  # stages whose replicas meet in every computation, for statistics over all their rows

    def __post_init__(self) -> None:
        if self.stages < 1 or len(self.backward) != self.stages:
            raise ProgramError(f"{self.stages} stages need one backward flag each, got {len(self.backward)}")
        if list(self.synced) != sorted({s for s in self.synced if 0 <= s < self.stages}):
            raise ProgramError(f"synced stages are listed in rising order, each once, got {list(self.synced)}")

    def returns_gradient(self, value: Value, consumer: int) -> bool:
        """Say whether stage `consumer` sends a gradient of `value` back to its producer."""
        wanted = value.gradients[value.consumers.index(consumer)]
        return wanted and self.backward[value.producer] and self.backward[consumer]

    def has_weights(self, stage: int) -> bool:
        """Say whether `stage` computes gradients of parameters."""
        return self.backward[stage] and any(p.trainable and stage in p.stages for p in self.parameters)

    def forward_only(self, loss: bool = False) -> Wiring:
        """Return the wiring of an evaluation: no backward anywhere, no join, and the loss only if asked for."""
        return replace(self, backward=(False,) * self.stages, joined=False, loss=loss, synced=())


@dataclass(frozen=True, slots=True)
class Load:
    """Bind rows [start, stop) of the global batch as the model's inputs of this cell."""

    stage: int
    micro_batch: int
    start: int
    stop: int

    def __post_init__(self) -> None:
        _check_counts(self.stage, self.micro_batch)
        _check_rows(self.start, self.stop)


@dataclass(frozen=True, slots=True)
class Forward:
    """Compute the stage on the cell's rows, once everything it reads has arrived."""

    stage: int
    micro_batch: int

    def __post_init__(self) -> None:
        _check_counts(self.stage, self.micro_batch)


@dataclass(frozen=True, slots=True)
class Backward:
    """Compute the gradients of the cell's inputs, and add up those of its parameters."""

    stage: int
    micro_batch: int

    def __post_init__(self) -> None:
        _check_counts(self.stage, self.micro_batch)


@dataclass(frozen=True, slots=True)
class BackwardInput:
    """Compute the gradients of the cell's inputs only; those of its parameters follow in a `BackwardWeight`."""

    stage: int
    micro_batch: int

    def __post_init__(self) -> None:
        _check_counts(self.stage, self.micro_batch)


@dataclass(frozen=True, slots=True)
class BackwardWeight:
    """Add up the gradients of the stage's parameters for all these micro-batches at once."""

    stage: int
    micro_batches: tuple[int, ...]

    def __post_init__(self) -> None:
        _check_counts(self.stage, *self.micro_batches)
        if not self.micro_batches:
            raise ProgramError(f"backward_weight of stage {self.stage} needs at least one micro-batch, got none")


@dataclass(frozen=True, slots=True)
class Message:
    """Rows [start, stop) of a value, or of its gradient, on their way between two ranks.

    Rows are rows of the global batch; for kinds "whole" and "sum" they are all the
    rows that the producer computed in this micro-batch. `shape` is what is sent.
    """

    value: str
    micro_batch: int
    start: int
    stop: int
    peer: int
    dtype: str
    shape: tuple[int, ...]
    gradient: bool

    def __post_init__(self) -> None:
        _check_counts(self.micro_batch, self.peer, *self.shape)
        _check_rows(self.start, self.stop)

    @property
    def size_bytes(self) -> int:
        """Bytes on the wire."""
        return math.prod(self.shape) * dtype_bytes(self.dtype)


@dataclass(frozen=True, slots=True)
class Send(Message):
    """Start sending to `peer`; never waits, and the buffer is kept until it is done."""


@dataclass(frozen=True, slots=True)
class Recv(Message):
    """Start receiving from `peer`; never waits: the first instruction that computes with the value does."""


@dataclass(frozen=True, slots=True)
class AllReduce:
    """Sum the gradients of a bucket of parameters over `ranks`; a member without a gradient adds zeros."""

    parameters: tuple[str, ...]
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        _check_ranks("all_reduce", self.ranks)
        if not self.parameters:
            raise ProgramError(f"all_reduce over ranks {list(self.ranks)} needs at least one parameter, got none")


@dataclass(frozen=True, slots=True)
class Join:
    """Add up the loss's partial sums over `ranks`, and compute from them the loss and the seeds of all backwards."""

    stage: int
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        _check_counts(self.stage)
        _check_ranks("join", self.ranks)


@dataclass(frozen=True, slots=True)
class ReduceLoss:
    """Let every rank in `ranks` know the loss of the whole batch."""

    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        _check_ranks("reduce_loss", self.ranks)


@dataclass(frozen=True, slots=True)
class Update:
    """End the step: all sends are done and every gradient is final."""


Instruction: TypeAlias = (
    Load | Forward | Backward | BackwardInput | BackwardWeight | Send | Recv | AllReduce | Join | ReduceLoss | Update
)


@dataclass(frozen=True)
class RankProgram:
    """What one rank does in one step over a global batch of `rows` rows.

    A rank computes for at most one stage, as replica number `replica` of it; of a
    replica `width` ranks wide it is number `tensor`, and its computations meet those
    of the others. Where the stage is `synced`, they also meet those of the ranks with
    its number in all replicas that have rows of the same micro-batch. A rank that the
    plan leaves idle has stage None; its program is only `reduce_loss` and `update`, so
    that it too learns the loss.
    """

    rank: int
    rows: int
    micro_batches: int
    stage: int | None
    replica: int
    instructions: tuple[Instruction, ...]
    tensor: int = 0
    width: int = 1
    synced: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.tensor < self.width:
            raise ProgramError(f"rank {self.rank} is number {self.tensor} of {self.width} in its tensor group")
        if self.rank < 0 or self.replica < 0 or (self.stage is not None and self.stage < 0):
            raise ProgramError(f"rank {self.rank}, stage {self.stage} and replica {self.replica} must not be negative")
        if self.rows < 1 or self.micro_batches < 1:
            raise ProgramError(
                f"rank {self.rank} needs at least 1 row and 1 micro-batch, got {self.rows} and {self.micro_batches}"
            )


def dtype_bytes(dtype: str) -> int:
    """Return the bytes of one element; raise ProgramError for a dtype that is not known."""
    if dtype not in DTYPE_BYTES:
        raise ProgramError(f"dtype {dtype!r} is not known, expected one of {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[dtype]


def micro_batch_rows(rows: int, micro_batches: int) -> tuple[tuple[int, int], ...]:
    """Return the rows [lo, hi) of each micro-batch that has any: sizes differ by at most one, bigger first.

    >>> micro_batch_rows(7, 3), micro_batch_rows(2, 4)
    (((0, 3), (3, 5), (5, 7)), ((0, 1), (1, 2)))
    """
    small, bigger = divmod(rows, micro_batches)
    stops = [small * i + min(i, bigger) for i in range(micro_batches + 1)]
    return tuple((lo, hi) for lo, hi in zip(stops, stops[1:], strict=False) if lo < hi)


def replica_rows(lo: int, hi: int, replica: int, replicas: int) -> tuple[int, int]:
    """Return the rows [start, stop) of the micro-batch [lo, hi) that one replica computes; may be empty.

    >>> [replica_rows(10, 15, q, 3) for q in range(3)]
    [(10, 11), (11, 13), (13, 15)]
    """
    size = hi - lo
    return lo + replica * size // replicas, lo + (replica + 1) * size // replicas


def _check_counts(*counts: int) -> None:
    if min(counts) < 0:
        raise ProgramError(f"an instruction counts from 0, got {min(counts)}")


def _check_rows(start: int, stop: int) -> None:
    if not 0 <= start < stop:
        raise ProgramError(f"rows [{start}:{stop}] hold nothing, expected 0 <= start < stop")


def _check_ranks(what: str, ranks: tuple[int, ...]) -> None:
    if not ranks or list(ranks) != sorted(set(ranks)) or ranks[0] < 0:
        raise ProgramError(f"{what} needs ranks in rising order, each once, got {list(ranks)}")


def awaited_receives(program: RankProgram) -> dict[int, tuple[int, ...]]:
    """Return, for each instruction that computes, the receives that it waits for, all by index.

    A forward waits for the values of its micro-batch, a backward for their
    gradients; what it must wait for stands before it.
    """
    posted: dict[tuple[int, bool], list[int]] = {}
    awaited: dict[int, tuple[int, ...]] = {}
    for index, instruction in enumerate(program.instructions):
        match instruction:
            case Recv(micro_batch=k, gradient=gradient):
                posted.setdefault((k, gradient), []).append(index)
            case Forward(micro_batch=k):
                awaited[index] = tuple(posted.get((k, False), ()))
            case Backward(micro_batch=k) | BackwardInput(micro_batch=k):
                awaited[index] = tuple(posted.get((k, True), ()))
            case _:
                pass
    return awaited


def match_messages(programs: Mapping[int, RankProgram]) -> dict[tuple[int, int], tuple[int, int]]:
    """Return for each message, by (rank, index), its other end: the nth send of a directed pair is the nth receive.

    What has no other end is left out.
    """
    sends: dict[tuple[int, int], list[int]] = {}
    receives: dict[tuple[int, int], list[int]] = {}
    for rank, program in programs.items():
        for index, instruction in enumerate(program.instructions):
            match instruction:
                case Send(peer=peer):
                    sends.setdefault((rank, peer), []).append(index)
                case Recv(peer=peer):
                    receives.setdefault((peer, rank), []).append(index)
                case _:
                    pass
    ends: dict[tuple[int, int], tuple[int, int]] = {}
    for (source, target), indices in sends.items():
        for sent, received in zip(indices, receives.get((source, target), ()), strict=False):
            ends[source, sent] = target, received
            ends[target, received] = source, sent
    return ends
