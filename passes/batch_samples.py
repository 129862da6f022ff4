"""Values of a batch and its parts that were not computed from the example but drawn.

Values differ in size from row to row, and do not depend on one another. What no row has a part
in, such as a class token before the patches of an image, stays as it is. Whole numbers may be
the numbers of rows, words or columns: they keep the example's values, its rows in another
order, but where all that reads them only counts and compares.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from efftra_fx.meta import BATCH, ROLE, Split
from efftra_fx.opaque import OtherSizesError, is_opaque, needs_whole_batch

FAILS = (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError, OtherSizesError)
_LARGEST = 3.0  # rows differ in size by up to this power of ten, in both directions
_COUNTS = frozenset(
    {
        "cumsum", "add", "sub", "rsub", "mul", "neg", "abs", "sign", "sum", "where", "eq", "ne", "lt", "le", "gt", "ge",
        "amax", "amin", "maximum", "minimum", "clamp", "clamp_min", "clamp_max", "view", "reshape", "unsqueeze",
        "squeeze", "expand", "permute", "transpose", "t", "flatten", "clone", "_to_copy", "mean", "any", "all",
        "logical_not", "logical_and", "logical_or", "cat", "slice", "select", "flip", "cumprod", "prod",
    }
)  # fmt: skip
_MOVES = frozenset(
    {
        "slice", "select", "view", "reshape", "transpose", "permute", "unsqueeze", "squeeze", "expand", "t", "flatten",
        "clone", "alias", "detach", "contiguous",
    }
)  # fmt: skip

Values = tuple[Any, tuple[Any, ...]]  # of the whole batch, and of its parts
Compute = Callable[[fx.Node, Mapping[fx.Node, Any]], Any]
UNKNOWN: Values = (None, ())


@dataclass(frozen=True)
class Example:
    """The nodes' values on the example, whole and in parts of these sizes.

    Of the nodes of whole numbers, `counted` are only counted and compared, so that any number will do; `fixed` nodes
    are made of no tensors but fixed ones, such as a sum's zeros to begin with; of some nodes `partly` says which of
    their elements read rows, where not all do.
    """

    whole: Mapping[fx.Node, Any]
    parts: Sequence[Mapping[fx.Node, Any]]
    sizes: tuple[int, ...]
    counted: AbstractSet[fx.Node]
    fixed: AbstractSet[fx.Node]
    partly: Mapping[fx.Node, Tensor]
    places: Mapping[fx.Node, int]  # in the graph: names go on counting from one capture to the next

    @property
    def rows(self) -> int:
        """How many rows the batch has."""
        return sum(self.sizes)

    def values(self, node: fx.Node) -> Values:
        """Return a node's values."""
        return self.whole[node], tuple(part[node] for part in self.parts)


def example_of(
    gm: fx.GraphModule,
    whole: Mapping[fx.Node, Any],
    parts: Sequence[Mapping[fx.Node, Any]],
    sizes: Sequence[int],
    reading: AbstractSet[fx.Node],
) -> Example:
    """Return what is known of the example; `reading` are the nodes that read rows."""
    places = {node: place for place, node in enumerate(gm.graph.nodes)}
    return Example(whole, parts, tuple(sizes), _only_counted(gm), _fixed(gm), _partly(gm, whole, reading), places)


class Sample:
    """Values that were drawn, and what is computed from them."""

    def __init__(
        self,
        example: Example,
        compute: Compute,
        mixed: AbstractSet[fx.Node],
        number: int,
        found: Mapping[fx.Node, int],
    ) -> None:
        self.example, self.compute, self.mixed, self.number = example, compute, mixed, number
        self.doubtful: set[fx.Node] = set(found)  # found to mix rows, and what follows them only if these do
        self.known: dict[fx.Node, Values] = {}
        self.starts = [sum(example.sizes[:i]) for i in range(len(example.sizes))]
        order = torch.Generator().manual_seed(number)
        self.order = torch.randperm(example.rows, generator=order) if number else torch.arange(example.rows)
        self.reach = _reach(number, example.rows, order)

    def doubt(self, node: fx.Node, values: Values) -> None:
        """Take a node's values as computed from now on."""
        self.doubtful.add(node)
        self.known[node] = values

    def value(self, node: fx.Node) -> Values:
        """Return a node's values, drawn unless it mixes rows."""
        if node not in self.known:
            actual = self.example.whole[node]
            if node in self.mixed or node in self.doubtful or is_several(node):
                self.known[node] = self.computed(node)
            elif isinstance(actual, Tensor):
                self.known[node] = self.drawn(node)
            else:
                self.known[node] = self.example.values(node)
        return self.known[node]

    def computed(self, node: fx.Node) -> Values:
        """Return a node's values from those of its operands; nothing is known where it cannot be computed."""
        if is_opaque(node.target) or needs_whole_batch(node.target):
            return UNKNOWN
        if node.op != "call_function":
            return self.example.values(node)
        given = {n: self.value(n) for n in node.all_input_nodes}
        if any(values is UNKNOWN for values in given.values()):
            return UNKNOWN
        try:
            whole = self.compute(node, {n: values[0] for n, values in given.items()})
            parts = tuple(
                self.compute(node, {n: values[1][index] for n, values in given.items()})
                for index in range(len(self.example.sizes))
            )
        except FAILS:
            return UNKNOWN
        return whole, parts

    def drawn(self, node: fx.Node) -> Values:
        split = BATCH[node]
        actual, (*own,) = self.example.values(node)
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.number} {self.example.places[node]}".encode()))
        if split.kind == "sum":
            sizes = zip(own, self.reach[[*self.starts]], strict=True)
            pieces = [self.numbers(node, p, generator, None) * (10.0**reach).to(p.dtype) for p, reach in sizes]
            return sum(pieces[1:], pieces[0]), tuple(pieces)
        if split.kind != "rows":
            drawn = (actual.is_floating_point() or actual.is_complex()) and node not in self.example.fixed
            same = self.numbers(node, actual, generator, None) if drawn else actual
            return same, tuple(same for _ in own)
        whole = self.numbers(node, actual, generator, split)
        if node in self.example.partly:
            whole = torch.where(self.example.partly[node], whole, actual)
        cut = [
            torch.empty_like(p).copy_(whole.narrow(split.dim, start * split.per_row, p.shape[split.dim]))
            for start, p in zip(self.starts, own, strict=True)
        ]
        return whole, tuple(cut)

    def numbers(self, node: fx.Node, like: Tensor, generator: torch.Generator, split: Split | None) -> Tensor:
        """Draw values like a tensor's, of another size in each row."""
        made = torch.empty_like(like)
        reach = torch.ones(())
        if split is not None:
            shape = [-1 if d == split.dim else 1 for d in range(like.ndim)]
            reach = (10.0 ** self.reach.double()).repeat_interleave(split.per_row).view(shape)
        if like.dtype is torch.bool:
            return made.copy_(torch.rand(like.shape, generator=generator) < 0.5)
        if like.is_floating_point() or like.is_complex():
            kind = torch.complex128 if like.is_complex() else torch.float64
            return made.copy_(torch.randn(like.shape, generator=generator, dtype=kind) * reach)
        if node in self.example.counted:
            return made.copy_(torch.rand(like.shape, generator=generator, dtype=torch.float64) * (2 + 9 * reach**2))
        if split is None:
            return like
        rows = (self.order[:, None] * split.per_row + torch.arange(split.per_row)).flatten()
        return made.copy_(like.index_select(split.dim, rows.to(like.device)))


def samples(rows: int) -> int:
    """Return how many samples tell."""
    return 1 + 3 * min(rows, 4)


def _reach(number: int, rows: int, generator: torch.Generator) -> Tensor:
    """Return the size of each row's values, as a power of ten: one is small or large, or any is."""
    if number == 0:
        return torch.zeros(rows)
    row, way = divmod(number - 1, 3)
    if way == 2:
        return (torch.rand(rows, generator=generator) * 2 - 1) * _LARGEST
    others = _LARGEST if way == 0 else -_LARGEST
    return torch.full((rows,), others).index_fill(0, torch.tensor(row), -others)


def is_several(node: Any) -> bool:
    """Say whether a node gives several results."""
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), (tuple, list))


def _only_counted(gm: fx.GraphModule) -> set[fx.Node]:
    """Return the nodes of whole numbers that are only counted and compared, so that any number will do."""
    counted: set[fx.Node] = set()
    for node in reversed(gm.graph.nodes):
        value = node.meta.get("val")
        if not isinstance(value, Tensor) or node.op == "output":
            continue
        if value.is_floating_point() or value.is_complex() or value.dtype is torch.bool:
            counted.add(node)  # what reads it takes any number
        elif all(user in counted and (_name(user) in _COUNTS or _is_picked(node, user)) for user in node.users):
            counted.add(node)
    return {n for n in counted if not n.meta["val"].is_floating_point() and n.meta["val"].dtype is not torch.bool}


def _is_picked(node: fx.Node, user: fx.Node) -> bool:
    """Say whether numbers are picked from a node by others, and it does not say which."""
    picks = _name(user) in ("index", "gather", "index_select") and user.args[0] is node
    return picks and node not in pytree.tree_leaves((user.args[1:], dict(user.kwargs)))


def _fixed(gm: fx.GraphModule) -> set[fx.Node]:
    """Return the nodes that are made of no tensors but fixed ones, such as a sum's zeros to begin with."""
    fixed: set[fx.Node] = set()
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            if ROLE[node].kind == "constant":
                fixed.add(node)
        elif all(n in fixed or not isinstance(n.meta.get("val"), Tensor) for n in node.all_input_nodes):
            fixed.add(node)
    return fixed


def _partly(gm: fx.GraphModule, whole: Mapping[fx.Node, Any], reading: AbstractSet[fx.Node]) -> dict[fx.Node, Tensor]:
    """Return which elements read rows, of nodes of which some do not."""
    partly: dict[fx.Node, Tensor] = {}

    def mask(n: fx.Node) -> Any:
        value = whole[n]
        if not isinstance(value, Tensor):
            return value
        if n in partly:
            return partly[n]
        return torch.full_like(value, n in reading, dtype=torch.bool)

    for node in gm.graph.nodes:
        if node.op != "call_function" or node not in reading or not isinstance(whole[node], Tensor):
            continue
        tensors = [n for n in node.all_input_nodes if isinstance(whole[n], Tensor)]
        name = _name(node)
        if torch.Tag.pointwise in getattr(node.target, "tags", ()) or name == "_to_copy":
            if all(n in partly or n not in reading for n in tensors):
                masks = [torch.broadcast_to(mask(n), whole[node].shape) for n in tensors]
                partly[node] = torch.stack(masks).any(0)
        elif (name in ("cat", "stack") and any(n in partly or n not in reading for n in tensors)) or (
            name in _MOVES and tensors[0] in partly
        ):
            args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), mask)
            partly[node] = node.target(*args, **kwargs)
    return partly


def _name(node: fx.Node) -> str:
    packet = getattr(node.target, "overloadpacket", None)
    return "" if packet is None else str(packet).rpartition(".")[2]
