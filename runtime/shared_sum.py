"""Sums, gathers and scatters over ranks of one machine, through memory that they share instead of sockets.

Small tensors travel over sockets between each two members, and each member adds all parts itself:
nothing has to be awaited but the others' parts. Large ones go through shared memory in chunks
that stay in the processors' caches:

    every member   copies its chunk into its slot          ─┐ all have
    every member   adds its share of all slots, in order   ─┤ all have
    every member   copies the sum out                      ─┘ next chunk, other slots

A gather copies shares in and all of them out; a scatter copies in the chunks of all sections and adds
those of the own one. Both need one meeting a chunk: who writes a set of slots again has met the others
since they have read it.

A thread a group does that, so that it goes on while the rank computes. Parts are added in rank
order, so that the bits are those of `sum_in_place`, on every member and in every run.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
from torch import Tensor

from .neighbours import Party

SMALL_BYTES = 4096
CHUNK_BYTES = 1 << 20
TOTAL_BYTES = 32 << 20  # of shared memory a group, at most
CHANNELS = 2  # for small tensors, and for large ones, where a thread may begin to wait long before the rank does


class SharedSum:
    """One member's end of a group; a sum is started by all members in the same order."""

    def __init__(self, party: Party, timeout_s: float) -> None:
        self.party = party
        self.members, self.place = party.members, party.place
        small, large = (party.peers(channel, (1 + channel) * timeout_s) for channel in range(CHANNELS))
        self.small, self.large = list(small.values()), list(large.values())
        self.timeout_s = timeout_s
        assert party.memory is not None
        self.chunk_bytes = chunk_bytes(len(self.members))
        pieces = list(torch.split(party.memory, self.chunk_bytes))
        half = len(self.members) + 1
        self.slots = [pieces[:half], pieces[half:]]  # two sets; in each a slot a member, then one for the sum
        self.turn = 0
        self.unread: deque[SmallExchange] = deque()
        self.jobs: queue.SimpleQueue[LargeExchange | None] = queue.SimpleQueue()
        self.worker = threading.Thread(target=self.work, name=f"sums over {self.members}", daemon=True)

    def start(self, tensor: Tensor) -> SmallExchange | LargeExchange:
        """Start a sum of contiguous host memory, in place."""
        if is_small(tensor, tensor.numel()):
            everyone = [bytes_of(tensor)] * len(self.members)
            return self.start_small(everyone, len(everyone[0]), lambda parts: add_parts(parts, tensor.view(-1)))
        return self.start_large(lambda: self.sum_large(tensor))

    def gather(self, tensor: Tensor, counts: Sequence[int]) -> tuple[SmallExchange | LargeExchange, Tensor]:
        """Start putting flat host memory of all members together; return what to wait for, and the result."""
        whole = torch.empty(sum(counts), dtype=tensor.dtype)
        if not is_small(tensor, sum(counts)):
            return self.start_large(lambda: self.gather_large(tensor, counts, whole)), whole
        sizes = [count * tensor.element_size() for count in counts]

        def join(parts: list[Tensor]) -> None:
            torch.cat([part.view(tensor.dtype) for part in parts], out=whole)

        return self.start_small([bytes_of(tensor)] * len(self.members), sizes, join), whole

    def scatter(self, tensor: Tensor, counts: Sequence[int]) -> tuple[SmallExchange | LargeExchange, Tensor]:
        """Start summing flat host memory; return what to wait for, and the own section of the sum."""
        own = torch.empty(counts[self.place], dtype=tensor.dtype)
        if not is_small(tensor, sum(counts)):
            return self.start_large(lambda: self.scatter_large(tensor, counts, own)), own
        mine = [bytes_of(section) for section in tensor.split(list(counts))]
        return self.start_small(mine, len(mine[self.place]), lambda parts: add_parts(parts, own)), own

    def start_small(
        self, mine: list[bytes], sizes: int | list[int], finish: Callable[[list[Tensor]], None]
    ) -> SmallExchange:
        """Send each member its bytes; `finish` gets the bytes of all, of these sizes."""
        expected = [sizes] * len(self.members) if isinstance(sizes, int) else sizes
        small = SmallExchange(self, mine[self.place], expected, finish)
        self.unread.append(small)
        places = [place for place in range(len(self.members)) if place != self.place]
        for place, peer in zip(places, self.small, strict=True):
            peer.send(mine[place])
        return small

    def start_large(self, carry_out: Callable[[], None]) -> LargeExchange:
        """Leave an exchange to the thread."""
        large = LargeExchange(carry_out)
        if self.worker.ident is None:
            self.worker.start()
        self.jobs.put(large)
        return large

    def read_until(self, wanted: SmallExchange) -> None:
        """Finish small exchanges in order, up to one."""
        while not wanted.done:
            self.unread[0].read()
            self.unread.popleft()

    def work(self) -> None:
        """Carry out large exchanges in order: the body of the thread."""
        while self.carry_out_next():
            pass

    def carry_out_next(self) -> bool:
        """Wait for a large exchange and carry it out, keeping nothing of it; say whether there was one."""
        if (job := self.jobs.get()) is None:
            return False
        try:
            job.carry_out()
        except OSError as error:
            job.error = error
        job.finished.set()
        return True

    def next_slots(self, dtype: torch.dtype) -> list[Tensor]:
        """Return the slots of the members and that of the sum; the other set the next time."""
        slots = [slot.view(dtype) for slot in self.slots[self.turn]]
        self.turn = 1 - self.turn
        return slots

    def sum_large(self, tensor: Tensor) -> None:
        """Sum in chunks; see the drawing above."""
        flat = tensor.view(-1)
        count, place = len(self.members), self.place
        for chunk in torch.split(flat, self.chunk_bytes // flat.element_size()):
            size = len(chunk)
            *parts, total = [slot[:size] for slot in self.next_slots(flat.dtype)]
            parts[place].copy_(chunk)
            self.all_have()
            first, stop = place * size // count, (place + 1) * size // count
            add_parts([part[first:stop] for part in parts], total[first:stop])
            self.all_have()
            chunk.copy_(total)

    def gather_large(self, tensor: Tensor, counts: Sequence[int], whole: Tensor) -> None:
        """Gather in chunks of each share."""
        sections, step = whole.split(list(counts)), self.chunk_bytes // tensor.element_size()
        for start in range(0, max(counts), step):
            slots = self.next_slots(tensor.dtype)
            chunk = tensor[start : start + step]
            slots[self.place][: len(chunk)].copy_(chunk)
            self.all_have()
            for slot, section in zip(slots, sections, strict=False):
                target = section[start : start + step]
                target.copy_(slot[: len(target)])

    def scatter_large(self, tensor: Tensor, counts: Sequence[int], own: Tensor) -> None:
        """Sum in chunks of each section; a slot holds one chunk of every section."""
        sections = tensor.split(list(counts))
        step = self.chunk_bytes // tensor.element_size() // len(counts)
        for start in range(0, max(counts), step):
            *slots, _ = self.next_slots(tensor.dtype)
            for section, room in zip(sections, slots[self.place].split(step), strict=False):
                chunk = section[start : start + step]
                room[: len(chunk)].copy_(chunk)
            self.all_have()
            target = own[start : start + step]
            at = self.place * step
            add_parts([slot[at : at + len(target)] for slot in slots], target)

    def all_have(self) -> None:
        """Wait until all members have come as far as this."""
        for peer in self.large:
            peer.connection.sendall(b"x")
        for peer in self.large:
            peer.read(1)

    def end(self) -> None:
        """End all waits with an error, here and at the others; from any thread, at any time."""
        for peer in (*self.small, *self.large):
            peer.end()

    def flush(self) -> None:
        """Wait until the others' systems have taken all that was sent."""
        for peer in self.small:
            peer.sent.wait(self.timeout_s)

    def close(self) -> None:
        """End the thread and give back the memory."""
        self.flush()
        self.jobs.put(None)
        if self.worker.ident is not None:
            self.worker.join(self.timeout_s)
        for peer in (*self.small, *self.large):
            peer.close()
        self.slots = []


class SmallExchange:
    """An exchange of which this member's part is on its way; the rest happens when it is waited for."""

    __slots__ = ("done", "finish", "group", "mine", "sizes")

    def __init__(
        self, group: SharedSum, mine: bytes, sizes: Sequence[int], finish: Callable[[list[Tensor]], None]
    ) -> None:
        self.group, self.mine, self.sizes, self.finish, self.done = group, mine, sizes, finish, False

    def wait(self, limit: timedelta) -> None:
        """Return when the result is there; raise `OSError` if it cannot be had."""
        if not self.done:
            self.group.read_until(self)

    def read(self) -> None:
        """Take the others' parts and finish."""
        peers = iter(self.group.small)
        parts = []
        for place, size in enumerate(self.sizes):
            data = bytearray(self.mine) if place == self.group.place else next(peers).read(size)
            parts.append(torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8))
        self.finish(parts)
        self.done = True


class LargeExchange:
    """An exchange that the group's thread carries out."""

    __slots__ = ("carry_out", "error", "finished")

    def __init__(self, carry_out: Callable[[], None]) -> None:
        self.carry_out = carry_out
        self.error: OSError | None = None
        self.finished = threading.Event()

    def wait(self, limit: timedelta) -> None:
        """Return when the result is there; raise `OSError` if it cannot be had."""
        if not self.finished.wait(limit.total_seconds()):
            raise TimeoutError("timed out")
        if self.error is not None:
            raise self.error


def is_small(tensor: Tensor, elements: int) -> bool:
    """Say whether so many elements of this kind go over sockets."""
    return elements * tensor.element_size() <= SMALL_BYTES


def bytes_of(tensor: Tensor) -> bytes:
    """Copy contiguous host memory."""
    return bytes(tensor.view(-1).view(torch.uint8).numpy())


def add_parts(parts: Sequence[Tensor], total: Tensor) -> None:
    """Add flat tensors, or the bytes of such, in order."""
    first, second, *rest = [part.view(total.dtype) for part in parts]
    torch.add(first, second, out=total)
    for part in rest:
        total.add_(part)


def chunk_bytes(members: int) -> int:
    """Return how much of a tensor is summed at a time, a multiple of every element's size."""
    fair_bytes = TOTAL_BYTES // (2 * (members + 1))
    return min(CHUNK_BYTES, fair_bytes - fair_bytes % 4096)


def wanted_party(members: tuple[int, ...]) -> tuple[tuple[int, ...], int, int]:
    """Return what `meet_all` is to make for a sum over so many members."""
    return members, CHANNELS, chunk_bytes(len(members)) * 2 * (len(members) + 1)
