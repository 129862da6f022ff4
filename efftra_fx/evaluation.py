"""The model's output in eval mode, computed by the plan's stages, rows in order, on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from efftra_fx.build import connections, tensor_group, used_buffers
from efftra_fx.captured import Captured, surroundings_of
from efftra_fx.draws import KEY_DIMS, keys_of
from efftra_fx.dump import print_graph
from efftra_fx.errors import CaptureError, EfftraError, InputError
from efftra_fx.eval_mode import evaluating
from efftra_fx.example import find_batch, model_tensors, other_batches, proof_inputs
from efftra_fx.front_end import copy_graph
from efftra_fx.meta import BATCH, CONSTANTS, FREE, OUTPUTS, PATH, ROLE, STAGE, Key, Outputs
from efftra_fx.passes.batch import ProveBatch
from efftra_fx.passes.batch_again import ProveAgain
from efftra_fx.passes.batch_evaluate import is_random
from efftra_fx.passes.layout_free import LayoutFree, draws_alike
from efftra_fx.passes.lower import lower
from efftra_fx.passes.means import SeparateMeans
from efftra_fx.passes.shard import Sharded, shard_stage
from efftra_fx.passes.shard_code import MeetingForward
from efftra_fx.passes.shard_cuts import WHOLE
from efftra_fx.passes.split import StageGraph, split_stages, wire
from efftra_fx.passes.stage_code import ForwardCode
from efftra_fx.passes.tail import Tail, split_tail
from efftra_fx.passes.tail_code import TailFunction
from efftra_fx.passes.verify import verify_programs
from efftra_fx.plain_graph import WritesParametersError
from efftra_fx.plan import Plan
from efftra_fx.program import Value, Wiring
from efftra_fx.python_reads import Read
from efftra_fx.python_state import python_kept
from efftra_fx.python_use import PythonUse
from efftra_fx.runtime.drawing import drawing
from efftra_fx.runtime.executor import Executor
from efftra_fx.runtime.parts import gather_parts
from efftra_fx.runtime.step import Batch, BoundaryPart, StageWork, Tensors
from efftra_fx.runtime.transport import Transport
from efftra_fx.settings import as_noted
from efftra_fx.signature import Call, difference, rows_of
from efftra_fx.trace import capture, capture_with_settings, python_draws
from efftra_fx.trace_check import check_output, first_apart, is_the_model, on_few_or_all, use_found
from efftra_fx.varying import Traces, Varying, named_state, shapes_of, specialise
from efftra_fx.world import Turns, World


@dataclass(frozen=True)
class Evaluation:
    """An evaluation compiled for one call structure."""

    stages: tuple[StageGraph, ...]
    wiring: Wiring
    tail: Tail
    dims: tuple[int | None, ...]
    codes: tuple[tuple[ForwardCode | MeetingForward, ...], ...]  # by stage, one for each rank of a tensor group
    random: tuple[bool, ...]  # by stage: whether it draws random numbers
    constants: Mapping[str, Tensor]  # of this graph, which another may have under the same names
    captured: Captured  # with what the model reads in Python
    examples: tuple[Tensor, ...]  # stand for the tensors that it was captured for, without their values
    alike: bool  # whether it reads the keys of random numbers that any plan draws
    around: tuple[Any, ...]  # autocast and hooks that it was captured under

    def fits(self, call: Call, tensors: Sequence[Tensor]) -> bool:
        """Say whether a batch differs from the one that it was captured for in rows and values alone."""
        if difference(self.captured.call, call) is not None:
            return False
        return all(
            a.dtype == b.dtype and a.ndim == b.ndim and all(a.shape[i] == b.shape[i] for i in range(a.ndim) if i != d)
            for a, b, d in zip(self.examples, tensors, self.dims, strict=True)
        )

    @property
    def text(self) -> list[str]:
        """The graphs that it computes, a line a node."""
        return [
            line for gm in (*(s.gm for s in self.stages), self.tail.gm) for line in print_graph(gm, "").splitlines()
        ]

    @cached_property
    def buffers(self) -> dict[str, frozenset[int]]:
        """The stages that read each buffer; -1 for every rank, which put the output together."""
        return used_buffers([self.tail], self.stages)


@torch.random.fork_rng()  # trial runs and proofs draw, which must not change what a step draws
def compile_evaluation(
    model: nn.Module,
    call: Call,
    tensors: Sequence[Tensor],
    plan: Plan,
    owners: Mapping[str, tuple[int, ...]],
    sharded: Sequence[Sharded | None],
    device: str,
    batch_dims: Mapping[str, int | None],
    layout_free: bool = False,
    traces: Traces | None = None,
    forms: Sequence[Evaluation] = (),
) -> Evaluation:
    """Capture the model in eval mode and lay it over the stages that hold its parameters.

    `owners` says which stages hold a parameter, `sharded` how their ranks do; `batch_dims` along which dimension
    known arguments have rows. A batch that differs from known `forms` in sizes alone comes from one of the `traces`
    for all sizes, checked against eager like any other. The model's modes are left as they were.
    """
    around = surroundings_of(model)
    rows, dims = find_batch(call, tensors, {n: d for n, d in batch_dims.items() if n in call.tensor_names})
    small = proof_inputs(tensors, dims, rows)
    whole = small if rows == 1 else tensors
    alone = tensors if rows == 1 else None
    with evaluating(model), python_kept(model):
        try:
            captured = _Asked(model, call, whole, small, dims, alone).captured(traces or Traces(), forms)
        except WritesParametersError as error:
            what = str(error).partition(", which every")[0]
            raise CaptureError(
                f"in eval mode {what}, which would stay for the next step; switch off in the model what does so (an "
                "option of its config), or evaluate a copy of it: copy.load_state_dict(program.state_dict())"
            ) from error
    graph = copy_graph(captured.gm)
    gm = LayoutFree(dims, captured.opaque)(graph) if layout_free else graph
    alike, places = draws_alike(gm), dims
    if alike:
        places = (*dims, *KEY_DIMS.values())
        small = [*small, *keys_of(0, rows_of(small, dims), small[0].device).values()]
    gm = SeparateMeans(places)(gm)
    every = () if rows == 1 or alike else tensors
    own = model_tensors(model, None, gm)
    gm = ProveAgain(own, every or small, places)(ProveBatch(own, small, places, every, trains=False)(gm))
    _drop_buffer_news(gm)
    gm, tail = split_tail(gm, training=False)
    assign_by_parameters(gm, owners, len(plan.stages))
    stages = split_stages(gm, len(plan.stages), allow_empty=True)
    wiring = wire(gm, stages, joined=False).forward_only()
    codes: tuple[tuple[ForwardCode | MeetingForward, ...], ...] = tuple(
        (ForwardCode(stage),) if one is None else _wide_forward(stage, one, device)
        for stage, one in zip(stages, sharded, strict=True)
    )
    random = tuple(any(is_random(n) for n in s.gm.graph.nodes if n.op == "call_function") for s in stages)
    held = {name: constant.to(device) for name, constant in CONSTANTS[gm].items()}
    return Evaluation(stages, wiring, tail, dims, codes, random, held, captured, shapes_of(whole), alike, around)


@dataclass(frozen=True)
class _Asked:
    """An evaluation that is wanted: its `whole` batch, a `small` part of it, and the batch if it is a row `alone`."""

    model: nn.Module
    call: Call
    whole: Sequence[Tensor]
    small: Sequence[Tensor]
    dims: tuple[int | None, ...]
    alone: Sequence[Tensor] | None

    def captured(self, traces: Traces, forms: Sequence[Evaluation]) -> Captured:
        """Return the model's output as a checked graph; modules that draw outside of torch stay as they are."""
        try:
            return self._traced(traces, forms)
        except WritesParametersError:
            raise
        except CaptureError:
            drawing = python_draws(self.model, self.call, self.whole, self.dims, None, "output")
            if not drawing:
                raise
        return self._traced(Traces(), (), drawing)

    def _traced(
        self, traces: Traces, forms: Sequence[Evaluation], drawing: Mapping[str, str] | None = None
    ) -> Captured:
        """Return a checked graph, from a trace for all sizes where there is one."""
        met = [(form.captured, form.examples) for form in forms]
        reads = traces.settings(self.call, [captured for captured, _ in met])
        find = partial(traces.find, self.model, self.call, self.whole, self.dims, None, met, "output")
        for known in traces.ways(find(reads)) if reads else ():
            try:
                return self._with_settings(reads, known)
            except EfftraError:
                traces.let_go(known, reads)
        varying, problem = find(), ""
        if varying is not None:
            try:
                return self._checked(specialise(varying, self.call, self.whole, named_state(self.model, None)))
            except CaptureError as error:
                problem = str(error)
        trace = partial(capture, self.model, self.call, self.whole, self.dims, want="output", drawing=drawing)
        captured = trace()
        if not (captured.guards is not None or self._is_for(captured)):
            captured = trace(whole_model="it computes something else for other numbers of rows", undivided=True)
        if not captured.symbolic:
            raise CaptureError(
                "in eval mode the model fixes the number of rows, so its evaluation cannot be cut; "
                "take sizes from the tensors (x.shape[0]) and not from constants"
            )
        captured = self._checked(captured)
        if varying is not None:
            why = f"this batch to evaluate is captured apart, since in the trace for all sizes {problem}"
            traces.refuse(varying, why)
        else:
            traces.join(self.call, captured, self.whole, met)
        return captured

    def _with_settings(self, reads: Sequence[Read], trace: Varying | None) -> Captured:
        """Return a graph that is given what is read in Python as tensors, right at the values that it had, too."""
        if trace is None:
            captured = capture_with_settings(self.model, self.call, self.whole, self.dims, None, reads, "output")
        else:
            captured = specialise(trace, self.call, self.whole, named_state(self.model, None))
        with as_noted(reads):
            check_output(self.model, captured, self.small if captured.known_for(self.small) else self.whole)
        return self._checked(captured)

    def _is_for(self, captured: Captured) -> bool:
        """Say whether a graph is the output for other numbers of rows, where they matter, and for a row alone."""
        batches = [self.small, *other_batches(self.whole, captured.batch_leaves)] if captured.aligned else []
        if first_apart(partial(check_output, self.model, captured), batches) is not None:
            return False
        return self.alone is None or is_output(self.model, captured, self.alone)

    def _checked(self, captured: Captured) -> Captured:
        few = self.whole if captured.guards is not None or not captured.known_for(self.small) else self.small
        captured = replace(captured, tried={}, shapes_of_one=[])
        use = on_few_or_all(partial(check_output, self.model, captured), few, self.whole)
        captured.tried[rows_of(few, captured.batch_leaves)] = True
        if self.alone is not None and not is_output(self.model, captured, self.alone):
            raise CaptureError("in eval mode the model computes something else for a single row than what several show")
        return replace(captured, python=use)


def is_output(model: nn.Module, captured: Captured, tensors: Sequence[Tensor]) -> bool:
    """Say whether a captured output is the model's for as many rows as a batch has; where it is not known, it is tried.

    Of a single row, the shapes that the model gives are kept.
    """
    known = captured.known_for(tensors)
    if known is None:
        known = is_the_model(lambda: _tried(model, captured, tensors))
        captured.tried[rows_of(tensors, captured.batch_leaves)] = known
    return known


def python_holds(model: nn.Module, captured: Captured, tensors: Sequence[Tensor]) -> bool:
    """Say whether a captured output is right for what it reads in Python; what forward writes itself there is tried."""
    return captured.python.holds(lambda: use_found(lambda: _tried(model, captured, tensors)))


def _tried(model: nn.Module, captured: Captured, tensors: Sequence[Tensor]) -> PythonUse:
    shapes = captured.shapes_of_one if rows_of(tensors, captured.batch_leaves) == 1 else None
    if shapes is not None:
        shapes.clear()
    with evaluating(model), python_kept(model):
        return check_output(model, captured, tensors, shapes)


def rows_of_batch(call: Call, tensors: Sequence[Tensor], dims: Sequence[int | None]) -> int:
    """Return the number of rows of a batch to evaluate; raise InputError where there are none, or others in another."""
    carried = [(n, t.shape[d]) for n, t, d in zip(call.tensor_names, tensors, dims, strict=True) if d is not None]
    name, rows = carried[0]
    for other, count in carried[1:]:
        if count != rows:
            raise InputError(
                f"argument '{other}' has {count} rows but '{name}' has {rows}; give the same batch to both"
            )
    if not rows:
        raise InputError(f"argument '{name}' has 0 rows, expected at least 1")
    return rows


def _wide_forward(stage: StageGraph, trained: Sharded, device: str) -> tuple[MeetingForward, ...]:
    """Return the forward of each rank of a tensor group, parameters lying as they do in training."""
    roles = [role for role in stage.roles if role.kind == "parameter"]
    places = {role.name: trained.parameters.get(role.name, WHOLE) for role in roles}
    forced = {name: place if place.cut is not None else WHOLE for name, place in places.items()}
    graphs = shard_stage(stage, trained.width, forced=forced, trained=frozenset()).stages
    return tuple(MeetingForward(graph, device) for graph in graphs)


def _drop_buffer_news(gm: fx.GraphModule) -> None:
    output = next(n for n in reversed(gm.graph.nodes) if n.op == "output")
    count = OUTPUTS[gm].loss
    output.args = (tuple(output.args[0][:count]),)
    OUTPUTS[gm] = Outputs(count, ())
    gm.graph.eliminate_dead_code()


def assign_by_parameters(gm: fx.GraphModule, owners: Mapping[str, tuple[int, ...]], stages: int) -> None:
    """Write `STAGE`: each node as early as its operands allow, on a stage that holds its parameters.

    A parameter that only an earlier stage holds is sent on from there. What cannot be sent, because its rows lie
    one among another, is computed where it is read.
    """
    for node in list(gm.graph.nodes):
        if node.op != "call_function" or FREE[node]:
            continue
        stage = max((STAGE[n] for n in node.all_input_nodes if STAGE.on(n)), default=0)
        held = [n for n in node.all_input_nodes if n.op == "placeholder" and _held(n, owners) is not None]
        for operand in held:
            places = _held(operand, owners) or ()
            if stage not in places:
                stage = min((p for p in places if p > stage), default=stage)
        for operand in held:
            places = _held(operand, owners) or ()
            if stage not in places:
                node.replace_input_with(operand, _sent_on(gm, operand, min(places)))
        STAGE[node] = stage
    for node in reversed(list(gm.graph.nodes)):
        if STAGE.on(node) and BATCH[node].kind == "mixed" and not is_random(node):
            _compute_where_read(gm, node, owners)


def _compute_where_read(gm: fx.GraphModule, node: fx.Node, owners: Mapping[str, tuple[int, ...]]) -> None:
    """Compute a value once more on each later stage that reads it, and not on its own if nothing there does."""
    held = [places for n in node.all_input_nodes if n.op == "placeholder" and (places := _held(n, owners)) is not None]
    readers: dict[int, list[fx.Node]] = {}
    for user in node.users:
        if STAGE.on(user):
            readers.setdefault(STAGE[user], []).append(user)
    own = STAGE[node]
    if all(stage == own for stage in readers) or any(stage not in places for places in held for stage in readers):
        return
    first = min(readers)
    for stage in sorted(readers):
        if stage == first:
            STAGE[node] = stage
            continue
        with gm.graph.inserting_before(node):
            copy = gm.graph.node_copy(node)
        STAGE[copy] = stage
        for user in readers[stage]:
            user.replace_input_with(node, copy)


def _held(node: fx.Node, owners: Mapping[str, tuple[int, ...]]) -> tuple[int, ...] | None:
    role = ROLE[node]
    return owners.get(role.name) if role.kind == "parameter" else None


def _sent_on(gm: fx.GraphModule, operand: fx.Node, stage: int) -> fx.Node:
    last = [n for n in gm.graph.nodes if n.op == "placeholder"][-1]
    with gm.graph.inserting_after(last):
        copy = gm.graph.call_function(torch.ops.aten.alias.default, (operand,))
    keys: tuple[Key[Any], ...] = (BATCH, FREE, PATH)
    for key in keys:
        if key.on(operand):
            key[copy] = key[operand]
    copy.meta["val"] = operand.meta["val"]
    STAGE[copy] = stage
    return copy


def run_evaluation(
    evaluation: Evaluation, plan: Plan, world: World, tensors: Mapping[int, Tensors], batch: Batch, seed: int = 0
) -> Any:
    """Run forward over the stages and return the model's output, the same on every rank; a collective call."""
    programs = lower(plan, evaluation.wiring, batch.rows, ranks=world.size)
    verify_programs(programs, evaluation.wiring, plan)
    values: dict[str, Value] = {v.name: v for v in evaluation.wiring.values}
    bounds = tuple(BoundaryPart(b.name, b.kind, b.dim) for b in evaluation.tail.boundaries)
    everyone = tuple(range(world.size))
    groups, pairs = connections(programs)
    world.prepare(sorted({everyone, *groups}), pairs)

    def work(transport: Transport) -> Turns[dict[str, Tensor]]:
        program = programs[transport.rank]
        stage = None
        if program.stage is not None:
            graph = evaluation.stages[program.stage]
            own = tuple(b for b in bounds if b.name in graph.boundaries)
            code = evaluation.codes[program.stage][program.tensor]
            group = tensor_group(plan, transport.rank)
            draws = evaluation.random[program.stage]
            stage = StageWork(program.stage, graph.roles, graph.sends, own, (), lambda _: code, draws, together=group)
        held = replace(tensors[transport.rank], constants=dict(evaluation.constants))
        executor = Executor(program, values, stage, held, None, transport, {})
        result = yield from executor.run(batch, seed)
        joined = yield from gather_parts(transport, everyone, bounds, result.parts, "gathering outputs")
        transport.drain("gathering outputs")
        return joined

    with torch.no_grad():
        joined = world.run(work)[0]
        function = TailFunction(evaluation.tail, tensors[world.ranks[0]].buffers, 0, world.device)
        with drawing(seed if function.random else None, world.device):
            flat = function.results(batch, joined)
    leaves = list(flat)
    if batch.rows == 1:
        shapes = iter(evaluation.captured.shapes_of_one)
        leaves = [leaf.reshape(next(shapes, leaf.shape)) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    assert evaluation.captured.out_tree is not None
    return evaluation.captured.out_tree.rebuild(leaves)
