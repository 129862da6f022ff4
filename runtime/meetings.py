"""Run code that sums over a tensor group on its way: start each sum when it is asked for, wait when it is needed."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch

from .transport import Handle, Transport

Meeting = Generator[tuple[bool, Any], Any, Any]


def meet(
    meeting: Meeting, transport: Transport, ranks: tuple[int, ...], what: str, seed: int | None = None
) -> Generator[tuple[Handle[Any], str], None, Any]:
    """Run a meeting of `ranks` to its end and return what it returns.

    It yields (True, tensor) to start a sum, which may overwrite the tensor, and is sent a handle; it
    yields (False, handle) to wait, and is sent the sum. With a seed, random numbers are drawn as if
    nothing else ran between: so all ranks of the group draw alike.
    """
    reply: Any = None
    state = None if seed is None else _seeded(seed, transport.device)
    while True:
        before = None if state is None else _swap(state, transport.device)
        try:
            start, thing = meeting.send(reply)
        except StopIteration as stop:
            return stop.value
        finally:
            if before is not None:
                state = _swap(before, transport.device)
        if start:
            reply = transport.all_reduce(thing, ranks)
        else:
            while not thing.ready():
                yield thing, what
            reply = thing.wait(what)


State = tuple[torch.Tensor, torch.Tensor | None]


def _seeded(seed: int, device: torch.device) -> State:
    """Return the random state that a seed gives, and leave the present one alone."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        return _present(device)


def _present(device: torch.device) -> State:
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def _swap(state: State, device: torch.device) -> State:
    """Put a random state in place of the present one, which is returned."""
    before = _present(device)
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], device)
    return before


__all__ = ["meet"]
