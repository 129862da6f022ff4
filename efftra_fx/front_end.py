"""From a model and an example to a step that is captured, checked, proven and cut into blocks."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, fx, nn

from efftra_fx.capture_norms import syncs_norms
from efftra_fx.capture_refused import refuse_scripted
from efftra_fx.captured import Captured
from efftra_fx.captured_step import capture_step, check_again
from efftra_fx.compiler import Front, Options, Report
from efftra_fx.draws import KEY_DIMS, keys_of
from efftra_fx.errors import BatchError, InputError, LossError
from efftra_fx.example import find_batch, model_tensors, proof_inputs
from efftra_fx.front_notes import buffer_notes, loss_notes, norm_notes, opaque_notes, python_notes, sparse_notes
from efftra_fx.hooks import check_hooks, hook_notes
from efftra_fx.meta import BATCH, CONSTANTS, OUTPUTS, PATH, REDUCED, ROLE
from efftra_fx.parts import Parts
from efftra_fx.passes.batch import ProveBatch
from efftra_fx.passes.batch_again import ProveAgain
from efftra_fx.passes.batch_evaluate import is_batch_statistics
from efftra_fx.passes.blocks import FoldBlocks
from efftra_fx.passes.layout_free import LayoutFree, draws_alike
from efftra_fx.passes.means import SeparateMeans
from efftra_fx.passes.news import counters, split_news
from efftra_fx.passes.pipeline import Pass, run_passes
from efftra_fx.passes.reduction import DeclareReduction, SettleReduction
from efftra_fx.passes.shapes import AnnotateShapes
from efftra_fx.passes.synced import is_synced
from efftra_fx.passes.tail import split_tail
from efftra_fx.program import Load, RankProgram, micro_batch_rows
from efftra_fx.signature import Call, describe, difference, rows_of


@torch.random.fork_rng()  # trial runs and proofs draw, which must not change what the step draws
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
            alone=given if rows == 1 else None,
        )
    else:
        captured = check_again(model, captured, small, whole, options.loss_fn, given if rows == 1 else None)
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
        gm = run_passes(
            gm,
            (LayoutFree(dims, captured.opaque),),
            ("role", "outputs"),
            lambda name, graph, _: report.graph(name, graph),
        )
        if draws_alike(gm):
            alone = copy_graph(gm)
            names, dims = [*names, *KEY_DIMS], (*dims, *KEY_DIMS.values())
            tensors = (*tensors, *keys_of(0, rows, tensors[0].device).values())
            small = [*small, *keys_of(0, rows_of(small, dims), tensors[0].device).values()]
    every = () if rows == 1 else tensors
    proof: tuple[Pass, ...] = (
        SeparateMeans(dims),
        ProveBatch(values, small, dims, every),
        ProveAgain(values, every or small, dims),
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
    norms = tuple(PATH.get(n) or n.name for n in gm.graph.nodes if is_synced(n) and not _joined(n))
    pairwise = _pairwise(gm)
    gm, news = split_news(gm, norms)
    once = counters(gm)
    buffers = buffer_notes(gm, once, norms)
    notes = (
        *loss_notes(captured),
        *norm_notes(norms, options.batch_norm),
        *buffers,
        *hook_notes(*models),
        *opaque_notes(captured, gm, divided),
        *python_notes(captured),
        *sparse_notes(captured),
    )
    gm, tail = split_tail(gm)
    report.graph("tail", tail.gm)
    if news is not None:
        report.graph("news", news.tail.gm)
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
        once,
        Parts(*models),
        news,
        pairwise,
        options.batch_norm if norms else "",
        alone,
    )


def _declared(gm: fx.GraphModule) -> bool:
    """Say whether the loss is what parts make by a declared reduction."""
    output = next(n for n in reversed(gm.graph.nodes) if n.op == "output")
    return REDUCED.on(output.args[0][0])


def _joined(norm: fx.Node) -> bool:
    """Say whether a norm has the whole batch's statistics in any case, since it comes behind what mixes rows."""
    return isinstance(norm.args[0], fx.Node) and BATCH[norm.args[0]].kind == "mixed"


def copy_graph(gm: fx.GraphModule) -> fx.GraphModule:
    """Return the graph again, so that passes may change one of the two."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    output = graph.graph_copy(gm.graph, copies)
    graph.output(output)
    copy = fx.GraphModule(gm, graph)
    OUTPUTS[copy], CONSTANTS[copy] = OUTPUTS[gm], CONSTANTS[gm]
    return copy


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


def check_inputs(front: Front, call: Call, tensors: Sequence[Tensor]) -> int:
    """Return the number of rows of a later batch; raise InputError that names what differs."""
    problem = difference(front.captured.call, call)
    if problem is not None:
        raise InputError(problem)
    return check_tensors(front, call, tensors)


def check_tensors(front: Front, call: Call, tensors: Sequence[Tensor], other_form: bool = False) -> int:
    """Return the number of rows of a batch; raise InputError for a tensor that is not what the step was captured for.

    A batch of an `other_form` may have other arguments and sizes, but not other dtypes, dimensions or unequal rows.
    """
    rows: int | None = None
    origin = ""
    for name, tensor in zip(call.tensor_names, tensors, strict=True):
        if other_form and name not in front.examples:
            continue
        example, dim = front.examples[name], front.dims[name]
        expected = ["rows" if d == dim else size for d, size in enumerate(example.shape)]
        shape = f"{str(example.dtype).removeprefix('torch.')} [{', '.join(map(str, expected))}]"
        if tensor.dtype != example.dtype or tensor.ndim != example.ndim:
            raise InputError(
                f"argument '{name}': compiled for {shape}, got {describe(tensor)}; convert it, or compile again with "
                "such an example"
            )
        sizes = () if other_form else enumerate(tensor.shape)
        if any(d != dim and size != example.shape[d] for d, size in sizes):
            raise InputError(f"argument '{name}': compiled for {shape}, got {describe(tensor)}")
        if dim is None:
            continue
        if rows is None:
            rows, origin = tensor.shape[dim], name
        elif tensor.shape[dim] != rows:
            raise InputError(
                f"argument '{name}' has {tensor.shape[dim]} rows but '{origin}' has {rows}; give the same batch to both"
            )
    if rows == 0 or (rows is None and not other_form):
        raise InputError(f"argument '{origin}' has 0 rows, expected at least 1")
    return rows or 0
