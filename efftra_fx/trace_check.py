"""A captured graph is checked against the eager model before anything is built on it.

Loss, gradients of all parameters and new buffer values are compared on a few rows. This
catches what a tracer loses without a word: the backward of a custom
`autograd.Function`, hooks, values frozen into constants.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from efftra_fx.containers import take_apart
from efftra_fx.errors import CaptureError
from efftra_fx.meta import CONSTANTS, OUTPUTS, ROLE
from efftra_fx.trace import Captured, LossFn, loss_of

_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 1e-1}


def check_capture(model: nn.Module, captured: Captured, inputs: Sequence[Tensor], loss_fn: LossFn | None) -> None:
    """Raise CaptureError where the graph's loss, gradients or buffers differ from the eager model's.

    Leaves parameters, gradients, buffers and the state of random numbers as they were.
    """
    modules = [("", model)] + ([("loss_fn.", loss_fn)] if isinstance(loss_fn, nn.Module) else [])
    parameters = {prefix + n: p for prefix, m in modules for n, p in m.named_parameters()}
    buffers = {prefix + n: b for prefix, m in modules for n, b in m.named_buffers()}
    before = {name: buffer.detach().clone() for name, buffer in buffers.items()}
    try:
        with torch.random.fork_rng(), torch.enable_grad():
            torch.manual_seed(0)
            args, kwargs, target = captured.call.rebuild([t.clone() for t in inputs])
            loss = loss_of(model(*args, **kwargs), loss_fn, target, captured.call.has_target)
            expected = _gradients(loss, parameters)
            written = {name: buffer.detach().clone() for name, buffer in buffers.items()}
    finally:
        for name, buffer in buffers.items():
            with torch.no_grad():
                buffer.copy_(before[name])
    with torch.random.fork_rng(), torch.enable_grad():
        torch.manual_seed(0)
        try:
            found_loss, news = _run(captured, parameters, before, inputs)
        except RuntimeError as error:
            raise CaptureError(f"the captured graph does not run as the eager model does: {error}") from error
        found = _gradients(found_loss, parameters)
    _compare("the loss", loss.detach(), found_loss.detach())
    for name in parameters:
        a, b = expected[name], found[name]
        if (a is None) != (b is None) and bool((a if a is not None else b).any()):  # type: ignore[union-attr]
            has, lacks = ("eager", "the captured graph") if b is None else ("the captured graph", "eager")
            raise CaptureError(
                f"the gradient of '{name}' exists in {has} and not in {lacks}: the graph is not the model; "
                "look for a custom autograd.Function, a hook or a detach on the way to it"
            )
        if a is not None and b is not None:
            _compare(f"the gradient of '{name}'", a, b)
    for name, value in news.items():
        _compare(f"the new value of buffer '{name}'", written[name], value)
    for name in set(buffers) - set(news):
        if not torch.equal(written[name].nan_to_num(), before[name].nan_to_num()):
            raise CaptureError(
                f"forward writes buffer '{name}', and the captured graph does not; register it with register_buffer "
                "and write it with an in-place operation"
            )


def _gradients(loss: Tensor, parameters: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
    wanted = {name: p for name, p in parameters.items() if p.requires_grad}
    result: dict[str, Tensor | None] = dict.fromkeys(parameters)
    if loss.requires_grad and wanted:
        found = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
        result.update(zip(wanted, found, strict=True))
    return result


def check_output(model: nn.Module, captured: Captured, inputs: Sequence[Tensor]) -> None:
    """Raise CaptureError where the graph of a model's output gives another output than the model as it is now.

    Leaves buffers and the state of random numbers as they were.
    """
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    before = {name: buffer.detach().clone() for name, buffer in buffers.items()}
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        args, kwargs, _ = captured.call.rebuild([t.clone() for t in inputs])
        leaves = [leaf for _, leaf in take_apart(model(*args, **kwargs))[0]]
        for name, buffer in buffers.items():
            buffer.copy_(before[name])
        torch.manual_seed(0)
        found = _results(captured, parameters, before, inputs)[: OUTPUTS[captured.gm].loss]
    assert captured.out_tree is not None
    moving = [leaf for leaf, m in zip(leaves, captured.out_tree.moving, strict=False) if m]
    if len(leaves) != len(captured.out_tree.moving):
        raise CaptureError(
            f"the model gave {len(captured.out_tree.moving)} values while it was captured, {len(leaves)} now"
        )
    for number, (a, b) in enumerate(zip(moving, found, strict=True)):
        if isinstance(a, Tensor):
            _compare(f"output {number}", a, b)


def _run(
    captured: Captured, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], inputs: Sequence[Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    results = _results(captured, parameters, buffers, inputs)
    outputs = OUTPUTS[captured.gm]
    return results[0], dict(zip(outputs.buffers, results[outputs.loss :], strict=True))


def _results(
    captured: Captured, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], inputs: Sequence[Tensor]
) -> Sequence[Any]:
    source = iter(inputs)
    operands: list[Any] = []
    for node in captured.gm.graph.nodes:
        if node.op != "placeholder":
            continue
        role = ROLE[node]
        if role.kind == "parameter":
            operands.append(parameters[role.name])
        elif role.kind == "buffer":
            operands.append(buffers[role.name].clone())
        elif role.kind == "constant":
            operands.append(CONSTANTS[captured.gm][role.name])
        else:
            operands.append(next(source))
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):  # casts are in the graph
        results: Sequence[Any] = captured.gm(*operands)
    return results


def _compare(what: str, expected: Tensor, found: Tensor) -> None:
    """Raise CaptureError where two tensors differ by more than rounding."""
    if expected.shape == found.shape:
        a, b = expected.detach(), found.detach()
        if a.numel() and a.is_floating_point() and a.dtype == b.dtype:
            gap, reach = float((a - b).abs().max()), float(a.abs().max())
            if gap <= _TOLERANCE.get(expected.dtype, 1e-3) * max(reach, 1e-6):
                return
        a, b = a.to(torch.float64), b.to(torch.float64)
        same = torch.equal(a.isnan(), b.isnan())
        a, b = a.nan_to_num(), b.nan_to_num()
        worst = float((a - b).abs().max()) if a.numel() else 0.0
        scale = max(float(a.abs().max()) if a.numel() else 0.0, 1e-6)
        if same and worst <= _TOLERANCE.get(expected.dtype, 1e-3) * scale:
            return
        detail = f"they differ by {worst:.3g} where values reach {scale:.3g}"
    else:
        detail = f"shape {list(expected.shape)} in eager, {list(found.shape)} in the graph"
    raise CaptureError(
        f"{what} of the captured graph is not the eager model's: {detail}; "
        "look for a custom autograd.Function, a hook or Python state that changes from call to call"
    )
