"""Small models of many habits, each to be cut over tensor groups: what is written by hand in other people's code."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WORDS, WIDTH, HEADS, LENGTH, ROWS = 37, 24, 6, 7, 5
SIZE = WIDTH // HEADS
Loss = Callable[[Any, Tensor], Tensor]


class Made(nn.Module):
    """Modules and parameters by name, and a function of them and the input; `head` gives the logits."""

    def __init__(self, function: Callable[..., Any], head: bool = True, **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, nn.Parameter(part) if isinstance(part, Tensor) else part)
        self.head = nn.Linear(WIDTH, WORDS) if head else nn.Identity()

    def forward(self, x: Tensor) -> Any:
        return self.head(self.function(self, x))


@dataclass(frozen=True)
class Habit:
    """A model, its input and its target, and the loss of one on the other."""

    make: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Tensor, Tensor]]
    loss: Loss


def tokens_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


def careful_loss(output: Tensor, target: Tensor) -> Tensor:
    weight = torch.linspace(0.5, 2.0, WORDS, dtype=output.dtype)
    target = torch.where(target > 30, -100, target)
    return F.cross_entropy(
        output.flatten(0, -2), target.flatten(), weight=weight, label_smoothing=0.1, ignore_index=-100
    )


def partition_loss(output: Tensor, target: Tensor) -> Tensor:
    flat, wanted = output.flatten(0, -2), target.flatten()
    right = flat.gather(1, wanted.unsqueeze(1)).squeeze(1)
    return (flat.logsumexp(-1) - right).mean() + 1e-3 * flat.logsumexp(-1).square().mean()


def divergence_loss(output: Tensor, target: Tensor) -> Tensor:
    wanted = F.one_hot(target.flatten(), WORDS).to(output.dtype) * 0.9 + 0.1 / WORDS
    return F.kl_div(F.log_softmax(output.flatten(0, -2), -1), wanted, reduction="batchmean")


def square_loss(output: Any, target: Tensor) -> Tensor:
    return (output - output.detach().mean() * 0.1).square().mean() + 0.0 * target.sum()  # type: ignore[no-any-return]


def class_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target)


def values() -> tuple[Tensor, Tensor]:
    return torch.randn(ROWS, LENGTH, WIDTH, dtype=torch.float64), torch.randint(WORDS, (ROWS, LENGTH))


def words() -> tuple[Tensor, Tensor]:
    return torch.randint(WORDS, (ROWS, LENGTH)), torch.randint(WORDS, (ROWS, LENGTH))


def images() -> tuple[Tensor, Tensor]:
    return torch.randn(ROWS, 3, 8, 8, dtype=torch.float64), torch.randint(WORDS, (ROWS,))


def maps() -> tuple[Tensor, Tensor]:
    return torch.randn(ROWS, WIDTH, 8, 8, dtype=torch.float64), torch.randint(WORDS, (ROWS,))


def linear(inputs: int = WIDTH, outputs: int = WIDTH, bias: bool = True) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=bias)


def heads_of(x: Tensor, count: int = HEADS) -> Tensor:
    return x.unflatten(-1, (count, -1)).transpose(1, 2)  # type: ignore[no-any-return]


def joined(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> Tensor:
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
    scores = scores if bias is None else scores + bias
    return scores.softmax(-1) @ value


def distances(length: int) -> Tensor:
    return torch.arange(length).unsqueeze(0) - torch.arange(length).unsqueeze(1)


# attention


def fused(kind: str) -> Callable[[], nn.Module]:
    """A fused qkv weight, taken apart in one of many ways."""

    def function(m: Any, x: Tensor) -> Tensor:
        y = m.qkv(x)
        if kind == "chunk":
            q, k, v = (heads_of(t) for t in y.chunk(3, -1))
        elif kind == "split":
            q, k, v = (heads_of(t) for t in y.split(WIDTH, -1))
        elif kind == "unbind":
            q, k, v = y.unflatten(-1, (3, HEADS, SIZE)).permute(2, 0, 3, 1, 4).unbind(0)
        elif kind == "heads first":  # as in GPT-NeoX: each head has its three beside each other
            q, k, v = y.unflatten(-1, (HEADS, 3 * SIZE)).transpose(1, 2).chunk(3, -1)
        elif kind == "three last":
            q, k, v = y.unflatten(-1, (HEADS, SIZE, 3)).permute(0, 2, 1, 3, 4).unbind(-1)
        elif kind == "slices":
            q, k, v = (heads_of(y[..., i * WIDTH : (i + 1) * WIDTH]) for i in range(3))
        else:  # index
            parts = y.view(*x.shape[:2], 3, HEADS, SIZE).permute(2, 0, 3, 1, 4)
            q, k, v = parts[0], parts[1], parts[2]
        return m.out(joined(attend(q, k, v)))  # type: ignore[no-any-return]

    return lambda: Made(function, qkv=linear(WIDTH, 3 * WIDTH), out=linear())


def rotary(m: Any, x: Tensor) -> Tensor:
    """Rotary positions with interleaved halves, fewer heads of keys than ranks, a learnt sink."""
    q, k, v = heads_of(m.q(x)), heads_of(m.k(x), 1), heads_of(m.v(x), 1)
    angle = torch.arange(x.shape[1], dtype=x.dtype).unsqueeze(1) * torch.tensor([1.0, 0.1], dtype=x.dtype)

    def turn(t: Tensor) -> Tensor:
        even, odd = t[..., ::2], t[..., 1::2]
        turned = (even * angle.cos() - odd * angle.sin(), even * angle.sin() + odd * angle.cos())
        return torch.stack(turned, -1).flatten(-2)

    return m.out(joined(attend(turn(q), turn(k), v)))  # type: ignore[no-any-return]


def alibi(m: Any, x: Tensor) -> Tensor:
    q, k, v = (heads_of(p(x)) for p in (m.q, m.k, m.v))
    slopes = 2.0 ** -torch.arange(1, HEADS + 1, dtype=x.dtype)
    bias = slopes.view(HEADS, 1, 1) * distances(x.shape[1]).clamp(max=0).to(x.dtype)
    return m.out(joined(attend(q, k, v, bias)))  # type: ignore[no-any-return]


def sliding(m: Any, x: Tensor) -> Tensor:
    q, k, v = (heads_of(p(x)) for p in (m.q, m.k, m.v))
    apart = distances(x.shape[1])
    mask = (apart <= 0) & (apart > -3)
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return m.out(joined(mixed))  # type: ignore[no-any-return]


def einsum_attention(spelling: int) -> Callable[[], nn.Module]:
    def function(m: Any, x: Tensor) -> Tensor:
        if spelling == 0:
            q, k, v = (torch.einsum("bld,dhk->blhk", x, w) for w in (m.q, m.k, m.v))
            scores = torch.einsum("blhk,bmhk->bhlm", q, k).softmax(-1)
            return torch.einsum("blhk,hkd->bld", torch.einsum("bhlm,bmhk->blhk", scores, v), m.o)
        if spelling == 1:
            q, k, v = (torch.einsum("bld,hdk->bhlk", x, w.transpose(0, 1)) for w in (m.q, m.k, m.v))
            scores = torch.einsum("bhik,bhjk->bhij", q, k).softmax(-1)
            return torch.einsum("bhik,hkd->bid", torch.einsum("bhij,bhjk->bhik", scores, v), m.o)
        q, k, v = (torch.tensordot(x, w, dims=1) for w in (m.q, m.k, m.v))
        scores = torch.einsum("...lhk,...mhk->...hlm", q, k).softmax(-1)
        mixed = torch.einsum("...hlm,...mhk->...lhk", scores, v)
        return torch.tensordot(mixed, m.o, dims=2)  # type: ignore[no-any-return]

    shapes = {name: torch.randn(WIDTH, HEADS, SIZE) * 0.3 for name in "qkv"}
    return lambda: Made(function, o=torch.randn(HEADS, SIZE, WIDTH) * 0.3, **shapes)  # type: ignore[arg-type]


def windows(m: Any, x: Tensor) -> Tensor:
    """Shifted windows over an image with a table of relative biases."""
    rows = x.shape[0]
    x = torch.roll(x, (-2, -2), (2, 3)).permute(0, 2, 3, 1)
    parts = x.view(rows, 2, 4, 2, 4, WIDTH).permute(0, 1, 3, 2, 4, 5).reshape(-1, 16, WIDTH)
    q, k, v = m.qkv(parts).view(-1, 16, 3, HEADS, SIZE).permute(2, 0, 3, 1, 4)
    at = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij")).flatten(1)
    apart = at.unsqueeze(2) - at.unsqueeze(1) + 3
    bias = m.table[(apart[0] * 7 + apart[1]).flatten()].view(16, 16, HEADS).permute(2, 0, 1)
    mixed = m.out(joined(attend(q, k, v, bias)))
    back = mixed.view(rows, 2, 2, 4, 4, WIDTH).permute(0, 1, 3, 2, 4, 5).reshape(rows, 8, 8, WIDTH)
    return back.roll((2, 2), (1, 2)).mean((1, 2))  # type: ignore[no-any-return]


def crossed(m: Any, x: Tensor) -> Tensor:
    memory = m.encode(x.flip(1)).tanh()
    q, k, v = heads_of(m.q(x)), heads_of(m.k(memory)), heads_of(m.v(memory))
    x = x + m.out(joined(F.scaled_dot_product_attention(q, k, v)))
    return m.norm(x)  # type: ignore[no-any-return]


def linear_attention(m: Any, x: Tensor) -> Tensor:
    q, k, v = (heads_of(p(x)) for p in (m.q, m.k, m.v))
    q, k = F.elu(q) + 1, F.elu(k) + 1
    state = (k.unsqueeze(-1) * v.unsqueeze(-2)).cumsum(2)
    mixed = (q.unsqueeze(-1) * state).sum(-2) / (q * k.cumsum(2)).sum(-1, keepdim=True)
    return m.out(joined(mixed))  # type: ignore[no-any-return]


def four() -> dict[str, nn.Module]:
    return {"q": linear(), "k": linear(), "v": linear(), "out": linear()}


# layers between


def swiglu(m: Any, x: Tensor) -> Tensor:
    gate, up = m.both(m.norm(x)).chunk(2, -1)
    return x + m.down(F.silu(gate) * up)  # type: ignore[no-any-return]


def geglu(m: Any, x: Tensor) -> Tensor:
    return m.down(F.glu(m.both(x), -1)) + x  # type: ignore[no-any-return]


def parallel(m: Any, x: Tensor) -> Tensor:
    y = m.norm(x)
    q, k, v = (heads_of(p(y)) for p in (m.q, m.k, m.v))
    return x + m.out(joined(attend(q, k, v))) + m.down(F.gelu(m.up(y)))  # type: ignore[no-any-return]


def experts(m: Any, x: Tensor) -> Tensor:
    """Two of four experts a token, each computed for the tokens that chose it, by weight."""
    flat = x.flatten(0, 1)
    chances, chosen = m.gate(flat).softmax(-1).topk(2, -1)
    chances = chances / chances.sum(-1, keepdim=True)
    total = torch.zeros_like(flat)
    for number in range(4):
        weight = (chances * (chosen == number)).sum(-1, keepdim=True)
        total = total + weight * m.falls[number](F.silu(m.rises[number](flat)))
    return x + total.view_as(x)


def stacked_experts(m: Any, x: Tensor) -> Tensor:
    gates = m.gate(x).softmax(-1)
    hidden = torch.einsum("bld,edf->blef", x, m.rise).relu()
    return x + torch.einsum("blef,efd,ble->bld", hidden, m.fall, gates)


def lora(m: Any, x: Tensor) -> Tensor:
    return m.base(x) + m.b(m.a(x)) * 0.5 + x  # type: ignore[no-any-return]


def mixer(m: Any, x: Tensor) -> Tensor:
    x = x + m.tokens2(F.gelu(m.tokens1(m.norm1(x).transpose(1, 2)))).transpose(1, 2)
    return x + m.channels2(F.gelu(m.channels1(m.norm2(x))))  # type: ignore[no-any-return]


def highway(m: Any, x: Tensor) -> Tensor:
    for layer, gate in zip(m.layers, m.gates, strict=True):
        t = gate(x).sigmoid()
        x = t * layer(x).relu() + (1 - t) * x
    return x


def sorted_values(m: Any, x: Tensor) -> Tensor:
    y = m.up(x)
    top, _ = y.topk(WIDTH, -1)
    return m.down(torch.cat([y.sort(-1).values[..., :WIDTH], top, y.cumsum(-1)[..., ::2]], -1))  # type: ignore[no-any-return]


def picked(m: Any, x: Tensor) -> Tensor:
    y = m.up(x)
    order = torch.arange(2 * WIDTH).flip(0)
    y = y.index_select(-1, order) + y.gather(-1, order.expand_as(y))
    y = y.scatter_add(-1, order.expand_as(y), y * 0.5)
    return m.down(y.masked_fill(y > 2, 0.5))  # type: ignore[no-any-return]


def spectrum(m: Any, x: Tensor) -> Tensor:
    """Fourier mixing over positions and features, as in FNet."""
    y = torch.fft.fft(torch.fft.fft(m.inner(x), dim=-1), dim=1).real
    return m.norm(x + y * 0.1)  # type: ignore[no-any-return]


def filtered(m: Any, x: Tensor) -> Tensor:
    """A global filter: products with learnt complex numbers over frequencies."""
    frequencies = torch.fft.rfft(m.inner(x), dim=1, norm="ortho") * torch.view_as_complex(m.filter)
    return torch.fft.irfft(frequencies, n=x.shape[1], dim=1, norm="ortho") + x  # type: ignore[no-any-return]


def loop(m: Any, x: Tensor) -> Tensor:
    state = torch.zeros_like(x[:, 0])
    states = []
    for step in x.unbind(1):
        state = torch.tanh(m.inner(step) + m.again(state))
        states.append(state)
    return torch.stack(states, 1)


def gated_loop(m: Any, x: Tensor) -> Tensor:
    state, memory = torch.zeros_like(x[:, 0]), torch.zeros_like(x[:, 0])
    states = []
    for step in x.unbind(1):
        i, f, g, o = (m.inner(step) + m.again(state)).chunk(4, -1)
        memory = f.sigmoid() * memory + i.sigmoid() * g.tanh()
        state = o.sigmoid() * memory.tanh()
        states.append(state)
    return torch.stack(states, 1)


def lstm(m: Any, x: Tensor) -> Tensor:
    return m.lstm(m.inner(x).tanh())[0]  # type: ignore[no-any-return]


def multihead(m: Any, x: Tensor) -> Tensor:
    y = m.norm(x)
    return x + m.attention(y, y, y, need_weights=False)[0]  # type: ignore[no-any-return]


def multihead_weights(m: Any, x: Tensor) -> Tensor:
    y, weights = m.attention(x, x, x)
    return y + weights.sum(-1, keepdim=True) * 0.1  # type: ignore[no-any-return]


def over_time(m: Any, x: Tensor) -> Tensor:
    y = m.point(F.silu(m.norm(m.depth(F.glu(m.wide(x.transpose(1, 2)), 1)))))
    return x + y.transpose(1, 2)  # type: ignore[no-any-return]


def state_space(m: Any, x: Tensor) -> Tensor:
    """A selective scan, as in Mamba."""
    u, gate = m.both(x).chunk(2, -1)
    u = F.silu(m.depth(u.transpose(1, 2))[..., : x.shape[1]]).transpose(1, 2)
    step, rate = F.softplus(m.step(u)), -m.rate.exp()
    b, c = m.bc(u).chunk(2, -1)
    state = torch.zeros(x.shape[0], WIDTH, 4, dtype=x.dtype)
    found = []
    for t in range(x.shape[1]):
        state = state * (step[:, t].unsqueeze(-1) * rate).exp() + (step[:, t] * u[:, t]).unsqueeze(-1) * b[
            :, t
        ].unsqueeze(1)
        found.append((state * c[:, t].unsqueeze(1)).sum(-1))
    return m.out(torch.stack(found, 1) * F.silu(gate)) + x  # type: ignore[no-any-return]


def retention(m: Any, x: Tensor) -> Tensor:
    q, k, v = (heads_of(p(x)) for p in (m.q, m.k, m.v))
    apart = -distances(x.shape[1]).to(x.dtype)
    decay = torch.linspace(0.5, 0.9, HEADS, dtype=x.dtype).view(-1, 1, 1) ** apart.clamp(min=0) * (apart >= 0)
    mixed = m.norm(((q @ k.transpose(-2, -1)) * decay @ v).transpose(1, 2).flatten(2).flatten(0, 1)).view_as(x)
    return m.out(mixed * F.silu(m.gate(x)))  # type: ignore[no-any-return]


def bilinear(m: Any, x: Tensor) -> Tensor:
    return m.form(m.a(x), m.b(x))  # type: ignore[no-any-return]


def normed_heads(m: Any, x: Tensor) -> Tensor:
    """Norms of each head's queries and keys, with weights that heads share."""
    q, k, v = (heads_of(p(x)) for p in (m.q, m.k, m.v))
    return m.out(joined(attend(m.nq(q), m.nk(k), v)))  # type: ignore[no-any-return]


# embeddings and images


def bagged(m: Any, x: Tensor) -> Tensor:
    return m.up(m.bag(x)).relu()  # type: ignore[no-any-return]


def padded_words(m: Any, x: Tensor) -> Tensor:
    return m.up(m.words(x) + m.kinds(x % 3) + m.places.weight[: x.shape[1]]).relu()  # type: ignore[no-any-return]


class TiedHead(nn.Module):
    """A head that is the embedding's own weight, or its transpose through a second layer."""

    def __init__(self, transposed: bool) -> None:
        super().__init__()
        self.words, self.up, self.down = nn.Embedding(WORDS, WIDTH), linear(WIDTH, 50), linear(50, WIDTH)
        self.bias = nn.Parameter(torch.zeros(WORDS))
        self.transposed = transposed

    def forward(self, x: Tensor) -> Tensor:
        y = self.words(x)
        y = y + self.down(self.up(y).relu())
        if self.transposed:
            y = y @ self.up.weight.t() @ self.up.weight  # its own layer, there and back
        return y @ self.words.weight.t() + self.bias  # type: ignore[no-any-return]


def squeezed(m: Any, x: Tensor) -> Tensor:
    y = m.rise(x).relu()
    scale = m.grow(m.shrink(y.mean((2, 3))).relu()).sigmoid()
    return m.fall((y * scale.unflatten(-1, (-1, 1, 1))).relu()).mean((2, 3))  # type: ignore[no-any-return]


def depthwise(m: Any, x: Tensor) -> Tensor:
    y = m.norm(m.depth(m.rise(x).relu())).relu()
    return m.fall(y).flatten(2).mean(-1)  # type: ignore[no-any-return]


def shuffled(m: Any, x: Tensor) -> Tensor:
    y = m.first(x).relu().unflatten(1, (4, -1)).transpose(1, 2).flatten(1, 2)
    return m.second(y).amax((2, 3))  # type: ignore[no-any-return]


def upscaled(m: Any, x: Tensor) -> Tensor:
    y = F.pixel_shuffle(m.rise(x), 2)
    return F.pixel_unshuffle(m.norm(m.mix(y)).relu(), 2).mean((2, 3))


def transposed_convolution(m: Any, x: Tensor) -> Tensor:
    return m.norm(m.up(m.down(x).relu())).relu().mean((2, 3))  # type: ignore[no-any-return]


def unfolded(m: Any, x: Tensor) -> Tensor:
    patches = F.unfold(m.rise(x), 2, stride=2).transpose(1, 2)
    y = m.mix(patches).transpose(1, 2)
    return F.fold(y, (8, 8), 2, stride=2).mean((2, 3)).repeat(1, 4)[:, :WIDTH]


def weight_norm(**options: Any) -> nn.Module:
    return nn.utils.parametrizations.weight_norm(linear(**options))  # type: ignore[no-any-return]


def of(function: Callable[..., Any], make: Callable[[], dict[str, Any]], head: bool = True) -> Callable[[], nn.Module]:
    return lambda: Made(function, head, **make())


def on(make: Callable[[], nn.Module], inputs: Any = values, loss: Loss = tokens_loss) -> Habit:
    return Habit(make, inputs, loss)


def plain_head(m: Any, x: Tensor) -> Tensor:
    return m.down(F.gelu(m.up(x)))  # type: ignore[no-any-return]


def mlp() -> dict[str, Any]:
    return {"up": linear(WIDTH, 50), "down": linear(50, WIDTH)}


def convolution(inputs: int, outputs: int, kernel: int = 1, groups: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, groups=groups)
