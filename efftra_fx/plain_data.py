"""Nested values as plain data, which JSON can hold, with their tensors in a list beside."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from efftra_fx.errors import CheckpointError

_PLAIN = (bool, int, float, str, type(None))


def pack(value: Any, tensors: list[Tensor] | None, what: str) -> Any:
    """Return a value as plain data, its tensors put into a list; without a list, tensors are written out.

    >>> pack({"betas": (0.9, 0.99), "lr": 0.1}, None, "options")
    {'dict': [['betas', {'tuple': [0.9, 0.99]}], ['lr', 0.1]]}
    """
    if isinstance(value, Tensor):
        if tensors is not None:
            tensors.append(value.detach())
            return {"leaf": len(tensors) - 1}
        if value.numel() <= 1 and value.dtype.is_floating_point:
            return {"tensor": value.detach().cpu().tolist(), "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, Mapping) and all(isinstance(key, str | int) for key in value):
        return {"dict": [[key, pack(one, tensors, what)] for key, one in value.items()]}
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return {type(value).__name__: [pack(one, tensors, what) for one in value]}
    if type(value) in _PLAIN:
        return value if not isinstance(value, float) or math.isfinite(value) else {"float": str(value)}
    raise CheckpointError(f"{what} of the optimizer holds a {type(value).__name__}, which is no data to save")


def unpack(packed: Any, tensors: Sequence[Tensor]) -> Any:
    """Return the value of plain data."""
    if not isinstance(packed, dict):
        return packed
    ((kind, content),) = [(k, v) for k, v in packed.items() if k != "dtype"]
    match kind:
        case "leaf":
            return tensors[content]
        case "tensor":
            return torch.tensor(content, dtype=getattr(torch, packed["dtype"]))
        case "dict":
            return {key: unpack(one, tensors) for key, one in content}
        case "tuple":
            return tuple(unpack(one, tensors) for one in content)
        case "list":
            return [unpack(one, tensors) for one in content]
        case _:
            return float(content)
