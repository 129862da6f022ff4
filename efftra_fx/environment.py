"""What user code reads of the environment: set between steps, it makes another form, like other settings."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from efftra_fx.places import is_user_file
from efftra_fx.python_reads import MISSING, Read

_BETWEEN = (os.getenv.__code__.co_filename, Mapping.get.__code__.co_filename)  # they ask for an item, too


@contextmanager
def environment_noted(note: Callable[[Read], object]) -> Iterator[None]:
    """While this lasts, note each variable that a user's code reads from `os.environ`, with the value that it has."""
    kind: Any = type(os.environ)
    original = kind.__getitem__

    def get(held: Any, name: str) -> str:
        if held is os.environ and _asked_by_user():
            note(Read(f"environment variable '{name}'", name, _look(original, name), partial(_look, original, name)))
        found: str = original(held, name)
        return found

    kind.__getitem__ = get
    try:
        yield
    finally:
        kind.__getitem__ = original


def _look(original: Callable[[Any, str], str], name: str) -> Any:
    try:
        return original(os.environ, name)
    except KeyError:
        return MISSING


def _asked_by_user() -> bool:
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename in (*_BETWEEN, __file__):
        frame = frame.f_back
    return frame is not None and is_user_file(frame.f_code.co_filename)


__all__ = ["environment_noted"]
