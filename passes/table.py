"""The chain and the cluster as arrays, so that thousands of plans can be priced at once.

A *layout* puts the devices in a line; a plan under a layout gives each stage a run of
consecutive positions. Contiguous, spread and repeated placements are layouts, and so
is any order of the devices:

    contiguous    machine 0 | machine 1        stages take runs of neighbours
    spread        one device of each machine in turn
    repeated      the line covers one of several equal groups; each group runs the
                  same pipeline on its share of the rows

Arrays have one entry a cut position (0 to the number of blocks), a block, or a device position.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from efftra_fx.cluster import Cluster
from efftra_fx.cost import Chain
from efftra_fx.errors import PlanError

from .rules import Rules

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class RangeMax:
    """The largest of any run of an array, for many runs at once (a sparse table: log n rows)."""

    def __init__(self, values: Floats) -> None:
        levels = [values]
        width = 1
        while 2 * width <= values.shape[-1]:
            last = levels[-1]
            levels.append(np.maximum(last[..., : last.shape[-1] - width], last[..., width:]))
            width *= 2
        self.levels = np.full((len(levels), *values.shape), -np.inf)
        for index, level in enumerate(levels):
            self.levels[index, ..., : level.shape[-1]] = level
        self.log = np.zeros(values.shape[-1] + 2, dtype=np.int64)
        for size in range(2, values.shape[-1] + 2):
            self.log[size] = self.log[size // 2] + 1

    def of(self, first: Ints, stop: Ints) -> Floats:
        """The largest value in [first, stop); each run holds at least one value."""
        level = self.log[stop - first]
        found: Floats = np.maximum(self.levels[level, first], self.levels[level, stop - (1 << level)])
        return found


@dataclass(frozen=True)
class Way:
    """A tensor width, and recompute or not."""

    tensor: int
    recompute: bool


class Table:
    """Prefix sums of everything that a stage adds up, by way and by class of device (kind, speed).

    Each array has shape (ways, classes, blocks + 1); `missing` counts blocks without an
    option. `least_fixed` and `least_row`, shape (blocks + 1,), are seconds forward and backward
    in the fastest way on the fastest class, those a row times the width. `cut_bytes` and
    `back_bytes` are bytes a row over each cut position.
    """

    def __init__(self, chain: Chain, cluster: Cluster, rules: Rules, tensor: int | None = None) -> None:
        self.chain, self.cluster, self.rules = chain, cluster, rules
        self.blocks = len(chain.blocks)
        self.classes = sorted({(device.kind, device.speed) for device in cluster.devices})
        keys = {(1, False)} | {(o.tensor, o.recompute) for block in chain.blocks for o in block.options}
        widest = len(cluster.devices)
        self.ways = [Way(*key) for key in sorted(keys) if tensor in (None, key[0]) and key[0] <= widest]
        if not self.ways:
            known = ", ".join(str(width) for width in sorted({key[0] for key in keys}))
            raise PlanError(f"tensor={tensor}: {chain.name} has costs for tensor width {known} only")
        self.fill()
        self.exchanges = prefix(np.array([float(block.exchanges) for block in chain.blocks]))
        self.exchange_bytes = prefix(np.array([float(block.exchange_bytes) for block in chain.blocks]))
        self.cut_bytes, self.cut_whole = self.carried(gradients=False)
        self.back_bytes, self.back_whole = self.carried(gradients=True)
        self.widths = np.array([way.tensor for way in self.ways])
        self.recompute = np.array([way.recompute for way in self.ways])

    def fill(self) -> None:
        """Prefix sums by way and class."""
        shape = (len(self.ways), len(self.classes), self.blocks)
        names = ("forward_fixed", "forward_row", "backward_fixed", "backward_row", "parameters", "gradients")
        columns = {name: np.zeros(shape) for name in (*names, "saved", "working", "reduces", "reduce_bytes", "missing")}
        for w, way in enumerate(self.ways):
            for c, (kind, speed) in enumerate(self.classes):
                for b, block in enumerate(self.chain.blocks):
                    option = block.option(way.tensor, way.recompute, kind)
                    if option is None:
                        columns["missing"][w, c, b] = 1
                        continue
                    scale = 1.0 if option.kind else speed
                    columns["forward_fixed"][w, c, b] = option.forward.fixed_s / scale
                    columns["forward_row"][w, c, b] = option.forward.per_row_s / scale
                    columns["backward_fixed"][w, c, b] = option.backward.fixed_s / scale
                    columns["backward_row"][w, c, b] = option.backward.per_row_s / scale
                    columns["parameters"][w, c, b] = option.parameter_bytes
                    columns["gradients"][w, c, b] = option.gradient_bytes
                    columns["saved"][w, c, b] = option.saved_bytes
                    columns["working"][w, c, b] = option.working_bytes
                    columns["reduces"][w, c, b] = option.reduces if way.tensor > 1 else 0
                    columns["reduce_bytes"][w, c, b] = option.reduce_bytes if way.tensor > 1 else 0
        self.block_gradients = columns["gradients"]
        sums = {name: prefix(column) for name, column in columns.items()}
        self.forward_fixed, self.forward_row = sums["forward_fixed"], sums["forward_row"]
        self.backward_fixed, self.backward_row = sums["backward_fixed"], sums["backward_row"]
        self.parameters, self.gradients = sums["parameters"], sums["gradients"]
        self.saved, self.working = sums["saved"], sums["working"]
        self.reduces, self.reduce_bytes = sums["reduces"], sums["reduce_bytes"]
        self.missing = sums["missing"]
        width = np.array([way.tensor for way in self.ways])[:, None, None]
        fixed = columns["forward_fixed"] + columns["backward_fixed"]
        row = width * (columns["forward_row"] + columns["backward_row"])
        known = columns["missing"] == 0
        least = [np.where(known, one, np.inf).min(axis=(0, 1)) for one in (fixed, row)]
        self.least_fixed, self.least_row = (prefix(np.where(np.isfinite(one), one, 0.0)) for one in least)

    def carried(self, gradients: bool) -> tuple[Floats, Floats]:
        """Bytes a row, and bytes whatever the rows, that pass each cut position; every value once."""
        rows, whole = np.zeros(self.blocks + 1), np.zeros(self.blocks + 1)
        for crossing in self.chain.crossings:
            if gradients and not crossing.gradient:
                continue
            first, last = crossing.producer_block + 1, max(crossing.consumer_blocks) + 1
            rows[first:last] += crossing.bytes_per_row
            whole[first:last] += crossing.whole_bytes
        return rows, whole

    @cached_property
    def near(self) -> tuple[Floats, Floats, Floats, Floats] | None:
        """Bytes from stage [a, b) to stage [b, c) and back, shape (n + 1,) * 3, where skips go straight.

        Two arrays a row and two whatever the rows.

        `None` when there are no skips, when they are forwarded, and for chains so long
        that the table is too large: what passes the cut is then taken, never less.
        """
        skips = any(max(c.consumer_blocks) > c.producer_block + 1 for c in self.chain.crossings)
        if self.rules.forwarded_skips or not skips or self.blocks > 24:
            return None
        size = self.blocks + 1
        there, back, whole, whole_back = (np.zeros((size,) * 3) for _ in range(4))
        for crossing in self.chain.crossings:
            for b in range(crossing.producer_block + 1, max(crossing.consumer_blocks) + 1):
                reached = min(block for block in crossing.consumer_blocks if block >= b)
                part = (slice(0, crossing.producer_block + 1), b, slice(reached + 1, size))
                there[part] += crossing.bytes_per_row
                whole[part] += crossing.whole_bytes
                back[part] += crossing.bytes_per_row if crossing.gradient else 0.0
                whole_back[part] += crossing.whole_bytes if crossing.gradient else 0.0
        return there, back, whole, whole_back

    @cached_property
    def buffers(self) -> tuple[tuple[Floats, Floats], tuple[Floats, Floats]] | None:
        """Bytes that come into and leave blocks [a, b), each a row and whatever the rows, where skips go straight."""
        skips = any(max(c.consumer_blocks) > c.producer_block + 1 for c in self.chain.crossings)
        if self.rules.forwarded_skips or not skips or self.blocks > 256:
            return None
        size = self.blocks + 1
        coming, going = np.zeros((2, size, size)), np.zeros((2, size, size))
        for crossing in self.chain.crossings:
            sizes = np.array([crossing.bytes_per_row, crossing.whole_bytes])
            producer, last = crossing.producer_block, max(crossing.consumer_blocks)
            for first in range(producer + 1, last + 1):
                reached = min(block for block in crossing.consumer_blocks if block >= first)
                coming[:, first, reached + 1 :] += sizes[:, None]
            going[:, : producer + 1, producer + 1 : last + 1] += sizes[:, None, None]
        return (coming[0], coming[1]), (going[0], going[1])


def prefix(column: Floats) -> Floats:
    """Sums of the first 0, 1, 2, … entries along the last axis."""
    return np.concatenate([np.zeros((*column.shape[:-1], 1)), np.cumsum(column, axis=-1)], axis=-1)


class Layout:
    """A line of device positions, `copies` times on equal groups of devices.

    `order[copy][position]` is a device. All copies look alike: same machines' shape,
    classes, memory.
    """

    def __init__(self, cluster: Cluster, label: str, order: tuple[tuple[int, ...], ...], table: Table) -> None:
        self.label, self.order = label, order
        self.copies, self.size = len(order), len(order[0])
        devices = [cluster.devices[device] for device in order[0]]
        names: dict[int, int] = {}
        self.machine = np.array([names.setdefault(device.machine, len(names)) for device in devices], dtype=np.int64)
        self.device_class = np.array([table.classes.index((d.kind, d.speed)) for d in devices], dtype=np.int64)
        limits = np.array([np.inf if d.memory_bytes is None else float(d.memory_bytes) for d in devices])
        self.limited = bool(np.isfinite(limits).any())
        self.least_memory = RangeMax(-limits)
        intra = [cluster.links.intra[device.machine] for device in devices]
        self.port_s = np.array([0.0 if link is None else 1.0 / link.bandwidth_bytes_per_s for link in intra])
        self.slowest_port = RangeMax(self.port_s)
        self.latency_s = np.array([0.0 if link is None else link.latency_s for link in intra])
        self.intra_latency_s = float(self.latency_s.max())
        inter = cluster.links.inter
        self.nic_s = 0.0 if inter is None else 1.0 / inter.bandwidth_bytes_per_s
        self.inter_latency_s = 0.0 if inter is None else inter.latency_s
        used = [{cluster.devices[device].machine for device in group} for group in order]
        self.copies_span = len(set().union(*used)) > len(used[0]) or any(group != used[0] for group in used)
        self.shared_groups = self.copies_span and self.copies > 1
        self.changes = np.concatenate([[0, 0], np.cumsum(self.machine[1:] != self.machine[:-1])]).astype(np.int64)
        self.starts = np.array([int(np.argmax(self.machine == one)) for one in range(len(names))], dtype=np.int64)
        self.in_line = bool((np.diff(self.machine) >= 0).all())
        self.masks = machine_masks(self.machine) if not self.in_line and len(names) <= 62 else None
        counts = [prefix((self.device_class == one).astype(float)) for one in range(len(table.classes))]
        self.class_counts = np.stack(counts)
        self.uniform = len(table.classes) == 1

    def meet(self, first: Ints, stop: Ints, other_first: Ints, other_stop: Ints) -> NDArray[np.bool_]:
        """Whether two runs of positions, one before the other, share a machine; unknown counts as yes."""
        if self.in_line:
            low = self.machine[np.minimum(other_first, self.size - 1)]
            return np.asarray(self.machine[np.maximum(stop - 1, 0)] >= low)
        if self.masks is None:
            return np.ones(first.shape, dtype=bool)
        return np.asarray(self.masks[first, stop] & self.masks[other_first, other_stop] != 0)

    def spans(self, first: Ints, count: Ints) -> NDArray[np.bool_]:
        """Whether the ring over all copies of a run of positions leaves a machine."""
        inside: NDArray[np.bool_] = self.changes[first + count] - self.changes[first + 1] > 0
        return inside | (self.copies > 1 and self.copies_span)

    def devices(self, first: int, count: int) -> tuple[int, ...]:
        """The devices of a stage on these positions, copy after copy."""
        return tuple(device for group in self.order for device in group[first : first + count])


def machine_masks(machine: Ints) -> Ints:
    """For each run [first, stop) of positions, the machines in it as bits."""
    size = len(machine)
    masks = np.zeros((size + 1, size + 1), dtype=np.int64)
    for first in range(size):
        for stop in range(first, size):
            masks[first, stop + 1] = masks[first, stop] | np.int64(1) << machine[stop]
    return masks
