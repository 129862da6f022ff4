"""How each operator that draws is computed from masks and from numbers between 0 and 1.

Each rule inserts calls and returns the node that stands for the result, or one for each of the results. The
formulas are inversions of the distribution functions (Devroye, "Non-uniform random variate generation", 1986,
chapter 2); a choice without replacement takes the largest of p / e with exponential e (Efraimidis, Spirakis,
"Weighted random sampling with a reservoir", 2006, 10.1016/j.ipl.2005.11.003), as torch does.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import fx

from efftra_fx.errors import CaptureError

from .means import argument

aten = torch.ops.aten


class Draws(Protocol):
    """What a rule writes with; see `Drawer`."""

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Any: ...
    def insert(self, target: Any, args: Sequence[Any], value: Any) -> fx.Node: ...
    def keep(self, sizes: Sequence[Any], drop: float) -> fx.Node: ...
    def uniform(self, sizes: Sequence[Any], dtype: torch.dtype) -> fx.Node: ...
    def like(self, value: fx.Node, node: fx.Node) -> fx.Node: ...
    def refusal(self, what: str) -> str: ...


Rule = Callable[[fx.Node, Draws], Any]
RULES: dict[Any, Rule] = {}


def _for(*targets: Any) -> Callable[[Rule], Rule]:
    def enter(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(targets, rule))
        return rule

    return enter


def _sizes(node: fx.Node) -> list[Any]:
    return list(node.meta["val"].shape)


def _unit(node: fx.Node, draws: Draws) -> fx.Node:
    """Draw a number between 0 and 1 for each element of a result."""
    dtype = node.meta["val"].dtype
    return draws.uniform(_sizes(node), dtype if dtype.is_floating_point or dtype.is_complex else torch.float64)


def _standard(node: fx.Node, draws: Draws) -> fx.Node:
    """Draw a standard normal number for each element of a result."""
    centred = draws.call(aten.sub.Tensor, draws.call(aten.mul.Tensor, _unit(node, draws), 2.0), 1.0)
    return draws.call(aten.mul.Tensor, draws.call(aten.erfinv.default, centred), math.sqrt(2.0))  # type: ignore[no-any-return]


def dropped(x: fx.Node, p: float, draws: Draws) -> tuple[fx.Node, fx.Node]:
    """Insert a dropout; return its result and its mask."""
    mask = draws.keep(_sizes(x), p)
    kept = draws.call(aten.mul.Tensor, x, mask)
    return draws.call(aten.mul.Tensor, kept, 0.0 if p == 1 else 1 / (1 - p)), mask


@_for(aten.native_dropout.default)
def _native_dropout(node: fx.Node, draws: Draws) -> Any:
    return dropped(node.args[0], argument(node, "p"), draws)  # type: ignore[arg-type]


@_for(aten.dropout.default)
def _dropout(node: fx.Node, draws: Draws) -> Any:
    return dropped(node.args[0], argument(node, "p"), draws)[0]  # type: ignore[arg-type]


@_for(aten.bernoulli.p)
def _coin(node: fx.Node, draws: Draws) -> Any:
    return draws.like(draws.keep(_sizes(node), 1.0 - argument(node, "p")), node)


@_for(aten.bernoulli.default, aten.bernoulli.Tensor)
def _coins(node: fx.Node, draws: Draws) -> Any:
    chances: Any = node.args[-1]
    kind = chances.meta["val"].dtype
    unit = draws.uniform(_sizes(node), kind)
    return draws.like(draws.call(aten.lt.Tensor, unit, chances), node)


@_for(aten.rand.default, aten.rand_like.default)
def _rand(node: fx.Node, draws: Draws) -> Any:
    return draws.like(_unit(node, draws), node)


@_for(aten.uniform.default)
def _between(node: fx.Node, draws: Draws) -> Any:
    low, high = argument(node, "from"), argument(node, "to")
    scaled = draws.call(aten.mul.Tensor, _unit(node, draws), float(high - low))
    return draws.like(draws.call(aten.add.Tensor, scaled, float(low)), node)


@_for(aten.randn.default, aten.randn_like.default)
def _randn(node: fx.Node, draws: Draws) -> Any:
    return draws.like(_standard(node, draws), node)


@_for(
    aten.normal_functional.default,
    aten.normal.Tensor_Tensor,
    aten.normal.Tensor_float,
    aten.normal.float_Tensor,
    aten.normal.float_float,
)
def _normal(node: fx.Node, draws: Draws) -> Any:
    scaled = draws.call(aten.mul.Tensor, _standard(node, draws), argument(node, "std"))
    return draws.like(draws.call(aten.add.Tensor, scaled, argument(node, "mean")), node)


@_for(aten.log_normal.default)
def _log_normal(node: fx.Node, draws: Draws) -> Any:
    scaled = draws.call(aten.mul.Tensor, _standard(node, draws), float(argument(node, "std")))
    shifted = draws.call(aten.add.Tensor, scaled, float(argument(node, "mean")))
    return draws.like(draws.call(aten.exp.default, shifted), node)


@_for(aten.exponential.default)
def _exponential(node: fx.Node, draws: Draws) -> Any:
    logs = draws.call(aten.log.default, _unit(node, draws))
    return draws.like(draws.call(aten.mul.Tensor, logs, -1.0 / argument(node, "lambd")), node)


@_for(aten.geometric.default)
def _geometric(node: fx.Node, draws: Draws) -> Any:
    p = argument(node, "p")
    logs = draws.call(aten.log.default, _unit(node, draws))
    tries = draws.call(aten.ceil.default, draws.call(aten.mul.Tensor, logs, 1.0 / math.log1p(-p) if p < 1 else 0.0))
    return draws.like(draws.call(aten.clamp_min.default, tries, 1.0), node)


@_for(aten.cauchy.default)
def _cauchy(node: fx.Node, draws: Draws) -> Any:
    centred = draws.call(aten.sub.Tensor, _unit(node, draws), 0.5)
    tangent = draws.call(aten.tan.default, draws.call(aten.mul.Tensor, centred, math.pi))
    scaled = draws.call(aten.mul.Tensor, tangent, float(argument(node, "sigma")))
    return draws.like(draws.call(aten.add.Tensor, scaled, float(argument(node, "median"))), node)


@_for(
    aten.randint.default,
    aten.randint.low,
    aten.randint_like.default,
    aten.randint_like.low_dtype,
    aten.random.default,
    aten.random.to,
    getattr(aten.random, "from"),
)
def _whole_numbers(node: fx.Node, draws: Draws) -> Any:
    low = argument(node, "low") or argument(node, "from") or 0
    high = argument(node, "high")
    high = argument(node, "to") if high is None else high
    if high is None:  # torch draws what the dtype holds
        dtype = node.meta["val"].dtype
        high = 2 ** (24 if dtype is torch.float32 else 52) if dtype.is_floating_point else torch.iinfo(dtype).max
    if isinstance(high, fx.Node) or isinstance(low, fx.Node):  # a few rows could not prove how these follow the batch
        raise CaptureError(draws.refusal("whole numbers up to the number of rows"))
    unit = draws.uniform(_sizes(node), torch.float64)
    scaled = draws.call(aten.floor.default, draws.call(aten.mul.Tensor, unit, high - low))
    return draws.like(draws.call(aten.add.Tensor, scaled, low), node)


@_for(aten.randperm.default)
def _permutation(node: fx.Node, draws: Draws) -> Any:
    order = draws.call(aten.sort.default, draws.uniform(_sizes(node), torch.float64))
    return draws.like(draws.call(operator.getitem, order, 1), node)


@_for(aten.multinomial.default)
def _choice(node: fx.Node, draws: Draws) -> Any:
    chances: Any = node.args[0]
    kind = chances.meta["val"].dtype
    if argument(node, "replacement"):
        sums = draws.call(aten.cumsum.default, chances, -1)
        total = draws.call(aten.slice.Tensor, sums, -1, -1)
        aims = draws.call(aten.mul.Tensor, draws.like(draws.uniform(_sizes(node), kind), chances), total)
        found = draws.call(aten.searchsorted.Tensor, sums, aims, right=True)
        return draws.call(aten.clamp_max.default, found, chances.meta["val"].shape[-1] - 1)
    unit = draws.like(draws.uniform(_sizes(chances), kind), chances)
    noise = draws.call(aten.neg.default, draws.call(aten.log.default, unit))
    best = draws.call(aten.topk.default, draws.call(aten.div.Tensor, chances, noise), argument(node, "num_samples"))
    return draws.call(operator.getitem, best, 1)


@_for(aten.rrelu.default, aten.rrelu_with_noise.default, aten.rrelu_with_noise_functional.default)
def _random_leak(node: fx.Node, draws: Draws) -> Any:
    x: Any = node.args[0]
    low, high = float(argument(node, "lower")), float(argument(node, "upper"))
    scaled = draws.call(aten.mul.Tensor, _unit(x, draws), high - low)
    slope = draws.like(draws.call(aten.add.Tensor, scaled, low), x)
    negative = draws.call(aten.le.Scalar, x, 0)
    leaked = draws.call(aten.where.self, negative, draws.call(aten.mul.Tensor, x, slope), x)
    if node.target is not aten.rrelu_with_noise_functional.default:
        return leaked
    ones = draws.call(aten.ones_like.default, x)
    return leaked, draws.call(aten.where.self, negative, slope, ones)


@_for(aten.scaled_dot_product_attention.default)
def _attention(node: fx.Node, draws: Draws) -> Any:
    """Write attention out, as torch's own reference does, with a dropout of its weights."""
    given: Any = node.args
    query, key, value = given[:3]
    mask: Any = argument(node, "attn_mask")
    shape = query.meta["val"].shape
    scale = argument(node, "scale")
    scale = 1 / math.sqrt(shape[-1]) if scale is None else scale
    if argument(node, "enable_gqa"):
        times = shape[-3] // key.meta["val"].shape[-3]
        key = draws.call(aten.repeat_interleave.self_int, key, times, -3)
        value = draws.call(aten.repeat_interleave.self_int, value, times, -3)
    turned = draws.call(aten.transpose.int, key, -2, -1)
    scores = draws.call(aten.matmul.default, draws.call(aten.mul.Tensor, query, scale), turned)
    if argument(node, "is_causal"):
        ones = draws.call(aten.ones_like.default, scores, dtype=torch.bool)
        mask = draws.call(aten.tril.default, ones)
    if mask is None:
        weights = draws.call(aten.softmax.int, scores, -1)
    else:
        if mask.meta["val"].dtype is torch.bool:
            hidden = draws.call(aten.logical_not.default, mask)
            scores = draws.call(aten.masked_fill.Scalar, scores, hidden, float("-inf"))
        else:
            scores = draws.call(aten.add.Tensor, scores, mask)
        weights = draws.call(aten._safe_softmax.default, scores, -1)
    kept, _ = dropped(weights, argument(node, "dropout_p"), draws)
    return draws.call(aten.matmul.default, kept, value)


@_for(aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input)
def _recurrent(node: fx.Node, draws: Draws) -> Any:
    """Write a recurrent net layer by layer, with the dropouts between them."""
    given: Any = node.args
    x, start, params = given[:3]
    layers, ways = argument(node, "num_layers"), 1 + bool(argument(node, "bidirectional"))
    several = isinstance(start, (list, tuple))
    starts: Any = start if several else [start]
    size = len(params) // layers
    settings = (argument(node, "train"), argument(node, "bidirectional"), argument(node, "batch_first"))
    ends: list[list[fx.Node]] = [[] for _ in starts]
    for layer in range(layers):
        if layer:
            x, _ = dropped(x, argument(node, "dropout"), draws)
        first = [draws.call(aten.slice.Tensor, s, 0, layer * ways, (layer + 1) * ways) for s in starts]
        own = list(params[layer * size : (layer + 1) * size])
        args = (x, first if several else first[0], own, argument(node, "has_biases"), 1, 0.0, *settings)
        # One layer's states lie like those of all layers; computing them anew would fix the number of rows.
        out, *states = node.meta["val"]
        made = draws.insert(node.target, args, (out, *(s[layer * ways : (layer + 1) * ways] for s in states)))
        x = draws.call(operator.getitem, made, 0)
        for index, end in enumerate(ends):
            end.append(draws.call(operator.getitem, made, index + 1))
    return (x, *(draws.call(aten.cat.default, end, 0) for end in ends))


__all__ = ["RULES", "Draws", "dropped"]
