"""The straight line from a model to programs, top to bottom.

capture → (layout-free) → separate-means → prove-batch → tail → annotate-shapes → blocks → measure → partition
        → split-stages → wire → (for each batch size) lower → verify
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from efftra_fx.capture_normal import sparse_lines
from efftra_fx.capture_norms import syncs_norms
from efftra_fx.capture_refused import refuse_scripted
from efftra_fx.captured_step import capture_step
from efftra_fx.cluster import Cluster
from efftra_fx.cost import Chain, CostTable
from efftra_fx.draws import KEY_DIMS, keys_of
from efftra_fx.dump import print_dot, print_graph
from efftra_fx.errors import (
    BatchError,
    CostError,
    CoverageError,
    EfftraError,
    InputError,
    LossError,
    MemoryPlanError,
    PlacementError,
    PlanError,
)
from efftra_fx.hooks import check_hooks, has_hooks, hook_notes
from efftra_fx.meta import BATCH, BLOCK, CONSTANTS, OUTPUTS, PATH, REDUCED, ROLE
from efftra_fx.parts import Parts
from efftra_fx.passes.batch import ProveBatch, is_batch_statistics, is_random
from efftra_fx.passes.batch_again import ProveAgain
from efftra_fx.passes.blocks import FoldBlocks, block_names, chain_nodes
from efftra_fx.passes.evaluate import evaluate
from efftra_fx.passes.explain import explain, explain_given
from efftra_fx.passes.explain_widths import about_widths, why_no_widths
from efftra_fx.passes.layout_free import LayoutFree, draws_alike
from efftra_fx.passes.means import SeparateMeans
from efftra_fx.passes.measure import measure_chain
from efftra_fx.passes.measure_widths import measure_widths
from efftra_fx.passes.partition import partition, shortage
from efftra_fx.passes.pipeline import Pass, run_passes
from efftra_fx.passes.planned import Planned
from efftra_fx.passes.reduction import DeclareReduction, SettleReduction, Weight
from efftra_fx.passes.rules import Rules
from efftra_fx.passes.shapes import AnnotateShapes, is_heavy
from efftra_fx.passes.shard import Sharded, shard_stages
from efftra_fx.passes.shard_cost import with_tensor
from efftra_fx.passes.shard_explain import HEADING, explain_groups
from efftra_fx.passes.shard_groups import leaves_machine, place_groups
from efftra_fx.passes.split import AssignStages, StageGraph, split_stages, wire
from efftra_fx.passes.synced import Synced, is_synced, sync_stage
from efftra_fx.passes.tail import Tail, mixing_node, split_tail
from efftra_fx.passes.verify import verify_plan
from efftra_fx.passes.width_search import known_widths, possible_widths, search_widths
from efftra_fx.plan import Plan, Stage
from efftra_fx.program import Load, RankProgram, Wiring, micro_batch_rows
from efftra_fx.signature import Call, describe, difference
from efftra_fx.step_module import LossFn
from efftra_fx.trace import Captured
from efftra_fx.trace_check import check_capture

Progress = Callable[[Iterable[Any], str], Iterable[Any]]
_PROOF_ROWS = 3


@dataclass(frozen=True)
class Options:
    """What a user may fix of a compilation; None leaves it to the search."""

    loss_fn: LossFn | None = None
    stages: int | None = None
    replicas: tuple[int, ...] | None = None
    micro_batches: int | None = None
    schedule: str | None = None
    plan: Plan | None = None
    cuts: tuple[str, ...] | None = None
    tensor: tuple[int, ...] | None = None
    batch_dims: Mapping[str, int | None] = field(default_factory=dict)
    batch_norm: str = "local"
    loss_reduction: str | Weight | None = None
    loss_as_it_is: str = ""  # why the loss is not to be captured
    costs: CostTable | str = "measured"
    optimizer_states: float = 2.0
    rng: str = "plan"  # or "layout_free"
    backend: str | None = None  # of torch.compile, for the stages
    check_capture: bool = True


@dataclass
class Report:
    """What each part of the compilation took, in seconds, and the text that it left."""

    seconds: dict[str, float] = field(default_factory=dict)
    texts: list[tuple[str, str]] = field(default_factory=list)

    def timed(self, name: str, begin: float) -> None:
        """Add the time since `begin` to a part."""
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin

    def graph(self, name: str, gm: fx.GraphModule) -> None:
        """Keep a graph as text and as a drawing."""
        self.texts.append((f"{name}.txt", print_graph(gm, name)))
        self.texts.append((f"{name}.dot", print_dot(gm, name)))

    def table(self) -> str:
        """Return the times as lines of text."""
        width = max((len(name) for name in self.seconds), default=0)
        lines = [f"{name:<{width}}  {seconds:7.3f} s" for name, seconds in self.seconds.items()]
        return "\n".join([*lines, f"{'total':<{width}}  {sum(self.seconds.values()):7.3f} s (measured)"])


@dataclass(frozen=True)
class Front:
    """A captured step, proven and cut into blocks: all that does not depend on the plan."""

    captured: Captured
    gm: fx.GraphModule
    tail: Tail
    dims: dict[str, int | None]
    examples: dict[str, Tensor]
    tensors: dict[tuple[str, str], Tensor]
    rows: int
    loss_dtype: torch.dtype
    notes: tuple[str, ...]
    counters: frozenset[str]
    parts: Parts  # what the model was made of
    pairwise: str | None  # a module that needs two rows or more in every part: it normalises over rows alone
    statistics: str = ""  # over which rows norms take them: "local", "synced" or "exact"; "" where there are none
    alone: fx.GraphModule | None = None  # the step of one device, where it draws the numbers that any plan draws


@dataclass(frozen=True)
class Back:
    """A plan turned into stages."""

    plan: Plan
    stages: tuple[StageGraph, ...]
    wiring: Wiring
    random: tuple[bool, ...]
    sharded: tuple[Sharded | None, ...]  # None for a stage whose replicas are one rank each
    synced: tuple[Synced | None, ...]  # None for a stage whose replicas compute each for itself


def find_batch(
    call: Call, tensors: Sequence[Tensor], given: Mapping[str, int | None]
) -> tuple[int, tuple[int | None, ...]]:
    """Return the number of rows, and for each tensor the dimension of its rows (None: it has none).

    Rows are dimension 0 of the target, or of the first argument with a dimension; other tensors carry
    the batch where their dimension 0 has as many. `given` overrides that by name.
    Raises BatchError where no argument has rows or a given dimension does not fit.
    """
    names = call.tensor_names
    unknown = sorted(set(given) - set(names))
    if unknown:
        raise BatchError(f"batch_dims names '{unknown[0]}', but the tensors are {', '.join(names)}")
    sized = [(n, t) for n, t in zip(names, tensors, strict=True) if given.get(n, 0) is not None and t.ndim > 0]
    if not sized:
        raise BatchError("no argument carries a batch: at least one tensor must have rows along dimension 0")
    first = next((p for p in sized if p[0] in given), next((p for p in sized if p[0] == "target"), sized[0]))
    name, tensor = first
    dim = given.get(name) or 0
    if dim >= tensor.ndim:
        raise BatchError(f"batch_dims says dimension {dim} for '{name}', which has shape {list(tensor.shape)}")
    rows = tensor.shape[dim]
    if not rows:
        raise InputError(f"argument '{name}' has 0 rows, expected at least 1")
    dims: list[int | None] = []
    for leaf, value in zip(names, tensors, strict=True):
        if leaf in given:
            chosen = given[leaf]
            if chosen is not None and (chosen >= value.ndim or value.shape[chosen] != rows):
                raise BatchError(
                    f"batch_dims says dimension {chosen} for '{leaf}' of shape {list(value.shape)}, "
                    f"but the batch has {rows} rows"
                )
            dims.append(chosen)
        else:
            dims.append(0 if value.ndim and value.shape[0] == rows else None)
    return rows, tuple(dims)


def model_tensors(model: nn.Module, loss_fn: Any, gm: fx.GraphModule) -> dict[tuple[str, str], Tensor]:
    """Return every parameter, buffer and constant that a graph may read, by (kind, name)."""
    found: dict[tuple[str, str], Tensor] = {}
    modules = [("", model)] + ([("loss_fn.", loss_fn)] if isinstance(loss_fn, nn.Module) else [])
    for prefix, module in modules:
        found.update({("parameter", prefix + n): p for n, p in module.named_parameters()})
        found.update({("buffer", prefix + n): b for n, b in module.named_buffers()})
    found.update({("constant", n): c for n, c in CONSTANTS[gm].items()})
    return found


def proof_inputs(tensors: Sequence[Tensor], dims: Sequence[int | None], rows: int) -> list[Tensor]:
    """Return a few rows of the example that differ, spread over the batch; a batch of one row is made into several.

    Rows that are alike in something, say their class, would hide that a sum over the batch has mixed them up.
    """
    if rows == 1:
        return [t if d is None else _grown(t, d) for t, d in zip(tensors, dims, strict=True)]
    count = min(rows, _PROOF_ROWS)
    picked = _differing(tensors, dims, rows, torch.linspace(0, rows - 1, count).round().tolist())
    return [
        t.detach() if d is None else t.detach().index_select(d, picked.to(t.device))
        for t, d in zip(tensors, dims, strict=True)
    ]


def _differing(tensors: Sequence[Tensor], dims: Sequence[int | None], rows: int, wanted: Sequence[float]) -> Tensor:
    """Return as many rows as wanted, which differ in as many inputs as can be, and then near to the wanted ones."""
    inputs = [t.detach().movedim(d, 0).reshape(rows, -1) for t, d in zip(tensors, dims, strict=True) if d is not None]
    numbers = torch.arange(rows)
    picked = [0]
    for place in wanted[1:]:
        near = 1 - (numbers - place).abs() / rows
        differing = torch.stack([(t != t[row]).any(1).cpu() for t in inputs for row in picked]).sum(0)
        score = differing + 0.5 * near
        score[picked] = -1.0
        picked.append(int(score.argmax()))
    return torch.tensor(sorted(picked))


def _grown(tensor: Tensor, dim: int) -> Tensor:
    pieces = [tensor.detach()] * 3
    if tensor.is_floating_point():
        pieces = [piece + 0.1 * i * torch.ones_like(piece) for i, piece in enumerate(pieces)]
    elif tensor.ndim > 1:
        pieces = [piece.roll(i, -1 if dim != tensor.ndim - 1 else 0) for i, piece in enumerate(pieces)]
    return torch.cat(pieces, dim)


def front_end(
    model: nn.Module,
    call: Call,
    tensors: Sequence[Tensor],
    options: Options,
    report: Report,
    captured: Captured | None = None,
) -> Front:
    """Capture a step unless it is given, check it against eager, prove how it follows the batch, and fold it."""
    models = (model, options.loss_fn) if isinstance(options.loss_fn, nn.Module) else (model,)
    check_hooks(*models)
    refuse_scripted(*models)
    if options.batch_norm == "local" and syncs_norms(*models):
        options = replace(options, batch_norm="synced")
    given = tensors
    rows, dims = find_batch(call, tensors, options.batch_dims)
    small = proof_inputs(tensors, dims, rows)
    whole = small if rows == 1 else tensors
    divided = options.loss_reduction is not None
    if captured is None:
        captured = capture_step(
            model,
            call,
            whole,
            small,
            dims,
            options.loss_fn,
            options.check_capture,
            report.timed,
            divided,
            options.loss_as_it_is,
        )
    else:
        captured = replace(captured, python=check_capture(model, captured, small, options.loss_fn))
    report.graph("trace", captured.gm)
    roles = [ROLE[n] for n in captured.gm.graph.nodes if n.op == "placeholder"]
    parameters = [role for role in roles if role.kind == "parameter"]
    if parameters and not any(role.trainable for role in parameters):
        raise LossError(
            f"none of the {len(parameters)} parameters is trainable, so there is nothing to train; "
            "set requires_grad on some, or use the model without compiling it"
        )
    begin = time.perf_counter()
    values = model_tensors(model, options.loss_fn, captured.gm)
    loss_dtype = next(n for n in captured.gm.graph.nodes if n.op == "output").args[0][0].meta["val"].dtype
    names, alone, gm = list(call.tensor_names), None, copy_graph(captured.gm)
    if options.rng == "layout_free":
        gm = run_passes(gm, (LayoutFree(dims),), ("role", "outputs"), lambda name, graph, _: report.graph(name, graph))
        if draws_alike(gm):
            alone = copy_graph(gm)
            names, dims = [*names, *KEY_DIMS], (*dims, *KEY_DIMS.values())
            tensors = (*tensors, *keys_of(0, rows, tensors[0].device).values())
            small = [*small, *keys_of(0, rows_of(small, dims), tensors[0].device).values()]
    every = () if rows == 1 else tensors
    proof: tuple[Pass, ...] = (
        SeparateMeans(dims),
        ProveBatch(values, small, dims, every),
        ProveAgain(values, every, dims),
    )
    if options.loss_reduction is not None:
        claim = getattr(options.loss_reduction, "__name__", repr(options.loss_reduction))
        settle = SettleReduction(claim, values, small if rows == 1 else tensors, dims)
        proof = (proof[0], DeclareReduction(options.loss_reduction, call, dims), *proof[1:], settle)
    try:
        gm = run_passes(gm, proof, ("role", "outputs"), lambda name, graph, _: report.graph(name, graph))
    except (RuntimeError, ValueError, IndexError, LossError) as error:
        said = str(error).strip().partition("\n")[0]  # an interpreter adds where it was
        if options.loss_reduction is None:
            raise
        if isinstance(error, LossError):
            raise LossError(said) from error
        raise LossError(
            f"loss_reduction={options.loss_reduction!r}: the loss cannot be computed for a few rows of the example "
            f"({said}); leave it out, so that the loss is computed once on the whole batch"
        ) from error
    if callable(options.loss_reduction) and options.loss_fn is not None and not captured.whole_loss and _declared(gm):
        # of a part that weighs nothing the captured loss may have no finite gradients, and then is not to run at all
        return front_end(model, call, given, replace(options, loss_as_it_is="its parts are weighed"), report)
    norms = tuple(PATH.get(n) or n.name for n in gm.graph.nodes if is_synced(n))
    counters, pairwise = _counters(gm), _pairwise(gm)
    buffers = _buffer_notes(gm, counters, norms)
    notes = (
        *_notes(norms, options.batch_norm),
        *buffers,
        *hook_notes(*models),
        *_opaque_notes(captured, divided),
        *_python_notes(captured),
        *_sparse_notes(captured),
    )
    gm, tail = split_tail(gm)
    report.graph("tail", tail.gm)
    gm = run_passes(
        gm,
        (AnnotateShapes(), FoldBlocks()),
        ("role", "outputs", "batch", "free"),
        lambda name, graph, _: report.graph(name, graph),
    )
    report.timed("prove batch", begin)
    by_name = dict(zip(names, dims, strict=True))
    return Front(
        captured,
        gm,
        tail,
        by_name,
        dict(zip(names, tensors, strict=True)),
        values,
        rows,
        loss_dtype,
        notes,
        counters,
        Parts(*models),
        pairwise,
        options.batch_norm if norms else "",
        alone,
    )


def _python_notes(captured: Captured) -> tuple[str, ...]:
    """Say once which attributes forward would write."""
    if not captured.python.writes:
        return ()
    return (
        f"forward writes {', '.join(captured.python.writes)} in Python, which happens while the model is captured and "
        "not at each step",
    )


def _sparse_notes(captured: Captured) -> tuple[str, ...]:
    return tuple(
        f"the gradient of what is looked up{line} is dense, where the model asks for a sparse one: use an optimizer "
        "for dense gradients (not SparseAdam)"
        for line in sparse_lines(captured.gm.graph)
    )


def _declared(gm: fx.GraphModule) -> bool:
    """Say whether the loss is what parts make by a declared reduction."""
    output = next(n for n in reversed(gm.graph.nodes) if n.op == "output")
    return REDUCED.on(output.args[0][0])


def rows_of(tensors: Sequence[Tensor], dims: Sequence[int | None]) -> int:
    """Return the number of rows of tensors that have them along these dimensions."""
    return next(t.shape[d] for t, d in zip(tensors, dims, strict=False) if d is not None)


def copy_graph(gm: fx.GraphModule) -> fx.GraphModule:
    """Return the graph again, so that passes may change one of the two."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    output = graph.graph_copy(gm.graph, copies)
    graph.output(output)
    copy = fx.GraphModule(gm, graph)
    OUTPUTS[copy], CONSTANTS[copy] = OUTPUTS[gm], CONSTANTS[gm]
    return copy


def _opaque_notes(captured: Captured, divided: bool) -> tuple[str, ...]:
    notes = [f"module '{path}' runs as it is, in one piece: {reason}" for path, reason in captured.opaque]
    if captured.whole_loss:
        reason = captured.whole_loss.removeprefix("the model cannot be captured as a graph: ").partition("; ")[0]
        where = "on each part" if divided else "once a step on the whole batch's output"
        notes.append(f"the loss runs as it is, {where}: {reason}")
    return tuple(notes)


def _notes(norms: Sequence[str], batch_norm: str) -> tuple[str, ...]:
    """Say once what the statistics of batch norms are, where they are not those of the whole batch."""
    if not norms or batch_norm == "exact":
        return ()
    which = f"batch statistics of {', '.join(norms)} are those of each micro-batch"
    if batch_norm == "synced":
        return (
            f"{which}, as if one device ran the micro-batches in order; for the whole batch's use batch_norm='exact'",
        )
    return (
        f"{which} on each replica, as if one device ran the same parts in order, and running statistics the mean of "
        "the replicas' own; use batch_norm='synced' for all replicas' together, or 'exact' for the whole batch's",
    )


def _buffer_notes(gm: fx.GraphModule, counters: frozenset[str], norms: Sequence[str]) -> tuple[str, ...]:
    """Say once which buffers are not written as one device would write them, once a step from the whole batch."""
    names = [n for n in OUTPUTS[gm].buffers if n not in counters and n.rpartition(".")[0] not in norms]
    if not names:
        return ()
    return (
        f"buffers {', '.join(names)} are written by each part of the batch in order, as if one device ran the parts "
        "(a part that reads one reads what the parts before it wrote), and are the mean of the replicas' own (the "
        "first replica's where they are whole numbers); for what one device with the whole batch writes use "
        "micro_batches=1 and one replica",
    )


def _pairwise(gm: fx.GraphModule) -> str | None:
    """Return a module that takes statistics of one value a row and channel, such as of rows alone or pooled images."""
    for node in gm.graph.nodes:
        if is_batch_statistics(node) and isinstance(node.args[0], fx.Node) and BATCH[node.args[0]].kind == "rows":
            split, shape = BATCH[node.args[0]], node.args[0].meta["val"].shape
            each = [split.per_row if d == split.dim else size for d, size in enumerate(shape) if d != 1]
            if all(size == 1 for size in each):
                return PATH.get(node) or node.name
    return None


def check_parts(front: Front, programs: Mapping[int, RankProgram]) -> None:
    """Raise BatchError where a norm that needs several rows gets one: in a part, or in a synced micro-batch."""
    if front.pairwise is None:
        return
    for rank, program in programs.items():
        whole = micro_batch_rows(program.rows, program.micro_batches)
        for instruction in program.instructions:
            if not isinstance(instruction, Load):
                continue
            start, stop = whole[instruction.micro_batch] if program.synced else (instruction.start, instruction.stop)
            if stop - start == 1:
                kind = "all replicas' rows" if program.synced else "the rows of a part"
                raise BatchError(
                    f"'{front.pairwise}' normalises over {kind}, but rank {rank} gets only row "
                    f"{start} of {program.rows} in micro-batch {instruction.micro_batch}; "
                    "use fewer micro-batches or replicas, or a larger batch"
                )


def _counters(gm: fx.GraphModule) -> frozenset[str]:
    """Return the buffers that are written once a step: their new value does not depend on the batch's values.

    Those of a module that keeps statistics of the batch go with its statistics instead.
    """
    output = next(n for n in reversed(gm.graph.nodes) if n.op == "output")
    outputs = OUTPUTS[gm]
    kinds = {name: BATCH[node].kind for name, node in zip(outputs.buffers, output.args[0][outputs.loss :], strict=True)}
    moving = {name.rpartition(".")[0] for name, kind in kinds.items() if kind != "whole"}
    return frozenset(name for name, kind in kinds.items() if kind == "whole" and name.rpartition(".")[0] not in moving)


def cost_chain(
    front: Front, options: Options, device: str, report: Report, progress: Progress | None, known: CostTable | None
) -> tuple[Chain, CostTable]:
    """Return the planner's chain, measured on this rank or taken from what is known."""
    begin = time.perf_counter()
    estimated = options.costs == "estimated"
    table = options.costs if isinstance(options.costs, CostTable) else known
    inputs = {name: (front.examples[name], dim) for name, dim in front.dims.items()}
    chain, fresh = measure_chain(
        front.gm,
        front.tensors,
        inputs,
        front.rows,
        joined=not front.tail.linear,
        device=device,
        repeats=0 if estimated else 3,
        progress=progress,
        known=table,
        synced=front.statistics in ("synced", "exact"),
    )
    report.timed("measure", begin)
    if isinstance(options.costs, CostTable) and not any(options.costs.find(cost.name) for cost in fresh.costs):
        raise CostError(
            f"costs: the table has none of the model's {len(fresh.costs)} different blocks among its "
            f"{len(options.costs.costs)} entries; give one that was measured for this model, or leave it out"
        )
    return chain, fresh


def cost_widths(
    front: Front,
    chain: Chain,
    widths: set[int],
    device: str,
    report: Report,
    progress: Progress | None,
    known: CostTable | None,
) -> tuple[Chain, CostTable]:
    """Return the chain with measured costs of these tensor widths beside those of one device."""
    begin = time.perf_counter()
    inputs = {name: (front.examples[name], dim) for name, dim in front.dims.items()}
    chain, fresh = measure_widths(
        front.gm,
        chain,
        widths,
        front.tensors,
        inputs,
        front.rows,
        joined=not front.tail.linear,
        device=device,
        progress=progress,
        known=known,
    )
    report.timed("measure widths", begin)
    return chain, fresh


def candidate_widths(options: Options) -> set[int]:
    """Return the tensor widths, above 1, that were asked for and whose costs have a say in the plan."""
    if options.tensor is None:
        return set()
    settled = options.replicas is not None and len(options.tensor) == 1
    return set() if settled else {width for width in options.tensor if width > 1}


def promising_widths(front: Front, chain: Chain, cluster: Cluster, options: Options, report: Report) -> list[int]:
    """Return the widths that the best plan would have and that are to be measured first; none where it is fixed."""
    if any(one is not None for one in (options.plan, options.cuts, options.tensor)):
        return []
    begin = time.perf_counter()
    try:
        options, schedule = _settled(front, options)
        widths, _ = _possible_widths(front, cluster, options)
        find = _search(front, cluster, options, schedule)
        searched = search_widths(front.gm, chain, cluster, front.rows, find, widths, measurable=True)
        return sorted(searched.wanted)
    except EfftraError:
        return []  # it is raised again, on all ranks, where the plan is chosen
    finally:
        report.timed("plan", begin)


def choose_plan(front: Front, chain: Chain, cluster: Cluster, options: Options, report: Report) -> Planned | Plan:
    """Return the plan that the user gave, or the best one for what the user fixed."""
    begin = time.perf_counter()
    names = block_names(front.gm)
    options, schedule = _settled(front, options)
    try:
        if options.plan is not None:
            if options.plan.blocks != len(names):
                raise CoverageError(
                    f"the plan is for a model of {options.plan.blocks} blocks, but this one has {len(names)}; "
                    "give a plan of this model, or leave plan= out to search for one"
                )
            verify_plan(options.plan, len(names), cluster)
            chain = _with_widths(front, chain, {stage.tensor for stage in options.plan.stages})
            return _priced(options.plan, chain, cluster, front.rows, options)
        if options.tensor is not None:
            chain = _with_widths(front, chain, set(options.tensor))
            plan = _wide_plan(front, names, chain, cluster, options, schedule)
            return _priced(plan, chain, cluster, front.rows, options)
        if options.cuts is not None:
            plan = _cut_plan(front.gm, names, cluster, options, schedule)
            return _priced(plan, chain, cluster, front.rows, options)
        return _searched(front, chain, cluster, options, schedule)
    finally:
        report.timed("plan", begin)


def _settled(front: Front, options: Options) -> tuple[Options, str | None]:
    """Return the options with what the step's own nature leaves no choice of, and the schedule."""
    schedule = options.schedule
    if front.statistics == "exact":
        asked = options.plan.micro_batches if options.plan is not None else options.micro_batches or 1
        if asked > 1:
            raise PlanError(_undivided(asked))
        options = replace(options, micro_batches=1)
    if not front.tail.linear:
        if schedule == "1f1b" or (options.plan is not None and options.plan.schedule == "1f1b"):
            raise PlanError(
                f"schedule '1f1b' cannot be had: {mixing_node(front.tail)} needs the whole batch's values, so all "
                "forwards come before the first backward; use schedule='gpipe'"
            )
        schedule = "gpipe"
    return options, schedule


def _fixed(options: Options, schedule: str | None) -> dict[str, Any]:
    return {
        "stages": options.stages,
        "replicas": options.replicas,
        "micro_batches": options.micro_batches,
        "schedule": schedule,
        "optimizer_bytes_per_parameter_byte": options.optimizer_states,
    }


def _search(front: Front, cluster: Cluster, options: Options, schedule: str | None) -> Callable[[Chain], Planned]:
    return lambda chain: partition(chain, cluster, front.rows, **_fixed(options, schedule))


def _searched(front: Front, chain: Chain, cluster: Cluster, options: Options, schedule: str | None) -> Planned:
    find = _search(front, cluster, options, schedule)
    measurable = options.costs == "measured" and cluster.where != "described"  # what is measured, was
    possible, why_none = _possible_widths(front, cluster, options)
    searched = search_widths(front.gm, chain, cluster, front.rows, find, possible, measurable=measurable)
    planned = searched.planned
    why = explain(planned, searched.chain, cluster, front.rows, **_fixed(options, schedule))
    rules = Rules(optimizer_bytes_per_parameter_byte=options.optimizer_states)
    one_stage = options.stages in (None, 1) and options.replicas is None
    widths = about_widths(planned.plan, searched.chain, searched.every, cluster, front.rows, rules, one_stage)
    if not known_widths(searched.every):
        widths = [f"no tensor groups: {why_none}"] if why_none else why_no_widths(cluster)
    why += "\n".join(["", *widths, ""]) if widths else ""
    return replace(planned, plan=replace(planned.plan, explanation=why))


def _possible_widths(front: Front, cluster: Cluster, options: Options) -> tuple[set[int], str]:
    """Return the widths that the planner may choose, or none, and why: what it chooses must run."""
    if options.backend is not None:
        return set(), "stages that meet other ranks on their way cannot be compiled (compile_stages)"
    hooked = next((name for (kind, name), t in front.tensors.items() if kind == "parameter" and has_hooks(t)), None)
    if hooked is not None:
        return set(), f"hooks on parameters need whole gradients, and '{hooked}' has some"
    return possible_widths(cluster), ""


def _with_widths(front: Front, chain: Chain, widths: set[int]) -> Chain:
    return with_tensor(front.gm, chain, widths) if max(widths, default=1) > 1 else chain


def _wide_plan(
    front: Front, names: Sequence[str], chain: Chain, cluster: Cluster, options: Options, schedule: str | None
) -> Plan:
    """Return the fastest plan with these tensor widths by stage that fits, or one that does not if none does.

    Cuts are chosen as for as many replicas; numbers of replicas that are not given are tried.
    """
    assert options.tensor is not None
    rules = Rules(optimizer_bytes_per_parameter_byte=options.optimizer_states)
    best: tuple[bool, float] | None = None
    chosen: Plan | None = None
    misplaced: PlanError | None = None
    for replicas in _replicas_to_try(cluster, options):
        try:
            plan = _wide_plan_of(front, names, chain, cluster, options, schedule, replicas)
        except PlacementError as error:
            misplaced = misplaced or error
            continue
        figures = evaluate(plan, chain, cluster, front.rows, rules)
        found = (shortage(plan, cluster, figures) is not None, figures.step_s)
        if best is None or found < best:
            best, chosen = found, plan
    if chosen is None and misplaced is not None:
        raise misplaced
    assert chosen is not None
    return chosen


def _replicas_to_try(cluster: Cluster, options: Options) -> list[tuple[int, ...]]:
    widths = options.tensor
    assert widths is not None
    least = options.replicas or (1,) * len(widths)
    needed, devices = sum(r * t for r, t in zip(least, widths, strict=True)), len(cluster.devices)
    if needed > devices:
        raise PlanError(f"tensor={widths} with replicas={least} needs {needed} devices, the cluster has {devices}")
    if options.replicas is not None:
        return [options.replicas]
    most = devices // needed
    return [(count,) * len(widths) for count in sorted({*(2**k for k in range(most.bit_length())), most})]


def _wide_plan_of(
    front: Front,
    names: Sequence[str],
    chain: Chain,
    cluster: Cluster,
    options: Options,
    schedule: str | None,
    replicas: tuple[int, ...],
) -> Plan:
    widths = options.tensor
    assert widths is not None
    counts = tuple(r * t for r, t in zip(replicas, widths, strict=True))
    asked = replace(options, stages=len(widths), replicas=counts, tensor=None)
    if options.cuts is not None:
        plan = _cut_plan(front.gm, names, cluster, asked, schedule)
    else:
        plan = partition(
            chain,
            cluster.without_memory_limits(),
            front.rows,
            stages=len(widths),
            replicas=counts,
            micro_batches=options.micro_batches,
            schedule=schedule,
            tensor=1,
        ).plan
    places = tuple(tuple(sorted(stage.devices)) for stage in plan.stages)
    if any(leaves_machine(devices, width, cluster) for devices, width in zip(places, widths, strict=True)):
        places = place_groups(list(zip(replicas, widths, strict=True)), cluster)
    wide = tuple(
        replace(stage, devices=devices, tensor=width)
        for stage, devices, width in zip(plan.stages, places, widths, strict=True)
    )
    return replace(plan, stages=wide, predicted_step_s=None, lower_bound_s=None, placement="tensor", explanation="")


def _priced(plan: Plan, chain: Chain, cluster: Cluster, rows: int, options: Options) -> Plan:
    """Return a given plan with its step and memory, explained; raise MemoryPlanError where a device has too little."""
    rules = Rules(optimizer_bytes_per_parameter_byte=options.optimizer_states)
    if any(stage.recompute for stage in plan.stages):
        chain = replace(chain, blocks=tuple(block.with_recompute() for block in chain.blocks))
    figures = evaluate(plan, chain, cluster, rows, rules)
    short = shortage(plan, cluster, figures)
    if short is not None:
        raise MemoryPlanError(f"the given plan does not fit: {short[1]}")
    why = explain_given(plan, figures, chain, cluster, rows, rules)
    step_s, memory = figures.step_s, figures.memory_bytes
    return replace(plan, predicted_step_s=step_s, lower_bound_s=None, memory_bytes=memory, explanation=why)


def _cut_plan(
    gm: fx.GraphModule, names: Sequence[str], cluster: Cluster, options: Options, schedule: str | None
) -> Plan:
    assert options.cuts is not None
    stops = [*(_first_block(gm, path) for path in options.cuts), len(names)]
    starts = [0, *stops[:-1]]
    replicas = options.replicas or (1,) * len(stops)
    if len(replicas) != len(stops):
        raise PlanError(f"cuts={options.cuts} make {len(stops)} stages, but replicas={replicas} is for {len(replicas)}")
    if sum(replicas) > len(cluster.devices):
        raise PlanError(f"cuts={options.cuts} need {sum(replicas)} devices, the cluster has {len(cluster.devices)}")
    stages, device = [], 0
    for path, start, stop, count in zip(("the start", *options.cuts), starts, stops, replicas, strict=True):
        if not start < stop:
            raise PlanError(f"a stage that starts at '{path}' would have no block; cuts must be in the model's order")
        stages.append(Stage(start, stop, tuple(range(device, device + count)), names=tuple(names[start:stop])))
        device += count
    return Plan(tuple(stages), options.micro_batches or 2 * len(stages), schedule or "1f1b", placement="cuts")


def _first_block(gm: fx.GraphModule, path: str) -> int:
    found = [BLOCK[n] for n in chain_nodes(gm) if is_heavy(n) and ((PATH.get(n) or "") + ".").startswith(path + ".")]
    if not found:
        paths = sorted({PATH.get(n) or "" for n in chain_nodes(gm) if is_heavy(n)} - {""})
        raise PlanError(f"no block lies in '{path}'; modules with blocks are {', '.join(paths[:12])}")
    return min(found)


def back_end(
    front: Front, plan: Plan, report: Report, like: Back | None = None, cluster: Cluster | None = None
) -> Back:
    """Cut the graph into the plan's stages and describe what crosses between them.

    With `like`, tensor groups hold parameters as they do there. Raises PlanError for a plan that divides a batch
    whose statistics are wanted as a whole.
    """
    if front.statistics == "exact" and plan.micro_batches > 1:
        raise PlanError(_undivided(plan.micro_batches))
    begin = time.perf_counter()
    gm = AssignStages(tuple(stage.stop_block for stage in plan.stages))(front.gm)
    stages = split_stages(gm, len(plan.stages))
    wiring = wire(gm, stages, not front.tail.linear)
    report.graph("split-stages", gm)
    for index, stage in enumerate(stages):
        report.graph(f"stage-{index}", stage.gm)
    report.timed("split", begin)
    names = block_names(gm)
    named = replace(
        plan, stages=tuple(replace(s, names=tuple(names[s.first_block : s.stop_block])) for s in plan.stages)
    )
    random = tuple(any(is_random(n) for n in s.gm.graph.nodes if n.op == "call_function") for s in stages)
    begin = time.perf_counter()
    wiring, sharded = shard_stages(
        stages, tuple(stage.tensor for stage in plan.stages), wiring, like=like.sharded if like else None
    )
    for index, one in enumerate(sharded):
        if one is not None:
            report.texts.append((f"stage-{index}-tensor.txt", one.describe()))
        for rank, graph in enumerate(one.stages if one is not None else ()):
            report.graph(f"stage-{index}-tensor-{rank}", graph.gm)
    if any(one is not None for one in sharded):
        report.timed("shard", begin)
        groups = explain_groups(named, stages, sharded, front.rows, cluster)
        why = named.explanation.split(HEADING)[0].rstrip("\n")
        named = replace(named, explanation=f"{why}\n\n{groups}" if why else groups)
    synced: tuple[Synced | None, ...] = (None,) * len(stages)
    if front.statistics in ("synced", "exact"):
        synced = tuple(
            sync_stage((graph,) if cut is None else cut.stages, stage.replicas)
            for graph, cut, stage in zip(stages, sharded, plan.stages, strict=True)
        )
        wiring = replace(wiring, synced=tuple(i for i, one in enumerate(synced) if one is not None))
    return Back(named, stages, wiring, random, sharded, synced)


def _undivided(micro_batches: int) -> str:
    return (
        f"batch_norm='exact' needs the whole batch in one micro-batch, since every norm waits for all rows, but the "
        f"plan has {micro_batches} micro-batches; use micro_batches=1, or batch_norm='synced' for statistics of each "
        "micro-batch"
    )


def check_inputs(front: Front, call: Call, tensors: Sequence[Tensor]) -> int:
    """Return the number of rows of a later batch; raise InputError that names what differs."""
    problem = difference(front.captured.call, call)
    if problem is not None:
        raise InputError(problem)
    rows: int | None = None
    origin = ""
    for name, tensor in zip(call.tensor_names, tensors, strict=True):
        example, dim = front.examples[name], front.dims[name]
        expected = ["rows" if d == dim else size for d, size in enumerate(example.shape)]
        shape = f"{str(example.dtype).removeprefix('torch.')} [{', '.join(map(str, expected))}]"
        if tensor.dtype != example.dtype or tensor.ndim != example.ndim:
            raise InputError(
                f"argument '{name}': compiled for {shape}, got {describe(tensor)}; convert it, or compile again with "
                "such an example"
            )
        for d, size in enumerate(tensor.shape):
            if d != dim and size != example.shape[d]:
                raise InputError(f"argument '{name}': compiled for {shape}, got {describe(tensor)}")
        if dim is None:
            continue
        if rows is None:
            rows, origin = tensor.shape[dim], name
        elif tensor.shape[dim] != rows:
            raise InputError(
                f"argument '{name}' has {tensor.shape[dim]} rows but '{origin}' has {rows}; give the same batch to both"
            )
    if not rows:
        raise InputError(f"argument '{origin}' has 0 rows, expected at least 1")
    return rows
