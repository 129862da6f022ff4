"""Norms that keep a plain average of all batches so far, written so that a graph can say it.

`BatchNorm` with `momentum=None` takes the number of batches that it has seen as a Python number, which a
captured graph would keep as it was. The same average, with the number as a tensor:

    n = n + 1    average = average · (1 - 1/n) + statistics of this batch · 1/n
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm


@contextmanager
def averages_of_all_batches() -> Iterator[None]:
    """While this lasts, batch norms without a momentum compute their running averages with tensors alone."""
    original: Any = _BatchNorm.forward

    def forward(self: Any, input: Tensor) -> Tensor:
        if self.momentum is not None or not (self.training and self.track_running_stats):
            plain: Tensor = original(self, input)
            return plain
        self._check_input_dim(input)
        self.num_batches_tracked.add_(1)
        share = 1.0 / self.num_batches_tracked.to(self.running_mean.dtype)
        mean, variance = torch.zeros_like(self.running_mean), torch.zeros_like(self.running_var)
        out = torch.nn.functional.batch_norm(input, mean, variance, self.weight, self.bias, True, 1.0, self.eps)
        self.running_mean.copy_(self.running_mean * (1.0 - share) + mean * share)
        self.running_var.copy_(self.running_var * (1.0 - share) + variance * share)
        return out

    _BatchNorm.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        _BatchNorm.forward = original  # type: ignore[method-assign]


__all__ = ["averages_of_all_batches"]
