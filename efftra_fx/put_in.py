"""Put sizes into a graph that was traced with symbols for them: values of nodes are rewritten, and nothing is run.

What the tracer has found of every value, its shape, strides and place in memory, is an expression of the symbols.
So the values for given sizes follow from it without asking any operator again; the rows stay a symbol.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from efftra_fx.private import fake_of_layout, size_expression, symbolic_size


def like(fakes: FakeTensorMode, tensor: Tensor) -> Tensor:
    """Return a fake of a tensor that keeps its sizes."""
    if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
        return fakes.from_tensor(tensor.detach(), static_shapes=True)
    return fake_of_layout(fakes, tensor, tensor.shape, tensor.stride(), tensor.storage_offset())


@dataclass
class Sizes:
    """What the symbols of a trace become: numbers, or the one symbol for rows of another environment.

    `assumed` are symbols that the tracer has found to be others; `rows` is the number of rows of the example.
    """

    fakes: FakeTensorMode
    environment: ShapeEnv
    known: Mapping[sympy.Symbol, sympy.Expr]
    assumed: Mapping[sympy.Symbol, sympy.Expr]
    symbol: sympy.Symbol
    rows: int
    found: dict[sympy.Expr, Any] = field(default_factory=dict)

    def value(self, old: Any) -> Any:
        """Return a traced value for the sizes that are put in; None where the trace does not tell it."""
        if isinstance(old, Tensor):
            return self.tensor(old)
        if isinstance(old, torch.SymInt):
            return self.size(old)
        if isinstance(old, (bool, int, float)):
            return old
        if isinstance(old, (tuple, list)):
            items = [self.value(item) for item in old]
            return None if any(item is None for item in items) else type(old)(items)
        return None

    def tensor(self, old: Tensor) -> Tensor | None:
        if old.layout is not torch.strided or old.is_conj() or old.is_neg():
            return None
        shape, stride = [self.size(s) for s in old.shape], [self.size(s) for s in old.stride()]
        offset = self.size(old.storage_offset())
        if any(size is None for size in (*shape, *stride, offset)):
            return None
        return fake_of_layout(self.fakes, old, shape, stride, offset)

    def size(self, old: torch.SymInt | int) -> Any:
        """Return a size: a number, or one that follows the rows; None where it depends on anything else."""
        if not isinstance(old, torch.SymInt):
            return old
        expression = size_expression(old)
        if expression not in self.found:
            self.found[expression] = self._size(expression)
        return self.found[expression]

    def _size(self, expression: sympy.Expr) -> Any:
        put = expression.xreplace(dict(self.assumed)).xreplace(dict(self.known))
        if put.is_Integer:
            return int(put)
        hint = put.xreplace({self.symbol: sympy.Integer(self.rows)})
        if put.free_symbols != {self.symbol} or not hint.is_Integer:
            return None
        return symbolic_size(self.environment, put, int(hint))
