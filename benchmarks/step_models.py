"""The models that the step-time benchmark runs, each a chain of named pieces that any runtime can cut alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Case:
    """A model with its batch, and where it is cut for a number of stages.

    `make()` returns the model, `batch()` a pair (input, target), `pieces` the module
    paths in order, `cuts[s]` the s - 1 pieces at which a new stage begins.
    """

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]
    pieces: tuple[str, ...]
    cuts: dict[int, tuple[str, ...]]
    micro_batches: int


class Embed(nn.Module):
    """Token and position embeddings: (rows, length) int64 to (rows, length, width)."""

    def __init__(self, vocabulary: int, length: int, width: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(length, width)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.token(tokens) + self.position(positions)  # type: ignore[no-any-return]


class Block(nn.Module):
    """A pre-norm transformer block with causal attention, (rows, length, width) to the same."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        heads = self.query_key_value(self.norm1(x)).view(rows, length, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """A small GPT: (rows, length) int64 to logits (rows, length, vocabulary)."""

    def __init__(self, vocabulary: int, length: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.embed = Embed(vocabulary, length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def convolution(inputs: int, outputs: int, pool: bool) -> nn.Sequential:
    """Return a 3 × 3 convolution with ReLU and, if asked, 2 × 2 pooling."""
    parts = [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*parts, *([nn.MaxPool2d(2)] if pool else []))


def vgg() -> nn.Module:
    """Return a VGG-like net, (rows, 3, 64, 64) to logits (rows, 100), with two large linear layers."""
    channels = (
        (3, 64, True),
        (64, 128, True),
        (128, 256, False),
        (256, 256, True),
        (256, 512, False),
        (512, 512, True),
    )
    parts: list[nn.Module] = [convolution(*sizes) for sizes in channels]
    parts += [nn.Sequential(nn.Flatten(), nn.Linear(512 * 4 * 4, 4096), nn.ReLU())]
    parts += [nn.Sequential(nn.Linear(4096, 4096), nn.ReLU()), nn.Linear(4096, 100)]
    return nn.Sequential(*parts)


def mlp(width: int, layers: int) -> nn.Module:
    """Return `layers` linear layers with ReLU, (rows, width) to the same."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers)))


def numbered(count: int, prefix: str = "") -> tuple[str, ...]:
    """Return the paths of a container's children: `numbered(2, "blocks.")` is blocks.0, blocks.1."""
    return tuple(f"{prefix}{index}" for index in range(count))


def token_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross-entropy over all tokens."""
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def token_batch() -> tuple[Tensor, Tensor]:
    """Return 16 rows of 128 tokens and their targets."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(2048, (16, 129), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def image_batch() -> tuple[Tensor, Tensor]:
    """Return 16 images of 3 × 64 × 64 and their classes."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(16, 3, 64, 64, generator=generator), torch.randint(100, (16,), generator=generator)


def vector_batch(rows: int, width: int) -> tuple[Tensor, Tensor]:
    """Return float32 inputs and targets of (rows, width)."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, width, generator=generator), torch.randn(rows, width, generator=generator)


CASES = (
    Case(
        name="gpt",
        make=lambda: GPT(vocabulary=2048, length=128, width=256, layers=8, heads=8),
        batch=token_batch,
        loss=token_loss,
        pieces=("embed", *numbered(8, "blocks."), "head"),
        cuts={2: ("blocks.4",), 4: ("blocks.2", "blocks.4", "blocks.6")},
        micro_batches=8,
    ),
    Case(
        name="vgg",
        make=vgg,
        batch=image_batch,
        loss=functional.cross_entropy,
        pieces=numbered(9),
        cuts={2: ("3",), 4: ("2", "4", "6")},
        micro_batches=8,
    ),
    Case(
        name="mlp",
        make=lambda: mlp(1024, 8),
        batch=lambda: vector_batch(256, 1024),
        loss=functional.mse_loss,
        pieces=numbered(8),
        cuts={2: ("4",), 4: ("2", "4", "6")},
        micro_batches=8,
    ),
    Case(
        name="tiny",
        make=lambda: mlp(32, 4),
        batch=lambda: vector_batch(128, 32),
        loss=functional.mse_loss,
        pieces=numbered(4),
        cuts={2: ("2",), 4: ("1", "2", "3")},
        micro_batches=32,
    ),
)
