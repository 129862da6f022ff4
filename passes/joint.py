"""Record one graph that computes a stage's outputs and, from their gradients, its inputs' gradients.

The stage runs once on fake tensors under autograd, and a dispatch mode writes down each
operator that reaches it below autograd: first the forward ones, then those that autograd's
own backward calls. So the gradients are those of eager autograd, operator by operator.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

from efftra_fx import private
from efftra_fx.errors import DifferentiateError

from .record import Recorder
from .simplify import simplify


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
    recorder = Recorder()
    quiet = torch.autograd.set_detect_anomaly(False)  # it looks at values, which fake tensors have not
    with quiet, FakeTensorMode(allow_non_fake_inputs=True), _no_autocast(), torch.random.fork_rng(devices=[]):
        inputs = [_fake_like(value, device) for value in example_inputs]
        nodes = [recorder.placeholder(node.name, value, node) for node, value in zip(placeholders, inputs, strict=True)]
        _require_gradients(inputs, wrt, nodes)
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
    replaced = simplify(recorder.graph)

    def final(value: Any) -> Any:
        node = recorder.find(value)
        while node in replaced:
            node = replaced[node]
        return node

    return Joint(
        recorder.module,
        recorder.graph,
        tuple(nodes),
        tuple(final(value) if isinstance(value, torch.Tensor) else value for value in outputs),
        tuple(None if seed is None else recorder.find(seed) for seed in seeds),
        tuple(None if value is None else final(value) for value in gradients),
    )


def _run(gm: fx.GraphModule, inputs: Sequence[Any], recorder: Recorder) -> tuple[Any, ...]:
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
                values[node] = _enter(recorder, node.name, found)
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


def _call(node: fx.Node, values: dict[fx.Node, Any], recorder: Recorder) -> Any:
    args: Any = fx.map_arg(node.args, values.__getitem__)
    kwargs: Any = fx.map_arg(node.kwargs, values.__getitem__)
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


def _seeds(outputs: Sequence[Any], grad_outputs: Sequence[bool], recorder: Recorder) -> list[torch.Tensor | None]:
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
        recorder.placeholder(f"grad_{recorder.find(value).name}", seed)
        seeds.append(seed)
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


def _require_gradients(inputs: Sequence[Any], wrt: Sequence[bool], nodes: Sequence[fx.Node]) -> None:
    for value, flag, node in zip(inputs, wrt, nodes, strict=True):
        if not flag:
            continue
        if not isinstance(value, torch.Tensor) or not (value.is_floating_point() or value.is_complex()):
            found = value.dtype if isinstance(value, torch.Tensor) else type(value).__name__
            raise DifferentiateError(f"input {node.name} is {found}, which has no gradient; leave it out of wrt")
        value.requires_grad_()


def _enter(recorder: Recorder, name: str, value: Any) -> Any:
    """Enter what a get_attr node names: a tensor becomes a constant, a body stays what it is."""
    if not isinstance(value, torch.Tensor):
        return value
    with recorder.silence():
        fake = _fake_like(value, value.device)
    recorder.constant(name, value, fake)
    return fake


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
