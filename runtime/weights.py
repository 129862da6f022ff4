"""Sums of weight gradients over a step's micro-batches, laid out for the all-reduces that follow.

Gradients that are all-reduced together live in one flat tensor from the start, so that nothing
is copied before the sum. A micro-batch's gradients are written there first and added later. The
flat tensor is made when the first of its gradients is: by then the backward has given back what
the forward kept for the layers behind.

    flat   | layer.weight ............ | layer.bias .. | other.weight ....... |
             ^ sums["layer.weight"]      ^ sums["layer.bias"]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from efftra_fx.opaque import NOTHING
from efftra_fx.program import AllReduce

from .transport import Handle, Transport, result_of


@dataclass
class Sums:
    """One step's sums, in the order of the stage's parameters; where not `filled`, a tensor holds nothing yet."""

    tensors: list[Tensor | None]
    filled: list[bool]
    reserved: dict[int, Callable[[], None]] = field(default_factory=dict)  # makes the bucket in which a place lies
    terms: dict[int, list[Any]] = field(default_factory=dict)  # what gradients wait for, by maker
    complete: Callable[[int], None] | None = None  # told, in the last micro-batch, which places have their last term

    def put(self, place: int, gradient: Tensor) -> None:
        """Add a gradient that was computed apart."""
        held = self.at(place)
        if held is None:
            self.tensors[place] = gradient
        elif self.filled[place]:
            held.add_(gradient)
        else:
            held.copy_(gradient)
        self.filled[place] = True

    def at(self, place: int) -> Tensor | None:
        """Return the tensor that a gradient is written or added into; None: it needs none before it exists."""
        if self.tensors[place] is None and (make := self.reserved.get(place)) is not None:
            make()
        return self.tensors[place]

    def held(self, places: Sequence[int]) -> Held | None:
        """Return what `at` says of these places, each asked for when it is used; None if one needs no tensor."""
        if all(self.tensors[place] is not None or place in self.reserved for place in places):
            return Held(self, places)
        return None


class Held:
    """Tensors of several sums, each made no sooner than it is asked for."""

    __slots__ = ("places", "sums")

    def __init__(self, sums: Sums, places: Sequence[int]) -> None:
        self.sums, self.places = sums, places

    def __getitem__(self, index: int) -> Tensor:
        tensor = self.sums.at(self.places[index])
        assert tensor is not None
        return tensor


@dataclass(frozen=True)
class Slot:
    """Where a parameter's gradient lies in a bucket."""

    name: str
    start: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def view(self, flat: Tensor) -> Tensor:
        """Return the gradient inside a bucket, laid out like its weight."""
        return flat.as_strided(self.shape, self.stride, flat.storage_offset() + self.start)


@dataclass(frozen=True)
class Bucket:
    """Parameters whose gradients are all-reduced together."""

    slots: tuple[Slot, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Number of elements."""
        return sum(slot.size for slot in self.slots)

    def allocate(self, device: torch.device) -> Tensor:
        """Return a new flat tensor for one step."""
        return torch.empty(self.size, dtype=self.dtype, device=device)


def make_bucket(
    names: Sequence[str],
    shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    strides: Mapping[str, tuple[int, ...]],
) -> Bucket:
    """Lay parameters one behind another; a dense weight keeps its strides, any other lies contiguous."""
    slots, at = [], 0
    for name in names:
        shape = shapes[name][0]
        slots.append(Slot(name, at, shape, _dense(shape, strides.get(name))))
        at += math.prod(shape)
    return Bucket(tuple(slots), shapes[names[0]][1])


def _dense(shape: tuple[int, ...], stride: tuple[int, ...] | None) -> tuple[int, ...]:
    """Return these strides if they cover exactly the shape's elements, else those of a contiguous tensor."""
    if stride is not None:
        expected = 1
        for step, extent in sorted(zip(stride, shape, strict=True)):
            if extent != 1 and step != expected:
                break
            expected *= extent
        else:
            return stride
    result: list[int] = []
    step = 1
    for extent in reversed(shape):
        result.append(step)
        step *= max(extent, 1)
    return tuple(reversed(result))


class Finisher(Protocol):
    """What makes the gradients that waited for several micro-batches."""

    @property
    def patience(self) -> int: ...  # for how many micro-batches they may wait before their terms outweigh a gradient

    def finish(self, terms: Sequence[Any], sums: Sums) -> None: ...


class Gradients:
    """How one rank's weight gradients are laid out and reduced; `names` are its stage's parameters by place."""

    def __init__(
        self,
        names: Sequence[str],
        reduces: Sequence[AllReduce],
        shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
        strides: Mapping[str, tuple[int, ...]],
        device: torch.device,
    ) -> None:
        self.names, self.device = tuple(names), device
        self.place = {name: index for index, name in enumerate(names)}
        self.buckets = {reduce: make_bucket(reduce.parameters, shapes, strides) for reduce in reduces}

    def start(self) -> StepGradients:
        """Return the empty sums of one step."""
        return StepGradients(self)


class StepGradients:
    """One step's gradients: sums while micro-batches run, then buckets on their way, then results."""

    def __init__(self, layout: Gradients) -> None:
        self.layout = layout
        self.sums = Sums([None] * len(layout.names), [False] * len(layout.names))
        self.flats: dict[AllReduce, Tensor] = {}
        self.makers: dict[int, Finisher] = {}
        self.under_way: list[tuple[AllReduce, Handle[Tensor]]] = []
        self.waiting: list[AllReduce] = list(layout.buckets)  # not yet started, in the program's order
        self.lacking: dict[AllReduce, set[int]] = {}
        for reduce, bucket in layout.buckets.items():
            make = partial(self._make, reduce)
            self.sums.reserved.update((layout.place[slot.name], make) for slot in bucket.slots)

    def open(self, maker: Finisher, transport: Transport | None = None) -> Sums:
        """Return the sums for one more micro-batch.

        For the last micro-batch `transport` is given: then each bucket's all-reduce starts as soon as all of it
        is complete and those before it in the program have started, while the backward goes on.
        """
        self.makers[id(maker)] = maker
        if transport is not None and self.waiting:
            self.lacking = {r: {self.layout.place[s.name] for s in b.slots} for r, b in self.layout.buckets.items()}
            self.sums.complete = lambda place: self._complete(place, transport)
        return self.sums

    def _make(self, reduce: AllReduce) -> None:
        """Make a bucket, whose gradients are written or added in place from now on."""
        bucket = self.layout.buckets[reduce]
        flat = self.flats[reduce] = bucket.allocate(self.layout.device)
        for slot in bucket.slots:
            self.sums.tensors[self.layout.place[slot.name]] = slot.view(flat)

    def close(self, last: bool) -> None:
        """Compute gradients that have waited long enough; behind the last micro-batch all that wait."""
        for key, terms in self.sums.terms.items():
            maker = self.makers[key]
            if terms and (last or len(terms) >= maker.patience):
                maker.finish(terms, self.sums)
                terms.clear()

    def _complete(self, place: int, transport: Transport) -> None:
        self.sums.filled[place] = True
        for lacking in self.lacking.values():
            lacking.discard(place)
        while self.waiting and not self.lacking[self.waiting[0]]:
            self.reduce(self.waiting[0], transport)

    def reduce(self, reduce: AllReduce, transport: Transport) -> None:
        """Start a bucket's all-reduce unless it has; parameters without a gradient here add nothing."""
        if reduce not in self.waiting:
            return
        self.waiting.remove(reduce)
        bucket = self.layout.buckets[reduce]
        flat = self.flats.pop(reduce, None)
        if flat is None:
            flat = bucket.allocate(self.layout.device).fill_(NOTHING)
        else:
            for slot in bucket.slots:
                if not self.sums.filled[self.layout.place[slot.name]]:
                    slot.view(flat).fill_(NOTHING)
        for slot in bucket.slots:
            self.sums.tensors[self.layout.place[slot.name]] = None
            del self.sums.reserved[self.layout.place[slot.name]]
        self.under_way.append((reduce, transport.all_reduce(flat, reduce.ranks)))

    def results(self) -> Generator[tuple[Handle[Any], str], None, dict[str, Tensor]]:
        """Wait for all sums and return the gradients by name."""
        found: dict[str, Tensor] = {}
        for reduce, handle in self.under_way:
            what = f"all_reduce of '{reduce.parameters[0]}'"
            flat = yield from result_of(handle, what)
            # Tensors of their own over the bucket's memory, which may be detached in place as any gradient.
            found.update({slot.name: slot.view(flat).data for slot in self.layout.buckets[reduce].slots})
        for name, tensor, filled in zip(self.layout.names, self.sums.tensors, self.sums.filled, strict=True):
            if filled and tensor is not None:
                found[name] = tensor
        self.sums.complete = None  # both refer to this object: a cycle would keep the buckets for a while
        self.sums.reserved.clear()
        return found
