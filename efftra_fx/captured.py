"""A captured computation, and how the model was switched when it was captured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn

from efftra_fx import private
from efftra_fx.assumed import Assumed
from efftra_fx.capture_guards import Guards
from efftra_fx.given_gradients import never_given, seldom_given
from efftra_fx.meta import CONSTANTS
from efftra_fx.python_use import PythonUse
from efftra_fx.settings import Setting
from efftra_fx.signature import Call, rows_of
from efftra_fx.step_module import OutputTree


@dataclass(frozen=True)
class Captured:
    """A captured computation.

    `gm` has placeholders with roles; `batch_leaves` says for each tensor leaf of the
    call along which dimension it splits by sample (None: it does not); `symbolic`
    says whether the number of rows is a symbol in the graph; `out_tree` is the
    structure of a captured model output (evaluation graphs). `guards` say for which
    inputs the graph is the model; `opaque` are the modules that it calls as they are,
    each with the reason; `flags` is how the model was switched (see `flags_of`).
    """

    gm: fx.GraphModule
    call: Call
    batch_leaves: tuple[int | None, ...]
    symbolic: bool
    out_tree: OutputTree | None = None
    guards: Guards | None = None
    opaque: tuple[tuple[str, str], ...] = ()
    flags: tuple[Any, ...] = ()
    seeded: tuple[str, ...] = ()  # those of them that draw from generators outside of torch
    python: PythonUse = PythonUse()  # what forward reads and writes in Python
    whole_loss: str = ""  # why the loss runs as it is, on the whole batch; empty where it is in the graph
    first_is_loss: bool = False  # the model returns a tuple, whose first element is its loss
    most_rows: int = 0  # of a graph with code that runs as it is: up to how many rows it was tried; 0 for any
    aligned: bool = False  # joined of what two numbers of rows gave, so that others are to be tried
    assumed: tuple[Assumed, ...] = ()  # of sizes, in tracing
    settings: tuple[Setting, ...] = ()  # numbers and tensors read in Python that the graph takes as tensors
    tried: dict[int, bool] = field(default_factory=dict, compare=False)  # whether it is the model for so many rows
    shapes_of_one: list[torch.Size] = field(default_factory=list, compare=False)  # of what it returns of a single row

    def allows(self, tensors: Sequence[Tensor]) -> bool:
        """Say whether all that the tracer has assumed of sizes holds for a batch; a single row is taken for two."""
        shapes = [
            t.shape if d is None else _of_two(t.shape, d) for t, d in zip(tensors, self.batch_leaves, strict=True)
        ]
        return all(assumed.holds(shapes) for assumed in self.assumed)

    def known_for(self, tensors: Sequence[Tensor]) -> bool | None:
        """Say whether the graph is the model for a batch of these sizes; None where that is to be tried.

        What the model does with a single row the tracer does not tell.
        """
        rows = rows_of(tensors, self.batch_leaves)
        if 0 < self.most_rows < rows:
            return False
        if rows == 1 or self.aligned:
            return self.tried.get(rows)
        return self.allows(tensors)

    @property
    def settings_text(self) -> list[str]:
        """The present values of its settings."""
        return [f"{one.read}={one.text}" for one in self.settings]

    def feed(self, copies: Iterable[Mapping[str, Tensor]] = ()) -> None:
        """Give the graph the present values of its settings, and `copies` of its constants on other devices too."""
        for one in self.settings:
            one.feed()
        for held in copies if self.settings else ():
            for name, constant in CONSTANTS[self.gm].items():
                if held.get(name, constant) is not constant:
                    held[name].copy_(constant)

    @cached_property
    def seldom(self) -> frozenset[str]:
        """The parameters that may get no gradient in some batches."""
        return seldom_given(self.gm)

    @cached_property
    def never(self) -> frozenset[str]:
        """The parameters that get no gradient, whatever the batch."""
        return never_given(self.gm)


def _of_two(shape: torch.Size, dim: int) -> torch.Size:
    """Return a shape with two rows where it has one: the tracer takes one row for no symbol."""
    return torch.Size((*shape[:dim], 2, *shape[dim + 1 :])) if shape[dim] == 1 else shape


def flags_of(model: nn.Module) -> tuple[Any, ...]:
    """Return how a model is switched: which modules train, which parameters want gradients, autocast, and hooks."""
    switches = (*(m.training for m in model.modules()), *(p.requires_grad for p in model.parameters()))
    return (*switches, *surroundings_of(model))


def surroundings_of(model: nn.Module) -> tuple[Any, ...]:
    """Return what holds around a model in either mode: autocast, and hooks."""
    casts = [(kind, torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    return (*casts, *private.hook_numbers(model))


__all__ = ["Captured", "flags_of", "surroundings_of"]
