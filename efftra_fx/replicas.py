"""Parameters that several ranks hold stay alike, as long as every rank does the same with them between steps.

Ranks that hold the same parameter get the same gradient, so a difference comes from what the
script does on some ranks only: an optimizer's step, a learning rate, noise, new weights. It is
looked for at the second step and at every one whose number is a power of two, and before a state
is saved; that costs a pass over these parameters.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping

import torch
from torch import Tensor

from efftra_fx.alike import fingerprint
from efftra_fx.build import Built
from efftra_fx.errors import InputError
from efftra_fx.runtime.transport import describe
from efftra_fx.state import share_name
from efftra_fx.world import World


class ReplicaWatch:
    """Find, from time to time, that only some ranks have updated what all should."""

    def __init__(self) -> None:
        self.steps = 0
        self.versions: dict[str, int] = {}  # of the parameters that had a gradient after the first step

    def before_step(self, built: Built, world: World, parameters: Mapping[str, Tensor]) -> None:
        """Look, where it is time to; a collective call."""
        if self.steps == 1:
            note = note_of_idle(self.updated(parameters), world)
            if note is not None and world.first:
                print(f"efftra_fx: {note}", file=sys.stderr)
        if is_time(self.steps):
            same_replicas(built, world)
        self.steps += 1

    def after_step(self, parameters: Mapping[str, Tensor]) -> None:
        """Note what an optimizer has to do after the first step."""
        if self.steps == 1:
            trained = {n: p for n, p in parameters.items() if p.requires_grad and p.grad is not None}
            self.versions = {name: parameter._version for name, parameter in trained.items()}

    def updated(self, parameters: Mapping[str, Tensor]) -> bool | None:
        """Say whether any parameter was updated after the first step; None where none was to be."""
        if not self.versions:
            return None
        return any(parameters[name]._version != version for name, version in self.versions.items())


def is_time(steps: int) -> bool:
    """Say whether to look before a step, so many having been taken.

    >>> [steps for steps in range(20) if is_time(steps)]
    [1, 3, 7, 15]
    """
    return steps > 0 and steps & (steps + 1) == 0


def same_replicas(built: Built, world: World) -> None:
    """Raise InputError on every rank where ranks hold other values of one parameter; a collective call."""
    if len(world.transports) > 1 or world.size == 1:
        return
    holders = _holders(built, world.size)
    if not holders:
        return
    ((rank, held),) = built.tensors.items()
    everyone = world.gather(
        {
            key: fingerprint(held.parameters[name])
            for key, (name, ranks) in holders.items()
            if rank in ranks and name in held.parameters
        }
    )
    for key, (name, ranks) in holders.items():
        eps = torch.finfo(built.front.tensors["parameter", name].dtype).eps
        for other in ranks[1:]:
            if not _close(everyone[ranks[0]].get(key), everyone[other].get(key), eps):
                raise InputError(
                    f"ranks {ranks[0]} and {other} both hold '{name}', with the same gradient, but not with the same "
                    "values any more; do on every rank what you do on one: steps of optimizers and schedulers, "
                    "learning rates, noise (seeded alike), new weights"
                )


def note_of_idle(updated: bool | None, world: World) -> str | None:
    """Return what to say where some ranks have updated their parameters and others have not; a collective call.

    `updated` is None on ranks that train nothing.
    """
    if len(world.transports) > 1 or world.size == 1:
        return None
    everyone = world.gather(updated)
    idle = [rank for rank, one in enumerate(everyone) if one is False]
    if True not in everyone or not idle:
        return None
    return (
        f"{describe(idle)} updated no parameter after the first step, but rank {everyone.index(True)} did; if that is "
        "not meant, call optimizer.step() on every rank, for all of its parameters"
    )


def _holders(built: Built, size: int) -> dict[str, tuple[str, list[int]]]:
    """Return the ranks of each trained parameter, or share of one, that several ranks hold."""
    found: dict[str, tuple[str, list[int]]] = {}
    plan = built.back.plan
    for rank in range(size):
        stage = next((s for s, one in enumerate(plan.stages) if rank in one.devices), None)
        shares = built.shares(rank)
        for parameter in built.back.wiring.parameters:
            if stage is None or stage not in parameter.stages or not parameter.trainable:
                continue
            number = plan.stages[stage].devices.index(rank) % plan.stages[stage].tensor
            key = share_name(parameter.name, number) if parameter.name in shares else parameter.name
            found.setdefault(key, (parameter.name, []))[1].append(rank)
    return {key: one for key, one in found.items() if len(one[1]) > 1}


def _close(one: list[float] | None, other: list[float] | None, eps: float) -> bool:
    """Say whether fingerprints agree to rounding: machines of two kinds may round updates in two ways."""
    if one is None or other is None or one == other:
        return True
    scale = max(one[2], other[2])
    if not math.isfinite(scale):
        return math.isfinite(one[2]) == math.isfinite(other[2])
    apart = max(abs(one[0] - other[0]), abs(one[1] - other[1]))
    return apart <= scale * (64 * eps if eps < 1e-6 else eps)
