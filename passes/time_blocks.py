"""Time the functions of blocks, forward and backward apart, one after the other as in a step.

All forwards run first, then all backwards in reverse, so that caches hold, and the allocator
gives, what they would in training: timed one block at a time, its values still at hand, a small
network looks a third faster than it is. What does not fit at once is timed in runs of blocks.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from efftra_fx.cost import NodeCost, Timing
from efftra_fx.meta import BATCH

from .block_graphs import BlockGraph
from .blocks import size_at
from .shapes import elements, operations
from .stage_code import Example, Fresh

Progress = Callable[[Iterable[Any], str], Iterable[Any]]
ASSUMED_OPERATIONS_PER_S = 2e10
HELD_BYTES = 1 << 30  # of values and parameters of blocks that are timed together, on a CPU
FLUSH_BYTES = 64 << 20  # more than most caches hold


class Timed(Protocol):
    """A block's functions, as they are timed."""

    @property
    def saved_bytes(self) -> int:
        """Bytes kept from forward to backward."""
        ...

    def forward(self, operands: list[Any]) -> Any:
        """Return outputs and what is saved."""
        ...

    def backward(self, saved: Any, gradients: list[Tensor | None], sums: Any, defer: bool) -> Any:
        """Take gradients of the outputs."""
        ...


@dataclass(frozen=True)
class Item:
    """A block to time: its functions for a number of rows, examples of what goes in, and how often the model has it."""

    name: str
    graph: BlockGraph
    make: Callable[[int], Timed]
    example: Example
    count: int = 1

    def operand_bytes(self, rows: int) -> int:
        """Bytes of what goes in."""
        given = (self.example(role, rows) for role in self.graph.stage.roles)
        return sum(value.numel() * value.element_size() for value in given)


@dataclass(frozen=True)
class Point:
    """What was timed at one number of rows: median seconds, and bytes kept for the backward."""

    rows: int
    forward_s: float
    backward_s: float
    saved_bytes: int


def time_blocks(
    items: Sequence[Item],
    sizes: tuple[int, int],
    device: str,
    repeats: int,
    progress: Progress | None = None,
    label: str = "measuring blocks",
) -> dict[str, NodeCost]:
    """Return the cost of each item by name, timed at two numbers of rows; with `repeats=0` by operation counts."""
    if repeats == 0:
        return {item.name: _cost(item, [_estimated(item, rows) for rows in dict.fromkeys(sizes)]) for item in items}
    points: dict[str, list[Point]] = {item.name: [] for item in items}
    work = [(rows, run) for rows in dict.fromkeys(sizes) for run in runs(items, max(sizes), budget(device))]
    for rows, run in progress(work, label) if progress and work else work:
        others = sum(item.count * item.operand_bytes(rows) for item in items)
        for item, point in zip(run, time_run(run, rows, device, repeats, others), strict=True):
            points[item.name].append(point)
    return {item.name: _cost(item, points[item.name]) for item in items}


def runs(items: Sequence[Item], rows: int, most_bytes: float) -> Iterator[list[Item]]:
    """Cut a list of blocks into runs whose operands, with as much again for what is saved, fit; none is empty."""
    run: list[Item] = []
    held = 0
    for item in items:
        size = 2 * item.operand_bytes(rows)
        if run and held + size > most_bytes:
            yield run
            run, held = [], 0
        run.append(item)
        held += size
    if run:
        yield run


def budget(device: str) -> float:
    """Bytes that may be held while blocks are timed."""
    if device.startswith("cuda"):
        return 0.25 * float(torch.cuda.mem_get_info(device)[0])
    return float(HELD_BYTES)


def time_run(run: Sequence[Item], rows: int, device: str, repeats: int, step_bytes: float) -> list[Point]:
    """Time a run of blocks: all forwards, then all backwards, the first time to warm up.

    `step_bytes` go through the caches in a step of the whole model; so many, but for the run's own, are read
    between forwards and backwards.
    """
    codes = [item.make(rows) for item in run]
    operands = [[filled(item.example(role, rows), device) for role in item.graph.stage.roles] for item in run]
    own = sum(item.operand_bytes(rows) for item in run)
    spoil = int(min(max(step_bytes - own, 0), FLUSH_BYTES)) if device == "cpu" else 0
    others = torch.zeros(spoil // 4)
    forwards: list[list[float]] = [[] for _ in run]
    backwards: list[list[float]] = [[] for _ in run]
    with torch.no_grad():
        for _ in range(repeats + 1):
            kept: list[tuple[Any, Any]] = []
            others.add_(1)
            for code, given, taken in zip(codes, operands, forwards, strict=True):
                begin = now(device)
                kept.append(code.forward(list(given)))
                taken.append(now(device) - begin)
            others.add_(1)
            for item, code, taken in reversed(list(zip(run, codes, backwards, strict=True))):
                taken.append(_backward(item, code, *kept.pop(), device))
    return [
        Point(rows, statistics.median(there[1:]), statistics.median(back[1:]), code.saved_bytes)
        for there, back, code in zip(forwards, backwards, codes, strict=True)
    ]


def _backward(item: Item, code: Timed, outputs: Any, saved: Any, device: str) -> float:
    """Run a block's backward, if it has one, and return its seconds."""
    flags = item.graph.flags
    if not flags.any:
        return 0.0
    gradients = [
        torch.ones_like(o, memory_format=torch.contiguous_format) if flag else None
        for o, flag in zip(outputs, flags.outputs, strict=True)
    ]
    del outputs
    begin = now(device)
    code.backward(saved, gradients, Fresh(len(flags.parameters)), False)
    return now(device) - begin


def _estimated(item: Item, rows: int) -> Point:
    work = sum(size_at(operations(n), rows) for n in item.graph.stage.gm.graph.nodes)
    seconds = work / ASSUMED_OPERATIONS_PER_S
    return Point(rows, seconds, 2 * seconds if item.graph.flags.any else 0.0, item.make(rows).saved_bytes)


def _cost(item: Item, points: list[Point]) -> NodeCost:
    first, last = points[0], points[-1]
    return NodeCost(
        item.name,
        line(first.rows, first.forward_s, last.rows, last.forward_s),
        line(first.rows, first.backward_s, last.rows, last.backward_s),
        output_bytes=_output_bytes(item.graph),
        saved_bytes=last.saved_bytes / last.rows,
    )


def line(x0: int, y0: float, x1: int, y1: float) -> Timing:
    """Return the straight line through two measurements, with neither part below zero."""
    if x0 == x1:
        return Timing(0.0, y1 / x1)
    slope = max((y1 - y0) / (x1 - x0), 0.0)
    fixed = max(y1 - slope * x1, 0.0)
    return Timing(fixed, (y1 - fixed) / x1)


def now(device: str) -> float:
    """Return a clock; on a CPU with one thread that thread's own, which stands still while other ranks have the core.

    How many ranks share the cores is said by the cluster (`Cluster.slots`), and must not be counted twice.
    """
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
    elif torch.get_num_threads() == 1:
        return time.thread_time()
    return time.perf_counter()


def filled(meta: Tensor, device: str) -> Tensor:
    """Return a tensor of small harmless values; integers are zero, so that they index any table."""
    tensor = torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype, device=device)
    return tensor.fill_(0.5 if meta.is_floating_point() or meta.is_complex() else 0)


def _output_bytes(graph: BlockGraph) -> float:
    output = next(n for n in reversed(graph.stage.gm.graph.nodes) if n.op == "output")
    total = 0.0
    for node in output.args[0]:
        value = node.meta["val"]
        if isinstance(value, Tensor) and BATCH[node].kind == "rows":
            total += size_at(elements(value), 1) * value.element_size()
    return total
