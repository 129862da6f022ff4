"""Everything of torch that is private and still needed, each behind a function of ours.

A release of torch that renames one of these breaks one function here and its test,
and nothing else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher


@functools.cache
def _autograd_keys() -> torch._C.DispatchKeySet:
    names = [name for name in dir(torch._C.DispatchKey) if name.startswith(("Autograd", "Autocast"))]
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
    for name in names:
        keys = keys | torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name))
    return keys


def below_autograd() -> AbstractContextManager[None]:
    """Return a guard under which operators skip autograd, view tracking and autocast.

    Unlike inference mode it makes normal tensors: gradients computed under it can be
    handed to an optimizer. It holds for the calling thread only.
    """
    return torch._C._ExcludeDispatchKeyGuard(_autograd_keys())


def boxed(overload: torch._ops.OpOverload) -> Callable[..., Any]:
    """Return the boxed call of one overload without the Python layer around it."""
    return overload._op


def unboxed(name: str) -> tuple[Callable[..., Any], ...]:
    """Return torch's own unboxed bindings of that name; which overload one takes is its own choice."""
    names = ("_VariableFunctions", "_nn", "_linalg", "_special", "_fft")
    places = [getattr(torch._C, place) for place in names if hasattr(torch._C, place)]
    return tuple(getattr(place, name) for place in places if hasattr(place, name))


def is_plain_method(name: str) -> bool:
    """Tell whether tensors have a method of that name that is torch's binding and no Python code."""
    bound = getattr(torch._C.TensorBase, name, None)
    return bound is not None and callable(bound) and getattr(torch.Tensor, name) is bound


def is_composite(overload: torch._ops.OpOverload, device: str) -> bool:
    """Tell whether torch runs the operator by calling others, and has no kernel of its own for that kind of device."""
    if not overload._can_decompose():
        return False
    key = torch._C._dispatch_key_for_device(device)
    name: str = overload.name()
    return not torch._C._dispatch_has_kernel_for_dispatch_key(name, key)


def sequence_number() -> int:
    """Return the number that autograd gives to the next node recorded in this thread."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]


def running_sequence_number() -> int:
    """Return the number of the autograd node that runs now in this thread, -1 when none does."""
    node = torch._C._current_autograd_node()
    return -1 if node is None else int(node._sequence_nr())


def above_autograd() -> AbstractContextManager[None]:
    """Return a guard under which operators are recorded by autograd again, even inside `below_autograd`."""
    included = torch._C._dispatch_tls_local_include_set()
    excluded = torch._C._dispatch_tls_local_exclude_set() - _autograd_keys()
    return torch._C._ForceDispatchKeyGuard(included, excluded)


def compilation_error() -> type[Exception]:
    """Return the exception that `torch.compile` raises where it cannot compile; loads the compiler."""
    import torch._dynamo.exc

    return torch._dynamo.exc.TorchDynamoException


def module_hooks(module: torch.nn.Module, backward: bool = False) -> list[Callable[..., Any]]:
    """Return the hooks on a module's forward, or on its backward."""
    names = ("_backward_hooks", "_backward_pre_hooks") if backward else ("_forward_hooks", "_forward_pre_hooks")
    return [hook for name in names for hook in getattr(module, name).values()]


def global_hooks(backward: bool = False) -> list[Callable[..., Any]]:
    """Return the hooks on the forward of all modules, or on their backward."""
    kinds = ("backward_hooks", "backward_pre_hooks") if backward else ("forward_hooks", "forward_pre_hooks")
    return [hook for kind in kinds for hook in getattr(torch.nn.modules.module, f"_global_{kind}").values()]


def tensor_hooks(tensor: torch.Tensor) -> tuple[list[Callable[..., Any]], list[Callable[..., Any]]]:
    """Return the hooks on a tensor's gradient, and those that are called when that was accumulated."""
    after = getattr(tensor, "_post_accumulate_grad_hooks", None)
    return list((tensor._backward_hooks or {}).values()), list((after or {}).values())


def hook_numbers(model: torch.nn.Module) -> tuple[int, ...]:
    """Return the numbers of all hooks on a model's modules: they change when a hook comes or goes."""
    numbers: list[int] = []
    for module in model.modules():
        if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
            for hooks in (module._forward_hooks, module._forward_pre_hooks):
                numbers += hooks
            for others in (module._backward_hooks, module._backward_pre_hooks):
                numbers += others
    return tuple(numbers)


def shapes_in_python() -> AbstractContextManager[None]:
    """Return a guard under which composite operators are taken apart by torch's Python rules, as its tracer does.

    Those in C++ would take symbolic sizes for numbers (that of LSTM does).
    """
    guard: AbstractContextManager[None] = enable_python_dispatcher()
    return guard
