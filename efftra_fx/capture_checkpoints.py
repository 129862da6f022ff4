"""Reentrant checkpoints (`torch.utils.checkpoint(..., use_reentrant=True)`), written so that a graph can say them.

Torch makes them of an `autograd.Function` whose backward runs another whole backward, which neither a graph nor
`torch.autograd.grad` can follow. What they compute is the function itself, and, as torch warns, without any
gradients where no argument wants one. What a stage recomputes is the plan's choice, and code that runs as it is runs
again in the backward as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointFunction


@contextmanager
def checkpoints_inline() -> Iterator[None]:
    """While this lasts, reentrant checkpoints call their functions as any other code would."""

    def apply(function: Any, preserve_rng_state: bool, *args: Any) -> Any:
        if any(isinstance(arg, Tensor) and arg.requires_grad for arg in args) or not torch.is_grad_enabled():
            return function(*args)
        with torch.no_grad():
            return function(*args)

    before = CheckpointFunction.__dict__.get("apply")
    CheckpointFunction.apply = staticmethod(apply)  # type: ignore[method-assign]
    try:
        yield
    finally:
        if before is None:
            del CheckpointFunction.apply
        else:
            CheckpointFunction.apply = before  # type: ignore[method-assign]


__all__ = ["checkpoints_inline"]
