"""Sums over ranks of one machine, through memory that they share instead of sockets.

Small tensors travel over sockets between each two members, and each member adds all parts itself:
nothing has to be awaited but the others' parts. Large ones go through shared memory in chunks
that stay in the processors' caches:

    every member   copies its chunk into its slot          ─┐ all have
    every member   adds its share of all slots, in order   ─┤ all have
    every member   copies the sum out                      ─┘ next chunk, other slots

A thread a group does that, so that it goes on while the rank computes. Parts are added in rank
order, so that the bits are those of `sum_in_place`, on every member and in every run.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
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
        self.unread: deque[SmallSum] = deque()
        self.jobs: queue.SimpleQueue[LargeSum | None] = queue.SimpleQueue()
        self.worker = threading.Thread(target=self.work, name=f"sums over {self.members}", daemon=True)

    def start(self, tensor: Tensor) -> SmallSum | LargeSum:
        """Start a sum of contiguous host memory, in place."""
        if tensor.numel() * tensor.element_size() <= SMALL_BYTES:
            small = SmallSum(self, tensor)
            self.unread.append(small)
            for peer in self.small:
                peer.send(small.mine)
            return small
        large = LargeSum(self, tensor)
        if self.worker.ident is None:
            self.worker.start()
        self.jobs.put(large)
        return large

    def read_until(self, wanted: SmallSum) -> None:
        """Finish small sums in order, up to one."""
        while not wanted.done:
            self.unread[0].read()
            self.unread.popleft()

    def work(self) -> None:
        """Carry out large sums in order: the body of the thread."""
        while (job := self.jobs.get()) is not None:
            try:
                self.sum_large(job.tensor)
            except OSError as error:
                job.error = error
            job.finished.set()

    def sum_large(self, tensor: Tensor) -> None:
        """Sum in chunks; see the drawing above."""
        flat = tensor.view(-1)
        count, place = len(self.members), self.place
        for chunk in torch.split(flat, self.chunk_bytes // flat.element_size()):
            size = len(chunk)
            *parts, total = [slot.view(flat.dtype)[:size] for slot in self.slots[self.turn]]
            self.turn = 1 - self.turn
            parts[place].copy_(chunk)
            self.all_have()
            first, stop = place * size // count, (place + 1) * size // count
            share = total[first:stop]
            torch.add(parts[0][first:stop], parts[1][first:stop], out=share)
            for part in parts[2:]:
                share.add_(part[first:stop])
            self.all_have()
            chunk.copy_(total)

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


class SmallSum:
    """A sum of which this member's part is on its way; the rest happens when it is waited for."""

    __slots__ = ("done", "group", "mine", "tensor")

    def __init__(self, group: SharedSum, tensor: Tensor) -> None:
        self.group, self.tensor, self.done = group, tensor, False
        self.mine = bytes(tensor.view(-1).view(torch.uint8).numpy())

    def wait(self, limit: timedelta) -> None:
        """Return when the sum is in the tensor; raise `OSError` if it cannot be had."""
        if not self.done:
            self.group.read_until(self)

    def read(self) -> None:
        """Take the others' parts and add all, in order."""
        tensor, total = self.tensor, None
        peers = iter(self.group.small)
        for place in range(len(self.group.members)):
            data = bytearray(self.mine) if place == self.group.place else next(peers).read(len(self.mine))
            part = torch.frombuffer(data, dtype=tensor.dtype)
            total = part if total is None else total.add_(part)
        assert total is not None
        tensor.copy_(total.view(tensor.shape))
        self.done = True


class LargeSum:
    """A sum that the group's thread carries out."""

    __slots__ = ("error", "finished", "group", "tensor")

    def __init__(self, group: SharedSum, tensor: Tensor) -> None:
        self.group, self.tensor = group, tensor
        self.error: OSError | None = None
        self.finished = threading.Event()

    def wait(self, limit: timedelta) -> None:
        """Return when the sum is in the tensor; raise `OSError` if it cannot be had."""
        if not self.finished.wait(limit.total_seconds()):
            raise TimeoutError("timed out")
        if self.error is not None:
            raise self.error


def chunk_bytes(members: int) -> int:
    """Return how much of a tensor is summed at a time, a multiple of every element's size."""
    fair_bytes = TOTAL_BYTES // (2 * (members + 1))
    return min(CHUNK_BYTES, fair_bytes - fair_bytes % 4096)


def wanted_party(members: tuple[int, ...]) -> tuple[tuple[int, ...], int, int]:
    """Return what `meet_all` is to make for a sum over so many members."""
    return members, CHANNELS, chunk_bytes(len(members)) * 2 * (len(members) + 1)
