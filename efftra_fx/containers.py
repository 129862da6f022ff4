"""Take arguments and outputs apart into leaves, and put them together again, whatever holds them.

Tuples, lists, dicts and what is registered with `torch.utils._pytree` are containers, as
everywhere. An object of another class that holds tensors (a dataclass, a cache, a packed
sequence, a batch from a tokenizer) is opened too: its leaves are those of its attributes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

_DEPTH = 6  # how deep an object is searched for tensors


@dataclass(frozen=True)
class Opened:
    """An object that is no registered container: its class, and its attributes (or fields) as a tree of their own."""

    kind: type
    tree: Tree


@dataclass(frozen=True)
class Tree:
    """The structure of a value: what `rebuild` puts its leaves back into."""

    spec: Any
    opened: tuple[Opened | None, ...]  # for each leaf of `spec`: the object that stands there, None for a plain leaf

    def rebuild(self, leaves: Sequence[Any]) -> Any:
        """Return the value with these leaves, in the order in which `take_apart` gave them."""
        value, rest = self._rebuild(list(leaves))
        assert not rest, "as many leaves as were taken apart"
        return value

    def _rebuild(self, leaves: list[Any]) -> tuple[Any, list[Any]]:
        items = []
        for opened in self.opened:
            if opened is None:
                items.append(leaves[0])
                leaves = leaves[1:]
            else:
                content, leaves = opened.tree._rebuild(leaves)
                items.append(_closed(opened.kind, content))
        return pytree.tree_unflatten(items, self.spec), leaves


def take_apart(value: Any) -> tuple[list[tuple[tuple[Any, ...], Any]], Tree]:
    """Return the leaves of a value, each with the path to it, and the structure without them."""
    paths, spec = pytree.tree_flatten_with_path(value)
    leaves: list[tuple[tuple[Any, ...], Any]] = []
    opened: list[Opened | None] = []
    for path, leaf in paths:
        content = _content(leaf) if _holds_tensor(leaf, _DEPTH) else None
        if content is None:
            leaves.append((path, leaf))
            opened.append(None)
            continue
        inner, tree = take_apart(content)
        leaves.extend(((*path, *rest), item) for rest, item in inner)
        opened.append(Opened(type(leaf), tree))
    return leaves, Tree(spec, tuple(opened))


def _content(value: Any) -> dict[str, Any] | None:
    if isinstance(value, Tensor):
        return None
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return dict(zip(value._fields, tuple.__iter__(value), strict=True))
    if isinstance(value, dict):
        return dict(value)
    return dict(vars(value)) if hasattr(value, "__dict__") else None


def _closed(kind: type, content: dict[str, Any]) -> Any:
    if issubclass(kind, tuple):
        return tuple.__new__(kind, content.values())
    if issubclass(kind, dict):
        made: Any = kind.__new__(kind)
        dict.update(made, content)
        return made
    made = object.__new__(kind)
    made.__dict__.update(content)
    return made


def _holds_tensor(value: Any, depth: int) -> bool:
    """Say whether an object that no registered container explains holds a tensor somewhere."""
    if isinstance(value, Tensor):
        return True
    if depth == 0 or value is None or isinstance(value, (str, bytes, int, float, complex, type)) or callable(value):
        return False
    if isinstance(value, (tuple, list)):
        items = (
            tuple.__iter__(value) if isinstance(value, tuple) else iter(value)
        )  # what a class iterates over is its own
        return any(_holds_tensor(item, depth - 1) for item in items)
    if isinstance(value, dict):
        return any(_holds_tensor(item, depth - 1) for item in value.values())
    return any(_holds_tensor(item, depth - 1) for item in getattr(value, "__dict__", {}).values())
