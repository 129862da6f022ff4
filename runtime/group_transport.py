"""Ranks in processes of their own, over torch.distributed.

This is what every such transport shares: control data over a Gloo group, agreement, failure.

What Gloo (torch 2.13) does, found by trying it, and what follows:

- A receive that is posted early saves a round trip: data moves only once the receiver is ready.
- `is_completed` of a message stays False until it is waited for, so sends are waited for late
  (`drain`), or when several more to the same peer have been started.
- `abort` wakes nobody, but a wait that runs out of time closes the group's connections and wakes
  every wait on them, here and at the peers, whichever thread it happens in. That is how a failing
  rank ends the waits of all (`break_group`).
- The reason of a closed connection is not told; the lifeline tells it.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from efftra_fx.errors import EfftraError, RankFailed, TransportError, TransportTimeout

from .lifeline import Lifeline
from .transport import (
    Data,
    Done,
    Handle,
    Then,
    describe,
    error_class,
    problem_data,
    raise_apart,
    raise_problem,
)

Group = Any  # torch.distributed.ProcessGroup; its methods used here are not typed in all versions
NEWS_LIMIT_S = 3.0  # how long to wait for the reason of a closed connection
BREAK_TAG = 2**30
GATHER_TAG, SCATTER_TAG = 2**30 + 1, 2**30 + 2


class GroupHandle:
    """A message or a sum under way; `result` is its tensor."""

    __slots__ = ("peers", "result", "transport", "work")

    def __init__(self, transport: GroupTransport, work: Any, result: Tensor, peers: tuple[int, ...]) -> None:
        self.transport, self.work, self.result, self.peers = transport, work, result, peers

    @property
    def waits_for(self) -> str:
        """Name the other ranks."""
        return describe([rank for rank in self.peers if rank != self.transport.rank])

    def ready(self) -> bool:
        """Return True: other ranks do not need this thread."""
        return True

    def wait(self, what: str = "") -> Tensor:
        """Block until done; see `Handle.wait`."""
        work = self.work
        if work is not None:
            try:
                work.wait(self.transport.limit)
            except (RuntimeError, OSError) as error:
                self.transport.explain(error, what, self.waits_for)
            self.work = None
        return self.result


class Pieces:
    """Several pieces of work that make one; the last step is taken when all are done."""

    __slots__ = ("finish", "works")

    def __init__(self, works: Sequence[Any], finish: Callable[[], None]) -> None:
        self.works, self.finish = works, finish

    def wait(self, limit: timedelta) -> None:
        """Wait for each, then take the last step."""
        for work in self.works:
            work.wait(limit)
        self.finish()


class Agreement:
    """A handle on `agree`: one small sum; only if that shows a problem is its text exchanged."""

    __slots__ = ("handle", "problem", "step", "transport")

    def __init__(self, transport: GroupTransport, problem: str | EfftraError | None, step: int) -> None:
        self.transport, self.problem, self.step = transport, problem, step
        flags = torch.zeros(transport.world_size, 2, dtype=torch.int64)  # a row a rank: the sum is all rows
        flags[transport.rank, 0], flags[transport.rank, 1] = problem is not None, step
        self.handle = transport.sum_of_all(flags)

    @property
    def waits_for(self) -> str:
        """Name the other ranks."""
        return self.handle.waits_for

    def ready(self) -> bool:
        """Return True."""
        return True

    def wait(self, what: str = "") -> None:
        """Raise the same error everywhere if anyone has a problem."""
        with self.transport.lifeline.patience():
            flags, steps = self.handle.wait(what or f"agreement on step {self.step}").t().tolist()
        if any(flags):
            raise_problem(self.transport.all_gather_data(problem_data(self.problem)).wait(what))
        if min(steps) != max(steps):
            raise_apart(self.transport.rank, self.step, min(steps), max(steps))


class GroupTransport:
    """What all transports over torch.distributed share.

    `control` is a Gloo group of all ranks, made for this transport, which then owns it.
    """

    def __init__(self, control: Group, device: torch.device, timeout_s: float, host: str) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.everyone = tuple(range(self.world_size))
        self.device, self.timeout_s = device, timeout_s
        self.limit = timedelta(seconds=timeout_s)
        self.control = control
        self.groups: dict[tuple[int, ...], Group] = {}
        self.own_groups: list[Group] = [control]
        self.broken: EfftraError | None = None
        self.lifeline = Lifeline(self.rank, host)
        self.start_lifeline()

    def start_lifeline(self) -> None:
        """Exchange addresses and begin to watch."""
        token = self.broadcast_data(secrets.token_hex(16)).wait()
        addresses = [(host, port) for host, port in self.all_gather_data(self.lifeline.address).wait()]
        self.lifeline.start(addresses, token, self.break_all)

    def new_group(self, ranks: tuple[int, ...], backend: str) -> Group:
        """Make a group of our own; a collective call of all ranks, members or not."""
        group = new_group(ranks, backend, self.timeout_s)
        if self.rank in ranks:
            self.own_groups.append(group)
        return group

    def all_gather_data(self, data: Data) -> Done:
        """Gather as bytes; blocks."""
        return Done(gather(self.control, data, self.finish))

    def broadcast_data(self, data: Data, root: int = 0) -> Done:
        """Send the root's data; blocks."""
        self.check_peer(root)
        return Done(gather(self.control, data if self.rank == root else None, self.finish)[root])

    def finish(self, work: Any, what: str) -> None:
        """Wait for a collective of all ranks."""
        with self.lifeline.patience():
            GroupHandle(self, work, torch.empty(0), self.everyone).wait(what)

    def agree(self, problem: str | EfftraError | None, step: int) -> Agreement:
        """Ask everyone; see `Transport.agree`."""
        self.check()
        return Agreement(self, problem, step)

    def sum_of_all(self, small: Tensor) -> GroupHandle:
        """Start a sum of a small tensor in host memory over all ranks."""
        return GroupHandle(self, self.control.allreduce([small]), small, self.everyone)

    def check(self) -> None:
        """Raise if this transport is of no more use, or another rank has failed."""
        if self.broken is not None:
            raise self.broken
        if self.lifeline.failure:
            raise self.remember(error_class(self.lifeline.kind)(self.lifeline.failure))

    def check_peer(self, peer: int) -> None:
        """Raise if there is no such rank."""
        if not 0 <= peer < self.world_size:
            raise TransportError(f"rank {self.rank} cannot reach rank {peer}: there are {self.world_size} ranks")

    def explain(self, error: RuntimeError | OSError, what: str, waits_for: str) -> NoReturn:
        """Turn a failed wait into an error that says who failed, and let all ranks end."""
        place = f"rank {self.rank} waited in {what or 'a wait'} for {waits_for}"
        timed_out = "timed out" in str(error).lower()
        if not timed_out:
            self.lifeline.await_news(NEWS_LIMIT_S)
        if self.lifeline.failure:
            kind = error_class(self.lifeline.kind)
            text = f"{self.lifeline.failure} ({place})" if kind is RankFailed else self.lifeline.failure
            raise self.remember(kind(text)) from error
        if timed_out:
            others = self.lifeline.others()
            doing = f" ({others})" if others else ""
            limit = f"nothing came within {self.timeout_s:g} s{doing}"
            text = f"{place}, but {limit}; see what those ranks do, or raise timeout="
            self.fail(TransportTimeout(text))
        else:
            gone = sorted(self.lifeline.left)
            reason = f"{describe(gone)} ended before" if gone else str(error)
            self.fail(TransportError(f"{place}, but the connection ended: {reason}"))
        assert self.broken is not None
        raise self.broken from error

    def fail(self, error: BaseException) -> None:
        """Tell all and end all waits; the first call counts."""
        if self.broken is not None:
            return
        if not isinstance(error, RankFailed):
            self.lifeline.report(f"rank {self.rank} failed: {type(error).__name__}: {error}")
        self.remember(error if isinstance(error, EfftraError) else RankFailed(self.lifeline.failure))

    def remember(self, error: EfftraError) -> EfftraError:
        """Keep the error for later calls, and end all waits on our groups."""
        self.broken = error
        self.break_all()
        return error

    def break_all(self) -> None:
        """End every wait on our groups, here and at the peers; called from any thread."""
        for group in list(self.own_groups):
            break_group(group)

    def close(self) -> None:
        """Destroy our own groups."""
        self.lifeline.close()
        for group in self.own_groups:
            dist.destroy_process_group(group)
        self.own_groups.clear()
        self.groups.clear()


def plain_tensor(tensor: Tensor) -> Tensor:
    """Give the tensor as plain contiguous memory without history: itself, or a copy."""
    tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor.contiguous()


def in_place(handle: GroupHandle, tensor: Tensor) -> Handle[Tensor]:
    """Let a handle on a sum of `tensor`, or of a plain copy of it, end with the sum in `tensor`."""
    if handle.result.data_ptr() != tensor.data_ptr():
        return Then(handle, tensor.copy_)
    handle.result = tensor
    return handle


def gather_by_messages(group: Group, plain: Tensor, counts: Sequence[int], place: int) -> tuple[Pieces, Tensor]:
    """Start sending a flat tensor to all others of a Gloo group and taking theirs: no byte travels twice."""
    whole = torch.empty(sum(counts), dtype=plain.dtype)
    sections = whole.split(list(counts))
    others = [other for other in range(len(counts)) if other != place]
    works = [group.recv([sections[other]], other, GATHER_TAG) for other in others if counts[other]]
    works += [group.send([plain], other, GATHER_TAG) for other in others if counts[place]]
    sections[place].copy_(plain)
    return Pieces(works, lambda: None), whole


def scatter_by_messages(group: Group, plain: Tensor, counts: Sequence[int], place: int) -> tuple[Pieces, Tensor]:
    """Start sending each other of a Gloo group its section of a flat tensor; what comes is added in rank order."""
    sections = plain.split(list(counts))
    others = [other for other in range(len(counts)) if other != place]
    came = {other: torch.empty(counts[place], dtype=plain.dtype) for other in others}
    works = [group.recv([came[other]], other, SCATTER_TAG) for other in others if counts[place]]
    works += [group.send([sections[other]], other, SCATTER_TAG) for other in others if counts[other]]
    total = torch.zeros(counts[place], dtype=plain.dtype)

    def add() -> None:
        for number in range(len(counts)):
            part = sections[place] if number == place else came[number]
            total.copy_(part) if number == 0 else total.add_(part)

    return Pieces(works, add), total


def break_group(group: Group) -> None:
    """Close a Gloo group's connections: wait for what never comes, for a thousandth of a second."""
    others = [other for other in range(group.size()) if other != group.rank()]
    if not others:
        return
    try:
        group.recv([torch.empty(1)], others[0], BREAK_TAG).wait(timedelta(milliseconds=1))
    except RuntimeError:
        pass  # as intended


def new_group(ranks: Sequence[int], backend: str, timeout_s: float) -> Group:
    """Make a group; a collective call of all ranks."""
    # twice the limit, so that it is our own wait that runs out, with our message
    return dist.new_group(list(ranks), backend=backend, timeout=timedelta(seconds=2 * timeout_s))


def gather(group: Group, data: Data, finish: Callable[[Any, str], None]) -> list[Data]:
    """Give every member every member's plain data, as bytes; `finish` waits for a piece of work."""
    mine = torch.frombuffer(bytearray(json.dumps(data).encode()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(group.size())]
    finish(group.allgather([sizes], [torch.tensor([len(mine)])]), "gathering sizes")
    longest = max(int(size) for size in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: len(mine)] = mine
    parts = [torch.zeros(longest, dtype=torch.uint8) for _ in sizes]
    finish(group.allgather([parts], [padded]), "gathering data")
    return [json.loads(bytes(part[: int(size)].tolist())) for part, size in zip(parts, sizes, strict=True)]
