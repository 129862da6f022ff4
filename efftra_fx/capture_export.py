"""A training step exported by `torch.export`, without its writes; what it cannot take becomes an error of ours."""

from __future__ import annotations

import io
import logging
import re
import warnings
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind

from efftra_fx.capture_functional import functional
from efftra_fx.capture_guards import AsksValuesError, NotCapturedError
from efftra_fx.capture_regions import inline_grad_regions
from efftra_fx.errors import EfftraError
from efftra_fx.places import line_of_error, modules_of_error


@dataclass(frozen=True)
class Exported:
    """An exported step: a graph that writes nothing, and what each placeholder is, by kind and name.

    Its first results are the new values of the `written` placeholders, by number.
    """

    gm: fx.GraphModule
    placeholders: tuple[tuple[InputKind, str], ...]
    written: tuple[int, ...]
    trained: frozenset[str]
    constants: Mapping[str, Any]


def export_step(
    step: nn.Module,
    tensors: tuple[Tensor, ...],
    batch_leaves: Sequence[int | None],
    moving: Sequence[Sequence[int]] = (),
) -> Exported:
    """Return the step of these tensors, with the rows of `batch_leaves` and the `moving` dimensions as symbols.

    Raises AsksValuesError where the step asks for values, NotCapturedError where it cannot be exported for another
    reason.
    """
    auto: Any = Dim.AUTO
    shapes = [None if dim is None else {dim: auto} for dim in batch_leaves]
    for index, dims in enumerate(moving):
        if dims:
            shapes[index] = {**(shapes[index] or {}), **dict.fromkeys(dims, auto)}
    model = step.get_submodule("model")
    modes = {name: module.training for name, module in model.named_modules()}
    logged = logging.root.manager.disable
    try:
        logging.disable(logging.CRITICAL)  # the exporter logs and prints each failure at length; ours are raised
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            program = torch.export.export(step, (list(tensors),), dynamic_shapes=(shapes,), strict=False)
            inline_grad_regions(program.graph_module)
            return _functional(program)
    except AsksValuesError as error:
        error.paths = error.paths or modules_of_error(error.__traceback__, model)
        raise
    except EfftraError:
        raise
    except Exception as error:
        cause = error.__cause__
        if isinstance(cause, AsksValuesError):
            cause.paths = cause.paths or modules_of_error(cause.__traceback__, model)
        if isinstance(cause, EfftraError):
            raise cause from None
        paths = modules_of_error(error.__traceback__, model) or _module_of_constant(error)
        if _needs_values(error) or paths:
            asks = AsksValuesError(_why(error))
            asks.paths = paths
            if not _needs_values(error):
                asks.reason = f"it cannot be traced ({_first_line(error)})"
            raise asks from error
        raise NotCapturedError(_why(error)) from error
    finally:
        logging.disable(logged)
        for name, module in model.named_modules():
            module.training = modes[name]


def _needs_values(error: BaseException) -> bool:
    kind, text = type(error).__name__, str(error).lower()
    return kind.startswith(("GuardOnDataDependent", "DataDependent", "DynamicOutputShape")) or any(
        word in text for word in ("data-dependent", "numpy() is not supported", "dynamicoutputshape")
    )


def _module_of_constant(error: BaseException) -> tuple[str, ...]:
    """Return the module in which the exporter lost track of a tensor, and those around it, the innermost first."""
    found = re.search(r"model attribute: model\.(\S+)\.\w+", str(error))
    parts = found[1].split(".") if found else []
    return tuple(".".join(parts[:count]) for count in range(len(parts), 0, -1))


_NOT_FOLLOWED = ("fake tensor in the exported program", "BatchedTensorImpl", "object has no attribute 'constant'")


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    if any(one in text for one in _NOT_FOLLOWED):
        return "it computes with tensors that a tracer cannot follow, as torch.func, autograd.grad and .data do"
    return text.splitlines()[0]


def _why(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    first = _first_line(error)
    place = line_of_error(error.__traceback__)
    place = f" at {place}" if place else ""
    if type(error).__name__.startswith("GuardOnDataDependent") or "data-dependent" in text:
        first = f"it branches on, or takes a size from, the value of a tensor ({first.split('. ')[0]})"
        remedy = "replace the branch by torch.where, or move it out of forward"
    else:
        remedy = "see the cause above, or put that part into a module of its own, which then runs as it is"
    return f"the model cannot be captured as a graph: {first}{place}; {remedy}"


def _functional(program: ExportedProgram) -> Exported:
    found = functional(program.graph_module)
    placeholders = tuple((spec.kind, str(spec.target)) for spec in program.graph_signature.input_specs)
    trained = frozenset(name for name, tensor in program.state_dict.items() if tensor.requires_grad)
    return Exported(found.gm, placeholders, found.written, trained, program.constants)
