"""Record one graph that computes a stage's outputs and, from their gradients, its inputs' gradients.

The stage runs once on fake tensors under autograd, and a dispatch mode writes down each
operator that reaches it below autograd: first the forward ones, then those that autograd's
own backward calls. So the gradients are those of eager autograd, operator by operator.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from efftra_fx import private
from efftra_fx.errors import DifferentiateError

aten = torch.ops.aten

# Operators that only say something to autograd: below it their output is their input.
_IDENTITIES = frozenset({aten.detach.default, aten.alias.default, aten.lift_fresh.default})


@dataclass(frozen=True, eq=False)
class Joint:
    """A stage's forward and backward as one graph; each node's `meta["val"]` is its fake value.

    `gradients[i]` is the gradient of `inputs[i]`, or None. Outputs are nodes or plain
    constants. `tangents[i]` is the gradient of `outputs[i]`, or None when none comes in.
    """

    module: torch.nn.Module  # holds the constants that get_attr nodes name
    graph: fx.Graph
    inputs: tuple[fx.Node, ...]
    outputs: tuple[Any, ...]
    tangents: tuple[fx.Node | None, ...]
    gradients: tuple[fx.Node | None, ...]


def record_joint(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    wrt: Sequence[bool],
    grad_outputs: Sequence[bool],
    device: torch.device | str = "cpu",
) -> Joint:
    """Run `gm` and its backward on fake tensors and return what was done as one graph.

    `example_inputs` give shapes, strides and dtypes (tensors on the meta device stand for
    ones on `device`); nothing is computed with their values.

    Raises `DifferentiateError` when the graph depends on values, or asks for what has no gradient.
    """
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    if not len(placeholders) == len(example_inputs) == len(wrt):
        raise DifferentiateError(
            f"the graph has {len(placeholders)} inputs, but {len(example_inputs)} examples and {len(wrt)} flags in wrt "
            f"were given; give one of each for every input"
        )
    recorder = _Recorder()
    with FakeTensorMode(allow_non_fake_inputs=True), _no_autocast(), torch.random.fork_rng(devices=[]):
        inputs = [
            recorder.placeholder(node.name, _fake_like(value, device), flag, node)
            for node, value, flag in zip(placeholders, example_inputs, wrt, strict=True)
        ]
        with recorder, torch.enable_grad():
            outputs = _run(gm, inputs, recorder)
        if len(outputs) != len(grad_outputs):
            raise DifferentiateError(
                f"the graph has {len(outputs)} outputs, but grad_outputs has {len(grad_outputs)} flags; "
                f"give one for each output"
            )
        seeds = _seeds(outputs, grad_outputs, recorder)
        with recorder:
            gradients = _differentiate(outputs, seeds, inputs, wrt)
    return Joint(
        recorder.module,
        recorder.graph,
        tuple(recorder.inputs),
        tuple(recorder.find(value) for value in outputs),
        tuple(None if seed is None else recorder.find(seed) for seed in seeds),
        tuple(None if value is None else recorder.find(value) for value in gradients),
    )


class _Recorder(TorchDispatchMode):
    """Write each operator that is dispatched below autograd into a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.graph = fx.Graph()
        self.module = torch.nn.Module()
        self.inputs: list[fx.Node] = []
        self.nodes: dict[int, fx.Node] = {}
        self.kept: list[Any] = []  # a tensor's id names its node, so no tensor may die
        self.origin: fx.Node | None = None
        self.origins: dict[int, fx.Node] = {}
        self.silent = False

    def placeholder(self, name: str, value: Any, differentiable: bool, like: fx.Node | None) -> Any:
        node = self.graph.placeholder(name)
        node.meta["val"] = value
        if like is not None:
            self._explain(node, like)
            self.inputs.append(node)
        if isinstance(value, torch.Tensor):
            if differentiable:
                if not (value.is_floating_point() or value.is_complex()):
                    raise DifferentiateError(
                        f"input {name} is {value.dtype}, which has no gradient; leave it out of wrt"
                    )
                value.requires_grad_()
            self._remember(value, node)
        return value

    def constant(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Enter a tensor that the graph holds; return the fake one that stands for it."""
        self.silent = True
        fake = _fake_like(value, value.device)
        self.silent = False
        self._remember(fake, self._attribute(name, value, fake))
        return fake

    def rename(self, value: Any, like: fx.Node) -> None:
        """Give the node that made a tensor the name of the node it stands for."""
        if isinstance(value, torch.Tensor) and (made := self.nodes.get(id(value))) is not None:
            if made.op == "call_function" and made.name.startswith(f"{like.name}_"):
                made._rename(like.name)

    def find(self, value: Any) -> Any:
        """Return the node that made a tensor; plain values are themselves."""
        if not isinstance(value, torch.Tensor):
            return value
        node = self.nodes.get(id(value))
        if node is None:  # a tensor that C++ made out of a number, not through an operator
            node = self._attribute(f"constant_{len(self.kept)}", value, value)
            self._remember(value, node)
        return node

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.silent or func.namespace == "prim":
            return func(*args, **kwargs)
        if private.is_composite(func):
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = func(*args, **kwargs)
        if func in _IDENTITIES:
            self._remember(result, self.find(args[0]))
            return result
        if not any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(result)) and not _checks(func):
            return result
        target = func
        if func._schema.is_mutable:
            target = _functional(func)
        node_args, node_kwargs = tree_map(self.find, (tuple(args), dict(kwargs)))
        origin, prefix = self.origin, ""
        if (running := private.running_sequence_number()) >= 0:
            origin, prefix = self.origins.get(running), "d_"
        stem = target._schema.name.rpartition("::")[2].strip("_")
        name = f"{prefix}{origin.name}_{stem}" if origin is not None else f"{prefix}{stem}"
        node = self.graph.create_node("call_function", target, node_args, node_kwargs, name=name)
        if origin is not None:
            self._explain(node, origin)
        node.meta["val"] = result
        if isinstance(result, torch.Tensor):
            self._remember(result, node)
        elif isinstance(result, (tuple, list)):
            self._record_items(node, result)
        return result

    def _record_items(self, node: fx.Node, result: Sequence[Any]) -> None:
        for index, item in enumerate(result):
            if isinstance(item, torch.Tensor):
                got = self.graph.create_node(
                    "call_function", operator.getitem, (node, index), name=f"{node.name}_{index}"
                )
                got.meta = {**node.meta, "val": item}
                self._remember(item, got)

    def _attribute(self, name: str, value: torch.Tensor, fake: torch.Tensor) -> fx.Node:
        name = name.replace(".", "_")
        self.module.register_buffer(name, value.detach(), persistent=False)
        node = self.graph.get_attr(name)
        node.meta["val"] = fake
        return node

    def _remember(self, value: torch.Tensor, node: fx.Node) -> None:
        self.nodes[id(value)] = node
        self.kept.append(value)

    @staticmethod
    def _explain(node: fx.Node, origin: fx.Node) -> None:
        for key in ("nn_module_stack", "stack_trace"):
            if key in origin.meta:
                node.meta[key] = origin.meta[key]


def _checks(func: Any) -> bool:
    """Tell whether an operator is called for the error it may raise."""
    return str(func._schema.name).startswith("aten::_assert_async")


def _functional(func: Any) -> Any:
    """Return the out-of-place form of an operator that writes into its first argument."""
    name, overload = func._schema.name.removeprefix("aten::"), func._overloadname
    packet = getattr(aten, name.removesuffix("_"), None)
    if not name.endswith("_") or packet is None or overload not in packet.overloads():
        raise DifferentiateError(f"the backward calls {func}, which writes in place and has no functional form")
    return getattr(packet, overload)


def _run(gm: fx.GraphModule, inputs: Sequence[Any], recorder: _Recorder) -> tuple[Any, ...]:
    """Run a graph node by node; regions without gradients or with autocast are entered."""
    values: dict[fx.Node, Any] = {}
    rest = iter(inputs)
    outer = recorder.origin
    for node in gm.graph.nodes:
        match node.op:
            case "placeholder":
                values[node] = next(rest)
            case "get_attr":
                found = _attribute(gm, str(node.target))
                values[node] = recorder.constant(node.name, found) if isinstance(found, torch.Tensor) else found
            case "call_function":
                recorder.origin = node if "nn_module_stack" in node.meta or outer is None else outer
                values[node] = _call(node, values, recorder)
                recorder.rename(values[node], node)
            case "output":
                result = fx.map_arg(node.args[0], values.__getitem__)
                recorder.origin = outer
                return tuple(result) if isinstance(result, (tuple, list)) else (result,)
            case _:
                raise DifferentiateError(f"node {node.name} is a {node.op}, expected a graph of functions")
    raise DifferentiateError("the graph has no output node")


def _call(node: fx.Node, values: dict[fx.Node, Any], recorder: _Recorder) -> Any:
    args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
    before = private.sequence_number()
    try:
        match str(node.target):
            case "wrap_with_set_grad_enabled":
                enabled, body, *rest = args
                with torch.set_grad_enabled(enabled):
                    return _run(body, rest, recorder)
            case "wrap_with_autocast":
                kind, dtype, enabled, cached, body, *rest = args
                with torch.autocast(kind, dtype, enabled, cached):
                    return _run(body, rest, recorder)
            case _:
                return node.target(*args, **kwargs)  # type: ignore[operator]
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise DifferentiateError(
            f"node {node.name} ({node.target}) gives a number or a shape that depends on values; "
            f"a stage needs shapes known beforehand"
        ) from error
    finally:
        for number in range(before, private.sequence_number()):
            recorder.origins.setdefault(number, recorder.origin or node)


def _seeds(outputs: Sequence[Any], grad_outputs: Sequence[bool], recorder: _Recorder) -> list[torch.Tensor | None]:
    """Make the incoming gradient of each output that gets one: contiguous, like what arrives from another stage."""
    seeds: list[torch.Tensor | None] = []
    for index, (value, flag) in enumerate(zip(outputs, grad_outputs, strict=True)):
        if not flag:
            seeds.append(None)
            continue
        if not isinstance(value, torch.Tensor) or not (value.is_floating_point() or value.is_complex()):
            found = value.dtype if isinstance(value, torch.Tensor) else type(value).__name__
            raise DifferentiateError(f"output {index} is {found}, which has no gradient; leave it out of grad_outputs")
        seed = torch.empty(value.shape, dtype=value.dtype, device=value.device)
        seeds.append(recorder.placeholder(f"grad_{recorder.find(value).name}", seed, False, None))
    return seeds


def _differentiate(
    outputs: Sequence[Any], seeds: Sequence[torch.Tensor | None], inputs: Sequence[Any], wrt: Sequence[bool]
) -> list[torch.Tensor | None]:
    """Run autograd from the outputs that depend on `inputs`; return the gradient of each input that has one."""
    roots = [(out, seed) for out, seed in zip(outputs, seeds, strict=True) if seed is not None and out.requires_grad]
    sources = [value for value, flag in zip(inputs, wrt, strict=True) if flag]
    if not roots or not sources:
        return [None] * len(inputs)
    found = iter(
        torch.autograd.grad([out for out, _ in roots], sources, [seed for _, seed in roots], allow_unused=True)
    )
    return [next(found) if flag else None for flag in wrt]


def _fake_like(value: Any, device: torch.device | str) -> Any:
    """Return a fresh fake tensor of the same layout; plain values are themselves."""
    if not isinstance(value, torch.Tensor):
        return value
    shape, stride = tuple(int(size) for size in value.shape), tuple(int(step) for step in value.stride())
    where = torch.device(device) if value.device.type == "meta" else value.device
    return torch.empty_strided(shape, stride, dtype=value.dtype, device=where)


def _attribute(gm: torch.nn.Module, target: str) -> Any:
    value: Any = gm
    for part in target.split("."):
        value = getattr(value, part)
    return value


@contextlib.contextmanager
def _no_autocast() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for kind in ("cpu", "cuda"):
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield
