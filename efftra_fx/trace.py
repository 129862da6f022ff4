"""Any model to a functional graph of the whole training step.

The graph computes `loss = loss_fn(model(*args, **kwargs), target)`. Its placeholders
are the parameters, buffers, constants and inputs, each with a `ROLE`; its outputs are
the loss and then the new values of the buffers that the forward writes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn

from efftra_fx import private
from efftra_fx.assumed import Assumed, assumed_of
from efftra_fx.capture_align import OtherOperatorsError, align, keep_places
from efftra_fx.capture_chance import draws_in, seeded_from_torch
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
from efftra_fx.capture_loss import WholeLoss, dtype_of_loss
from efftra_fx.capture_norms import averages_of_all_batches, norms_of_one_device
from efftra_fx.capture_opaque import (
    NotKeptError,
    Watch,
    alignments_kept_whole,
    functions_kept_whole,
    modules_kept_whole,
)
from efftra_fx.capture_packed import sequences_kept_padded
from efftra_fx.capture_refused import own_chance_refused
from efftra_fx.chance import EXTREMES, NoChance
from efftra_fx.errors import CaptureError, EfftraError
from efftra_fx.given_gradients import never_given, seldom_given
from efftra_fx.held_buffers import HeldBuffers, same_bits
from efftra_fx.places import line_of_error
from efftra_fx.plain_graph import WritesParametersError, inputs_of, plain_graph, writes_parameter
from efftra_fx.python_state import python_kept
from efftra_fx.python_use import PythonUse
from efftra_fx.signature import Call, distinct, rows_of, rows_round, take_rows
from efftra_fx.step_module import LossFn, OutputTree, Replay, Step, loss_alone, loss_of


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

    @cached_property
    def seldom(self) -> frozenset[str]:
        """The parameters that may get no gradient in some batches."""
        return seldom_given(self.gm)

    @cached_property
    def never(self) -> frozenset[str]:
        """The parameters that get no gradient, whatever the batch."""
        return never_given(self.gm)


def capture(
    model: nn.Module,
    call: Call,
    tensors: Sequence[Tensor],
    batch_leaves: Sequence[int | None],
    loss_fn: LossFn | None = None,
    want: str = "loss",
    whole_loss: str = "",
    divided: bool = False,
    moving: Sequence[Sequence[int]] = (),
    whole_model: str = "",
    undivided: bool = False,
    drawing: Mapping[str, str] | None = None,
) -> Captured:
    """Capture the step (`want="loss"`) or the model's output (`want="output"`) as a graph.

    Leaves with a batch dimension get a symbolic size there; where the model fixes that
    size, the graph is captured at the size of the example and `symbolic` is False. So do each leaf's
    `moving` dimensions where the model allows it.
    With `whole_loss`, a reason, the loss function is one node that sees the whole batch; or, if it may be
    `divided`, the part at hand. With `whole_model`, a reason, the model is one node, which sees the whole
    batch if it is `undivided`; so is one whose output is wanted and that cannot be had otherwise. Modules that are
    `drawing` from generators outside of torch, each with which, run as they are on the whole batch.
    Raises NotCapturedError where only that is left, another CaptureError where the model cannot be captured.
    """
    dims = tuple(batch_leaves)
    attempt = _Attempt(model, call, distinct(tensors), dims, loss_fn, want, flags=flags_of(model), moving=moving)
    if whole_loss:
        assert loss_fn is not None
        attempt.whole_loss = WholeLoss(loss_fn, whole_loss, _dtype_of_loss(attempt), divided)
    if drawing:
        attempt.drawing, attempt.undivided = tuple(drawing), True
        attempt.opaque.update((path, f"it draws from Python's {which}") for path, which in drawing.items())
    try:
        if whole_model:
            attempt.opaque.clear()
            attempt.opaque[""], attempt.undivided = _reason(whole_model), undivided or attempt.undivided
            return _with_answers(attempt)
        return _with_answers(attempt) if drawing else _captured(attempt)
    except NotCapturedError as error:
        if want != "output" or whole_model or moving:
            raise
        undivided = isinstance(error, CountsRowsError)
        return capture(
            model, call, tensors, dims, want=want, whole_model=str(error), undivided=undivided, drawing=drawing
        )


def _captured(attempt: _Attempt) -> Captured:
    try:
        return attempt.capture()
    except AsksValuesError as first:
        return _with_answers(attempt, first)
    except WritesParametersError:
        raise
    except CaptureError:
        with _state_kept(attempt), torch.enable_grad(), _own_code(attempt):  # where the model itself fails, say that
            _eager(attempt).result([t.clone() for t in attempt.tensors])
        raise


def python_draws(
    model: nn.Module,
    call: Call,
    tensors: Sequence[Tensor],
    dims: Sequence[int | None],
    loss_fn: LossFn | None,
    want: str = "loss",
) -> dict[str, str]:
    """Return the modules that draw from generators outside of torch, and from which; none where the run fails."""
    attempt = _Attempt(model, call, distinct(tensors), tuple(dims), loss_fn, want)
    try:
        with _state_kept(attempt), _own_code(attempt):
            return draws_in(model, lambda: _eager(attempt).result([t.clone() for t in attempt.tensors]))
    except CaptureError:  # there is another error to tell of
        return {}


def flags_of(model: nn.Module) -> tuple[Any, ...]:
    """Return how a model is switched: which modules train, which parameters want gradients, autocast, and hooks."""
    switches = (*(m.training for m in model.modules()), *(p.requires_grad for p in model.parameters()))
    return (*switches, *surroundings_of(model))


def surroundings_of(model: nn.Module) -> tuple[Any, ...]:
    """Return what holds around a model in either mode: autocast, and hooks."""
    casts = [(kind, torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    return (*casts, *private.hook_numbers(model))


_LEAST_ALIGNED = 3  # two numbers of rows are held side by side, and one row is not like several: it broadcasts

Watches = tuple[Watch, Watch, tuple[Watch, Watch] | None, tuple[Watch, ...]]


@dataclass
class _Attempt:
    """One way to capture a step: with answers for what it asks, and with some modules kept whole."""

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
    first: list[None] = field(default_factory=list)  # not empty where the model's loss begins a tuple

    def capture(self) -> Captured:
        """Export the step; raises AsksValuesError where it asks for values that nobody wrote down."""
        trees: list[OutputTree] = []
        guards: list[list[Asked]] = []
        step = Step(self.model, self.loss_fn, self.call, self.want, trees.append)
        step.training = self.model.training
        step.answers, step.note_guards, step.call_loss = self.answers, guards.append, self.whole_loss
        step.note_first = self.note_first
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
        )

    @property
    def seeded(self) -> tuple[str, ...]:
        """The modules that run as they are and draw from generators outside of torch, or hold one that does."""
        return tuple(path for path in self.opaque if any(_within(one, [path]) for one in self.drawing))

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
            stack.enter_context(checkpoints_inline())
            stack.enter_context(sequences_kept_padded())
            stack.enter_context(padding_zeroed(self.want == "loss"))
            stack.enter_context(python_kept(self.model, self.loss_fn))  # what forward keeps of a trace is fake
            stack.enter_context(self.loss_alone())
            stack.enter_context(seeded_from_torch(self.model, self.seeded))
            if self.watches is not None:
                stack.enter_context(modules_kept_whole(kept, *self.watches, undivided=self.undivided))
            return export_step(step, tensors, batch_leaves, moving)

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


def _of_two(shape: torch.Size, dim: int) -> torch.Size:
    """Return a shape with two rows where it has one: the tracer takes one row for no symbol."""
    return torch.Size((*shape[:dim], 2, *shape[dim + 1 :])) if shape[dim] == 1 else shape


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


def _with_answers(attempt: _Attempt, first: AsksValuesError | None = None) -> Captured:
    """Capture again with the answers of a real run; modules whose questions depend on parameters stay whole."""
    modules = dict(attempt.model.named_modules())
    while True:
        try:
            attempt.answers, attempt.watches = _run_for_real(attempt, {path: modules[path] for path in attempt.opaque})
        except CaptureError as error:
            if first is None or first.reason == AsksValuesError.reason or isinstance(error, WritesParametersError):
                raise
            raise NotCapturedError(f"{first}; nor can parts of it run as they are: {error}") from error
        try:
            return attempt.capture()
        except NotKeptError as error:
            path, reason = error.path.rpartition(".")[0], f"'{error.path}' in it {error.problem}"
            if not path:
                raise NotCapturedError(str(error)) from error
            del attempt.opaque[error.path]
        except AsksValuesError as again:
            # What an opaque module holds is asked again only where that could not be opaque itself.
            left = (p for p in again.paths if p in modules and not _within(p, attempt.opaque))
            outer = next(left, None)
            if outer is None:
                raise NotCapturedError(str(again)) from (again.__cause__ or first)
            path = outer
            place = re.search(r' at (File "[^"]+", line \d+|[^ ;]+:\d+)', str(again))
            line = place[1] if place else ""
            reason = f"{again.reason} at {line}" if line else again.reason
        kind = type(modules[path])
        alike = [p for p, m in modules.items() if p and type(m) is kind and not _within(p, attempt.opaque)]
        for inner in [q for q in attempt.opaque if _within(q, alike)]:
            del attempt.opaque[inner]
        attempt.opaque.update(dict.fromkeys(alike, reason))


def _within(path: str, modules: Collection[str]) -> bool:
    """Say whether a module is one of these, or inside one."""
    return any(not one or path == one or path.startswith(f"{one}.") for one in modules)


def _reason(why: str) -> str:
    """Return why a model is no graph, without what to do about it."""
    return why.removeprefix("the model cannot be captured as a graph: ").partition("; ")[0]


def _run_for_real(attempt: _Attempt, kept: Mapping[str, nn.Module]) -> tuple[Answers, Watches]:
    """Run the eager model on the example, and on a smaller batch; leave buffers and random state as they were."""
    rows, step = rows_of(attempt.tensors, attempt.batch_leaves), _eager(attempt)
    watches, halves = (Watch(kept), Watch(kept)), (Watch(kept), Watch(kept))
    answers = Answers()

    def run(part: slice) -> None:
        step.result([t.clone() for t in take_rows(attempt.tensors, attempt.batch_leaves, part)])

    def run_all() -> None:
        run(slice(0, rows))

    with _state_kept(attempt), attempt.loss_alone(), seeded_from_torch(attempt.model, attempt.seeded):
        with watches[0].on(), answers.recording(), _own_code(attempt):
            run(slice(0, rows))
        with watches[1].on(), _own_code(attempt, f"{max(1, rows - 1)} of its {rows} rows"):
            run(slice(0, max(1, rows - 1)))
        extremes = tuple(filter(None, (_at_most(run_all, kept, unit) for unit in EXTREMES if watches[0].draws)))
        try:
            for watch, part in zip(halves, (slice(0, rows // 2), slice(rows // 2, rows)), strict=True):
                if kept:
                    with watch.on():
                        run(part)
        except Exception:  # a half may be too small for the model
            return answers, (*watches, None, extremes)
    return answers, (*watches, halves, extremes)


def _at_most(run: Callable[[], None], kept: Mapping[str, nn.Module], unit: float) -> Watch | None:
    """Watch a run that draws one number alone; None where it does not run so, which need not be possible."""
    watch = Watch(kept)
    try:
        with watch.on(), NoChance(unit):
            run()
    except Exception:  # whatever the user's code makes of such numbers
        return None
    return watch


def _eager(attempt: _Attempt) -> Step:
    return Step(attempt.model, attempt.loss_fn, attempt.call, attempt.want, lambda tree: None)


@contextmanager
def _state_kept(attempt: _Attempt) -> Iterator[None]:
    """Run the model as a step or an evaluation does; its state and random numbers are afterwards as they were.

    Raises CaptureError where it writes parameters, also where autograd does not see it (through `.data`).
    """
    held = HeldBuffers(attempt.model)
    parameters = [(name, p, p.detach().clone()) for name, p in attempt.model.named_parameters()]
    try:
        with ExitStack() as stack:
            differentiated = attempt.want == "loss"
            for one in (
                torch.random.fork_rng(),
                torch.set_grad_enabled(differentiated),
                padding_zeroed(differentiated),
                python_kept(attempt.model, attempt.loss_fn),
            ):
                stack.enter_context(one)
            stack.enter_context(sequences_kept_padded())
            stack.enter_context(norms_of_one_device())
            yield
    finally:
        held.restore()
        written = [name for name, p, value in parameters if not same_bits(p, value)]
        with torch.no_grad():
            for _, p, value in parameters if written else ():
                p.copy_(value)
    if written:
        raise WritesParametersError(writes_parameter(written[0]))


@contextmanager
def _own_code(attempt: _Attempt, part: str = "") -> Iterator[None]:
    """Run the user's own code on the example, or a part of it; raise CaptureError for what it raises."""
    try:
        yield
    except AsksValuesError as error:
        raise CaptureError(str(error)) from error
    except EfftraError:
        raise
    except Exception as error:
        place = line_of_error(error.__traceback__)
        what = f"{type(error).__name__}: {error}" + (f" at {place}" if place else "")
        if not part:
            who = "the model and its loss do" if attempt.want == "loss" else "the model does"
            raise CaptureError(f"{who} not run on these arguments, on one device either: {what}") from error
        placed = list(zip(attempt.call.tensor_names, attempt.batch_leaves, strict=True))
        rows = ", ".join(f"'{name}' along dimension {dim}" for name, dim in placed if dim is not None)
        whole = ", ".join(f"'{name}'" for name, dim in placed if dim is None)
        raise CaptureError(
            f"the step runs on the example, but not on {part}: {what}; rows were taken to lie in {rows}"
            + (f", and {whole} to have none" if whole else "")
            + "; where that is not so, say it, as in batch_dims={name: 1}"
        ) from error


def _dtype_of_loss(attempt: _Attempt) -> torch.dtype:
    """Run the eager step on the example and return the loss's dtype; leave the model and random state as they were."""
    function = attempt.loss_fn
    assert function is not None
    with _state_kept(attempt), _own_code(attempt):
        args, kwargs, target = attempt.call.rebuild([t.clone() for t in attempt.tensors])
        output, has_target = attempt.model(*args, **kwargs), attempt.call.has_target
        return dtype_of_loss(function, lambda: loss_of(output, function, target, has_target))
