"""Tensors over which several programs are laid: each takes over what the others have written since its last turn.

A rank trains the parameters of its own stages. Where a module is part of two models (a trained
backbone under a new head, the two nets that train against each other), the two programs may
hold a parameter on different ranks, and each rank's copy is current only while its program
has the turn. A program that gets its turn looks which copies have been written since all
ranks had the same, and gives them to everybody.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from efftra_fx.build import Built
from efftra_fx.errors import InputError
from efftra_fx.runtime.checkpoint import Owned, share_tensors
from efftra_fx.world import World


@dataclass
class _Turn:
    """Whose turn a tensor has, what it was when all ranks had the same, and this rank's copies elsewhere."""

    program: int
    mark: int
    holders: set[int] = field(default_factory=set)  # programs of which this rank holds it
    copies: list[weakref.ref[Tensor]] = field(default_factory=list)


_TURNS: WeakIdKeyDictionary = WeakIdKeyDictionary()
_latest: list[int] = [-1]


def begin_turns(program: int, built: Built, world: World) -> None:
    """Note a new program's tensors, which are alike on all ranks now."""
    if len(world.transports) > 1 or world.size == 1:
        return
    ((rank, held),) = built.tensors.items()
    dealt = {name for shares in map(built.shares, range(world.size)) for name in shares}
    for (kind, name), own in built.front.tensors.items():
        if kind == "constant" or name in dealt:
            continue
        turn = _TURNS.get(own)
        if turn is None:
            turn = _TURNS[own] = _Turn(program, 0)
        turn.program, turn.mark = program, _checksum(own)
        mine = (held.parameters if kind == "parameter" else held.buffers).get(name)
        if mine is not None:
            turn.holders.add(program)
        if mine is not None and mine is not own:
            turn.copies.append(weakref.ref(mine))
    _latest[0] = program


def take_turn(program: int, model: nn.Module, loss_fn: object, world: World) -> bool:
    """Bring tensors up to date with what other programs over them wrote, and say whether any; a collective call.

    Raises InputError where two programs' ranks wrote the same tensor since the last turn.
    """
    if _latest[0] in (program, -1) or len(world.transports) > 1 or world.size == 1:
        return False
    named = _named_tensors(model, loss_fn)
    others = [(n, t, turn) for n, t in named if (turn := _TURNS.get(t)) is not None and turn.program != program]
    _latest[0] = program
    if not others:
        return False
    mine = [_written(own, turn) for _, own, turn in others]
    everyone = world.gather([None if one is None else one[0] for one in mine])
    items: list[Owned] = []
    sent: dict[str, Tensor] = {}
    for k, (name, own, _) in enumerate(others):
        writers = [rank for rank, marks in enumerate(everyone) if marks[k] is not None]
        if not writers:
            continue
        if len({everyone[rank][k] for rank in writers}) > 1:
            raise InputError(
                f"'{name}' was written on rank {writers[0]} and on rank {writers[1]}, which hold it for different "
                "programs, in different ways since these programs were alike; update each parameter through one "
                "program's parameters() only between two steps"
            )
        items.append(Owned(name, writers[0], tuple(own.shape), own.dtype))
        found = mine[k]
        if found is not None:
            sent[name] = found[1]
    fresh = world.run(lambda transport: share_tensors(transport, items, sent))[0]
    with torch.no_grad():
        for name, own, turn in others:
            turn.program = program
            if name in fresh:
                turn.mark = _checksum(fresh[name])
                for copy in _copies(own, turn):
                    copy.copy_(fresh[name])
    return bool(fresh)


def _named_tensors(model: nn.Module, loss_fn: object) -> list[tuple[str, Tensor]]:
    """List the parameters and buffers of a model and of a loss that is a module."""
    modules = {"": model, **({"loss_fn.": loss_fn} if isinstance(loss_fn, nn.Module) else {})}
    return [
        (prefix + name, tensor)
        for prefix, module in modules.items()
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
    ]


def _written(own: Tensor, turn: _Turn) -> tuple[int, Tensor] | None:
    """Return checksum and value of this rank's copy that was written since the last turn, if it holds one."""
    if not turn.holders:
        return None
    for copy in _copies(own, turn):
        mark = _checksum(copy)
        if mark != turn.mark:
            return mark, copy
    return None


def _copies(own: Tensor, turn: _Turn) -> Sequence[Tensor]:
    return [own, *(copy for one in turn.copies if (copy := one()) is not None)]


def _checksum(tensor: Tensor) -> int:
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return zlib.crc32(flat.view(torch.uint8).numpy().data) if flat.numel() else 0
