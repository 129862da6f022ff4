"""A step captured and checked: with the loss in the graph, or with the loss as it is where that cannot be had."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor, nn

from efftra_fx.capture_guards import CountsRowsError, NotCapturedError
from efftra_fx.capture_opaque import called
from efftra_fx.captured import Captured
from efftra_fx.errors import CaptureError
from efftra_fx.example import model_tensors, operands_of, other_batches
from efftra_fx.left_out import may_leave_out
from efftra_fx.plain_graph import WritesInputsError, WritesParametersError
from efftra_fx.python_reads import Read
from efftra_fx.python_state import python_kept
from efftra_fx.python_use import PythonUse
from efftra_fx.settings import as_noted
from efftra_fx.signature import Call, rows_of
from efftra_fx.step_module import LossFn
from efftra_fx.trace import capture, capture_with_settings, python_draws
from efftra_fx.trace_check import check_capture, first_apart, is_the_model, on_few_or_all, use_found
from efftra_fx.varying import Varying, named_state, specialise


def capture_step(
    model: nn.Module,
    call: Call,
    tensors: Sequence[Tensor],
    small: Sequence[Tensor],
    dims: tuple[int | None, ...],
    loss_fn: LossFn | None,
    check: bool,
    timed: Callable[[str, float], None],
    divided: bool = False,
    as_it_is: str = "",
    alone: Sequence[Tensor] | None = None,
) -> Captured:
    """Capture the step and check it against eager, on a few rows (`small`) or, where values of all decide, on all.

    Where that cannot be done with the loss in the graph, it is done with the loss as it is (`divided`: on each
    part), which `as_it_is`, a reason, asks for at once; and else with the model as it is. It must be
    the model for a row `alone`, too, where one is given.
    """

    modules = (model, loss_fn) if isinstance(loss_fn, nn.Module) else (model,)

    def captured(whole_loss: str = "", whole_model: str = "") -> Captured:
        with python_kept(*modules):
            return as_captured(whole_loss, whole_model)

    def as_captured(whole_loss: str, whole_model: str) -> Captured:
        begin = time.perf_counter()
        found = capture(
            model,
            call,
            tensors,
            dims,
            loss_fn,
            whole_loss=whole_loss,
            divided=divided,
            whole_model=whole_model,
            undivided=counts_rows,
            drawing=drawing,
        )
        timed("trace", begin)
        if not found.symbolic:
            fixed = [(n, t.shape[d]) for n, t, d in zip(call.tensor_names, tensors, dims, strict=True) if d is not None]
            names, rows = ", ".join(name for name, _ in fixed), fixed[0][1]
            raise CaptureError(
                f"the model fixes the number of rows of {names} to {rows}, so the batch cannot be cut; "
                "take sizes from the tensors (x.shape[0]) and not from constants, or say batch_dims={name: None} "
                "for a tensor that carries no batch"
            )
        if check or whole_loss or whole_model:
            begin = time.perf_counter()
            needs_all = found.guards is not None or whole_loss or not found.known_for(small)
            few = tensors if needs_all else small
            _refuse_left_out(model, found, few, loss_fn)
            use = on_few_or_all(lambda rows: check_capture(model, found, rows, loss_fn), few, tensors)
            if found.guards is None and (found.aligned or whole_loss):
                check_other_rows(found)
            found.tried[rows_of(tensors, dims)] = True
            if alone is not None and not is_step(model, found, alone, loss_fn):
                raise CountsRowsError(f"the model cannot be captured as a graph: {_OTHER_ALONE}")
            found = replace(found, python=use)
            timed("check capture", begin)
        return found

    def check_other_rows(found: Captured) -> None:
        """Raise CountsRowsError where the graph is not the model for other numbers of rows than the example's."""
        batches = [small, *other_batches(tensors, dims)] if found.aligned else [small]
        tried = (rows for rows in batches if found.allows(rows))
        apart = first_apart(lambda rows: check_capture(model, found, rows, loss_fn), tried)
        if apart is None:
            return
        place = re.search(r' at (File "[^"]+", line \d+)', str(apart[1]))
        raise CountsRowsError(
            f"the model cannot be captured as a graph: it computes something else for {rows_of(apart[0], dims)} "
            f"rows than what {rows_of(tensors, dims)} rows show{f' at {place[1]}' if place else ''}; let no branch or "
            "rounded number depend on how many rows there are"
        ) from apart[1]

    counts_rows, drawing = False, dict[str, str]()
    for again in (False, True):
        try:
            return captured(as_it_is)
        except (WritesParametersError, WritesInputsError) as error:
            raise CaptureError(str(error)) from error
        except CaptureError as error:
            first = error
        drawing = {} if again else python_draws(model, call, tensors, dims, loss_fn)
        if not drawing:
            break
    said = [str(first)]
    model_reason = str(first) if isinstance(first, NotCapturedError) else ""
    counts_rows = isinstance(first, CountsRowsError)

    def tried(what: str, whole_loss: str = "", whole_model: str = "") -> Captured | None:
        nonlocal model_reason, counts_rows
        try:
            return captured(whole_loss, whole_model)
        except CaptureError as error:
            if not whole_model and isinstance(error, NotCapturedError):
                model_reason, counts_rows = str(error), isinstance(error, CountsRowsError)
            if str(error) not in said:
                said.append(f"nor can {what} run as it is: {error}")
            return None

    loss_left = loss_fn is not None and not as_it_is
    found = tried("the loss", str(first)) if loss_left else None
    if found is None and model_reason:
        found = tried("the model", as_it_is, model_reason)
        if found is None and loss_left:
            found = tried("both", str(first), model_reason)
    if found is None:
        raise CaptureError("; ".join(said)) from first.__cause__ or first
    return found


def check_again(
    model: nn.Module,
    captured: Captured,
    small: Sequence[Tensor],
    whole: Sequence[Tensor],
    loss_fn: LossFn | None,
    alone: Sequence[Tensor] | None = None,
) -> Captured:
    """Check a step put into another trace; raise CaptureError where it is not the model, also for a row `alone`."""
    captured = replace(captured, tried={})
    use = check_capture(model, captured, small if captured.known_for(small) else whole, loss_fn)
    if alone is not None and not is_step(model, captured, alone, loss_fn):
        raise CaptureError(_OTHER_ALONE)
    return replace(captured, python=use)


def step_with_settings(
    model: nn.Module,
    call: Call,
    tensors: Sequence[Tensor],
    small: Sequence[Tensor],
    dims: tuple[int | None, ...],
    loss_fn: LossFn | None,
    reads: Sequence[Read],
    trace: Varying | None = None,
) -> Captured:
    """Return a step that is given what is read in Python as tensors, captured now or from a trace for all sizes.

    It was checked at the values that it had; those of now are left to `check_again`. Raises CaptureError where it is
    not the model.
    """
    if trace is None:
        captured = capture_with_settings(model, call, tensors, dims, loss_fn, reads)
    else:
        captured = specialise(trace, call, tensors, named_state(model, loss_fn))
    with as_noted(reads), python_kept(model, loss_fn):
        check_capture(model, captured, small if captured.known_for(small) else tensors, loss_fn)
    return captured


def is_step(model: nn.Module, captured: Captured, tensors: Sequence[Tensor], loss_fn: LossFn | None) -> bool:
    """Say whether a captured step is the model for as many rows as a batch has; where it is not known, it is tried."""
    known = captured.known_for(tensors)
    if known is None:
        with python_kept(model, loss_fn):
            known = is_the_model(lambda: check_capture(model, captured, tensors, loss_fn))
        captured.tried[rows_of(tensors, captured.batch_leaves)] = known
    return known


def python_holds(model: nn.Module, captured: Captured, tensors: Sequence[Tensor], loss_fn: LossFn | None) -> bool:
    """Say whether a captured step is right for what it reads in Python; what forward writes itself there is tried."""

    def tried() -> PythonUse | None:
        with python_kept(model, loss_fn):
            return use_found(lambda: check_capture(model, captured, tensors, loss_fn))

    return captured.python.holds(tried)


_OTHER_ALONE = "it computes something else for a single row than what several rows show"


def _refuse_left_out(model: nn.Module, captured: Captured, tensors: Sequence[Tensor], loss_fn: LossFn | None) -> None:
    """Raise NotCapturedError where code that runs as it is may keep a gradient from what others compute, by chance."""
    held = model_tensors(model, loss_fn, captured.gm) if captured.opaque else {}
    found = may_leave_out(captured.gm, operands_of(captured.gm, held, tensors)) if captured.opaque else None
    if found is not None:
        raise NotCapturedError(
            f"the model cannot be captured as a graph: {called(found[0])} runs as it is and leaves out, by random "
            f"numbers, what others compute, so that '{found[1]}' has no gradient then; drop nothing there "
            "(layerdrop=0), or multiply by what is drawn in place of a branch"
        )
