"""Fold the graph into a chain of blocks that may be cut between.

Nodes keep the order in which the model computes them. Between two nodes that do real
work the cheapest place is a candidate for a cut: where the fewest bytes cross.

    embedding | layer norm, linear | attention | linear, add | ...
              ^                    ^           ^
              candidates: bytes that cross are least between two neighbours of weight
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import sympy
from torch import Tensor, fx

from efftra_fx.meta import BATCH, BLOCK, FREE, PATH

from .shapes import elements, is_heavy

_SAMPLE_ROWS = 64


@dataclass(frozen=True)
class FoldBlocks:
    """Write `BLOCK` on every node that needs a parameter; blocks are numbered along the chain."""

    most: int = 256
    name: ClassVar[str] = "blocks"
    needs: ClassVar[tuple[str, ...]] = ("batch", "free")
    gives: ClassVar[tuple[str, ...]] = ("block",)

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        nodes = chain_nodes(gm)
        cuts = cut_positions(nodes, self.most)
        block, following = 0, iter((*cuts, len(nodes)))
        stop = next(following)
        for position, node in enumerate(nodes):
            BLOCK[node] = block
            if position == stop:
                block, stop = block + 1, next(following)
        return gm


def chain_nodes(gm: fx.GraphModule) -> list[fx.Node]:
    """Return the nodes that belong to blocks, in graph order."""
    return [n for n in gm.graph.nodes if n.op == "call_function" and not FREE[n]]


def cut_positions(nodes: Sequence[fx.Node], most: int) -> list[int]:
    """Return positions i, ascending, such that a cut may lie between `nodes[i]` and `nodes[i + 1]`."""
    crossing = crossing_bytes(nodes)
    heavy = [i for i, node in enumerate(nodes) if is_heavy(node)]
    chosen: list[int] = []
    for left, right in zip(heavy, heavy[1:], strict=False):
        places = [i for i in range(left, right) if crossing[i] is not None]
        if places:
            least = min(crossing[i] or 0 for i in places)
            chosen.append(max(i for i in places if crossing[i] == least))
    chosen.sort(key=lambda i: (crossing[i] or 0, i))
    return sorted(chosen[: most - 1])


def crossing_bytes(nodes: Sequence[fx.Node]) -> list[int | None]:
    """Return for each position the bytes that a cut behind it sends, None where no cut may be.

    A value that depends on samples together cannot cross, nor can one that is not a tensor.
    """
    place = {node: i for i, node in enumerate(nodes)}
    change = [0] * (len(nodes) + 1)
    barred = [0] * (len(nodes) + 1)
    for node, start in place.items():
        stop = max((place[user] for user in node.users if user in place), default=start)
        if stop == start:
            continue
        size = _bytes(node)
        target, amount = (barred, 1) if size is None else (change, size)
        target[start] += amount
        target[stop] -= amount
    result: list[int | None] = []
    total = closed = 0
    for position in range(len(nodes)):
        total += change[position]
        closed += barred[position]
        result.append(None if closed else total)
    return result


def _bytes(node: fx.Node) -> int | None:
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or BATCH[node].kind in ("mixed", "local"):
        return None
    return size_at(elements(value), _SAMPLE_ROWS) * value.element_size()


@lru_cache(maxsize=1 << 14)
def size_at(expr: sympy.Expr, rows: int) -> int:
    """Return a size with every symbol put to this number of rows."""
    return int(expr.subs({symbol: rows for symbol in expr.free_symbols}))


def block_names(gm: fx.GraphModule) -> tuple[str, ...]:
    """Return for each block the module paths that it spans, in the model's own words."""
    paths: dict[int, list[str]] = {}
    for node in chain_nodes(gm):
        found = paths.setdefault(BLOCK[node], [])
        path = PATH.get(node)
        if is_heavy(node) and path and path not in found:
            found.append(path)
    last = max(paths, default=-1)
    return tuple(", ".join(paths[i]) or f"block {i}" for i in range(last + 1))
