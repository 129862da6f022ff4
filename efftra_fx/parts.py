"""What a model is made of: a captured step computes with these tensors, whatever the model is given later."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Slot:
    """Where a module holds a parameter, a buffer or another module, and what it held."""

    holder: Mapping[str, Any]
    key: str
    held: Any
    kind: str
    name: str
    dtype: torch.dtype | None = None


class Parts:
    """The parameters, buffers and modules of models as they are now, each known by identity."""

    def __init__(self, *models: nn.Module) -> None:
        self.slots = tuple(slot for model in models for path, m in model.named_modules() for slot in _slots(path, m))

    def changed(self) -> str | None:
        """Name the first tensor that has another dtype now, with both, or None."""
        for slot in self.slots:
            if slot.dtype is not None and slot.held.dtype is not slot.dtype:
                before, now = (str(dtype).removeprefix("torch.") for dtype in (slot.dtype, slot.held.dtype))
                return f"{slot.kind} '{slot.name}' of the model was {before} and is {now} now"
        return None

    def replaced(self) -> str | None:
        """Name the first part that is another one now, or None; what has come to be since is none of them."""
        for slot in self.slots:
            if slot.holder.get(slot.key) is not slot.held:
                return f"{slot.kind} '{slot.name}'"
        return None


def _slots(path: str, module: nn.Module) -> list[Slot]:
    holders: dict[str, Mapping[str, Any]] = {
        "module": module._modules,
        "parameter": module._parameters,
        "buffer": module._buffers,
    }
    prefix = f"{path}." if path else ""
    return [
        Slot(holder, key, held, kind, prefix + key, held.dtype if kind != "module" else None)
        for kind, holder in holders.items()
        for key, held in holder.items()
        if held is not None
    ]


__all__ = ["Parts", "Slot"]
