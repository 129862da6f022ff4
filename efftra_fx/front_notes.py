"""What is said once of a captured step: where it is not one device's, and what runs as it is."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from efftra_fx.capture_normal import sparse_lines
from efftra_fx.capture_opaque import called
from efftra_fx.captured import Captured
from efftra_fx.meta import BATCH, OUTPUTS, PATH
from efftra_fx.opaque import is_opaque, returned_by


def python_notes(captured: Captured) -> tuple[str, ...]:
    """Say once which attributes forward would write."""
    if not captured.python.writes:
        return ()
    return (
        f"forward writes {', '.join(captured.python.writes)} in Python, which happens while the model is captured and "
        "not at each step",
    )


def loss_notes(captured: Captured) -> tuple[str, ...]:
    """Say once where in a model's output its loss was found, if it does not say so itself."""
    if not captured.first_is_loss:
        return ()
    return ("the model returns a tuple, and its first element, a scalar, is taken as the loss; loss_fn= takes another",)


def sparse_notes(captured: Captured) -> tuple[str, ...]:
    return tuple(
        f"the gradient of what is looked up{line} is dense, where the model asks for a sparse one: use an optimizer "
        "for dense gradients (not SparseAdam)"
        for line in sparse_lines(captured.gm.graph)
    )


def opaque_notes(captured: Captured, gm: fx.GraphModule, divided: bool) -> tuple[str, ...]:
    """Say once what runs as it is; `gm` is the graph that was proven."""
    notes = [f"{called(path)} runs as it is, in one piece: {reason}" for path, reason in captured.opaque]
    kept = {path for path, _ in captured.opaque}
    together = dict.fromkeys(PATH.get(n) or "" for n in gm.graph.nodes if _mixes(n))
    notes += [
        f"{called(path)} computes with several rows together, or decides by them, so it and what follows from it are "
        "computed once a step, on the whole batch; where each row is to decide for itself, use torch.where"
        for path in together
        if path in kept
    ]
    if captured.whole_loss:
        reason = captured.whole_loss.removeprefix("the model cannot be captured as a graph: ").partition("; ")[0]
        where = "on each part" if divided else "once a step on the whole batch's output"
        notes.append(f"the loss runs as it is, {where}: {reason}")
    return tuple(notes)


def _mixes(node: fx.Node) -> bool:
    """Say whether code that runs as it is mixes rows that come to it apart."""
    if not is_opaque(node.target) or any(BATCH[n].kind == "mixed" for n in node.all_input_nodes):
        return False
    return any(BATCH[result].kind == "mixed" for result in returned_by(node))


def norm_notes(norms: Sequence[str], batch_norm: str) -> tuple[str, ...]:
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


def buffer_notes(gm: fx.GraphModule, counters: frozenset[str], norms: Sequence[str]) -> tuple[str, ...]:
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
