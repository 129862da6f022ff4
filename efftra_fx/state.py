"""The state of a compiled model: who owns which tensor, whole state dicts, one norm over all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from efftra_fx.build import Built
from efftra_fx.errors import CheckpointError, InputError
from efftra_fx.runtime.checkpoint import Owned, share_tensors
from efftra_fx.world import World

Listed = list[tuple[Owned, Tensor | None]]


def all_parameters(model: nn.Module, loss_fn: Any) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the model's parameters by name, then those of a loss that is a module."""
    yield from model.named_parameters()
    if isinstance(loss_fn, nn.Module):
        for name, parameter in loss_fn.named_parameters():
            yield f"loss_fn.{name}", parameter


def held_parameters(built: Built, world: World, model: nn.Module, loss_fn: Any) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield this process's parameters in the model's order; those that no stage reads belong to rank 0."""
    held: dict[str, nn.Parameter] = {}
    for rank in world.ranks:
        for name, tensor in built.tensors[rank].parameters.items():
            if isinstance(tensor, nn.Parameter):
                held.setdefault(name, tensor)
    placed = {p.name for p in built.back.wiring.parameters}
    for name, _ in all_parameters(model, loss_fn):
        if name in held and (name in placed or world.first):
            yield name, held[name]


def owned(built: Built, model: nn.Module, loss_fn: Any, gradients: bool) -> Listed:
    """List every tensor (or every trained parameter) with its owner, and this process's copy where it owns it.

    The owner is the first rank of the first stage that holds it; of what no stage holds, rank 0.
    """
    back = built.back
    stages = {p.name: min(p.stages) for p in back.wiring.parameters}
    writers = {name: s for s, graph in enumerate(back.stages) for name in graph.buffers}
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
        if owner in built.tensors:
            held = built.tensors[owner]
            mine = held.parameters.get(name, held.buffers.get(name))
            mine = tensor if mine is None else mine
        listed.append((Owned(name, owner, tuple(tensor.shape), tensor.dtype), mine))
    return listed


def share(world: World, listed: Listed) -> dict[str, Tensor]:
    """Return copies of all listed tensors on every rank; a collective call."""
    mine = {item.name: t for item, t in listed if t is not None}
    if len(world.transports) > 1 or world.size == 1:
        return {name: t.detach().clone() for name, t in mine.items()}
    items = [item for item, _ in listed]
    return world.run(lambda transport: share_tensors(transport, items, mine))[0]


def whole_state(built: Built, world: World, model: nn.Module, loss_fn: Any) -> dict[str, Tensor]:
    """Return the state dict of the plain model, on every rank; a collective call."""
    tensors = share(world, owned(built, model, loss_fn, gradients=False))
    first: dict[int, str] = {}
    own: dict[str, Tensor] = {}
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    for name, tensor in named:
        own[name] = tensors[first.setdefault(id(tensor), name)]
    return {name: own.get(name, value) for name, value in model.state_dict().items()}


def check_state(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Raise CheckpointError naming what is missing, unknown or of another shape."""
    expected = model.state_dict()
    missing = [name for name in expected if name not in state]
    unknown = [name for name in state if name not in expected]
    if missing or unknown:
        what = f"'{missing[0]}' is missing" if missing else f"'{unknown[0]}' is not in the model"
        raise CheckpointError(
            f"the state does not fit the model: {what} ({len(missing)} missing, {len(unknown)} unknown)"
        )
    for name, value in state.items():
        if isinstance(value, Tensor) and value.shape != expected[name].shape:
            raise CheckpointError(f"'{name}' has shape {list(value.shape)}, expected {list(expected[name].shape)}")


def take_state(built: Built, model: nn.Module) -> None:
    """Copy the model's own values into the tensors that ranks hold apart from it (on other devices)."""
    own: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    with torch.no_grad():
        for held in built.tensors.values():
            for name, tensor in (*held.parameters.items(), *held.buffers.items()):
                if name in own and own[name] is not tensor:
                    tensor.copy_(own[name])


def refresh_copies(built: Built) -> None:
    """Bring copies of a parameter on other devices of this process up to the one that the optimizer updates.

    Ranks of one process on one device share each parameter, so there is nothing to do for them.
    """
    first: dict[str, Tensor] = {}
    for _, held in sorted(built.tensors.items()):
        for name, tensor in held.parameters.items():
            source = first.setdefault(name, tensor)
            if source is not tensor:
                with torch.no_grad():
                    tensor.copy_(source)


def same_start(model: nn.Module, loss_fn: Any, world: World) -> str | None:
    """Give every rank rank 0's weights and buffers where they differ; a collective call.

    Returns the name of the first tensor that differed, None where all were alike.
    """
    if len(world.transports) > 1 or world.size == 1:
        return None
    named: list[tuple[str, Tensor]] = [*all_parameters(model, loss_fn), *model.named_buffers()]
    sums = [_fingerprint(tensor) for _, tensor in named]
    everyone = world.gather(sums)
    names = [name for name, _ in named]
    different = [k for k in range(len(names)) if len({str(one[k]) for one in everyone}) > 1]
    if not different:
        return None
    items = [Owned(names[k], 0, tuple(named[k][1].shape), named[k][1].dtype) for k in different]
    mine = {names[k]: named[k][1] for k in different} if world.first else {}
    fresh = world.run(lambda transport: share_tensors(transport, items, mine))[0]
    with torch.no_grad():
        for k in different:
            named[k][1].copy_(fresh[names[k]])
    return names[different[0]]


def _fingerprint(tensor: Tensor) -> list[float]:
    """Return two numbers that differ where tensors differ, but for rare accidents."""
    flat = tensor.detach().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    flat = flat.to(torch.float64)
    weights = torch.arange(1, flat.numel() + 1, dtype=torch.float64, device=flat.device).sqrt()
    return [float(flat.sum()), float((flat * weights).sum())]


def clip_gradients(
    parameters: Sequence[tuple[str, nn.Parameter]],
    counted: set[str],
    world: World,
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
) -> Tensor:
    """Scale all gradients by one factor, from the norm over what every process counts; a collective call."""
    power = largest = 0.0
    for name, parameter in parameters:
        if name in counted and parameter.grad is not None:
            norm = float(torch.linalg.vector_norm(parameter.grad.detach().double(), norm_type))
            largest = max(largest, norm)
            power += norm**norm_type if norm_type != float("inf") else 0.0
    shared = world.gather([power, largest])
    if norm_type == float("inf"):
        total = torch.tensor([one[1] for one in shared], dtype=torch.float64).max()
    else:
        total = torch.tensor([one[0] for one in shared], dtype=torch.float64).sum() ** (1.0 / norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise InputError(f"the total norm of the gradients is {float(total)}, so they cannot be clipped")
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for _, parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(factor.to(parameter.grad.dtype))
    dtype = next((p.grad.dtype for _, p in parameters if p.grad is not None), torch.float32)
    return total.to(dtype)
