"""Random models: chains, skips and branches of many kinds of layers and habits, with a batch for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from habits import Experts, Habit, triple
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrizations

WIDTH, LENGTH = 6, 4


class Function(nn.Module):
    """A function of the hidden values as a layer, with layers of its own."""

    def __init__(self, function: Callable[..., Tensor], *parts: nn.Module) -> None:
        super().__init__()
        self.function, self.parts = function, nn.ModuleList(parts)

    def forward(self, h: Tensor) -> Tensor:
        out: Tensor = self.function(h, *self.parts)
        return out


def _linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def _no_grad(h: Tensor, layer: nn.Module) -> Tensor:
    with torch.no_grad():
        scale: Tensor = layer(h).sigmoid()
    return h * scale


def _in_place(h: Tensor) -> Tensor:
    out = h.clone()
    out[:, 0] += 1
    out[..., 1:3].mul_(2)
    return out


def _recurrent(h: Tensor, cell: nn.Module) -> Tensor:
    state: Tensor = torch.zeros_like(h[:, 0])
    states = []
    for step in range(LENGTH):
        state = cell(h[:, step], state)
        states.append(state)
    stacked: Tensor = torch.stack(states, 1)
    return stacked


def _attention(h: Tensor, qkv: nn.Module) -> Tensor:
    q, k, v = qkv(h).chunk(3, -1)
    out: Tensor = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return out


def _frozen() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH).requires_grad_(False)


# Every layer takes and gives values of shape [rows, LENGTH, WIDTH].
LAYERS: Mapping[str, Callable[[], nn.Module]] = {
    "linear": _linear,
    "no bias": lambda: nn.Linear(WIDTH, WIDTH, bias=False),
    "bottleneck": lambda: nn.Sequential(nn.Linear(WIDTH, 2), nn.ReLU(), nn.Linear(2, WIDTH)),
    "frozen": _frozen,
    "layer norm": lambda: nn.LayerNorm(WIDTH),
    "rms norm": lambda: nn.RMSNorm(WIDTH),
    "group norm": lambda: nn.GroupNorm(2, LENGTH),
    "instance norm": lambda: nn.InstanceNorm1d(LENGTH, affine=True),
    "batch norm, fixed": lambda: nn.BatchNorm1d(LENGTH).eval(),
    "convolution": lambda: nn.Conv1d(LENGTH, LENGTH, 3, padding=1),
    "depthwise": lambda: nn.Conv1d(LENGTH, LENGTH, 3, padding=1, groups=LENGTH),
    "transposed convolution": lambda: nn.ConvTranspose1d(LENGTH, LENGTH, 3, padding=1),
    "pool and upsample": lambda: Function(lambda h: F.interpolate(F.avg_pool1d(h, 2), scale_factor=2.0)),
    "max pool": lambda: nn.MaxPool1d(3, 1, 1),
    "attention": lambda: Function(_attention, nn.Linear(WIDTH, 3 * WIDTH)),
    "multi-head": lambda: Function(
        lambda h, m: m(h, h, h, need_weights=False)[0], nn.MultiheadAttention(WIDTH, 2, batch_first=True)
    ),
    "transformer": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True),
    "lstm": lambda: Function(lambda h, m: m(h)[0], nn.LSTM(WIDTH, WIDTH, batch_first=True)),
    "gru": lambda: Function(lambda h, m: m(h)[0], nn.GRU(WIDTH, WIDTH, batch_first=True)),
    "cell in a loop": lambda: Function(_recurrent, nn.GRUCell(WIDTH, WIDTH)),
    "bilinear": lambda: Function(lambda h, m: m(h, h), nn.Bilinear(WIDTH, WIDTH, WIDTH)),
    "prelu": nn.PReLU,
    "gelu": nn.GELU,
    "hardswish": nn.Hardswish,
    "softmax": lambda: nn.Softmax(-1),
    "no dropout": lambda: nn.Dropout(0.0),
    "no_grad": lambda: Function(_no_grad, _linear()),
    "detach": lambda: Function(lambda h: h + 2 * h.detach()),
    "custom function": lambda: Function(lambda h: triple(h, 0.5)),
    "value-dependent experts": lambda: Function(lambda h, m: m(h.flatten(0, 1)).view_as(h), Experts(WIDTH)),
    "squeeze and excite": lambda: Function(lambda h, m: h * m(h.mean(1, keepdim=True)).sigmoid(), _linear()),
    "in place": lambda: Function(_in_place),
    "transposed": lambda: Function(lambda h, m: m(h.transpose(0, 1)).transpose(0, 1), _linear()),
    "roll and flip": lambda: Function(lambda h: h.roll(1, 1) + h.flip(2)),
    "split and cat": lambda: Function(lambda h: torch.cat([p * (i + 1) for i, p in enumerate(h.split(2, -1))], -1)),
    "gather": lambda: Function(lambda h: h.gather(1, h.argsort(1))),
    "where": lambda: Function(lambda h: torch.where(h > 0, h, 0.1 * h)),
    "cumsum": lambda: Function(lambda h: h.cumsum(1) / LENGTH),
    "einsum": lambda: Function(lambda h, m: torch.einsum("bti,ij->btj", h, m.weight), _linear()),
    "complex": lambda: Function(lambda h: torch.fft.irfft(torch.fft.rfft(h, dim=-1) * 1j, n=WIDTH, dim=-1)),
    "weight norm": lambda: parametrizations.weight_norm(_linear()),
    "spectral": lambda: Function(lambda h, m: m(h), parametrizations.orthogonal(_linear())),
    "number of rows": lambda: Function(lambda h: h / len(h)),
}


class Composed(nn.Module):
    """Layers in a row, each plain, as a residual, or joined to an earlier value; some are used a second time."""

    def __init__(self, names: list[str], ways: list[int], again: list[bool]) -> None:
        super().__init__()
        self.stem = nn.Embedding(9, WIDTH)
        self.layers = nn.ModuleList(LAYERS[name]() for name in names)
        self.ways, self.again = ways, again
        self.head = nn.Linear(WIDTH, 9)
        self.head.weight = self.stem.weight

    def forward(self, ids: Tensor) -> Tensor:
        h = self.stem(ids)
        kept = h
        for layer, way, again in zip(self.layers, self.ways, self.again, strict=True):
            out = layer(h)
            if again:
                out = layer(torch.tanh(out))
            h = out if way == 0 else h + out if way == 1 else kept + torch.tanh(out)
            kept = h if way == 0 else kept
        scores: Tensor = self.head(torch.tanh(h))
        return scores.flatten(0, 1)


def token_loss(kind: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a loss over tokens: a mean, a mean over some of them, or one that needs the whole batch."""
    if kind == 0:
        return lambda o, t: F.cross_entropy(o, t.flatten())
    if kind == 1:
        return lambda o, t: F.cross_entropy(o, t.flatten(), ignore_index=2, label_smoothing=0.1)
    return lambda o, t: F.cross_entropy(o, t.flatten()).sqrt() + o.pow(2).mean()


@st.composite
def models(draw: Any) -> Habit:
    """Draw a model in float64, with a batch of its own."""
    names = draw(st.lists(st.sampled_from(sorted(LAYERS)), min_size=1, max_size=5))
    ways = [draw(st.integers(0, 2)) for _ in names]
    again = [draw(st.booleans()) for _ in names]
    rows = draw(st.integers(3, 7))
    torch.manual_seed(draw(st.integers(0, 99)))
    model = Composed(names, ways, again).double()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.eval()
    ids = torch.randint(0, 9, (rows, LENGTH))
    return Habit(model, (ids,), ids.roll(1, 1), token_loss(draw(st.integers(0, 2))), tolerance=1e-8)
