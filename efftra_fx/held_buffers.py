"""Buffers to which forward assigns another tensor: put back after a run, written in place while a graph is captured."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from efftra_fx.places import is_user_file


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
                if buffer.shape != value.shape:
                    buffer.resize_(value.shape)  # an observer of ranges gives its buffers their shape in forward
                buffer.copy_(value)


@contextmanager
def assignments_written_back() -> Iterator[None]:
    """Write what user code assigns to buffers meanwhile into these buffers, at the end: an exporter sees writes alone.

    A tensor of another shape or dtype stays assigned.
    """
    original = nn.Module.__setattr__
    before: dict[tuple[nn.Module, str], Tensor] = {}

    def assign(module: nn.Module, name: str, value: Any) -> None:
        held = module.__dict__.get("_buffers", {}).get(name)
        if isinstance(held, Tensor) and isinstance(value, Tensor) and is_user_file(sys._getframe(1).f_code.co_filename):
            if (value.shape, value.dtype) == (held.shape, held.dtype):
                before.setdefault((module, name), held)
        original(module, name, value)

    nn.Module.__setattr__ = assign  # type: ignore[method-assign, assignment]
    try:
        yield
        with torch.no_grad():
            for (module, name), buffer in before.items():
                value = module._buffers[name]
                if isinstance(value, Tensor) and value is not buffer:
                    buffer.copy_(value)
    finally:
        nn.Module.__setattr__ = original  # type: ignore[method-assign]
        for (module, name), buffer in before.items():
            module._buffers[name] = buffer


__all__ = ["HeldBuffers", "assignments_written_back"]
