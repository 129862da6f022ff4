"""Everything of torch that is private and still needed, each behind a function of ours.

A release of torch that renames one of these breaks one function here and its test,
and nothing else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

UNBOXED_MODULES: tuple[str, ...] = ("_VariableFunctions", "_nn", "_linalg", "_special", "_fft", "_sparse", "_nested")


@functools.cache
def _autograd_keys() -> torch._C.DispatchKeySet:
    names = [name for name in dir(torch._C.DispatchKey) if name.startswith(("Autograd", "Autocast"))]
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
    for name in names:
        keys = keys | torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name))
    return keys


def below_autograd() -> AbstractContextManager[None]:
    """Return a guard under which operators skip autograd, view tracking and autocast.

    Unlike inference mode it makes normal tensors: gradients computed under it can be
    handed to an optimizer. It holds for the calling thread only.
    """
    return torch._C._ExcludeDispatchKeyGuard(_autograd_keys())  # type: ignore[no-any-return]


def resolved(overload: torch._ops.OpOverload) -> Callable[..., object]:
    """Return the boxed call of one overload without the Python layer around it."""
    return overload._op  # type: ignore[no-any-return]


def is_composite(overload: torch._ops.OpOverload) -> bool:
    """Tell whether torch implements the operator for all devices by calling other operators."""
    return bool(overload._can_decompose())


def sequence_number() -> int:
    """Return the number that autograd gives to the next node recorded in this thread."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]


def running_sequence_number() -> int:
    """Return the number of the autograd node that runs now in this thread, -1 when none does."""
    node = torch._C._current_autograd_node()
    return -1 if node is None else int(node._sequence_nr())
