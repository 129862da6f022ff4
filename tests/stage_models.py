"""Small models that between them use what stages are made of, each with an example input in float64."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.export.graph_signature import InputKind, OutputKind


class Lambda(nn.Module):
    """A function of the input and, when a size is given, of one weight of that size."""

    def __init__(self, function: Callable[..., Any], *sizes: tuple[int, ...]) -> None:
        super().__init__()
        self.function = function
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(size) * 0.3) for size in sizes])

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(*inputs, *self.weights)


class Block(nn.Module):
    """One block of a transformer."""

    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.second = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        parts = self.qkv(self.first(x)).split(width, dim=2)
        query, key, value = (part.view(rows, length, self.heads, -1).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.drop(self.mix(mixed.transpose(1, 2).reshape(rows, length, width)))
        return x + self.drop(self.down(F.gelu(self.up(self.second(x)), approximate="tanh")))  # type: ignore[no-any-return]


class Detached(nn.Module):
    """A model of which no gradient may pass one way."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "detach":
            return x * self.one(x).detach() + self.two(x)  # type: ignore[no-any-return]
        with torch.no_grad():
            weight = self.one(x).softmax(-1)
        return x * weight + self.two(x)  # type: ignore[no-any-return]


class Mixed(nn.Module):
    """A part of the model runs in bfloat16 under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            x = self.two(F.gelu(self.one(x)))
        return x.double() if x.dtype == torch.bfloat16 else x


class Recurrent(nn.Module):
    """A recurrent network, of which only the output sequence is used."""

    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU] | type[nn.RNN], **options: Any) -> None:
        super().__init__()
        self.net = kind(6, 5, batch_first=True, **options)

    def forward(self, x: Tensor) -> Any:
        return self.net(x)[0]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        out, weights = self.attend(x, x, x)
        return out, weights


class Tied(nn.Module):
    """The embedding is the head, and one weight is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8, padding_idx=0)
        self.body = nn.Linear(8, 8)
        self.unused = nn.Parameter(torch.randn(3))

    def forward(self, tokens: Tensor) -> Tensor:
        return F.linear(self.body(self.embed(tokens)).tanh(), self.embed.weight)


def _indexing(x: Tensor, weight: Tensor) -> Tensor:
    order = torch.tensor([2, 0, 1, 2])
    picked = x[:, order] * weight[order]
    gathered = torch.gather(x, 1, torch.tensor([[0, 1], [2, 2], [1, 0], [0, 0]]))
    spread = torch.zeros_like(x).scatter_add(1, torch.tensor([[0, 1], [2, 2], [1, 0], [0, 0]]), gathered)
    return torch.cat(
        [picked, gathered.cumsum(1), spread.clamp(-1, 1), x.flip(1), x[:, ::2], x.masked_fill(x > 0, 0.5)], 1
    )


def _complex(x: Tensor, weight: Tensor) -> Tensor:
    spectrum = torch.fft.rfft(x, dim=-1)
    turned = torch.view_as_complex(torch.stack([weight, weight.sin()], -1))
    return torch.fft.irfft(spectrum * turned, n=x.shape[-1])  # type: ignore[no-any-return]


def _many(x: Tensor, weight: Tensor) -> Any:
    out = x @ weight
    return out, out.argmax(-1), out.relu(), x.sum(), (out > 0)


def _tensors(*shapes: tuple[int, ...]) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: tuple(torch.randn(shape, dtype=torch.float64) for shape in shapes)


def _images() -> tuple[Tensor, ...]:
    return (torch.randn(4, 3, 8, 8, dtype=torch.float64),)


def _tokens() -> tuple[Tensor, ...]:
    return (torch.randint(0, 11, (4, 5)),)


_rows = _tensors((4, 8))
_sequences = _tensors((4, 5, 8))


class HuggingFace(nn.Module):
    """A tiny language model that computes its own loss from tokens and labels."""

    def __init__(self, name: str) -> None:
        super().__init__()
        import transformers

        small = {"vocab_size": 50, "eos_token_id": 1, "bos_token_id": 1, "pad_token_id": 0}
        if name == "gpt2":
            heads = {"n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 16}
            self.model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**small, **heads))
        elif name == "bert":
            heads = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
            self.model = transformers.BertForMaskedLM(transformers.BertConfig(**small, **heads))
        else:
            heads = {"num_layers": 1, "d_model": 16, "num_heads": 2, "d_kv": 8, "d_ff": 32, "decoder_start_token_id": 0}
            self.model = transformers.T5ForConditionalGeneration(transformers.T5Config(**small, **heads))
        self.options = {} if name == "bert" else {"use_cache": False}

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens, labels=tokens, **self.options).loss  # type: ignore[no-any-return]


def _words() -> tuple[Tensor, ...]:
    return (torch.randint(2, 50, (3, 8)),)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, ...]]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3), nn.LogSoftmax(-1)), _rows),
    "blocks": (lambda: nn.Sequential(Block(8, 2), Block(8, 2)), _sequences),
    "dropout": (lambda: nn.Sequential(Block(8, 2, 0.3), Block(8, 2, 0.3)), _sequences),
    "attention": (Attention, _sequences),
    "encoder": (lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True), _sequences),
    "conv": (
        lambda: nn.Sequential(nn.Conv2d(3, 6, 3, stride=2, padding=1), nn.SiLU(), nn.Conv2d(6, 4, 3, groups=2)),
        _images,
    ),
    "unet": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1),
            nn.MaxPool2d(2),
            nn.ConvTranspose2d(4, 4, 2, 2),
            nn.AvgPool2d(2),
            nn.Upsample(scale_factor=2, mode="bilinear"),
            nn.AdaptiveAvgPool2d(3),
            nn.Upsample(scale_factor=2),
        ),
        _images,
    ),
    "batchnorm": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2)),
        _images,
    ),
    "batchnorm eval": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).eval(), _images),
    "groupnorm": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.ELU(), nn.InstanceNorm2d(4)),
        _images,
    ),
    "lstm": (lambda: Recurrent(nn.LSTM, num_layers=2, bidirectional=True), _tensors((4, 5, 6))),
    "gru": (lambda: Recurrent(nn.GRU, num_layers=2), _tensors((4, 5, 6))),
    "rnn": (lambda: Recurrent(nn.RNN), _tensors((4, 5, 6))),
    "detach": (lambda: Detached("detach"), _tensors((3, 4))),
    "no_grad": (lambda: Detached("no_grad"), _tensors((3, 4))),
    "autocast": (Mixed, _rows),
    "tied": (Tied, _tokens),
    "indexing": (lambda: Lambda(_indexing, (3,)), _tensors((4, 3))),
    "einsum": (lambda: Lambda(lambda x, w: torch.einsum("bij,jk,bkl->bil", x, w, x.mT), (8, 8)), _sequences),
    "complex": (lambda: Lambda(_complex, (5,)), _rows),
    "many outputs": (lambda: Lambda(_many, (8, 8)), _rows),
    "norms": (
        lambda: Lambda(
            lambda x, w: (x.norm(dim=-1), x.std(0), x.var(), x.prod(-1), (x @ w).amax(-1), x.sort(-1)[0]), (8, 8)
        ),
        _rows,
    ),
    "stacked": (
        lambda: Lambda(lambda x, y, w: torch.stack([x * w, y, x]).unbind(1)[0], (8,)),
        _tensors((4, 8), (4, 8)),
    ),
    "loss": (lambda: Lambda(lambda x, w: F.cross_entropy(x @ w, torch.tensor([0, 1, -100, 2])), (8, 8)), _rows),
    "in place": (lambda: Lambda(lambda x, w: (x @ w).add_(1).mul_(w[0]).clone().clamp_(max=3).relu_(), (8, 8)), _rows),
    "expanded": (
        lambda: Lambda(lambda x, w: (x + w.expand(4, 8)).sum() * torch.ones(3, dtype=torch.float64), (1, 8)),
        _rows,
    ),
    "softmax mask": (
        lambda: Lambda(
            lambda x, w: torch.where(torch.ones(8, 8).tril().bool(), x.mT @ x @ w, -1e9).softmax(-1), (8, 8)
        ),
        _rows,
    ),
    "conv1d": (lambda: nn.Sequential(nn.Conv1d(5, 4, 3), nn.Hardswish(), nn.LeakyReLU()), _sequences),
    "conv3d": (lambda: nn.Sequential(nn.Conv3d(3, 2, 2), nn.Softplus()), _tensors((2, 3, 4, 4, 4))),
    "gpt2": (lambda: HuggingFace("gpt2"), _words),
    "bert": (lambda: HuggingFace("bert"), _words),
    "t5": (lambda: HuggingFace("t5"), _words),
    "embedding bag": (lambda: nn.EmbeddingBag(11, 4), _tokens),
}


@dataclass(frozen=True)
class Case:
    """A model exported as a stage: the graph, a value for each input, and which is what."""

    model: nn.Module
    inputs: tuple[Tensor, ...]
    gm: fx.GraphModule
    values: tuple[Tensor, ...]
    weights: tuple[bool, ...]
    wrt: tuple[bool, ...]
    parameters: tuple[str, ...]
    results: tuple[int, ...]  # which outputs are the model's own; the others are new buffer values


@cache
def export_case(name: str, decompose: bool = True) -> Case:
    """Export one of the models, always with the same weights and inputs."""
    make, example = MODELS[name]
    torch.manual_seed(0)
    model, inputs = make().double(), example()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(model, inputs, strict=False)
        program = program.run_decompositions({}) if decompose else program
    rest = iter(inputs)
    values, weights, parameters = [], [], []
    for spec in program.graph_signature.input_specs:
        weights.append(spec.kind == InputKind.PARAMETER)
        if spec.kind == InputKind.USER_INPUT:
            values.append(next(rest))
            continue
        target = str(spec.target)
        held = program.state_dict.get(target)
        values.append((program.constants[target] if held is None else held).detach().clone())
        parameters += [target] if weights[-1] else []
    outputs = program.graph_signature.output_specs
    results = tuple(index for index, spec in enumerate(outputs) if spec.kind == OutputKind.USER_OUTPUT)
    kinds = [spec.kind for spec in program.graph_signature.input_specs]
    wrt = [
        weight or (kind == InputKind.USER_INPUT and has_gradient(value))
        for weight, kind, value in zip(weights, kinds, values, strict=True)
    ]
    return Case(
        model, inputs, program.graph_module, tuple(values), tuple(weights), tuple(wrt), tuple(parameters), results
    )


def has_gradient(value: Any) -> bool:
    """Tell whether a value is one that can have a gradient."""
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
