"""Drawn layers: each a habit of people who write models, in a few lines; a drawn model is a sequence of them.

Each takes hidden values `[rows, length, WIDTH]` and what the batch has besides (`Side`), and gives hidden values, or
these and a part of the loss. Sizes come from a number between 2 and 4.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from drawn_asking import ASKING
from drawn_gradients import GRADIENTS, WEIGHTS
from drawn_parts import WIDTH, WORDS, Layer, Side, linear, weight
from drawn_together import BUFFERS, TOGETHER
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence


def masked_attention(m: Any, h: Tensor, side: Side) -> Any:
    q, k, v = (part(h).unflatten(-1, (2, -1)).transpose(1, 2) for part in m.parts)
    mask = None if side.mask is None else side.mask[:, None, None, :]
    out: Tensor = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return out.transpose(1, 2).flatten(2)


def biased_attention(m: Any, h: Tensor, side: Side) -> Any:
    length = h.shape[1]
    away = (torch.arange(length)[:, None] - torch.arange(length)[None]).abs()
    return F.scaled_dot_product_attention(h, m.parts[0](h), h, attn_mask=-m.slope.exp() * away)


def multi_head(m: Any, h: Tensor, side: Side) -> Any:
    hidden = None if side.mask is None else ~side.mask
    return m.parts[0](h, h, h, key_padding_mask=hidden, need_weights=False)[0]


def encoder(m: Any, h: Tensor, side: Side) -> Any:
    return m.parts[0](h, src_key_padding_mask=None if side.mask is None else ~side.mask)


def packed(m: Any, h: Tensor, side: Side) -> Any:
    states, _ = m.parts[0](pack_padded_sequence(h, side.lengths, batch_first=True, enforce_sorted=False))
    return pad_packed_sequence(states, batch_first=True, total_length=h.shape[1])[0]


def last_states(m: Any, h: Tensor, side: Side) -> Any:
    states, (hidden, _) = m.parts[0](h.transpose(0, 1))
    last = states.transpose(0, 1)[torch.arange(h.shape[0]), side.lengths - 1]
    return h + last[:, None] * hidden[-1].unsqueeze(1)


def images(m: Any, h: Tensor, side: Side) -> Any:
    picture = h.unsqueeze(1).contiguous(memory_format=torch.channels_last)
    return m.parts[1](m.parts[0](picture).relu()).squeeze(1)


def resized(m: Any, h: Tensor, side: Side) -> Any:
    larger = F.interpolate(h.unsqueeze(1), size=(2 * h.shape[1], WIDTH), mode="bilinear", align_corners=False)
    return F.adaptive_avg_pool2d(larger, (h.shape[1], WIDTH))[:, 0]


def looked_up(m: Any, h: Tensor, side: Side) -> Any:
    return h + m.w[side.ids % len(m.w)] + side.table[h.argmax(-1) % len(side.table)]


def tokens_apart(m: Any, h: Tensor, side: Side) -> Any:
    batch, length, width = h.shape
    assert width == WIDTH, f"width {width} of {h.shape} is not {WIDTH}"
    flat: Tensor = m.parts[0](h.reshape(batch * length, width))
    return flat.view(batch, length, -1) + torch.arange(batch * length).view(batch, length, 1) * 0.0


def by_place(m: Any, h: Tensor, side: Side) -> Any:
    rows = torch.arange(h.size(0)).unsqueeze(1)
    order = side.ids.argsort(1)
    return h[rows, order] + h.new_zeros(h.shape[0], 1, 1).expand(-1, h.shape[1], -1)


def scattered(m: Any, h: Tensor, side: Side) -> Any:
    sums = torch.zeros(len(h), WORDS, WIDTH, dtype=h.dtype)
    index = side.ids[..., None].expand(-1, -1, WIDTH)
    sums = sums.scatter_add(1, index, h).scatter_reduce(1, index, h.detach() * 0.1, "amax")
    return sums.gather(1, index)


def best(m: Any, h: Tensor, side: Side) -> Any:
    value, where = h.topk(3, -1)
    ordered, order = h.sort(1, descending=True)
    return ordered + torch.zeros_like(h).scatter(-1, where, value) + h.gather(1, order)


def windows(m: Any, h: Tensor, side: Side) -> Any:
    padded = F.pad(h, (0, 0, 1, 1))
    return m.parts[0](padded.unfold(1, 3, 1).flatten(2))


def rotated(m: Any, h: Tensor, side: Side) -> Any:
    angle = torch.arange(h.shape[1], dtype=h.dtype)[:, None] / 10 ** torch.arange(WIDTH // 2, dtype=h.dtype)
    pairs = torch.view_as_complex(h.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).flatten(-2)


class Cached(nn.Module):
    """A causal mask that is made at the first call, and kept."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()
        self.mask: Tensor | None = None

    def forward(self, h: Tensor, side: Side) -> Tensor:
        length = h.shape[1]
        if self.mask is None or self.mask.shape[0] < length:
            self.mask = torch.ones(length, length, dtype=torch.bool).tril()
        scores = self.layer(h) @ h.transpose(1, 2)
        weights: Tensor = scores.masked_fill(~self.mask[:length, :length], float("-inf")).softmax(-1)
        return weights @ h


def in_place(m: Any, h: Tensor, side: Side) -> Any:
    out = m.parts[0](h)
    first = out[..., :2]
    first.mul_(2).add_(h[..., :2])
    first[:, -1] = 0
    out.masked_fill_(side.ids.eq(3)[..., None], 0.5)
    out[:, 0].index_add_(-1, torch.tensor([0, 1]), h[:, 0, :2])
    return out


def kept_apart(m: Any, h: Tensor, side: Side) -> Any:
    chosen, spectrum, order = h > 0, torch.fft.fft(h, dim=-1), h.argsort(-1)
    h = m.parts[0](h).tanh()
    h = torch.where(chosen, h, h.gather(-1, order))
    return torch.fft.ifft(spectrum * torch.fft.fft(h, dim=-1), dim=-1).real / WIDTH


def solved(m: Any, h: Tensor, side: Side) -> Any:
    gram = h.transpose(1, 2) @ h + torch.eye(WIDTH, dtype=h.dtype)
    return torch.linalg.solve(gram, h.transpose(1, 2)).transpose(1, 2)


def mixed(m: Any, h: Tensor, side: Side) -> Any:
    return torch.einsum("bti,bsi,bsj->btj", h, m.parts[0](h), h) / h.shape[1]


def chunked(m: Any, h: Tensor, side: Side) -> Any:
    return torch.cat([m.parts[0](part) for part in h.split(2)])


def bags(m: Any, h: Tensor, side: Side) -> Any:
    return h + m.parts[0](side.ids)[:, None]


def steps_left(m: Any, h: Tensor, side: Side) -> Any:
    state, out = h[:, 0], []
    for place in range(h.shape[1]):
        state = torch.tanh(m.parts[0](state) + h[:, place])
        out.append(state)
    return torch.stack(out, dim=1)


def reduced(m: Any, h: Tensor, side: Side) -> Any:
    deviation, mean = torch.std_mean(h, dim=1, keepdim=True)
    middle = h.median(1, keepdim=True).values + h.kthvalue(2, dim=-1, keepdim=True).values
    return (h - mean) / (0.1 + deviation) + middle * h.norm(dim=-1, keepdim=True) + h.logcumsumexp(1) + h.cummax(1)[0]


def near(m: Any, h: Tensor, side: Side) -> Any:
    away = torch.cdist(h + 0.01 * side.noise, m.w)
    near = F.cosine_similarity(h.unsqueeze(2), m.w, dim=-1)
    return (near / (1 + away)) @ m.w + F.pairwise_distance(h, side.noise, keepdim=True)


def in_bins(m: Any, h: Tensor, side: Side) -> Any:
    edges = torch.tensor([-1.0, 0.0, 0.5], dtype=h.dtype)
    return h + m.w[torch.bucketize(h.detach(), edges)] + F.one_hot(side.ids % 3, 3).to(h.dtype).repeat(1, 1, 2)


def without_padding(m: Any, h: Tensor, side: Side) -> Any:
    if side.mask is None:
        return m.parts[0](h)
    return m.parts[0](h) * side.mask.unsqueeze(-1) + h.masked_fill(side.mask[..., None], 0.0)


def sampled(m: Any, h: Tensor, side: Side) -> Any:
    grid = torch.stack([h.tanh(), side.noise.tanh()], -1)
    return F.grid_sample(side.noise.unsqueeze(1), grid, align_corners=True)[:, 0] + m.parts[0](h)


def in_training(m: Any, h: Tensor, side: Side) -> Any:
    return (m.parts[0](h), h.pow(2).mean() * 0.1) if m.training else m.parts[0](h) + 0.5


def cast(m: Any, h: Tensor, side: Side) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = m.parts[0](h)
        with torch.autocast("cpu", enabled=False):
            return out + m.parts[0](h.tanh())


OPERATORS: Mapping[str, Callable[[int], nn.Module]] = {
    "linear": lambda n: Layer(lambda m, h, side: m.parts[0](h), linear()),
    "masked attention": lambda n: Layer(masked_attention, *(linear() for _ in range(3))),
    "biased attention": lambda n: Layer(biased_attention, linear(), slope=weight(1)),
    "padded attention": lambda n: Layer(multi_head, nn.MultiheadAttention(WIDTH, 2, batch_first=True)),
    "packed": lambda n: Layer(packed, nn.GRU(WIDTH, WIDTH, batch_first=True)),
    "last states": lambda n: Layer(last_states, nn.LSTM(WIDTH, WIDTH)),
    "a cell in a loop": lambda n: Layer(steps_left, linear()),
    "images": lambda n: Layer(images, nn.Conv2d(1, n, 3, padding=1), nn.Conv2d(n, 1, 3, padding=1)),
    "resized": lambda n: Layer(resized),
    "looked up": lambda n: Layer(looked_up, w=weight(n, WIDTH)),
    "tokens apart": lambda n: Layer(tokens_apart, linear()),
    "by place": lambda n: Layer(by_place),
    "scattered": lambda n: Layer(scattered),
    "best": lambda n: Layer(best),
    "windows": lambda n: Layer(windows, linear(3 * WIDTH)),
    "rotated": lambda n: Layer(rotated),
    "a mask that is kept": lambda n: Cached(),
    "in place": lambda n: Layer(in_place, linear()),
    "other dtypes": lambda n: Layer(kept_apart, linear()),
    "solved": lambda n: Layer(solved),
    "mixed": lambda n: Layer(mixed, linear()),
    "two rows at a time": lambda n: Layer(chunked, linear()),
    "reduced": lambda n: Layer(reduced),
    "near": lambda n: Layer(near, w=weight(n, WIDTH)),
    "in bins": lambda n: Layer(in_bins, w=weight(4)),
    "without padding": lambda n: Layer(without_padding, linear()),
    "sampled": lambda n: Layer(sampled, linear()),
    "in training": lambda n: Layer(in_training, linear()),
    "cast": lambda n: Layer(cast, linear()),
    "an encoder": lambda n: Layer(encoder, nn.TransformerEncoderLayer(WIDTH, 2, 4 * n, 0.0, batch_first=True)),
    "bags of words": lambda n: Layer(bags, nn.EmbeddingBag(WORDS, WIDTH, mode="mean")),
}


DRAWN: Mapping[str, Callable[[int], nn.Module]] = {
    **ASKING,
    **BUFFERS,
    **TOGETHER,
    **WEIGHTS,
    **GRADIENTS,
    **OPERATORS,
}
