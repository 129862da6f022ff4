"""Small whole models in float64, each as a user would write it, with a batch of any number of rows and its loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from efftra_fx.step_module import LossFn, loss_of


@dataclass(frozen=True)
class Batch:
    """What `step` is called with."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    target: Any = None


@dataclass(frozen=True)
class Example:
    """A model, how to make a batch of so many rows, and the loss (None: the model's own)."""

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    loss_fn: LossFn | None = None
    training: bool = False  # dropout, and statistics of the batch

    def build(self, seed: int = 0) -> nn.Module:
        """Return the model in float64, the same for the same seed."""
        torch.manual_seed(seed)
        return self.make().double().train(self.training)

    def data(self, rows: int, seed: int = 1) -> Batch:
        """Return a batch, the same for the same seed."""
        torch.manual_seed(seed * 1000 + rows)
        return self.batch(rows)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return one device's loss of the whole batch."""
        return loss_of(model(*batch.args, **batch.kwargs), self.loss_fn, batch.target, batch.target is not None)


class Vgg(nn.Module):
    """Convolutions and pooling, then linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(4, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        )  # fmt: skip
        self.classifier = nn.Sequential(nn.Linear(24, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 5))

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.features(images).flatten(1))  # type: ignore[no-any-return]


class Residual(nn.Module):
    """Two convolutions around a skip."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs)
        self.conv2, self.bn2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)
        self.short = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + self.short(x))


class ResNet(nn.Module):
    """A stem, three residual blocks, and a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.bn = nn.Conv2d(3, 4, 3, 1, 1, bias=False), nn.BatchNorm2d(4)
        self.layers = nn.Sequential(Residual(4, 4, 1), Residual(4, 6, 2), Residual(6, 6, 1))
        self.fc = nn.Linear(6, 5)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                assert module.running_mean is not None and module.running_var is not None
                module.running_mean.normal_()
                module.running_var.uniform_(0.5, 2.0)

    def forward(self, images: Tensor) -> Tensor:
        x = self.layers(F.relu(self.bn(self.stem(images))))
        return self.fc(x.mean((2, 3)))  # type: ignore[no-any-return]


class UNet(nn.Module):
    """Down, up, and skips from each level down to the same level up."""

    def __init__(self) -> None:
        super().__init__()
        self.in1, self.in2, self.mid = nn.Conv2d(2, 3, 3, 1, 1), nn.Conv2d(3, 4, 3, 1, 1), nn.Conv2d(4, 4, 3, 1, 1)
        self.up2, self.up1 = nn.ConvTranspose2d(4, 4, 2, 2), nn.ConvTranspose2d(4, 3, 2, 2)
        self.out2, self.out1, self.head = nn.Conv2d(8, 4, 3, 1, 1), nn.Conv2d(6, 3, 3, 1, 1), nn.Conv2d(3, 2, 1)

    def forward(self, images: Tensor) -> Tensor:
        one = F.silu(self.in1(images))
        two = F.silu(self.in2(F.avg_pool2d(one, 2)))
        low = F.silu(self.mid(F.avg_pool2d(two, 2)))
        high = F.silu(self.out2(torch.cat([two, self.up2(low)], 1)))
        full = F.silu(self.out1(torch.cat([one, self.up1(high)], 1)))
        return self.head(full)  # type: ignore[no-any-return]


class Reader(nn.Module):
    """Two LSTMs over embedded tokens, their states into a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(13, 6), nn.Linear(10, 13)
        self.first, self.second = nn.LSTM(6, 7, batch_first=True), nn.LSTM(7, 5, batch_first=True, bidirectional=True)

    def forward(self, tokens: Tensor) -> Tensor:
        states, _ = self.first(self.embed(tokens))
        return self.head(self.second(states)[0])  # type: ignore[no-any-return]


class Experts(nn.Module):
    """Each row takes its two best experts, all of which are computed and weighted."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x)
        best, _ = scores.topk(2, dim=-1)
        weights = scores.masked_fill(scores < best[..., -1:], float("-inf")).softmax(-1)
        outputs = torch.stack([expert(x) for expert in self.experts], -1)
        return x + (outputs * weights.unsqueeze(-2)).sum(-1)  # type: ignore[no-any-return]


def mlp() -> nn.Module:
    """Four linear layers."""
    return nn.Sequential(
        nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 3)
    )  # fmt: skip


def moe() -> nn.Module:
    """Two blocks of experts between linear layers."""
    return nn.Sequential(nn.Linear(6, 8), Experts(8, 3), nn.LayerNorm(8), Experts(8, 4), nn.Linear(8, 3))


def gpt2() -> nn.Module:
    """GPT-2, its head tied to its embedding."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=23, n_positions=8, n_embd=8, n_layer=3, n_head=2, use_cache=False,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)  # type: ignore[no-any-return]


def bert() -> nn.Module:
    """BERT that classifies sequences."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=23, hidden_size=8, num_hidden_layers=3, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=8, num_labels=3,
    )  # fmt: skip
    return BertForSequenceClassification(config)  # type: ignore[no-any-return]


def t5() -> nn.Module:
    """T5: the encoder's memory goes to all decoder layers."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=23, d_model=8, d_kv=4, d_ff=16, num_layers=2, num_decoder_layers=2, num_heads=2,
        relative_attention_num_buckets=4, use_cache=False, decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return T5ForConditionalGeneration(config)  # type: ignore[no-any-return]


def _rows(rows: int) -> Batch:
    target = torch.randint(0, 3, (rows,))
    target[rows // 3 : rows // 2] = -100
    return Batch((torch.randn(rows, 6, dtype=torch.float64),), target=target)


def _images(rows: int) -> Batch:
    return Batch((torch.randn(rows, 3, 8, 8, dtype=torch.float64),), target=torch.randint(0, 5, (rows,)))


def _maps(rows: int) -> Batch:
    images = torch.randn(rows, 2, 8, 8, dtype=torch.float64)
    return Batch((images,), target=images.roll(1, -1))


def _tokens(rows: int) -> Batch:
    tokens = torch.randint(0, 13, (rows, 5))
    return Batch((tokens,), target=tokens.roll(-1, 1))


def _causal(rows: int) -> Batch:
    tokens = torch.randint(0, 23, (rows, 6))
    labels = tokens.clone()
    for row in range(rows):
        labels[row, : row % 5] = -100
    return Batch((), {"input_ids": tokens, "labels": labels})


def _classified(rows: int) -> Batch:
    tokens = torch.randint(0, 23, (rows, 6))
    mask = torch.ones(rows, 6, dtype=torch.int64)
    for row in range(rows):
        mask[row, 3 + row % 4 :] = 0
    return Batch((), {"input_ids": tokens, "attention_mask": mask, "labels": torch.randint(0, 3, (rows,))})


def _translated(rows: int) -> Batch:
    labels = torch.randint(0, 23, (rows, 5))
    labels[0, 2:] = -100
    return Batch((), {"input_ids": torch.randint(0, 23, (rows, 6)), "labels": labels})


def _over_tokens(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


ZOO = {
    example.name: example
    for example in (
        Example("mlp", mlp, _rows, F.cross_entropy),
        Example("vgg", Vgg, _images, F.cross_entropy),
        Example("resnet", ResNet, _images, F.cross_entropy),
        Example("gpt2", gpt2, _causal),
        Example("bert", bert, _classified),
        Example("t5", t5, _translated),
        Example("unet", UNet, _maps, F.mse_loss),
        Example("lstm", Reader, _tokens, _over_tokens),
        Example("moe", moe, _rows, F.cross_entropy),
    )
}


class Penalised(nn.Module):
    """A loss with parts that only weights go into, and a factor that is the same for all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(self.two(self.one(x).tanh()) * self.one.weight.sigmoid().mean(), labels)
        return loss + 0.1 * self.one.weight.pow(2).sum() + 0.2 * self.two.weight.abs().mean()


def _labelled(rows: int) -> Batch:
    return Batch((torch.randn(rows, 6, dtype=torch.float64), torch.randint(0, 3, (rows,))))


PENALISED = Example("penalised", Penalised, _labelled)
TWO_LAYERS = Example("two layers", lambda: nn.Sequential(nn.Linear(6, 2), nn.Linear(2, 3)), _rows, F.cross_entropy)
NORMED = Example(
    "normed",
    lambda: nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3)),
    _rows,
    F.cross_entropy,
    training=True,
)
DROPOUT = Example(
    "dropout",
    lambda: nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.5), nn.Linear(16, 16), nn.Dropout(0.2), nn.Linear(16, 3)),
    _rows,
    F.cross_entropy,
    training=True,
)
