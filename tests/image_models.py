"""The characteristic parts of networks for images, small and in float64, each with a batch of an odd number of rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from habits import ROWS, Habit
from torch import Tensor, nn


def unit(inputs: int, outputs: int, kernel: int = 3, stride: int = 1, groups: int = 1, act: Any = nn.ReLU) -> nn.Module:
    """Return a convolution, a batch norm and what follows."""
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), act())


class Head(nn.Module):
    """A stem, a body, and the mean over pixels into a linear head."""

    def __init__(self, body: nn.Module, width: int, stem: nn.Module | None = None) -> None:
        super().__init__()
        self.stem, self.body, self.fc = stem or unit(3, 4), body, nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.adaptive_avg_pool2d(self.body(self.stem(x)), 1).flatten(1))  # type: ignore[no-any-return]


class Bottleneck(nn.Module):
    """Narrow, grouped, wide again, around a projected skip."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.one, self.two = unit(inputs, 4, 1), unit(4, 4, 3, stride, groups=2)
        self.three = unit(4, outputs, 1, act=nn.Identity)
        self.skip = unit(inputs, outputs, 1, stride, act=nn.Identity) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.three(self.two(self.one(x))) + self.skip(x))


class Dense(nn.Module):
    """Each layer reads all before it; then a transition to half of the pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(unit(4 + 2 * i, 2) for i in range(3))
        self.transition = nn.Sequential(unit(10, 6, 1), nn.AvgPool2d(2))

    def forward(self, x: Tensor) -> Tensor:
        found = [x]
        for layer in self.layers:
            found.append(layer(torch.cat(found, 1)))
        return self.transition(torch.cat(found, 1))  # type: ignore[no-any-return]


class Inception(nn.Module):
    """Branches of several widths side by side, and a second head that is there in training alone."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.one = unit(3, 4), unit(4, 2, 1)
        self.three = nn.Sequential(unit(4, 2, 1), unit(2, 3))
        self.five = nn.Sequential(nn.Conv2d(4, 2, (1, 3), padding=(0, 1)), nn.Conv2d(2, 2, (3, 1), padding=(1, 0)))
        self.pool = nn.Sequential(nn.MaxPool2d(3, 1, 1), unit(4, 1, 1))
        self.more, self.fc, self.aux = unit(8, 6), nn.Linear(6, 5), nn.Sequential(unit(8, 2, 1), nn.Flatten())
        self.second = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Any:
        x = self.stem(x)
        x = torch.cat([self.one(x), self.three(x), self.five(x), self.pool(x)], 1)
        out = self.fc(self.more(x).mean((2, 3)))
        if self.training:
            return out, self.second(self.aux(F.adaptive_avg_pool2d(x, 2)))
        return out


class Squeeze(nn.Module):
    """Channels weighed by what they hold on the whole image."""

    def __init__(self, width: int, gate: Any = nn.Sigmoid) -> None:
        super().__init__()
        self.down, self.up, self.gate = nn.Conv2d(width, 2, 1), nn.Conv2d(2, width, 1), gate()

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gate(self.up(F.relu(self.down(x.mean((2, 3), keepdim=True)))))  # type: ignore[no-any-return]


class Inverted(nn.Module):
    """Wide, depthwise, squeezed, narrow: the skip joins the narrow ends."""

    def __init__(self, width: int, outputs: int, stride: int) -> None:
        super().__init__()
        wide, self.same = 2 * width, stride == 1 and width == outputs
        self.layers = nn.Sequential(
            unit(width, wide, 1, act=nn.Hardswish), unit(wide, wide, 3, stride, groups=wide, act=nn.ReLU6),
            Squeeze(wide, nn.Hardsigmoid), unit(wide, outputs, 1, act=nn.Identity),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x) if self.same else self.layers(x)  # type: ignore[no-any-return]


class WindowAttention(nn.Module):
    """Attention inside windows that are rolled by half a window in every other block, with a bias by distance."""

    index: Tensor

    def __init__(self, width: int, window: int, shift: int) -> None:
        super().__init__()
        self.window, self.shift, self.heads = window, shift, 2
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.table = nn.Parameter(torch.randn((2 * window - 1) ** 2, self.heads) * 0.1)
        places = torch.stack(torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij")).flatten(1)
        apart = (places[:, :, None] - places[:, None]) + window - 1
        self.register_buffer("index", apart[0] * (2 * window - 1) + apart[1], persistent=False)

    def windows(self, x: Tensor) -> Tensor:
        """Return pixels by window."""
        b, h, w, c = x.shape
        x = x.view(b, h // self.window, self.window, w // self.window, self.window, c)
        return x.transpose(2, 3).reshape(-1, self.window**2, c)

    def forward(self, x: Tensor) -> Tensor:
        b, h, w, c = x.shape
        y = torch.roll(self.norm(x), (-self.shift, -self.shift), (1, 2))
        q, k, v = (
            self.qkv(self.windows(y)).view(-1, self.window**2, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        )
        scores = q @ k.transpose(-2, -1) * (c // self.heads) ** -0.5 + self.table[self.index].permute(2, 0, 1)
        if self.shift:
            region = torch.zeros(1, h, w, 1)
            for number, rows in enumerate((slice(-self.window, -self.shift), slice(-self.shift, None))):
                for other, columns in enumerate((slice(-self.window, -self.shift), slice(-self.shift, None))):
                    region[:, rows, columns] = 1 + 2 * number + other
            kind = self.windows(region).squeeze(-1)
            apart = (kind[:, None] != kind[:, :, None]).to(x.dtype) * -100.0
            scores = (scores.view(b, -1, *scores.shape[1:]) + apart[:, None]).view(scores.shape)
        y = (
            (scores.softmax(-1) @ v)
            .transpose(1, 2)
            .reshape(b, h // self.window, w // self.window, self.window, self.window, c)
        )
        return x + self.out(torch.roll(y.transpose(2, 3).reshape(b, h, w, c), (self.shift, self.shift), (1, 2)))  # type: ignore[no-any-return]


class Swin(nn.Module):
    """Two blocks of window attention, the second rolled, and patches merged by four."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.one, self.two = nn.Conv2d(3, 4, 1), WindowAttention(4, 4, 0), WindowAttention(4, 4, 2)
        self.merge, self.fc = nn.Linear(16, 6, bias=False), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.two(self.one(self.patch(x).permute(0, 2, 3, 1)))
        x = torch.cat([x[:, i::2, j::2] for i in (0, 1) for j in (0, 1)], -1)
        return self.fc(self.merge(x).mean((1, 2)))  # type: ignore[no-any-return]


class UNet(nn.Module):
    """Down by pooling, up by transposed convolutions, each level joined with the same one on the way down."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.low = unit(3, 3), unit(3, 4), unit(4, 6)
        self.up2, self.up1 = nn.ConvTranspose2d(6, 4, 2, 2), nn.ConvTranspose2d(4, 3, 3, 2, 1, 1, groups=1)
        self.join2, self.join1, self.out = unit(8, 4), unit(6, 3), nn.Conv2d(3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        one = self.one(x)
        two = self.two(F.max_pool2d(one, 2))
        x = self.join2(torch.cat([two, self.up2(self.low(F.max_pool2d(two, 2)))], 1))
        return self.out(self.join1(torch.cat([one, self.up1(x)], 1)))  # type: ignore[no-any-return]


class ConvNext(nn.Module):
    """A wide depthwise kernel, a norm over channels, two layers, a scale by channel, and a path that may be dropped."""

    def __init__(self, width: int, drop: float = 0.0) -> None:
        super().__init__()
        self.depth, self.norm = nn.Conv2d(width, width, 7, padding=3, groups=width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.scale, self.drop = nn.Parameter(torch.full((width,), 0.3)), drop

    def forward(self, x: Tensor) -> Tensor:
        y = self.scale * self.down(F.gelu(self.up(self.norm(self.depth(x).permute(0, 2, 3, 1)))))
        if self.training:
            keep = 1 - self.drop
            y = y * (torch.rand(len(x), 1, 1, 1, dtype=x.dtype) + keep).floor() / keep
        return x + y.permute(0, 3, 1, 2)  # type: ignore[no-any-return]


class Shuffle(nn.Module):
    """Half of the channels pass by; then halves are dealt out in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.way = nn.Sequential(unit(2, 2, 1), unit(2, 2, groups=2, act=nn.Identity), unit(2, 2, 1))

    def forward(self, x: Tensor) -> Tensor:
        left, right = x.chunk(2, 1)
        x = torch.cat([left, self.way(right)], 1)
        b, c, h, w = x.shape
        return x.view(b, 2, c // 2, h, w).transpose(1, 2).reshape(b, c, h, w)


class Vit(nn.Module):
    """Patches, a class token, and positions stretched from another number of patches."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.token = nn.Conv2d(3, 8, 2, 2), nn.Parameter(torch.randn(1, 1, 8))
        self.places, self.first = nn.Parameter(torch.randn(1, 8, 3, 3)), nn.Parameter(torch.randn(1, 1, 8))
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers, self.norm, self.fc = nn.ModuleList([layer]), nn.LayerNorm(8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x)
        places = F.interpolate(self.places, size=x.shape[-2:], mode="bicubic", align_corners=False)
        x = torch.cat([self.token.expand(len(x), -1, -1), x.flatten(2).transpose(1, 2)], 1)
        x = x + torch.cat([self.first, places.flatten(2).transpose(1, 2)], 1)
        for layer in self.layers:
            x = layer(x)
        return self.fc(self.norm(x)[:, 0])  # type: ignore[no-any-return]


class Ghost(nn.Module):
    """A few features, and cheap ones made of them."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        own = -(-outputs // 2)
        self.main, self.cheap, self.count = unit(inputs, own, 1), unit(own, own, groups=own), outputs

    def forward(self, x: Tensor) -> Tensor:
        x = self.main(x)
        return torch.cat([x, self.cheap(x)], 1)[:, : self.count]


class Blur(nn.Module):
    """A fixed blur before every other pixel is dropped."""

    kernel: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        line = torch.tensor([1.0, 2.0, 1.0])
        self.register_buffer("kernel", (line[:, None] * line / 16).repeat(width, 1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(F.pad(x, (1, 1, 1, 1), mode="reflect"), self.kernel, stride=2, groups=x.shape[1])


class Pooled(nn.Module):
    """Pools to a size that does not divide: the mean and the largest side by side."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([F.adaptive_avg_pool2d(x, 3), F.adaptive_max_pool2d(x, 3)], 1)


class Pyramid(nn.Module):
    """Coarse levels are stretched and added to finer ones; every level is an output."""

    def __init__(self) -> None:
        super().__init__()
        self.downs = nn.ModuleList([unit(3, 3), unit(3, 4, stride=2), unit(4, 5, stride=2)])
        self.sides = nn.ModuleList(nn.Conv2d(width, 4, 1) for width in (3, 4, 5))
        self.outs = nn.ModuleList(nn.Conv2d(4, 2, 3, padding=1) for _ in range(3))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        levels = []
        for down, side in zip(self.downs, self.sides, strict=True):
            x = down(x)
            levels.append(side(x))
        for index in (1, 0):
            levels[index] = levels[index] + F.interpolate(levels[index + 1], size=levels[index].shape[-2:])
        return {f"level {index}": out(level) for index, (out, level) in enumerate(zip(self.outs, levels, strict=True))}


class Standardised(nn.Conv2d):
    """A convolution whose kernels have mean 0 and variance 1, by the function that norms batches."""

    def forward(self, x: Tensor) -> Tensor:
        flat = self.weight.reshape(1, self.out_channels, -1)
        weight = F.batch_norm(flat, None, None, training=True, momentum=0.0, eps=1e-6).reshape_as(self.weight)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding)


class Atrous(nn.Module):
    """Kernels with holes of several widths, and the mean of the whole image, stretched back."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Conv2d(4, 2, 3, padding=hole, dilation=hole) for hole in (1, 2, 3))
        self.whole, self.project = nn.Conv2d(4, 2, 1), unit(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        whole = F.interpolate(self.whole(x.mean((2, 3), True)), x.shape[-2:], mode="bilinear", align_corners=False)
        return self.project(torch.cat([*(branch(x) for branch in self.branches), whole], 1))  # type: ignore[no-any-return]


class SplitAttention(nn.Module):
    """Two groups of channels, weighed against each other."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.weigh = unit(4, 8, groups=2), nn.Conv2d(4, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        both = self.conv(x).unflatten(1, (2, 4))
        weights = self.weigh(both.sum(1).mean((2, 3), True)).unflatten(1, (2, 4)).softmax(1)
        return (both * weights).sum(1)  # type: ignore[no-any-return]


class Finer(nn.Module):
    """Channels become pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.PReLU(4), nn.Conv2d(4, 12, 3, padding=1))
        self.shuffle = nn.PixelShuffle(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.shuffle(self.layers(x)) + F.interpolate(x, scale_factor=2, mode="bilinear")  # type: ignore[no-any-return]


def settle(model: nn.Module, training: bool) -> nn.Module:
    """Return the model in training, its batch norms with statistics of their own, fixed unless they train too."""
    model = model.double().train()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert module.running_mean is not None and module.running_var is not None
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2.0)
            module.train(training)
    return model


def classify(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean over rows."""
    return F.cross_entropy(output, target)


def both_heads(output: Any, target: Tensor) -> Tensor:
    """Add the second head's loss where there is one."""
    return F.cross_entropy(output[0], target) + 0.4 * F.cross_entropy(output[1], target)


def all_levels(output: Mapping[str, Tensor], target: Tensor) -> Tensor:
    """Return a mean over the pixels of every level, added up."""
    small = [F.adaptive_avg_pool2d(target, (level.shape[-2], level.shape[-1])) for level in output.values()]
    return torch.stack([F.mse_loss(a, b) for a, b in zip(output.values(), small, strict=True)]).sum()


Made = tuple[Callable[[], nn.Module], Callable[..., Tensor], tuple[int, ...]]  # a target's sizes; none: classes
IMAGE_MODELS: Mapping[str, Made] = {
    "bottlenecks": (lambda: Head(nn.Sequential(Bottleneck(4, 6, 1), Bottleneck(6, 8, 2)), 8), classify, ()),
    "dense block": (lambda: Head(Dense(), 6), classify, ()),
    "inception with a second head": (Inception, both_heads, ()),
    "inverted residuals": (lambda: Head(nn.Sequential(Inverted(4, 4, 1), Inverted(4, 6, 2)), 6), classify, ()),
    "window attention": (Swin, classify, ()),
    "u-net": (UNet, F.mse_loss, (2, 8, 8)),
    "convnext": (lambda: Head(nn.Sequential(ConvNext(4), ConvNext(4)), 4, nn.Conv2d(3, 4, 2, 2)), classify, ()),
    "channel shuffle": (lambda: Head(nn.Sequential(Shuffle(), Shuffle()), 4), classify, ()),
    "patches and a class token": (Vit, classify, ()),
    "ghost": (lambda: Head(nn.Sequential(Ghost(4, 5), Squeeze(5), Ghost(5, 6)), 6), classify, ()),
    "blurred pooling": (lambda: Head(nn.Sequential(Blur(4), unit(4, 4), Pooled(), unit(8, 4)), 4), classify, ()),
    "feature pyramid": (Pyramid, all_levels, (2, 8, 8)),
    "standardised weights": (
        lambda: Head(nn.Sequential(Standardised(4, 4, 3), nn.GELU(), Standardised(4, 4, 3)), 4, nn.Conv2d(3, 4, 3)),
        classify,
        (),
    ),
    "kernels with holes": (lambda: Head(Atrous(), 4), classify, ()),
    "split attention": (lambda: Head(SplitAttention(), 4), classify, ()),
    "pixel shuffle": (Finer, F.mse_loss, (3, 16, 16)),
}


def image_habit(name: str, training: bool = False, **options: Any) -> Habit:
    """Return an image model with a batch; its norms keep their statistics unless they train."""
    torch.manual_seed(3)
    make, loss_fn, sizes = IMAGE_MODELS[name]
    model = settle(make(), training)
    target = torch.randn(ROWS, *sizes, dtype=torch.float64) if sizes else torch.randint(0, 5, (ROWS,))
    return Habit(model, (torch.randn(ROWS, 3, 8, 8, dtype=torch.float64),), target, loss_fn, options=options)
