"""Weight gradients that wait until several micro-batches can be computed at once.

The gradient of a linear layer's weight is a product over rows, gᵀx, and products add up by
putting their rows under one another:

    g₁ᵀx₁ + g₂ᵀx₂ + …  =  [g₁; g₂; …]ᵀ [x₁; x₂; …]

So the whole step writes a large weight's gradient once and not once a micro-batch. It pays
where rows are few and the weight is large: then a product is bound by the memory of its result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

aten = torch.ops.aten

# A product adds to each element of its result in the time in which about so many rows are multiplied.
ROWS_PER_PASS = 48
LARGE_BYTES = 1 << 20  # below this a gradient stays in a cache between micro-batches


@dataclass(frozen=True)
class Product:
    """A weight gradient that is one matrix product, by index of the weight.

    It is left @ right; the operands are kept as `left` (transposed if `by_rows`, so that rows come
    first, otherwise as it stands, with rows second) and `right`.
    """

    weight: int
    by_rows: bool

    def join(
        self, lefts: Sequence[Tensor], rights: Sequence[Tensor], into: Tensor | None = None, overwrite: bool = False
    ) -> Tensor:
        """Return the sum of the products; if `into` is given, added into it or overwriting it."""
        left = _together(lefts, 0).t() if self.by_rows else _together(lefts, 1)
        right = _together(rights, 0)
        if into is None:
            return torch.mm(left, right)
        return torch.mm(left, right, out=into) if overwrite else into.addmm_(left, right)


def worth_deferring(rows: int, height: int, width: int, item_bytes: int) -> bool:
    """Tell whether a gradient of height × width over `rows` rows should wait for other micro-batches.

    It should if writing it costs more than multiplying does, and keeping its operands costs less.
    """
    large = height * width * item_bytes >= LARGE_BYTES
    return large and rows <= ROWS_PER_PASS and 4 * rows * (height + width) <= height * width


def find_product(weight: int, grad: fx.Node) -> tuple[Product, fx.Node, fx.Node] | None:
    """Return how a gradient is a product worth deferring, and its operands' nodes."""
    if grad.target is not aten.mm.default:
        return None
    left, right = grad.args
    assert isinstance(left, fx.Node) and isinstance(right, fx.Node)
    height, rows = left.meta["val"].shape
    width = right.meta["val"].shape[1]
    if not worth_deferring(rows, height, width, grad.meta["val"].element_size()):
        return None
    if left.target is aten.t.default and isinstance(flat := left.args[0], fx.Node):
        return Product(weight, by_rows=True), flat, right
    return Product(weight, by_rows=False), left, right


def finish(
    products: Sequence[Product], terms: Sequence[Sequence[Tensor]], buffers: Sequence[Tensor | None] | None = None
) -> list[Tensor]:
    """Return the gradients of `products` summed over micro-batches, whose kept operands are `terms`.

    `terms[k]` are micro-batch k's: left and right of each product in turn. Where `buffers` has a
    tensor, the gradient is added into it.
    """
    found = []
    with torch.no_grad():
        for index, product in enumerate(products):
            lefts, rights = [one[2 * index] for one in terms], [one[2 * index + 1] for one in terms]
            found.append(product.join(lefts, rights, None if buffers is None else buffers[index]))
    return found


def _together(parts: Sequence[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)
