"""Run a function on several ranks, each a process of its own, without paying for imports each time.

A nursery, started once a test process, imports torch and then forks the ranks of every request:
that takes milliseconds. The ranks of one request form one process group with a time limit, after
which all of it is killed; so is everything when the test process ends, however it ends.

    def square(number):            # at the top of a test module
        transport = connect(...)   # the environment is as under torchrun
        return transport.rank * number

    assert run_ranks(square, 4, 3) == [0, 3, 6, 9]
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NoReturn

TESTS = Path(__file__).resolve().parent
GRACE_S = 5.0
PRELOADED = ("torch", "torch.distributed", "pytest", "hypothesis", "efftra_fx.runtime.launch", "efftra_fx.api")
DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG


@dataclass(frozen=True)
class Request:
    """What the nursery is asked to do."""

    call: bytes  # pickled function and arguments: the nursery itself never imports test modules
    world_size: int
    limit_s: float
    environment: Mapping[str, str]
    paths: tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    """How one rank ended: what it returned, or the traceback it ended with, and what it printed."""

    rank: int
    value: Any = None
    error: str = ""  # traceback, empty if it returned
    output: str = ""
    status: int = 0  # exit status; negative: the signal that killed it
    took_s: float = 0.0


@dataclass
class Nursery:
    """The process that ranks are forked from."""

    process: subprocess.Popen[bytes] = field(
        default_factory=lambda: subprocess.Popen(
            [sys.executable, str(TESTS / "ranks.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            cwd=TESTS.parent,
        )
    )

    def ask(self, request: Request) -> list[Outcome]:
        """Send a request and wait for its outcomes."""
        assert self.process.stdin is not None and self.process.stdout is not None
        write(self.process.stdin, request)
        outcomes = read(self.process.stdout)
        assert isinstance(outcomes, list), "the nursery has ended"
        return outcomes

    def close(self) -> None:
        """End it, and with it all ranks."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


nurseries: dict[int, Nursery] = {}


def outcomes_of(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    limit_s: float = 60.0,
    environment: Mapping[str, str] | None = None,
) -> list[Outcome]:
    """Run `function(*args)` on so many ranks and say how each ended; the function is a module's own.

    Never raises for what the ranks do; a rank that is killed at the limit has status -9.
    """
    if os.getpid() not in nurseries:
        nurseries[os.getpid()] = Nursery()
        atexit.register(nurseries[os.getpid()].close)
    call = pickle.dumps((function, args))
    request = Request(call, world_size, limit_s, dict(environment or {}), tuple(sys.path))
    return nurseries[os.getpid()].ask(request)


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    limit_s: float = 60.0,
    environment: Mapping[str, str] | None = None,
) -> list[Any]:
    """Run `function(*args)` on so many ranks and return what they return; an error of any is an error here."""
    outcomes = outcomes_of(function, world_size, *args, limit_s=limit_s, environment=environment)
    bad = [outcome for outcome in outcomes if outcome.error or outcome.status]
    if bad:
        texts = [f"--- rank {one.rank}, status {one.status}\n{one.output}{one.error}" for one in bad]
        raise AssertionError(f"{len(bad)} of {world_size} ranks failed\n" + "\n".join(texts))
    return [outcome.value for outcome in outcomes]


def free_port() -> int:
    """Find a TCP port on loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def serve(requests: IO[bytes], replies: IO[bytes]) -> None:
    """Answer requests until there are no more: the nursery's own life."""
    while isinstance(request := read(requests), Request):
        sys.path[:] = request.paths
        for name in PRELOADED:
            with contextlib.suppress(Exception):  # the ranks will meet it too, and say so
                importlib.import_module(name)
        sys.modules["torch"].set_num_threads(1)
        with tempfile.TemporaryDirectory() as folder:
            write(replies, Brood(request, Path(folder)).raise_all(requests))


class Brood:
    """The ranks of one request."""

    def __init__(self, request: Request, folder: Path) -> None:
        self.request, self.folder = request, folder
        self.started = time.monotonic()
        self.port = free_port()
        self.pids: list[int] = []
        self.status: dict[int, int] = {}
        self.took_s: dict[int, float] = {}

    def raise_all(self, requests: IO[bytes]) -> list[Outcome]:
        """Fork the ranks, wait, kill what is late, and collect."""
        for rank in range(self.request.world_size):
            pid = os.fork()
            if pid == 0:
                self.live(rank)
            self.pids.append(pid)
            os.setpgid(pid, self.pids[0])
        while len(self.status) < len(self.pids):
            self.reap()
            orphaned = bool(select.select([requests], [], [], 0.003)[0])  # only the end comes in between
            if orphaned or time.monotonic() - self.started > self.request.limit_s:
                self.kill()
        self.kill()
        return [self.outcome(rank) for rank in range(self.request.world_size)]

    def reap(self) -> None:
        """Note the ranks that have ended."""
        for rank, pid in enumerate(self.pids):
            if rank in self.status:
                continue
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                self.status[rank] = os.waitstatus_to_exitcode(status)
                self.took_s[rank] = time.monotonic() - self.started

    def kill(self) -> None:
        """Kill the whole process group, children of ranks too."""
        try:
            os.killpg(self.pids[0], signal.SIGKILL)
        except ProcessLookupError:
            pass  # all have ended

    def outcome(self, rank: int) -> Outcome:
        """Read what a rank left."""
        result = self.folder / f"{rank}.pickle"
        value, error = pickle.loads(result.read_bytes()) if result.exists() else (None, "")
        output = (self.folder / f"{rank}.txt").read_text(errors="replace")
        return Outcome(rank, value, error, output, self.status[rank], self.took_s[rank])

    def live(self, rank: int) -> NoReturn:
        """Be a rank: call the function, leave the result in a file, and end as a script would."""
        ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)
        os.setpgid(0, self.pids[0] if self.pids else 0)
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.request.world_size),
            "LOCAL_WORLD_SIZE": str(self.request.world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.port),
            **self.request.environment,
        }
        with open(self.folder / f"{rank}.txt", "w") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        os.close(0)
        sys.stdin, sys.stdout, sys.stderr = open(os.devnull), open(1, "w", closefd=False), open(2, "w", closefd=False)
        value, error, status = None, "", 0
        try:
            function, arguments = pickle.loads(self.request.call)
            value = function(*arguments)
        except BaseException:
            error, status = traceback.format_exc(), 1
        (self.folder / f"{rank}.part").write_bytes(pickle.dumps((value, error)))
        os.replace(self.folder / f"{rank}.part", self.folder / f"{rank}.pickle")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def read(stream: IO[bytes]) -> Any:
    """Read one object; None at the end."""
    size = stream.read(8)
    return pickle.loads(stream.read(int.from_bytes(size, "little"))) if len(size) == 8 else None


def write(stream: IO[bytes], what: Any) -> None:
    """Write one object."""
    content = pickle.dumps(what)
    stream.write(len(content).to_bytes(8, "little") + content)
    stream.flush()


if __name__ == "__main__":
    import ranks  # so that what is pickled has the same module on both sides

    ranks.serve(sys.stdin.buffer, sys.stdout.buffer)
