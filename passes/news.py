"""Where new values of buffers are made of the whole batch, once at the end of a step, as one device makes them.

    parts of the batch:   ... -> S_1, S_2, ...       (partial sums, or rows)
    whole batch, once:    new values = N(sum of S_1, sum or rows of S_2, ..., inputs, buffers as the step found them)

So a moving average costs a sum over all ranks, and a queue the rows that go into it. Nothing waits for it: what
forward computes with a new value depends on all rows and is in the loss's tail, which makes that value for itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

import torch
from torch import fx

from efftra_fx.meta import BATCH, FREE, OUTPUTS, ROLE
from efftra_fx.opaque import is_opaque, returned_by
from efftra_fx.walks import ancestors

from .batch_evaluate import is_batch_statistics
from .means import argument
from .slices import draws
from .tail import Boundary, Tail, extract_tail

_OF_PARTS = ("sum", "rows", "whole")


@dataclass(frozen=True)
class News:
    """New values of `buffers`, which `tail` computes as a list from what its boundaries and inputs are."""

    tail: Tail
    buffers: tuple[str, ...]


@dataclass(frozen=True)
class _Written:
    """The buffers that a step writes: what each becomes, and what it was."""

    news: Mapping[str, fx.Node]
    olds: Mapping[str, fx.Node]
    loss: AbstractSet[fx.Node]  # what the loss is made of


def split_news(gm: fx.GraphModule, norms: Collection[str] = ()) -> tuple[fx.GraphModule, News | None]:
    """Take new values of buffers out of the graph where the whole batch can make them; leave what they are made of.

    Needs `BATCH` and `FREE`. Buffers of the modules `norms` stay. So do those that only parts can write: by a module
    that runs as it is on parts, by random numbers that the loss reads too, or made of other buffers that stay; and
    those that no row has a part in, but parameters, which a rank holds that writes them.
    """
    outputs = OUTPUTS[gm]
    if not outputs.buffers:
        return gm, None
    output = next(n for n in reversed(gm.graph.nodes) if n.op == "output")
    results = list(output.args[0])
    news = dict(zip(outputs.buffers, results[outputs.loss :], strict=True))
    olds = {ROLE[n].name: n for n in gm.graph.nodes if n.op == "placeholder" and ROLE[n].kind == "buffer"}
    written = _Written(news, olds, ancestors(results[: outputs.loss]))
    whole = _whole(gm, written, {name for name in news if module_of(name) not in norms})
    made, known = _made(gm, written, whole)
    if not made:
        return gm, None
    inside, boundary = _walk([news[name] for name in made], known)
    tail = extract_tail(gm, [news[name] for name in made], inside, boundary)
    for node in tail.graph.nodes:
        if node.target is torch.ops.aten.view.default:  # what is joined lies contiguous, so a view may need a copy
            node.target = torch.ops.aten.reshape.default
    tail.recompile()
    parts = [n for n in gm.graph.nodes if n in boundary]
    kept = [name for name in outputs.buffers if name not in made]
    output.args = ((*results[: outputs.loss], *(news[name] for name in kept), *parts),)
    OUTPUTS[gm] = replace(outputs, buffers=tuple(kept), parts=tuple(n.name for n in parts))
    gm.graph.eliminate_dead_code()
    gm.recompile()
    boundaries = tuple(Boundary(n.name, BATCH[n].kind, BATCH[n].dim) for n in parts)
    return gm, News(Tail(tail, boundaries, linear=False), tuple(made))


def module_of(buffer: str) -> str:
    """Return the path of the module that a buffer belongs to."""
    return buffer.rpartition(".")[0]


def counters(gm: fx.GraphModule) -> frozenset[str]:
    """Return the graph's buffers that are written once a step: their new value does not depend on the batch's values.

    Those of a module that keeps statistics of parts go with its statistics instead.
    """
    outputs = OUTPUTS[gm]
    output = next(n for n in reversed(gm.graph.nodes) if n.op == "output")
    return _counters(dict(zip(outputs.buffers, output.args[0][outputs.loss :], strict=False)))


def _counters(news: Mapping[str, fx.Node]) -> frozenset[str]:
    moving = {module_of(name) for name, node in news.items() if BATCH[node].kind != "whole"}
    return frozenset(n for n, node in news.items() if BATCH[node].kind == "whole" and module_of(n) not in moving)


def _whole(gm: fx.GraphModule, written: _Written, names: AbstractSet[str]) -> set[str]:
    """Return which of these buffers are the whole batch's, if all others are written by parts."""
    found = set(names)
    while True:
        rest = {name: node for name, node in written.news.items() if name not in found}
        steady = _counters(rest)
        parted = {written.olds[name] for name in rest if name not in steady and name in written.olds}
        moving = {module_of(name) for name in rest if name not in steady}
        known = _known(gm, {written.olds[n] for n in found if n in written.olds})
        elsewhere = written.loss | ancestors(rest.values())
        out = {name for name in found if _stays(written.news[name], parted, known, elsewhere)}
        out |= {n for n in found if BATCH[written.news[n]].kind == "whole" and module_of(n) in moving}
        if not out:
            return found
        found -= out


def _made(gm: fx.GraphModule, written: _Written, whole: AbstractSet[str]) -> tuple[list[str], set[fx.Node]]:
    """Return the buffers that all ranks write, and what every rank knows then: not those that only some ranks write."""
    made = [name for name in written.news if name in whole]
    while True:
        known = _known(gm, {written.olds[name] for name in made if name in written.olds})
        kept = [n for n in made if BATCH[written.news[n]].kind != "whole" or written.news[n] in known]
        if kept == made:
            return made, known
        made = kept


def _stays(
    node: fx.Node, parted: AbstractSet[fx.Node], known: AbstractSet[fx.Node], elsewhere: AbstractSet[fx.Node]
) -> bool:
    """Say whether only parts can make a new value, given the old values of buffers that parts write.

    What is drawn for it and read `elsewhere` too would be drawn twice.
    """
    if any(n in parted for n in _reads(node)):
        return True
    inside, _ = _walk([node], known)
    return any(_of_parts(n) or (draws(n) and n in elsewhere) for n in inside if n.op == "call_function")


def _of_parts(node: fx.Node) -> bool:
    """Say whether code that runs as it is runs on parts: what it returns follows the rows."""
    return is_opaque(node.target) and all(BATCH[result].kind != "mixed" for result in returned_by(node))


def _reads(node: fx.Node) -> Iterator[fx.Node]:
    """Yield what a value is made of; of what normalises by the batch, running statistics are no part."""
    seen: set[fx.Node] = set()
    pending = [node]
    while pending:
        current = pending.pop()
        if current in seen:
            continue
        seen.add(current)
        yield current
        held = [argument(current, n) for n in ("running_mean", "running_var")] if is_batch_statistics(current) else []
        pending += [n for n in current.all_input_nodes if all(n is not one for one in held)]


def _known(gm: fx.GraphModule, olds: AbstractSet[fx.Node]) -> set[fx.Node]:
    """Return what every rank can compute without parts: from inputs, and from buffers `olds` but no rows."""
    known: set[fx.Node] = set()
    for node in gm.graph.nodes:
        if node.op == "output":
            continue
        made = node.op == "call_function" and BATCH[node].kind == "whole" and not draws(node)
        if FREE[node] or node in olds or (made and all(n in known for n in node.all_input_nodes)):
            known.add(node)
    return known


def _walk(roots: Collection[fx.Node], known: AbstractSet[fx.Node]) -> tuple[set[fx.Node], set[fx.Node]]:
    """Return what the whole batch computes for `roots`, but for what is known, and what parts hand over for it."""
    inside: set[fx.Node] = set()
    boundary: set[fx.Node] = set()
    pending = list(roots)
    while pending:
        node = pending.pop()
        if node in inside or node in boundary or node in known:
            continue
        value = node.meta.get("val")
        if node.op == "placeholder" or (isinstance(value, torch.Tensor) and BATCH[node].kind in _OF_PARTS):
            boundary.add(node)
        else:
            inside.add(node)
            pending.extend(node.all_input_nodes)
    return inside, boundary


__all__ = ["News", "counters", "module_of", "split_news"]
