"""What a block costs at least when a tensor group computes it, without working out how it would be cut.

A product with a weight, y = x W, can be cut by W's columns, after which the gradients of x are partial
sums, or by its rows, after which y is: each product needs a sum of x or one of y. Products that read the
same x share its sum, and those whose results are added up share that of the total. So, with one product
an edge between its x and its y, what has to be summed is a vertex cover; and no cover is less than what
any packing of the edges is:

    sums of the whole  ≥  Σ over products of min(bytes of x / products that read it, bytes of y / products in it)

A product whose part of its block's time is less than its sums is computed whole, and so is a block that
has no other. All else is divided by the width, free of charge.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx

from efftra_fx.cluster import Link
from efftra_fx.cost import Chain, NodeCost, Option, Timing
from efftra_fx.meta import BATCH, BLOCK

from .blocks import size_at
from .shapes import elements, is_heavy, operations
from .shard_axes import operands
from .shard_candidates import moving_values, place_of

aten = torch.ops.aten

_VIEWS = frozenset(
    {aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.unsqueeze.default}
    | {aten.transpose.int, aten.permute.default, aten.expand.default, aten.squeeze.dim, aten.clone.default}
)
_KEEPS_SUMS = _VIEWS | {aten.add.Tensor, aten.sub.Tensor, aten.mul.Scalar, aten.dropout.default}


@dataclass(frozen=True)
class Product:
    """A product with a weight: its operations, and the bytes and the number of sums that it needs at least."""

    operations: float
    sum_bytes: float
    sums: float


def bounded(gm: fx.GraphModule, chain: Chain, widths: Iterable[int], link: Link, rows: int) -> Chain:
    """Return the chain with an option for each width, which costs no more than how the blocks will be cut.

    Widths that gain less than the least sum takes get none. `link` is the best that a group may have.
    """
    products = block_products(gm, len(chain.blocks), rows)
    blocks = list(chain.blocks)
    for width in widths:
        options = [_option(block, some, width, link, rows) for block, some in zip(chain.blocks, products, strict=True)]
        gained = sum(
            _seconds(b.base, rows, link) - _seconds(o, rows, link) for b, o in zip(blocks, options, strict=True)
        )
        sums = [_exchange(product, width, link) for some in products for product in some if product.sums]
        if gained > min(sums, default=0.0):  # whatever is cut, at least one of them is needed
            blocks = [replace(b, options=(*b.options, option)) for b, option in zip(blocks, options, strict=True)]
    return replace(chain, blocks=tuple(blocks))


def block_products(gm: fx.GraphModule, blocks: int, rows: int) -> list[list[Product]]:
    """Return the products with weights of each block, for so many rows."""
    moving = moving_values(gm)
    heavy = [n for n in gm.graph.nodes if n.op == "call_function" and is_heavy(n) and BLOCK.on(n)]
    found: list[list[Product]] = [[] for _ in range(blocks)]
    pairs = [(n, _source(data), _total(n)) for n in heavy if (data := _data(n)) is not None]
    readers, parts = Counter(x for _, x, _ in pairs), Counter(y for _, _, y in pairs)
    weighed = {node for node, *_ in pairs}
    for node, x, y in pairs:
        of_x = 1.0 / readers[x] if place_of(x) in moving else 0.0
        of_y = 1.0 / parts[y]
        sizes = (_bytes(x, rows) * of_x, _bytes(node, rows) * of_y)
        found[BLOCK[node]].append(Product(size_at(operations(node), rows), min(sizes), min(of_x, of_y)))
    for node in heavy:
        if node not in weighed:  # attention by heads, a table by columns: cut for nothing
            found[BLOCK[node]].append(Product(size_at(operations(node), rows), 0.0, 0.0))
    return found


def _data(node: fx.Node) -> fx.Node | None:
    """Return what a product with a weight multiplies it by: the one operand that follows the batch."""
    if node.target is aten.embedding.default:
        return None
    given = operands(node)
    data = [n for n in given if BATCH.on(n) and BATCH[n].kind != "whole"]
    return data[0] if len(data) == 1 and len(given) > 1 else None


def _source(node: fx.Node) -> fx.Node:
    """Return the value of which another is only a view."""
    while node.target in _VIEWS and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _total(node: fx.Node) -> fx.Node:
    """Return the sum that a value goes into, while nobody needs it before."""
    while len(node.users) == 1:
        (reader,) = node.users
        if reader.target not in _KEEPS_SUMS:
            break
        node = reader
    return node


def _bytes(node: fx.Node, rows: int) -> float:
    value = node.meta.get("val")
    return float(size_at(elements(value), rows) * value.element_size()) if isinstance(value, Tensor) else 0.0


def _seconds(option: Option, rows: int, link: Link) -> float:
    around = 2.0 * (option.tensor - 1)
    exchange = option.reduces * link.latency_s + option.reduce_bytes * rows / option.tensor / link.bandwidth_bytes_per_s
    return option.forward.at(rows) + option.backward.at(rows) + 2 * around * exchange


def _exchange(product: Product, width: int, link: Link) -> float:
    return 2.0 * (width - 1) * (product.sums * link.latency_s + product.sum_bytes / width / link.bandwidth_bytes_per_s)


def _option(block: NodeCost, products: Sequence[Product], width: int, link: Link, rows: int) -> Option:
    """Return the least that a block costs: each product cut or not, whichever is less."""
    total = sum(product.operations for product in products)
    time = block.forward.at(rows) + block.backward.at(rows)
    work, sums, moved = 1.0 / width, 0.0, 0.0
    for product in products:
        part = product.operations / total if total else 0.0
        if _exchange(product, width, link) < part * time * (1 - 1.0 / width):
            sums, moved = sums + product.sums, moved + product.sum_bytes
        else:
            work += part * (1 - 1.0 / width)
    if products and work >= 1.0 - 1e-9:
        return replace(block.base, tensor=width)
    held = 1.0 / width

    def timing(whole: Timing) -> Timing:
        return Timing(whole.fixed_s * work, whole.per_row_s * work)

    return Option(
        timing(block.forward),
        timing(block.backward),
        block.parameter_bytes * held,
        block.gradient_bytes * held,
        block.saved_bytes * held,
        tensor=width,
        reduces=sums / 2,  # an option counts them each way
        reduce_bytes=moved / 2 / rows,
    )


__all__ = ["Product", "block_products", "bounded"]
