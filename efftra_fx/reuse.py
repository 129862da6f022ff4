"""Find operators that may write their result over an operand which nobody needs any more.

It saves the memory of the result and the time to fetch it. The same kernels run, so no bit
changes. An operand may be written over when an operator of this graph made its memory, no
other value that looks at that memory is used afterwards or handed out, and the result would
have its shape, strides and dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import getitem
from typing import Any

import torch
from torch import fx

from efftra_fx.operators import is_view

aten = torch.ops.aten


@dataclass(frozen=True)
class InPlace:
    """Write over operand `operand`: by the tensor method `method`, or by handing the operand to `overload` as `out`."""

    operand: int
    method: str = ""
    overload: torch._ops.OpOverload | None = None
    out: str = ""


_METHODS: dict[Any, str] = {
    aten.add.Tensor: "add_",
    aten.sub.Tensor: "sub_",
    aten.mul.Tensor: "mul_",
    aten.div.Tensor: "div_",
    aten.relu.default: "relu_",
    aten.tanh.default: "tanh_",
    aten.sigmoid.default: "sigmoid_",
    aten.exp.default: "exp_",
    aten.neg.default: "neg_",
    aten.masked_fill.Scalar: "masked_fill_",
}
# Elementwise operators that take their result's memory as an argument, and its name there.
_INTO: dict[Any, tuple[torch._ops.OpOverload, str]] = {
    aten.gelu_backward.default: (aten.gelu_backward.grad_input, "grad_input"),
    aten.silu_backward.default: (aten.silu_backward.grad_input, "grad_input"),
    aten.threshold_backward.default: (aten.threshold_backward.grad_input, "grad_input"),
    aten.tanh_backward.default: (aten.tanh_backward.grad_input, "grad_input"),
    aten.sigmoid_backward.default: (aten.sigmoid_backward.grad_input, "grad_input"),
    aten.leaky_relu_backward.default: (aten.leaky_relu_backward.grad_input, "grad_input"),
    aten.elu_backward.default: (aten.elu_backward.grad_input, "grad_input"),
    aten.softplus_backward.default: (aten.softplus_backward.grad_input, "grad_input"),
    aten.hardtanh_backward.default: (aten.hardtanh_backward.grad_input, "grad_input"),
    aten.hardsigmoid_backward.default: (aten.hardsigmoid_backward.grad_input, "grad_input"),
    aten.hardswish_backward.default: (aten.hardswish_backward.out, "out"),
    aten.native_dropout_backward.default: (aten.native_dropout_backward.out, "out"),
}
# Not elementwise, but on CPUs each row is written from itself alone, behind the sum over it.
_INTO_ON_CPU: dict[Any, tuple[torch._ops.OpOverload, str]] = {
    aten._softmax_backward_data.default: (aten._softmax_backward_data.out, "grad_input"),
    aten._log_softmax_backward_data.default: (aten._log_softmax_backward_data.out, "out"),
}
_COMMUTATIVE = frozenset({aten.add.Tensor, aten.mul.Tensor})

# Operators that certainly make memory of their own for each of their results. Any other may
# hand out what it was given, as some do in corner cases that no schema tells.
_MAKERS = frozenset(
    {
        *_METHODS,
        *_INTO,
        *_INTO_ON_CPU,
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten.baddbmm.default,
        aten.convolution.default,
        aten.convolution_backward.default,
        aten.native_layer_norm.default,
        aten.native_layer_norm_backward.default,
        aten.native_group_norm.default,
        aten.native_group_norm_backward.default,
        aten.native_batch_norm.default,
        aten.native_batch_norm_backward.default,
        aten._native_batch_norm_legit_no_training.default,
        aten._native_batch_norm_legit_functional.default,
        aten.gelu.default,
        aten.silu.default,
        aten._softmax.default,
        aten._log_softmax.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
        aten.nll_loss_backward.default,
        aten.nll_loss2d_backward.default,
        aten.max_pool2d_with_indices.default,
        aten.max_pool2d_with_indices_backward.default,
        aten.embedding.default,
        aten.embedding_dense_backward.default,
        aten.cat.default,
        aten.stack.default,
        aten.clone.default,
        aten.sum.dim_IntList,
        aten.sum.default,
        aten.mean.dim,
        aten.pow.Tensor_Scalar,
        aten.rsqrt.default,
        aten.where.self,
    }
)


def find_reuse(graph: fx.Graph) -> dict[fx.Node, InPlace]:
    """Return which nodes may write over an operand, and how. Values without `meta["val"]` are left alone."""
    order = {node: index for index, node in enumerate(graph.nodes)}
    memories: dict[fx.Node, _Memory] = {}
    for node in graph.nodes:
        memory = _memory(node, memories)
        memory.nodes.append(node)
        memory.last = max([memory.last, *(order[user] for user in node.users)])
        memories[node] = memory
    found: dict[fx.Node, InPlace] = {}
    for node in graph.nodes:
        for operand, choice in _choices(node):
            memory = memories[operand]
            others = [value for value in node.all_input_nodes if value is not operand]
            if (
                memory.own
                and memory.last <= order[node]
                and all(memories[value] is not memory for value in others)
                and _alike(operand, node)
            ):
                found[node] = choice
                memory.take(memories[node], memories)
                break
    return found


@dataclass(eq=False)
class _Memory:
    """The values that lie in one piece of memory, and the place in the graph of the last use of any of them.

    It is the graph's `own` if an operator made it and nothing else can look at it.
    """

    own: bool
    last: int = 0
    nodes: list[fx.Node] = field(default_factory=list)

    def take(self, other: _Memory, memories: dict[fx.Node, _Memory]) -> None:
        """Hold from now on what `other` was to hold."""
        self.last = max(self.last, other.last)
        self.own &= other.own
        self.nodes += other.nodes
        memories.update((node, self) for node in other.nodes)


def _memory(node: fx.Node, memories: dict[fx.Node, _Memory]) -> _Memory:
    """Return the memory that a node's result lies in."""
    inputs = node.all_input_nodes
    maker = inputs[0] if node.target is getitem else node
    if node.op == "call_function" and maker.target in _MAKERS:
        return _Memory(own=True)
    if node.op == "call_function" and inputs and (node.target is getitem or _is_view(node)):
        return memories[inputs[0]]
    if node.op == "call_function":
        for value in inputs:
            memories[value].own = False
    return _Memory(own=False)


def _is_view(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and is_view(node.target)


def _choices(node: fx.Node) -> Iterator[tuple[fx.Node, InPlace]]:
    into = _INTO.get(node.target) or (_INTO_ON_CPU.get(node.target) if _on_cpu(node) else None)
    if into is not None and isinstance(operand := node.args[0], fx.Node):
        yield operand, InPlace(0, "", *into)
    method = _METHODS.get(node.target)
    if method is None:
        return
    for index in (0, 1) if node.target in _COMMUTATIVE and not node.kwargs else (0,):
        if len(node.args) > index and isinstance(operand := node.args[index], fx.Node):
            yield operand, InPlace(index, method)


def _on_cpu(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.device.type == "cpu"


def _alike(one: fx.Node, other: fx.Node) -> bool:
    a, b = one.meta.get("val"), other.meta.get("val")
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return False
    return a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype and _dense(a)


def _dense(value: torch.Tensor) -> bool:
    """Tell whether no two elements lie in the same place."""
    return all(step > 0 or size == 1 for size, step in zip(value.shape, value.stride(), strict=True))
