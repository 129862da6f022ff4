"""Checkpoints (`torch.utils.checkpoint`), written so that a graph can say them.

Torch makes the reentrant ones of an `autograd.Function` whose backward runs another whole backward, which neither a
graph nor `torch.autograd.grad` can follow. What they compute is the function itself, and, as torch warns, without any
gradients where no argument wants one. The others compute the function with hooks on what is saved; in one that is
inside another a tracer takes the switches of gradients in those hooks for the model's. What a stage recomputes is the
plan's choice, and code that runs as it is runs again in the backward as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointFunction

from efftra_fx import private


@contextmanager
def checkpoints_inline() -> Iterator[None]:
    """While this lasts, checkpoints call their functions as any other code would."""

    def apply(function: Any, preserve_rng_state: bool, *args: Any) -> Any:
        if any(isinstance(arg, Tensor) and arg.requires_grad for arg in args) or not torch.is_grad_enabled():
            return function(*args)
        with torch.no_grad():
            return function(*args)

    before = CheckpointFunction.__dict__.get("apply")
    CheckpointFunction.apply = staticmethod(apply)  # type: ignore[method-assign]
    try:
        with private.checkpoints_without_hooks():
            yield
    finally:
        if before is None:
            del CheckpointFunction.apply
        else:
            CheckpointFunction.apply = before  # type: ignore[method-assign]


__all__ = ["checkpoints_inline"]
