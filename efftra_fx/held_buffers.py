"""Buffers that forward assigns or registers: put back after a run, written in place while a graph is captured."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from efftra_fx.errors import CaptureError
from efftra_fx.places import is_user_file, line_of_caller


class BufferSlots:
    """Which tensors modules hold as buffers now, and under which names."""

    def __init__(self, *modules: nn.Module) -> None:
        self.paths = {owner: path for module in modules for path, owner in module.named_modules()}
        self.slots = {owner: dict(owner._buffers) for owner in self.paths}

    def restore(self) -> None:
        """Put the tensors back, and take away what was registered since."""
        for owner, held in self.slots.items():
            for name in owner._buffers.keys() - held:
                delattr(owner, name)
            owner._buffers.update(held)


class HeldBuffers(BufferSlots):
    """The buffers of modules as they are now: the tensors themselves, and their values."""

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__(*modules)
        buffers = [b for held in self.slots.values() for b in held.values() if b is not None]
        self.values = {id(buffer): (buffer, buffer.detach().clone()) for buffer in buffers}

    def restore(self) -> None:
        """Put tensors and values back, and take away what was registered since."""
        super().restore()
        with torch.no_grad():
            for buffer, value in self.values.values():
                if buffer.shape != value.shape:
                    buffer.resize_(value.shape)  # an observer of ranges gives its buffers their shape in forward
                buffer.copy_(value)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Say whether two tensors are equal, NaN where the other is one too."""
    return torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all())


@contextmanager
def assignments_written_back(*modules: nn.Module) -> Iterator[None]:
    """Write what user code assigns to buffers meanwhile into these buffers, at the end: an exporter sees writes alone.

    A tensor of another shape or dtype is not written. At the end the modules hold the buffers that they held.
    Raises CaptureError where user code registers a buffer, which it does at some calls only, as Python's state says.
    """
    slots = BufferSlots(*modules)
    before: dict[tuple[nn.Module, str], Tensor] = {}
    assign, register = nn.Module.__setattr__, nn.Module.register_buffer

    def assigned(module: nn.Module, name: str, value: Any) -> None:
        held = module.__dict__.get("_buffers", {}).get(name)
        if isinstance(held, Tensor) and isinstance(value, Tensor) and is_user_file(sys._getframe(1).f_code.co_filename):
            if (value.shape, value.dtype) == (held.shape, held.dtype):
                before.setdefault((module, name), held)
        assign(module, name, value)

    def registered(self: nn.Module, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        if self in slots.paths and is_user_file(sys._getframe(1).f_code.co_filename):
            raise CaptureError(
                f"forward registers buffer '{_name(slots.paths[self], name)}' at {line_of_caller()}, which a captured "
                "step does not; where it does so for the first batch, or for a longer one, call the model on such a "
                "batch before compile, and else register it in __init__ and write it in place (copy_)"
            )
        register(self, name, tensor, persistent)

    nn.Module.__setattr__ = assigned  # type: ignore[method-assign, assignment]
    nn.Module.register_buffer = registered  # type: ignore[method-assign]
    try:
        yield
        with torch.no_grad():
            for (module, name), buffer in before.items():
                value = module._buffers[name]
                if isinstance(value, Tensor) and value is not buffer:
                    buffer.copy_(value)
    finally:
        nn.Module.__setattr__ = assign  # type: ignore[method-assign]
        nn.Module.register_buffer = register  # type: ignore[method-assign]
        slots.restore()


def _name(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


__all__ = ["BufferSlots", "HeldBuffers", "assignments_written_back"]
