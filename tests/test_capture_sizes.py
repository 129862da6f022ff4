"""Functions that take sizes as numbers in C++ leave the number of rows open, and compute what they do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from against_eager import compiled, one_device, step
from habits import ROWS, WIDTH, plain
from torch import Tensor

from efftra_fx.capture_sizes import kron, multi_dot, take_along_dim

BETWEEN: Mapping[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "take_along_dim": (
        lambda m, h, order: torch.take_along_dim(h, order, 1) + torch.take_along_dim(h, order[:, :1], dim=-1),
        (torch.stack([torch.randperm(WIDTH) for _ in range(ROWS)]),),
    ),
    "take_along_dim, broadcast": (
        lambda m, h, order: h[:, None].take_along_dim(order[:, None, :, None].expand(-1, 1, -1, WIDTH)[..., 0], 2)[
            :, 0
        ],
        (torch.stack([torch.randperm(WIDTH) for _ in range(ROWS)]),),
    ),
    "kron": (lambda m, h: torch.kron(h, torch.tensor([[1.0, 2.0]]).double())[:, ::2], ()),
    "fill_diagonal_": (lambda m, h: h @ (h.T @ h).fill_diagonal_(0.0), ()),
    "multi_dot": (lambda m, h: torch.linalg.multi_dot([h, m.b.weight, m.b.weight.T]), ()),
}


@pytest.mark.parametrize("name", BETWEEN)
def test_the_number_of_rows_stays_open(name: str) -> None:

    between, more = BETWEEN[name]
    habit = plain(between, *more)
    loss, gradients = one_device(habit)
    program = compiled(habit, replicas=(2, 1), stages=2, micro_batches=3)
    found, ours = step(program, habit)
    torch.testing.assert_close(found, loss, rtol=1e-9, atol=1e-12)
    for key, gradient in gradients.items():
        torch.testing.assert_close(ours[key], gradient, rtol=1e-9, atol=1e-12, msg=key)


def test_they_compute_the_same() -> None:
    x, i = torch.randn(3, 4, 5), torch.randint(0, 4, (1, 2, 5))
    cases: list[tuple[Any, Any]] = [
        (take_along_dim(x, i, 1), torch.take_along_dim(x, i, 1)),
        (take_along_dim(x, i, -2), torch.take_along_dim(x, i, -2)),
        (take_along_dim(x, i), torch.take_along_dim(x, i)),
        (kron(x, i[0]), torch.kron(x, i[0])),
        (kron(i[0], x), torch.kron(i[0], x)),
        (multi_dot([x[0, 0], x[0].T, x[0]]), torch.linalg.multi_dot([x[0, 0], x[0].T, x[0]])),
    ]
    for found, expected in cases:
        torch.testing.assert_close(found, expected)
    with pytest.raises(RuntimeError, match="same number of dimensions"):
        take_along_dim(x, i[0], 1)
