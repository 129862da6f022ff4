"""The model's own parameters, beside those that this rank trains: a script may freeze or write either.

A rank trains the parameters of its stages. Most are the model's own; shares of a parameter and
copies on another device are tensors of their own. What the script does to one of the two holds
for the other: `requires_grad` at once, and on all ranks; a write into the model's own parameter
only as long as it has the current value, for else nobody can know what was meant.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from efftra_fx.build import Built
from efftra_fx.errors import InputError
from efftra_fx.held_buffers import same_bits
from efftra_fx.runtime.whereabouts import HERE
from efftra_fx.state import all_parameters, take_state
from efftra_fx.world import World

_SAMPLED = 16

_TOLD: WeakKeyDictionary[nn.Module, None] = WeakKeyDictionary()


def tell_of_old_values(module: nn.Module, *_: Any) -> None:
    """Say once, where the script asks for the model's own state, that it is not what all ranks have trained."""
    if HERE.call is None and module not in _TOLD:
        _TOLD[module] = None
        print(
            "efftra_fx: model.state_dict() has old values of what other ranks have trained; program.state_dict() has "
            "the current ones",
            file=sys.stderr,
        )


def watch_state(model: nn.Module) -> None:
    """Have `tell_of_old_values` called where the script asks for the model's own state."""
    if not any(hook is tell_of_old_values for hook in model._state_dict_pre_hooks.values()):
        model.register_state_dict_pre_hook(tell_of_old_values)


def _sample(tensor: Tensor) -> Tensor:
    """Return some values from all over a tensor: what is written through `.data` raises no version."""
    values = tensor.detach()
    values = values.view(-1) if values.is_contiguous() else values.reshape(-1)
    return values[:: max(1, values.numel() // _SAMPLED)]


class OwnTensors:
    """What the model's own parameters and this rank's were when they were looked at last."""

    def __init__(self, built: Built, model: nn.Module, loss_fn: object, world: World) -> None:
        self.built, self.model, self.world = built, model, world
        self.own = dict(all_parameters(model, loss_fn))
        self.apart: dict[str, nn.Parameter] = {}
        if len(world.transports) == 1 and world.size > 1:
            ((_, held),) = built.tensors.items()
            self.apart = {
                name: tensor
                for name, tensor in held.parameters.items()
                if isinstance(tensor, nn.Parameter) and tensor is not self.own.get(name, tensor)
            }
        self.trains = {name: parameter.requires_grad for name, parameter in self.own.items()}
        self.versions: dict[str, tuple[int, int]] = {}
        self.samples: dict[str, Tensor] = {}
        self.note()

    def note(self) -> None:
        """Note that the model's own parameters have the current values, as after loading."""
        self.versions = {name: (self.own[name]._version, held._version) for name, held in self.apart.items()}
        self.samples = {name: _sample(self.own[name]).clone() for name in self.apart}

    def take_writes(self) -> None:
        """Take over what was written into the model's own parameters; a few values tell of writes past autograd.

        Raise InputError where such a parameter had no current value any more.
        """
        written = [
            name
            for name, (version, _) in self.versions.items()
            if self.own[name]._version != version or not same_bits(_sample(self.own[name]), self.samples[name])
        ]
        if not written:
            return
        for name in written:
            if self.apart[name]._version != self.versions[name][1]:
                self.versions[name] = self.own[name]._version, self.versions[name][1]
                self.samples[name] = _sample(self.own[name]).clone()
                raise InputError(
                    f"the model's own '{name}' was written, but it has not the values that were trained, since each "
                    "rank holds a share or copy of it; write into the tensors of named_parameters(), or give new "
                    f"values by load_state_dict({{'{name}': ...}}, strict=False)"
                )
        take_state(self.built, self.model, written)
        self.note()

    def take_switches(self) -> None:
        """Let the model's own parameters and this rank's have the same `requires_grad`, the one that was set."""
        for name, held in self.apart.items():
            if held.requires_grad != self.trains[name]:
                self.own[name].requires_grad_(held.requires_grad)
            elif self.own[name].requires_grad != held.requires_grad:
                held.requires_grad_(self.own[name].requires_grad)

    def agree_on_switches(self) -> bool:
        """Take over what other ranks have switched; return whether that was anything. A collective call."""
        mine = {n: p.requires_grad for n, p in self.own.items() if p.requires_grad != self.trains[n]}
        everyone: list[Mapping[str, bool]] = self.world.gather(mine)
        if all(one == mine for one in everyone) and len(set(map(str, everyone))) == 1:
            return False
        for one in everyone:
            for name, trains in one.items():
                self.own[name].requires_grad_(trains)
                if name in self.apart:
                    self.apart[name].requires_grad_(trains)
        return True

    def note_switches(self) -> None:
        """Note that all ranks have the same."""
        for name, parameter in self.own.items():
            self.trains[name] = parameter.requires_grad
