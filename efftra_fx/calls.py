"""Methods that every rank calls, in the same order: they say so while they run, so that others can be told."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

Method = TypeVar("Method", bound=Callable[..., Any])


def every_rank(method: Method) -> Method:
    """Let a method be a call of every rank, under its own name; wrong arguments are plain errors of the caller.

    The object says by `_calling(name)`, a context, that it is in a call.
    """
    signature = inspect.signature(method)

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        signature.bind(self, *args, **kwargs)
        with self._calling(method.__name__):
            return method(self, *args, **kwargs)

    return cast(Method, call)
