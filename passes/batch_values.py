"""Find the nodes that follow the rows with the example's values, and would not with others.

A hinge that is zero, a condition that no row meets, a limit that nothing reaches: with such
values rows that mix look as if they did not, and later in training they do. So each node is
computed again for a batch and its parts, with values of its operands that were not computed
from the example but drawn, independent of one another and of very different size from row
to row. Operands that mix rows themselves are computed, from drawn values too. A node behind
such operands is trusted only where some of these values have shown the mixing at work, and
where it is not the same number everywhere; one that has steps (a comparison, a rounding, the place of the
largest), and what is made of it, is not trusted there, since values within a step show nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from efftra_fx.meta import BATCH, REDUCED
from efftra_fx.opaque import is_opaque

from .batch_evaluate import is_random
from .batch_relation import close, one_number, relation
from .batch_samples import FAILS, UNKNOWN, Compute, Example, Sample, Values, example_of, is_several, samples


def mixing_with_other_values(
    gm: fx.GraphModule,
    whole: Mapping[fx.Node, Any],
    parts: Sequence[Mapping[fx.Node, Any]],
    sizes: Sequence[int],
    reading: AbstractSet[fx.Node],
    compute: Compute,
) -> set[fx.Node]:
    """Return the nodes that mix rows where values differ from the example's, though `BATCH` says that they do not.

    `whole` and `parts` have the nodes' values on the example, `sizes` the parts' rows; `reading` are the nodes that
    read rows; `compute` gives a node's value of its operands'.
    """
    mixed = {n for n in gm.graph.nodes if n.op != "output" and BATCH[n].kind == "mixed"}
    search = _Search(gm, example_of(gm, whole, parts, sizes, reading), reading, compute, mixed)
    found: set[fx.Node] = set()
    while True:
        more = search.round()
        if not more:
            return found
        found |= more


aten = torch.ops.aten
_STEPS = frozenset(
    {
        aten.round.default,
        aten.round.decimals,
        aten.floor.default,
        aten.ceil.default,
        aten.trunc.default,
        aten.sign.default,
        aten.sgn.default,
        aten.floor_divide.default,
        aten.div.Tensor_mode,
    }
)


@dataclass
class _Search:
    gm: fx.GraphModule
    example: Example
    reading: AbstractSet[fx.Node]
    compute: Compute
    mixed: set[fx.Node]
    seen: set[Any] = field(default_factory=set)  # what was computed, by operator and operands' kinds
    wrong: set[Any] = field(default_factory=set)  # and seen to mix rows

    def round(self) -> set[fx.Node]:
        """Return what is found to mix rows with the graph as it is known by now, and know it from now on."""
        behind = {n for n in self.gm.graph.nodes if self.is_behind(n)}
        steps = self.after_steps()
        if steps:
            self.mixed |= steps
            return steps
        checked = behind | {n for n in self.gm.graph.nodes if n not in behind and self.is_to_see(n)}
        mixing = self.before(behind)
        shown = {n for n in mixing if self.differs(n, self.example.values(n))}
        constant = {n for n in behind if _is_constant(self.example.whole[n])}
        found: dict[fx.Node, int] = {}  # and with which sample
        for number in range(samples(self.example.rows) if behind else 1):
            sample = Sample(self.example, self.compute, self.mixed, number, found)
            for node in self.gm.graph.nodes:
                if node in mixing and self.differs(node, sample.value(node)):
                    shown.add(node)
                if node in self.mixed or node in found:
                    continue
                doubtful = self.is_row_by_row(node) and any(n in sample.doubtful for n in self.made_of(node))
                if not doubtful and not (node in checked and (number == 0 or node in behind)):
                    continue
                values = sample.computed(node)
                if doubtful:
                    sample.doubt(node, values)
                if self.is_wrong(node, values):
                    found[node] = number
                    self.wrong.add(self.key(node))
                    sample.doubt(node, values)
                elif node in constant and values is not UNKNOWN and not _is_constant(values[0]):
                    constant.discard(node)
        self.forget_what_came_too_early(found)
        for node in behind - set(found):
            read = [n for n in self.made_of(node) if n in self.reading and n in self.mixed]
            if any(n not in shown and self.is_felt(node, n) for n in read):
                found[node] = 0
            elif node in constant and (read or not is_random(node)):
                found[node] = 0
        self.mixed |= set(found)
        return set(found)

    def forget_what_came_too_early(self, found: dict[fx.Node, int]) -> None:
        """Drop what was found behind something that only a later sample has shown to mix rows."""
        latest: dict[fx.Node, int] = {}
        for node in self.gm.graph.nodes:
            before = max((latest[n] for n in node.all_input_nodes), default=-1)
            if node in found and found[node] < before:
                del found[node]
            latest[node] = max(before, found.get(node, -1))

    def before(self, behind: AbstractSet[fx.Node]) -> set[fx.Node]:
        """Return the nodes that mix rows and that these are made of, through nothing but such nodes."""
        found, waiting = set[fx.Node](), list(behind)
        while waiting:
            for n in waiting.pop().all_input_nodes:
                if n not in found and (n in self.mixed or is_several(n)):
                    found.add(n)
                    waiting.append(n)
        return found & self.mixed

    def made_of(self, node: fx.Node) -> list[fx.Node]:
        """Return the tensors that a node is computed from; results of an operator with several are looked through."""
        made: list[fx.Node] = []
        for n in node.all_input_nodes:
            made += [n] if isinstance(self.example.whole.get(n), Tensor) else self.made_of(n) if is_several(n) else []
        return made

    def is_behind(self, node: fx.Node) -> bool:
        """Say whether a node follows the rows, or seems to, and is made of something that mixes them."""
        return self.is_row_by_row(node) and any(n in self.mixed for n in self.made_of(node))

    def after_steps(self) -> set[fx.Node]:
        """Return what is not known to mix rows, and is one number for many values of what does, or made of such."""
        steps, found = set[fx.Node](), set[fx.Node]()
        for node in self.gm.graph.nodes:
            value = self.example.whole.get(node)
            if node.op != "call_function" or node not in self.reading or not isinstance(value, Tensor):
                continue
            made = [n for n in self.made_of(node) if n in self.reading and (n in self.mixed or n in found)]
            if not any(n in steps for n in made):
                whole = not (value.is_floating_point() or value.is_complex())
                if not (whole or node.target in _STEPS):
                    continue
                if not any(self.example.whole[n].is_floating_point() for n in made):
                    continue
            steps.add(node)
            if node not in self.mixed and BATCH[node].kind in ("rows", "sum"):
                found.add(node)
        return found

    def is_row_by_row(self, node: fx.Node) -> bool:
        follows = node.op == "call_function" and node not in self.mixed and BATCH[node].kind == "rows"
        return follows and isinstance(self.example.whole[node], Tensor)

    def is_felt(self, node: fx.Node, operand: fx.Node) -> bool:
        """Say whether a node may depend on an operand that no values have shown to mix rows.

        What runs as it is cannot be given any values: it is given the example's, with this operand changed.
        """
        made = node.args[0] if is_several(node.args[0]) else node
        if not isinstance(made, fx.Node) or not is_opaque(made.target):
            return True
        given = {n: self.example.whole[n] for n in made.all_input_nodes}
        try:
            changed = self.compute(made, {**given, operand: _changed(given[operand])})
        except FAILS:
            return True
        here = int(node.args[1]) if made is not node else 0  # type: ignore[arg-type]
        return not close(changed[here], self.example.whole[made][here])

    def is_to_see(self, node: fx.Node) -> bool:
        """Say whether a node's operator is to be seen at work once: one that takes each element alone is not."""
        if node.op != "call_function" or node in self.mixed or not isinstance(self.example.whole[node], Tensor):
            return False
        if BATCH[node].kind not in ("rows", "sum") or REDUCED.on(node) or not self.made_of(node):
            return False
        if self.is_aligned(node):
            return False
        key = self.key(node)
        if key in self.seen and key not in self.wrong:
            return False
        self.seen.add(key)
        return True

    def is_aligned(self, node: fx.Node) -> bool:
        if torch.Tag.pointwise not in getattr(node.target, "tags", ()):
            return False
        own = BATCH[node]
        here = self.example.whole[node].ndim - own.dim
        for n in node.all_input_nodes:
            value, split = self.example.whole[n], BATCH[n]
            if not isinstance(value, Tensor) or split.kind == "whole":
                continue
            if own.kind != "rows" or split.kind != "rows" or split.per_row != own.per_row:
                return False
            if value.ndim - split.dim != here:
                return False
        return True

    def key(self, node: fx.Node) -> Any:
        """Return what is equal for nodes of the same operator on operands of the same kind and size."""

        def described(n: fx.Node) -> str:
            value = self.example.whole[n]
            if isinstance(value, Tensor):
                numbers = "" if value.is_floating_point() or value.is_complex() else n.name
                fixed = n in self.example.fixed
                return f"{BATCH[n]} {tuple(value.shape)} {tuple(value.stride())} {value.dtype} {numbers} {fixed}"
            return str(self.key(n)) if is_several(n) else f"{value} {[p[n] for p in self.example.parts]}"

        args = pytree.tree_map_only(fx.Node, described, (node.args, dict(node.kwargs)))
        return str(node.target), repr(args), str(BATCH.get(node))

    def differs(self, node: fx.Node, values: Values) -> bool:
        """Say whether values of a batch and its parts show that rows are mixed."""
        whole, parts = values
        if not isinstance(whole, Tensor):
            return False
        if relation(whole, parts, self.example.rows, self.example.sizes, True).kind == "rows":
            return False
        return any(p.shape != whole.shape or not close(p, whole) for p in parts)

    def is_wrong(self, node: fx.Node, values: Values) -> bool:
        whole, parts = values
        if not isinstance(whole, Tensor) or not _tells(whole) or not all(map(_tells, parts)):
            return False
        return relation(whole, parts, self.example.rows, self.example.sizes, True) != BATCH[node]


def _changed(value: Tensor) -> Tensor:
    if value.dtype is torch.bool:
        return ~value
    return value * 1.5 + 0.3 if value.is_floating_point() or value.is_complex() else value + 1


def _tells(value: Any) -> bool:
    """Say whether a value has a number that can be compared."""
    if not isinstance(value, Tensor) or value.numel() == 0:
        return False
    return not (value.is_floating_point() or value.is_complex()) or bool(value.isfinite().any())


def _is_constant(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() > 1 and not value.is_complex() and one_number(value)


__all__ = ["mixing_with_other_values"]
