"""prove-batch: how each node's value follows the batch.

Every node is computed for a small batch as a whole and for its parts, in double precision,
with parameters moved off special values (a zero gain would hide what is behind it) and
random masks fixed. How whole and parts relate is written down: rows, whole, sum, or mixed.
The dimension comes from the shapes; equality of values is the proof that the rows of a
part do not feel the rows of another. The batch is cut in two ways, so that no row stands
alone by chance. A value that is computed from rows is never called the same for all parts
because it happens to be: only what reads no row, or just the shape of rows, is. An operator
that cannot be computed of a part (the two best rows of one) needs the whole batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from efftra_fx.chance import without_chance
from efftra_fx.draws import KEEP, UNIFORM
from efftra_fx.meta import BATCH, FREE, OUTPUTS, REDUCED, ROLE, Split
from efftra_fx.opaque import OtherSizesError, is_opaque, needs_whole_batch, run_without_chance

from .adding import adds_up
from .batch_backward import mixing_backwards
from .batch_opaque import deciding_together, operands_of_opaque
from .means import argument, with_argument
from .slices import draws

_TOLERANCE = 1e-9
_MOST_ROWS = 16
_NOT_ALONE = (RuntimeError, IndexError, ValueError, OtherSizesError)  # what says that a part cannot be computed alone
_NARROW = (torch.float32, torch.float16, torch.bfloat16)
_SHAPE_ONLY = frozenset(
    {
        torch.ops.aten.sym_size.int,
        torch.ops.aten.zeros_like.default,
        torch.ops.aten.ones_like.default,
        torch.ops.aten.full_like.default,
        torch.ops.aten.empty_like.default,
        torch.ops.aten.new_zeros.default,
        torch.ops.aten.new_ones.default,
        torch.ops.aten.new_full.default,
        torch.ops.aten.new_empty.default,
    }
)


@dataclass(frozen=True)
class ProveBatch:
    """Write `BATCH` and `FREE` on every node.

    `values` has the real tensor of every parameter, buffer and constant by (kind, name);
    `inputs` a few of the example's rows, at least two; `every` all of them, which are taken where the few do not
    stand alone (rows that name each other by number). What `trains` must go row by row backward too.
    """

    values: Mapping[tuple[str, str], Tensor] = field(repr=False)
    inputs: Sequence[Tensor] = field(repr=False)
    batch_leaves: tuple[int | None, ...] = ()
    every: Sequence[Tensor] = field(default=(), repr=False)
    trains: bool = True
    name: ClassVar[str] = "prove-batch"
    needs: ClassVar[tuple[str, ...]] = ("role", "outputs")
    gives: ClassVar[tuple[str, ...]] = ("batch", "free")

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        values = {key: moved(tensor) for key, tensor in self.values.items()}
        inputs = self.inputs
        try:
            whole = evaluate_nodes(gm, values, inputs)
        except _NOT_ALONE:
            if not self.every:
                raise
            inputs = self.every
            whole = evaluate_nodes(gm, values, inputs)
        rows = next(t.shape[d] for t, d in zip(inputs, self.batch_leaves, strict=True) if d is not None)
        mark_free(gm)
        reading = reads_rows(gm, self.batch_leaves)
        alike, refused = self.rows_alike(gm, inputs), set[fx.Node]()
        for middle in dict.fromkeys((1, rows - 1)):
            cut = (slice(0, middle), slice(middle, rows))
            parts = []
            for part in cut:
                recorder = _Recorder(gm, whole=whole)
                parts.append(_evaluate(recorder, gm, values, take_rows(inputs, self.batch_leaves, part)))
                refused |= recorder.refused
            undivided = _undivided(gm, refused)
            for node in gm.graph.nodes:
                if node.op == "output":
                    continue
                if node in undivided:
                    BATCH[node] = Split("mixed")
                    continue
                sizes = [middle, rows - middle]
                found = relation(whole[node], [p[node] for p in parts], rows, sizes, node in reading)
                unsure = found.kind == "sum" and node in alike  # rows mixed up give the same sum while they are alike
                if unsure and any(BATCH[n].kind == "mixed" for n in node.all_input_nodes):
                    found = Split("mixed")
                if found.kind == "sum" and not REDUCED.on(node) and not adds_up(node, reading):
                    found = Split("mixed")
                if middle == 1 or BATCH[node] == found:
                    BATCH[node] = found
                else:
                    BATCH[node] = Split("mixed")
        for node in _undivided(gm, mixing_backwards(gm, whole, parts, sizes)) if self.trains else ():
            if node.op != "output":
                BATCH[node] = Split("mixed")
        for node in _undivided(gm, self.deciding(gm, values)):
            if node.op != "output":
                BATCH[node] = Split("mixed")
        return gm

    def deciding(self, gm: fx.GraphModule, values: Mapping[tuple[str, str], Tensor]) -> set[fx.Node]:
        """Return the nodes whose own code decides by several rows at once, as more rows than the first few show."""
        read = operands_of_opaque(gm)
        if not read:
            return set()
        inputs = self.every or self.inputs
        rows = next(t.shape[d] for t, d in zip(inputs, self.batch_leaves, strict=True) if d is not None)
        if self.every and rows > _MOST_ROWS:
            rows = _MOST_ROWS
            inputs = take_rows(inputs, self.batch_leaves, slice(0, rows))
        try:
            whole = evaluate_nodes(gm, values, inputs, read)
        except _NOT_ALONE:
            return set()  # the first proof was of all rows already, since fewer do not stand alone
        return deciding_together(gm, whole, rows)

    def rows_alike(self, gm: fx.GraphModule, inputs: Sequence[Tensor]) -> set[fx.Node]:
        """Return the nodes that read an input whose rows are all the same."""
        same = [
            d is not None and bool((t == t.narrow(d, 0, 1)).all())
            for t, d in zip(inputs, self.batch_leaves, strict=True)
        ]
        return reads_rows(gm, [0 if alike else None for alike in same])


def _undivided(gm: fx.GraphModule, refused: AbstractSet[fx.Node]) -> set[fx.Node]:
    """Return the nodes that must see the whole batch, or `refused` a part of it, and all that follows from them."""
    found: set[fx.Node] = set(refused)
    for node in gm.graph.nodes:
        whole = node.op == "call_function" and needs_whole_batch(node.target)
        if whole or any(n in found for n in node.all_input_nodes):
            found.add(node)
    return found


def reads_rows(gm: fx.GraphModule, batch_leaves: Sequence[int | None]) -> set[fx.Node]:
    """Return the nodes whose values are computed from rows of the batch, and not just from how many there are."""
    leaves = iter(batch_leaves)
    reading: set[fx.Node] = set()
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            if ROLE[node].kind == "input" and next(leaves) is not None:
                reading.add(node)
        elif node.target not in _SHAPE_ONLY and any(n in reading for n in node.all_input_nodes):
            reading.add(node)
    return reading


def take_rows(inputs: Sequence[Tensor], batch_leaves: Sequence[int | None], part: slice) -> list[Tensor]:
    """Return the inputs with only the rows of a part; inputs without a batch dimension stay whole."""
    return [
        t if d is None else t.narrow(d, part.start, part.stop - part.start)
        for t, d in zip(inputs, batch_leaves, strict=True)
    ]


def mark_free(gm: fx.GraphModule) -> None:
    """Write `FREE` on nodes that need only inputs, constants and buffers that the step does not change."""
    written = set(OUTPUTS[gm].buffers)
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            role = ROLE[node]
            FREE[node] = role.kind in ("input", "constant") or (role.kind == "buffer" and role.name not in written)
        elif node.op != "output":
            FREE[node] = not is_random(node) and all(FREE[n] for n in node.all_input_nodes)


def is_random(node: fx.Node) -> bool:
    """Say whether a node draws random numbers."""
    return draws(node)


def moved(tensor: Tensor) -> Tensor:
    """Return the tensor, moved off a value that all its elements share: a gain of zero would hide what is behind it."""
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return tensor
    least, most = tensor.detach().aminmax()
    if bool(least != most):
        return tensor.detach()
    generator = torch.Generator(device=tensor.device).manual_seed(0)
    noise = torch.rand(tensor.shape, generator=generator, device=tensor.device, dtype=torch.float32).to(tensor.dtype)
    return tensor.detach() * (0.9 + 0.2 * noise) + 0.02 * (noise - 0.5)


def is_batch_statistics(node: fx.Node) -> bool:
    """Say whether a node normalises with the statistics of the rows that it sees (BatchNorm in training)."""
    if node.op != "call_function" or node.target not in _BATCH_NORMS:
        return False
    return bool(argument(node, "training"))


def _without_statistics(args: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """Normalise each row alone with fixed statistics; the new running statistics still depend on all rows."""
    x, weight, bias = args[:3]
    shape = [1, -1] + [1] * (x.ndim - 2)
    out = x * 0.7 + 0.1
    if weight is not None:
        out = out * weight.view(shape)
    if bias is not None:
        out = out + bias.view(shape)
    means = x.transpose(0, 1).flatten(1).mean(1).to(torch.float32)
    return (out, means, means, means, means)


_BATCH_NORMS = frozenset(
    {
        torch.ops.aten._native_batch_norm_legit_functional.default,
        torch.ops.aten._native_batch_norm_legit.no_stats,
        torch.ops.aten.native_batch_norm.default,
    }
)


class _Recorder(fx.Interpreter):
    """Compute every node in double precision and keep its value."""

    def __init__(
        self, gm: fx.GraphModule, only: AbstractSet[fx.Node] | None = None, whole: Mapping[fx.Node, Any] | None = None
    ) -> None:
        super().__init__(gm, garbage_collect_values=only is not None)
        self.record: dict[fx.Node, Any] = {}
        self.only = only
        self.whole = whole
        self.refused: set[fx.Node] = set()

    def run_node(self, node: fx.Node) -> Any:
        if node.op in ("call_function", "get_attr"):
            value = _wide(self._of_part(node)) if node.op == "call_function" else _wide(super().run_node(node))
        else:
            value = super().run_node(node)
        if self.only is None or node in self.only:
            self.record[node] = value
        return value

    def _of_part(self, node: fx.Node) -> Any:
        """Return a node's value; what cannot be computed of a part is written down, and the whole's stands in."""
        try:
            return self._value(node)
        except _NOT_ALONE:
            if self.whole is None:
                raise
            self.refused.add(node)
            return self.whole[node]

    def _value(self, node: fx.Node) -> Any:
        args, kwargs = self.fetch_args_kwargs_from_env(node)
        if needs_whole_batch(node.target):  # parts may be too small for it, and what they give tells nothing
            return pytree.tree_map_only(Tensor, lambda t: torch.zeros(t.shape), node.meta["val"])
        if is_batch_statistics(node):
            return _without_statistics(args)
        if is_random(node):
            return self._calm(node, args, kwargs)
        target: Any = node.target
        if target is torch.ops.aten.sort.default and node.args[0].target is UNIFORM:  # type: ignore[union-attr]
            return args[0].flip(-1), torch.arange(args[0].shape[-1], device=args[0].device).flip(-1)  # never in place
        if target is KEEP:
            return torch.ones_like(target(*args, **kwargs))  # what a mask drops would hide how it follows the batch
        try:
            return target(*_wide_types(args), **_wide_types(kwargs))
        except RuntimeError:  # an operator that knows no doubles computes in single precision
            return target(*_single(args), **_single(kwargs))

    @staticmethod
    def _calm(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not is_opaque(node.target):
            return without_chance(node.target, args, kwargs)
        try:
            return run_without_chance(node.target, _wide_types(args[0]))
        except RuntimeError:
            return run_without_chance(node.target, _single(args[0]))


def _wide(value: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda t: t.double() if t.dtype in _NARROW else t, value)


def _single(value: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda t: t.float() if t.dtype is torch.float64 else t, value)


def _wide_types(value: Any) -> Any:
    return pytree.tree_map_only(torch.dtype, lambda kind: torch.float64 if kind in _NARROW else kind, value)


def evaluate_nodes(
    gm: fx.GraphModule,
    values: Mapping[tuple[str, str], Tensor],
    inputs: Sequence[Tensor],
    only: AbstractSet[fx.Node] | None = None,
) -> dict[fx.Node, Any]:
    """Return the value of every node, or of `only` some, random masks fixed."""
    return _evaluate(_Recorder(gm, only), gm, values, inputs)


def evaluate_some(
    gm: fx.GraphModule, values: Mapping[tuple[str, str], Tensor], inputs: Sequence[Tensor], node: fx.Node
) -> float:
    """Return the value of one node, a number, as `evaluate_nodes` does, holding no more than is still needed."""
    return float(evaluate_nodes(gm, values, inputs, {node})[node])


def _evaluate(
    recorder: _Recorder, gm: fx.GraphModule, values: Mapping[tuple[str, str], Tensor], inputs: Sequence[Tensor]
) -> dict[fx.Node, Any]:
    source = iter(inputs)
    operands = []
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            role = ROLE[node]
            operands.append(_wide(next(source) if role.kind == "input" else values[role.kind, role.name]))
    with torch.random.fork_rng(), torch.no_grad(), torch.autocast("cpu", enabled=False):
        recorder.run(*operands, enable_io_processing=False)
    return recorder.record


def relation(whole: Any, parts: Sequence[Any], rows: int, sizes: Sequence[int], reading: bool) -> Split:
    """Return how a value for the whole batch relates to its parts' values; `reading` says that it reads rows."""
    if not isinstance(whole, Tensor):
        same = not isinstance(whole, (int, float, bool)) or all(whole == p for p in parts)
        return Split("whole" if same else "mixed")
    differing = [d for d in range(whole.ndim) if any(p.shape[d] != whole.shape[d] for p in parts)]
    if len(differing) > 1:
        return Split("mixed")
    if differing:
        dim = differing[0]
        per_row, rest = divmod(whole.shape[dim], rows)
        fits = rest == 0 and all(p.shape[dim] == per_row * size for p, size in zip(parts, sizes, strict=True))
        if fits and _close(torch.cat(list(parts), dim), whole):
            return Split("rows", dim, per_row)
        return Split("mixed")
    if not reading and all(_close(p, whole) for p in parts):
        return Split("whole")
    if whole.dtype is not torch.bool and _close(sum(parts[1:], parts[0]), whole):
        return Split("sum")
    return Split("mixed")


def _same_memory(a: Tensor, b: Tensor) -> bool:
    """Say whether two tensors of one shape are the same values in memory, as views of one parameter are."""
    return a.data_ptr() == b.data_ptr() and a.stride() == b.stride() and a.dtype == b.dtype


def _close(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape:
        return False
    if not (a.is_floating_point() or a.is_complex()):
        return bool(torch.equal(a, b))
    if a.numel() == 0 or _same_memory(a, b):
        return True
    difference = (a - b).abs().max()
    if bool(torch.isfinite(difference)):
        return bool(difference <= _TOLERANCE * b.abs().max().clamp(min=1e-12))
    finite = torch.isfinite(b)
    if not torch.equal(finite, torch.isfinite(a)) or not torch.equal(a[~finite].isnan(), b[~finite].isnan()):
        return False
    if not bool(finite.any()):
        return True
    scale = b[finite].abs().max()
    return bool((a[finite] - b[finite]).abs().max() <= _TOLERANCE * scale.clamp(min=1e-12))


__all__ = ["ProveBatch", "evaluate_nodes", "is_random", "mark_free", "relation", "take_rows", "with_argument"]
