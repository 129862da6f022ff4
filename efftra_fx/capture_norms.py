"""Norms that keep averages of all batches so far, written so that a graph can say it.

`BatchNorm` with `momentum=None` takes the number of batches that it has seen as a Python number, which a
captured graph would keep as it was. The same average, with the number as a tensor:

    n = n + 1    average = average · (1 - 1/n) + statistics of this batch · 1/n

`InstanceNorm` with running statistics writes them through an alias that an exporter loses. They are
averages of the means over rows.

`SyncBatchNorm` exchanges statistics by itself, wherever it is called. In a captured step it is a batch norm
whose statistics are those of all replicas.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm


def syncs_norms(*models: nn.Module) -> bool:
    """Say whether a model has a norm that wants the statistics of all replicas."""
    return any(isinstance(module, nn.SyncBatchNorm) for model in models for module in model.modules())


@contextmanager
def norms_of_one_device() -> Iterator[None]:
    """While this lasts, `SyncBatchNorm` does not talk to other processes: it is what it is on one device.

    What a captured step exchanges between replicas is the plan's business.
    """
    original: Any = nn.SyncBatchNorm.forward
    nn.SyncBatchNorm.forward = lambda self, input: _BatchNorm.forward(self, input)  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.SyncBatchNorm.forward = original  # type: ignore[method-assign]


@contextmanager
def averages_of_all_batches() -> Iterator[None]:
    """While this lasts, such norms compute their running averages with tensors alone, and write them in place."""
    original: Any = _BatchNorm.forward
    alone: Any = _InstanceNorm._apply_instance_norm

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

    def apply_instance_norm(self: Any, input: Tensor) -> Tensor:
        if not self.training or self.running_mean is None:
            plain: Tensor = alone(self, input)
            return plain
        share, pixels = self.momentum or 0.0, list(range(2, input.ndim))
        with torch.no_grad():
            mean, variance = input.mean(pixels).mean(0), input.var(pixels).mean(0)
            self.running_mean.copy_(self.running_mean * (1.0 - share) + mean * share)
            self.running_var.copy_(self.running_var * (1.0 - share) + variance * share)
        return torch.nn.functional.instance_norm(input, None, None, self.weight, self.bias, True, share, self.eps)

    _BatchNorm.forward = forward  # type: ignore[method-assign]
    _InstanceNorm._apply_instance_norm = apply_instance_norm  # type: ignore[method-assign]
    try:
        yield
    finally:
        _BatchNorm.forward = original  # type: ignore[method-assign]
        _InstanceNorm._apply_instance_norm = alone  # type: ignore[method-assign]


__all__ = ["averages_of_all_batches", "norms_of_one_device", "syncs_norms"]
