"""Run a model and leave its buffers as they were, also those to which forward assigns another tensor."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class HeldBuffers:
    """The buffers of modules as they are now: the tensors themselves, and their values."""

    def __init__(self, *modules: nn.Module) -> None:
        self.slots: list[tuple[nn.Module, str, Tensor | None]] = []
        self.values: dict[int, tuple[Tensor, Tensor]] = {}
        for owner in dict.fromkeys(inner for module in modules for inner in module.modules()):
            for name, buffer in owner._buffers.items():
                self.slots.append((owner, name, buffer))
                if buffer is not None:
                    self.values[id(buffer)] = buffer, buffer.detach().clone()

    def restore(self) -> None:
        """Put tensors and values back."""
        for owner, name, buffer in self.slots:
            owner._buffers[name] = buffer
        with torch.no_grad():
            for buffer, value in self.values.values():
                buffer.copy_(value)


__all__ = ["HeldBuffers"]
