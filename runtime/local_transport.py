"""All ranks inside one process and one thread: for notebooks, tests and debugging.

Each rank is a generator that yields when it has to wait (`result_of`); `run_all` gives them
turns. So a deadlock is seen at once, as a round in which nobody can go on, and names everyone
in it.

A message is copied when it is sent (and to the receiver's device when that differs), so that
neither side can ever see the other write; that costs one pass over memory, less than a socket.
Sums are added in rank order by whichever member comes last: the result does not depend on turns.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from efftra_fx.errors import EfftraError, RankFailed, TransportError, TransportTimeout

from .transport import (
    Data,
    Done,
    Handle,
    Incoming,
    Outgoing,
    check_sections,
    describe,
    problem_data,
    raise_apart,
    raise_problem,
)

T = TypeVar("T")
Blocked = tuple[Handle[Any], str]
NOTHING: Any = object()


def local_transports(world_size: int, devices: Sequence[torch.device | str] = ()) -> tuple[LocalTransport, ...]:
    """Make connected transports for so many ranks; `devices` gives each its own, else all are on the CPU."""
    if devices and len(devices) != world_size:
        raise TransportError(f"{world_size} ranks need as many devices, got {len(devices)}")
    hub = Hub(world_size)
    chosen = [torch.device(device) for device in devices] or [torch.device("cpu")] * world_size
    return tuple(LocalTransport(hub, rank, device) for rank, device in enumerate(chosen))


def run_all(ranks: Sequence[Generator[Blocked, None, T]]) -> list[T]:
    """Run generators in turns to their ends and return what they return, in order.

    Raise `TransportTimeout` when all that are left wait for one another; it names each of them,
    its instruction and whom it waits for. An error of one ends the others (their `finally`
    blocks run) and is raised as it is, with the rank in a note.
    """
    results: list[T] = [NOTHING] * len(ranks)
    waiting: dict[int, Blocked | None] = dict.fromkeys(range(len(ranks)))
    try:
        while waiting:
            moved = False
            for rank, blocked in list(waiting.items()):
                if blocked is not None and not blocked[0].ready():
                    continue
                moved = True
                try:
                    waiting[rank] = next(ranks[rank])
                except StopIteration as stop:
                    results[rank] = stop.value
                    del waiting[rank]
                except Exception as error:
                    error.add_note(f"on rank {rank} of {len(ranks)}")
                    raise
            if not moved:
                raise TransportTimeout(deadlock_text(waiting))
    finally:
        for generator in ranks:
            generator.close()
    return results


def forget(transports: Sequence[LocalTransport]) -> None:
    """Drop what ranks that were ended in the middle have sent, expected and begun; they may start anew."""
    for transport in transports:
        hub = transport.hub
        for left in (hub.sent, hub.posted, hub.meetings, transport.counts):
            left.clear()


def deadlock_text(waiting: dict[int, Blocked | None]) -> str:
    """Say who waits for whom."""
    lines = [
        f"rank {rank} waits in {blocked[1] or 'a wait'} for {blocked[0].waits_for}"
        for rank, blocked in waiting.items()
        if blocked is not None
    ]
    return "no rank can go on: " + "; ".join(lines)


class Hub:
    """What the ranks of one process share."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.sent: dict[tuple[int, int, int], deque[Tensor]] = {}  # (from, to, tag): not yet received
        self.posted: dict[tuple[int, int, int], deque[LocalReceive]] = {}  # (from, to, tag): not yet sent
        self.meetings: dict[tuple[tuple[int, ...], int], Meeting] = {}  # (ranks, how many before)
        self.failure: tuple[int, str] | None = None

    def check(self, rank: int) -> None:
        """Raise if another rank has failed."""
        if self.failure is not None and self.failure[0] != rank:
            raise RankFailed(f"rank {self.failure[0]} failed: {self.failure[1]}")


class LocalReceive:
    """A posted receive."""

    __slots__ = ("hub", "rank", "tensor", "wanted")

    def __init__(self, hub: Hub, rank: int, wanted: Incoming) -> None:
        self.hub, self.rank, self.wanted = hub, rank, wanted
        self.tensor: Tensor | None = None

    @property
    def waits_for(self) -> str:
        """Name the sender."""
        return f"rank {self.wanted.peer} (tag {self.wanted.tag})"

    def ready(self) -> bool:
        """Say whether the message, or a failure, is there."""
        return self.tensor is not None or self.hub.failure is not None

    def take(self, tensor: Tensor) -> None:
        """Accept the message, or raise `TransportError` if it is not the one that was expected."""
        wanted = self.wanted
        if tuple(tensor.shape) != tuple(wanted.shape) or tensor.dtype != wanted.dtype:
            raise TransportError(
                f"rank {self.rank} expected {wanted.dtype} {list(wanted.shape)} from rank {wanted.peer} "
                f"(tag {wanted.tag}), got {tensor.dtype} {list(tensor.shape)}"
            )
        self.tensor = tensor if tensor.device == wanted.device else tensor.to(wanted.device)

    def wait(self, what: str = "") -> Tensor:
        """Return the message; raise `TransportTimeout` if it is not there, for nobody could send it now."""
        if self.tensor is None:
            self.hub.check(self.rank)
            raise TransportTimeout(never_text(self.rank, what, self.waits_for))
        return self.tensor


class Meeting:
    """Something that all members of a group bring a part to, each once."""

    def __init__(self, hub: Hub, ranks: tuple[int, ...], finish: Callable[[list[Any]], Any]) -> None:
        self.hub, self.ranks, self.finish = hub, ranks, finish
        self.parts: dict[int, Any] = {}
        self.result: Any = NOTHING

    def bring(self, rank: int, part: Any) -> None:
        """Add a member's part; the last one makes the result."""
        self.parts[rank] = part
        if len(self.parts) == len(self.ranks):
            self.result = self.finish([self.parts[member] for member in self.ranks])


class LocalMeeting:
    """One member's handle on a meeting; `conclude` turns the common result into this member's."""

    __slots__ = ("conclude", "meeting", "rank")

    def __init__(self, meeting: Meeting, rank: int, conclude: Callable[[Any], Any]) -> None:
        self.meeting, self.rank, self.conclude = meeting, rank, conclude

    @property
    def waits_for(self) -> str:
        """Name the members that are missing."""
        return describe([rank for rank in self.meeting.ranks if rank not in self.meeting.parts])

    def ready(self) -> bool:
        """Say whether the result, or a failure, is there."""
        return self.meeting.result is not NOTHING or self.meeting.hub.failure is not None

    def wait(self, what: str = "") -> Any:
        """Return the result; raise `TransportTimeout` if it is not there, for nobody could bring a part now."""
        if self.meeting.result is NOTHING:
            self.meeting.hub.check(self.rank)
            raise TransportTimeout(never_text(self.rank, what, self.waits_for))
        return self.conclude(self.meeting.result)


class LocalTransport:
    """One rank's end of a hub; make them with `local_transports`."""

    def __init__(self, hub: Hub, rank: int, device: torch.device) -> None:
        self.hub, self.rank, self.world_size, self.device = hub, rank, hub.world_size, device
        self.timeout_s = 0.0
        self.everyone = tuple(range(hub.world_size))
        self.counts: dict[tuple[int, ...], int] = {}

    def prepare(self, groups: Sequence[tuple[int, ...]], pairs: Sequence[tuple[int, int]] = ()) -> None:
        """Do nothing: everyone is here."""

    def send(self, tensor: Tensor, peer: int, tag: int) -> Done:
        """Copy the tensor and hand it over."""
        self.hub.check(self.rank)
        self.check_peer(peer)
        key = (self.rank, peer, tag)
        message = tensor.detach().clone(memory_format=torch.contiguous_format)
        posted = self.hub.posted.get(key)
        if posted:
            posted.popleft().take(message)
        else:
            self.hub.sent.setdefault(key, deque()).append(message)
        return Done(tensor)

    def recv(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, peer: int, tag: int
    ) -> LocalReceive:
        """Take a message that was sent, or leave word that one is expected."""
        self.hub.check(self.rank)
        self.check_peer(peer)
        key = (peer, self.rank, tag)
        handle = LocalReceive(self.hub, self.rank, Incoming(shape, dtype, device, peer, tag))
        sent = self.hub.sent.get(key)
        if sent:
            handle.take(sent.popleft())
        else:
            self.hub.posted.setdefault(key, deque()).append(handle)
        return handle

    def exchange(
        self, sends: Sequence[Outgoing], recvs: Sequence[Incoming]
    ) -> tuple[list[Handle[Tensor]], list[Handle[Tensor]]]:
        """Post the receives, then send."""
        received: list[Handle[Tensor]] = [self.recv(*incoming) for incoming in recvs]
        return [self.send(*outgoing) for outgoing in sends], received

    def all_reduce(self, tensor: Tensor, ranks: tuple[int, ...]) -> Handle[Tensor]:
        """Sum in rank order."""
        return self.meet(ranks, tensor, sum_in_place, lambda _: tensor)

    def all_gather(self, tensor: Tensor, counts: Sequence[int], ranks: tuple[int, ...]) -> Handle[Tensor]:
        """Copy all together, and once more for each."""
        check_sections(tensor, counts, ranks, self.rank, gather=True)
        return self.meet(ranks, (tensor, tuple(counts)), join_sections, lambda whole: whole.to(self.device, copy=True))

    def reduce_scatter(self, tensor: Tensor, counts: Sequence[int], ranks: tuple[int, ...]) -> Handle[Tensor]:
        """Sum in rank order and copy each its section."""
        check_sections(tensor, counts, ranks, self.rank, gather=False)
        place = ranks.index(self.rank)
        return self.meet(
            ranks, (tensor, tuple(counts)), sum_sections, lambda parts: parts[place].to(self.device, copy=True)
        )

    def all_gather_data(self, data: Data) -> Handle[list[Data]]:
        """Give everyone a copy of everyone's data."""
        return self.meet(self.everyone, json.dumps(data), list, lambda texts: [json.loads(text) for text in texts])

    def broadcast_data(self, data: Data, root: int = 0) -> Handle[Data]:
        """Give everyone a copy of the root's data."""
        self.check_peer(root)
        text = json.dumps(data) if self.rank == root else ""
        return self.meet(self.everyone, text, lambda texts: texts[root], json.loads)

    def agree(self, problem: str | EfftraError | None, step: int) -> Handle[None]:
        """Ask everyone; see `Transport.agree`."""

        def conclude(parts: list[tuple[int, Data]]) -> None:
            raise_problem([problem for _, problem in parts])
            steps = [step for step, _ in parts]
            if min(steps) != max(steps):
                raise_apart(self.rank, step, min(steps), max(steps))

        return self.meet(self.everyone, (step, problem_data(problem)), list, conclude)

    def drain(self, what: str = "end of step") -> None:
        """Do nothing: what was sent was copied."""

    def fail(self, error: BaseException) -> None:
        """Let every other rank's next call raise."""
        if self.hub.failure is None:
            self.hub.failure = (self.rank, f"{type(error).__name__}: {error}")

    def close(self) -> None:
        """Do nothing."""

    def meet(
        self,
        ranks: tuple[int, ...],
        part: Any,
        finish: Callable[[list[Any]], Any],
        conclude: Callable[[Any], Any],
    ) -> LocalMeeting:
        """Bring a part to this rank's next meeting of the group."""
        self.hub.check(self.rank)
        if self.rank not in ranks or not 0 <= min(ranks) <= max(ranks) < self.world_size:
            raise TransportError(f"rank {self.rank} of {self.world_size} cannot meet {describe(ranks)}")
        count = self.counts.get(ranks, 0)
        self.counts[ranks] = count + 1
        key = (ranks, count)
        meeting = self.hub.meetings.get(key)
        if meeting is None:
            meeting = self.hub.meetings[key] = Meeting(self.hub, ranks, finish)
        meeting.bring(self.rank, part)
        if meeting.result is not NOTHING:
            del self.hub.meetings[key]
        return LocalMeeting(meeting, self.rank, conclude)

    def check_peer(self, peer: int) -> None:
        """Raise if there is no such rank."""
        if not 0 <= peer < self.world_size:
            raise TransportError(f"rank {self.rank} cannot reach rank {peer}: there are {self.world_size} ranks")


def sum_in_place(tensors: list[Tensor]) -> None:
    """Add in order and give everyone the sum; raise `TransportError` if they are not alike."""
    first = tensors[0]
    for tensor in tensors:
        if tensor.shape != first.shape or tensor.dtype != first.dtype:
            raise TransportError(
                f"a sum needs like tensors, got {first.dtype} {list(first.shape)} and "
                f"{tensor.dtype} {list(tensor.shape)}"
            )
    total = first.clone()
    for tensor in tensors[1:]:
        total += tensor.to(total.device)
    for tensor in tensors:
        tensor.copy_(total)


def join_sections(brought: list[tuple[Tensor, tuple[int, ...]]]) -> Tensor:
    """Lay the elements of all one behind the other; raise `TransportError` if they are not alike."""
    check_alike("gather", [(tensor.dtype, counts) for tensor, counts in brought])
    return torch.cat([tensor.detach().reshape(-1).to(brought[0][0].device) for tensor, _ in brought])


def sum_sections(brought: list[tuple[Tensor, tuple[int, ...]]]) -> tuple[Tensor, ...]:
    """Add in order and take the sum apart; raise `TransportError` if they are not alike."""
    check_alike("scatter", [(tensor.dtype, counts) for tensor, counts in brought])
    first, counts = brought[0]
    total = first.detach().reshape(-1).clone()
    for tensor, _ in brought[1:]:
        total += tensor.reshape(-1).to(total.device)
    return torch.split(total, list(counts))


def check_alike(what: str, brought: list[tuple[torch.dtype, tuple[int, ...]]]) -> None:
    """Raise `TransportError` if members brought different things."""
    for dtype, counts in brought[1:]:
        if (dtype, counts) != brought[0]:
            raise TransportError(
                f"a {what} needs like tensors, got {brought[0][0]} of {list(brought[0][1])} elements and "
                f"{dtype} of {list(counts)}"
            )


def never_text(rank: int, what: str, waits_for: str) -> str:
    """Say that a wait could never end."""
    return f"rank {rank} waited in {what or 'a wait'} for {waits_for}, which has not acted and cannot act meanwhile"
