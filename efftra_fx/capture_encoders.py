"""Transformer encoders in eval mode, which give zeros where their mask pads.

Where nothing is differentiated, `nn.TransformerEncoder` drops what a `src_key_padding_mask` pads (its fast path,
on nested tensors) and fills it up with zeros before its last norm, unless a row is padded in the middle. An
exporter sees the slow path alone, which computes something there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def padding_zeroed(differentiated: bool) -> Iterator[None]:
    """While this lasts, encoders in eval mode give what their fast path gives, by operators that a graph can hold."""
    original: Any = nn.TransformerEncoder.forward

    def forward(
        self: Any,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        padding = src_key_padding_mask
        if padding is None or mask is not None or not _is_fast(self, src, differentiated) or _is_cut(self, padding):
            plain: Tensor = original(self, src, mask, src_key_padding_mask, is_causal)
            return plain
        norm, self.norm = self.norm, None
        try:
            out: Tensor = original(self, src, mask, src_key_padding_mask, is_causal)
        finally:
            self.norm = norm
        out = out.masked_fill((padding != 0).unsqueeze(-1), 0.0)
        return out if norm is None else norm(out)

    nn.TransformerEncoder.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.TransformerEncoder.forward = original  # type: ignore[method-assign]


def _is_fast(encoder: Any, src: Tensor, differentiated: bool) -> bool:
    """Say whether an encoder drops padding, its mask apart."""
    first = encoder.layers[0]
    if first.training or src.dim() != 3 or not getattr(encoder, "use_nested_tensor", False):
        return False
    if not torch.backends.mha.get_fastpath_enabled() or torch.is_autocast_enabled():
        return False
    return not (differentiated and (src.requires_grad or any(p.requires_grad for p in first.parameters())))


def _is_cut(encoder: Any, padding: Tensor) -> bool:
    """Say whether a row is padded before its end; that is a question for values."""
    if not getattr(encoder, "mask_check", True):
        return False
    padded = padding != 0
    return bool((padded[:, :-1] & ~padded[:, 1:]).any())


__all__ = ["padding_zeroed"]
