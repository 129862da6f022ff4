"""The state of a compiled model: who owns which tensor, whole state dicts, one norm over all ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from efftra_fx.build import Built, written_buffers
from efftra_fx.errors import CheckpointError, InputError
from efftra_fx.runtime.checkpoint import Owned, share_tensors
from efftra_fx.runtime.news import carry_buffers
from efftra_fx.world import World

Listed = list[tuple[Owned, Tensor | None]]


def all_parameters(model: nn.Module, loss_fn: Any) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the model's parameters by name, then those of a loss that is a module."""
    yield from model.named_parameters()
    if isinstance(loss_fn, nn.Module):
        for name, parameter in loss_fn.named_parameters():
            yield f"loss_fn.{name}", parameter


def held_parameters(built: Built, world: World, model: nn.Module, loss_fn: Any) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield this process's parameters in the model's order; those that no stage reads belong to rank 0.

    Of a parameter that is dealt out to ranks, a process with one rank yields its share, and one with all the whole.
    """
    held: dict[str, nn.Parameter] = {}
    local = len(world.transports) > 1
    whole = dict(all_parameters(model, loss_fn))
    for rank in world.ranks:
        shares = built.shares(rank) if local else {}
        for name, tensor in built.tensors[rank].parameters.items():
            if isinstance(tensor, nn.Parameter):
                held.setdefault(name, whole[name] if name in shares else tensor)
    placed = {p.name for p in built.back.wiring.parameters}
    for name, _ in all_parameters(model, loss_fn):
        if name in held and (name in placed or world.first):
            yield name, held[name]


def owned(
    built: Built, model: nn.Module, loss_fn: Any, gradients: bool, written: Mapping[str, tuple[int, int]] | None = None
) -> Listed:
    """List every tensor (or every trained parameter) with its owner, and this process's copy where it owns it.

    The owner is the first rank of the first stage that holds it; of what no stage holds, rank 0. A parameter
    that is dealt out to ranks of their own processes is listed in shares (see `share_name`). Of a buffer that is
    `written` by one stage's ranks, the owner is the rank that is given.
    """
    apart = len(built.tensors) == 1
    back = built.back
    stages = {p.name: min(p.stages) for p in back.wiring.parameters}
    writers = {name: stage for name, (stage, _) in (written or {}).items()}
    trained = {p.name for p in back.wiring.parameters if p.trainable}
    named: list[tuple[str, Tensor, int]] = [
        (n, p, stages.get(n, -1)) for n, p in all_parameters(model, loss_fn) if not gradients or n in trained
    ]
    if not gradients:
        named += [(n, b, writers.get(n, -1)) for n, b in model.named_buffers()]
    listed: Listed = []
    for name, tensor, stage in named:
        owner = 0 if stage < 0 else back.plan.stages[stage].devices[0]
        mine: Tensor | None = None
        dealt = name in built.shares(owner)
        if dealt and apart:
            listed += _listed_shares(built, name, tensor, stage)
            continue
        if owner in built.tensors:
            held = built.tensors[owner]
            mine = None if dealt else held.parameters.get(name, held.buffers.get(name))
            mine = tensor if mine is None else mine
        listed.append((Owned(name, owner, tuple(tensor.shape), tensor.dtype), mine))
    return listed


def _listed_shares(built: Built, name: str, tensor: Tensor, stage: int) -> Listed:
    place = built.back.plan.stages[stage]
    listed: Listed = []
    for number, rank in enumerate(place.devices[: place.tensor]):
        shape = built.shares(rank)[name].shape(tuple(tensor.shape))
        mine = built.tensors[rank].parameters[name] if rank in built.tensors else None
        listed.append((Owned(share_name(name, number), rank, shape, tensor.dtype), mine))
    return listed


def share_name(name: str, number: int) -> str:
    """Return the name under which a rank's share of a parameter is listed."""
    return f"{name}\n{number}"


def whole_name(name: str) -> str:
    """Return the parameter's name of a share's."""
    return name.partition("\n")[0]


def join_shares(built: Built, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Put shares together that were listed apart; all else stays."""
    found: dict[str, Tensor] = {}
    stages = {p.name: min(p.stages) for p in built.back.wiring.parameters}
    for name, tensor in tensors.items():
        whole, _, number = name.partition("\n")
        if not number:
            found[name] = tensor
            continue
        if whole not in found:
            example = built.front.tensors["parameter", whole]
            found[whole] = torch.empty(example.shape, dtype=tensor.dtype, device=tensor.device)
        rank = built.back.plan.stages[stages[whole]].devices[int(number)]
        built.shares(rank)[whole].put(found[whole], tensor)
    return found


def whole_gradients(built: Built, found: Mapping[int, Mapping[str, Tensor]]) -> dict[int, dict[str, Tensor]]:
    """Return gradients by rank, put together where all ranks that have shares live in this process."""
    if len(found) == 1:
        return {rank: dict(gradients) for rank, gradients in found.items()}
    joined: dict[str, Tensor] = {}
    result: dict[int, dict[str, Tensor]] = {}
    for rank, gradients in sorted(found.items()):
        shares = built.shares(rank)
        result[rank] = {name: g for name, g in gradients.items() if name not in shares}
        for name, share in shares.items():
            if name not in gradients:
                continue
            if name not in joined:
                whole = built.front.tensors["parameter", name]
                joined[name] = result[rank][name] = torch.zeros_like(whole.detach())
            share.put(joined[name], gradients[name])
    return result


def share(world: World, listed: Listed, built: Built) -> dict[str, Tensor]:
    """Return copies of all listed tensors on every rank, shares put together; a collective call."""
    mine = {item.name: t for item, t in listed if t is not None}
    if len(world.transports) > 1 or world.size == 1:
        return {name: t.detach().clone() for name, t in mine.items()}
    items = [item for item, _ in listed]
    return join_shares(built, world.run(lambda transport: share_tensors(transport, items, mine))[0])


def whole_state(
    built: Built, world: World, model: nn.Module, loss_fn: Any, written: Mapping[str, tuple[int, int]] | None = None
) -> dict[str, Tensor]:
    """Return the state dict of the plain model, on every rank; a collective call."""
    tensors = share(world, owned(built, model, loss_fn, False, written), built)
    first: dict[int, str] = {}
    own: dict[str, Tensor] = {}
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    for name, tensor in named:
        own[name] = tensors[first.setdefault(id(tensor), name)]
    return {name: own.get(name, value) for name, value in model.state_dict().items()}


def check_state(model: nn.Module, state: Mapping[str, Any], strict: bool = True) -> dict[str, Any]:
    """Return what the model knows of a state; raise CheckpointError naming what is missing, unknown or misshapen.

    Only what is of another shape is refused where the state need not fit (`strict=False`).
    """
    if not isinstance(state, Mapping):
        raise CheckpointError(f"the state must be a dictionary of tensors by name, got {type(state).__name__}")
    expected = model.state_dict()
    missing = [name for name in expected if name not in state]
    unknown = [name for name in state if name not in expected]
    if strict and (missing or unknown):
        prefix = _common_prefix(unknown, expected)
        if prefix:
            raise CheckpointError(
                f"the state's names begin with '{prefix}', as wrappers do, and the model's do not; take it off: "
                f"{{name.removeprefix('{prefix}'): value for name, value in state.items()}}"
            )
        what = f"'{missing[0]}' is missing" if missing else f"'{unknown[0]}' is not in the model"
        raise CheckpointError(
            f"the state does not fit the model: {what} ({len(missing)} missing, {len(unknown)} unknown); "
            "load it into the model that it was saved from, or give strict=False to take what fits"
        )
    known = {name: value for name, value in state.items() if name in expected}
    for name, value in known.items():
        if isinstance(expected[name], Tensor) and not isinstance(value, Tensor):
            raise CheckpointError(f"'{name}' is of type {type(value).__name__}, expected a tensor")
        if isinstance(value, Tensor) and value.shape != expected[name].shape:
            raise CheckpointError(f"'{name}' has shape {list(value.shape)}, expected {list(expected[name].shape)}")
    return known


def _common_prefix(unknown: Sequence[str], expected: Mapping[str, Any]) -> str:
    """Return what stands before the model's own names in all unknown ones, or nothing."""
    if not unknown:
        return ""
    first = next((name for name in expected if unknown[0].endswith(f".{name}")), "")
    prefix = unknown[0].removesuffix(first) if first else ""
    alike = all(name.startswith(prefix) and name.removeprefix(prefix) in expected for name in unknown)
    return prefix if alike else ""


def take_state(built: Built, model: nn.Module, names: Collection[str]) -> None:
    """Copy the model's own values into the tensors that ranks hold apart from it (shares, or on other devices)."""
    own: dict[str, Tensor] = {}
    first: dict[int, str] = {}
    for name, tensor in (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ):
        whole = first.setdefault(id(tensor), name)  # one of several names of one tensor
        if name in names:
            own[whole] = tensor
    with torch.no_grad():
        for rank, held in built.tensors.items():
            shares = built.shares(rank)
            for name, tensor in (*held.parameters.items(), *held.buffers.items()):
                if name not in own:
                    continue
                if name in shares and name in held.parameters:
                    tensor.copy_(shares[name].of(own[name]))
                elif own[name] is not tensor:
                    tensor.copy_(own[name])


def refresh_copies(built: Built) -> None:
    """Bring copies of a parameter on other devices of this process up to the one that the optimizer updates.

    Ranks of one process on one device share each parameter, so there is nothing to do for them, but shares
    are taken from it anew.
    """
    if len(built.tensors) == 1:
        return
    first: dict[str, Tensor] = {}
    for rank, held in sorted(built.tensors.items()):
        shares = built.shares(rank)
        for name, tensor in held.parameters.items():
            if name in shares:
                with torch.no_grad():
                    tensor.copy_(shares[name].of(built.front.tensors["parameter", name]))
                continue
            source = first.setdefault(name, tensor)
            if source is not tensor:
                with torch.no_grad():
                    tensor.copy_(source)


def problem_of_norm(max_norm: Any, norm_type: Any) -> InputError | None:
    """Return what is wrong with the arguments of a clipping, if anything."""
    for what, number, least in (("max_norm", max_norm, 0.0), ("norm_type", norm_type, 1e-3)):
        given = isinstance(number, int | float | Tensor) and not isinstance(number, bool)
        if not (given and float(number) >= least):
            return InputError(f"{what} must be a number of {least:g} or more, got {number!r}")
    return None


class Writers:
    """Which ranks have written buffers that the ranks of other stages still hold as they were before."""

    def __init__(self) -> None:
        self.latest: dict[str, tuple[int, int]] = {}  # the stage and the first of its ranks

    def wrote(self, built: Built) -> None:
        """Note a step."""
        self.latest |= written_buffers(built.back)

    def bring(self, built: Built, read: Mapping[str, frozenset[int]], world: World) -> None:
        """Give all ranks what other stages than the one that wrote it will read; a collective call.

        `read` has the stages that read a buffer, -1 for every rank.
        """
        owners = {n: rank for n, (stage, rank) in self.latest.items() if read.get(n, frozenset()) - {stage}}
        if owners and world.size > 1:
            held = {transport.rank: built.tensors[transport.rank].buffers for transport in world.transports}
            world.run(lambda transport: carry_buffers(owners, held[transport.rank], transport))
        self.forget(owners)

    def forget(self, names: Collection[str]) -> None:
        """Note that these are the same on all ranks now."""
        self.latest = {name: place for name, place in self.latest.items() if name not in names}


def clip_gradients(
    parameters: Sequence[tuple[str, nn.Parameter]],
    counted: set[str],
    world: World,
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
) -> Tensor:
    """Scale all gradients by one factor, from the norm over what every process counts; a collective call."""
    norms = [
        torch.linalg.vector_norm(parameter.grad.detach().double(), norm_type).cpu()
        for name, parameter in parameters
        if name in counted and parameter.grad is not None and parameter.grad.numel()
    ]
    total = _norm_of_norms(world.gather_number(float(_norm_of_norms(norms, norm_type))), norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise InputError(f"the total norm of the gradients is {float(total)}, so they cannot be clipped")
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for _, parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(factor.to(parameter.grad.dtype))
    dtype = next((p.grad.dtype for _, p in parameters if p.grad is not None), torch.float32)
    return total.to(dtype)


def _norm_of_norms(norms: Sequence[float | Tensor], norm_type: float) -> Tensor:
    """Return the norm of what has these norms; where one is no number, it is none either."""
    total: Tensor = torch.linalg.vector_norm(torch.tensor([0.0, *map(float, norms)], dtype=torch.float64), norm_type)
    return total
