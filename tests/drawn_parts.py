"""What drawn layers are made of: what a batch has besides hidden values, and a function as a layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

WIDTH, WORDS = 6, 9


class Side(NamedTuple):
    """What a batch has besides its words: words, which of them count, how many, a table without rows, noise."""

    ids: Tensor
    mask: Tensor | None
    lengths: Tensor
    table: Tensor
    noise: Tensor


class Layer(nn.Module):
    """A function of the hidden values and the batch, with modules, parameters and buffers of its own."""

    def __init__(self, function: Callable[..., Any], *parts: nn.Module, **tensors: Tensor) -> None:
        super().__init__()
        self.function, self.parts = function, nn.ModuleList(parts)
        for name, tensor in tensors.items():
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(name, tensor)
            else:
                self.register_buffer(name, tensor)

    def forward(self, h: Tensor, side: Side) -> Any:
        return self.function(self, h, side)


def linear(inputs: int = WIDTH, outputs: int = WIDTH) -> nn.Linear:
    return nn.Linear(inputs, outputs)


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) * 0.4)
