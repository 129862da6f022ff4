"""Modules that draw from `random` or NumPy: found, and run as they are with numbers that follow from torch's.

Code that runs as it is runs again in the backward, and must draw there what it drew. So a seed is drawn from torch,
whose state is kept for that, and the generators of Python have it while the module runs; afterwards they are as they
were.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from efftra_fx.capture_opaque import forward_replaced
from efftra_fx.python_state import generators, set_generators

_MOST_SEED = 2**31


def draws_in(model: nn.Module, run: Callable[[], object]) -> dict[str, str]:
    """Return the modules whose own code draws from generators outside of torch while the model runs, and from which.

    Those inside others of them are left out.
    """
    found: dict[str, str] = {}
    entered: list[str] = []
    before = last = generators()

    def note(path: str) -> None:
        nonlocal last
        now = generators()
        drawn = [name for name, state in now.items() if state != last.get(name, state)]
        if drawn:
            found.setdefault(path, drawn[0])
        last = now

    def watched(path: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if entered:
                note(entered[-1])
            entered.append(path)
            output = forward(*args, **kwargs)
            note(entered.pop())
            return output

        return call

    try:
        with ExitStack() as stack:
            for path, module in model.named_modules():
                stack.enter_context(forward_replaced(module, watched(path, module.forward)))
            run()
    finally:
        set_generators(before)
    return {p: which for p, which in found.items() if not any(q != p and p.startswith(q and f"{q}.") for q in found)}


@contextmanager
def seeded_from_torch(model: nn.Module, paths: Iterable[str]) -> Iterator[None]:
    """While this lasts, let these modules draw from `random` and NumPy what follows from a number drawn from torch."""
    with ExitStack() as stack:
        for path in paths:
            module = model.get_submodule(path)
            stack.enter_context(forward_replaced(module, _seeded(module.forward)))
        yield


def _seeded(forward: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        before, seed = generators(), int(torch.randint(_MOST_SEED, ()).item())
        random.seed(seed)
        numpy: Any = sys.modules.get("numpy.random")
        if numpy is not None:
            numpy.seed(seed)
        try:
            return forward(*args, **kwargs)
        finally:
            set_generators(before)

    return call


__all__ = ["draws_in", "seeded_from_torch"]
