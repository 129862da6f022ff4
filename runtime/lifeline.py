"""Know within moments that another rank has failed, was killed or has left, and tell the others.

Process groups notice a dead peer only on a socket that they happen to read, and carry no reason;
some never notice. So each rank listens on a port of its own, and one thread, asleep nearly
always, watches the ring of ranks:

    0 ──watches──► 1 ──watches──► 2 ──watches──► 0

A connection that ends without a farewell means that the watched process is gone (killed, out of
memory, crashed): its watcher tells everyone. A rank that fails tells everyone itself, and why. A
report stays readable in the receiver's socket even when its sender is gone by then. Reports are
JSON lines that carry a secret shared at the start; anything else is ignored.

A rank that has waited a while in a call asks the others where they are (`runtime/whereabouts.py`):
ranks in calls that can never meet are a failure of all, and a long wait is told on stderr.
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
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from efftra_fx.errors import InputError, TransportError

from .whereabouts import HERE, Call, Place, never_meet

Address = tuple[str, int]
LIMIT_BYTES = 64 * 1024  # of one report
POST_LIMIT_S = 1.0  # for reaching one rank with a report
WORD_LIMIT_S = 0.1
CONNECT_LIMIT_S = 30.0
TICK_S = 1.0  # between looks at how long this rank has waited
PATIENCE_S = 10.0  # after which a wait is told
MOST_ASKED = 32  # ranks at a time


_ALL: weakref.WeakSet[Lifeline] = weakref.WeakSet()


class Lifeline:
    """One rank's watch; make it, exchange `address`es and a token, then `start`."""

    def __init__(self, rank: int, host: str) -> None:
        self.rank = rank
        _ALL.add(self)
        self.listener = socket.create_server((host, 0), backlog=1024)
        self.address: Address = (host, self.listener.getsockname()[1])
        self.failure = ""  # what all ranks end with, once there is something
        self.kind = "RankFailed"  # the class of error that it is
        self.waiting: tuple[Call, float] | None = None  # the call that this rank waits in, and since when
        self.asked: tuple[Call, dict[int, Place]] | None = None  # where the others were when asked last
        self.asking = False
        self.told: Call | None = None  # the last call of which a long wait was told
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

    def report(self, text: str, kind: str = "RankFailed") -> None:
        """Tell every other rank that all is over, and why; returns when they have been told."""
        if self.claim():
            self.post(text, kind)
            self.publish(text, kind)

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
            self.look()
            for entry, _ in self.selector.select(WORD_LIMIT_S if self.silent else TICK_S):
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
            self.hear(str(message.get("text", "")), str(message.get("error", "")))
        elif kind == "where":
            deliver(connection, self.line(kind="here", place=HERE.place().to_data()))

    def hear(self, text: str, kind: str) -> None:
        """Note a failure elsewhere, once."""
        if self.claim():
            self.publish(text, kind)
            self.on_failure()
            if kind == InputError.__name__:  # other calls are made there: this process may wait in another program
                for other in [one for one in _ALL if one.waiting is not None]:
                    other.hear(text, kind)

    @contextmanager
    def patience(self) -> Iterator[None]:
        """Note that this rank waits for all others in its present call meanwhile."""
        call = HERE.call
        if call is not None:
            self.waiting = call, time.monotonic()
        try:
            yield
        finally:
            self.waiting = None

    def look(self) -> None:
        """Have the others asked where they are if this rank has waited in one call since the last look."""
        waiting = self.waiting
        if waiting is None or self.asking or self.claimed or time.monotonic() - waiting[1] < TICK_S:
            return
        self.asking = True
        threading.Thread(target=self.ask_all, args=waiting, name="asking", daemon=True).start()

    def ask_all(self, call: Call, since: float) -> None:
        """Ask where the others are; raise the alarm where they can never meet this rank, and tell of a long wait."""
        try:
            others = [rank for rank in range(len(self.addresses)) if rank != self.rank][:MOST_ASKED]
            found = {rank: place for rank in others if (place := self.ask(rank)) is not None}
            before, self.asked = self.asked, (call, found)
            if self.closing or self.waiting != (call, since):
                return
            other = never_meet(call, found)
            if other is not None and before is not None and before[0] == call and before[1].get(other) == found[other]:
                self.alarm(
                    f"the ranks make different calls: rank {self.rank} is in {call}, rank {other} {found[other]}; "
                    "every rank must make the same calls in the same order",
                    "InputError",
                )
            elif PATIENCE_S <= time.monotonic() - since < PATIENCE_S + 2 * TICK_S:
                self.tell(call, found)
        finally:
            self.asking = False

    def tell(self, call: Call, others: dict[int, Place]) -> None:
        """Say on stderr for whom this rank has waited long, if it is the first of those that wait there."""
        missing = {rank: place for rank, place in others.items() if place.call != call}
        first = all(rank in missing for rank in others if rank < self.rank)
        if missing and first and self.told != call:
            self.told = call
            rank, place = next(iter(missing.items()))
            print(
                f"efftra_fx: rank {self.rank} has waited {PATIENCE_S:g} s in {call} for rank {rank}, which is {place}",
                file=sys.stderr,
                flush=True,
            )

    def others(self) -> str:
        """Say where a rank was, when asked last, that had not come to this rank's call; empty if none is known."""
        if self.asked is None:
            return ""
        call, found = self.asked
        return next((f"rank {rank} was {place}" for rank, place in found.items() if place.call != call), "")

    def ask(self, rank: int) -> Place | None:
        """Ask a rank where it is; None if there is no answer soon."""
        try:
            with socket.create_connection(self.addresses[rank], timeout=POST_LIMIT_S) as connection:
                deliver(connection, self.line(kind="where"))
                reader = Reader(-1)
                while got := connection.recv(LIMIT_BYTES):
                    for line in reader.feed(got):
                        message = parse(line, self.token)
                        if message.get("kind") == "here":
                            return Place.from_data(message["place"])
        except OSError:
            pass  # it is gone, or busy: whoever watches it will say so
        return None

    def claim(self) -> bool:
        """Return True to the one who comes first with a failure."""
        with self.lock:
            first, self.claimed = not self.claimed, True
        return first

    def alarm(self, text: str, kind: str = "RankFailed") -> None:
        """Tell the others and this rank of a failure that a thread has found."""
        if self.claim():
            self.post(text, kind)
            self.publish(text, kind)
            self.on_failure()

    def publish(self, text: str, kind: str = "RankFailed") -> None:
        """Let this rank see the failure; after the others were told, for it may end this process."""
        self.failure, self.kind = text, kind
        self.news.set()

    def lost(self, rank: int) -> None:
        """Raise the alarm: a rank has ended without a word."""
        self.alarm(f"rank {rank} was lost: its process ended without a word (killed, out of memory, or crashed)")

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

    def post(self, text: str, kind: str) -> None:
        """Send a report to every other rank that can be reached."""
        line = self.line(kind="failed", text=text[: LIMIT_BYTES // 8], error=kind)
        for rank, address in enumerate(self.addresses):
            if rank == self.rank:
                continue
            try:
                connection = socket.create_connection(address, timeout=POST_LIMIT_S)
            except OSError:
                continue
            deliver(connection, line)
            connection.close()

    def line(self, **message: Any) -> bytes:
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
