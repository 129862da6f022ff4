"""Know within moments that another rank has failed, was killed or has left, and tell the others.

Process groups notice a dead peer only on a socket that they happen to read, and carry no reason;
some never notice. So each rank listens on a port of its own, and one thread, asleep nearly
always, watches the ring of ranks:

    0 ──watches──► 1 ──watches──► 2 ──watches──► 0

A connection that ends without a farewell means that the watched process is gone (killed, out of
memory, crashed): its watcher tells everyone. A rank that fails tells everyone itself, and why. A
report stays readable in the receiver's socket even when its sender is gone by then. Reports are
JSON lines that carry a secret shared at the start; anything else is ignored.
"""

from __future__ import annotations

import atexit
import json
import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from efftra_fx.errors import TransportError

Address = tuple[str, int]
LIMIT_BYTES = 64 * 1024  # of one report
POST_LIMIT_S = 1.0  # for reaching one rank with a report
WORD_LIMIT_S = 0.1
CONNECT_LIMIT_S = 30.0


class Lifeline:
    """One rank's watch; make it, exchange `address`es and a token, then `start`."""

    def __init__(self, rank: int, host: str) -> None:
        self.rank = rank
        self.listener = socket.create_server((host, 0), backlog=1024)
        self.address: Address = (host, self.listener.getsockname()[1])
        self.failure = ""  # what all ranks end with, once there is something
        self.claimed = False  # someone is dealing with a failure
        self.left: set[int] = set()
        self.silent: dict[int, float] = {}  # ranks whose connection has ended, and until when a word may come
        self.addresses: Sequence[Address] = ()
        self.token = ""
        self.on_failure: Callable[[], None] = lambda: None
        self.news = threading.Event()
        self.lock = threading.Lock()
        self.watchers: list[socket.socket] = []  # ranks that watch this one
        self.selector = selectors.DefaultSelector()
        self.waker, self.woken = socket.socketpair()
        self.closing = False
        self.owner = os.getpid()
        self.thread = threading.Thread(target=self.watch, name=f"lifeline of rank {rank}", daemon=True)

    def start(self, addresses: Sequence[Address], token: str, on_failure: Callable[[], None]) -> None:
        """Begin to watch the next rank; `on_failure` is called once, in the watching thread.

        Raise `TransportError` if the next rank cannot be reached.
        """
        self.addresses, self.token, self.on_failure = addresses, token, on_failure
        self.selector.register(self.listener, selectors.EVENT_READ, None)
        self.selector.register(self.woken, selectors.EVENT_READ, None)
        if len(addresses) > 1:
            self.follow((self.rank + 1) % len(addresses))
        self.thread.start()
        atexit.register(self.at_exit)

    def report(self, text: str) -> None:
        """Tell every other rank that all is over, and why; returns when they have been told."""
        if self.claim():
            self.post(text)
            self.publish(text)

    def await_news(self, limit_s: float) -> None:
        """Return when there is a failure, when the watched rank has left, or when so many seconds have passed."""
        end = time.monotonic() + limit_s
        while not self.left and time.monotonic() < end and not self.news.wait(0.05):
            pass

    def close(self) -> None:
        """Say farewell and stop watching."""
        if self.closing or os.getpid() != self.owner:
            return
        self.closing = True
        atexit.unregister(self.at_exit)
        self.waker.send(b"x")
        if self.thread.is_alive():
            self.thread.join()
        for connection in self.watchers:
            deliver(connection, self.line(kind="bye"))
            connection.close()
        for entry in list(self.selector.get_map().values()):
            if isinstance(entry.fileobj, socket.socket):
                entry.fileobj.close()
        self.selector.close()
        for used in (self.listener, self.waker, self.woken):
            used.close()

    def at_exit(self) -> None:
        """Tell the others why this process ends, if an error ends it."""
        error = getattr(sys, "last_value", None)
        if error is not None and os.getpid() == self.owner:
            self.report(f"rank {self.rank} failed: {type(error).__name__}: {error}")
        self.close()

    def watch(self) -> None:
        """Read what comes until closed: the body of the thread."""
        while not self.closing:
            for entry, _ in self.selector.select(WORD_LIMIT_S if self.silent else None):
                if self.closing:
                    return
                if entry.fileobj is self.listener:
                    self.accept()
                elif entry.fileobj is not self.woken:
                    self.read(entry)
            for rank, end in list(self.silent.items()):
                if time.monotonic() > end:
                    del self.silent[rank]
                    self.lost(rank)

    def accept(self) -> None:
        """Take a new connection."""
        connection, _ = self.listener.accept()
        connection.setblocking(False)
        self.selector.register(connection, selectors.EVENT_READ, Reader(-1))

    def read(self, entry: selectors.SelectorKey) -> None:
        """Read from a connection, and note what its lines, or its end, mean."""
        connection, reader = entry.fileobj, entry.data
        assert isinstance(connection, socket.socket)
        try:
            got = connection.recv(LIMIT_BYTES)
        except BlockingIOError:
            return
        except OSError:
            got = b""
        lines = reader.feed(got)
        for line in lines:
            self.take(line, connection, reader)
        if got and len(reader.rest) <= LIMIT_BYTES:
            return
        self.selector.unregister(connection)
        connection.close()
        if connection in self.watchers:
            self.watchers.remove(connection)
        if reader.watched >= 0:
            self.ended(reader)

    def take(self, line: bytes, connection: socket.socket, reader: Reader) -> None:
        """Act on one line."""
        message = parse(line, self.token)
        kind = message.get("kind")
        if kind == "watch":
            self.watchers.append(connection)
            deliver(connection, self.line(kind="hello"))
        elif kind == "hello":
            reader.met = True
        elif kind == "bye":
            self.left.add(reader.watched)
        elif kind == "failed":
            self.hear(str(message.get("text", "")))

    def hear(self, text: str) -> None:
        """Note a failure elsewhere, once."""
        if self.claim():
            self.publish(text)
            self.on_failure()

    def claim(self) -> bool:
        """Return True to the one who comes first with a failure."""
        with self.lock:
            first, self.claimed = not self.claimed, True
        return first

    def publish(self, text: str) -> None:
        """Let this rank see the failure; after the others were told, for it may end this process."""
        self.failure = text
        self.news.set()

    def lost(self, rank: int) -> None:
        """Raise the alarm: a rank has ended without a word."""
        if self.claim():
            text = f"rank {rank} was lost: its process ended without a word (killed, out of memory, or crashed)"
            self.post(text)
            self.publish(text)
            self.on_failure()

    def ended(self, reader: Reader) -> None:
        """Deal with the end of the watched rank's connection: go on to the next, or fear the worst."""
        watched = reader.watched
        if not reader.met:  # it was leaving already when we came
            self.left.add(watched)
        if watched not in self.left:
            # its last words may be waiting in another connection
            self.silent[watched] = time.monotonic() + WORD_LIMIT_S
            return
        following = (watched + 1) % len(self.addresses)
        if following != self.rank:
            try:
                self.follow(following)
            except TransportError:
                self.left.add(following)

    def follow(self, peer: int) -> None:
        """Watch a rank."""
        host, port = self.addresses[peer]
        try:
            connection = socket.create_connection((host, port), timeout=CONNECT_LIMIT_S)
        except OSError as error:
            raise TransportError(
                f"rank {self.rank} cannot reach rank {peer} at {host} port {port}: {error}; "
                "open the ports between the machines, or set MASTER_ADDR to an address in their common network"
            ) from None
        deliver(connection, self.line(kind="watch"))
        connection.setblocking(False)
        self.selector.register(connection, selectors.EVENT_READ, Reader(peer))

    def post(self, text: str) -> None:
        """Send a report to every other rank that can be reached."""
        line = self.line(kind="failed", text=text[: LIMIT_BYTES // 8])
        for rank, address in enumerate(self.addresses):
            if rank == self.rank:
                continue
            try:
                connection = socket.create_connection(address, timeout=POST_LIMIT_S)
            except OSError:
                continue
            deliver(connection, line)
            connection.close()

    def line(self, **message: str) -> bytes:
        """Write a message as one line."""
        return json.dumps({"token": self.token, "rank": self.rank, **message}).encode() + b"\n"


class Reader:
    """Cut what comes over a connection into lines; `watched` is the rank at the other end, or -1."""

    def __init__(self, watched: int) -> None:
        self.watched = watched
        self.met = False  # the watched rank has answered
        self.rest = b""

    def feed(self, got: bytes) -> list[bytes]:
        """Return the lines that are complete now."""
        *lines, self.rest = (self.rest + got).split(b"\n")
        return lines


def parse(line: bytes, token: str) -> dict[str, Any]:
    """Read a line; what is not ours is empty."""
    try:
        message = json.loads(line)
    except ValueError:
        return {}
    return message if isinstance(message, dict) and message.get("token") == token else {}


def deliver(connection: socket.socket, line: bytes) -> None:
    """Send if anyone is there to hear."""
    try:
        connection.sendall(line)
    except OSError:
        pass  # the other end is gone: whoever watches it will say so


def own_host(master: str) -> str:
    """Find the address of this machine that the machine called `master` (and so the others) can reach."""
    try:
        target = socket.gethostbyname(master or socket.gethostname())
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((target, 9))  # sends nothing: it only chooses a route
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"
