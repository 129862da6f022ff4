"""The proof on the user's own model: one step as planned against one step on one device."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from efftra_fx.capture_norms import norms_of_one_device
from efftra_fx.differences import dense
from efftra_fx.held_buffers import HeldBuffers
from efftra_fx.hooks import hooked
from efftra_fx.meta import PATH, ROLE
from efftra_fx.passes.batch_evaluate import is_random
from efftra_fx.python_state import python_kept
from efftra_fx.signature import Call
from efftra_fx.step_module import LossFn, loss_of


@dataclass(frozen=True)
class CheckReport:
    """What a check found; times are measured, in seconds for one step without the optimizer.

    `worst_gradient` is the largest difference of a gradient, relative to the largest value of the
    same gradient on one device; `worst_parameter` is whose it is.
    """

    loss: float
    loss_one_device: float
    worst_gradient: float
    worst_parameter: str
    tolerance: float
    step_s: float
    step_one_device_s: float
    notes: tuple[str, ...] = ()
    loss_tolerance: float | None = None  # where the loss has another dtype than the gradients

    @property
    def matches(self) -> bool:
        """Say whether loss and all gradients agree to rounding."""
        scale = max(abs(self.loss_one_device), 1e-12)
        tolerance = self.tolerance if self.loss_tolerance is None else self.loss_tolerance
        same_loss = abs(self.loss - self.loss_one_device) <= tolerance * scale or self.loss == self.loss_one_device
        same_loss = same_loss or (math.isnan(self.loss) and math.isnan(self.loss_one_device))
        return same_loss and self.worst_gradient <= self.tolerance

    def __str__(self) -> str:
        verdict = "match" if self.matches else f"DIFFER: '{self.worst_parameter}'"
        ratio = self.step_one_device_s / self.step_s if self.step_s else float("inf")
        lines = [
            f"check against one device: {verdict}",
            f"  loss              {self.loss:.9g} as planned, {self.loss_one_device:.9g} on one device",
            f"  worst gradient    {self.worst_gradient:.3g} relative, of '{self.worst_parameter}' "
            f"(tolerance {self.tolerance:g})",
            f"  step              {self.step_s:.4f} s as planned, {self.step_one_device_s:.4f} s on one device "
            f"(measured, x{ratio:.2f})",
        ]
        return "\n".join([*lines, *(f"  note              {note}" for note in self.notes)])


_TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-4, torch.float16: 5e-2, torch.bfloat16: 1e-1}


def one_device_step(
    model: nn.Module, state: Mapping[str, Tensor], call: Call, tensors: list[Tensor], loss_fn: LossFn | None, seed: int
) -> tuple[float, dict[str, Tensor], float]:
    """Run the eager model from this state on the whole batch; return loss, gradients by name, and seconds.

    Runs the user's own model, since a copy's hooks may still mean the original; its parameters, buffers and
    attributes are put back afterwards, and its gradients left alone.
    """
    own, held = list(model.parameters()), HeldBuffers(model)
    before = [tensor.detach().clone() for tensor in own]
    try:
        model.load_state_dict(dict(state), strict=False)
        with python_kept(model, loss_fn), torch.random.fork_rng(), torch.enable_grad(), norms_of_one_device():
            torch.manual_seed(seed)
            begin = time.perf_counter()
            args, kwargs, target = call.rebuild(tensors)
            loss = loss_of(model(*args, **kwargs), loss_fn, target, call.has_target)
            wanted = {n: p for n, p in model.named_parameters() if p.requires_grad}
            found = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
            seconds = time.perf_counter() - begin
    finally:
        with torch.no_grad():
            for tensor, value in zip(own, before, strict=True):
                tensor.copy_(value)
        held.restore()
    gradients = {n: dense(g.detach()) for n, g in zip(wanted, found, strict=True) if g is not None}
    return float(loss.detach()), gradients, seconds


def one_device_graph(
    gm: fx.GraphModule,
    held: Mapping[tuple[str, str], Tensor],
    state: Mapping[str, Tensor],
    inputs: Mapping[str, Tensor],
) -> tuple[float, dict[str, Tensor], float]:
    """Run the captured step on the whole batch, with the random numbers that `inputs` give it.

    `held` has the model's tensors by (kind, name); those in `state` are taken from there. Returns loss, gradients by
    name, and seconds.
    """
    roles = [ROLE[node] for node in gm.graph.nodes if node.op == "placeholder"]
    operands, wanted = [], {}
    for role in roles:
        if role.kind == "input":
            operands.append(inputs[role.name])
            continue
        tensor = held[role.kind, role.name].detach()
        tensor = state[role.name].to(tensor.device) if role.kind != "constant" and role.name in state else tensor
        if role.trainable:
            tensor = wanted[role.name] = tensor.clone().requires_grad_()
        operands.append(tensor)
    with torch.enable_grad(), torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        begin = time.perf_counter()
        loss = gm(*operands)[0]
        found = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
        seconds = time.perf_counter() - begin
    gradients = {
        name: hooked(held["parameter", name], g.detach())
        for name, g in zip(wanted, found, strict=True)
        if g is not None
    }
    return float(loss.detach()), gradients, seconds


def random_note(gm: fx.GraphModule, tail_draws: bool) -> tuple[str, ...]:
    """Say what of a step draws random numbers part by part, so that it cannot equal one device."""
    nodes = [node for node in gm.graph.nodes if node.op == "call_function" and is_random(node)]
    places = list(dict.fromkeys(PATH.get(node) or node.name for node in nodes)) + ["the loss"] * tail_draws
    if not places:
        return ()
    shown = ", ".join(places[:4]) + (f" and {len(places) - 4} more" if len(places) > 4 else "")
    return (
        f"random numbers of {shown} are drawn by each part of the batch and are not those of one device; "
        "to compare with it compile with rng='layout_free', or set their probabilities to zero",
    )


def loss_tolerance(dtype: torch.dtype) -> float:
    """Return how far two sums of the same losses may be apart, relative, for rounding in this dtype.

    A double-precision model may compute its loss in single precision (as Hugging Face's language models do).
    """
    return _TOLERANCE.get(dtype, 1e-3)


def compare_gradients(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> tuple[float, str, float]:
    """Return the largest relative difference, whose it is, and the tolerance for these dtypes.

    A gradient that only one side has counts as different unless it is zero. One that is nothing but rounding on
    one device (of a bias in front of a batch norm, which is zero) may be other rounding here.
    """
    worst, name = 0.0, next(iter(expected), "")
    tolerance = max((_TOLERANCE.get(g.dtype, 1e-3) for g in expected.values()), default=1e-9)
    scale_all = max((_reach(g) for g in expected.values()), default=1.0)
    for key in dict.fromkeys((*expected, *found)):
        a: Any = expected.get(key)
        b: Any = found.get(key)
        if a is None or b is None:
            only = a if b is None else b
            gap = float("inf") if bool(only.any()) else 0.0
        else:
            reach, rounding = _reach(a), _rounding(a.dtype) * scale_all
            scale = max(rounding / tolerance if reach <= rounding else max(reach, 1e-6 * scale_all), 1e-30)
            gap = _apart(a, b) / scale
        if gap > worst:
            worst, name = gap, key
    return worst, name, tolerance


def _reach(gradient: Tensor) -> float:
    """The largest finite magnitude."""
    finite = gradient[gradient.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def _apart(a: Tensor, b: Tensor) -> float:
    """The largest difference; what is the same infinity, or no number on both sides, does not differ."""
    apart = (a - b).abs()
    apart = torch.where((a == b) | (a.isnan() & b.isnan()), torch.zeros_like(apart), apart)
    largest = float(apart.max()) if apart.numel() else 0.0
    return float("inf") if largest != largest else largest


def _rounding(dtype: torch.dtype) -> float:
    """Return what a gradient that is zero may come out as, relative to the largest of all gradients."""
    return min(64 * torch.finfo(dtype).eps, 0.06)
