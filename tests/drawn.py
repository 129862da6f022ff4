"""Drawn models that are trained, evaluated and saved as drawn, as planned and on one device beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from drawn_layers import DRAWN
from drawn_parts import WIDTH, WORDS, Layer, Side
from rig import lay_out
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from efftra_fx import Cluster, CompiledModel, compile
from efftra_fx.step_module import loss_of

TOLERANCE = 1e-8
NOTHING = -100  # a target that is ignored
BY_PARTS = "are written by each part of the batch in order"
GIVES = ("scores", "object", "loss")


class CannotTrainError(Exception):
    """Raise where eager PyTorch does not train the model either."""


@dataclass(frozen=True)
class Part:
    """One layer: its kind and size, whether an earlier one is used again, and how it is joined to the stream."""

    name: str
    size: int = 2
    again: int = -1
    way: int = 1  # 0 in its place, 1 added, 2 added to what was kept two layers ago


@dataclass(frozen=True)
class Recipe:
    """A model and its loss."""

    parts: tuple[Part, ...]
    loss: str = "mean"
    gives: str = "scores"  # or an "object", or the "loss"
    tied: bool = False
    decides: bool = False  # the model's own forward asks for a value
    steps_first: bool = False  # words come as [length, rows]
    masked: bool = True
    frozen: bool = False
    seed: int = 0


@dataclass(frozen=True)
class Run:
    """A plan, and batches as (rows, length): the first is the example's; after each there is an evaluation."""

    replicas: tuple[int, ...] = (1, 1)
    micro_batches: int = 2
    batches: tuple[tuple[int, int], ...] = ((6, 4), (6, 4))
    recompute: bool = False
    late: bool = False  # stages end late rather than evenly
    gpipe: bool = False
    optimizer: str = "sgd"


@dataclass
class Answer:
    """What a model gives: nested, with numbers and nothing in it."""

    scores: Tensor
    more: dict[str, Any]
    note: str = "kept"


@cache
def kind_of(name: str) -> type[Layer]:
    """Return a class for the layers of this name: where one of a class runs as it is, all of that class do."""
    return type(name.title().replace(" ", ""), (Layer,), {})


def layer_of(part: Part) -> nn.Module:
    """Return the layer of a part."""
    layer = DRAWN[part.name](part.size)
    if type(layer) is Layer:
        layer.__class__ = kind_of(part.name)
    return layer


class Drawn(nn.Module):
    """The model of a recipe."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe
        self.stem, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        if recipe.tied:
            self.head.weight = self.stem.weight
        if recipe.frozen:
            self.stem.weight.requires_grad_(False)
        layers: list[nn.Module] = []
        for part in recipe.parts:
            again = 0 <= part.again < len(layers)
            layers.append(layers[part.again] if again else layer_of(part))
        self.layers = nn.ModuleList(layers)

    def forward(
        self,
        ids: Tensor,
        lengths: Tensor,
        table: Tensor,
        noise: Tensor,
        mask: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> Any:
        if self.recipe.steps_first:
            ids = ids.t()
        side = Side(ids, mask, lengths, table, noise)
        h = self.stem(ids)
        kept, losses = h, []
        for layer, part in zip(self.layers, self.recipe.parts, strict=True):
            out = layer(h, side)
            if isinstance(out, tuple):
                out, loss = out
                losses.append(loss)
            balance = getattr(layer, "balance", None)
            if balance is not None:
                losses.append(balance)
            before = h
            h = out if part.way == 0 else h + out if part.way == 1 else kept + torch.tanh(out)
            kept = before
        if self.recipe.decides and bool(h.sum() > 0):
            h = h * 0.5
        scores = self.head(torch.tanh(h))
        extra = torch.stack(losses).sum() if losses else None
        if self.recipe.gives == "loss":
            loss = None if labels is None else LOSSES[self.recipe.loss](scores, labels)
            return {"loss": loss if extra is None or loss is None else loss + extra, "scores": scores}
        if self.recipe.gives == "object":
            return Answer(scores, {"hidden": h, "extra": extra, "largest": scores.argmax(-1), "none": None})
        return scores if extra is None else (scores, extra)


def tokens(scores: Tensor, target: Tensor) -> Tensor:
    """Return the loss of every token, zero where it is ignored."""
    return F.cross_entropy(scores.flatten(0, 1), target.flatten(), reduction="none").view(target.shape)


def selected(scores: Tensor, target: Tensor) -> Tensor:
    kept = target != NOTHING
    return F.cross_entropy(scores[kept], target[kept])


def hardest(scores: Tensor, target: Tensor) -> Tensor:
    every = tokens(scores, target).flatten()
    return every.topk(1 + len(every) // 2).values.mean()


def contrast(scores: Tensor, target: Tensor) -> Tensor:
    pooled = F.normalize(scores.mean(1), dim=-1)
    return F.cross_entropy(pooled @ pooled.T, torch.arange(len(pooled))) + tokens(scores, target).mean()


def focal(scores: Tensor, target: Tensor) -> Tensor:
    every = tokens(scores, target)
    return ((1 - torch.exp(-every)) ** 2 * every).sum() / (target != NOTHING).sum()


def row_means(scores: Tensor, target: Tensor) -> Tensor:
    return (tokens(scores, target).sum(1) / (target != NOTHING).sum(1).clamp(min=1)).mean()


def by_row(scores: Tensor, target: Tensor) -> Tensor:
    total = scores.new_zeros(())
    for row, wanted in zip(scores, target, strict=True):
        if bool((wanted != NOTHING).any()):
            total = total + F.cross_entropy(row, wanted)
    return total / len(target)


LOSSES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": lambda o, t: F.cross_entropy(o.flatten(0, 1), t.flatten()),
    "transposed": lambda o, t: F.cross_entropy(o.transpose(1, 2), t),
    "smooth": lambda o, t: F.cross_entropy(o.flatten(0, 1), t.flatten(), label_smoothing=0.1),
    "weighted": lambda o, t: F.cross_entropy(
        o.flatten(0, 1), t.flatten(), weight=torch.linspace(0.5, 2, WORDS, dtype=o.dtype)
    ),
    "sum": lambda o, t: F.cross_entropy(o.flatten(0, 1), t.flatten(), reduction="sum") / 10,
    "all tokens": lambda o, t: tokens(o, t).mean(),
    "squares": lambda o, t: F.mse_loss(o, F.one_hot(t.clamp(min=0), WORDS).to(o.dtype)),
    "root": lambda o, t: F.cross_entropy(o.flatten(0, 1), t.flatten()).sqrt() + 0.1 * o.pow(2).mean(),
    "worst": lambda o, t: tokens(o, t).sum(1).max() + 0.1 * tokens(o, t).mean(),
    "selected": selected,
    "hardest": hardest,
    "contrast": contrast,
    "focal": focal,
    "row means": row_means,
    "rows in a loop": by_row,
}


@dataclass(frozen=True)
class Batch:
    """One batch."""

    args: tuple[Tensor, ...]
    kwargs: dict[str, Any]
    target: Tensor | None


def batch_of(recipe: Recipe, rows: int, length: int, number: int) -> Batch:
    """Return the batch of this number; a row may have no target, but not all of them."""
    generator = torch.Generator().manual_seed(1000 * recipe.seed + 10 * number + rows)
    ids = torch.randint(0, WORDS, (rows, length), generator=generator)
    lengths = torch.randint(1, length + 1, (rows,), generator=generator)
    noise = torch.randn(rows, length, WIDTH, generator=generator, dtype=torch.float64)
    table = torch.randn(5, WIDTH, generator=generator, dtype=torch.float64)
    target = ids.roll(1, 1)
    target = torch.where(torch.rand(target.shape, generator=generator) < 0.3, NOTHING, target)
    target[rows // 2] = NOTHING
    target[0, 0] = 1
    kwargs: dict[str, Any] = {"mask": torch.arange(length) < lengths[:, None]} if recipe.masked else {}
    own = recipe.gives == "loss"
    if own:
        kwargs["labels"] = target
    args = (ids.t().contiguous() if recipe.steps_first else ids, lengths, table, noise)
    return Batch(args, kwargs, None if own else target)


def loss_function(recipe: Recipe) -> Callable[[Any, Tensor], Tensor] | None:
    """Return the loss that the model does not give itself."""
    function = LOSSES[recipe.loss]

    def plain(output: Any, target: Tensor) -> Tensor:
        scores, extra = output if isinstance(output, tuple) else (output, None)
        return function(scores, target) if extra is None else function(scores, target) + extra

    def of_object(output: Answer, target: Tensor) -> Tensor:
        loss: Tensor = function(output.scores, target) + 0.01 * output.more["hidden"].pow(2).mean()
        return loss if output.more["extra"] is None else loss + output.more["extra"]

    return {"scores": plain, "object": of_object, "loss": None}[recipe.gives]


def build(recipe: Recipe) -> nn.Module:
    """Return the model with its first weights."""
    torch.manual_seed(recipe.seed)
    return Drawn(recipe).double()


def optimizer_of(run: Run, parameters: Any) -> torch.optim.Optimizer:
    """Return an optimizer in which a parameter without a gradient keeps its value."""
    if run.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01)
    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-3)


@dataclass
class Trained:
    """What every step and every evaluation gave, and the state at the end."""

    losses: list[Tensor]
    gradients: list[dict[str, Tensor | None]]
    outputs: list[Any]
    states: list[dict[str, Tensor]]


def eagerly(recipe: Recipe, run: Run) -> Trained:
    """Train on one device; raises CannotTrainError where that is not possible or gives no numbers."""
    model, loss_fn, found = build(recipe), loss_function(recipe), Trained([], [], [], [])
    try:
        optimizer = optimizer_of(run, model.parameters())
        for number, (rows, length) in enumerate(run.batches):
            batch = batch_of(recipe, rows, length, number)
            loss = loss_of(model(*batch.args, **batch.kwargs), loss_fn, batch.target, batch.target is not None)
            loss.backward()
            found.losses.append(loss.detach())
            found.gradients.append({n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()})
            optimizer.step()
            optimizer.zero_grad()
            model.eval()
            with torch.no_grad():
                found.outputs.append(model(*batch.args, **batch.kwargs))
            model.train()
            found.states.append({name: value.clone() for name, value in model.state_dict().items()})
    except Exception as error:
        raise CannotTrainError(str(error)) from error
    if not all(bool(v.isfinite().all()) for v in (*found.losses, *found.states[-1].values())):
        raise CannotTrainError("not finite")
    return found


def compiled(recipe: Recipe, run: Run) -> CompiledModel:
    """Compile for the example's batch, nothing measured, and lay it out as drawn."""
    batch = batch_of(recipe, *run.batches[0], 0)
    first = compile(
        build(recipe),
        Cluster.local(sum(run.replicas)),
        example_inputs=batch.args,
        example_kwargs=batch.kwargs,
        example_target=batch.target,
        loss_fn=loss_function(recipe),
        batch_dims={"table": None, **({"ids": 1} if recipe.steps_first else {})},
        batch_norm="exact",
        costs="estimated",
        progress=False,
        stages=1,
        replicas=(1,),
        micro_batches=1,
    )
    replicas = run.replicas[: first.plan.blocks]
    normed = any(isinstance(m, nn.BatchNorm1d) for m in first.model.modules())
    schedule = "1f1b" if first.built.front.tail.linear and not run.gpipe else "gpipe"
    blocks, count = first.plan.blocks, len(replicas)
    cuts = [blocks - count + 1 + k for k in range(count - 1)] if run.late else None
    plan = lay_out(blocks, replicas, 1 if normed else run.micro_batches, schedule, cuts, [run.recompute] * count)
    if any(BY_PARTS in note for note in first.built.front.notes):
        plan = lay_out(blocks, (1,) * count, 1, schedule, cuts, [run.recompute] * count)
    return first.with_plan(plan)


def as_planned(recipe: Recipe, run: Run) -> Trained:
    """Train as planned."""
    program, found = compiled(recipe, run), Trained([], [], [], [])
    optimizer = optimizer_of(run, program.parameters())
    for number, (rows, length) in enumerate(run.batches):
        batch = batch_of(recipe, rows, length, number)
        found.losses.append(program.step(*batch.args, target=batch.target, **batch.kwargs))
        held = program.named_parameters()
        found.gradients.append({n: None if p.grad is None else p.grad.clone() for n, p in held})
        optimizer.step()
        optimizer.zero_grad()
        found.outputs.append(program.evaluate(*batch.args, **batch.kwargs))
        found.states.append({name: value.clone() for name, value in program.state_dict().items()})
    return found


def hold(recipe: Recipe, run: Run) -> None:
    """Fail unless the model trains as planned as on one device.

    Raises CannotTrainError where eager PyTorch does not train it, EfftraError where it is refused.
    """
    expected = eagerly(recipe, run)
    found = as_planned(recipe, run)
    for number in range(len(run.batches)):
        where = f"at step {number}"
        close({"loss": expected.losses[number]}, {"loss": found.losses[number]}, f"loss {where}")
        close(expected.gradients[number], found.gradients[number], f"gradient {where}")
        close(expected.states[number], found.states[number], f"state {where}")
        close(leaves(expected.outputs[number]), leaves(found.outputs[number]), f"output {where}")


def leaves(output: Any) -> dict[str, Any]:
    """Return what an output holds by its place."""
    if isinstance(output, Answer):
        output = {"class": Answer, "note": output.note, "scores": output.scores, "more": output.more}
    return {pytree.keystr(path): leaf for path, leaf in pytree.tree_flatten_with_path(output)[0]}


def close(expected: Mapping[str, Any], found: Mapping[str, Any], what: str) -> None:
    """Fail where values differ, or are on one side alone; relative to the largest of each, or a millionth of all."""
    assert expected.keys() == found.keys(), f"{what}: {expected.keys() ^ found.keys()} on one side alone"
    sizes = [float(v.abs().max()) for v in expected.values() if isinstance(v, Tensor) and v.numel()]
    overall = max(sizes, default=0.0)
    for name, value in expected.items():
        other = found[name]
        if not isinstance(value, Tensor) or not isinstance(other, Tensor):
            assert type(value) is type(other) and value == other, f"{what}: {name} is {other}, not {value}"
            continue
        assert value.dtype == other.dtype and value.shape == other.shape, f"{what}: {name} has another form"
        if not value.numel():
            continue
        scale = max(float(value.abs().max()), 1e-6 * overall, 1e-12)
        gap = float((value.double() - other.double()).abs().max())
        assert gap <= TOLERANCE * scale, f"{what}: {name} differs by {gap:.3g} where it reaches {scale:.3g}"
