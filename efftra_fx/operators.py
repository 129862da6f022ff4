"""How generated code calls an operator: the cheapest Python spelling that reaches that very overload.

An `OpOverload` called from Python boxes its arguments and matches them against a schema,
which costs more than many a small operator computes. Torch's own bindings (tensor methods,
`torch._C._VariableFunctions`, `torch._C._nn`, …) do not box, but they pick the overload
themselves. So each spelling is tried once, on meta tensors and without computing anything:
it is taken only if the dispatcher is asked for the same overload with the same arguments.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from efftra_fx import private


@dataclass(frozen=True)
class Spelling:
    """A way to write a call: `function(*args)`, or `args[0].method(*rest)` if there is no function.

    With `spread` the last argument is a list, and its items are passed one by one.
    """

    function: Callable[..., Any] | None
    method: str = ""
    spread: bool = False

    def __call__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call the operator this way."""
        flat = self.positional(args)
        if self.function is not None:
            return self.function(*flat, **kwargs)
        return getattr(flat[0], self.method)(*flat[1:], **kwargs)

    def positional(self, args: Sequence[Any]) -> list[Any]:
        """Return the arguments one by one, as they are written."""
        return [*args[:-1], *args[-1]] if self.spread else list(args)


_KNOWN: dict[Any, Spelling] = {}


def spell(overload: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Spelling:
    """Return the cheapest spelling of a call of `overload`; tensors among the arguments stand for their kind only."""
    args, kwargs = tree_map(_blank, (tuple(args), dict(kwargs)))
    key = (overload, repr(tree_map(_kind, (args, sorted(kwargs.items())))))
    if key not in _KNOWN:
        found = (trial for trial in _spellings(overload, args, kwargs) if reaches(trial, overload, args, kwargs))
        _KNOWN[key] = next(found, Spelling(private.boxed(overload)))
    return _KNOWN[key]


def is_view(overload: torch._ops.OpOverload) -> bool:
    """Tell whether an operator's results share the memory of its first argument and write nothing."""
    schema = overload._schema
    if overload in _SHARING:
        return True
    infos = [result.alias_info for result in schema.returns]
    return bool(infos) and not schema.is_mutable and all(info is not None for info in infos)


# Operators whose result shares memory although their schema does not say so.
_SHARING = frozenset({torch.ops.aten._unsafe_view.default, torch.ops.aten._reshape_alias.default})


def _spellings(overload: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Spelling]:
    name = overload._schema.name.rpartition("::")[2]
    if overload.namespace != "aten" or not args:
        return
    methods = []
    if isinstance(args[0], torch.Tensor) and private.is_plain_method(name):
        methods.append(Spelling(None, name))
        if len(args) == 2 and not kwargs and isinstance(args[1], (list, tuple)) and args[1]:
            methods.insert(0, Spelling(None, name, spread=True))
    functions = [Spelling(function) for function in private.unboxed(name)]
    yield from [*methods, *functions] if len(args) == 1 or is_view(overload) else [*functions, *methods]


def reaches(
    spelling: Spelling, overload: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> bool:
    """Tell whether a spelling asks the dispatcher for `overload` with these arguments; nothing is computed.

    What torch says of a spelling that it does not like is not the user's business.
    """
    try:
        with private.below_autograd(), _Trial(), warnings.catch_warnings(action="ignore"):  # type: ignore[no-untyped-call]
            spelling(args, kwargs)
    except _Reached as reached:
        return reached.overload is overload and _same(
            _complete(overload, args, kwargs), _complete(overload, reached.args, reached.kwargs)
        )
    except (TypeError, ValueError, RuntimeError, NotImplementedError):
        return False
    return False


class _Reached(Exception):
    """Carry out of the dispatcher what it was asked for."""

    def __init__(self, overload: Any, args: Any, kwargs: Any) -> None:
        super().__init__()
        self.overload, self.args, self.kwargs = overload, args, kwargs


class _Trial(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise _Reached(func, args, kwargs or {})


def _complete(overload: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return one value for each argument that the schema declares."""
    declared = overload._schema.arguments
    return [
        args[index] if index < len(args) else kwargs.get(argument.name, argument.default_value)
        for index, argument in enumerate(declared)
    ]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return one is other
    return type(one) is type(other) and bool(one == other)


def _kind(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return f"{value.dim()}-dimensional {value.dtype}"
    return f"{type(value).__name__} {value}"


def _blank(value: Any) -> Any:
    """Return what stands for a value: nothing is computed, so sizes and symbols do not matter."""
    match value:
        case torch.Tensor():
            return torch.empty((1,) * value.dim(), dtype=value.dtype, device="meta")
        case torch.SymInt():
            return 2
        case torch.SymFloat():
            return 2.0
        case torch.SymBool():
            return True
    return value
