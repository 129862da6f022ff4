"""Take the chance out of operators: each draw gives a fixed number that drops nothing and hides nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten


EXTREMES = (0.0, 1.0 - 2.0**-20)  # what numbers between 0 and 1 are at least, and about at most

_MOST_DRAWS = 10_000
_WIDE = 8.0  # how far numbers from a normal distribution reach, from least to most


def without_chance(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], unit: float = 0.5) -> Any:
    """Return what an operator gives that drops nothing and draws one half, or the largest of whole numbers.

    Another `unit` between 0 and 1 stands for smaller or larger numbers of each kind. A permutation is turned round:
    so numbers that run over rows are seen to depend on how many there are.
    """
    if target is aten.native_dropout.default:
        return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
    names = [a.name for a in target._schema.arguments]
    calm: dict[str, Any] = {name: 0.0 for name in ("dropout_p", "dropout") if name in names}
    if "p" in names and "train" in names:
        calm["p"] = 0.0
    if "training" in names:
        calm["training"] = False
    given, named = list(args), dict(kwargs)
    for name, value in calm.items():
        where = names.index(name)
        if where < len(given):
            given[where] = value
        else:
            named[name] = value
    if calm:
        return target(*given, **named)
    if target._schema.is_mutable:
        return given[0].fill_(_one(target, names, given, named, given[0], unit))
    result = target(*given, **named)
    if target is aten.randperm.default:
        return result.sort(descending=True).values
    return torch.full_like(result, _one(target, names, given, named, result, unit))


def _one(
    target: Any,
    names: Sequence[str],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    result: torch.Tensor,
    unit: float,
) -> Any:
    """Return the number that every draw of a call gives."""
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    high = given.get("high", given.get("to"))
    if isinstance(high, int):
        return high - 1 if unit >= 0.5 else given.get("low", given.get("from", 0))
    if "num_samples" in given:
        return args[0].shape[-1] - 1 if unit >= 0.5 else 0
    if unit != 0.5 and ("randn" in target.name() or "normal" in target.name()):
        return _WIDE * (unit - 0.5)
    return unit if result.is_floating_point() else 0


class NoChance(TorchDispatchMode):
    """While this mode is on, operators that draw give what `without_chance` says.

    After very many draws they draw again: some code draws until a number fits.
    """

    def __init__(self, unit: float = 0.5) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.unit, self.left = unit, _MOST_DRAWS

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags and self.left:
            self.left -= 1
            return without_chance(func, args, kwargs or {}, self.unit)
        return func(*args, **(kwargs or {}))


__all__ = ["EXTREMES", "NoChance", "without_chance"]
