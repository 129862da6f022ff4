"""Sums over ranks of one machine, through memory that they share instead of sockets.

Small tensors travel over sockets between each two members, and each member adds all parts itself:
nothing has to be awaited but the others' parts. Large ones go through shared memory in chunks
that stay in the processors' caches:

    every member   copies its chunk into its slot          ─┐ all have
    every member   adds its share of all slots, in order   ─┤ all have
    every member   copies the sum out                      ─┘ next chunk, other slots

A thread a group does that, so that it goes on while the rank computes. Parts are added in rank
order, so that the bits are those of `sum_in_place`, on every member and in every run.

The files are gone as soon as all members have opened them, so nothing is left behind, however
the ranks end.
"""

from __future__ import annotations

import mmap
import os
import queue
import select
import shutil
import socket
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SMALL_BYTES = 4096
CHUNK_BYTES = 1 << 20
TOTAL_BYTES = 32 << 20  # of shared memory a group, at most
MEMORY_FOLDER = "/dev/shm"
CHANNELS = ("small", "large")


class SharedSum:
    """One member's end of a group; made in steps (`offer`, `open`, `meet`), for all members must take each.

    `members` are ranks, ascending; a sum is started by all of them in the same order.
    """

    def __init__(self, members: tuple[int, ...], rank: int, timeout_s: float) -> None:
        self.members, self.rank, self.timeout_s = members, rank, timeout_s
        self.place = members.index(rank)
        fair_bytes = TOTAL_BYTES // (2 * (len(members) + 1))
        self.chunk_bytes = min(CHUNK_BYTES, fair_bytes - fair_bytes % 4096)
        self.slots: list[list[Tensor]] = []  # two sets; in each a slot a member, then one for the sum
        self.listener: socket.socket | None = None
        self.small: list[Peer] = []
        self.large: list[Peer] = []
        self.unread: deque[SmallSum] = deque()
        self.jobs: queue.SimpleQueue[LargeSum | None] = queue.SimpleQueue()
        self.turn = 0
        self.worker = threading.Thread(target=self.work, name=f"sums over {members}", daemon=True)

    def offer(self) -> str:
        """Make, on the lowest member, the folder in which the members meet; empty where that cannot be had."""
        if self.place != 0 or not os.path.isdir(MEMORY_FOLDER):
            return ""
        folder = tempfile.mkdtemp(prefix="efftra_fx-", dir=MEMORY_FOLDER)
        try:
            with open(Path(folder, "memory"), "wb") as memory:
                os.posix_fallocate(memory.fileno(), 0, self.chunk_bytes * 2 * (len(self.members) + 1))
        except OSError:  # as in containers with little shared memory
            shutil.rmtree(folder, ignore_errors=True)
            return ""
        return folder

    def open(self, folder: str) -> bool:
        """Map the memory and listen for the higher members; say whether that worked."""
        try:
            with open(Path(folder, "memory"), "r+b") as memory:
                mapped = torch.frombuffer(mmap.mmap(memory.fileno(), 0), dtype=torch.uint8)
            self.listener = socket.socket(socket.AF_UNIX)
            self.listener.bind(str(Path(folder, str(self.rank))))
            self.listener.listen(2 * len(self.members))
        except OSError:
            return False
        pieces = list(torch.split(mapped, self.chunk_bytes))
        half = len(self.members) + 1
        self.slots = [pieces[:half], pieces[half:]]
        return True

    def meet(self, folder: str) -> None:
        """Connect to the lower members and take the connections of the higher ones."""
        assert self.listener is not None
        found: dict[tuple[int, int], socket.socket] = {}
        for peer in self.members[: self.place]:
            for channel in range(len(CHANNELS)):
                connection = socket.socket(socket.AF_UNIX)
                connection.connect(str(Path(folder, str(peer))))
                connection.sendall(bytes([channel]) + self.rank.to_bytes(4, "little"))
                found[channel, peer] = connection
        self.listener.settimeout(self.timeout_s)
        for _ in range(len(CHANNELS) * (len(self.members) - self.place - 1)):
            connection, _ = self.listener.accept()
            hello = connection.recv(5, socket.MSG_WAITALL)
            found[hello[0], int.from_bytes(hello[1:], "little")] = connection
        self.listener.close()
        others = [peer for peer in self.members if peer != self.rank]
        self.small, self.large = (
            # the thread may begin to wait long before the rank does
            [Peer(found[channel, peer], (1 + channel) * self.timeout_s) for peer in others]
            for channel in range(len(CHANNELS))
        )

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
            peer.end()
            peer.connection.close()
            peer.sender.close()
        self.slots = []


class Peer:
    """A connection to another member; sending never blocks: what the system does not take at once, a thread sends."""

    def __init__(self, connection: socket.socket, timeout_s: float) -> None:
        self.connection = connection
        self.sender = connection.dup()  # the same connection, but a time limit of its own: none, it never waits
        self.waiting: deque[bytes] = deque()
        self.lock = threading.Lock()
        self.sent = threading.Event()
        self.sent.set()
        connection.settimeout(timeout_s)
        self.sender.setblocking(False)

    def send(self, data: bytes) -> None:
        """Send, now or soon."""
        with self.lock:
            if not self.waiting:
                data = data[self.send_some(data) :]
            if not data:
                return
            self.waiting.append(data)
            if len(self.waiting) == 1:
                self.sent.clear()
                threading.Thread(target=self.send_waiting, name="late sends", daemon=True).start()

    def send_some(self, data: bytes) -> int:
        """Send what the system takes now, and say how many bytes."""
        try:
            return self.sender.send(data)
        except BlockingIOError:
            return 0

    def send_waiting(self) -> None:
        """Send what had to wait."""
        try:
            while self.waiting:
                data = self.waiting[0]
                while data:
                    select.select([], [self.sender], [])
                    data = data[self.send_some(data) :]
                with self.lock:
                    self.waiting.popleft()
                    if not self.waiting:
                        self.sent.set()
        except (OSError, ValueError):  # the connection has ended: who reads from it sees the same
            self.sent.set()

    def read(self, size: int) -> bytearray:
        """Read so many bytes; raise `OSError` at the time limit or at the end of the connection."""
        data = bytearray(size)
        view, got = memoryview(data), 0
        while got < size:
            more = self.connection.recv_into(view[got:])
            if not more:
                raise ConnectionError("connection closed by peer")
            got += more
        return data

    def end(self) -> None:
        """Make reads here and there end."""
        try:
            self.connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # ended already


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


def meet_all(
    groups: Sequence[tuple[int, ...]], rank: int, timeout_s: float, gather: Callable[[Any], list[Any]]
) -> dict[tuple[int, ...], SharedSum | None]:
    """Make `SharedSum`s for groups, where they can be had; a collective call of all ranks, members or not.

    `gather` gives every rank every rank's plain data. The groups that are returned are the same
    on every rank; a rank that is no member gets `None` for one.
    """
    machines = gather(machine_name())
    local = [members for members in groups if len({machines[member] for member in members}) == 1]
    mine = {members: SharedSum(members, rank, timeout_s) for members in local if rank in members}
    offers = gather([mine[members].offer() if members in mine else "" for members in local])
    folders = [offers[members[0]][number] for number, members in enumerate(local)]
    opened = gather(
        [
            members not in mine or bool(folder) and mine[members].open(folder)
            for members, folder in zip(local, folders, strict=True)
        ]
    )
    good = [number for number, folder in enumerate(folders) if folder and all(row[number] for row in opened)]
    for number in good:
        if local[number] in mine:
            mine[local[number]].meet(folders[number])
    gather(None)  # all have met
    for number, folder in enumerate(folders):
        if folder and local[number][0] == rank:
            shutil.rmtree(folder, ignore_errors=True)
    return {local[number]: mine.get(local[number]) for number in good}


def machine_name() -> str:
    """Name this machine so that no other has the name: containers may share host names."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()} {boot}"
