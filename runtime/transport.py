"""What a rank may ask of the others: messages, sums, agreement; the same over every means of transport.

Nothing here blocks but `Handle.wait`. `Handle.ready` says whether waiting is the right thing to
do next: in one process, where all ranks share a thread, a wait for a value that nobody has sent
could never end, so a rank gives the thread up instead (`result_of`); between processes it is
always right.

Order: on each directed pair of ranks, the n-th send with a tag meets the n-th receive with that
tag. Tags may differ from message to message; over NCCL, which knows none, the order of all sends
from one rank to another must be the order of the receives.

Ownership: a tensor that is sent must not be written to until its handle is ready or `drain` has
returned; a tensor that was received belongs to the receiver alone.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple, NoReturn, Protocol, TypeVar

import torch
from torch import Tensor

from efftra_fx import errors
from efftra_fx.errors import EfftraError, InputError, TransportError

T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")

Data = Any
"""Plain data: None, bool, int, float, str, and lists and string-keyed dictionaries of them."""


class Handle(Protocol[T_co]):
    """Something under way."""

    @property
    def waits_for(self) -> str:
        """Who has to act before this is done, for messages: `rank 1 (tag 7)`."""
        ...

    def ready(self) -> bool:
        """Say whether `wait` may be called without giving other ranks of this process a turn."""
        ...

    def wait(self, what: str = "") -> T_co:
        """Return the result once it is there; a receive gives its tensor, a sum the tensor it was given.

        On a GPU the current stream waits, not this thread. Raise `TransportTimeout` when the
        time limit passes (it names this rank, `what` and `waits_for`) and `RankFailed` when
        another rank has failed or is lost.
        """
        ...


class Outgoing(NamedTuple):
    """A message to send."""

    tensor: Tensor
    peer: int
    tag: int


class Incoming(NamedTuple):
    """A message to receive."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    peer: int
    tag: int


class Transport(Protocol):
    """One rank's connection to all ranks of a plan."""

    rank: int
    world_size: int
    device: torch.device  # where this rank computes
    timeout_s: float

    def prepare(self, groups: Sequence[tuple[int, ...]], pairs: Sequence[tuple[int, int]] = ()) -> None:
        """Make ready for sums over `groups` and messages between `pairs`; a collective call.

        Every rank calls it with the same arguments in the same order. Known ones cost nothing.
        """
        ...

    def send(self, tensor: Tensor, peer: int, tag: int) -> Handle[Tensor]:
        """Start sending; never blocks on the peer's computing. The tensor is kept alive until it has gone."""
        ...

    def recv(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, peer: int, tag: int
    ) -> Handle[Tensor]:
        """Post a receive of a contiguous tensor."""
        ...

    def exchange(
        self, sends: Sequence[Outgoing], recvs: Sequence[Incoming]
    ) -> tuple[list[Handle[Tensor]], list[Handle[Tensor]]]:
        """Start a group of messages that may face each other; handles in the order given, sends first."""
        ...

    def all_reduce(self, tensor: Tensor, ranks: tuple[int, ...]) -> Handle[Tensor]:
        """Start summing over `ranks` (ascending, prepared before), in place; the same bits on every rank."""
        ...

    def all_gather(self, tensor: Tensor, counts: Sequence[int], ranks: tuple[int, ...]) -> Handle[Tensor]:
        """Start putting together the elements of `ranks` (as for a sum), so many of each, in rank order.

        The result is a flat tensor of its own; the given one must not change before it is there.
        """
        ...

    def reduce_scatter(self, tensor: Tensor, counts: Sequence[int], ranks: tuple[int, ...]) -> Handle[Tensor]:
        """Start summing over `ranks` and give each its section of the sum's elements, of `counts` elements each.

        The result is a flat tensor of its own; the given one, contiguous, may be overwritten.
        """
        ...

    def all_gather_data(self, data: Data) -> Handle[list[Data]]:
        """Give every rank every rank's small plain data, in rank order; a collective call."""
        ...

    def broadcast_data(self, data: Data, root: int = 0) -> Handle[Data]:
        """Give every rank the root's small plain data; what the others pass is ignored."""
        ...

    def agree(self, problem: str | EfftraError | None, step: int) -> Handle[None]:
        """Start asking all ranks whether anyone has a problem with step number `step`.

        Waiting for the handle raises, on every rank, the lowest complaining rank's error with
        its rank named; all ranks stay usable. Ranks that are not at the same step are an error.
        """
        ...

    def drain(self, what: str = "end of step") -> None:
        """Return once everything sent may be written to again; call it at the end of each step."""
        ...

    def fail(self, error: BaseException) -> None:
        """Tell all ranks that this one cannot go on; their waits raise `RankFailed` within seconds.

        The transport is of no more use afterwards: make a new program.
        """
        ...

    def close(self) -> None:
        """Give back what was made; leaves alone what the user made."""
        ...


def result_of(handle: Handle[T], what: str = "") -> Generator[tuple[Handle[Any], str], None, T]:
    """Wait as a rank that shares its thread with others does: yield until ready, then take the result."""
    while not handle.ready():
        yield handle, what
    return handle.wait(what)


class Done:
    """A handle for what was finished at once."""

    __slots__ = ("value",)
    waits_for = "nobody"

    def __init__(self, value: Any) -> None:
        self.value = value

    def ready(self) -> bool:
        """Return True."""
        return True

    def wait(self, what: str = "") -> Any:
        """Return the value."""
        return self.value


class Then:
    """A handle whose result is made into another one, once, when it is waited for."""

    __slots__ = ("finish", "handle", "result")

    def __init__(self, handle: Handle[Tensor], finish: Callable[[Tensor], Tensor]) -> None:
        self.handle, self.finish = handle, finish
        self.result: Tensor | None = None

    @property
    def waits_for(self) -> str:
        """Name the other ranks."""
        return self.handle.waits_for

    def ready(self) -> bool:
        """Say what the first handle says."""
        return self.handle.ready()

    def wait(self, what: str = "") -> Tensor:
        """Wait, and return what was made of the result."""
        if self.result is None:
            self.result = self.finish(self.handle.wait(what))
        return self.result


def check_sections(tensor: Tensor, counts: Sequence[int], ranks: tuple[int, ...], rank: int, gather: bool) -> None:
    """Raise TransportError unless the counts are one a rank and fit the tensor: one section of it, or all."""
    if len(counts) != len(ranks) or rank not in ranks or min(counts) < 0:
        raise TransportError(f"rank {rank} cannot exchange sections of {list(counts)} elements with {describe(ranks)}")
    wanted = counts[ranks.index(rank)] if gather else sum(counts)
    if tensor.numel() != wanted:
        what = "gather" if gather else "scatter"
        raise TransportError(
            f"rank {rank} brings {tensor.numel()} elements to a {what} of {list(counts)} over {describe(ranks)}, "
            f"expected {wanted}"
        )


def raise_problem(problems: Sequence[Data]) -> None:
    """Raise the first problem of a list with one entry (`None` or what `problem_data` gave) a rank."""
    for rank, problem in enumerate(problems):
        if problem is not None:
            raise error_class(problem["kind"])(f"rank {rank}: {problem['text']}")


def problem_data(problem: str | EfftraError | None) -> Data:
    """Turn a problem into plain data that `raise_problem` understands."""
    if problem is None:
        return None
    kind = InputError.__name__ if isinstance(problem, str) else type(problem).__name__
    return {"kind": kind, "text": str(problem)}


def error_class(name: str) -> type[EfftraError]:
    """Find an error of this package by name; other names mean `InputError`."""
    found = getattr(errors, name, None)
    return found if isinstance(found, type) and issubclass(found, EfftraError) else InputError


def raise_apart(rank: int, step: int, lowest: int, highest: int) -> NoReturn:
    """Raise because ranks do not make the same calls."""
    raise InputError(
        f"rank {rank} is at step {step} but others are at steps {lowest} to {highest}; "
        "every rank must make the same calls in the same order"
    )


def describe(ranks: Sequence[int]) -> str:
    """Name ranks in a message: `rank 3` or `ranks 0, 2`.

    >>> describe((0, 2))
    'ranks 0, 2'
    """
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
