"""Every operator that draws, written in masks and numbers between 0 and 1, draws from the same distribution."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from efftra_fx.draws import KEY_DIMS, keys_of
from efftra_fx.errors import CaptureError
from efftra_fx.meta import CONSTANTS, ROLE
from efftra_fx.passes.batch_evaluate import is_random
from efftra_fx.passes.layout_free import LayoutFree, draws_alike
from efftra_fx.signature import read_call
from efftra_fx.trace import capture

ROWS = 64


class Gives(nn.Module):
    """A model whose output is a function of its input."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


def drawn(model: nn.Module, x: Tensor, *seeds: int) -> Tensor:
    """Return a model's output with the numbers that any plan draws; for several seeds one behind the other."""
    call, tensors = read_call(model.forward, (x,), {}, None)
    gm = LayoutFree((0,))(capture(model, call, tensors, (0,), want="output").gm)
    assert draws_alike(gm) and not any(is_random(n) for n in gm.graph.nodes if n.op == "call_function")
    gm.graph.lint()
    named: dict[str, Any] = {**dict(model.named_parameters()), **dict(model.named_buffers()), **CONSTANTS[gm]}
    roles = [ROLE[n] for n in gm.graph.nodes if n.op == "placeholder"]
    found = []
    for seed in seeds or (0,):
        named |= keys_of(seed, len(x))
        found.append(gm(*(x if r.kind == "input" and r.name not in KEY_DIMS else named[r.name] for r in roles))[0])
    return torch.cat(found)


DRAWS: dict[str, tuple[Callable[[Tensor], Tensor], float, float]] = {  # a function of ones, its mean and its variance
    "dropout": (lambda x: F.dropout(x, 0.3), 1.0, 0.3 / 0.7),
    "alpha dropout": (lambda x: F.alpha_dropout(torch.zeros_like(x), 0.3, True), 0.0, 0.48113),
    "bernoulli": (lambda x: torch.bernoulli(x * 0.3), 0.3, 0.21),
    "bernoulli in place": (lambda x: torch.empty_like(x).bernoulli_(0.3), 0.3, 0.21),
    "rand": (lambda x: torch.rand(x.shape, dtype=x.dtype), 0.5, 1 / 12),
    "rand in single precision": (lambda x: torch.rand(x.shape), 0.5, 1 / 12),
    "rand_like": (torch.rand_like, 0.5, 1 / 12),
    "uniform": (lambda x: torch.empty_like(x).uniform_(-1, 3), 1.0, 16 / 12),
    "randn": (lambda x: torch.randn(x.shape, dtype=x.dtype), 0.0, 1.0),
    "randn_like": (torch.randn_like, 0.0, 1.0),
    "normal of tensors": (lambda x: torch.normal(x * 2, x * 3), 2.0, 9.0),
    "normal of a mean": (lambda x: torch.normal(x * 2, 3.0), 2.0, 9.0),
    "normal of a deviation": (lambda x: torch.normal(2.0, x * 3), 2.0, 9.0),
    "normal in place": (lambda x: torch.empty_like(x).normal_(2.0, 3.0), 2.0, 9.0),
    "log normal": (lambda x: torch.empty_like(x).log_normal_(0.0, 0.5), math.exp(0.125), 0.3646958),
    "exponential": (lambda x: torch.empty_like(x).exponential_(2.0), 0.5, 0.25),
    "geometric": (lambda x: torch.empty_like(x).geometric_(0.3), 1 / 0.3, 0.7 / 0.09),
    "cauchy": (lambda x: (torch.empty_like(x).cauchy_(1.0, 2.0) < 1).double(), 0.5, 0.25),
    "randint": (lambda x: torch.randint(2, 6, x.shape).double(), 3.5, 15 / 12),
    "randint_like": (lambda x: torch.randint_like(x, 4), 1.5, 15 / 12),
    "random in place": (lambda x: torch.empty_like(x).random_(4), 1.5, 15 / 12),
    "multinomial": (lambda x: torch.multinomial(x[:, :3] * torch.tensor([1.0, 2.0, 1.0]), 64, True) * x, 1.0, 0.5),
    "one without replacement": (lambda x: torch.multinomial(x[:, :4], 1) + x * 0, 1.5, 15 / 12),
    "rrelu": (lambda x: F.rrelu(-x, 0.1, 0.5, True), -0.3, 0.16 / 12),
    "gumbel": (lambda x: -torch.empty_like(x).exponential_().log(), 0.5772157, math.pi**2 / 6),
}


@pytest.mark.parametrize("name", DRAWS)
def test_a_draw_has_the_mean_and_the_variance_of_torchs(name: str) -> None:
    function, mean, variance = DRAWS[name]
    found = drawn(Gives(function), torch.ones(ROWS, 64, dtype=torch.float64)).double()
    torch.manual_seed(0)
    fresh = function(torch.ones(512, 64, dtype=torch.float64)).double()
    if name == "one without replacement":  # one number a row
        found, fresh = found[:, :1], fresh[:, :1]
    for sample in (found, fresh):  # torch's own too, so that the expected figures are right
        spread = math.sqrt(variance / sample.numel())
        assert abs(float(sample.mean()) - mean) < 5 * spread
        assert 0.6 < float(sample.var()) / variance < 1.5
    assert not torch.equal(found[:32], found[32:])


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.dropout1d(x[:, :, None].expand(-1, -1, 5), 0.3, True),
        lambda x: F.dropout2d(x[:, :, None, None].expand(-1, -1, 2, 3), 0.3, True).flatten(2),
        lambda x: F.feature_alpha_dropout(x[:, :, None].expand(-1, -1, 5), 0.3, True),
    ],
)
def test_whole_features_are_dropped_at_once(function: Callable[[Tensor], Tensor]) -> None:
    found = drawn(Gives(function), torch.ones(ROWS, 64, dtype=torch.float64))
    assert torch.equal(found, found[..., :1].expand_as(found))
    assert abs(float((found[..., 0] == found.min()).double().mean()) - 0.3) < 5 * math.sqrt(
        0.21 / found[..., 0].numel()
    )


def test_a_permutation_has_every_index_once_and_every_order_alike_often() -> None:
    orders = drawn(Gives(lambda x: torch.randperm(4) + 0 * x[:1].long()), torch.ones(2, 4), *range(40))
    assert torch.equal(orders.sort(1).values, torch.arange(4).expand(40, 4))
    assert 3 <= int((orders[:, 0] == 2).sum()) <= 20
    rows = drawn(Gives(lambda x: torch.randperm(x.shape[0])), torch.ones(9, 4))
    assert sorted(rows.tolist()) == list(range(9))


NEARLY = 1e-13  # a probability that drops nothing, and so small that nothing is scaled either


@pytest.mark.parametrize("form", ["plain", "causal", "bool mask", "added mask", "grouped", "scaled"])
def test_attention_written_out_is_attention(form: str) -> None:
    def attend(x: Tensor, p: float) -> Tensor:
        query = x.view(-1, 4, 3, 2)
        key = query.cos()[:, :2] if form == "grouped" else query.cos()
        settings: dict[str, Any] = {"enable_gqa": True} if form == "grouped" else {}
        if form == "causal":
            settings["is_causal"] = True
        elif form == "bool mask":
            settings["attn_mask"] = torch.tensor([[True, True, False], [True, False, False], [False, False, False]])
        elif form == "added mask":
            settings["attn_mask"] = x[:, None, :3, None] * torch.ones(3, dtype=x.dtype)
        elif form == "scaled":
            settings["scale"] = 0.3
        return F.scaled_dot_product_attention(query, key, key.sin(), dropout_p=p, **settings)

    torch.manual_seed(0)
    x = torch.randn(5, 24, dtype=torch.float64)
    torch.testing.assert_close(drawn(Gives(lambda v: attend(v, NEARLY)), x), attend(x, 0.0), rtol=1e-11, atol=1e-12)
    half = drawn(Gives(lambda v: attend(v, 0.5)), x)
    assert half.shape == (5, 4, 3, 2) and not torch.allclose(half, attend(x, 0.0))


@pytest.mark.parametrize(("kind", "both"), [(nn.LSTM, True), (nn.GRU, False), (nn.RNN, True)])
def test_a_recurrent_net_written_layer_by_layer_is_that_net(kind: Any, both: bool) -> None:
    class Net(nn.Module):
        def __init__(self, dropout: float) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = kind(3, 4, 2, dropout=dropout, bidirectional=both, batch_first=True, bias=not both)

        def forward(self, x: Tensor) -> Tensor:
            out, states = self.net(x)
            states = states if isinstance(states, tuple) else (states,)
            return torch.cat([out.flatten(1), *(s.transpose(0, 1).flatten(1) for s in states)], 1)

    x = torch.randn(5, 6, 3, dtype=torch.float64)
    expected = Net(0.0).double()(x)
    torch.testing.assert_close(drawn(Net(NEARLY).double(), x), expected, rtol=1e-11, atol=1e-12)
    half = drawn(Net(0.5).double(), x)
    assert not torch.allclose(half[:, :-12], expected[:, :-12])


@pytest.mark.parametrize(
    ("function", "what"),
    [(torch.poisson, "aten.poisson.default"), (lambda x: torch._standard_gamma(x), "aten._standard_gamma.default")],
)
def test_what_cannot_be_drawn_alike_is_named_with_a_way_out(function: Callable[[Tensor], Tensor], what: str) -> None:
    with pytest.raises(CaptureError, match=rf"cannot draw what {what} draws \(File .*test_draw_rules.py.*rng='plan'"):
        drawn(Gives(function), torch.ones(3, 2))
    with pytest.raises(CaptureError, match="cannot draw whole numbers up to the number of rows"):
        drawn(Gives(lambda x: x[torch.randint(0, x.shape[0], (2,))]), torch.ones(3, 2))
