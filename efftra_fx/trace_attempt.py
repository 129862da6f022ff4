"""One way to capture a step as a graph: with answers for what it asks, and with some modules kept whole."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from efftra_fx import private
from efftra_fx.assumed import assumed_of
from efftra_fx.capture_align import OtherOperatorsError, align, keep_places
from efftra_fx.capture_chance import seeded_from_torch
from efftra_fx.capture_checkpoints import checkpoints_inline
from efftra_fx.capture_encoders import padding_zeroed
from efftra_fx.capture_export import Exported, export_step
from efftra_fx.capture_guards import (
    Answers,
    Asked,
    AsksValuesError,
    CountsRowsError,
    Guards,
    NotCapturedError,
)
from efftra_fx.capture_loss import WholeLoss
from efftra_fx.capture_norms import averages_of_all_batches, norms_of_one_device
from efftra_fx.capture_opaque import (
    Watch,
    alignments_kept_whole,
    functions_kept_whole,
    modules_kept_whole,
)
from efftra_fx.capture_packed import sequences_kept_padded
from efftra_fx.capture_refused import own_chance_refused
from efftra_fx.capture_sizes import sizes_kept_symbols
from efftra_fx.captured import Captured
from efftra_fx.plain_graph import inputs_of, plain_graph
from efftra_fx.python_state import python_kept
from efftra_fx.settings import Setting
from efftra_fx.signature import Call, rows_of, rows_round, take_rows
from efftra_fx.step_module import LossFn, OutputTree, Replay, Step, loss_alone

_LEAST_ALIGNED = 3  # two numbers of rows are held side by side, and one row is not like several: it broadcasts

Watches = tuple[Watch, Watch, tuple[Watch, Watch] | None, tuple[Watch, ...]]


@dataclass
class Attempt:
    """One way to capture a step: see the module's words."""

    model: nn.Module
    call: Call
    tensors: tuple[Tensor, ...]
    batch_leaves: tuple[int | None, ...]
    loss_fn: LossFn | None
    want: str
    answers: Answers | None = None
    flags: tuple[Any, ...] = ()
    opaque: dict[str, str] = field(default_factory=dict)
    watches: Watches | None = None
    whole_loss: WholeLoss | None = None
    moving: Sequence[Sequence[int]] = ()
    undivided: bool = False
    drawing: tuple[str, ...] = ()
    settings: tuple[Setting, ...] = ()
    first: list[None] = field(default_factory=list)  # not empty where the model's loss begins a tuple

    def capture(self) -> Captured:
        """Export the step; raises AsksValuesError where it asks for values that nobody wrote down."""
        trees: list[OutputTree] = []
        guards: list[list[Asked]] = []
        step = Step(self.model, self.loss_fn, self.call, self.want, trees.append)
        step.training = self.model.training
        step.answers, step.note_guards, step.call_loss = self.answers, guards.append, self.whole_loss
        step.note_first = self.note_first
        step.settings = self.settings
        exported = self.exported(step, self.tensors, self.batch_leaves, self.moving)
        asked = guards[-1] if guards else []
        gm, found = plain_graph(exported, step, asked)
        _refuse_least_rows(gm, self.batch_leaves)
        tree = trees[-1] if trees else None
        symbolic, aligned = _is_symbolic(gm, self.batch_leaves), False
        if not symbolic and not self.moving:
            gm, found = self.aligned(step, gm, found, guards)
            symbolic = aligned = _is_symbolic(gm, self.batch_leaves)
        reason = self.whole_loss.reason if self.whole_loss is not None else ""
        opaque = tuple(self.opaque.items())
        flags = self.flags
        return Captured(
            gm,
            self.call,
            self.batch_leaves,
            symbolic,
            tree,
            found,
            opaque,
            flags,
            seeded=self.seeded,
            whole_loss=reason,
            first_is_loss=bool(self.first),
            most_rows=2 * rows_of(self.tensors, self.batch_leaves) if opaque and not self.undivided else 0,
            aligned=aligned,
            assumed=tuple(filter(None, [assumed_of(inputs_of(gm))])),
            settings=self.settings,
        )

    @property
    def seeded(self) -> tuple[str, ...]:
        """The modules that run as they are and draw from generators outside of torch, or hold one that does."""
        return tuple(path for path in self.opaque if any(within(one, [path]) for one in self.drawing))

    def note_first(self) -> None:
        """Write down that the model's loss begins a tuple."""
        self.first.append(None)

    @contextmanager
    def loss_alone(self) -> Iterator[None]:
        """Let a model that runs as it is, and gives its own loss, return nothing else to a step."""
        if "" not in self.opaque or self.want != "loss" or self.loss_fn is not None:
            yield
            return
        with loss_alone(self.model, self.note_first):
            yield

    def exported(
        self,
        step: Step,
        tensors: tuple[Tensor, ...],
        batch_leaves: Sequence[int | None],
        moving: Sequence[Sequence[int]] = (),
    ) -> Exported:
        """Export the step of these tensors, with all in it that is put otherwise while a graph is captured."""
        kept = {path: self.model.get_submodule(path) for path in self.opaque}
        with ExitStack() as stack:
            stack.enter_context(functions_kept_whole())
            stack.enter_context(alignments_kept_whole())
            stack.enter_context(averages_of_all_batches())
            stack.enter_context(norms_of_one_device())
            stack.enter_context(own_chance_refused())
            stack.enter_context(sizes_kept_symbols())
            stack.enter_context(checkpoints_inline())
            stack.enter_context(sequences_kept_padded())
            stack.enter_context(padding_zeroed(self.want == "loss"))
            stack.enter_context(python_kept(self.model, self.loss_fn))  # what forward keeps of a trace is fake
            stack.enter_context(self.loss_alone())
            stack.enter_context(seeded_from_torch(self.model, self.seeded))
            if self.watches is not None:
                stack.enter_context(modules_kept_whole(kept, *self.watches, undivided=self.undivided))
            more = [tensor for one in self.settings for tensor in one.tensors]
            none = [None] * len(more)
            moves = (*moving, *(() for _ in more)) if moving else ()
            return export_step(step, (*tensors, *more), (*batch_leaves, *none), moves)

    def aligned(
        self, step: Step, gm: fx.GraphModule, found: Guards | None, asked: list[list[Asked]]
    ) -> tuple[fx.GraphModule, Guards | None]:
        """Return graph and guards for any number of rows where the exporter gave them for the example's alone."""
        place = next((i, d) for i, d in enumerate(self.batch_leaves) if d is not None)
        rows, tensors = rows_of(self.tensors, self.batch_leaves), list(self.tensors)
        if rows < _LEAST_ALIGNED:
            rows, tensors = _LEAST_ALIGNED, rows_round(tensors, self.batch_leaves, _LEAST_ALIGNED)
        graphs, guards = [], []
        for count in (rows, rows - 1):
            part = take_rows(tensors, self.batch_leaves, slice(0, count))
            exported = self.exported(step, tuple(part), [None] * len(part))
            graph, guard = plain_graph(exported, step, asked[-1] if asked else [])
            graphs.append(graph)
            guards.append(guard)
        name = self.call.tensor_names[place[0]]
        try:
            one = align(graphs[0], graphs[1], (rows, rows - 1), (name, place[1]))
            if guards[0] is not None and guards[1] is not None:
                dims = dict(zip(self.call.tensor_names, self.batch_leaves, strict=True))
                read = [(role.name, d) for role in guards[0].roles if (d := dims.get(role.name)) is not None]
                both = align(guards[0].gm, guards[1].gm, (rows, rows - 1), next(iter(read), (name, place[1])))
                found = replace(guards[0], gm=both)
        except OtherOperatorsError as error:
            if not error.path:
                raise NotCapturedError(str(error)) from error
            asks = AsksValuesError(str(error))
            parts = error.path.split(".")
            asks.paths = tuple(".".join(parts[:count]) for count in range(len(parts), 0, -1))
            asks.reason = "it computes other operators for other numbers of rows"
            raise asks from error
        again = Replay(step, one)
        again.training = step.training
        exported = export_step(again, self.tensors, self.batch_leaves)
        whole, _ = plain_graph(exported, again, [])
        keep_places(one, whole)
        return whole, found


def _refuse_least_rows(gm: fx.GraphModule, batch_leaves: Sequence[int | None]) -> None:
    """Raise CaptureError where the graph holds only from a number of rows on which a part may not have."""
    for node, dim in zip(inputs_of(gm), batch_leaves, strict=True):
        size = node.meta["val"].shape[dim] if dim is not None else None
        least = private.least_size(size) if isinstance(size, torch.SymInt) and not size.node.expr.is_number else 0
        if least > 2:
            raise CountsRowsError(
                f"the model cannot be captured as a graph: it takes at least {least} rows, and a part of the batch may "
                "have fewer; select by a mask in place of a number of rows"
            )


def _is_symbolic(gm: fx.GraphModule, batch_leaves: Sequence[int | None]) -> bool:
    """Say whether every input's number of rows is a symbol."""
    for node, dim in zip(inputs_of(gm), batch_leaves, strict=True):
        size = node.meta["val"].shape[dim] if dim is not None else None
        if isinstance(size, int) or (size is not None and size.node.expr.is_number):
            return False
    return True


def within(path: str, modules: Collection[str]) -> bool:
    """Say whether a module is one of these, or inside one."""
    return any(not one or path == one or path.startswith(f"{one}.") for one in modules)


__all__ = ["Attempt", "Watches", "within"]
