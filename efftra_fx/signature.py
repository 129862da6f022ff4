"""How a model is called: arguments to flat, named leaves and back.

A step is compiled for one call structure: the same argument names, containers and
constants. Tensors are leaves that change from step to step; everything else is a
constant of the captured graph and is compared at each call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from efftra_fx.containers import Tree, take_apart
from efftra_fx.errors import InputError


@dataclass(frozen=True)
class Leaf:
    """One leaf of a call: its name, and its constant value unless it is a tensor."""

    name: str
    tensor: bool
    constant: Any = None


@dataclass(frozen=True)
class Call:
    """The structure of a call: `(args, kwargs, target)` as a tree of named leaves."""

    leaves: tuple[Leaf, ...]
    tree: Tree
    has_target: bool

    def rebuild(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        """Return `(args, kwargs, target)` with these tensors at the tensor leaves."""
        source = iter(tensors)
        flat = [next(source) if leaf.tensor else leaf.constant for leaf in self.leaves]
        args, kwargs, target = self.tree.rebuild(flat)
        return args, kwargs, target

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """Names of the tensor leaves, in order."""
        return tuple(leaf.name for leaf in self.leaves if leaf.tensor)


def read_call(
    forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], target: Any
) -> tuple[Call, tuple[Tensor, ...]]:
    """Return the structure of a call and its tensors; keyword and position are the same.

    Raises InputError where `forward` does not take these arguments.
    """
    signature = _signature_of(forward)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise InputError(
            f"the model's forward{signature} cannot be called like this: {error}" + _target_note(str(error))
        ) from None
    names = _argument_names(signature, bound)
    paths, tree = take_apart((bound.args, dict(sorted(bound.kwargs.items())), target))
    leaves: list[Leaf] = []
    tensors: list[Tensor] = []
    for path, value in paths:
        name = _leaf_name(path, names)
        if isinstance(value, Tensor):
            _check_memory(name, value)
            tensors.append(value)
            leaves.append(Leaf(name, True))
        else:
            leaves.append(Leaf(name, False, value))
    return Call(tuple(leaves), tree, target is not None), tuple(tensors)


def _target_note(error: str) -> str:
    return "; a target is given as target=" if "too many positional" in error else ""


def _check_memory(name: str, tensor: Tensor) -> None:
    """Raise InputError for a tensor that has no plain memory, as rows of it are taken."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        raise InputError(f"argument '{name}' is a {kind} tensor, expected a dense one; give it as such (to_dense())")
    if tensor.device.type == "meta":
        raise InputError(f"argument '{name}' lies on the meta device, so it has no values; give a tensor with values")


def refuse_gradients(call: Call, tensors: Sequence[Tensor]) -> None:
    """Raise InputError for a tensor that waits for a gradient, which a step gives to parameters only."""
    for name, tensor in zip(call.tensor_names, tensors, strict=True):
        if tensor.requires_grad:
            raise InputError(
                f"argument '{name}' requires a gradient, which a step gives to the model's parameters only; detach it, "
                "or make what it is computed from a part of the model"
            )


def _signature_of(forward: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a function or method; that of a class's method is looked up once."""
    function = getattr(forward, "__func__", None)
    return inspect.signature(forward) if function is None else _method_signature(function)


@lru_cache(maxsize=256)
def _method_signature(function: Callable[..., Any]) -> inspect.Signature:
    signature = inspect.signature(function)
    return signature.replace(parameters=list(signature.parameters.values())[1:])


def difference(expected: Call, found: Call) -> str | None:
    """Say in words how two call structures differ, or return None where they do not."""
    before = {leaf.name: leaf for leaf in expected.leaves}
    after = {leaf.name: leaf for leaf in found.leaves}
    if expected.has_target != found.has_target:
        if expected.has_target:
            return "target: compiled with a target, got none; give target="
        return "target: compiled without a target, got one; leave target= out, or compile again with example_target="
    for name in before:
        if before[name].tensor and any(other.startswith((f"{name}.", f"{name}[")) for other in after):
            return f"argument '{name}' was a tensor when the step was compiled and is a container now"
        if name not in after and before[name] != Leaf(name, False, None):
            return f"argument '{name}' is missing; it was there when the step was compiled"
    for name in after:
        if name not in before and after[name] != Leaf(name, False, None):
            return f"argument '{name}' was not there when the step was compiled"
    for name, old in before.items():
        new = after.get(name, Leaf(name, False, None))
        if old.tensor != new.tensor:
            kinds = {True: "a tensor", False: "not a tensor"}
            return (
                f"argument '{name}' was {kinds[old.tensor]} when the step was compiled and is {kinds[new.tensor]} now"
            )
        if not old.tensor and not _same_constant(old.constant, new.constant):
            return f"argument '{name}' was {old.constant!r} when the step was compiled and is {new.constant!r} now"
    if expected.tree != found.tree:
        return "the containers of the arguments differ from those that the step was compiled with"
    return None


def _same_constant(a: Any, b: Any) -> bool:
    if a is b:
        return True
    try:
        return type(a) is type(b) and bool(a == b)
    except Exception:  # a user's own __eq__ may raise anything; then the two are not known to be equal
        return False


def _argument_names(signature: inspect.Signature, bound: inspect.BoundArguments) -> list[str]:
    names: list[str] = []
    for parameter in signature.parameters.values():
        if len(names) >= len(bound.args):
            break
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            rest = len(bound.args) - len(names)
            names.extend(f"{parameter.name}[{i}]" for i in range(rest))
        else:
            names.append(parameter.name)
    return names


def _leaf_name(path: tuple[Any, ...], names: Sequence[str]) -> str:
    group, rest = path[0].idx, path[1:]
    if group == 2:
        return "target" + _steps(rest)
    if group == 1:
        return str(rest[0].key) + _steps(rest[1:])
    return f"{names[rest[0].idx]}{_steps(rest[1:])}"


def _steps(path: tuple[Any, ...]) -> str:
    text = ""
    for step in path:
        if isinstance(step, pytree.SequenceKey):
            text += f"[{step.idx}]"
        elif isinstance(step, pytree.MappingKey):
            text += f".{step.key}"
        elif isinstance(step, pytree.GetAttrKey):
            text += f".{step.name}"
        else:
            text += f".{step}"
    return text


def describe(tensor: Tensor) -> str:
    """Return dtype and shape in words: `float32 [8, 6]`."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def original_forward(model: nn.Module) -> Callable[..., Any]:
    """Return the function whose signature names the model's arguments."""
    forward: Callable[..., Any] = model.forward
    return forward


def distinct(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the tensors with repeated objects copied, since a tracer takes equal objects for one input."""
    seen: set[int] = set()
    result = []
    for tensor in tensors:
        result.append(tensor.clone() if id(tensor) in seen else tensor)
        seen.add(id(tensor))
    return tuple(torch.Tensor.detach(t) for t in result)


def rows_of(tensors: Sequence[Tensor], dims: Sequence[int | None]) -> int:
    """Return the number of rows of tensors that have them along these dimensions."""
    return next(t.shape[d] for t, d in zip(tensors, dims, strict=False) if d is not None)


def rows_round(tensors: Sequence[Tensor], dims: Sequence[int | None], count: int, start: int = 0) -> list[Tensor]:
    """Return the tensors with so many rows: their own, from one on and round again."""
    rows = rows_of(tensors, dims)
    return rows_at(tensors, dims, [number % rows for number in range(start, start + count)])


def rows_at(tensors: Sequence[Tensor], dims: Sequence[int | None], order: Sequence[int]) -> list[Tensor]:
    """Return the tensors with the rows of these numbers, one after another."""
    return [
        t.detach() if d is None else t.detach().index_select(d, torch.tensor(order, device=t.device))
        for t, d in zip(tensors, dims, strict=True)
    ]


def take_rows(tensors: Sequence[Tensor], dims: Sequence[int | None], part: slice) -> list[Tensor]:
    """Return the tensors with only the rows of a part; those without a batch dimension stay whole."""
    return [
        t if d is None else t.narrow(d, part.start, part.stop - part.start) for t, d in zip(tensors, dims, strict=True)
    ]
