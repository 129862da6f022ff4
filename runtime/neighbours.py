"""Connections between ranks of one machine: sockets of the system's own, which cost a fraction of Gloo's.

Gloo moves even a small message through threads of its own at both ends. Here the sender writes
into the socket and the receiver, when it waits, reads straight into the tensor. What the socket
does not take at once a thread sends, so that sending never blocks.

The files through which the members of a `Party` meet are gone as soon as they have met, so
nothing is left behind, however the ranks end.
"""

from __future__ import annotations

import mmap
import os
import select
import shutil
import socket
import struct
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from efftra_fx.errors import TransportError

MEETING_FOLDER = "/dev/shm"
BUFFER_BYTES = 1 << 20
HEADER = struct.Struct("<qq")  # tag, payload bytes
Buffer = bytes | memoryview


class Party:
    """One member's way to the others: `channels` connections to each, and shared memory.

    It is made in steps (`offer`, `open`, `meet`), for all members must have taken one before any
    takes the next; `meet_all` does so.
    """

    def __init__(self, members: tuple[int, ...], rank: int, channels: int, memory_bytes: int) -> None:
        self.members, self.rank, self.channels, self.memory_bytes = members, rank, channels, memory_bytes
        self.place = members.index(rank)
        self.memory: Tensor | None = None  # uint8
        self.listener: socket.socket | None = None
        self.sockets: list[dict[int, socket.socket]] = [{} for _ in range(channels)]  # by channel and rank

    def offer(self) -> str:
        """Make, on the lowest member, the folder in which the members meet; empty where that cannot be had."""
        if self.place != 0 or not os.path.isdir(MEETING_FOLDER):
            return ""
        folder = tempfile.mkdtemp(prefix="efftra_fx-", dir=MEETING_FOLDER)
        try:
            with open(Path(folder, "memory"), "wb") as memory:
                if self.memory_bytes:
                    os.posix_fallocate(memory.fileno(), 0, self.memory_bytes)
        except OSError:  # as in containers with little shared memory
            shutil.rmtree(folder, ignore_errors=True)
            return ""
        return folder

    def open(self, folder: str) -> bool:
        """Map the memory and listen for the higher members; say whether that worked."""
        try:
            with open(Path(folder, "memory"), "r+b") as memory:
                if self.memory_bytes:
                    self.memory = torch.frombuffer(mmap.mmap(memory.fileno(), 0), dtype=torch.uint8)
            self.listener = socket.socket(socket.AF_UNIX)
            self.listener.bind(str(Path(folder, str(self.rank))))
            self.listener.listen(self.channels * len(self.members))
        except OSError:
            return False
        return True

    def meet(self, folder: str, timeout_s: float) -> None:
        """Connect to the lower members and take the connections of the higher ones."""
        assert self.listener is not None
        for peer in self.members[: self.place]:
            for channel in range(self.channels):
                connection = socket.socket(socket.AF_UNIX)
                connection.connect(str(Path(folder, str(peer))))
                connection.sendall(HEADER.pack(channel, self.rank))
                self.sockets[channel][peer] = connection
        self.listener.settimeout(timeout_s)
        for _ in range(self.channels * (len(self.members) - self.place - 1)):
            connection, _ = self.listener.accept()
            channel, peer = HEADER.unpack(connection.recv(HEADER.size, socket.MSG_WAITALL))
            self.sockets[channel][peer] = connection
        self.listener.close()

    def peers(self, channel: int, timeout_s: float) -> dict[int, Peer]:
        """Return the other members' ends of a channel, ascending."""
        return {peer: Peer(self.sockets[channel][peer], timeout_s) for peer in self.members if peer != self.rank}


def meet_all(
    wanted: Sequence[tuple[tuple[int, ...], int, int]],
    rank: int,
    timeout_s: float,
    exchange: Callable[[Any], list[Any]],
) -> dict[tuple[int, ...], Party | None]:
    """Make parties (members, channels, memory in bytes) where they can be had; a collective call of all ranks.

    `exchange` gives every rank every rank's plain data. The parties that are returned are the
    same on every rank; a rank that is no member gets `None` for one.
    """
    mine = {one[0]: Party(one[0], rank, *one[1:]) for one in wanted if rank in one[0]}
    members = [one[0] for one in wanted]
    offers = exchange([mine[those].offer() if those in mine else "" for those in members])
    folders = [offers[those[0]][number] for number, those in enumerate(members)]
    opened = exchange(
        [
            those not in mine or (bool(folder) and mine[those].open(folder))
            for those, folder in zip(members, folders, strict=True)
        ]
    )
    good = [number for number, folder in enumerate(folders) if folder and all(row[number] for row in opened)]
    for number in good:
        if members[number] in mine:
            mine[members[number]].meet(folders[number], timeout_s)
    exchange(None)  # all have met
    for those, folder in zip(members, folders, strict=True):
        if folder and those[0] == rank:
            shutil.rmtree(folder, ignore_errors=True)
    return {members[number]: mine.get(members[number]) for number in good}


class Peer:
    """A connection to another rank; sending never blocks: what the system does not take at once, a thread sends."""

    def __init__(self, connection: socket.socket, timeout_s: float) -> None:
        self.connection = connection
        self.sender = connection.dup()  # the same connection, but without the time limit: it never waits
        self.waiting: deque[Buffer] = deque()
        self.lock = threading.Lock()
        self.sent = threading.Event()
        self.sent.set()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        connection.settimeout(timeout_s)
        self.sender.setblocking(False)

    def send(self, *pieces: Buffer) -> None:
        """Send, now or soon; the pieces must not change before `own` or `sent`. Raise `OSError` if it has ended."""
        with self.lock:
            idle = not self.waiting
            self.waiting.extend(pieces)
            if not idle:
                return
            self.send_some()
            if self.waiting:
                self.sent.clear()
                threading.Thread(target=self.send_waiting, name="late sends", daemon=True).start()

    def send_some(self) -> None:
        """Send what the system takes now; call it with the lock held."""
        while self.waiting:
            pieces = [self.waiting[0]] if len(self.waiting) == 1 else [self.waiting[0], self.waiting[1]]
            try:
                taken = self.sender.sendmsg(pieces)
            except BlockingIOError:
                return
            while self.waiting and taken >= len(self.waiting[0]):
                taken -= len(self.waiting.popleft())
            if taken:
                self.waiting[0] = memoryview(self.waiting[0])[taken:]

    def send_waiting(self) -> None:
        """Send what had to wait: the body of the thread."""
        poll = select.poll()
        try:
            poll.register(self.sender, select.POLLOUT)
            while True:
                poll.poll()
                with self.lock:
                    self.send_some()
                    if not self.waiting:
                        break
        except (OSError, ValueError):  # the connection has ended: who reads from it sees the same
            self.waiting.clear()
        self.sent.set()

    def own(self) -> None:
        """Copy what still waits to be sent, so that the senders' memory may change."""
        if self.waiting:
            with self.lock:
                self.waiting = deque(bytes(piece) for piece in self.waiting)

    def wait(self, limit: timedelta) -> None:
        """Return when what was sent may change, which is at once."""
        self.own()

    def read(self, size: int) -> bytearray:
        """Read so many bytes; raise `OSError` at the time limit or at the end of the connection."""
        data = bytearray(size)
        self.read_into(memoryview(data))
        return data

    def read_into(self, view: memoryview) -> None:
        """Fill memory; raise `OSError` at the time limit or at the end of the connection."""
        got, size = 0, len(view)
        while got < size:
            more = self.connection.recv_into(view[got:])
            if not more:
                raise ConnectionError("connection closed by peer")
            got += more

    def end(self) -> None:
        """Make reads here and there end; from any thread, at any time."""
        try:
            self.connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # ended already

    def close(self) -> None:
        """End and give back."""
        self.end()
        self.connection.close()
        self.sender.close()


class Mailbox:
    """Messages with tags between rank `rank` and rank `other`."""

    def __init__(self, peer: Peer, rank: int, other: int) -> None:
        self.peer, self.rank, self.other = peer, rank, other
        self.posted: dict[int, deque[Letter]] = {}
        self.early: dict[int, deque[bytearray]] = {}  # messages that came before their receive was posted

    def send(self, tensor: Tensor, tag: int) -> None:
        """Send contiguous host memory."""
        payload = memory_of(tensor)
        self.peer.send(HEADER.pack(tag, len(payload)), payload)

    def recv(self, tensor: Tensor, tag: int) -> Letter:
        """Post a receive into contiguous host memory."""
        letter = Letter(self, tensor, tag)
        early = self.early.get(tag)
        if early:
            letter.fill(early.popleft())
        else:
            self.posted.setdefault(tag, deque()).append(letter)
        return letter

    def read_one(self) -> None:
        """Read the next message, whosever it is."""
        tag, size = HEADER.unpack(self.peer.read(HEADER.size))
        posted = self.posted.get(tag)
        if not posted:
            self.early.setdefault(tag, deque()).append(self.peer.read(size))
            return
        letter = posted[0]
        letter.check(size)
        self.peer.read_into(memory_of(letter.tensor))
        letter.done = True
        posted.popleft()


class Letter:
    """A posted receive."""

    __slots__ = ("done", "mailbox", "tag", "tensor")

    def __init__(self, mailbox: Mailbox, tensor: Tensor, tag: int) -> None:
        self.mailbox, self.tensor, self.tag, self.done = mailbox, tensor, tag, False

    def wait(self, limit: timedelta) -> None:
        """Read until it is there; raise `OSError` at the time limit or at the end of the connection."""
        while not self.done:
            self.mailbox.read_one()

    def fill(self, data: bytearray) -> None:
        """Take a message that came early."""
        self.check(len(data))
        memory_of(self.tensor)[:] = data
        self.done = True

    def check(self, size: int) -> None:
        """Raise `TransportError` if the message is not as long as the tensor."""
        wanted = self.tensor.numel() * self.tensor.element_size()
        if size != wanted:
            raise TransportError(
                f"rank {self.mailbox.rank} expected {self.tensor.dtype} {list(self.tensor.shape)}, {wanted} bytes, "
                f"from rank {self.mailbox.other} (tag {self.tag}), got {size} bytes"
            )


def memory_of(tensor: Tensor) -> memoryview:
    """View contiguous host memory as bytes."""
    array: Any = tensor.view(-1).view(torch.uint8).numpy()
    return memoryview(array)


def machine_name() -> str:
    """Name this machine so that no other has the name: containers may share host names."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()} {boot}"
