"""Batches of another form than the step was compiled for: other lengths, flags, masks, ways through a branch.

Each form gets a captured step of its own, laid out by the same plan over the same tensors, and
is kept. What the optimizer holds does not change. A batch that no capture can help (a wrong
dtype, unequal rows) is refused, and so is a form whose parameters would lie elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NoReturn

from torch import Tensor, nn

from efftra_fx.build import Built, place
from efftra_fx.captured import Captured, flags_of
from efftra_fx.captured_step import is_step, python_holds, step_with_settings
from efftra_fx.compiler import Front, Options, Report, back_end
from efftra_fx.errors import CaptureError, EfftraError, InputError, PlanError
from efftra_fx.example import find_batch, proof_inputs
from efftra_fx.front_end import check_inputs, check_tensors, front_end
from efftra_fx.meta import BLOCK, ROLE
from efftra_fx.passes.blocks import block_names, chain_nodes
from efftra_fx.plan import Plan
from efftra_fx.signature import Call, describe
from efftra_fx.step_module import LossFn
from efftra_fx.varying import Form, Traces, named_state, shapes_of, specialise
from efftra_fx.world import World

MOST_VARIANTS = 256
MANY_VARIANTS = 16  # worth a word
MOST_DESCRIBED = 4096  # descriptions of batches that are remembered, each a line of text
_OTHER_NUMBER = "the model asks for the number of rows, and was captured for other numbers"
_MOST_ANSWERS = 8
_MOST_NUMBERS = 16  # that are looked at to tell whether ranks were given the same data


def choose(
    variants: Sequence[Built],
    model: nn.Module,
    loss_fn: LossFn | None,
    call: Call,
    tensors: Sequence[Tensor],
    buffers: Mapping[str, Tensor],
    likely: int = 0,
) -> int:
    """Return which variant a batch is for, the `likely` one looked at first; what is not known of it is tried.

    Raises NotCaptured where it is a new form, InputError where it is wrong.
    """
    refuse_replaced(variants[0].front)
    refuse_wrong(variants[0].front, call, tensors)
    reason, branches, flags = "", 0, flags_of(model)
    order = [likely] * (likely < len(variants)) + [index for index in range(len(variants)) if index != likely]
    for index in order:
        built = variants[index]
        try:
            check_inputs(built.front, call, tensors)
        except InputError as error:
            reason = reason or str(error)
            continue
        if built.front.captured.flags != flags:
            reason = "modules or parameters of the model were switched (training, requires_grad) since it was captured"
            continue
        if not built.front.captured.allows(tensors):
            reason = _OTHER_NUMBER
            continue
        line = broken_guard(built.front, call, tensors, buffers)
        if line is not None:
            reason, branches = f"the step was captured for another answer at {line}", branches + 1
        elif not python_holds(model, built.front.captured, tensors, loss_fn):
            reason = built.front.captured.python.moved() or ""
        elif is_step(model, built.front.captured, tensors, loss_fn):
            return index
        else:
            reason = _OTHER_NUMBER
    if branches >= _MOST_ANSWERS:
        raise InputError(
            f"{reason}, and {branches} answers were captured already; a value that changes from batch to batch "
            "cannot decide the way through the model: use tensor operations in place of the number (where it is the "
            "longest row of pad_packed_sequence, total_length=)"
        )
    raise NotCaptured(reason)


class NotCaptured(InputError):
    """Raise for a batch of a form that no captured step fits; capturing it may help."""


def broken_guard(front: Front, call: Call, tensors: Sequence[Tensor], buffers: Mapping[str, Tensor]) -> str | None:
    """Return the branch that this batch takes otherwise than the captured one, or None."""
    guards = front.captured.guards
    if guards is None:
        return None
    return guards.broken(dict(zip(call.tensor_names, tensors, strict=True)), buffers)


def refuse_replaced(front: Front) -> None:
    """Raise InputError where the model is not made of what it was made of when its step was captured."""
    replaced = front.parts.replaced()
    if replaced is not None:
        raise InputError(
            f"{replaced} of the model was replaced since the step was captured, which goes on with the old one; write "
            "into it in place (load_state_dict without assign=True), or compile the model again"
        )
    changed = front.parts.changed()
    if changed is not None:
        raise InputError(f"{changed}, with its step captured before; change it back, or compile the model again")


def refuse_wrong(front: Front, call: Call, tensors: Sequence[Tensor]) -> None:
    """Raise InputError for a batch that differs in what is never captured again: dtypes, dimensions, rows, target."""
    if front.captured.call.has_target != call.has_target:
        check_inputs(front, call, tensors)
    check_tensors(front, call, tensors, other_form=True)


def capture_again(
    model: nn.Module,
    forms: Sequence[Built],
    traces: Traces,
    call: Call,
    tensors: Sequence[Tensor],
    options: Options,
    reason: str,
) -> Front:
    """Capture the step for a new form of batch; one that differs in sizes alone comes from one trace for all sizes.

    Raises InputError that says what differs and why it cannot be had.
    """
    known = {name: dim for name, dim in forms[0].front.dims.items() if name in call.tensor_names}
    options = replace(options, batch_dims={**known, **options.batch_dims})
    met = [_met(form.front) for form in forms]
    try:
        rows, leaves = find_batch(call, tensors, options.batch_dims)
        reads = traces.settings(call, [captured for captured, _ in met]) if not options.loss_as_it_is else ()
        small = proof_inputs(tensors, leaves, rows)
        whole = small if rows == 1 else tensors
        find = partial(traces.find, model, call, tensors, leaves, options.loss_fn, met)
        for trace in traces.ways(find(reads=reads)) if reads else ():
            try:
                given = step_with_settings(model, call, whole, small, leaves, options.loss_fn, reads, trace)
                return front_end(model, call, tensors, options, Report(kept=False), given)
            except EfftraError:
                traces.let_go(trace, reads)
        varying, problem = find() if not options.loss_as_it_is else None, ""
        if varying is not None:
            try:
                captured = specialise(varying, call, whole, named_state(model, options.loss_fn))
                return front_end(model, call, tensors, options, Report(kept=False), captured)
            except CaptureError as error:
                problem = str(error)
        front = front_end(model, call, tensors, options, Report(kept=False))
        if varying is not None:
            traces.refuse(varying, f"this batch is captured apart, since in the trace for all sizes {problem}")
        else:
            traces.join(call, front.captured, tensors, met)
        return front
    except EfftraError as error:
        raise InputError(f"{reason}; the step was captured again for this batch, but {error}") from error


def _met(front: Front) -> Form:
    return front.captured, [front.examples[name] for name in front.captured.call.tensor_names]


def lay_out(base: Built, front: Front, world: World, backend: str | None = None) -> Built:
    """Return the new form laid out like `base`, on the same tensors; it holds no batch.

    Raises InputError where its parameters would be used by other stages than those that hold them.
    """
    plan = base.back.plan
    front = replace(front, examples=dict(zip(front.examples, shapes_of(list(front.examples.values())), strict=True)))
    if not front.tail.linear and plan.schedule != "gpipe":
        plan = replace(plan, schedule="gpipe", in_flight=1)
    owners = {p.name: p.stages for p in base.back.wiring.parameters}
    try:
        back = back_end(front, _same_cuts(front, plan, owners), Report(kept=False), base.back)
    except PlanError as error:
        raise InputError(
            f"this form of batch does not fit the plan: {error}; cut the model elsewhere (cuts=), or compile it with a "
            "batch of this form as the example"
        ) from error
    for parameter in back.wiring.parameters:
        held = owners.get(parameter.name)
        if held != parameter.stages:
            if held is None:
                raise InputError(_of_no_stage(base, parameter.name))
            raise InputError(
                f"this form of batch uses '{parameter.name}' in stages {list(parameter.stages)}, but stages "
                f"{list(held)} hold it; give a batch of this form to compile, or compile for it apart"
            )
    return place(front, back, base.chain, base.planned, world, Report(kept=False), base=base, backend=backend)


def _of_no_stage(base: Built, name: str) -> str:
    """Say what to do about a parameter that no stage holds: one of another task, or one that came later."""
    if ("parameter", name) not in base.front.tensors:
        return f"the model uses '{name}', which it did not have when it was compiled; compile it again"
    return (
        f"this form of batch uses '{name}', which the batch that the model was compiled for does not, so that no stage "
        "holds it; compile another program of the same model with a batch of this form as its example, and give each "
        "program its batches (see 'Several programs' in the guide)"
    )


def _same_cuts(front: Front, plan: Plan, owners: Mapping[str, tuple[int, ...]]) -> Plan:
    """Return the plan with its cuts moved to the blocks of this form that hold the same parameters."""
    count = len(block_names(front.gm))
    stages = []
    for stage, places in zip(plan.stages, _places(front, plan, owners, count), strict=True):
        same = (places.start, places.stop) == (stage.first_block, stage.stop_block)
        names = stage.names if same and count == plan.blocks else ()
        stages.append(replace(stage, first_block=places.start, stop_block=places.stop, names=names))
    return replace(plan, stages=tuple(stages))


def _places(front: Front, plan: Plan, owners: Mapping[str, tuple[int, ...]], count: int) -> list[range]:
    """Return each stage's blocks: those of its parameters, and of the others those about as far into the chain."""
    last = len(plan.stages) - 1
    allowed = _allowed_stages(front, owners, count, len(plan.stages))
    usual = [
        next(i for i, s in enumerate(plan.stages) if b * plan.blocks // count < s.stop_block) for b in range(count)
    ]
    least: list[dict[int, tuple[int, int]]] = []  # by block and stage: how far off the best way is, and its start
    for block, (options, wanted) in enumerate(zip(allowed, usual, strict=True)):
        here = {}
        for stage in options:
            before = [(least[-1][s][0], s) for s in (stage - 1, stage) if s in least[-1]] if block else []
            if before or (block == 0 and stage == 0):
                off, origin = min(before, default=(0, 0))
                here[stage] = (off + abs(stage - wanted), origin)
        if not here:
            raise PlanError(_misplaced(front, owners, block, min(least[-1]) if least else -1))
        least.append(here)
    if last not in least[-1]:
        raise PlanError(f"nothing in it is left to do for stage {last}")
    places, stage = [last], last
    for block in range(count - 1, 0, -1):
        stage = least[block][stage][1]
        places.append(stage)
    places.reverse()
    return [range(places.index(s), count - places[::-1].index(s)) for s in range(last + 1)]


def _allowed_stages(front: Front, owners: Mapping[str, tuple[int, ...]], blocks: int, stages: int) -> list[set[int]]:
    """Return for each block the stages that hold all its parameters."""
    allowed: list[set[int]] = [set(range(stages)) for _ in range(blocks)]
    for node in chain_nodes(front.gm):
        for operand in node.all_input_nodes:
            if operand.op == "placeholder" and ROLE[operand].kind == "parameter":
                allowed[BLOCK[node]] &= set(owners.get(ROLE[operand].name, range(stages)))
    return allowed


def _misplaced(front: Front, owners: Mapping[str, tuple[int, ...]], block: int, before: int) -> str:
    """Say why a block, with those before it in stage `before` or later, can be in no stage."""
    held: dict[tuple[int, ...], str] = {}
    for node in chain_nodes(front.gm):
        for operand in node.all_input_nodes if BLOCK[node] == block else ():
            role = ROLE[operand] if operand.op == "placeholder" else None
            if role is not None and role.kind == "parameter" and role.name in owners:
                held.setdefault(owners[role.name], role.name)
    with_what = " and ".join(f"'{name}' of stage {', '.join(map(str, s))}" for s, name in sorted(held.items()))
    common, why = set[int].intersection(*map(set, held)), ""
    if common and max(common) < before:
        why = f", after what stage {before} computes"
    elif common and min(common) > before + 1:
        why = f", which leaves nothing to do for stage {before + 1}"
    return f"'{block_names(front.gm)[block]}' computes in one piece with {with_what}{why}"


def note_of_many(count: int, seconds: float, reason: str = "") -> str:
    """Say what ever new forms of batch cost, the last of them for a `reason`."""
    last = f", the last since {reason}" if reason else ""
    return (
        f"{count} forms of batch have been met, and capturing them took {seconds:.0f} s{last}; each new length, and "
        "each new value that Python asks for, costs as much again: pad batches to few lengths (multiples of 8 or 32, "
        "say), and compute with such a value by tensor operations alone"
    )


def describe_batch(call: Call, tensors: Sequence[Tensor]) -> str:
    """Return names, types and constants of a batch as text: equal on ranks that were given the same form."""
    leaves = iter(tensors)
    parts = [f"{leaf.name} {describe(next(leaves)) if leaf.tensor else repr(leaf.constant)}" for leaf in call.leaves]
    return ", ".join(parts)


def with_settings(described: str, captured: Captured | None) -> str:
    """Return the text of a batch with the present values of what a graph is given beside it."""
    return ", ".join([described, *(captured.settings_text if captured is not None else ())])


def sample_numbers(call: Call, tensors: Sequence[Tensor]) -> dict[str, str]:
    """Return a few numbers of each tensor that lies on a CPU, as text: equal on ranks that were given the same batch.

    So ranks whose loaders are seeded apart are told at once, for next to nothing; single rows that differ are not.
    """
    found = {}
    for name, tensor in zip(call.tensor_names, tensors, strict=True):
        if tensor.device.type == "cpu" and tensor.is_contiguous() and tensor.numel():
            flat = tensor.detach().view(-1)
            found[name] = str(flat[:: -(-flat.numel() // _MOST_NUMBERS)].tolist())
    return found


def agree_on_batch(
    world: World, problem: EfftraError | None, batch: str, form: int, numbers: Mapping[str, str]
) -> None:
    """Raise on every rank where one has a problem, makes another call, or has another batch; a collective call."""
    if not world.agree_on_call(problem, given_batch(batch, form, numbers)):
        refuse_different_batches(world, batch, form, numbers)


def given_batch(batch: str, form: int, numbers: Mapping[str, str]) -> str:
    """Return what all ranks must have been given alike, as text."""
    return f"{batch} {form} {numbers}"


def refuse_different_batches(world: World, batch: str, form: int, numbers: Mapping[str, str]) -> NoReturn:
    """Raise InputError saying how batches differ that were found to; a collective call."""
    way = "a new way through the model" if form < 0 else f"way {form} through the model"
    everyone = world.gather(f"{batch} ({way})")
    other = next((r for r, one in enumerate(everyone) if one != everyone[0]), None)
    if other is None:
        _refuse_other_numbers(world, numbers)
    raise InputError(
        f"the ranks were given different batches: rank 0 has {everyone[0]}, rank {other} has {everyone[other or 0]}; "
        "give the whole global batch to every rank alike"
    )


def _refuse_other_numbers(world: World, numbers: Mapping[str, str]) -> None:
    everyone = world.gather(dict(numbers))
    for rank, theirs in enumerate(everyone):
        for name, mine in everyone[0].items():
            if theirs.get(name, mine) != mine:
                first, other = (one.strip("[]").split(", ")[:3] for one in (mine, theirs[name]))
                raise InputError(
                    f"the ranks were given different data: of '{name}', rank 0 has {', '.join(first)}, ..., and rank "
                    f"{rank} has {', '.join(other)}, ...; give the whole global batch to every rank alike: seed the "
                    "loader alike and use no DistributedSampler, each rank takes its rows itself"
                ) from None
