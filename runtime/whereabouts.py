"""What this process is doing, for other ranks that wait for it: which call of which program, or which line outside.

All calls of a program that involve other ranks are made by every rank, in the same order. A rank
that waits in one can ask the others where they are. If one is inside a call that this rank has
not begun, neither can ever go on, whatever the time limit is: so that is told at once.

    rank 0   world 0, call 3 (step)         waits for rank 1
    rank 1   world 1, call 2 (evaluate)     waits for rank 0, which has not begun it
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from efftra_fx import errors
from efftra_fx.errors import InputError

_PACKAGE, _HERE = Path(errors.__file__).parent, Path(__file__).resolve().parent
_INSIDE = tuple(f"{path}/" for path in (Path(torch.__file__).parent, _PACKAGE, _HERE, _HERE.parent / "passes"))


@dataclass(frozen=True)
class Call:
    """A call that every rank makes: of which world (the ranks' connections, counted), which one, and its name."""

    world: int
    number: int
    name: str

    def __str__(self) -> str:
        return f"{self.name} (call {self.number} of program {self.world})"


@dataclass(frozen=True)
class Place:
    """Where a rank is: in a call, or at a line outside of all calls; `serial` counts the calls that it has begun."""

    call: Call | None
    line: str
    serial: int

    def __str__(self) -> str:
        at = f", at {self.line}" if self.line else ""
        return f"in {self.call}{at}" if self.call is not None else f"in no call of a program{at}"

    def to_data(self) -> dict[str, Any]:
        """Return it as plain data."""
        call = self.call
        return {
            "call": None if call is None else [call.world, call.number, call.name],
            "line": self.line,
            "serial": self.serial,
        }

    @staticmethod
    def from_data(data: dict[str, Any]) -> Place:
        """Read plain data."""
        return Place(None if data["call"] is None else Call(*data["call"]), data["line"], data["serial"])


class Whereabouts:
    """The calls that this process is in and has begun."""

    def __init__(self) -> None:
        self.call: Call | None = None
        self.thread = threading.main_thread().ident
        self.serial = 0
        self.begun: dict[int, int] = {}  # by world, the last call
        self.lock = threading.Lock()

    def has_begun(self, call: Call) -> bool:
        """Say whether this process is in the call, or has been."""
        return self.begun.get(call.world, -1) >= call.number

    def place(self) -> Place:
        """Say where this process is now; called from any thread."""
        call, serial = self.call, self.serial
        frame = sys._current_frames().get(self.thread or 0)
        return Place(call, line_of(frame), serial)

    @contextmanager
    def calling(self, call: Call) -> Iterator[bool]:
        """Be in a call meanwhile, unless this thread is in one already; yields whether it was not.

        Raise `InputError` where another thread is: ranks would meet each other's calls in another order.
        """
        me = threading.get_ident()
        with self.lock:
            inside = self.call is not None
            if inside and self.thread != me:
                raise InputError(
                    f"{call.name} was called while another thread is in {self.call}; ranks must make the same calls "
                    "in the same order, so make all calls of programs from one thread"
                )
            if not inside:
                self.call, self.thread = call, me
                self.serial += 1
                self.begun[call.world] = max(call.number, self.begun.get(call.world, -1))
        if inside:
            yield False
            return
        try:
            yield True
        finally:
            self.call = None


HERE = Whereabouts()


def line_of(frame: FrameType | None) -> str:
    """Return the innermost line that is neither torch's nor this package's, or nothing."""
    innermost = ""
    while frame is not None:
        file = frame.f_code.co_filename
        if not (file.startswith(_INSIDE) or file.startswith("<")):
            text = f"{Path(file).name} line {frame.f_lineno}"
            if "/lib/python" not in file:
                return text
            innermost = innermost or text
        frame = frame.f_back
    return innermost


def never_meet(mine: Call, others: dict[int, Place]) -> int | None:
    """Return a rank that is inside a call which this process, waiting in another one, has not begun."""
    for rank, place in sorted(others.items()):
        call = place.call
        if call is not None and call != mine and not HERE.has_begun(call):
            return rank
    return None
