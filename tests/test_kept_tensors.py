"""What forward keeps on modules for the next call, under batches of several lengths."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from efftra_fx import Cluster, compile


class Keeps(nn.Module):
    """Makes a table the first time that a long batch comes, and keeps it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.inner(x))
        if x.shape[1] > 4:
            if not hasattr(self, "table"):
                self.table = torch.arange(4, dtype=x.dtype) / 4
            x = x * self.table
        result: Tensor = self.head(x).mean(1)
        return result


def test_a_tensor_that_forward_first_keeps_at_a_new_length_is_a_real_one() -> None:
    torch.manual_seed(0)
    model = Keeps().double()
    twin = copy.deepcopy(model)
    target = torch.tensor([0, 1, 2, 0, 1, 2])
    batches = [torch.randn(6, length, 4).double() for length in (3, 7, 9)]
    program = compile(
        model, Cluster.local(2), example_inputs=(batches[0],), example_target=target, loss_fn=F.cross_entropy,
        costs="estimated", stages=1, replicas=(2,), micro_batches=1,
    )  # fmt: skip
    for x in batches:
        expected = float(F.cross_entropy(twin(x), target).detach())
        assert abs(float(program.step(x, target=target)) - expected) < 1e-12
    assert not hasattr(model, "table") or type(model.table) is Tensor
