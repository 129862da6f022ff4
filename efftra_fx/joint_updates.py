"""Refuse optimizers that update all parameters together where a rank holds only some of them.

An optimizer like Adam updates each parameter by its own gradient, so each rank can update its
own. L-BFGS takes directions and steps from all gradients together: on a part of the parameters
it would take others than on one device, and each rank its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from efftra_fx.errors import InputError

_PARTS: WeakIdKeyDictionary = WeakIdKeyDictionary()


def note_parts(parameters: Iterable[Tensor], parts: bool) -> None:
    """Remember whether other ranks hold other parameters of the model than these."""
    for parameter in parameters:
        if parts:
            _watch()
            _PARTS[parameter] = None
        else:
            _PARTS.pop(parameter, None)


@cache
def _watch() -> None:
    register_optimizer_step_pre_hook(_refuse)


def _refuse(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if isinstance(optimizer, torch.optim.LBFGS) and any(
        p in _PARTS for group in optimizer.param_groups for p in group["params"]
    ):
        raise InputError(
            "LBFGS updates all parameters together, but each rank holds those of its stage only; use an optimizer that "
            "updates each parameter by its own gradient, such as AdamW, or a plan of one stage with replicas"
        )
