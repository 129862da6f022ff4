"""Drawn layers whose weights are shared, viewed or made, and whose gradients are not the plain ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from drawn_parts import WIDTH, Layer, Side, linear, weight
from habits import triple
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint


def there_and_back(m: Any, h: Tensor, side: Side) -> Any:
    return (h @ m.w).tanh() @ m.w.T


def viewed(m: Any, h: Tensor, side: Side) -> Any:
    q, k, v = m.w.view(3, WIDTH, WIDTH).unbind(0)
    return ((h @ q) * (h @ k)).tanh() @ v + m.w.flatten()[:WIDTH]


def one_of_parts(m: Any, h: Tensor, side: Side) -> Any:
    return F.linear(h, torch.cat([part.weight for part in m.parts]))[..., :WIDTH] + m.parts[0](h)


class Symmetric(nn.Module):
    """A parametrization of the user's."""

    def forward(self, w: Tensor) -> Tensor:
        return w.triu() + w.triu(1).T


def symmetric() -> nn.Module:
    part = linear()
    parametrize.register_parametrization(part, "weight", Symmetric())
    return part


def tied_inside() -> Layer:
    one, other = linear(), linear()
    other.weight = one.weight
    return Layer(lambda m, h, side: m.parts[1](m.parts[0](h).tanh()), one, other)


def hooked() -> Layer:
    part = linear()
    part.weight.register_hook(lambda gradient: gradient * 2)
    part.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))
    part.register_forward_hook(lambda module, args, out: out + args[0])
    return Layer(lambda m, h, side: m.parts[0](h), part)


class Squash(torch.autograd.Function):
    """A quantity whose gradient is divided by the norm of the whole gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.tanh()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient / (1 + gradient.norm())


class Reverse(torch.autograd.Function):
    """The gradient reversed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return -ctx.scale * gradient, None


def reversed_gradient(m: Any, h: Tensor, side: Side) -> Any:
    guess = m.parts[0](Reverse.apply(h, 0.3))  # type: ignore[no-untyped-call]
    return h, F.cross_entropy(guess.flatten(0, 1), side.ids.flatten() % 2)


def gumbel(m: Any, h: Tensor, side: Side) -> Any:
    soft = ((m.parts[0](h) + side.noise) / 0.7).softmax(-1)
    hard = torch.zeros_like(soft).scatter_(-1, soft.argmax(-1, keepdim=True), 1.0)
    return h * (hard - soft.detach() + soft)


def rounded(m: Any, h: Tensor, side: Side) -> Any:
    return h + (h.round() - h).detach() + m.parts[0](h.detach())


def mapped(m: Any, h: Tensor, side: Side) -> Any:
    return torch.vmap(lambda row: m.parts[0](row) - row.mean(0))(h)


def tangent(m: Any, h: Tensor, side: Side) -> Any:
    pair: Any = torch.func.jvp(lambda v: m.parts[0](v).tanh(), (h,), (side.noise,))
    return pair[0] + pair[1]


def functional(m: Any, h: Tensor, side: Side) -> Any:
    values = {name: value + m.w[:1].tanh().sum() for name, value in m.parts[0].named_parameters()}
    return torch.func.functional_call(m.parts[0], values, (h,))


def ensemble(m: Any, h: Tensor, side: Side) -> Any:
    weights = torch.stack([part.weight for part in m.parts])
    return torch.vmap(lambda w: (h @ w.T).tanh())(weights).mean(0)


def own_slopes(m: Any, h: Tensor, side: Side) -> Any:
    return h + torch.func.vmap(torch.func.grad(lambda row: m.parts[0](row).tanh().sum()))(h)


def checkpointed(m: Any, h: Tensor, side: Side, reentrant: bool = False) -> Any:
    return checkpoint(lambda v: m.parts[0](v).relu() * v, h, use_reentrant=reentrant)


def frozen(part: nn.Module) -> nn.Module:
    return part.requires_grad_(False)


WEIGHTS: Mapping[str, Callable[[int], nn.Module]] = {
    "there and back": lambda n: Layer(there_and_back, w=weight(WIDTH, n)),
    "one weight, viewed": lambda n: Layer(viewed, w=weight(3 * WIDTH, WIDTH)),
    "weights put together": lambda n: Layer(one_of_parts, *(linear() for _ in range(n))),
    "tied inside": lambda n: tied_inside(),
    "symmetric": lambda n: Layer(lambda m, h, side: m.parts[0](h), symmetric()),
    "spectral norm": lambda n: Layer(lambda m, h, side: m.parts[0](h), parametrizations.spectral_norm(linear())),
    "weight norm, tied": lambda n: Layer(
        lambda m, h, side: m.parts[0](m.parts[0](h).tanh()), parametrizations.weight_norm(linear())
    ),
    "frozen and unused": lambda n: Layer(lambda m, h, side: m.parts[0](h) + h, frozen(linear()), linear()),
    "cut off": lambda n: Layer(lambda m, h, side: h + m.parts[0](h).detach(), linear()),
    "hooks": lambda n: hooked(),
}


GRADIENTS: Mapping[str, Callable[[int], nn.Module]] = {
    "divided gradient": lambda n: Layer(lambda m, h, side: Squash.apply(m.parts[0](h)), linear()),  # type: ignore[no-untyped-call]
    "reversed gradient": lambda n: Layer(reversed_gradient, linear(WIDTH, 2)),
    "triple gradient": lambda n: Layer(lambda m, h, side: triple(h, 1.0 / n)),
    "gumbel": lambda n: Layer(gumbel, linear()),
    "rounded": lambda n: Layer(rounded, linear()),
    "checkpointed": lambda n: Layer(checkpointed, linear()),
    "checkpointed, reentrant": lambda n: Layer(lambda m, h, side: checkpointed(m, h, side, True), linear()),
    # functional
    "mapped": lambda n: Layer(mapped, linear()),
    "tangent": lambda n: Layer(tangent, linear()),
    "functional call": lambda n: Layer(functional, linear(), w=weight(n)),
    "an ensemble": lambda n: Layer(ensemble, *(linear() for _ in range(n))),
    "slopes of each row": lambda n: Layer(own_slopes, linear()),
}
