"""Loss scaling over several ranks: what overflows on one rank is seen by all.

Each rank has only its own stage's gradients, so an ordinary `GradScaler` would skip the update
on the rank that overflowed and take it on the others. Where any rank has a gradient that is
not finite, every rank is given one; so all of them skip, and all change the scale alike.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from efftra_fx.errors import InputError
from efftra_fx.world import World


def scale_of(scaler: Any) -> float:
    """Return the factor by which a `torch.amp.GradScaler` wants the loss multiplied; raises InputError for others."""
    if not isinstance(scaler, torch.amp.GradScaler):
        raise InputError(f"scaler must be a torch.amp.GradScaler, got {type(scaler).__name__}")
    if not scaler.is_enabled():
        return 1.0
    return float(scaler.scale(torch.ones((), device=scaler._device)))  # the first call makes the scale


def share_overflow(parameters: Iterable[nn.Parameter], world: World, stand_in: nn.Parameter) -> None:
    """Let every rank have a gradient that is not finite where any rank has one; a collective call.

    A rank without any gradient shows it on `stand_in`, if that is one of its parameters: a scaler that finds no
    gradient at all refuses to go on.
    """
    listed = list(parameters)
    held = [p for p in listed if p.grad is not None and p is not stand_in]
    mine = not all(bool(torch.isfinite(p.grad).all()) for p in held if p.grad is not None)
    overflow = any(world.gather(mine))
    if not held and any(p is stand_in for p in listed):
        stand_in.grad = torch.full_like(stand_in, float("inf") if overflow else 0.0)
    if overflow:
        for parameter in held[:1]:
            assert parameter.grad is not None
            parameter.grad = torch.full_like(parameter.grad, float("inf"))
