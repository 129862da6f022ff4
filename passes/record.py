"""Write down, as an fx graph, every operator that reaches the dispatcher below autograd."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from efftra_fx import private
from efftra_fx.errors import DifferentiateError

aten = torch.ops.aten

# Operators that only say something to autograd: below it their output is their input.
_IDENTITIES = frozenset({aten.detach.default, aten.alias.default, aten.lift_fresh.default})


@dataclass
class _Memory:
    """One storage: the tensor that fills it, that tensor's node, and how often it was written to."""

    root: torch.Tensor
    node: fx.Node
    writes: int = 0


class Recorder(TorchDispatchMode):
    """Record the operators that run while the mode is on into `graph`, in functional form.

    Each node's `meta["val"]` is the (fake) value it had. An operator that writes in place, as a
    few of autograd's own formulas do, becomes its functional form, and what looks at the same
    memory is taken from the new value.

    While `origin` is set, nodes are named for it and get its provenance; an operator that
    autograd's backward runs is named for the node whose forward made it necessary.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph = fx.Graph()
        self.module = torch.nn.Module()  # holds the constants that get_attr nodes name
        self.origin: fx.Node | None = None
        self.origins: dict[int, fx.Node] = {}  # by sequence number of the autograd node
        self._nodes: dict[int, tuple[fx.Node, int]] = {}  # by id of the tensor: its node, writes seen
        self._memories: dict[int, _Memory] = {}
        self._kept: list[torch.Tensor] = []  # an id names its tensor only while that lives
        self._silent = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is being compiled here, and the wrapper that skips it costs a call an operator

    def placeholder(self, name: str, value: Any, like: fx.Node | None = None) -> fx.Node:
        """Enter an input of the graph."""
        node = self.graph.placeholder(name)
        node.meta["val"] = value
        if like is not None:
            _explain(node, like)
        if isinstance(value, torch.Tensor):
            self._remember(value, node)
        return node

    def constant(self, name: str, value: torch.Tensor, fake: torch.Tensor) -> fx.Node:
        """Enter a tensor that the graph holds; `fake` stands for it."""
        name = name.replace(".", "_")
        self.module.register_buffer(name, value, persistent=False)  # itself: detached under a fake mode it were fake
        node = self.graph.get_attr(name)
        node.meta["val"] = fake
        self._remember(fake, node)
        return node

    @contextmanager
    def silence(self) -> Iterator[None]:
        """Record nothing for a while."""
        before, self._silent = self._silent, True
        try:
            yield
        finally:
            self._silent = before

    def rename(self, value: Any, like: fx.Node) -> None:
        """Give the node that made a tensor the name of the node it stands for."""
        if isinstance(value, torch.Tensor) and id(value) in self._nodes:
            made, _ = self._nodes[id(value)]
            if made.op == "call_function" and made.name.startswith(f"{like.name}_"):
                made._rename(like.name)

    def find(self, value: Any) -> Any:
        """Return the node that makes a tensor as it is now; plain values are themselves."""
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in self._nodes:  # C++ made it out of a number, not through an operator
            return self.constant(f"constant_{len(self._kept)}", value, value)
        node, writes = self._nodes[id(value)]
        memory = self._memories[_memory_of(value)]
        if writes == memory.writes:
            return node
        if value.dtype != memory.root.dtype:
            raise DifferentiateError(f"{node.name} looks as {value.dtype} at memory written as {memory.root.dtype}")
        with self.silence():
            node = self.graph.create_node(
                "call_function",
                aten.as_strided.default,
                (memory.node, list(value.shape), list(value.stride()), value.storage_offset()),
                name=node.name,
            )
        node.meta["val"] = value
        node.meta["look"] = _look(value, memory.writes)
        self._nodes[id(value)] = (node, memory.writes)
        return node

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._silent or func.namespace == "prim":
            return func(*args, **kwargs)
        if private.is_composite(func, _device_of(args)):
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if func in _IDENTITIES:
            node = self.find(args[0])
            result = func(*args, **kwargs)
            self._remember(result, node)
            return result
        if func is aten.native_batch_norm_backward.default and args[0].shape[0] == 1:
            with self:  # torch 2.13 mixes up the elements of one row that is laid out in two ways
                args = (*(t.clone(memory_format=torch.contiguous_format) for t in args[:2]), *args[2:])
        writes = func._schema.is_mutable
        node_args, node_kwargs = tree_map(self.find, (tuple(args), dict(kwargs)))  # before the call: it may write
        if torch.Tag.inplace_view in func.tags:
            with self.silence():
                self.find(args[0]).meta["val"] = args[0].detach()  # the tensor itself is about to look otherwise
        result = func(*args, **kwargs)
        leaves = tree_leaves(result)
        if any(isinstance(leaf, torch.Tensor) for leaf in leaves) or _is_check(func):
            target = func
            if writes and not self._fills(func, node_args):
                target, node_args = functional(func), with_defaults(func, node_args)
            node = self._record(target, node_args, node_kwargs, result)
            if writes:
                self._write(func, args[0], node)
        return result

    @staticmethod
    def _fills(func: Any, args: tuple[Any, ...]) -> bool:
        """Tell whether random numbers are drawn into memory that is there for just that.

        Then they stay drawn in place: the functional form may draw them in another order.
        """
        target = args[0]
        fresh = isinstance(target, fx.Node) and is_blank(target) and not target.users
        return fresh and torch.Tag.nondeterministic_seeded in func.tags

    def _record(self, target: Any, args: Any, kwargs: Any, result: Any) -> fx.Node:
        origin, prefix = self.origin, ""
        if (running := private.running_sequence_number()) >= 0:
            origin, prefix = self.origins.get(running), "d_"
        stem = target._schema.name.rpartition("::")[2].strip("_")
        name = f"{prefix}{origin.name}_{stem}" if origin is not None else f"{prefix}{stem}"
        node = self.graph.create_node("call_function", target, args, kwargs, name=name)
        if origin is not None:
            _explain(node, origin)
        node.meta["val"] = result
        if isinstance(result, torch.Tensor):
            self._remember(result, node)
        elif isinstance(result, (tuple, list)):
            for index, item in enumerate(result):
                if isinstance(item, torch.Tensor):
                    part = self.graph.create_node(
                        "call_function", operator.getitem, (node, index), name=f"{name}_{index}"
                    )
                    part.meta = {**node.meta, "val": item}
                    self._remember(item, part)
        return node

    def _remember(self, value: torch.Tensor, node: fx.Node) -> None:
        memory = self._memories.setdefault(_memory_of(value), _Memory(value, node))
        self._nodes[id(value)] = (node, memory.writes)
        node.meta["look"] = _look(value, memory.writes)
        self._kept.append(value)

    def _write(self, func: Any, target: torch.Tensor, node: fx.Node) -> None:
        """Let the memory of `target` hold what `node` makes."""
        memory = self._memories[_memory_of(target)]
        if torch.Tag.inplace_view in func.tags:
            if memory.root is target:
                memory.node = node
            return
        memory.writes += 1
        if memory.root is not target:
            if target.dtype != memory.root.dtype:
                raise DifferentiateError(f"{node.name} writes {target.dtype} into memory of {memory.root.dtype}")
            where = (list(target.shape), list(target.stride()), target.storage_offset())
            scattered = self.graph.create_node(
                "call_function", aten.as_strided_scatter.default, (memory.node, node, *where), name=memory.node.name
            )
            scattered.meta = {**memory.node.meta, "look": _look(memory.root, memory.writes)}
            self._nodes[id(memory.root)] = (scattered, memory.writes)
            memory.node = scattered
        else:
            memory.node = node
        node.meta["look"] = _look(target, memory.writes)
        self._nodes[id(target)] = (node, memory.writes)


def is_blank(node: fx.Node) -> bool:
    """Tell whether a node is memory that nothing is written to yet."""
    return node.op == "call_function" and "empty" in str(node.target)


def functional(func: Any) -> Any:
    """Return the out-of-place form of an operator that writes into its first argument alone."""
    schema = func._schema
    written = [argument.name for argument in schema.arguments if argument.is_write]
    name = schema.name.rpartition("::")[2]
    wanted = [(argument.name, str(argument.type)) for argument in schema.arguments]
    alone = written == [schema.arguments[0].name] and str(schema.arguments[0].type) == "Tensor"
    if name.endswith("_") and alone:
        packet = getattr(getattr(torch.ops, func.namespace), name[:-1], None)
        for overload in packet.overloads() if packet is not None else ():
            form = getattr(packet, overload)
            if [(argument.name, str(argument.type)) for argument in form._schema.arguments] == wanted:
                return form
    raise DifferentiateError(f"{func} writes in place and has no functional form, so it cannot be differentiated ahead")


def with_defaults(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return positional arguments with those that were left out: the functional form may have other defaults."""
    rest = [argument for argument in func._schema.arguments[len(args) :] if not argument.kwarg_only]
    return (*args, *(argument.default_value for argument in rest))


def _device_of(args: Any) -> str:
    return next((leaf.device.type for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)), "cpu")


def _is_check(func: Any) -> bool:
    """Tell whether an operator is called only for the error that it may raise."""
    return str(func._schema.name).startswith("aten::_assert_async")


def _look(value: torch.Tensor, writes: int) -> Hashable:
    """Return what a tensor sees: which memory, since which write, and how. Tensors of the same look are equal."""
    geometry = (tuple(value.shape), tuple(value.stride()), value.storage_offset())
    return (_memory_of(value), writes, value.dtype, *geometry, value.is_conj(), value.is_neg())


def _memory_of(value: torch.Tensor) -> int:
    return int(value.untyped_storage()._cdata)


def _explain(node: fx.Node, origin: fx.Node) -> None:
    for key in ("nn_module_stack", "stack_trace"):
        if key in origin.meta:
            node.meta[key] = origin.meta[key]
