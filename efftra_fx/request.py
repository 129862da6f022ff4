"""What a user asks of a compilation, checked before anything is done."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from efftra_fx.capture_refused import refuse_scripted
from efftra_fx.cluster import Cluster
from efftra_fx.compiler import Options
from efftra_fx.cost import CostTable
from efftra_fx.errors import BatchError, ClusterError, InputError, LossError, PlanError
from efftra_fx.passes.reduction import Weight
from efftra_fx.plan import SCHEDULES, Plan
from efftra_fx.units import number_text

BATCH_NORMS = ("local", "synced", "exact")
LONGEST_S = 1e7  # what a timer can wait
MOST_COUNT = 1_000_000  # stages, replicas or micro-batches; more cannot be meant
MOST_STATES = 1e6  # bytes of an optimizer's state for each byte of a parameter


def check_subjects(model: object, cluster: object, loss_fn: object, optimizer: object, timeout_s: float) -> None:
    """Raise InputError, ClusterError or LossError where one of them is not what it must be."""
    if not isinstance(model, nn.Module):
        raise InputError(f"model must be an nn.Module, got {type(model).__name__}; wrap it in a module")
    lazy = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if is_lazy(tensor)]
    if lazy:
        raise InputError(
            f"'{lazy[0]}' of the model has no shape yet, since its module is lazy; call the model once on a batch "
            "before compile"
        )
    refuse_scripted(*(one for one in (model, loss_fn) if isinstance(one, nn.Module)))
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta or tensor.is_inference():
            why = "has no values (device 'meta')" if tensor.is_meta else "was made under torch.inference_mode()"
            way = "model.to_empty(device='cpu') and fill it" if tensor.is_meta else "make the model outside of it"
            raise InputError(f"'{name}' of the model {why}, so it cannot be trained; {way} before compile")
    if not isinstance(cluster, Cluster):
        raise ClusterError(
            f"cluster must be a Cluster, got {type(cluster).__name__}; use Cluster.from_env(), Cluster.local(n) or "
            "Cluster.load(file)"
        )
    if loss_fn is not None and not callable(loss_fn):
        raise LossError(f"loss_fn must be a function of output and target, got {type(loss_fn).__name__}")
    if optimizer is not None and not callable(optimizer):
        raise InputError(
            f"optimizer must be a function from parameters to an optimizer, got {type(optimizer).__name__}; write "
            "optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1)"
        )
    if not (_is_number(timeout_s) and 0 < timeout_s <= LONGEST_S):
        found = number_text(timeout_s) if _is_number(timeout_s) else repr(timeout_s)
        raise InputError(f"timeout must be more than 0 seconds, at most {LONGEST_S:g}, got {found}")


def check_optimizer(made: object) -> Any:
    """Give back what the user's function made; raise InputError where it is no optimizer."""
    if not callable(getattr(made, "step", None)) or not callable(getattr(made, "zero_grad", None)):
        raise InputError(f"optimizer= must return an optimizer, with step and zero_grad, got {type(made).__name__}")
    return made


def read_examples(inputs: object, kwargs: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the example's arguments; raise InputError where they are not what a call takes."""
    if isinstance(inputs, Tensor):
        inputs = (inputs,)
    if not isinstance(inputs, list | tuple | None):
        raise InputError(f"example_inputs must be the tuple of positional arguments, got {type(inputs).__name__}")
    if not isinstance(kwargs, Mapping | None) or not all(isinstance(name, str) for name in kwargs or ()):
        raise InputError(f"example_kwargs must be a dictionary of arguments by name, got {type(kwargs).__name__}")
    return tuple(inputs or ()), dict(kwargs or {})


def read_options(
    *,
    loss_fn: Callable[..., Any] | None,
    stages: int | None,
    replicas: Sequence[int] | None,
    micro_batches: int | None,
    schedule: str | None,
    plan: Plan | str | Path | None,
    cuts: Sequence[str] | None,
    tensor: Sequence[int] | None,
    batch_dims: Mapping[str, int | None] | None,
    costs: CostTable | str,
    optimizer_states: float,
    batch_norm: str,
    loss_reduction: str | Weight | None,
    rng: str,
    compile_stages: bool | str,
) -> Options:
    """Return the options of a compilation; raise PlanError where they cannot be meant, or not together."""
    stages, micro_batches = _count("stages", stages), _count("micro_batches", micro_batches)
    replicas, tensor = _counts("replicas", replicas), _counts("tensor", tensor)
    if schedule not in (None, *SCHEDULES):
        raise PlanError(f"schedule must be one of {', '.join(SCHEDULES)}, got {schedule!r}")
    paths = _paths(cuts)
    fixed = {
        "stages": stages,
        "replicas": replicas,
        "micro_batches": micro_batches,
        "schedule": schedule,
        "cuts": paths,
        "tensor": tensor,
    }
    _agree(fixed)
    chosen = _plan(plan, [name for name, value in fixed.items() if value is not None])
    if not isinstance(costs, CostTable) and costs not in ("measured", "estimated"):
        raise PlanError(f"costs must be 'measured', 'estimated' or a CostTable, got {costs!r}")
    if not (_is_number(optimizer_states) and 0 <= optimizer_states <= MOST_STATES):
        found = number_text(optimizer_states) if _is_number(optimizer_states) else repr(optimizer_states)
        raise PlanError(
            f"optimizer_states must be 0 or more bytes for each byte of parameters, not above {MOST_STATES:g}, got "
            f"{found}"
        )
    if batch_norm not in BATCH_NORMS:
        raise PlanError(f"batch_norm must be one of {', '.join(BATCH_NORMS)}, got {batch_norm!r}")
    if not isinstance(compile_stages, bool | str):
        raise PlanError(f"compile_stages must be True, False or a backend of torch.compile, got {compile_stages!r}")
    if rng not in ("plan", "layout_free"):
        raise PlanError(f"rng must be 'plan' (masks depend on the plan) or 'layout_free' (they do not), got {rng!r}")
    if not (loss_reduction in (None, "mean", "sum") or callable(loss_reduction)):
        raise LossError(
            "loss_reduction must be 'mean', 'sum' or a function of a part's args, kwargs and target that gives its "
            f"weight, got {loss_reduction!r}"
        )
    return Options(
        loss_fn=loss_fn,
        stages=stages,
        replicas=replicas,
        micro_batches=micro_batches,
        schedule=schedule,
        plan=chosen,
        cuts=paths,
        tensor=tensor,
        batch_dims=_dims(batch_dims),
        costs=costs,
        optimizer_states=optimizer_states,
        batch_norm=batch_norm,
        loss_reduction=loss_reduction,
        rng=rng,
        backend=None if compile_stages is False else "inductor" if compile_stages is True else compile_stages,
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _count(name: str, value: object) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise PlanError(f"{name} must be a whole number of 1 or more, got {value!r}")
    if value > MOST_COUNT:
        raise PlanError(f"{name} must be at most {MOST_COUNT}, got {number_text(value)}")
    return value


def _counts(name: str, values: object) -> tuple[int, ...] | None:
    if values is None:
        return None
    if isinstance(values, str | bytes) or not isinstance(values, Sequence) or not values:
        raise PlanError(f"{name} must list a number for each stage, got {values!r}; for one stage write (2,)")
    numbers = tuple(_count(f"{name}[{index}]", value) for index, value in enumerate(values))
    return tuple(number for number in numbers if number is not None)


def _paths(cuts: object) -> tuple[str, ...] | None:
    if cuts is None:
        return None
    if isinstance(cuts, str) or not isinstance(cuts, Sequence) or not all(isinstance(path, str) for path in cuts):
        raise PlanError(f"cuts must list the modules at which stages begin, got {cuts!r}; for one cut write ['layer']")
    return tuple(cuts)


def _dims(dims: object) -> dict[str, int | None]:
    if dims is None:
        return {}
    whole = isinstance(dims, Mapping) and all(
        isinstance(name, str) and (dim is None or (isinstance(dim, int) and not isinstance(dim, bool)))
        for name, dim in dims.items()
    )
    if not whole or not isinstance(dims, Mapping):
        raise BatchError(f"batch_dims must say a dimension, or None, for names of tensors, got {dims!r}")
    return dict(dims)


def _agree(fixed: Mapping[str, Any]) -> None:
    """Raise PlanError where two of the fixed parts say different numbers of stages."""
    counts: dict[str, int] = {}
    for name, value in fixed.items():
        if value is not None and name in ("stages", "replicas", "cuts", "tensor"):
            counts[name] = value if name == "stages" else len(value) + (name == "cuts")
    (first, expected), *others = counts.items() if counts else [("", 0)]
    for name, count in others:
        if count != expected:
            raise PlanError(
                f"{first}={fixed[first]!r} makes {expected} stages but {name}={fixed[name]!r} is for {count}; "
                "give one of them, or make them agree"
            )


def _plan(plan: object, doubled: Sequence[str]) -> Plan | None:
    if plan is None:
        return None
    if doubled:
        raise PlanError(f"plan= fixes everything, so {doubled[0]}= cannot be given too; leave one of them out")
    if isinstance(plan, str | Path):
        return Plan.load(plan)
    if not isinstance(plan, Plan):
        raise PlanError(f"plan must be a Plan or the path of its file, got {type(plan).__name__}")
    return plan
