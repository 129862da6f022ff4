"""Batch normalisation over all replicas of a stage: statistics of a micro-batch, not of one replica's rows.

    rows of replica 0 ── mean, spread, count ──┐
    rows of replica 1 ── mean, spread, count ──┼── joined ── each replica normalises its rows
    …                                          │
    backward: sums over rows of the gradient ──┘ add up over the replicas

The statistics are joined from each replica's own (Chan, Golub, LeVeque 1979), so that nothing cancels:

    N = Σ n_r    mean = Σ n_r mean_r / N    N var = Σ (n_r var_r + n_r (mean_r - mean)²)

With dy the gradient of the result and x̂ = (x - mean) / sqrt(var + eps), that of x is
w / sqrt(var + eps) · (dy - Σ dy / N - x̂ Σ (dy x̂) / N), the sums over the rows of all replicas. Gradients of weight
and bias are each replica's own part, which the stage's all-reduce adds up as it does for any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd import Function

from efftra_fx.collectives import replica_gather, replica_sum
from efftra_fx.meta import BATCH, CONSTANTS

from .batch_evaluate import is_batch_statistics
from .means import argument
from .split import StageGraph

aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class Synced:
    """A stage whose replicas normalise together: a graph for each rank of a replica, and the buffers that all share."""

    stages: tuple[StageGraph, ...]
    buffers: frozenset[str]


def sync_stage(stages: Sequence[StageGraph], replicas: int) -> Synced | None:
    """Return the stage with batch statistics over `replicas` replicas; None where it has none, or they are alone.

    `stages` has the graph of each rank of a replica. The given graphs are left as they are.
    """
    if replicas == 1 or not any(is_synced(node) for node in stages[0].gm.graph.nodes):
        return None
    return Synced(tuple(replace(s, gm=_rewritten(s.gm, replicas)) for s in stages), _shared(stages[0]))


def is_synced(node: fx.Node) -> bool:
    """Say whether a node takes statistics over rows of the batch: of a value that has them, and not as channels."""
    if not is_batch_statistics(node) or not isinstance(node.args[0], fx.Node):
        return False
    split = BATCH[node.args[0]]
    return split.kind != "whole" and not (split.kind == "rows" and split.dim == 1)


def _rewritten(gm: fx.GraphModule, replicas: int) -> fx.GraphModule:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        if node.op != "output" and is_synced(node):
            names = ("input", "weight", "bias", "running_mean", "running_var", "momentum", "eps")
            args = tuple(fx.node.map_arg(argument(node, name), copies.__getitem__) for name in names)
            made = graph.create_node("call_function", batch_norm, (*args, replicas), name=node.name)
            made.meta = dict(node.meta)
            copies[node] = made
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    result = fx.GraphModule(gm, graph)
    if CONSTANTS.on(gm):
        CONSTANTS[result] = CONSTANTS[gm]
    return result


def _shared(stage: StageGraph) -> frozenset[str]:
    """Return the buffers of modules that keep statistics: new values that depend on them, and their counters."""
    output = next(n for n in reversed(stage.gm.graph.nodes) if n.op == "output")
    news = dict(zip(stage.buffers, output.args[0][len(stage.sends) + len(stage.boundaries) :], strict=False))
    moving = {name.rpartition(".")[0] for name, node in news.items() if _from_statistics(node)}
    return frozenset(name for name in news if name.rpartition(".")[0] in moving)


def _from_statistics(node: fx.Node) -> bool:
    """Say whether a buffer's new value is made of statistics alone, and not of what was normalised by them."""
    pending, seen = [node], set[fx.Node]()
    while pending:
        current = pending.pop()
        if current in seen or current.op != "call_function":
            continue
        seen.add(current)
        if is_synced(current):
            return True
        pending += [n for n in current.all_input_nodes if n.meta["val"] is None or not _has_rows(n)]
    return False


def _has_rows(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), Tensor) and BATCH.on(node) and BATCH[node].kind == "rows"


def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    replicas: int,
) -> tuple[Any, ...]:
    """Normalise [rows, channels, ...] by the statistics of all replicas' rows.

    Returns what torch's functional batch norm does: the result, mean, 1 / sqrt(var + eps), and the new running
    mean and variance (the latter of a sample: N - 1 in place of N) where there are running ones.
    """
    out, mean, scale, var, count = _Normalise.apply(x, weight, bias, eps, replicas)  # type: ignore[no-untyped-call]
    if running_mean is None or running_var is None:
        return out, mean, scale
    sample = var * (count / (count - 1))
    news = (running_mean * (1 - momentum) + mean * momentum, running_var * (1 - momentum) + sample * momentum)
    return out, mean, scale, *(n.to(r.dtype) for n, r in zip(news, (running_mean, running_var), strict=True))


class _Normalise(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, replicas: int
    ) -> tuple[Tensor, ...]:
        kind = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
        channels, dims, number = x.shape[1], _others(x), x.numel() // x.shape[1]
        own_mean = x.sum(dims, dtype=kind) / number
        own_spread = (x - _along(own_mean, x)).square().sum(dims)  # sums in two passes: faster than torch's one
        everyone = replica_gather(torch.cat([own_mean, own_spread, own_mean.new_full((1,), number)]), replicas)
        means, spreads, sizes = everyone.split([channels, channels, 1], 1)
        count = sizes.sum(0)
        mean = (means * sizes).sum(0) / count
        var = (spreads + (means - mean) ** 2 * sizes).sum(0) / count
        scale = torch.rsqrt(var + eps)
        gain = mean.new_ones(channels) if weight is None else weight.to(kind)
        shift = mean.new_zeros(channels) if bias is None else bias.to(kind)
        out = aten._native_batch_norm_legit_no_training.default(x, gain, shift, mean, var, 0.0, eps)[0]
        ctx.save_for_backward(x, gain, mean, scale, count)
        ctx.kinds = tuple(None if p is None else p.dtype for p in (weight, bias))
        ctx.mark_non_differentiable(mean, scale, var, count)
        return out, mean, scale, var, count

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> Any:
        x, gain, mean, scale, count = ctx.saved_tensors
        dims, centred = _others(x), x - _along(mean, x)
        shift, slope = grad.sum(dims, dtype=mean.dtype), (grad * centred).sum(dims) * scale
        dy, dy_x = (replica_sum(torch.cat([shift, slope])) / count).split(mean.shape[0])
        moved = (grad - _along(dy, x) - centred * _along(scale * dy_x, x)) * _along(gain * scale, x)
        own = tuple(None if k is None else g.to(k) for g, k in zip((slope, shift), ctx.kinds, strict=True))
        return moved.to(x.dtype), *own, None, None


def _others(x: Tensor) -> list[int]:
    """Return all dimensions but that of the channels."""
    return [d for d in range(x.ndim) if d != 1]


def _along(vector: Tensor, x: Tensor) -> Tensor:
    """Return one number a channel as it meets values [rows, channels, ...]."""
    return vector.view(1, -1, *(1 for _ in range(x.ndim - 2)))


__all__ = ["Synced", "batch_norm", "is_synced", "sync_stage"]
