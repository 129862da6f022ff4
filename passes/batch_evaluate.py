"""Compute the nodes of a graph for some rows, in double precision, with random numbers fixed.

A BatchNorm in training is computed of each row alone: which rows its statistics are taken over is the user's choice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from efftra_fx.chance import without_chance
from efftra_fx.draws import KEEP, UNIFORM
from efftra_fx.meta import ROLE
from efftra_fx.opaque import OtherSizesError, is_opaque, needs_whole_batch, run_without_chance

from .means import argument
from .slices import draws

NOT_ALONE = (RuntimeError, IndexError, ValueError, OtherSizesError)  # what says that a part cannot be computed alone
EMPTY = frozenset(
    {
        torch.ops.aten.empty.memory_format,
        torch.ops.aten.empty_like.default,
        torch.ops.aten.empty_strided.default,
        torch.ops.aten.new_empty.default,
        torch.ops.aten.new_empty_strided.default,
    }
)
_NARROW = (torch.float32, torch.float16, torch.bfloat16)


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


class Recorder(fx.Interpreter):
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
            value = wide(self._of_part(node)) if node.op == "call_function" else wide(super().run_node(node))
        else:
            value = super().run_node(node)
        if self.only is None or node in self.only:
            self.record[node] = value
        return value

    def _of_part(self, node: fx.Node) -> Any:
        """Return a node's value; what cannot be computed of a part is written down, and the whole's stands in."""
        try:
            return self.value_of(node)
        except NOT_ALONE:
            if self.whole is None:
                raise
            self.refused.add(node)
            return self.whole[node]

    def compute(self, node: fx.Node, operands: Mapping[fx.Node, Any]) -> Any:
        """Return the value of a node of operands that are given."""
        self.env = dict(operands)
        with torch.random.fork_rng(), torch.no_grad(), torch.autocast("cpu", enabled=False):
            return wide(self.value_of(node))

    def value_of(self, node: fx.Node) -> Any:
        """Return the value of a node of what its operands are here."""
        args, kwargs = self.fetch_args_kwargs_from_env(node)
        if needs_whole_batch(node.target):  # parts may be too small for it, and what they give tells nothing
            made = [t for t in pytree.tree_leaves(node.meta["val"]) if isinstance(t, Tensor)]
            if all(isinstance(size, int) for t in made for size in t.shape):
                return pytree.tree_map_only(Tensor, lambda t: torch.zeros(t.shape), node.meta["val"])
            if self.whole is not None:
                raise OtherSizesError(f"{node.name} must see the whole batch")
        if is_batch_statistics(node):
            return _without_statistics(args)
        if node.target in EMPTY:  # what lies in memory by chance would decide how values follow the rows
            return torch.zeros_like(node.target(*args, **kwargs))
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


def wide(value: Any) -> Any:
    """Return values with all that is less than double precision in double precision."""
    return _mapped(value, lambda t: t.double() if isinstance(t, Tensor) and t.dtype in _NARROW else t)


def _single(value: Any) -> Any:
    return _mapped(value, lambda t: t.float() if isinstance(t, Tensor) and t.dtype is torch.float64 else t)


def _wide_types(value: Any) -> Any:
    return _mapped(value, lambda kind: torch.float64 if isinstance(kind, torch.dtype) and kind in _NARROW else kind)


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return arguments with their leaves changed; plain containers are gone through by hand, which is much faster."""
    kind = type(value)
    if kind is tuple or kind is list or kind is fx.immutable_collections.immutable_list:
        items = [_mapped(item, change) for item in value]
        return items if kind is not tuple else tuple(items)
    if kind is dict or kind is fx.immutable_collections.immutable_dict:
        return {key: _mapped(item, change) for key, item in value.items()}
    return pytree.tree_map(change, value) if isinstance(value, (tuple, list, dict)) else change(value)


def evaluate_nodes(
    gm: fx.GraphModule,
    values: Mapping[tuple[str, str], Tensor],
    inputs: Sequence[Tensor],
    only: AbstractSet[fx.Node] | None = None,
) -> dict[fx.Node, Any]:
    """Return the value of every node, or of `only` some, random masks fixed."""
    return evaluate(Recorder(gm, only), gm, values, inputs)


def evaluate_some(
    gm: fx.GraphModule, values: Mapping[tuple[str, str], Tensor], inputs: Sequence[Tensor], node: fx.Node
) -> float:
    """Return the value of one node, a number, as `evaluate_nodes` does, holding no more than is still needed."""
    return float(evaluate_nodes(gm, values, inputs, {node})[node])


def evaluate(
    recorder: Recorder, gm: fx.GraphModule, values: Mapping[tuple[str, str], Tensor], inputs: Sequence[Tensor]
) -> dict[fx.Node, Any]:
    source = iter(inputs)
    operands = []
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            role = ROLE[node]
            operands.append(wide(next(source) if role.kind == "input" else values[role.kind, role.name]))
    with torch.random.fork_rng(), torch.no_grad(), torch.autocast("cpu", enabled=False):
        recorder.run(*operands, enable_io_processing=False)
    return recorder.record
