"""layout-free: random numbers that any plan draws alike.

Each operator that draws is written in terms of `keep` and `uniform` (`efftra_fx.draws`), which are
functions of the step's keys, an input of the graph with rows like any other. So all later passes
see a graph without chance: a mask splits by rows, is computed again where it is read, and is never
sent. What has no rows (a mask of a weight) takes the keys of row -1 and is the same for all parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import sympy
import torch
from torch import fx

from efftra_fx.draws import KEEP, ROW_KEYS, UNIFORM, WHOLE_KEYS
from efftra_fx.errors import CaptureError
from efftra_fx.meta import PATH, ROLE, SOURCE, Role
from efftra_fx.opaque import is_opaque, kind_of

from .batch_evaluate import is_random
from .draw_rules import RULES
from .insert import batch_symbols, call, expression, size_node
from .means import argument

aten = torch.ops.aten


@dataclass(frozen=True)
class LayoutFree:
    """Rewrite every operator that draws; add the inputs `random:rows` and `random:whole` where one does.

    `kept` are the modules that run as they are, each with the reason.
    """

    batch_leaves: tuple[int | None, ...]
    kept: tuple[tuple[str, str], ...] = ()
    name: ClassVar[str] = "layout-free"
    needs: ClassVar[tuple[str, ...]] = ("role", "outputs")
    gives: ClassVar[tuple[str, ...]] = ()

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        drawing = [n for n in gm.graph.nodes if n.op == "call_function" and is_random(n)]
        if drawing:
            drawer = Drawer(gm, self.batch_leaves)
            for node in drawing:
                if is_opaque(node.target):
                    raise CaptureError(_kept_whole(node, dict(self.kept)))
                with gm.graph.inserting_before(node):
                    _replace(node, drawer)
            gm.graph.eliminate_dead_code()
            gm.recompile()
        return gm


def draws_alike(gm: fx.GraphModule) -> bool:
    """Say whether a graph reads the keys of a step."""
    return any(n.op == "placeholder" and ROLE[n] == Role("input", ROW_KEYS) for n in gm.graph.nodes)


class Drawer:
    """Write draws in front of the node that is being replaced."""

    def __init__(self, gm: fx.GraphModule, batch_leaves: Sequence[int | None]) -> None:
        self.graph = gm.graph
        self.symbols = batch_symbols(gm, tuple(batch_leaves))
        self.number = 0
        self.node: fx.Node
        rows, dim = next(iter(self.symbols.values()))
        example = rows.meta["val"]
        with example.fake_mode:
            fakes = [torch.empty((n, 2), dtype=torch.int64, device=example.device) for n in (example.shape[dim], 1)]
        last = next(n for n in reversed(gm.graph.nodes) if n.op == "placeholder")
        self.keys = []
        for name, fake in zip((ROW_KEYS, WHOLE_KEYS), fakes, strict=True):
            with gm.graph.inserting_after(last):
                last = gm.graph.placeholder(name.replace(":", "_"))
            last.meta["val"] = fake
            ROLE[last] = Role("input", name)
            self.keys.append(last)

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        """Insert a call in the place of the node that is being replaced."""
        return call(self.graph, target, *args, like=self.node, **kwargs)

    def insert(self, target: Any, args: Sequence[Any], value: Any) -> fx.Node:
        """Insert a call whose fake value is known."""
        made = self.graph.call_function(target, tuple(args))
        made.meta["val"] = value
        for key in (PATH, SOURCE):
            if key.on(self.node):
                key[made] = key[self.node]
        return made

    def keep(self, sizes: Sequence[Any], drop: float) -> fx.Node:
        """Insert a mask of this size; an element is False with probability `drop`."""
        return self._draw(KEEP, sizes, float(drop))

    def uniform(self, sizes: Sequence[Any], dtype: torch.dtype) -> fx.Node:
        """Insert numbers between 0 and 1, in float32 for what is less precise."""
        if not dtype.is_floating_point:
            raise CaptureError(self.refusal(f"{dtype} numbers"))
        return self._draw(UNIFORM, sizes, dtype if dtype is torch.float64 else torch.float32)

    def like(self, value: fx.Node, node: fx.Node) -> fx.Node:
        """Convert a value to the dtype of a node's."""
        wanted = node.meta["val"].dtype
        return value if value.meta["val"].dtype is wanted else self.call(aten._to_copy.default, value, dtype=wanted)

    def refusal(self, what: str) -> str:
        """Return words on why the present node cannot be had."""
        place = SOURCE.get(self.node) or PATH.get(self.node) or self.node.name
        return (
            f"rng='layout_free' cannot draw {what} ({place}); draw uniform or normal numbers there and compute these "
            "from them, or use rng='plan', where masks depend on the plan"
        )

    def _draw(self, target: Any, sizes: Sequence[Any], *rest: Any) -> fx.Node:
        extents = [size.meta["val"] if isinstance(size, fx.Node) else size for size in sizes]
        counts = [self._per_row(size) for size in extents]
        dim = next((d for d, count in enumerate(counts) if count), None)
        shape = [counts[d] if d == dim else self._size(size) for d, size in enumerate(sizes)]
        number, self.number = self.number, self.number + 1
        return self.call(target, self.keys[dim is None], shape, dim or 0, number, *rest)  # type: ignore[no-any-return]

    def _per_row(self, size: Any) -> int:
        """Return how many elements of a dimension belong to each row, 0 where it does not follow the rows."""
        expr = expression(size)
        row = sympy.Symbol("row", positive=True, integer=True)
        found = sympy.expand(expr.subs(dict.fromkeys(self.symbols, row))).coeff(row)
        linear = sympy.expand(expr.subs(dict.fromkeys(self.symbols, row)) - found * row) == 0
        return int(found) if linear and found.is_Integer else 0

    def _size(self, size: Any) -> Any:
        """Return a size as what a call takes: a number, or a node that computes it."""
        if isinstance(size, (int, fx.Node)):
            return size
        expr = expression(size)
        found = size_node(self.graph, expr, self.symbols)
        if found is not None:
            return found
        for operand in self.node.all_input_nodes:
            value = operand.meta["val"]
            for d, other in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
                if expression(other) == expr:
                    return self.call(aten.sym_size.int, operand, d)
        raise CaptureError(self.refusal(f"values of size {expr}"))


def _kept_whole(node: fx.Node, kept: Mapping[str, str]) -> str:
    """Return words on why what code draws that runs as it is cannot be had."""
    path = PATH.get(node) or ""
    if path in kept:
        called = f"'{path}'" if path else "the model"
        what = f"what {called} draws, which runs as it is since {kept[path]}"
    else:
        name = str(kind_of(node.target)).rpartition("::")[2]
        what = f"what '{name}' draws, which runs as it is ({SOURCE.get(node) or path or node.name})"
    return (
        f"rng='layout_free' cannot draw {what}; let it draw nothing (a dropout of 0), or use rng='plan', where masks "
        "depend on the plan"
    )


def _replace(node: fx.Node, drawer: Drawer) -> None:
    drawer.node = node
    rule = RULES.get(node.target)
    if rule is None:
        raise CaptureError(drawer.refusal(f"what {node.target} draws"))
    if argument(node, "generator") is not None:
        raise CaptureError(drawer.refusal("from a generator of its own"))
    found = rule(node, drawer)
    if isinstance(found, fx.Node):
        node.replace_all_uses_with(found)
    else:
        for user in list(node.users):
            user.replace_all_uses_with(found[user.args[1]])
            drawer.graph.erase_node(user)
    drawer.graph.erase_node(node)


__all__ = ["Drawer", "LayoutFree", "draws_alike"]
