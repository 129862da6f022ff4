"""Read a published profile (schema `workload/1`) and fold its graph into a chain of blocks.

Published times are milliseconds and bytes at `profile_batch` samples; here they become
seconds and bytes per row. What the profiles get wrong is put right on the way: input
nodes cost nothing, in-place layers and views keep no second copy of what their
producer made, a value with several readers crosses a cut once.
"""

from __future__ import annotations

import gzip
import heapq
import math
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from efftra_fx.cost import Chain, Crossing, NodeCost, Option, Timing
from efftra_fx.errors import CostError
from efftra_fx.json_text import read_json

MOST_WIDE = 100_000  # ranks of a tensor-parallel group
MOST = 1e18  # bytes or milliseconds; more cannot be meant
IN_PLACE = re.compile(r"inplace|^__getitem__|^View\b|^Size\b|^Add\b|^Flatten\b|^Reshape\b|^Identity\b", re.IGNORECASE)


@dataclass(frozen=True)
class Node:
    """One node of a published graph, cost already per row."""

    id: int
    cost: NodeCost
    backward_pass: bool
    color: int | None


@dataclass(frozen=True)
class Workload:
    """A published profile: nodes, and edges with the bytes per row that each carries.

    `rows_per_profile` is the profile batch (1 when none is published: a row is then
    one profiled micro-batch).
    """

    name: str
    rows_per_profile: int
    nodes: tuple[Node, ...]
    edges: tuple[tuple[int, int, float], ...]
    micro_batches: int | None = None

    def chain(self) -> tuple[Chain, tuple[tuple[int, ...], ...]]:
        """The chain of blocks, and the ids of the nodes in each block."""
        return fold(self)


def load_workload(path: str | Path) -> Workload:
    """Read a profile, gzipped or not; raise CostError naming the file and the field or node."""
    try:
        raw = Path(path).read_bytes()
        text = (gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw).decode("utf-8")
        data = read_json(text)
    except (OSError, EOFError, ValueError, TypeError, zlib.error) as error:
        raise CostError(f"{path}: cannot read the profile: {error}") from error
    try:
        return read_workload(data)
    except CostError as error:
        raise CostError(f"{path}: {error}") from None


def read_workload(data: object) -> Workload:
    """Turn parsed JSON into a workload; raise CostError."""
    if not isinstance(data, Mapping) or data.get("schema") != "workload/1":
        raise CostError("schema must be 'workload/1'")
    batch = data.get("profile_batch")
    if batch is not None and (isinstance(batch, bool) or not isinstance(batch, int) or not 1 <= batch <= 1_000_000):
        raise CostError(f"profile_batch must be a whole number of 1 or more, or null, got {batch!r}")
    rows = batch or 1
    listed = data.get("nodes")
    if not isinstance(listed, list) or not listed:
        raise CostError("nodes must be a list of at least one node")
    columns = data.get("options_table_columns", [])
    nodes = tuple(read_graph_node(f"nodes[{index}]", one, rows, columns) for index, one in enumerate(listed))
    known: dict[int, Node] = {}
    for node in nodes:
        if node.id in known:
            raise CostError(f"node {node.id} is listed twice")
        known[node.id] = node
    edges = read_edges(data.get("edges"), known, rows)
    check_acyclic(known, edges)
    micro = data.get("microbatches_per_batch")
    if micro is not None and (isinstance(micro, bool) or not isinstance(micro, int) or not 1 <= micro <= 1_000_000):
        raise CostError(f"microbatches_per_batch must be a whole number of 1 or more, got {micro!r}")
    return Workload(str(data.get("name", "workload")), rows, nodes, edges, micro)


def amount(what: str, value: object) -> float:
    """A finite number of 0 or more, or CostError."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        raise CostError(f"{what} must be a number, got {value!r}")
    if value < 0:
        raise CostError(f"{what} must not be negative, got {value}")
    if value > MOST:
        raise CostError(f"{what} must be at most {MOST:g}, got more; check the unit")
    return float(value)


def needed(what: str, data: Mapping[str, Any], key: str) -> float:
    """The amount under a key that must be there."""
    if key not in data:
        raise CostError(f"{what}.{key} is missing")
    return amount(f"{what}.{key}", data[key])


def read_graph_node(what: str, data: object, rows: int, columns: object) -> Node:
    """One node of the file."""
    if not isinstance(data, Mapping):
        raise CostError(f"{what} must be an object, got {data!r}")
    identity = data.get("id")
    if isinstance(identity, bool) or not isinstance(identity, int):
        raise CostError(f"{what}.id must be a whole number, got {identity!r}")
    what = f"node {identity}"
    name = str(data.get("name", identity))
    forward, backward, output, parameters = (
        needed(what, data, key) for key in ("forward_ms", "backward_ms", "activation_bytes", "parameter_bytes")
    )
    if data.get("is_input"):
        forward = backward = 0.0
    saved = amount(f"{what}.stash_bytes", data["stash_bytes"]) if "stash_bytes" in data else output
    if data.get("is_input") or ("stash_bytes" not in data and IN_PLACE.search(name)):
        saved = 0.0
    footprint = amount(f"{what}.memory_bytes", data.get("memory_bytes", 0))
    if footprint and not parameters and "stash_bytes" not in data:
        saved = max(saved, footprint)
    cost = NodeCost(
        name,
        per_row(forward, rows),
        per_row(backward, rows),
        parameters,
        parameters,
        output / rows,
        saved / rows,
        read_options(what, data, rows) + read_table(what, data, columns),
    )
    color = data.get("color")
    return Node(identity, cost, data.get("pass") == "backward", color if isinstance(color, int) else None)


def per_row(milliseconds: float, rows: int) -> Timing:
    """A time that is linear in rows."""
    return Timing(0.0, milliseconds * 1e-3 / rows)


def read_options(what: str, data: Mapping[str, Any], rows: int) -> tuple[Option, ...]:
    """Tensor widths and recompute, as published for Piper: forward and backward as one third and two thirds."""
    listed = data.get("options", [])
    if not isinstance(listed, list):
        raise CostError(f"{what}.options must be a list, got {listed!r}")
    found: dict[tuple[int, bool], Option] = {}
    for index, one in enumerate(listed):
        inner = f"{what}.options[{index}]"
        if not isinstance(one, Mapping):
            raise CostError(f"{inner} must be an object, got {one!r}")
        width = needed(inner, one, "tp")
        if not 1 <= width <= MOST_WIDE or width != int(width):
            raise CostError(f"{inner}.tp must be a whole number from 1 to {MOST_WIDE}, got {one['tp']!r}")
        time = needed(inner, one, "fwbw_ms")
        parameters = needed(inner, one, "parameter_bytes")
        fixed = amount(f"{inner}.memory_fixed_bytes", one.get("memory_fixed_bytes", 0))
        sync = [amount(f"{inner}.{key}", one.get(key, 0)) for key in ("sync_forward_bytes", "sync_backward_bytes")]
        recompute = one.get("kind") == "recompute"
        found.setdefault(
            (int(width), recompute),
            Option(
                per_row(time / 3, rows),
                per_row(time - time / 3, rows),
                parameters,
                parameters,
                amount(f"{inner}.memory_per_inflight_bytes", one.get("memory_per_inflight_bytes", 0)) / rows,
                max(0.0, fixed - 2 * parameters) / rows,
                int(width),
                recompute,
                reduces=1 if width > 1 and math.fsum(sync) > 0 else 0,
                reduce_bytes=math.fsum(sync) / 2 / rows if width > 1 else 0.0,
            ),
        )
    return tuple(found.values())


def read_table(what: str, data: Mapping[str, Any], columns: object) -> tuple[Option, ...]:
    """Measured times by kind of device, tensor width and micro-batch; a straight line through each."""
    table = data.get("options_table", [])
    if not table:
        return ()
    if not isinstance(table, list):
        raise CostError(f"{what}.options_table must be a list, got {table!r}")
    wanted = ["device", "tp", "microbatch", "forward_ms", "backward_ms"]
    if not isinstance(columns, list) or columns[:5] != wanted:
        raise CostError(f"options_table_columns must begin with {wanted}, got {columns!r}")
    points: dict[tuple[str, int], list[tuple[float, float, float]]] = {}
    for index, row in enumerate(table):
        inner = f"{what}.options_table[{index}]"
        if not isinstance(row, list) or len(row) < 5 or not isinstance(row[0], str):
            raise CostError(f"{inner} must be a row of {len(columns)} values, got {row!r}")
        width, micro, forward, backward = (amount(inner, value) for value in row[1:5])
        if not (1 <= width <= MOST_WIDE and width == int(width)) or micro < 1:
            raise CostError(
                f"{inner}: tp must be a whole number from 1 to {MOST_WIDE}, microbatch 1 or more, got {row!r}"
            )
        points.setdefault((row[0], int(width)), []).append((micro, forward, backward))
    info = data.get("tp_info", {})
    if not isinstance(info, Mapping) or not all(
        isinstance(key, str) and key.isdecimal() and 1 <= int(key) <= MOST_WIDE for key in info
    ):
        raise CostError(f"{what}.tp_info must be an object with tensor widths as keys, got {info!r}")
    options = []
    for (kind, width), measured in sorted(points.items()):
        shard = info.get(str(width)) or info.get(max(info, key=int)) if info else None
        part = shard if isinstance(shard, Mapping) else {}
        narrower = max([int(key) for key in info if int(key) <= width], default=width) / width if info else 1.0
        parameters = amount(f"{what}.tp_info", part.get("params_bytes", data["parameter_bytes"])) * narrower
        saved = amount(f"{what}.tp_info", part.get("act_mem_bytes", data.get("stash_bytes", 0)))
        forward_line = line([(x, y) for x, y, _ in measured])
        backward_line = line([(x, z) for x, _, z in measured])
        options.append(Option(forward_line, backward_line, parameters, parameters, saved, 0, width, False, kind))
    return tuple(options)


def line(points: list[tuple[float, float]]) -> Timing:
    """Least squares through (rows, milliseconds), neither part negative."""
    xs, ys = [x for x, _ in points], [y for _, y in points]
    if len(set(xs)) < 2:
        return Timing(0.0, sum(ys) / sum(xs) * 1e-3)
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x in xs)
    slope = max(slope, 0.0)
    fixed = mean_y - slope * mean_x
    if fixed < 0:
        return Timing(0.0, sum(x * y for x, y in points) / sum(x * x for x in xs) * 1e-3)
    return Timing(fixed * 1e-3, slope * 1e-3)


def read_edges(listed: object, known: Mapping[int, Node], rows: int) -> tuple[tuple[int, int, float], ...]:
    """Edges with bytes per row; an edge without a size carries its producer's output."""
    if not isinstance(listed, list):
        raise CostError(f"edges must be a list, got {type(listed).__name__}")
    found = []
    for index, edge in enumerate(listed):
        if not isinstance(edge, list) or len(edge) not in (2, 3):
            raise CostError(f"edges[{index}] must be [source, target] or [source, target, bytes], got {edge!r}")
        for end in edge[:2]:
            if isinstance(end, bool) or not isinstance(end, int) or end not in known:
                raise CostError(f"edges[{index}] names node {end!r}, which is not among the nodes")
        if edge[0] == edge[1]:
            raise CostError(f"edges[{index}]: node {edge[0]} is its own input: a cycle")
        size = amount(f"edges[{index}]", edge[2]) / rows if len(edge) == 3 else known[edge[0]].cost.output_bytes
        found.append((edge[0], edge[1], size))
    return tuple(found)


def check_acyclic(known: Mapping[int, Node], edges: tuple[tuple[int, int, float], ...]) -> None:
    """Raise CostError naming a node of a cycle."""
    order = topological(list(known), [(a, b) for a, b, _ in edges], lambda node, _: (node,))
    left = sorted(set(known) - set(order))
    if left:
        raise CostError(f"the graph has a cycle through or before node {left[0]} ({known[left[0]].cost.name})")


def topological(
    nodes: list[int], edges: list[tuple[int, int]], key: Callable[[int, int], tuple[float, ...]]
) -> list[int]:
    """A topological order; of the nodes that are ready, the one with the least key goes first.

    `key(node, step)` is asked when the node becomes ready. Nodes on a cycle are left out.
    """
    after: dict[int, list[int]] = {node: [] for node in nodes}
    waits = dict.fromkeys(nodes, 0)
    for source, target in dict.fromkeys(edges):
        after[source].append(target)
        waits[target] += 1
    heap = [(key(node, 0), node) for node in nodes if waits[node] == 0]
    heapq.heapify(heap)
    order: list[int] = []
    while heap:
        _, node = heapq.heappop(heap)
        order.append(node)
        for target in after[node]:
            waits[target] -= 1
            if waits[target] == 0:
                heapq.heappush(heap, (key(target, len(order)), target))
    return order


def fold(workload: Workload) -> tuple[Chain, tuple[tuple[int, ...], ...]]:
    """Join the nodes that must stay together, put the rest in a line, and name what crosses."""
    group = groups(workload)
    members: dict[int, list[Node]] = {}
    for node in workload.nodes:
        members.setdefault(group[node.id], []).append(node)
    direction = forward_edges(workload)
    edges = sorted({(group[a], group[b]) for a, b, _ in direction if group[a] != group[b]})
    values: dict[tuple[int, float], set[int]] = {}
    for source, target, size in direction:
        if group[source] != group[target] and size > 0:
            values.setdefault((source, size), set()).add(group[target])
    order = best_order(sorted(members), edges, {(group[s], s, z): t for (s, z), t in values.items()})
    place = {one: index for index, one in enumerate(order)}
    blocks = tuple(join([node.cost for node in members[one]]) for one in order)
    crossings = tuple(
        Crossing(place[group[source]], tuple(sorted(place[target] for target in targets)), size)
        for (source, size), targets in sorted(values.items(), key=lambda item: (place[group[item[0][0]]], item[0]))
    )
    ids = tuple(tuple(node.id for node in members[one]) for one in order)
    return Chain(blocks, crossings, name=workload.name), ids


def forward_edges(workload: Workload) -> list[tuple[int, int, float]]:
    """The edges along the forward direction; gradients flow back along the same ones."""
    node = {one.id: one for one in workload.nodes}
    colors = {one.color for one in workload.nodes if one.color is not None and not one.backward_pass}
    found = []
    for source, target, size in workload.edges:
        mated = [node[end].backward_pass and node[end].color in colors for end in (source, target)]
        if not any(mated) and (not node[source].backward_pass or node[target].backward_pass):
            found.append((source, target, size))
    return found


def groups(workload: Workload) -> dict[int, int]:
    """For each node the least id of its group: same color, and whatever a cycle between groups ties together."""
    first: dict[int, int] = {}
    group: dict[int, int] = {}
    for node in sorted(workload.nodes, key=lambda one: one.id):
        group[node.id] = node.id if node.color is None else first.setdefault(node.color, node.id)
    direction = forward_edges(workload)
    names = sorted(set(group.values()))
    while True:
        edges = [(group[a], group[b]) for a, b, _ in direction if group[a] != group[b]]
        order = topological(names, edges, lambda node, _: (node,))
        left = set(names) - set(order)
        if not left:
            return group
        cycle = one_cycle(left, edges)
        target = min(cycle)
        group = {node: target if name in cycle else name for node, name in group.items()}
        names = sorted(set(group.values()))


def one_cycle(left: set[int], edges: list[tuple[int, int]]) -> set[int]:
    """The groups of one cycle among those that a topological order left out."""
    before: dict[int, list[int]] = {}
    for source, target in edges:
        if source in left and target in left:
            before.setdefault(target, []).append(source)
    path = [min(node for node in left if node in before)]
    while True:
        following = min(before[path[-1]])
        if following in path:
            return set(path[path.index(following) :])
        path.append(following)


def best_order(
    nodes: list[int], edges: list[tuple[int, int]], values: Mapping[tuple[int, int, float], set[int]]
) -> list[int]:
    """Of three topological orders the one over whose cuts the fewest bytes pass in sum; ties go to the first."""
    candidates = [
        topological(nodes, edges, lambda node, _: (node,)),
        topological(nodes, edges, lambda node, step: (-step, node)),
        topological(nodes, edges, lambda node, step: (step, node)),
    ]

    def passing(order: list[int]) -> float:
        place = {one: index for index, one in enumerate(order)}
        return math.fsum(
            size * (max(place[target] for target in targets) - place[source])
            for (source, _, size), targets in values.items()
        )

    return min(candidates, key=passing)


def join(costs: list[NodeCost]) -> NodeCost:
    """The cost of several nodes as one block; options that all of them have are added up."""
    if len(costs) == 1:
        return costs[0]
    total = costs[0]
    for cost in costs[1:]:
        total = NodeCost(
            total.name,
            total.forward + cost.forward,
            total.backward + cost.backward,
            total.parameter_bytes + cost.parameter_bytes,
            total.gradient_bytes + cost.gradient_bytes,
            total.output_bytes + cost.output_bytes,
            total.saved_bytes + cost.saved_bytes,
        )
    return total
