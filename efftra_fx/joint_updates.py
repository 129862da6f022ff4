"""Refuse optimizers whose update of one number needs others that this rank does not hold.

An optimizer like Adam updates each number by its own gradients, so each rank can update its own.
L-BFGS takes directions and steps from all gradients together, others scale by a norm over all
parameters (or over one, which several ranks may hold in shares): on a part they would take other
steps than on one device, and each rank its own. Which an optimizer does is found by trying it on
small parameters, together and apart, before its first step.
"""

from __future__ import annotations

import copy
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from efftra_fx.errors import InputError

_PARTS: WeakIdKeyDictionary = WeakIdKeyDictionary()  # parameters of ranks that hold others: whether it is a share
_KNOWN: WeakIdKeyDictionary = WeakIdKeyDictionary()  # optimizers that were looked at
_STEPS = 2


@dataclass(frozen=True)
class Manner:
    """How an optimizer updates; None where it cannot be tried."""

    by_parameter: bool | None  # each parameter by its own gradients
    by_number: bool | None  # each number of a parameter by its own gradients
    draws: bool = False  # random numbers


def note_parts(parameters: Iterable[Tensor], parts: bool, shares: Collection[int] = ()) -> None:
    """Remember whether other ranks hold other parameters of the model than these, and which (by `id`) are shares."""
    for parameter in parameters:
        if parts:
            _watch()
            _PARTS[parameter] = id(parameter) in shares
        else:
            _PARTS.pop(parameter, None)


@cache
def _watch() -> None:
    register_optimizer_step_pre_hook(_refuse)


def _refuse(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if optimizer in _KNOWN:
        return
    held = [_PARTS[p] for group in optimizer.param_groups for p in group["params"] if p in _PARTS]
    if not held:
        return
    name = type(optimizer).__name__
    manner = manner_of(optimizer)
    if manner.by_parameter is False or isinstance(optimizer, torch.optim.LBFGS):
        raise InputError(
            f"{name} updates all parameters together, but each rank holds those of its stage only; use an optimizer "
            "that updates each parameter by its own gradient, such as AdamW, or a plan of one stage with replicas"
        )
    if any(held) and manner.by_number is False:
        raise InputError(
            f"{name} updates a parameter's numbers together, but this plan cuts parameters over ranks; use an "
            "optimizer that updates each number by its own gradient, such as AdamW, or a plan of tensor width 1"
        )
    _KNOWN[optimizer] = None
    if manner.draws:
        print(
            f"efftra_fx: {name} draws random numbers, each rank for its own parameters: others than one device draws",
            file=sys.stderr,
        )
    if manner.by_parameter is None:
        print(
            f"efftra_fx: {name} could not be tried on small parameters; it must update each parameter by its own "
            "gradient, since each rank holds those of its stage only",
            file=sys.stderr,
        )


def manner_of(optimizer: torch.optim.Optimizer) -> Manner:
    """Try an optimizer's own step, with the options of its first group, on small parameters."""
    device = next((p.device for group in optimizer.param_groups for p in group["params"]), torch.device("cpu"))
    values = torch.linspace(-1.3, 1.7, 48, dtype=torch.float64, device=device).reshape(2, 4, 6).cos()
    p, q = values[0], values[1]
    p_grads = [(values[0] * (k + 2)).sin() for k in range(_STEPS)]
    q_grads = [(values[1] * (k + 5)).sin() * 3 for k in range(_STEPS)]
    state = torch.get_rng_state()
    try:
        together = _updated(optimizer, [p, q], list(zip(p_grads, q_grads, strict=True)))
        draws = not torch.equal(state, torch.get_rng_state())
        if draws:
            return Manner(True, True, True)
        alone = [_updated(optimizer, [one], [(g,) for g in gs])[0] for one, gs in ((p, p_grads), (q, q_grads))]
        by_parameter = all(_same(a, b) for a, b in zip(together, alone, strict=True))
        by_number = by_parameter
        for dim in (0, 1):
            halves = [
                _updated(optimizer, [half], [(g.chunk(2, dim)[k],) for g in p_grads])[0]
                for k, half in enumerate(p.chunk(2, dim))
            ]
            by_number = by_number and _same(torch.cat(halves, dim), alone[0])
        return Manner(by_parameter, by_number)
    except Exception:
        return Manner(None, None)  # it wants more than it is given here, a closure for one
    finally:
        torch.set_rng_state(state)


def _updated(
    optimizer: torch.optim.Optimizer, values: Sequence[Tensor], gradients: Sequence[Sequence[Tensor]]
) -> list[Tensor]:
    """Return values after steps with these gradients, of an optimizer like the given one that has not begun."""
    parameters = [torch.nn.Parameter(value.clone(memory_format=torch.contiguous_format)) for value in values]
    twin = object.__new__(type(optimizer))
    twin.__dict__ |= optimizer.__dict__
    options = {k: copy.deepcopy(v) for k, v in optimizer.param_groups[0].items() if k not in ("params", "param_names")}
    if "lr" in options:
        options["lr"] = torch.full_like(options["lr"], 0.01) if isinstance(options["lr"], Tensor) else 0.01
    twin.param_groups, twin.state = [{**options, "params": parameters}], defaultdict(dict)
    twin.__dict__ |= {name: OrderedDict() for name in twin.__dict__ if name.endswith("_hooks")}
    twin.__dict__ |= {name: None for name in ("grad_scale", "found_inf") if name in twin.__dict__}
    step: Any = type(twin).step
    step = step.__wrapped__ if getattr(step, "hooked", False) else step  # without anybody's hooks
    for each in gradients:
        for parameter, gradient in zip(parameters, each, strict=True):
            parameter.grad = gradient.clone(memory_format=torch.contiguous_format)
        with torch.enable_grad():
            step(twin)
    return [parameter.detach() for parameter in parameters]


def _same(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-7, atol=1e-9)
