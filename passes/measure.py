"""Time each block, forward and backward apart, at two micro-batch sizes, on the device that will run it.

Equal blocks (same operators, same shapes) are timed once. What was measured is kept on
disk as data, under a key of all that it depends on.
"""

from __future__ import annotations

import hashlib
import operator
import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from efftra_fx.cost import Chain, CostTable, Crossing, NodeCost, Shared, Timing
from efftra_fx.errors import CostError
from efftra_fx.meta import BATCH, BLOCK, ROLE, STAGE
from efftra_fx.program import Value

from .blocks import block_names, chain_nodes, size_at
from .shapes import elements, operations
from .split import AssignStages, StageGraph, split_stages, wire
from .stage_code import Example, Flags, Fresh, example_of, stage_code
from .synced import is_synced

Progress = Callable[[Iterable[Any], str], Iterable[Any]]
_ASSUMED_OPERATIONS_PER_S = 2e10


@dataclass(frozen=True)
class BlockGraph:
    """A block as a stage of its own, with the flags of what it differentiates and a key of its content."""

    stage: StageGraph
    flags: Flags
    values: dict[str, Value]
    key: str


def block_graphs(gm: fx.GraphModule, blocks: int, joined: bool) -> tuple[BlockGraph, ...]:
    """Return every block as a stage of its own; leaves no `STAGE` behind."""
    AssignStages(tuple(range(1, blocks + 1)))(gm)
    stages = split_stages(gm, blocks)
    wiring = wire(gm, stages, joined)
    for node in gm.graph.nodes:
        node.meta.pop(f"efftra.{STAGE.name}", None)
    values = {value.name: value for value in wiring.values}
    trainable = {p.name for p in wiring.parameters if p.trainable}
    graphs = []
    for index, stage in enumerate(stages):
        flags = Flags(stage, values, trainable, index)
        graphs.append(BlockGraph(stage, flags, values, _content(stage.gm, flags)))
    return tuple(graphs)


def _content(gm: fx.GraphModule, flags: Flags) -> str:
    """Return a text that is the same for blocks that compute the same from values of the same types."""
    index: dict[fx.Node, int] = {}
    lines = [f"{flags.wrt} {flags.outputs}"]
    for number, node in enumerate(gm.graph.nodes):
        index[node] = number
        value = node.meta.get("val")
        kind = f"{value.dtype} {tuple(map(str, value.shape))}" if isinstance(value, Tensor) else ""
        if node.op == "placeholder":
            lines.append(f"{ROLE[node].kind} {kind}")
        else:
            arguments = fx.node.map_arg((node.args, node.kwargs), lambda n: f"%{index[n]}")
            lines.append(f"{node.target} {arguments} {kind}")
    return "\n".join(lines)


def sample_rows(rows: int) -> tuple[int, int]:
    """Return the two part sizes at which blocks are timed: about an eighth of the batch, and half of it.

    Never one row, of which some models can take no statistics.

    >>> sample_rows(64), sample_rows(1)
    ((8, 32), (2, 3))
    """
    large = max(3, -(-rows // 2))
    return max(2, large // 4), large


def measure_chain(
    gm: fx.GraphModule,
    tensors: dict[tuple[str, str], Tensor],
    inputs: dict[str, tuple[Tensor, int | None]],
    rows: int,
    *,
    joined: bool = False,
    device: str = "cpu",
    repeats: int = 3,
    progress: Progress | None = None,
    known: CostTable | None = None,
    synced: bool = False,
) -> tuple[Chain, CostTable]:
    """Return the planner's chain with measured costs, and the table of unique blocks to keep.

    With `repeats=0` nothing is run: times are estimated from operation counts. `synced`: replicas exchange
    their batch statistics.
    """
    names = block_names(gm)
    graphs = block_graphs(gm, len(names), joined)
    sizes = sample_rows(rows)
    unique: dict[str, BlockGraph] = {}
    for graph in graphs:
        unique.setdefault(graph.key, graph)
    found: dict[str, NodeCost] = {}
    todo = list(unique.items())
    for key, graph in progress(todo, "measuring blocks") if progress and repeats else todo:
        short = digest(key)
        before = known.find(short) if known is not None else None
        example = example_of(graph.values, tensors, inputs)
        found[key] = before or _cost(graph, example, short, sizes, device, repeats)
    blocks = tuple(
        replace(found[graph.key], name=name, **_parameters(graph), **(_exchanges(graph) if synced else {}))
        for graph, name in zip(graphs, names, strict=True)
    )
    table = CostTable(f"rows {sizes}", tuple(replace(cost, name=digest(key)) for key, cost in found.items()))
    return Chain(blocks, _crossings(gm), _shared(gm)), table


def digest(text: str) -> str:
    """Return a short name for a long key."""
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _cost(
    graph: BlockGraph, example: Example, name: str, sizes: tuple[int, int], device: str, repeats: int
) -> NodeCost:
    make = stage_code(graph.stage, graph.flags, example, device=device)
    return time_block(graph, make, example, name, sizes, device, repeats)


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


def time_block(
    graph: BlockGraph,
    make: Callable[[int], Timed],
    example: Example,
    name: str,
    sizes: tuple[int, int],
    device: str,
    repeats: int,
) -> NodeCost:
    """Return the cost of a block's functions, which `make` gives for a number of rows, timed at two sizes."""
    points = []
    for rows in dict.fromkeys(sizes):
        code = make(rows)
        forward, backward = _time(graph, code, example, rows, device, repeats)
        points.append((rows, forward, backward, code.saved_bytes))
    first, last = points[0], points[-1]
    return NodeCost(
        name,
        _line(first[0], first[1], last[0], last[1]),
        _line(first[0], first[2], last[0], last[2]),
        output_bytes=_output_bytes(graph.stage.gm),
        saved_bytes=last[3] / last[0],
    )


def _line(x0: int, y0: float, x1: int, y1: float) -> Timing:
    """Return the straight line through two measurements, with neither part below zero."""
    if x0 == x1:
        return Timing(0.0, y1 / x1)
    slope = max((y1 - y0) / (x1 - x0), 0.0)
    fixed = max(y1 - slope * x1, 0.0)
    return Timing(fixed, (y1 - fixed) / x1)


def _time(
    graph: BlockGraph, code: Timed, example: Example, rows: int, device: str, repeats: int
) -> tuple[float, float]:
    if repeats == 0:
        work = sum(size_at(operations(n), rows) for n in graph.stage.gm.graph.nodes)
        return work / _ASSUMED_OPERATIONS_PER_S, (2 * work / _ASSUMED_OPERATIONS_PER_S if graph.flags.any else 0.0)
    operands = [_filled(example(role, rows), device) for role in graph.stage.roles]
    forwards, backwards = [], []
    with torch.no_grad():
        for repeat in range(repeats + 1):
            begin = _now(device)
            outputs, saved = code.forward(list(operands))
            middle = _now(device)
            if graph.flags.any:
                gradients = [
                    torch.ones_like(o, memory_format=torch.contiguous_format) if flag else None
                    for o, flag in zip(outputs, graph.flags.outputs, strict=True)
                ]
                before = _now(device)
                code.backward(saved, gradients, Fresh(len(graph.flags.parameters)), False)
                after = _now(device)
            else:
                before = after = 0.0
            if repeat:
                forwards.append(middle - begin)
                backwards.append(after - before)
    return statistics.median(forwards), statistics.median(backwards)


def _now(device: str) -> float:
    """Return a clock; on a CPU with one thread that thread's own, which stands still while other ranks have the core.

    How many ranks share the cores is said by the cluster (`Device.speed`), and must not be counted twice.
    """
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
    elif torch.get_num_threads() == 1:
        return time.thread_time()
    return time.perf_counter()


def _filled(meta: Tensor, device: str) -> Tensor:
    """Return a tensor of small harmless values; integers are zero, so that they index any table."""
    tensor = torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype, device=device)
    return tensor.fill_(0.5 if meta.is_floating_point() or meta.is_complex() else 0)


def _output_bytes(gm: fx.GraphModule) -> float:
    output = next(n for n in reversed(gm.graph.nodes) if n.op == "output")
    total = 0.0
    for node in output.args[0]:
        value = node.meta["val"]
        if isinstance(value, Tensor) and BATCH[node].kind == "rows":
            total += size_at(elements(value), 1) * value.element_size()
    return total


def _parameters(graph: BlockGraph) -> dict[str, Any]:
    held = trained = 0.0
    for node in graph.stage.gm.graph.nodes:
        if node.op == "placeholder" and ROLE[node].kind in ("parameter", "buffer"):
            size = node.meta["val"].numel() * node.meta["val"].element_size()
            held += int(size)
            trained += int(size) if ROLE[node].trainable else 0
    return {"parameter_bytes": held, "gradient_bytes": trained}


def _exchanges(graph: BlockGraph) -> dict[str, Any]:
    """Return how often replicas exchange statistics, and the bytes of one replica's: two numbers a channel, a count."""
    norms = [node for node in graph.stage.gm.graph.nodes if node.op == "call_function" and is_synced(node)]
    values = [node.args[0].meta["val"] for node in norms]
    size = sum((2 * int(v.shape[1]) + 1) * max(v.element_size(), 4) for v in values)
    return {"exchanges": len(norms), "exchange_bytes": size}


def _crossings(gm: fx.GraphModule) -> tuple[Crossing, ...]:
    result = []
    for node in chain_nodes(gm):
        later = tuple(sorted({BLOCK[u] for u in node.users if BLOCK.on(u)} - {BLOCK[node]}))
        value = node.meta.get("val")
        if not later or not isinstance(value, Tensor):
            continue
        gradient = value.is_floating_point() or value.is_complex()
        if BATCH[node].kind == "rows":
            size = size_at(elements(value), 1) * value.element_size()
            result.append(Crossing(BLOCK[node], later, size, gradient))
        else:
            size = size_at(elements(value), 1) * value.element_size()
            result.append(Crossing(BLOCK[node], later, 0, gradient, whole_bytes=size))
    return tuple(result)


def _shared(gm: fx.GraphModule) -> tuple[Shared, ...]:
    result = []
    for node in gm.graph.nodes:
        if node.op == "placeholder" and ROLE[node].kind == "parameter" and ROLE[node].trainable:
            blocks = tuple(sorted({BLOCK[u] for u in node.users if BLOCK.on(u)}))
            if len(blocks) > 1:
                size = node.meta["val"].numel() * node.meta["val"].element_size()
                result.append(Shared(int(size), blocks))
    return tuple(result)


def cache_file(parts: Sequence[str]) -> Path:
    """Return where costs measured under these conditions are kept (`EFFTRA_FX_CACHE` or the user's cache folder)."""
    root = os.environ.get("EFFTRA_FX_CACHE")
    base = Path(root) if root else Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "efftra_fx"
    return base / f"costs-{digest(chr(10).join(parts))}.json"


def load_costs(path: Path) -> CostTable | None:
    """Read a cost table; None where there is none or it cannot be read, since it can be measured again."""
    try:
        return CostTable.from_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, CostError):
        return None


def save_costs(path: Path, table: CostTable) -> None:
    """Write a cost table at once, so that a reader never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(f".{os.getpid()}.tmp")
    fresh.write_text(table.to_json(), encoding="utf-8")
    fresh.replace(path)


def measure_nodes(
    gm: fx.GraphModule,
    tensors: dict[tuple[str, str], Tensor],
    inputs: dict[str, tuple[Tensor, int | None]],
    rows: int,
    *,
    device: str = "cpu",
    repeats: int = 3,
    progress: Progress | None = None,
) -> CostTable:
    """Return the measured cost of every node that belongs to a block, by node name; the blocks are left as they were.

    A node that gives several values is timed together with what takes them apart.
    """
    before = {node: BLOCK[node] for node in chain_nodes(gm)}
    names: list[str] = []
    try:
        for node in before:
            if node.target is operator.getitem and isinstance(source := node.args[0], fx.Node) and source in before:
                BLOCK[node] = BLOCK[source]
            else:
                BLOCK[node] = len(names)
                names.append(node.name)
        chain, _ = measure_chain(gm, tensors, inputs, rows, device=device, repeats=repeats, progress=progress)
    finally:
        for node, block in before.items():
            BLOCK[node] = block
    costs = tuple(replace(cost, name=name) for cost, name in zip(chain.blocks, names, strict=True))
    return CostTable(f"nodes, rows {sample_rows(rows)}", costs)
