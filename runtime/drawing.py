"""Random numbers of a step: drawn from its seed, and the caller's random state left alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def drawing(seed: int | None, device: torch.device) -> Iterator[None]:
    """Draw random numbers from this seed meanwhile; with None nothing is drawn."""
    if seed is None:
        yield
        return
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


__all__ = ["drawing"]
