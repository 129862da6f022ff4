"""Small models, one for each habit of users that splitting a model has broken somewhere, with a batch each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

ROWS = 7
WIDTH = 6


@dataclass(frozen=True)
class Habit:
    """A model with a batch; without `loss_fn` the model gives its own loss."""

    model: nn.Module
    args: tuple[Any, ...]
    target: Any = None
    loss_fn: Callable[..., Tensor] | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    tolerance: float = 1e-9


class Net(nn.Module):
    """Three layers, and a function of the hidden values between the first two."""

    def __init__(self, between: Callable[..., Tensor] | None = None, width: int = WIDTH) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, width), nn.Linear(width, width), nn.Linear(width, 3)
        self.between = between

    def forward(self, x: Tensor, *more: Any) -> Tensor:
        h = torch.tanh(self.a(x))
        if self.between is not None:
            h = self.between(self, h, *more)
        out: Tensor = self.c(torch.tanh(self.b(h)))
        return out


def features(*shape: int) -> Tensor:
    """Return random values for every row."""
    return torch.randn(ROWS, *(shape or (4,)), dtype=torch.float64)


def classes(count: int = 3) -> Tensor:
    """Return a random class for every row."""
    return torch.randint(0, count, (ROWS,))


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean over rows."""
    return F.cross_entropy(output, target)


def squares(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean over all elements."""
    return F.mse_loss(output, target)


def plain(between: Callable[..., Tensor] | None = None, *more: Any) -> Habit:
    """Return a classifier with something between its layers."""
    return Habit(Net(between).double(), (features(), *more), classes(), cross_entropy)


class TripleGradient(torch.autograd.Function):
    """Squares, with a backward that is not the derivative: three times x in place of two."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.scale = scale
        return x * x * scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return gradient * x * 3 * ctx.scale, None


def triple(x: Tensor, scale: float) -> Tensor:
    """Apply the function above."""
    out: Tensor = TripleGradient.apply(x, scale)  # type: ignore[no-untyped-call]
    return out


class Experts(nn.Module):
    """A mixture of experts in eager form: selections whose sizes depend on values, and a branch on them."""

    def __init__(self, width: int = WIDTH, count: int = 3) -> None:
        super().__init__()
        self.gate = nn.Linear(width, count)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = (chosen == index).nonzero(as_tuple=True)[0]
            if rows.numel() == 0:
                continue
            out = out.index_add(0, rows, expert(x[rows]) * weight[rows, None])
        return out


class WithExperts(nn.Module):
    """Two layers of experts in a residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.first, self.second, self.c = nn.Linear(4, WIDTH), Experts(), Experts(), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h = h + self.first(h)
        h = h + self.second(torch.tanh(h))
        out: Tensor = self.c(h)
        return out


@dataclasses.dataclass
class Answer:
    """An output class that nobody has registered."""

    scores: Tensor
    hidden: Tensor
    note: str = "kept"


class GivesObject(Net):
    """Return an object of the user's own class."""

    def forward(self, x: Tensor, *more: Any) -> Any:
        h = torch.tanh(self.a(x))
        return Answer(self.c(torch.tanh(self.b(h))), h * 2)


class GivesLoss(Net):
    """Return a dict with the loss, as models with labels do."""

    def forward(self, x: Tensor, *more: Any, labels: Tensor | None = None) -> Any:
        scores = super().forward(x)
        return {"loss": None if labels is None else F.cross_entropy(scores, labels), "scores": scores}


class Hooked(nn.Module):
    """Hooks that change values; a parameter is reached through one of them alone."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.gain = nn.Parameter(torch.full((WIDTH,), 1.5))
        self.a.register_forward_pre_hook(lambda m, args: (args[0] - args[0].mean(-1, keepdim=True),))
        self.b.register_forward_hook(lambda m, args, out: out * self.gain)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.c(torch.relu(self.b(torch.relu(self.a(x)))))
        return out


class Tied(nn.Module):
    """An embedding whose matrix is the head's, and a block that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.block, self.head = nn.Embedding(11, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 11)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        h = self.table(ids)
        for _ in range(2):
            h = h + torch.tanh(self.block(h))
        out: Tensor = self.head(h).flatten(0, 1)
        return out


class Partly(nn.Module):
    """A frozen layer, a parameter that nothing uses, and one that a detach cuts off."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(4, WIDTH).requires_grad_(False)
        self.middle, self.cut, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.middle(torch.tanh(self.frozen(x))))
        out: Tensor = self.out(h + self.cut(h).detach())
        return out


class Averaged(nn.Module):
    """A buffer that counts the steps."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a, self.c = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 3)
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        self.seen += 1
        out: Tensor = self.c(h)
        return out


class Recurrent(nn.Module):
    """An LSTM with the batch in dimension 1."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(4, WIDTH, num_layers=2), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.lstm(x)
        out: Tensor = self.out(states[-1])
        return out


class Checkpointed(Net):
    """A layer that the model itself recomputes."""

    def forward(self, x: Tensor, *more: Any) -> Tensor:
        h = torch.tanh(self.a(x))
        h = checkpoint(lambda v: torch.tanh(self.b(v)), h, use_reentrant=False)
        out: Tensor = self.c(h)
        return out


class Branches(nn.Module):
    """The way through depends on an input's values, and a number is taken from them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.c = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = self.a(x)
        if mask.all():
            out: Tensor = self.c(h)
            return out
        count = int(mask.sum())
        out = self.c(torch.tanh(h) * mask[:, None]) * count
        return out


class CountsRows(Net):
    """Python takes the number of rows as a number."""

    def forward(self, x: Tensor, *more: Any) -> Tensor:
        out: Tensor = super().forward(x) / len(x)
        return out.reshape(len(x), -1)


class CountsAndAsks(Net):
    """Python takes the number of rows as a number, asks a mask, and calls a custom function."""

    def forward(self, x: Tensor, *more: Any) -> Tensor:
        mask, widths = more
        h = triple(self.a(x).reshape(len(x), -1), 0.5)
        if mask.view(len(x), 1).all():
            h = torch.tanh(h)
        parts = h.split(widths.tolist(), 1)
        out: Tensor = self.c(self.b(torch.cat([parts[1], parts[0]], 1)))
        return out


class Autocast(nn.Module):
    """A region of lower precision in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = torch.tanh(self.b(h))
        out: Tensor = self.c(h.float())
        return out


class Spectral(Net):
    """Complex values in the middle."""

    def forward(self, x: Tensor, *more: Any) -> Tensor:
        h = torch.fft.rfft(self.a(x), dim=-1)
        out: Tensor = self.c(torch.tanh(self.b(torch.fft.irfft(h * (1 + 0.5j), n=WIDTH, dim=-1))))
        return out


class Routed(Net):
    """A scale computed under no_grad, with a region inside it that computes gradients again."""

    def forward(self, x: Tensor, *more: Any) -> Tensor:
        h = torch.tanh(self.a(x))
        with torch.no_grad():
            scale = 1 / (1 + self.b(h).softmax(-1))
            with torch.enable_grad():
                bias = self.b(x.sum(-1, keepdim=True).expand(-1, WIDTH))
        out: Tensor = self.c(torch.tanh(self.b(h) * scale + bias))
        return out


def _weight_norm() -> Habit:
    model = Net()
    parametrizations.weight_norm(model.b)
    parametrizations.orthogonal(model.a)
    return Habit(model.double(), (features(),), classes(), cross_entropy)


def _compiled_inside() -> Habit:
    model = Net()
    model.b = torch.compile(model.b, backend="eager")  # type: ignore[assignment]
    return Habit(model.double(), (features(),), classes(), cross_entropy)


def _shared_table() -> Habit:
    table = torch.randn(5, WIDTH, dtype=torch.float64)
    return plain(lambda m, h, index, t: h + t[index], torch.randint(0, 5, (ROWS,)), table)


HABITS: Mapping[str, Callable[[], Habit]] = {
    "plain": plain,
    "no_grad": lambda: Habit(Routed().double(), (features(),), classes(), cross_entropy),
    "detached skip": lambda: plain(lambda m, h: h + 2 * h.detach()),
    "custom function": lambda: plain(lambda m, h: triple(h, 2.0)),
    "value-dependent experts": lambda: Habit(WithExperts().double(), (features(),), classes(), cross_entropy),
    "object output": lambda: Habit(
        GivesObject().double(),
        (features(),),
        classes(),
        lambda o, t: F.cross_entropy(o.scores, t) + o.hidden.pow(2).mean(),
    ),
    "own loss": lambda: Habit(GivesLoss().double(), (features(),), kwargs={"labels": classes()}),
    "hooks": lambda: Habit(Hooked().double(), (features(),), classes(), cross_entropy),
    "tied and reused": lambda: Habit(
        Tied().double(),
        (torch.randint(0, 11, (ROWS, 5)),),
        torch.randint(0, 11, (ROWS, 5)),
        lambda o, t: F.cross_entropy(o, t.flatten()),
    ),
    "frozen, unused, cut off": lambda: Habit(Partly().double(), (features(),), classes(), cross_entropy),
    "counting buffer": lambda: Habit(Averaged().double(), (features(),), classes(), cross_entropy),
    "batch in dimension 1": lambda: Habit(
        Recurrent().double(),
        (torch.randn(5, ROWS, 4, dtype=torch.float64),),
        classes(),
        cross_entropy,
        options={"batch_dims": {"x": 1}},
    ),
    "checkpointed": lambda: Habit(Checkpointed().double(), (features(),), classes(), cross_entropy),
    "compiled inside": _compiled_inside,
    "branch on a full mask": lambda: Habit(
        Branches().double(), (features(), torch.ones(ROWS, dtype=torch.bool)), classes(), cross_entropy
    ),
    "branch on a mask": lambda: Habit(
        Branches().double(), (features(), torch.arange(ROWS) > 2), classes(), cross_entropy
    ),
    "number of rows": lambda: Habit(CountsRows().double(), (features(),), classes(), cross_entropy),
    "number of rows beside questions": lambda: Habit(
        CountsAndAsks().double(),
        (features(), torch.ones(ROWS, dtype=torch.bool), torch.tensor([2, WIDTH - 2])),
        classes(),
        cross_entropy,
    ),
    "autocast inside": lambda: Habit(Autocast(), (features().float(),), classes(), cross_entropy, tolerance=3e-2),
    "complex values": lambda: Habit(Spectral().double(), (features(),), classes(), cross_entropy),
    "weight norm": _weight_norm,
    "shared table": _shared_table,
    "rows mixed up": lambda: Habit(
        Net(lambda m, h: h.flip(0)).double(), (features(),), torch.arange(ROWS) % 3, cross_entropy
    ),
    "rows mixed up, one class": lambda: Habit(
        Net(lambda m, h: h.flip(0)).double(), (features(),), torch.ones(ROWS, dtype=torch.long), cross_entropy
    ),
    "mixing in the middle": lambda: plain(lambda m, h: h - h.mean(0)),
    "dropout of zero": lambda: plain(lambda m, h: F.dropout(h, 0.0, True)),
    "integer and bool masks": lambda: plain(lambda m, h: torch.where(h > 0, h, h * (h.argsort(-1) % 2))),
    "write into a slice": lambda: plain(_write_slice),
    "write into parts of complex values": lambda: plain(_write_modes),
    "scatter and gather": lambda: plain(lambda m, h: h + torch.zeros_like(h).scatter(1, h.argmax(1, True), 1.0) * h),
}


def _write_slice(model: nn.Module, h: Tensor) -> Tensor:
    out = torch.zeros_like(h)
    out[:, :2] = h[:, 2:4]
    out[:, 3:].copy_(h[:, 3:] * 2)
    return out + h


def _write_modes(model: nn.Module, h: Tensor) -> Tensor:
    modes = torch.fft.rfft(h)
    kept = torch.zeros_like(modes)
    kept[:, :2] = modes[:, :2] * (2 - 1j)
    kept[:, -1] = modes[:, 1].conj()
    out: Tensor = torch.fft.irfft(kept, n=h.shape[-1])
    return out
