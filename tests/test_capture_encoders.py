"""A transformer encoder says in eval mode what its fast path says: zeros where its mask pads."""

from __future__ import annotations

import pytest
import torch
from against_eager import assert_matches, compiled
from habits import ROWS, WIDTH, Habit, classes, cross_entropy, features
from torch import Tensor, nn

from efftra_fx.capture_encoders import padding_zeroed


class Encoded(nn.Module):
    """The mean over all places of what an encoder gives, those that are padded too."""

    def __init__(self, normed: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, nn.LayerNorm(WIDTH) if normed else None)
        self.out = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        out: Tensor = self.out(self.encoder(x, src_key_padding_mask=padding).mean(1))
        return out


def padding(*cut: int) -> Tensor:
    """Return a mask that pads some rows at their ends, and these in the middle."""
    mask = torch.arange(5)[None] >= torch.tensor([5, 3, 4, 5, 2, 5, 4])[:, None]
    for row in cut:
        mask[row, 0] = True
    return mask


def evaluated(model: nn.Module, x: Tensor, mask: Tensor) -> Tensor:
    """Return what the plain model says in eval mode."""
    modes = [module.training for module in model.modules()]
    with torch.no_grad():
        out: Tensor = model.eval()(x, mask)
    for module, mode in zip(model.modules(), modes, strict=True):
        module.training = mode
    return out


@pytest.mark.parametrize("normed", [False, True])
def test_what_is_padded_is_zero_unless_a_row_is_padded_in_the_middle(normed: bool) -> None:
    torch.manual_seed(3)
    model, x = Encoded(normed).double(), features(5, WIDTH)
    program = compiled(Habit(model, (x, padding()), classes(), cross_entropy), stages=2, micro_batches=2)
    for mask in (padding(), padding(1), padding(), padding()[:, :].float().masked_fill(padding(), float("-inf"))):
        mask = mask.to(x.dtype) if mask.is_floating_point() else mask
        torch.testing.assert_close(program.evaluate(x, mask), evaluated(model, x, mask), rtol=1e-9, atol=1e-12)


def test_a_frozen_encoder_in_eval_mode_does_so_in_training_too() -> None:
    torch.manual_seed(3)
    model = Encoded(True).double()
    model.encoder.eval().requires_grad_(False)
    assert len(padding()) == ROWS
    assert_matches(Habit(model, (features(5, WIDTH), padding()), classes(), cross_entropy), plans=(((2, 1), 3),))


def test_an_encoder_in_training_is_left_alone() -> None:
    torch.manual_seed(3)
    model, x = Encoded(True).double(), features(5, WIDTH)
    plain = model(x, padding())
    with padding_zeroed(True):
        assert torch.equal(model(x, padding()), plain)
    assert nn.TransformerEncoder.forward.__module__ == "torch.nn.modules.transformer"
