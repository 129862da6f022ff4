"""How an operator of a graph is called: the expression that generated code uses for it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from efftra_fx import private


def callable_for(overload: torch._ops.OpOverload) -> Callable[..., object]:
    """Return the cheapest callable that is this very overload."""
    return private.resolved(overload)
