"""Means over the batch become sums and counts; other means stay what they are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from habits import ROWS, Net, classes, features
from torch import Tensor, fx

from efftra_fx.captured import Captured
from efftra_fx.meta import ROLE
from efftra_fx.passes.means import SeparateMeans, argument
from efftra_fx.signature import read_call
from efftra_fx.trace import capture

aten = torch.ops.aten
WEIGHTS = torch.tensor([0.2, 0.5, 2.0], dtype=torch.float64)


def captured(loss: Callable[[Tensor, Tensor], Tensor], target: Tensor) -> tuple[Captured, list[Tensor]]:
    """Capture a small network's step with this loss."""
    torch.manual_seed(0)
    model = Net().double()
    call, tensors = read_call(model.forward, (features(),), {}, target)
    found = capture(model, call, tensors, (0, 0), loss)
    source = iter(tensors)
    own = dict(model.named_parameters())
    operands: list[Tensor] = []
    for node in found.gm.graph.nodes:
        if node.op == "placeholder":
            role = ROLE[node]
            held = {"parameter": own.get(role.name), "constant": WEIGHTS}.get(role.kind)
            operands.append(next(source) if held is None else held)
    return found, operands


def _ignored() -> Tensor:
    target = classes()
    target[:3] = -100
    return target


LOSSES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Callable[[], Tensor]]] = {
    "mean": (lambda o, t: (o - t).abs().mean(), lambda: features(3)),
    "mean of rows' means": (lambda o, t: (o - t).mean(1).mean(0), lambda: features(3)),
    "squares": (F.mse_loss, lambda: features(3)),
    "smooth": (F.smooth_l1_loss, lambda: features(3)),
    "classes": (F.cross_entropy, classes),
    "ignored": (F.cross_entropy, _ignored),
    "weights": (lambda o, t: F.cross_entropy(o, t, weight=WEIGHTS.clone()), _ignored),
    "shares": (F.cross_entropy, lambda: features(3).softmax(-1)),
}


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_sum_and_count_give_the_same_mean(name: str) -> None:
    loss, target = LOSSES[name]
    torch.manual_seed(1)
    found, operands = captured(loss, target())
    before = found.gm(*operands)[0]
    after = SeparateMeans((0, 0))(found.gm)(*operands)[0]
    assert torch.allclose(before, after, rtol=1e-12)


def _targets(gm: fx.GraphModule) -> list[object]:
    return [n.target for n in gm.graph.nodes if n.op == "call_function"]


def test_no_mean_over_rows_is_left() -> None:
    found, _ = captured(lambda o, t: o.mean() + F.mse_loss(o, t), features(3))
    left = _targets(SeparateMeans((0, 0))(found.gm))
    assert aten.mean.default not in left
    reductions = [argument(n, "reduction") for n in found.gm.graph.nodes if n.target is aten.mse_loss.default]
    assert reductions == [2]


def test_a_mean_inside_a_row_is_left_alone() -> None:
    found, _ = captured(lambda o, t: (o.mean(1) * t[:, 0]).sum(), features(3))
    assert aten.mean.dim in _targets(SeparateMeans((0, 0))(found.gm))


def test_the_count_is_that_of_the_rows_at_hand() -> None:
    found, operands = captured(F.mse_loss, features(3))
    gm = SeparateMeans((0, 0))(found.gm)
    fewer = [t[:3] if t.ndim and t.shape[0] == ROWS else t for t in operands]
    assert torch.isfinite(gm(*fewer)[0])
    assert any(n.target is aten.sym_size.int for n in gm.graph.nodes)
