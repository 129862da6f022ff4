"""Walk a graph along its edges: what values need, and what depends on them."""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import Any

from torch import fx


def ancestors(values: Iterable[Any], sources: Set[fx.Node] = frozenset()) -> set[fx.Node]:
    """Return the nodes that `values` need, stopping at (and including) the sources they reach."""
    reached: set[fx.Node] = set()
    waiting = [value for value in values if isinstance(value, fx.Node)]
    while waiting:
        node = waiting.pop()
        if node in reached:
            continue
        reached.add(node)
        if node not in sources:
            waiting.extend(node.all_input_nodes)
    return reached


def descendants(graph: fx.Graph, roots: Set[fx.Node]) -> set[fx.Node]:
    """Return the nodes that depend on any of `roots`, the roots included."""
    reached = set(roots)
    for node in graph.nodes:
        if any(value in reached for value in node.all_input_nodes):
            reached.add(node)
    return reached
