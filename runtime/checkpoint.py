"""Give every rank the whole state, each tensor from the rank that owns it."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .transport import Handle, Transport, result_of

_TAG = 1 << 25


@dataclass(frozen=True)
class Owned:
    """A tensor under the model's own name, and the rank that has its current value."""

    name: str
    owner: int
    shape: tuple[int, ...]
    dtype: torch.dtype


def share_tensors(
    transport: Transport, items: Sequence[Owned], mine: Mapping[str, Tensor]
) -> Generator[tuple[Handle[Any], str], None, dict[str, Tensor]]:
    """Return copies of all tensors on every rank; a collective call, tensors go one after another."""
    result: dict[str, Tensor] = {}
    for index, item in enumerate(items):
        what = f"sharing '{item.name}'"
        if item.owner == transport.rank:
            tensor = mine[item.name].detach().clone(memory_format=torch.contiguous_format)
            for peer in range(transport.world_size):
                if peer != item.owner:
                    transport.send(tensor, peer, _TAG + index)
        else:
            handle = transport.recv(item.shape, item.dtype, transport.device, item.owner, _TAG + index)
            tensor = yield from result_of(handle, what)
        result[item.name] = tensor
    transport.drain("sharing state")
    return result
