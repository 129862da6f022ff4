"""What every rank must have alike before a step runs: the same model, weights and captured graph."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from efftra_fx.compiler import Front, Options
from efftra_fx.dump import print_graph
from efftra_fx.errors import EfftraError, InputError
from efftra_fx.evaluation import Evaluation
from efftra_fx.meta import ROLE
from efftra_fx.runtime.checkpoint import Owned, share_tensors
from efftra_fx.state import all_parameters
from efftra_fx.world import World

_MOST_NUMBERS = 4096  # of a tensor, that are compared


def same_start(model: nn.Module, loss_fn: Any, world: World) -> str | None:
    """Give every rank rank 0's weights and buffers where they differ; a collective call.

    Returns the name of the first tensor that differed, None where all were alike. Raises InputError where ranks
    have models of other tensors.
    """
    if len(world.transports) > 1 or world.size == 1:
        return None
    named: list[tuple[str, Tensor]] = [*all_parameters(model, loss_fn), *model.named_buffers()]
    _same_text([_described(name, tensor) for name, tensor in named], "have different models", world)
    everyone = world.gather([fingerprint(tensor) for _, tensor in named])
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


def agree_on_state(world: World, problem: EfftraError | None, state: Mapping[str, Any]) -> None:
    """Raise on every rank where one cannot take the state, or has another than the others; a collective call."""
    lines = [f"{name}: {_sample(value)}" for name, value in state.items() if isinstance(value, Tensor)]
    if not world.agree_on_call(problem, hashlib.sha256("\n".join(lines).encode()).hexdigest()):
        _same_text(lines, "were given different states", world, "load the same file on every rank")


def _sample(tensor: Tensor) -> str:
    """Return a few numbers of a tensor, its shape and type as text."""
    flat = tensor.detach().reshape(-1)
    few = flat[:: -(-flat.numel() // _MOST_NUMBERS) or 1].cpu().tolist()
    digest = hashlib.sha256(str(few).encode()).hexdigest()[:16]
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} {few[:3]}, ... {digest}"


def same_capture(front: Front, options: Options, world: World) -> None:
    """Raise InputError on every rank where ranks captured different steps, or were given different options."""
    if len(world.transports) > 1 or world.size == 1:
        return
    reduction = options.loss_reduction if isinstance(options.loss_reduction, str) else type(options.loss_reduction)
    given = {
        "batch_norm": options.batch_norm,
        "rng": options.rng,
        "loss_reduction": reduction,
        "compile_stages": options.backend,
        "batch_dims": sorted(options.batch_dims.items()),
    }
    graphs = (front.gm, front.tail.gm)
    nodes = [line for gm in graphs for line in print_graph(gm, "").splitlines()[1:]]  # the first line is a title
    trained = [ROLE[n].name for n in front.gm.graph.nodes if n.op == "placeholder" and ROLE[n].trainable]
    lines = [*(f"{name}={value!r}" for name, value in given.items()), *(f"trains {name}" for name in trained)]
    lines += front.captured.settings_text
    _same_text([*lines, *_numbered(nodes)], "captured different steps", world)


def same_evaluation(evaluation: Evaluation, world: World) -> None:
    """Raise InputError on every rank where ranks captured different outputs to evaluate."""
    if len(world.transports) == 1 and world.size > 1:
        text = [*evaluation.captured.settings_text, *_numbered(evaluation.text)]
        _same_text(text, "captured different outputs to evaluate", world)


def _same_text(
    lines: list[str], what: str, world: World, advice: str = "give every rank the same model, loss, mode and options"
) -> None:
    """Raise InputError with the first line that differs where not all ranks have the same lines."""
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    if len(set(world.gather(digest))) == 1:
        return
    everyone = world.gather(lines)
    other = next(rank for rank, one in enumerate(everyone) if one != everyone[0])
    place = next(
        (k for k, (a, b) in enumerate(zip(everyone[0], everyone[other], strict=False)) if a != b),
        min(len(everyone[0]), len(everyone[other])),
    )
    here, there = (one[place] if place < len(one) else "nothing more" for one in (everyone[0], everyone[other]))
    raise InputError(f"the ranks {what}: rank 0 has '{here}', rank {other} has '{there}'; {advice}")


def _described(name: str, tensor: Tensor) -> str:
    frozen = "" if tensor.requires_grad or not isinstance(tensor, nn.Parameter) else ", frozen"
    return f"{name}: {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}{frozen}"


def _numbered(lines: list[str]) -> list[str]:
    """Return lines with symbols of sizes numbered as they appear: their own numbers are a tracer's affair."""
    known: dict[str, str] = {}
    return [re.sub(r"\bs\d+\b", lambda found: known.setdefault(found[0], f"s{len(known)}"), line) for line in lines]


def fingerprint(tensor: Tensor) -> list[float]:
    """Return numbers that differ where tensors differ, but for rare accidents: two sums, and the size of the second."""
    flat = tensor.detach().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    flat = flat.to(torch.float64)
    weights = torch.arange(1, flat.numel() + 1, dtype=torch.float64, device=flat.device).sqrt()
    return [float(flat.sum()), float((flat * weights).sum()), float((flat.abs() * weights).sum())]
