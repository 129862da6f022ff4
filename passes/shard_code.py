"""Generated functions of a stage whose ranks meet on their way, as the executor calls them on one rank.

They are those of `stage_code`, as generators: they yield where the rank meets the others of its tensor
group, or those that compute the same stage on other rows.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from efftra_fx.collectives import Exchange
from efftra_fx.meta import Role

from .differentiate import Part, differentiate
from .shard_cuts import Placement
from .shard_segments import Meeting, Segments
from .split import StageGraph
from .stage_code import MOST_SIZES, Example, Flags, Sums, TrainingCode, put_apart


class MeetingCode(TrainingCode):
    """Forward and backward of one rank; every call is a generator, see `Segments`."""

    def __init__(
        self, stage: StageGraph, flags: Flags, example: Example, rows: int, recompute: bool, device: str
    ) -> None:
        super().__init__(stage, flags, example, rows, recompute, device)
        parts = (self.parts.forward, self.parts.backward, self.parts.backward_input, self.parts.backward_weight)
        self.pieces = {part.name: _segments(part) for part in parts}

    @property
    def meetings(self) -> tuple[str, ...]:
        """What the rank sums with others, in order: the same on all of them."""
        return tuple(f"{name} {what}" for name, piece in self.pieces.items() for what in piece.sums)

    def forward(self, operands: list[Any]) -> Any:
        return self.pieces["forward"](operands)

    def backward(self, saved: Any, gradients: list[Tensor | None], sums: Sums, defer: bool) -> Any:
        return self._backward(saved, gradients, sums)

    def _backward(self, saved: Any, gradients: list[Tensor | None], sums: Sums) -> Meeting:
        values, weights = yield from self.pieces["backward"](saved, self._incoming(gradients))
        self._put(self.parts.backward, 1, weights, sums)
        return self._spread(values)

    def backward_input(self, saved: Any, gradients: list[Tensor | None]) -> Any:
        return self._backward_input(saved, gradients)

    def _backward_input(self, saved: Any, gradients: list[Tensor | None]) -> Meeting:
        values, kept = yield from self.pieces["backward_input"](saved, self._incoming(gradients))
        return self._spread(values), kept

    def backward_weight(self, kept: Any, sums: Sums, defer: bool) -> Any:
        return self._backward_weight(kept, sums)

    def _backward_weight(self, kept: Any, sums: Sums) -> Meeting:
        weights = yield from self.pieces["backward_weight"](kept)
        self._put(self.parts.backward_weight, 0, weights, sums)

    def _put(self, part: Part, group: int, weights: Sequence[Any], sums: Sums) -> None:
        offset = sum(part.gives[:group])
        places = [index - offset for index in part.weights]
        put_apart(sums, [self.places[place] for place in places], [weights[place] for place in places])


class MeetingForward:
    """A stage that only runs forward; recorded anew for operands of each shape."""

    meetings: tuple[str, ...] = ()
    saved_bytes = 0

    def __init__(self, stage: StageGraph, device: str) -> None:
        self.stage, self.device = stage, device
        self.known: dict[Any, Segments] = {}

    def forward(self, operands: list[Any]) -> Any:
        return self._forward(operands)

    def _forward(self, operands: list[Any]) -> Generator[tuple[Exchange | None, Any], Any, tuple[Sequence[Any], Any]]:
        key = tuple((tuple(t.shape), tuple(t.stride()), t.dtype) for t in operands)
        if key not in self.known:
            blank = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in operands]
            none = (False,) * len(blank)
            count = len(self.stage.outputs)
            parts = differentiate(
                self.stage.gm,
                blank,
                wrt=none,
                grad_outputs=(False,) * count,
                weight_inputs=none,
                device=self.device,
            )
            self.known[key] = _segments(parts.forward)
        outputs, _ = yield from self.known[key](operands)
        return outputs, None

    def backward(self, saved: Any, gradients: list[Tensor | None], sums: Sums, defer: bool) -> Any:
        raise AssertionError("a stage without gradients has no backward")

    def backward_input(self, saved: Any, gradients: list[Tensor | None]) -> Any:
        raise AssertionError("a stage without gradients has no backward")

    def backward_weight(self, kept: Any, sums: Sums, defer: bool) -> None:
        raise AssertionError("a stage without gradients has no backward")

    def finish(self, terms: Sequence[Any], sums: Sums) -> None:
        raise AssertionError("a stage without gradients has no backward")

    patience = 2


def _segments(part: Part) -> Segments:
    return Segments(part.name, part.graph, part.takes, part.gives, part.consumes)


def meeting_code(
    stage: StageGraph, flags: Flags, example: Example, recompute: bool, device: str
) -> Callable[[int], MeetingCode | MeetingForward]:
    """Return what makes the functions of one rank by number of rows, and keeps the latest."""
    forward = MeetingForward(stage, device)

    @lru_cache(maxsize=MOST_SIZES)
    def code(rows: int) -> MeetingCode | MeetingForward:
        return MeetingCode(stage, flags, example, rows, recompute, device) if flags.any else forward

    return code


def local_example(example: Example, placed: Mapping[str, Placement], rank: int) -> Example:
    """Return a maker of examples in which cut parameters have the rank's shape."""

    def local(role: Role, rows: int) -> Any:
        value = example(role, rows)
        place = placed.get(role.name) if role.kind == "parameter" else None
        if place is None or place.cut is None:
            return value
        shape = (*value.shape[: place.dim], place.cut.lengths[rank], *value.shape[place.dim + 1 :])
        return torch.empty(shape, dtype=value.dtype, device=value.device)

    return local


__all__ = ["MeetingCode", "MeetingForward", "local_example", "meeting_code"]
