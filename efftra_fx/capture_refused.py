"""What no graph can have, refused by name: TorchScript, and random numbers from a state that forward sets itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from efftra_fx.errors import CaptureError
from efftra_fx.places import line_of_caller

_ONCE = "draw once in __init__ and keep that in a buffer (register_buffer)"


def refuse_scripted(*models: nn.Module) -> None:
    """Raise CaptureError for modules of TorchScript, whose weights no graph can give them."""
    for model in models:
        for path, module in model.named_modules():
            if isinstance(module, torch.jit.ScriptModule):
                which = f"module '{path}'" if path else "the model"
                raise CaptureError(
                    f"{which} is TorchScript (torch.jit.script or torch.jit.trace), which keeps its weights and its "
                    "code to itself; give the module that it was made of"
                )


@contextmanager
def own_chance_refused() -> Iterator[None]:
    """While this lasts, code that draws from a generator of its own, or seeds torch's, raises CaptureError."""
    original = torch.manual_seed

    def manual_seed(seed: Any) -> Any:
        raise CaptureError(
            f"{line_of_caller()} seeds torch's random numbers inside forward, and a captured step draws those of its "
            f"plan; {_ONCE}"
        )

    torch.manual_seed = torch.random.manual_seed = manual_seed
    try:
        with _NoGenerators():
            yield
    finally:
        torch.manual_seed = torch.random.manual_seed = original


class _NoGenerators(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if kwargs and kwargs.get("generator") is not None:
            raise CaptureError(
                f"{line_of_caller()} draws from a torch.Generator of its own, whose state a captured step does not "
                f"have; leave generator= out, or {_ONCE}"
            )
        return func(*args, **(kwargs or {}))


__all__ = ["own_chance_refused", "refuse_scripted"]
