"""What an executor works with: a stage's code, what a rank holds, one step's state and its result."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from efftra_fx.meta import Role
from efftra_fx.program import Recv

from .parts import Bound, Pieces
from .transport import Handle
from .weights import StepGradients, Sums

Waiting = Generator[tuple[Handle[Any], str], None, Any]


class StageCode(Protocol):
    """What a stage computes for a part with a fixed number of rows.

    `forward` takes one operand a role and returns the outputs and what the backward needs. The
    backwards take that and one gradient an output (None: none comes in), return gradients of the
    values that the stage reads (None: none), and add those of its parameters to the sums. With
    `defer`, gradients that are cheaper computed over several micro-batches at once leave their
    terms in `sums.terms`, under this object's id, until `finish`.
    """

    def forward(self, operands: list[Any]) -> tuple[Sequence[Any], Any]: ...

    def backward(
        self, saved: Any, gradients: list[Tensor | None], sums: Sums, defer: bool
    ) -> Sequence[Tensor | None]: ...

    def backward_input(self, saved: Any, gradients: list[Tensor | None]) -> tuple[Sequence[Tensor | None], Any]: ...

    def backward_weight(self, kept: Any, sums: Sums, defer: bool) -> Any: ...

    def finish(self, terms: Sequence[Any], sums: Sums) -> None: ...

    @property
    def patience(self) -> int: ...


@dataclass(frozen=True)
class BoundaryPart:
    """A value that this stage hands to the whole batch's tail: name, kind and the dimension of its rows."""

    name: str
    kind: str
    dim: int


@dataclass(frozen=True)
class StageWork:
    """All that a rank knows of its stage besides the program."""

    stage: int
    roles: tuple[Role, ...]
    sends: tuple[str, ...]
    boundaries: tuple[BoundaryPart, ...]
    buffers: tuple[str, ...]
    code: Callable[[int], StageCode]  # by number of rows
    random: bool
    once: frozenset[str] = frozenset()  # buffers written once a step, from their value at its start
    group: tuple[int, ...] = ()  # the stage's ranks, which agree on buffers at the end of a step
    together: tuple[int, ...] = ()  # the replica's ranks, where it is wider than one
    beside: tuple[int, ...] = ()  # by replica, the rank that this one meets; none where each computes alone
    shared: frozenset[str] = frozenset()  # buffers that all replicas compute from the rows of all
    parts: tuple[BoundaryPart, ...] = ()  # of what further buffers become, which all ranks write alike

    @property
    def meets(self) -> bool:
        """Say whether the code's calls are meetings with other ranks."""
        return bool(self.together or self.beside)


@dataclass
class Tensors:
    """What a rank holds between steps: parameters and buffers by the model's own names, constants by theirs."""

    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    constants: dict[str, Tensor]


@dataclass(frozen=True)
class Batch:
    """One global batch: tensors by input name, and the dimension of their rows (None: none)."""

    rows: int
    tensors: Mapping[str, Tensor]
    dims: Mapping[str, int | None]


class TailCode(Protocol):
    """The part of the loss that is computed once for the whole batch."""

    linear: bool
    random: bool  # draws random numbers: every rank that computes it must draw the same
    constant_stage: int  # the stage whose first replica adds the loss's constant term

    def seeds(self, batch: Batch) -> tuple[Mapping[str, Tensor], Tensor]:
        """Return dT/dS for each boundary, and T where every S is zero."""
        ...

    def join(self, batch: Batch, values: Mapping[str, Tensor]) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the loss of the joined values and its derivatives."""
        ...


class NewsCode(Protocol):
    """New values of the buffers that the whole batch makes."""

    random: bool  # draws random numbers: every rank must draw the same
    beside: bool  # ranks of this process share buffers: none may write one before all have read it

    @property
    def parts(self) -> Sequence[Bound]:
        """What the stages hand over."""
        ...

    def zeros(self, name: str) -> Tensor:
        """Return zeros like a part that is not of rows."""
        ...

    def make(self, batch: Batch, values: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the new values by buffer, from parts joined over the batch."""
        ...


@dataclass
class StepResult:
    """What a step leaves on one rank."""

    loss: Tensor | None
    gradients: dict[str, Tensor]
    parts: dict[str, list[tuple[int, int, Tensor]]]
    timeline: list[tuple[int, float, float]] = field(default_factory=list)


@dataclass
class Step:
    """What lives during one step."""

    batch: Batch
    seed: int
    gradients: StepGradients
    scale: float = 1.0  # of all gradients, not of the loss
    seeds: Mapping[str, Tensor] = field(default_factory=dict)
    constant: Tensor | None = None
    operands: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    arrived: dict[tuple[str, int, bool], Pieces] = field(default_factory=dict)
    pending: dict[tuple[str, int, bool], list[tuple[Recv, Handle[Tensor]]]] = field(default_factory=dict)
    outgoing: dict[tuple[str, int, bool], Tensor] = field(default_factory=dict)
    saved: dict[int, Any] = field(default_factory=dict)
    kept: dict[int, Any] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    parts: dict[str, list[tuple[int, int, Tensor]]] = field(default_factory=dict)
    news: dict[str, list[tuple[int, int, Tensor]]] = field(default_factory=dict)
    loss: Tensor | None = None
    reduced: Handle[Tensor] | None = None


Action = Callable[[Step], "Waiting | None"]
