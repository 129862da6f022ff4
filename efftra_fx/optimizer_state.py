"""The whole state of an optimizer whose parameters lie on several ranks, under the model's own names.

What an optimizer keeps for a parameter is one of three things: tensors of the parameter's shape
(moments), which are cut and put together as the parameter is; numbers, which are the same for all
of its shares (steps); and all else, which is copied as it is where the parameter is whole. So
nothing here knows any optimizer.

The whole state has the form of `optimizer.state_dict()` of the same optimizer over the plain
model, and `names` beside, by which it is read again: by any plan, with parameters in any order.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from efftra_fx.alike import agree_on_state
from efftra_fx.build import Built, Share
from efftra_fx.errors import CheckpointError, EfftraError, InputError
from efftra_fx.plain_data import pack, unpack
from efftra_fx.runtime.checkpoint import Owned, share_tensors
from efftra_fx.state import all_parameters, join_shares, owned, whole_name
from efftra_fx.world import World


@dataclass(frozen=True)
class Group:
    """A group of parameters by name, and its options as plain data."""

    names: tuple[str, ...]
    options: Any


@dataclass
class Whole:
    """A whole state by name: what is kept for each parameter, and for none in particular."""

    groups: list[Group]
    states: dict[str, Any] = field(default_factory=dict)
    others: dict[str, Any] = field(default_factory=dict)


class Names:
    """The names of an optimizer's parameters; what a rank trains only to have something has none."""

    def __init__(self, built: Built, model: nn.Module, loss_fn: Any, stand_in: Tensor) -> None:
        self.order = {name: number for number, (name, _) in enumerate(all_parameters(model, loss_fn))}
        self.by_id = {id(parameter): name for name, parameter in all_parameters(model, loss_fn)}
        for held in built.tensors.values():
            self.by_id |= {id(tensor): name for name, tensor in held.parameters.items() if name in self.order}
        self.stand_in = stand_in

    def of(self, parameter: Tensor) -> str | None:
        """Return a parameter's name, None of the stand-in; raise CheckpointError for what is not of the model."""
        name = self.by_id.get(id(parameter))
        if name is None and parameter is not self.stand_in:
            raise CheckpointError(
                f"the optimizer has a parameter of shape {list(parameter.shape)} that is none of the program's; make "
                "it from program.parameters(), after compile"
            )
        return name

    def groups(self, optimizer: torch.optim.Optimizer) -> list[Group]:
        """Return this process's groups."""
        found = []
        for number, group in enumerate(optimizer.param_groups):
            names = [name for parameter in group["params"] if (name := self.of(parameter)) is not None]
            options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
            found.append(Group(tuple(names), pack(options, None, f"option of group {number}")))
        return found


@dataclass(frozen=True)
class Laid:
    """An optimizer over the parameters that the ranks of this process hold."""

    optimizer: torch.optim.Optimizer
    names: Names
    built: Built
    world: World
    model: nn.Module
    loss_fn: Any

    def agree(self, problem: EfftraError | None = None) -> None:
        """Raise on every rank where one cannot go on; a collective call."""
        if problem is None and not isinstance(self.optimizer, torch.optim.Optimizer):
            problem = InputError(f"optimizer must be a torch.optim.Optimizer, got {type(self.optimizer).__name__}")
        self.world.agree_on_call(problem)

    def save(self) -> dict[str, Any]:
        """Return the state of the same optimizer over the whole model, the same on every rank; a collective call.

        Raises CheckpointError on every rank for what is no data, or cannot be put together from shares.
        """
        self.agree()
        tensors: list[Tensor] = []
        problem: CheckpointError | None = None
        mine: dict[str, Any] = {}
        try:
            mine = self._mine(tensors)
        except CheckpointError as error:
            problem = error
        self.agree(problem)
        everyone = self.world.gather(mine)
        if len(everyone) == 1:
            leaves = [[tensor.detach().clone() for tensor in tensors]]
        else:
            leaves = _shared_leaves([one["leaves"] for one in everyone], tensors, self.world)
        groups = [[Group(tuple(names), options) for names, options in one["groups"]] for one in everyone]
        if not alike(groups) and self.world.first:
            print(
                "efftra_fx: ranks have different groups of parameters, and so different states of schedulers over "
                "them; make the same groups on every rank, empty where a rank holds none of their parameters",
                file=sys.stderr,
            )
        whole = Whole(merged(groups, self.names.order))
        pieces: dict[str, Any] = {}
        for one, found in zip(everyone, leaves, strict=True):
            pieces |= {name: unpack(value, found) for name, value in one["states"].items()}
            for key, value in one["others"].items():
                whole.others.setdefault(key, unpack(value, found))
        whole.states = _joined(pieces, self.built, self._listed())
        return numbered(whole, any("param_names" in group for group in self.optimizer.param_groups))

    def _listed(self) -> list[Owned]:
        listed = owned(self.built, self.model, self.loss_fn, gradients=False)
        return [item for item, _ in listed if whole_name(item.name) in self.names.order]

    def _mine(self, tensors: list[Tensor]) -> dict[str, Any]:
        """Return what this process owns of the state as plain data, tensors put into a list."""
        here = {whole_name(item.name): item.name for item in self._listed() if item.owner in self.world.ranks}
        groups = [[list(group.names), group.options] for group in self.names.groups(self.optimizer)]
        states: dict[str, Any] = {}
        others: dict[str, Any] = {}
        for key, value in self.optimizer.state.items():
            if not isinstance(key, Tensor):
                others[str(key)] = pack(value, tensors, f"state '{key}'")
            elif (name := self.names.of(key)) in here and name is not None:
                states[here[name]] = pack(value, tensors, f"state of '{name}'")
        leaves = [[list(tensor.shape), str(tensor.dtype).removeprefix("torch.")] for tensor in tensors]
        return {"groups": groups, "states": states, "others": others, "leaves": leaves}

    def load(self, state: Any) -> None:
        """Take this process's part of a whole state; a collective call.

        Raises CheckpointError on every rank, before anything is changed, where the state does not fit.
        """
        self.agree()
        problem: EfftraError | None = None
        groups: list[Group] = []
        try:
            groups = self.names.groups(self.optimizer)
        except CheckpointError as error:
            problem = error
        self.agree(problem)
        everyone = self.world.gather([[list(group.names), group.options] for group in groups])
        whole, part = Whole([]), dict[str, Any]()
        try:
            known = merged(
                [[Group(tuple(names), options) for names, options in one] for one in everyone], self.names.order
            )
            whole = read_state(state, known)
            part = self._part(whole)
        except CheckpointError as error:
            problem = error
        agree_on_state(self.world, problem, dict(_tensors(whole.states, "state")))
        self.world.agree_on_arguments(None, json.dumps([group.options for group in whole.groups]))
        self.optimizer.load_state_dict(part)

    def _part(self, whole: Whole) -> dict[str, Any]:
        """Return this process's part, in the form of its optimizer's own state."""
        shapes = {name: parameter.shape for name, parameter in all_parameters(self.model, self.loss_fn)}
        ((rank, _), *several) = self.built.tensors.items()
        shares = {} if several else self.built.shares(rank)
        saved = {name: group for group in whole.groups for name in group.names}
        groups, states, count = [], dict[Any, Any](whole.others), 0
        for number, group in enumerate(self.optimizer.param_groups):
            own = [self.names.of(parameter) for parameter in group["params"]]
            options = [saved[name].options for name in own if name is not None]
            if not options and len(whole.groups) == len(self.optimizer.param_groups):
                options = [whole.groups[number].options]
            if any(one != options[0] for one in options[1:]):
                raise CheckpointError(
                    f"group {number} has parameters that were saved with different options, such as '{own[0]}'; make "
                    "the groups that the state was saved from"
                )
            kept = {key: value for key, value in group.items() if key != "params"}
            read = unpack(options[0], []) if options else {}
            groups.append({**kept, **read, "params": list(range(count, count + len(own)))})
            for place, name in enumerate(own, count):
                if name is not None and name in whole.states:
                    states[place] = _part(whole.states[name], shares.get(name), shapes[name])
            count += len(own)
        return {"state": states, "param_groups": groups}


def _shared_leaves(described: Sequence[Any], mine: Sequence[Tensor], world: World) -> list[list[Tensor]]:
    """Return every rank's tensors on every rank."""
    items = [
        Owned(f"optimizer state {rank}.{number}", rank, tuple(shape), getattr(torch, dtype))
        for rank, leaves in enumerate(described)
        for number, (shape, dtype) in enumerate(leaves)
    ]
    rank = world.ranks[0]
    sent = {f"optimizer state {rank}.{number}": tensor.to(world.device) for number, tensor in enumerate(mine)}
    came = world.run(lambda transport: share_tensors(transport, items, sent))[0]
    return [
        [came[f"optimizer state {rank}.{number}"] for number in range(len(leaves))]
        for rank, leaves in enumerate(described)
    ]


def _joined(pieces: Mapping[str, Any], built: Built, listed: Sequence[Owned]) -> dict[str, Any]:
    """Put together what ranks keep for their shares of a parameter."""
    found: dict[str, Any] = {name: value for name, value in pieces.items() if whole_name(name) == name}
    cut: dict[str, dict[str, Any]] = {}
    for name, value in pieces.items():
        if whole_name(name) != name:
            cut.setdefault(whole_name(name), {})[name] = value
    shapes = {item.name: item.shape for item in listed}
    for name, shares in cut.items():
        found[name] = {}
        for key in next(iter(shares.values())):
            parts = {share: kept.get(key) for share, kept in shares.items()}
            if all(isinstance(part, Tensor) and part.shape == shapes[share] for share, part in parts.items()):
                found[name][key] = join_shares(built, parts)[name]
                continue
            first = next(iter(parts.values()))
            if not all(_same(first, part) for part in parts.values()):
                raise CheckpointError(
                    f"'{key}' of '{name}' is kept for each rank's share of the parameter, but has not the share's "
                    "shape, so the whole is not known; use a plan of tensor width 1 for this optimizer"
                )
            found[name][key] = first
    return found


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and bool((one == other).all())
    return type(one) is type(other) and bool(one == other)


def merged(everyone: Sequence[Sequence[Group]], order: Mapping[str, int]) -> list[Group]:
    """Put the groups of all ranks together: number by number where ranks have the same, else all one after another.

    >>> merged([[Group(("a",), 1), Group((), 2)], [Group(("b",), 1), Group(("c",), 2)]], {"a": 0, "b": 1, "c": 2})
    [Group(names=('a', 'b'), options=1), Group(names=('c',), options=2)]
    >>> merged([[Group(("c",), 3)], [Group(("a",), 1), Group(("b",), 2)]], {"a": 0, "b": 1, "c": 2})
    [Group(names=('a',), options=1), Group(names=('b',), options=2), Group(names=('c',), options=3)]
    """
    first = everyone[0]
    if alike(everyone):
        return [
            Group(_one_order([one[number].names for one in everyone], order), group.options)
            for number, group in enumerate(first)
        ]
    groups: dict[tuple[str, ...], Group] = {}
    for one in everyone:
        for group in one:
            if group.names:
                groups.setdefault(group.names, group)
    return sorted(groups.values(), key=lambda group: order[group.names[0]])


def alike(everyone: Sequence[Sequence[Group]]) -> bool:
    """Say whether all ranks have the same groups, whichever parameters of them they hold."""
    first = [group.options for group in everyone[0]]
    return all([group.options for group in one] == first for one in everyone)


def _one_order(lists: Sequence[Sequence[str]], order: Mapping[str, int]) -> tuple[str, ...]:
    """Join names in the order of the longest list if it has them all, else in the model's order."""
    every = {name for names in lists for name in names}
    longest = max(lists, key=len)
    return tuple(longest) if len(longest) == len(every) else tuple(sorted(every, key=order.__getitem__))


def numbered(whole: Whole, named: bool) -> dict[str, Any]:
    """Return a whole state in the form of an optimizer's own, parameters numbered through the groups."""
    numbers: dict[str, int] = {}
    groups = []
    for group in whole.groups:
        numbers |= {name: len(numbers) + k for k, name in enumerate(group.names)}
        options = unpack(group.options, [])
        if named:
            options["param_names"] = list(group.names)
        groups.append({**options, "params": [numbers[name] for name in group.names]})
    states: dict[Any, Any] = {numbers[name]: whole.states[name] for name in numbers if name in whole.states}
    return {
        "state": {**states, **whole.others},
        "param_groups": groups,
        "names": [list(group.names) for group in whole.groups],
    }


def read_state(state: Any, known: Sequence[Group]) -> Whole:
    """Read a whole state: by its `names`, by the names in its groups, or as that of a plain optimizer of these groups.

    `known` are the whole optimizer's groups. Raises CheckpointError saying what does not fit.
    """
    if not isinstance(state, Mapping) or not {"state", "param_groups"} <= set(state):
        raise CheckpointError("an optimizer's state must be a dictionary with 'state' and 'param_groups'")
    groups, named = list(state["param_groups"]), state.get("names")
    by_number: dict[Any, str] = {}
    whole = Whole([])
    for number, group in enumerate(groups):
        keys = list(group["params"])
        names = named[number] if named is not None else group.get("param_names")
        if names is None and all(isinstance(key, str) for key in keys):
            names = keys
        if names is None:
            lengths = [len(group["params"]) for group in groups], [len(group.names) for group in known]
            if lengths[0] != lengths[1]:
                raise CheckpointError(
                    f"the state has groups of {lengths[0]} parameters and no names, but the optimizer has groups of "
                    f"{lengths[1]}; make the same groups, or save it from an optimizer made of named_parameters()"
                )
            names = list(known[number].names)
        by_number |= dict(zip(keys, names, strict=True))
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        whole.groups.append(Group(tuple(names), pack(options, None, f"option of group {number}")))
    for key, value in state["state"].items():
        if key in by_number:
            whole.states[by_number[key]] = value
        elif isinstance(key, str):
            whole.others[key] = value
    held = {name for group in known for name in group.names}
    saved = {name for group in whole.groups for name in group.names}
    for what, names in (("is not in the state", held - saved), ("is not in the optimizer", saved - held)):
        if names:
            raise CheckpointError(
                f"the state does not fit the optimizer: '{min(names)}' {what} ({len(names)} like this); load it into "
                "an optimizer over the same parameters"
            )
    return whole


def _part(value: Any, share: Share | None, shape: torch.Size) -> Any:
    """Return a copy of what is kept for a parameter, tensors of its shape cut as it is."""
    if isinstance(value, Tensor):
        own = share is not None and value.shape == shape
        part = share.of(value) if share is not None and own else value
        return part.detach().clone(memory_format=torch.contiguous_format if own else torch.preserve_format)
    if isinstance(value, Mapping):
        return {key: _part(one, share, shape) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_part(one, share, shape) for one in value)
    return value


def _tensors(value: Any, prefix: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a nested value with names, for a comparison over ranks."""
    if isinstance(value, Tensor):
        yield prefix, value
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from _tensors(one, f"{prefix}.{key}")
    elif isinstance(value, list | tuple):
        for number, one in enumerate(value):
            yield from _tensors(one, f"{prefix}.{number}")
