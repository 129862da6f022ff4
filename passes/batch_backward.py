"""Find the nodes whose backward mixes rows although their forward does not.

A true derivative of what computes row by row goes row by row too. Not so a backward that
somebody wrote: one that divides by the norm of all gradients, by the number of rows, or by
how often a word occurs in the batch gives something else for parts. Such nodes are found by
taking gradients of the whole and of parts, at several sizes of the gradient (clipping shows
at large ones only), and must see the whole batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from efftra_fx.meta import BATCH, ROLE
from efftra_fx.opaque import OtherSizesError, is_opaque, lowers_precision, needs_whole_batch, pulled_back

from .means import argument

_SCALES = (1e-3, 1.0, 1e3)
_TOLERANCE = 5e-6  # values are double, but code may compute in single precision inside
_LOW_TOLERANCE = 0.05  # of what runs under autocast
_FAILS = (RuntimeError, IndexError, ValueError, OtherSizesError)


def mixing_backwards(
    gm: fx.GraphModule, whole: Mapping[fx.Node, Any], parts: Sequence[Mapping[fx.Node, Any]], sizes: Sequence[int]
) -> set[fx.Node]:
    """Return the nodes whose gradients of a batch are not those of its parts, put together.

    `whole` and `parts` have the nodes' values, `sizes` the parts' rows; `BATCH` says how values follow rows.
    """
    found = set()
    for node in gm.graph.nodes:
        if node.op != "call_function":
            continue
        if argument(node, "scale_grad_by_freq") and _trained(node.args[0]):
            found.add(node)
        elif is_opaque(node.target) and not needs_whole_batch(node.target) and _proven(node):
            if not _adds_up(node, whole, parts, sizes):
                found.add(node)
    return found


def _trained(operand: Any) -> bool:
    if not isinstance(operand, fx.Node) or operand.op != "placeholder":
        return True
    return ROLE[operand].kind == "parameter" and ROLE[operand].trainable


def _operands(node: fx.Node) -> list[fx.Node]:
    return list(node.args[0])  # type: ignore[arg-type]


def _proven(node: fx.Node) -> bool:
    """Whether the forward is known to go row by row."""
    known = [*_operands(node), *node.users]
    return all(BATCH[n].kind in ("rows", "whole") for n in known if isinstance(n.meta.get("val"), Tensor))


def _adds_up(
    node: fx.Node, whole: Mapping[fx.Node, Any], parts: Sequence[Mapping[fx.Node, Any]], sizes: Sequence[int]
) -> bool:
    operands = _operands(node)
    tolerance = _LOW_TOLERANCE if lowers_precision(node.target) else _TOLERANCE
    for scale in _SCALES:
        try:
            given = _gradients(node, whole, scale)
            everything = _pulled(node, [whole[n] for n in operands], given)
            shares = [
                _pulled(node, [part[n] for n in operands], own)
                for part, own in zip(parts, _shares(node, given, sizes), strict=True)
            ]
        except _FAILS:  # nothing that could be compared: the check of the capture has run it as a whole
            return True
        for operand, wanted, *pieces in zip(operands, everything, *shares, strict=True):
            if not _joined(operand, wanted, pieces, tolerance):
                return False
    return True


def _pulled(node: fx.Node, values: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients of operands; an operand that gets none (no row took an expert) has zeros."""
    found = pulled_back(node.target, values, lambda _: gradients)
    return [torch.zeros_like(value) if g is None else g for g, value in zip(found, values, strict=True)]


def _gradients(node: fx.Node, whole: Mapping[fx.Node, Any], scale: float) -> list[Tensor]:
    """Make gradients for the results of the whole batch, the same each time."""
    made = []
    for index, result in enumerate(whole[node]):
        generator = torch.Generator(device=result.device).manual_seed(index)
        kind = result.dtype if result.is_floating_point() or result.is_complex() else torch.float32
        made.append(torch.randn(result.shape, generator=generator, device=result.device, dtype=kind) * scale)
    return made


def _shares(node: fx.Node, gradients: Sequence[Tensor], sizes: Sequence[int]) -> list[list[Tensor]]:
    """Divide the results' gradients among the parts: rows by rows, others by numbers of rows."""
    splits = {int(user.args[1]): BATCH[user] for user in node.users}  # type: ignore[arg-type]
    rows = sum(sizes)
    shares: list[list[Tensor]] = [[] for _ in sizes]
    for index, gradient in enumerate(gradients):
        split = splits.get(index)
        start = 0
        for share, size in zip(shares, sizes, strict=True):
            if split is not None and split.kind == "rows":
                share.append(gradient.narrow(split.dim, start * split.per_row, size * split.per_row))
            else:
                share.append(gradient * (size / rows))
            start += size
    return shares


def _joined(operand: fx.Node, wanted: Tensor, pieces: Sequence[Tensor], tolerance: float) -> bool:
    """Say whether the gradients of parts, put together, are those of the whole."""
    split = BATCH[operand]
    if not (wanted.is_floating_point() or wanted.is_complex()):
        return True
    found = torch.cat(list(pieces), split.dim) if split.kind == "rows" else sum(pieces[1:], pieces[0])
    if found.shape != wanted.shape:
        return False
    finite = torch.isfinite(wanted) & torch.isfinite(found)
    if not bool(finite.any()):
        return True
    reach = max(float(one[one.isfinite()].abs().max()) for one in (wanted, *pieces) if bool(one.isfinite().any()))
    return float((found - wanted)[finite].abs().max()) <= tolerance * max(reach, 1e-30)


__all__ = ["mixing_backwards"]
