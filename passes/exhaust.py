"""Every plan there is, where that can be afforded: the answer is then proven.

For each number of devices in use, each distinct order of devices (equal devices and
equal machines are not told apart), each way to cut the order into stages, each way to
cut the chain, each way to compute a stage, each number of micro-batches and each
schedule. Bounds discard most of it before it is replayed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np

from efftra_fx.cluster import Cluster

from .candidates import Search, Setting
from .placement import kind_of
from .pricing import Batch
from .table import Layout

MOST_PLANS = 40_000


def plans_to_try(search: Search, settings: list[Setting]) -> float:
    """An upper bound on how many plans `exhaust` would price."""
    devices, blocks, ways = len(search.cluster.devices), search.table.blocks, len(search.table.ways)
    if devices > 6 or blocks > 12:
        return math.inf
    inside = {search.cluster.links.intra[device.machine] for device in search.cluster.devices}
    if len(inside) > 1 and max(search.table.widths) > 1:  # collectives of groups on unlike links are estimated
        return math.inf
    micro = len({setting.micro_batches for setting in settings})
    total = 0
    for used in range(1, devices + 1):
        shapes = sum(
            math.comb(used - 1, stages - 1) * math.comb(blocks - 1, stages - 1) * ways**stages
            for stages in range(1, min(used, blocks) + 1)
        )
        total += shapes * sum(1 for _ in device_orders(search.cluster, used))
    return float(total * micro)


def exhaust(search: Search, settings: list[Setting]) -> None:
    """Offer every plan to the search."""
    devices = len(search.cluster.devices)
    by_micro: dict[int, list[Setting]] = {}
    for setting in settings:
        by_micro.setdefault(setting.micro_batches, []).append(setting)
    for used in range(devices, 0, -1):
        batch = every_shape(search, used)
        if batch is None:
            continue
        for order in device_orders(search.cluster, used):
            layout = Layout(search.cluster, "contiguous", (order,), search.table)
            for micro, group in by_micro.items():
                search.offer(layout, micro, tuple(group), batch)


def device_orders(cluster: Cluster, used: int) -> Iterator[tuple[int, ...]]:
    """Distinct orders of `used` devices; of equal devices of a machine, and of equal machines, the first goes first."""
    machines = sorted({device.machine for device in cluster.devices})
    members = {machine: [d for d, one in enumerate(cluster.devices) if one.machine == machine] for machine in machines}
    signature = {
        machine: (tuple(sorted(kind_of(cluster, device) for device in members[machine])), cluster.links.intra[machine])
        for machine in machines
    }
    sort = {machine: [one for one in machines if signature[one] == signature[machine]] for machine in machines}

    def extend(order: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if len(order) == used:
            yield order
            return
        touched = {cluster.devices[device].machine for device in order}
        for machine in machines:
            if machine not in touched and any(one < machine and one not in touched for one in sort[machine]):
                continue
            seen = set()
            for device in members[machine]:
                kind = kind_of(cluster, device)
                if device not in order and kind not in seen:
                    seen.add(kind)
                    yield from extend((*order, device))

    yield from extend(())


def every_shape(search: Search, used: int) -> Batch | None:
    """All cuts of the chain with all shares of `used` devices, padded to the deepest."""
    request, table = search.request, search.table
    depth = min(used, table.blocks)
    rows_cuts, rows_counts, rows_ways = [], [], []
    for stages in range(1, depth + 1):
        if request.stages is not None and stages != request.stages:
            continue
        counts = [
            tuple(np.diff((0, *inner, used)).tolist()) for inner in itertools.combinations(range(1, used), stages - 1)
        ]
        if request.replicas is not None:
            counts = [one for one in counts if len(one) == len(request.replicas)]
        cuts = [(0, *inner, table.blocks) for inner in itertools.combinations(range(1, table.blocks), stages - 1)]
        ways = list(itertools.product(range(len(table.ways)), repeat=stages))
        empty = (0,) * (depth - stages)
        for count, cut, way in itertools.product(counts, cuts, ways):
            if fits_widths(search, count, way):
                rows_cuts.append((*empty, *cut))
                rows_counts.append((*empty, *count))
                rows_ways.append((*empty, *way))
    if not rows_cuts:
        return None
    return Batch(
        np.array(rows_cuts), np.array(rows_counts), np.array(rows_ways), np.zeros(len(rows_cuts), dtype=np.int64)
    )


def fits_widths(search: Search, counts: tuple[int, ...], ways: tuple[int, ...]) -> bool:
    """Whether the devices of each stage make whole replicas, as many as asked for."""
    widths = [search.table.ways[way].tensor for way in ways]
    if any(count % width for count, width in zip(counts, widths, strict=True)):
        return False
    wanted = search.request.replicas
    return wanted is None or all(c // w == r for c, w, r in zip(counts, widths, wanted, strict=True))
