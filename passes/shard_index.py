"""Letters of operators that look elements up, put them elsewhere, or repeat them: other dimensions pass through."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from .shard_axes import (
    Axes,
    Letter,
    Letters,
    extents,
    keeping,
    letters,
    letters_of,
    rank_of,
    results,
    value_of,
)

aten = torch.ops.aten


@letters_of(aten.gather.default)
def _gather(node: fx.Node, a: dict[str, Any]) -> Axes:
    names = _common(a["dim"], a["self"], a["index"])
    return Axes((names, names), (names,))


@letters_of(aten.scatter.src, aten.scatter_add.default, aten.scatter_reduce.two)
def _scatter(node: fx.Node, a: dict[str, Any]) -> Axes:
    names = _common(a["dim"], a["self"], a["index"], a["src"])
    return Axes((names,) * 3, (names,))


@letters_of(aten.scatter.value)
def _scatter_value(node: fx.Node, a: dict[str, Any]) -> Axes:
    names = _common(a["dim"], a["self"], a["index"])
    return Axes((names, names), (names,))


def _common(along: int, first: Any, *others: Any) -> Letters:
    """Return letters for the dimensions but `along` in which all are equally long: elsewhere a part is left out."""
    sizes = extents(value_of(first))
    same = [all(extents(value_of(o))[d] == size for o in others) for d, size in enumerate(sizes)]
    d = along % len(sizes) if sizes else 0
    return tuple(one if same[i] and i != d else None for i, one in enumerate(letters("d", len(sizes))))


@letters_of(aten.index_select.default)
def _index_select(node: fx.Node, a: dict[str, Any]) -> Axes:
    return keeping(node, a["self"], [a["dim"]], ((None,) * rank_of(a["index"]),))


@letters_of(aten.index_add.default, aten.index_copy.default)
def _index_add(node: fx.Node, a: dict[str, Any]) -> Axes | None:
    if rank_of(a["self"]) != rank_of(a["source"]):
        return None
    names = keeping(node, a["self"], [a["dim"]]).operands[0]
    return Axes((names, (None,) * rank_of(a["index"]), names), (names,))


@letters_of(aten.index.Tensor)
def _index(node: fx.Node, a: dict[str, Any]) -> Axes | None:
    """Dimensions that are not indexed pass; what is picked stands where the indices stood together, else in front."""
    found = _indexed(a["self"], a["indices"])
    if found is None:
        return None
    names, kept, front, rest = found
    picked = results(node)[0].ndim - len(kept)
    out = (*kept[:front], *(None for _ in range(picked)), *kept[front:])
    return Axes((names, *rest), (out,))


@letters_of(aten.index_put.default)
def _index_put(node: fx.Node, a: dict[str, Any]) -> Axes | None:
    """As `_index`; the values lie as what is indexed, but may be broadcast."""
    found = _indexed(a["self"], a["indices"])
    if found is None:
        return None
    names, kept, front, rest = found
    values = value_of(a["values"])
    count = max((value_of(one).ndim for one in a["indices"] if one is not None), default=0)
    if any(one is not None and value_of(one).dtype is torch.bool for one in a["indices"]):
        count = 1
    full: Letters = (*kept[:front], *(None for _ in range(count)), *kept[front:])
    given = full[len(full) - values.ndim :] if values.ndim else ()
    sizes = extents(values)
    own = tuple(None if sizes[d] == 1 else one for d, one in enumerate(given))
    return Axes((names, *rest, own), (names,))


def _indexed(operand: Any, indices: Sequence[Any]) -> tuple[Letters, list[Letter], int, tuple[Letters, ...]] | None:
    """Return the operand's letters, those that are kept, how many of them stand in front, and the indices' letters.

    A boolean index stands for as many dimensions as it has; together with others it is not known.
    """
    given = [one for one in indices if one is not None]
    if not given:
        return None
    masks = [one for one in given if value_of(one).dtype in (torch.bool, torch.uint8)]
    if masks and len(given) > 1:
        return None
    taken: set[int] = set()
    at = 0
    for one in indices:
        width = rank_of(one) if one is not None and masks else 1
        taken |= set(range(at, at + width)) if one is not None else set()
        at += width
    names: list[Letter] = [None if d in taken else one for d, one in enumerate(letters("d", rank_of(operand)))]
    first, last = min(taken), max(taken)
    together = last - first + 1 == len(taken)
    kept = [one for d, one in enumerate(names) if d not in taken]
    rest = tuple((None,) * rank_of(one) for one in given)
    return tuple(names), kept, first if together else 0, rest


@letters_of(aten.roll.default)
def _roll(node: fx.Node, a: dict[str, Any]) -> Axes | None:
    return keeping(node, a["self"], a["dims"]) if a["dims"] else None


@letters_of(aten.repeat.default, aten.tile.default)
def _repeat(node: fx.Node, a: dict[str, Any]) -> Axes | None:
    """Dimensions that are repeated once pass."""
    times = list(a["repeats"] if "repeats" in a else a["dims"])
    count, made = rank_of(a["self"]), results(node)[0]
    times = [1] * (made.ndim - len(times)) + times
    new = made.ndim - count
    names = tuple(
        one if isinstance(times[d + new], int) and times[d + new] == 1 else None
        for d, one in enumerate(letters("d", count))
    )
    return Axes((names,), ((*(None for _ in range(new)), *names),), linear=(frozenset({0}),))


@letters_of(aten.one_hot.default)
def _one_hot(node: fx.Node, a: dict[str, Any]) -> Axes | None:
    names = letters("d", rank_of(a["self"]))
    return Axes((names,), ((*names, None),)) if a["num_classes"] > 0 else None


@letters_of(aten.kthvalue.default, aten.median.dim, aten.mode.default)
def _ranked(node: fx.Node, a: dict[str, Any]) -> Axes:
    names = keeping(node, a["self"], [a["dim"]]).operands[0]
    d = a["dim"] % rank_of(a["self"])
    out = names if a["keepdim"] else tuple(one for i, one in enumerate(names) if i != d)
    return Axes((names,), (out,) * len(results(node)))


@letters_of(aten.masked_fill.Tensor)
def _masked_fill(node: fx.Node, a: dict[str, Any]) -> Axes | None:
    out = results(node)[0]
    names = letters("d", out.ndim)
    mask: Tensor = value_of(a["mask"])
    if value_of(a["self"]).shape != out.shape or mask.ndim > out.ndim:
        return None
    sizes, full, offset = extents(mask), extents(out), out.ndim - mask.ndim
    own = tuple(None if sizes[d] != full[d + offset] else names[d + offset] for d in range(mask.ndim))
    return Axes((names, own, ()), (names,))


__all__: list[str] = []
