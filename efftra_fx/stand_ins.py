"""Call a module with other tensors in place of its parameters and buffers.

`torch.func.functional_call` alone puts a tensor into every name that shares a parameter. Where one module has two
names (a block that is used twice), that is the same place twice, and what it puts back the second time is no longer
what was there: the module is left without its parameter. So each place is named once here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


def places_of(module: nn.Module) -> dict[str, str]:
    """Return the places that hold a module's tensors, each once, with the name that the module lists its tensor by.

    >>> block = nn.Linear(2, 2, bias=False)
    >>> tied = nn.Linear(2, 2, bias=False)
    >>> tied.weight = block.weight
    >>> places_of(nn.Sequential(block, block, tied))
    {'0.weight': '0.weight', '2.weight': '0.weight'}
    """
    listed = {id(t): name for name, t in (*module.named_parameters(), *module.named_buffers())}
    return {
        f"{path}.{name}" if path else name: listed[id(tensor)]
        for path, inner in module.named_modules()
        for name, tensor in (*inner._parameters.items(), *inner._buffers.items())
        if tensor is not None
    }


def call_with(
    module: nn.Module, tensors: Mapping[str, Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None
) -> Any:
    """Return what a module gives with these tensors at its places, as `places_of` names them."""
    return torch.func.functional_call(module, dict(tensors), args, dict(kwargs or {}), tie_weights=False)


__all__ = ["call_with", "places_of"]
