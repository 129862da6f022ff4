"""The letters of each operator's dimensions; see `shard_axes`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from .shard_axes import (
    Axes,
    Letter,
    Letters,
    aligned,
    extents,
    keeping,
    letters,
    letters_of,
    operands,
    pointwise,
    rank_of,
    results,
    value_of,
)

aten = torch.ops.aten


def _terms(*pairs: tuple[Any, Letters]) -> tuple[Letters, ...]:
    """Return the letters of those operands that are there."""
    return tuple(names for operand, names in pairs if isinstance(operand, fx.Node))


@letters_of(aten.linear.default)
def _linear(node: fx.Node, a: dict[str, Any]) -> Axes:
    lead = letters("b", rank_of(a["input"]) - 1)
    n, k = ("n", 1), ("k", 1)
    terms = _terms((a["input"], (*lead, k)), (a["weight"], (n, k)), (a["bias"], (n,)))
    return Axes(terms, ((*lead, n),), frozenset("k"), frozenset({2}) if len(terms) == 3 else frozenset(), ("n", "k"))


@letters_of(aten.mm.default)
def _mm(node: fx.Node, a: dict[str, Any]) -> Axes:
    m, k, n = ("m", 1), ("k", 1), ("n", 1)
    return Axes(((m, k), (k, n)), ((m, n),), frozenset("k"), seeds=("n", "k"))


@letters_of(aten.addmm.default)
def _addmm(node: fx.Node, a: dict[str, Any]) -> Axes | None:
    if (a["beta"], a["alpha"]) != (1, 1):
        return None
    m, k, n = ("m", 1), ("k", 1), ("n", 1)
    bias = aligned(a["self"], results(node)[0], (m, n))
    return Axes((bias, (m, k), (k, n)), ((m, n),), frozenset("k"), frozenset({0}), ("n", "k"))


@letters_of(aten.bmm.default)
def _bmm(node: fx.Node, a: dict[str, Any]) -> Axes:
    b, m, k, n = ("b", 1), ("m", 1), ("k", 1), ("n", 1)
    return Axes(((b, m, k), (b, k, n)), ((b, m, n),), frozenset("k"), seeds=("b", "n", "k"))


@letters_of(aten.baddbmm.default)
def _baddbmm(node: fx.Node, a: dict[str, Any]) -> Axes | None:
    if (a["beta"], a["alpha"]) != (1, 1):
        return None
    b, m, k, n = ("b", 1), ("m", 1), ("k", 1), ("n", 1)
    extra = aligned(a["self"], results(node)[0], (b, m, n))
    return Axes((extra, (b, m, k), (b, k, n)), ((b, m, n),), frozenset("k"), frozenset({0}), ("b", "n", "k"))


@letters_of(aten.matmul.default)
def _matmul(node: fx.Node, a: dict[str, Any]) -> Axes | None:
    left, right = value_of(a["self"]), value_of(a["other"])
    out = results(node)[0]
    if left.ndim > 1 and right.ndim == 1:
        names = letters("m", left.ndim - 1)
        return Axes(((*names, ("k", 1)), (("k", 1),)), (names,), frozenset("k"), seeds=("k",))
    if left.ndim < 2 or right.ndim < 2:
        return None
    lead = letters("b", out.ndim - 2)
    m, k, n = ("m", 1), ("k", 1), ("n", 1)
    first = aligned(a["self"], out, (*lead, None, None))[:-2]
    second = aligned(a["other"], out, (*lead, None, None))[:-2]
    seeds = ("n", "k", *(name for name, _ in (one for one in lead if one)))
    return Axes(((*first, m, k), (*second, k, n)), ((*lead, m, n),), frozenset("k"), seeds=seeds)


@letters_of(aten.mv.default)
def _mv(node: fx.Node, a: dict[str, Any]) -> Axes:
    return Axes(((("m", 1), ("k", 1)), (("k", 1),)), ((("m", 1),),), frozenset("k"), seeds=("k",))


@letters_of(aten.prelu.default, aten._prelu_kernel.default)
def _prelu(node: fx.Node, a: dict[str, Any]) -> Axes | None:
    """A slope for each channel, or one for all."""
    names, slope = letters("d", rank_of(a["self"])), value_of(a["weight"])
    if slope.ndim == rank_of(a["self"]):
        return pointwise(node)
    return Axes((names, (None if extents(slope) == (1,) else names[1],) * slope.ndim), (names,))


@letters_of(aten.einsum.default)
def _einsum(node: fx.Node, a: dict[str, Any]) -> Axes | None:
    """The equation's own letters; dots stand for further ones, and a dimension of length one is broadcast."""
    left, arrow, right = a["equation"].replace(" ", "").partition("->")
    terms = left.split(",")
    values = [value_of(operand) for operand in operands(node)]
    if len(terms) != len(values) or a.get("path") is not None:
        return None
    dots = max((v.ndim - len(t) + 3 for v, t in zip(values, terms, strict=True) if "..." in t), default=0)
    further = [f"dot{index}" for index in range(dots)]
    spelt = [_spelt(term, further, value.ndim) for term, value in zip(terms, values, strict=True)]
    if any(len(set(names)) != len(names) for names in spelt):
        return None
    everything = [name for names in spelt for name in names]
    single = sorted(name for name in set(everything) if everything.count(name) == 1 and name not in further)
    out = _spelt(right, further, len(right) - 3 + dots) if arrow else [*further, *single]
    sizes: dict[str, set[int | None]] = {}
    for names, value in zip(spelt, values, strict=True):
        for name, size in zip(names, extents(value), strict=True):
            sizes.setdefault(name, set()).add(size)

    def letter(name: str, size: int | None) -> Letter:
        return None if size == 1 and sizes[name] != {1} else (name, 1)

    given = tuple(
        tuple(letter(name, size) for name, size in zip(names, extents(value), strict=True))
        for names, value in zip(spelt, values, strict=True)
    )
    made = (tuple((name, 1) for name in out),)
    return Axes(given, made, frozenset(everything) - frozenset(out), seeds=tuple(dict.fromkeys(everything)))


def _spelt(term: str, further: list[str], count: int) -> list[str]:
    """Return the letters of an einsum's term for an operand of so many dimensions."""
    head, dots, rest = term.partition("...")
    extra = count - len(head) - len(rest)
    return [*head, *(further[len(further) - extra :] if dots and extra else []), *rest]


@letters_of(aten.embedding.default)
def _embedding(node: fx.Node, a: dict[str, Any]) -> Axes | None:
    if a["scale_grad_by_freq"] or a["sparse"]:
        return None
    lead = letters("i", rank_of(a["indices"]))
    return Axes(((("v", 1), ("d", 1)), lead), ((*lead, ("d", 1)),), frozenset("v"), seeds=("v", "d"))


@letters_of(aten.scaled_dot_product_attention.default)
def _attention(node: fx.Node, a: dict[str, Any]) -> Axes | None:
    if a["dropout_p"] and torch.cuda.is_available():  # fused kernels there draw in an order of their own
        return None
    out = results(node)[0]
    query, key = value_of(a["query"]), value_of(a["key"])
    if query.ndim < 3:
        return None
    lead: list[Letter] = list(letters("b", out.ndim - 2))
    shared = list(lead)
    if a["enable_gqa"]:
        heads, groups = extents(query)[-3], extents(key)[-3]
        if heads is None or groups is None:
            return None
        lead[-1] = ("h", heads // groups)
        shared[-1] = ("h", 1)
    elif extents(query)[:-2] != extents(key)[:-2]:
        return None
    names: Letters = (*lead, None, None)
    mask = aligned(a["attn_mask"], out, names) if isinstance(a["attn_mask"], fx.Node) else ()
    pair: Letters = (*shared, None, None)
    terms = _terms((a["query"], names), (a["key"], pair), (a["value"], pair), (a["attn_mask"], mask))
    return Axes(terms, (names,), seeds=tuple(one[0] for one in lead if one is not None))


@letters_of(
    aten.softmax.int,
    aten._softmax.default,
    aten.log_softmax.int,
    aten._log_softmax.default,
    aten.cumsum.default,
    aten.sort.default,
    aten.topk.default,
    aten.flip.default,
    aten.cumprod.default,
    aten.logcumsumexp.default,
    aten.sort.stable,
    aten.argsort.default,
    aten.argsort.stable,
    aten.cummax.default,
    aten.cummin.default,
)
def _along_dim(node: fx.Node, a: dict[str, Any]) -> Axes:
    dims = a["dims"] if "dims" in a else [a["dim"]]
    return keeping(node, a["self"], dims)


@letters_of(aten.tril.default, aten.triu.default)
def _triangle(node: fx.Node, a: dict[str, Any]) -> Axes:
    return keeping(node, a["self"], (-1, -2))


@letters_of(aten.layer_norm.default, aten.native_layer_norm.default, aten.rms_norm.default)
def _layer_norm(node: fx.Node, a: dict[str, Any]) -> Axes:
    count = rank_of(a["input"])
    lead = letters("b", count - len(a["normalized_shape"]))
    names: Letters = (*lead, *(None for _ in a["normalized_shape"]))
    none: Letters = tuple(None for _ in a["normalized_shape"])
    terms = _terms((a["input"], names), (a["weight"], none), (a.get("bias"), none))
    return Axes(terms, (names,) * len(results(node)))


@letters_of(aten.group_norm.default, aten.native_group_norm.default)
def _group_norm(node: fx.Node, a: dict[str, Any]) -> Axes | None:
    if node.target is not aten.group_norm.default:
        return None
    count = rank_of(a["input"])
    channels = extents(value_of(a["input"]))[1]
    assert channels is not None
    one: Letter = ("g", channels // a["num_groups"])
    names: Letters = (None, one, *(None for _ in range(count - 2)))
    return Axes(_terms((a["input"], names), (a["weight"], (one,)), (a["bias"], (one,))), (names,))


@letters_of(aten._native_batch_norm_legit_functional.default, aten._native_batch_norm_legit_no_training.default,
      aten.batch_norm.default, aten._native_batch_norm_legit.no_stats)  # fmt: skip
def _batch_norm(node: fx.Node, a: dict[str, Any]) -> Axes:
    c: Letter = ("c", 1)
    names: Letters = (None, c, *(None for _ in range(rank_of(a["input"]) - 2)))
    vectors = [a[name] for name in ("weight", "bias", "running_mean", "running_var") if name in a]
    made = tuple(
        names if index == 0 else (c,) if isinstance(v, Tensor) and v.ndim == 1 and v.numel() else ()
        for index, v in enumerate(results(node))
    )
    return Axes(_terms((a["input"], names), *((v, (c,)) for v in vectors)), made)


@letters_of(aten.conv1d.default, aten.conv2d.default, aten.conv3d.default, aten.conv1d.padding, aten.conv2d.padding,
      aten.conv3d.padding, aten.convolution.default, aten.conv_transpose1d.default, aten.conv_transpose2d.input,
      aten.conv_transpose3d.input)  # fmt: skip
def _convolution(node: fx.Node, a: dict[str, Any]) -> Axes | None:
    turned = bool(a.get("transposed")) or "conv_transpose" in str(node.target)
    spatial = (None,) * (rank_of(a["weight"]) - 2)
    if rank_of(a["input"]) != rank_of(a["weight"]):
        return None
    groups = a["groups"]
    if groups == 1:
        o, i = ("o", 1), ("i", 1)
        weight: Letters = (i, o, *spatial) if turned else (o, i, *spatial)
        terms = _terms((a["input"], (None, i, *spatial)), (a["weight"], weight), (a["bias"], (o,)))
        added = frozenset({2}) if len(terms) == 3 else frozenset[int]()
        return Axes(terms, ((None, o, *spatial),), frozenset("i"), added, ("o", "i"))
    inputs, outputs = extents(value_of(a["input"]))[1], extents(results(node)[0])[1]
    assert inputs is not None and outputs is not None
    per_in, per_out = ("g", inputs // groups), ("g", outputs // groups)
    weight = (per_in if turned else per_out, None, *spatial)
    terms = _terms((a["input"], (None, per_in, *spatial)), (a["weight"], weight), (a["bias"], (per_out,)))
    return Axes(terms, ((None, per_out, *spatial),), seeds=("g",))


@letters_of(aten.max_pool2d.default, aten.max_pool2d_with_indices.default, aten.avg_pool2d.default,
      aten.max_pool1d.default,
      aten.avg_pool1d.default, aten.adaptive_avg_pool1d.default, aten.adaptive_avg_pool2d.default,
      aten._adaptive_avg_pool2d.default, aten.adaptive_max_pool2d.default, aten.upsample_nearest2d.vec,
      aten.upsample_bilinear2d.vec, aten.upsample_nearest2d.default, aten.upsample_bilinear2d.default)  # fmt: skip
def _spatial(node: fx.Node, a: dict[str, Any]) -> Axes | None:
    operand = operands(node)[0]
    if rank_of(operand) < 3:
        return None
    spatial = 1 if "1d" in str(node.target) else 2
    return keeping(node, operand, range(rank_of(operand) - spatial, rank_of(operand)))


@letters_of(aten.constant_pad_nd.default, aten.pad.default)
def _pad(node: fx.Node, a: dict[str, Any]) -> Axes:
    count = rank_of(a["self"])
    padded = [d for d in range(len(a["pad"]) // 2) if a["pad"][2 * d] or a["pad"][2 * d + 1]]
    return keeping(node, a["self"], [count - 1 - d for d in padded])


def _reduced(node: fx.Node, dims: Any, keep: bool, adds: bool) -> Axes:
    count = rank_of(node.args[0])
    along = {d % count for d in dims} if dims else set(range(count))
    full = letters("d", count)
    names = full if adds else tuple(None if d in along else one for d, one in enumerate(full))
    out = tuple(None if d in along else one for d, one in enumerate(full) if keep or d not in along)
    summed = frozenset(one[0] for d, one in enumerate(full) if d in along and one is not None) if adds else frozenset()
    moving = (frozenset({0}),) if adds else ()
    return Axes((names,), (out,) * len(results(node)), summed, linear=moving)


@letters_of(aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim)
def _sum(node: fx.Node, a: dict[str, Any]) -> Axes:
    return _reduced(node, a.get("dim"), bool(a.get("keepdim")), True)


@letters_of(aten.amax.default, aten.amin.default, aten.logsumexp.default, aten.var.correction, aten.std.correction,
      aten.prod.dim_int, aten.argmax.default, aten.max.dim, aten.min.dim, aten.any.dim, aten.all.dim,
      aten.linalg_vector_norm.default, aten.var_mean.correction)  # fmt: skip
def _over_dims(node: fx.Node, a: dict[str, Any]) -> Axes:
    dim = a.get("dim")
    dims = [dim] if isinstance(dim, int) else dim
    return _reduced(node, dims, bool(a.get("keepdim")), False)


@letters_of(aten.mse_loss.default, aten.l1_loss.default, aten.smooth_l1_loss.default, aten.huber_loss.default,
      aten.binary_cross_entropy_with_logits.default, aten.binary_cross_entropy.default)  # fmt: skip
def _loss_of_elements(node: fx.Node, a: dict[str, Any]) -> Axes | None:
    given = operands(node)
    first = value_of(given[0])
    if any(value_of(o).shape != first.shape for o in given[:2]) or a["reduction"] == 1:
        return None
    names = letters("d", first.ndim)
    terms = tuple(aligned(o, first, names) for o in given)
    if a["reduction"] == 0:
        return Axes(terms, (names,))
    return Axes(terms, ((),), frozenset(one[0] for one in names if one is not None))


@letters_of(aten.transpose.int, aten.permute.default, aten.t.default, aten.unsqueeze.default, aten.squeeze.default,
      aten.squeeze.dim, aten.squeeze.dims, aten.select.int, aten.slice.Tensor, aten.movedim.int)  # fmt: skip
def _rearranged(node: fx.Node, a: dict[str, Any]) -> Axes | None:
    value = value_of(a["self"])
    count = value.ndim
    names: list[Letter] = list(letters("d", count))
    out = list(names)
    match node.target:
        case aten.transpose.int:
            i, j = a["dim0"] % count, a["dim1"] % count
            out[i], out[j] = out[j], out[i]
        case aten.permute.default:
            out = [names[d % count] for d in a["dims"]]
        case aten.t.default:
            out = names[::-1]
        case aten.movedim.int:
            moved = out.pop(a["source"] % count)
            out.insert(a["destination"] % count, moved)
        case aten.unsqueeze.default:
            out.insert(a["dim"] % (count + 1), None)
        case aten.select.int:
            names[a["dim"] % count] = None
            out = [one for d, one in enumerate(names) if d != a["dim"] % count]
        case aten.slice.Tensor:
            d = a["dim"] % count
            if value_of(node).shape[d] != value.shape[d]:
                names[d] = out[d] = None
        case _:
            dims = a.get("dim", range(count))
            gone = {d % count for d in ([dims] if isinstance(dims, int) else dims)}
            gone = {d for d in gone if extents(value)[d] == 1}
            out = [one for d, one in enumerate(names) if d not in gone]
            names = [None if d in gone else one for d, one in enumerate(names)]
    return Axes((tuple(names),), (tuple(out),), linear=(frozenset({0}),))


@letters_of(aten._to_copy.default, aten.clone.default, aten.contiguous.default, aten.detach.default, aten.alias.default,
      aten.to.dtype, aten.type_as.default, aten.detach_.default, aten.where.ScalarOther, aten.where.ScalarSelf,
      aten.where.Scalar)  # fmt: skip
def _same(node: fx.Node, a: dict[str, Any]) -> Axes | None:
    axes = pointwise(node)
    return axes


@letters_of(aten.expand.default)
def _expand(node: fx.Node, a: dict[str, Any]) -> Axes:
    out = results(node)[0]
    names = letters("d", out.ndim)
    return Axes((aligned(a["self"], out, names),), (names,), linear=(frozenset({0}),))


@letters_of(aten.repeat_interleave.self_int)
def _repeat_interleave(node: fx.Node, a: dict[str, Any]) -> Axes | None:
    if a["dim"] is None or not isinstance(a["repeats"], int):
        return None
    count = rank_of(a["self"])
    names: list[Letter] = list(letters("d", count))
    d = a["dim"] % count
    out = [(f"d{d}", a["repeats"]) if i == d else one for i, one in enumerate(names)]
    return Axes((tuple(names),), (tuple(out),), linear=(frozenset({0}),))


@letters_of(aten.broadcast_tensors.default)
def _broadcast(node: fx.Node, a: dict[str, Any]) -> Axes:
    out = results(node)[0]
    names = letters("d", out.ndim)
    return Axes(tuple(aligned(o, out, names) for o in operands(node)), (names,) * len(results(node)))


@letters_of(aten.stack.default)
def _stack(node: fx.Node, a: dict[str, Any]) -> Axes:
    count = rank_of(operands(node)[0])
    names = letters("d", count)
    out: list[Letter] = list(names)
    out.insert(a["dim"] % (count + 1), None)
    return Axes((names,) * len(operands(node)), (tuple(out),), linear=(frozenset(range(len(operands(node)))),))


@letters_of(aten.dropout.default, aten.native_dropout.default)
def _dropout(node: fx.Node, a: dict[str, Any]) -> Axes:
    """A cut dropout draws the whole value's mask and keeps its share; see `dropout_part`.

    Partial sums may be dropped before they are added up: all ranks draw the same mask.
    """
    names = letters("d", rank_of(a["input"]))
    return Axes((names,), (names,) * len(results(node)), linear=(frozenset({0}),))


__all__: list[str] = []
