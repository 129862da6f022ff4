"""Values that are put into a trace are those that its operators give at these sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import efftra_fx.varying
from efftra_fx.signature import read_call
from efftra_fx.varying import Varying, capture_varying, named_state, specialise


class Windows(nn.Module):
    """Slices, strides, windows, padding and attention over any length, transposed in between."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.qkv, self.conv = nn.Embedding(9, 6), nn.Linear(6, 18), nn.Conv1d(6, 6, 3, stride=2, padding=1)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.table(ids)
        half = nn.functional.interpolate(self.conv(h.transpose(1, 2)), size=h.shape[1]).transpose(1, 2)
        q, k, v = self.qkv(h + half).chunk(3, -1)
        mixed = nn.functional.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0]
        around = nn.functional.pad(mixed, (0, 0, 1, 1)).unfold(1, 3, 1).mean(-1)
        out: Tensor = (around[:, ::2].sum((1, 2)) / ids.shape[1] + h[:, 1:].flatten(1).mean(1)).square().mean()
        return out


def layouts(gm: fx.GraphModule) -> list[Any]:
    """Return what every node is, its arguments, and the layout of its value, rows written as a letter."""
    found: list[Any] = []
    for node in gm.graph.nodes:
        values = node.meta.get("val") if node.op != "output" else None
        several = values if isinstance(values, (tuple, list)) else (values,)
        described = [
            (str(v.dtype), str(v.device), *_plain(v.shape), *_plain(v.stride()), *_plain([v.storage_offset()]))
            if isinstance(v, Tensor)
            else _plain([v])
            for v in several
        ]
        found.append((node.op, str(node.target), str(node.args), described))
    return found


def _plain(sizes: Any) -> tuple[str, ...]:
    return tuple(str(size) for size in sizes)


@pytest.fixture(scope="module")
def varying() -> tuple[nn.Module, Varying]:
    torch.manual_seed(0)
    model = Windows()
    call, tensors = read_call(model.forward, (torch.randint(0, 9, (6, 8)),), {}, None)
    found = capture_varying(model, call, tensors, (0,), ((1,),), None)
    assert isinstance(found, Varying), found
    return model, found


@pytest.mark.parametrize("length", [5, 6, 11])
def test_they_are_those_that_running_every_operator_gives(
    varying: tuple[nn.Module, Varying], length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, trace = varying
    call, tensors = read_call(model.forward, (torch.randint(0, 9, (6, length)),), {}, None)
    values = named_state(model, None)
    put = specialise(trace, call, tensors, values)
    monkeypatch.setattr(efftra_fx.varying, "_sizes", lambda *_: None)
    run = specialise(trace, call, tensors, values)
    assert layouts(put.gm) == layouts(run.gm)
    assert any("s" in "".join(map(str, one[3])) for one in layouts(put.gm))  # the rows are a symbol still
