"""What the tracer has assumed of symbolic sizes: that a branch on the number of rows goes as for the example.

`if len(x) > 16` is decided while the step is traced, and leaves no trace in the graph. The tracer keeps
what it has decided as conditions on its symbols; a batch for which one does not hold is another form of batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import sympy
import torch
from torch import fx

from efftra_fx.private import size_expression, traced_conditions

_MOST_SHAPES = 4096  # whose answers are remembered


@dataclass(frozen=True)
class Assumed:
    """The shapes of a graph's inputs, by symbols or None for a number, and the conditions on these."""

    shapes: tuple[tuple[sympy.Expr | None, ...], ...]
    bounds: dict[sympy.Symbol, tuple[sympy.Expr, sympy.Expr]]
    conditions: tuple[sympy.Expr, ...]
    _known: dict[tuple[torch.Size, ...], bool] = field(default_factory=dict, compare=False, repr=False)

    def holds(self, shapes: Sequence[torch.Size]) -> bool:
        """Say whether inputs of these shapes meet all conditions; sizes that are no symbols are not looked at."""
        found = tuple(shapes)
        if found not in self._known:
            if len(self._known) >= _MOST_SHAPES:
                self._known.clear()
            self._known[found] = self._holds(found)
        return self._known[found]

    def _holds(self, shapes: Sequence[torch.Size]) -> bool:
        sizes: dict[sympy.Expr, int] = {}
        for symbols, shape in zip(self.shapes, shapes, strict=True):
            for symbol, size in zip(symbols, shape, strict=True):
                if symbol is not None and sizes.setdefault(symbol, size) != size:
                    return False
        for symbol, size in sizes.items():
            low, high = self.bounds.get(symbol, (size, size))
            if not bool(low <= size <= high):
                return False
        return all(condition.xreplace(sizes) is not sympy.false for condition in self.conditions)


def assumed_of(inputs: Sequence[fx.Node]) -> Assumed | None:
    """Return what was assumed of the sizes of these placeholders; None where none of them is a symbol."""
    shapes = tuple(tuple(_symbol(size) for size in node.meta["val"].shape) for node in inputs)
    symbols = {s for shape in shapes for s in shape if s is not None}
    size = next((s for n in inputs for s in n.meta["val"].shape if isinstance(s, torch.SymInt)), None)
    if size is None or not symbols:
        return None
    bounds, conditions = traced_conditions(size, symbols)
    return Assumed(shapes, bounds, conditions)


def _symbol(size: int | torch.SymInt) -> sympy.Symbol | None:
    if not isinstance(size, torch.SymInt):
        return None
    found = size_expression(size, given=True)
    return found if isinstance(found, sympy.Symbol) else None


__all__ = ["Assumed", "assumed_of"]
