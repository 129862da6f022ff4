"""A step captured and checked: with the loss in the graph, or with the loss as it is where that cannot be had."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor, nn

from efftra_fx.errors import CaptureError
from efftra_fx.plain_graph import WritesParametersError
from efftra_fx.python_state import PythonState
from efftra_fx.signature import Call
from efftra_fx.step_module import LossFn
from efftra_fx.trace import Captured, capture
from efftra_fx.trace_check import check_capture, on_few_or_all


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
) -> Captured:
    """Capture the step and check it against eager, on a few rows (`small`) or, where values of all decide, on all.

    Where that cannot be done with the loss in the graph, it is done with the loss as it is (`divided`: on each
    part), which `as_it_is`, a reason, asks for at once.
    """

    modules = (model, loss_fn) if isinstance(loss_fn, nn.Module) else (model,)

    def captured(whole_loss: str) -> Captured:
        before = PythonState(*modules)
        try:
            return as_captured(whole_loss)
        finally:
            before.restore()

    def as_captured(whole_loss: str) -> Captured:
        begin = time.perf_counter()
        found = capture(model, call, tensors, dims, loss_fn, whole_loss=whole_loss, divided=divided)
        timed("trace", begin)
        if not found.symbolic:
            fixed = [(n, t.shape[d]) for n, t, d in zip(call.tensor_names, tensors, dims, strict=True) if d is not None]
            names, rows = ", ".join(name for name, _ in fixed), fixed[0][1]
            raise CaptureError(
                f"the model fixes the number of rows of {names} to {rows}, so the batch cannot be cut; "
                "take sizes from the tensors (x.shape[0]) and not from constants, or say batch_dims={name: None} "
                "for a tensor that carries no batch"
            )
        if check or whole_loss:
            begin = time.perf_counter()
            few = tensors if found.guards is not None or whole_loss else small
            use = on_few_or_all(lambda rows: check_capture(model, found, rows, loss_fn), few, tensors)
            found = replace(found, python=use)
            timed("check capture", begin)
        return found

    if as_it_is:
        return captured(as_it_is)
    try:
        return captured("")
    except WritesParametersError as error:
        raise CaptureError(str(error)) from error
    except CaptureError as error:
        if loss_fn is None:
            raise
        try:
            return captured(str(error))
        except CaptureError as second:
            if str(second) == str(error):
                raise error from error.__cause__
            raise CaptureError(f"{error}; nor can the loss run as it is: {second}") from error
