"""Any model to a functional graph of the whole training step.

The graph computes `loss = loss_fn(model(*args, **kwargs), target)`. Its placeholders
are the parameters, buffers, constants and inputs, each with a `ROLE`; its outputs are
the loss and then the new values of the buffers that the forward writes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from efftra_fx.capture_chance import draws_in, seeded_from_torch
from efftra_fx.capture_encoders import padding_zeroed
from efftra_fx.capture_guards import (
    Answers,
    AsksValuesError,
    CountsRowsError,
    NotCapturedError,
)
from efftra_fx.capture_loss import WholeLoss, dtype_of_loss
from efftra_fx.capture_norms import norms_of_one_device
from efftra_fx.capture_opaque import (
    NotKeptError,
    Watch,
)
from efftra_fx.capture_packed import sequences_kept_padded
from efftra_fx.captured import Captured, flags_of
from efftra_fx.chance import EXTREMES, NoChance
from efftra_fx.errors import CaptureError, EfftraError
from efftra_fx.held_buffers import HeldBuffers, same_bits
from efftra_fx.meta import CONSTANTS, ROLE
from efftra_fx.places import line_of_error
from efftra_fx.plain_graph import WritesParametersError, inputs_of, writes_parameter
from efftra_fx.python_reads import Read
from efftra_fx.python_state import python_kept
from efftra_fx.settings import Setting
from efftra_fx.signature import Call, distinct, rows_of, take_rows
from efftra_fx.step_module import LossFn, Step, loss_of
from efftra_fx.trace_attempt import Attempt, Watches, within


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
    attempt = Attempt(model, call, distinct(tensors), dims, loss_fn, want, flags=flags_of(model), moving=moving)
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


def capture_with_settings(
    model: nn.Module,
    call: Call,
    tensors: Sequence[Tensor],
    batch_leaves: Sequence[int | None],
    loss_fn: LossFn | None,
    reads: Sequence[Read],
    want: str = "loss",
    moving: Sequence[Sequence[int]] = (),
) -> Captured:
    """Capture a step, or an output, with what is read in Python as tensors that may be given other values.

    Raises CaptureError where that cannot be: where Python asks for such a value, or needs a number.
    """
    dims = tuple(batch_leaves)
    attempt = Attempt(model, call, distinct(tensors), dims, loss_fn, want, flags=flags_of(model), moving=moving)
    attempt.settings = tuple(Setting.of(read) for read in {read.key: read for read in reads}.values())
    captured = attempt.capture()
    if any(isinstance(node.meta.get("val"), torch.SymFloat | torch.SymBool) for node in captured.gm.graph.nodes):
        raise CaptureError("an operator needs a number")
    taken = {id(CONSTANTS[captured.gm][ROLE[n].name]) for n in inputs_of(captured.gm, "constant") if n.users}
    lost = next((one for one in attempt.settings if not all(id(tensor) in taken for tensor in one.tensors)), None)
    if lost is not None:
        raise CaptureError(f"the graph does not take {lost.read}")
    if not captured.symbolic:
        raise CaptureError("the model fixes the number of rows")
    return captured


def _captured(attempt: Attempt) -> Captured:
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
    attempt = Attempt(model, call, distinct(tensors), tuple(dims), loss_fn, want)
    try:
        with _state_kept(attempt), _own_code(attempt):
            return draws_in(model, lambda: _eager(attempt).result([t.clone() for t in attempt.tensors]))
    except CaptureError:  # there is another error to tell of
        return {}


def _with_answers(attempt: Attempt, first: AsksValuesError | None = None) -> Captured:
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
            left = (p for p in again.paths if p in modules and not within(p, attempt.opaque))
            outer = next(left, None)
            if outer is None:
                raise NotCapturedError(str(again)) from (again.__cause__ or first)
            path = outer
            place = re.search(r' at (File "[^"]+", line \d+|[^ ;]+:\d+)', str(again))
            line = place[1] if place else ""
            reason = f"{again.reason} at {line}" if line else again.reason
        kind = type(modules[path])
        alike = [p for p, m in modules.items() if p and type(m) is kind and not within(p, attempt.opaque)]
        for inner in [q for q in attempt.opaque if within(q, alike)]:
            del attempt.opaque[inner]
        attempt.opaque.update(dict.fromkeys(alike, reason))


def _reason(why: str) -> str:
    """Return why a model is no graph, without what to do about it."""
    return why.removeprefix("the model cannot be captured as a graph: ").partition("; ")[0]


def _run_for_real(attempt: Attempt, kept: Mapping[str, nn.Module]) -> tuple[Answers, Watches]:
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


def _eager(attempt: Attempt) -> Step:
    return Step(attempt.model, attempt.loss_fn, attempt.call, attempt.want, lambda tree: None)


@contextmanager
def _state_kept(attempt: Attempt) -> Iterator[None]:
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
def _own_code(attempt: Attempt, part: str = "") -> Iterator[None]:
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


def _dtype_of_loss(attempt: Attempt) -> torch.dtype:
    """Run the eager step on the example and return the loss's dtype; leave the model and random state as they were."""
    function = attempt.loss_fn
    assert function is not None
    with _state_kept(attempt), _own_code(attempt):
        args, kwargs, target = attempt.call.rebuild([t.clone() for t in attempt.tensors])
        output, has_target = attempt.model(*args, **kwargs), attempt.call.has_target
        return dtype_of_loss(function, lambda: loss_of(output, function, target, has_target))
