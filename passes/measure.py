"""Time each block, forward and backward apart, at two micro-batch sizes, on the device that will run it.

Equal blocks (same operators, same shapes) are timed once. What was measured is kept on
disk as data, under a key of all that it depends on.
"""

from __future__ import annotations

import hashlib
import operator
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, fx

from efftra_fx.cost import Chain, CostTable, Crossing, Shared
from efftra_fx.errors import CostError
from efftra_fx.meta import BATCH, BLOCK, ROLE

from .block_graphs import BlockGraph, block_graphs
from .blocks import block_names, chain_nodes, size_at
from .shapes import elements
from .stage_code import Example, example_of, stage_code
from .synced import is_synced
from .time_blocks import Item, Progress, Timed, time_blocks


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
    counts = Counter(graph.key for graph in graphs)
    unique = {graph.key: graph for graph in reversed(graphs)}
    before = {key: known.find(digest(key)) if known is not None else None for key in counts}
    items = [
        Item(
            digest(key),
            unique[key],
            partial(_make, unique[key], example_of(unique[key].values, tensors, inputs), device),
            example_of(unique[key].values, tensors, inputs),
            count,
        )
        for key, count in counts.items()
        if before[key] is None
    ]
    timed = time_blocks(items, sizes, device, repeats, progress)
    found = {key: before[key] or timed[digest(key)] for key in counts}
    blocks = tuple(
        replace(found[graph.key], name=name, **_parameters(graph), **(_exchanges(graph) if synced else {}))
        for graph, name in zip(graphs, names, strict=True)
    )
    table = CostTable(f"rows {sizes}", tuple(replace(cost, name=digest(key)) for key, cost in found.items()))
    return Chain(blocks, _crossings(gm), _shared(gm)), table


def _make(graph: BlockGraph, example: Example, device: str, rows: int) -> Timed:
    return stage_code(graph.stage, graph.flags, example, device=device)(rows)


def digest(text: str) -> str:
    """Return a short name for a long key."""
    return hashlib.sha256(text.encode()).hexdigest()[:24]


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
