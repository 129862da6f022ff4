"""The step time and the memory of one plan, by a small event calculation over its stages.

What is modelled: the rows that each pair of replicas exchanges; the busiest port of a
boundary (each device has a port at the rate inside its machine, each machine one
full-duplex port at the rate between machines); boundaries as first-in-first-out
channels, one each way, that overlap with computation; ring all-reduces that start
when a stage's gradients are ready and are serialised where they share a machine's
port; latency of every message. Programs are simulated elsewhere; this file prices
plans, thousands of them, before any program exists.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from efftra_fx.cluster import Cluster, Link
from efftra_fx.cost import Chain, Crossing, Option
from efftra_fx.errors import PlanError
from efftra_fx.plan import Plan, Stage

from .clock import ends
from .rules import DEFAULT_RULES, Rules


@dataclass(frozen=True)
class Reduce:
    """One ring all-reduce: when it may start, how long it takes, its stage, and the machines whose ports it uses."""

    ready_s: float
    takes_s: float
    stage: int
    machines: tuple[int, ...]


@dataclass(frozen=True)
class StageFigures:
    """What one micro-batch costs on a stage, and one step: seconds and bytes of its busiest device.

    `send_s` is the time of the boundary to the next stage, `return_s` that of its
    gradients; both 0 for the last stage.
    """

    forward_s: float
    backward_s: float
    send_s: float
    return_s: float
    reduce_s: float
    memory_bytes: float
    reduces: tuple[tuple[float, float], ...]  # (seconds before the end of the last backward, seconds it takes)
    machines: tuple[int, ...]  # more than one when the ring leaves a machine


@dataclass(frozen=True)
class Figures:
    """The priced plan: `step_s`, its parts and the figures of each stage."""

    step_s: float
    compute_end_s: float
    stages: tuple[StageFigures, ...]

    @property
    def memory_bytes(self) -> tuple[int, ...]:
        """Bytes on the fullest device of each stage, rounded up."""
        return tuple(int(-(-stage.memory_bytes // 1)) for stage in self.stages)


def share(rows: float, parts: int, whole: bool) -> float:
    """Rows of the largest of `parts` parts."""
    return float(-(-int(rows) // parts)) if whole else rows / parts


def largest_micro_batch(rows: int, micro_batches: int, whole: bool) -> float:
    """Rows of the largest micro-batch."""
    return share(rows, micro_batches, whole)


def evaluate(plan: Plan, chain: Chain, cluster: Cluster, rows: int, rules: Rules = DEFAULT_RULES) -> Figures:
    """Price a plan; raise PlanError when it is not one for this chain and this cluster."""
    check_fits(plan, chain, cluster)
    cluster = cluster.working(plan.devices)
    micro_batches = min(plan.micro_batches, rows)
    micro_rows = largest_micro_batch(rows, micro_batches, rules.whole_rows)
    stages = tuple(
        stage_figures(plan, index, chain, flow, cluster, micro_rows, rules)
        for index, flow in enumerate(flows(plan, chain, rules))
    )
    last = backward_ends(plan, stages, micro_batches)
    reduces = [
        Reduce(end - before, takes, index, stage.machines if len(stage.machines) > 1 else ())
        for index, (stage, end) in enumerate(zip(stages, last, strict=True))
        for before, takes in stage.reduces
    ]
    reduces += tied_reduces(plan, chain, cluster, last)
    compute_end = max(last)
    return Figures(max(compute_end, reduces_end(reduces)), compute_end, stages)


def check_fits(plan: Plan, chain: Chain, cluster: Cluster) -> None:
    """Raise PlanError when the plan names blocks or devices that are not there."""
    if plan.blocks != len(chain.blocks):
        raise PlanError(f"the plan has {plan.blocks} blocks, {chain.name} has {len(chain.blocks)}")
    if plan.devices[-1] >= len(cluster.devices):
        raise PlanError(f"the plan uses device {plan.devices[-1]}, the cluster has {len(cluster.devices)} devices")


def stage_options(stage: Stage, chain: Chain, cluster: Cluster) -> dict[str, tuple[Option, ...]]:
    """For each kind of device in the stage, the option of each block; raise PlanError when a block has none."""
    found = {}
    for kind in dict.fromkeys(cluster.devices[device].kind for device in stage.devices):
        options = []
        for block in stage.blocks:
            option = chain.blocks[block].option(stage.tensor, stage.recompute, kind)
            if option is None:
                raise PlanError(
                    f"block {chain.blocks[block].name} has no cost for tensor width {stage.tensor}"
                    f"{' with recompute' if stage.recompute else ''} on {kind}; choose another width"
                )
            options.append(option)
        found[kind] = tuple(options)
    return found


def stage_figures(
    plan: Plan, index: int, chain: Chain, flow: Flow, cluster: Cluster, micro_rows: float, rules: Rules
) -> StageFigures:
    """Price one stage of a plan."""
    stage = plan.stages[index]
    rows = share(micro_rows, stage.replicas, rules.whole_rows)
    options = stage_options(stage, chain, cluster)
    widest = tensor_link(stage, cluster)
    forward: float = 0.0
    backwards: list[float] = []
    for device in dict.fromkeys((cluster.devices[one].kind, cluster.devices[one].speed) for one in stage.devices):
        kind, speed = device
        times = [block_times(option, rows, speed, widest) for option in options[kind]]
        total = sum(time[0] for time in times)
        if total + sum(time[1] for time in times) >= forward + sum(backwards):
            forward, backwards = total, [time[1] for time in times]
    there, again = exchange_seconds(stage, chain, cluster)
    forward, backward = forward + there, sum(backwards) + again
    first = next(iter(options.values()))
    segments = reduce_segments(stage, cluster, [option.gradient_bytes for option in first])
    reduces = reduce_starts(backwards, segments, rules.overlap)
    send, back = boundary_times(plan, index, flow, cluster, micro_rows, rules)
    memory = stage_memory(plan, index, flow, max(options.values(), key=resident_bytes), rows, rules)
    machines = tuple(sorted({cluster.devices[device].machine for device in stage.devices}))
    return StageFigures(forward, backward, send, back, sum(segments), memory, reduces, machines)


def resident_bytes(options: tuple[Option, ...]) -> float:
    """Parameters of a stage, to tell which kind of device holds more."""
    return sum(option.parameter_bytes for option in options)


def block_times(option: Option, rows: float, speed: float, link: Link | None) -> tuple[float, float]:
    """Forward and backward seconds of one block, tensor collectives included."""
    scale = 1.0 if option.kind else speed
    forward, backward = option.forward.at(rows) / scale, option.backward.at(rows) / scale
    if link is None or option.tensor == 1 or rows <= 0:
        return forward, backward
    around = 2 * (option.tensor - 1)
    collective = around / option.tensor * option.reduce_bytes * rows / link.bandwidth_bytes_per_s
    collective += option.reduces * around * link.latency_s
    return forward + collective, backward + collective


def exchange_seconds(stage: Stage, chain: Chain, cluster: Cluster) -> tuple[float, float]:
    """Seconds in which replicas exchange batch statistics in one micro-batch, forward and backward.

    Forward, every replica's statistics go to all; backward, sums of as many numbers are added up.
    """
    count = sum(chain.blocks[block].exchanges for block in stage.blocks)
    if stage.replicas < 2 or not count:
        return 0.0, 0.0
    link, around = replica_link(stage, cluster), 2 * (stage.replicas - 1)
    moved = around * sum(chain.blocks[block].exchange_bytes for block in stage.blocks) / link.bandwidth_bytes_per_s
    late = count * around * link.latency_s
    return moved + late, moved / stage.replicas + late


def replica_link(stage: Stage, cluster: Cluster) -> Link:
    """The slowest link of the rings over the stage's replicas (two or more), one ring for each number in them."""
    rings = [ring_link(tuple(stage.devices[shard :: stage.tensor]), cluster) for shard in range(stage.tensor)]
    return min(rings, key=lambda one: one.bandwidth_bytes_per_s)


def tensor_link(stage: Stage, cluster: Cluster) -> Link | None:
    """The slowest link inside any tensor-parallel group of the stage; `None` for width 1."""
    if stage.tensor == 1:
        return None
    groups = [stage.devices[at : at + stage.tensor] for at in range(0, len(stage.devices), stage.tensor)]
    return min((ring_link(group, cluster) for group in groups), key=lambda link: link.bandwidth_bytes_per_s)


def ring_link(devices: tuple[int, ...], cluster: Cluster) -> Link:
    """The slowest link of a ring over these devices (two or more), machines kept together."""
    machines = sorted({cluster.devices[device].machine for device in devices})
    if len(machines) > 1:
        assert cluster.links.inter is not None
        return cluster.links.inter
    link = cluster.links.intra[machines[0]]
    assert link is not None
    return link


def ring_seconds(size_bytes: float, members: int, link: Link) -> float:
    """A ring all-reduce: 2(r-1)/r of the bytes through the slowest link, 2(r-1) messages after one another."""
    if members < 2 or size_bytes <= 0:
        return 0.0
    return 2 * (members - 1) * (size_bytes / members / link.bandwidth_bytes_per_s + link.latency_s)


def reduce_segments(stage: Stage, cluster: Cluster, gradient_bytes: list[float]) -> list[float]:
    """Seconds of the gradient all-reduce of each block; the ring's latency is paid once, with the last to go."""
    if stage.replicas < 2 or sum(gradient_bytes) <= 0:
        return [0.0] * len(gradient_bytes)
    link = replica_link(stage, cluster)
    free = Link(link.bandwidth_bytes_per_s)
    segments = [ring_seconds(size, stage.replicas, free) for size in gradient_bytes]
    last = next(index for index, size in enumerate(gradient_bytes) if size > 0)
    segments[last] += 2 * (stage.replicas - 1) * link.latency_s
    return segments


def reduce_starts(backwards: list[float], segments: list[float], overlap: bool) -> tuple[tuple[float, float], ...]:
    """The all-reduces of a stage: seconds before the end of its last backward, and seconds each takes."""
    if sum(segments) <= 0:
        return ()
    if not overlap:
        return ((0.0, sum(segments)),)
    left = 0.0
    found = []
    for backward, takes in zip(backwards, segments, strict=True):  # block order: the first block ends last
        if takes > 0:
            found.append((left, takes))
        left += backward
    return tuple(reversed(found))


@dataclass(frozen=True)
class Flow:
    """Bytes of one stage: a row, and whatever the rows. `next` go to the following stage, `back` return from it."""

    coming: tuple[float, float] = (0.0, 0.0)
    going: tuple[float, float] = (0.0, 0.0)
    next: tuple[float, float] = (0.0, 0.0)
    back: tuple[float, float] = (0.0, 0.0)


def flows(plan: Plan, chain: Chain, rules: Rules) -> tuple[Flow, ...]:
    """What crosses the boundaries of each stage; a value with several readers in a stage comes once."""
    depth = len(plan.stages)
    owner = [index for index, stage in enumerate(plan.stages) for _ in stage.blocks]
    sums = {name: [[0.0, 0.0] for _ in range(depth)] for name in ("coming", "going", "next", "back")}

    def add(name: str, stage: int, crossing: Crossing) -> None:
        sums[name][stage][0] += crossing.bytes_per_row
        sums[name][stage][1] += crossing.whole_bytes

    for crossing in chain.crossings:
        source = owner[crossing.producer_block]
        readers = {owner[block] for block in crossing.consumer_blocks} - {source}
        if not readers:
            continue
        last = max(readers)
        touched = range(source + 1, last + 1) if rules.forwarded_skips else sorted(readers)
        for stage in touched:
            add("coming", stage, crossing)
            if rules.forwarded_skips or stage == source + 1:
                add("next", stage - 1, crossing)
                if crossing.gradient:
                    add("back", stage - 1, crossing)
        for stage in range(source, last) if rules.forwarded_skips else (source,):
            add("going", stage, crossing)
    return tuple(
        Flow(*((row, fixed) for row, fixed in (sums[name][index] for name in ("coming", "going", "next", "back"))))
        for index in range(depth)
    )


def boundary_times(
    plan: Plan, index: int, flow: Flow, cluster: Cluster, micro_rows: float, rules: Rules
) -> tuple[float, float]:
    """Seconds of one micro-batch from stage `index` to the next, and of its gradients back."""
    if index + 1 == len(plan.stages):
        return 0.0, 0.0
    stage, following = plan.stages[index], plan.stages[index + 1]
    return (
        transfer_seconds(stage, following, cluster, micro_rows, *flow.next, rules.whole_rows),
        transfer_seconds(following, stage, cluster, micro_rows, *flow.back, rules.whole_rows),
    )


def row_overlaps(senders: int, receivers: int, rows: float, whole: bool) -> list[tuple[int, int, float]]:
    """(sending replica, receiving replica, rows) for each pair that has rows in common.

    >>> row_overlaps(1, 2, 5, whole=True)
    [(0, 0, 2.0), (0, 1, 3.0)]
    """

    def starts(parts: int) -> list[float]:
        if whole:
            return [float(part * int(rows) // parts) for part in range(parts + 1)]
        return [part * rows / parts for part in range(parts + 1)]

    first, second = starts(senders), starts(receivers)
    found = []
    left = right = 0
    while left < senders and right < receivers:
        common = min(first[left + 1], second[right + 1]) - max(first[left], second[right])
        if common > 1e-12 * rows:
            found.append((left, right, common))
        if first[left + 1] <= second[right + 1]:
            left += 1
        else:
            right += 1
    return found


def transfer_seconds(
    sender: Stage, receiver: Stage, cluster: Cluster, rows: float, row_bytes: float, whole_bytes: float, whole: bool
) -> float:
    """Seconds until the busiest port has carried one micro-batch from one stage to another."""
    if row_bytes <= 0 and whole_bytes <= 0:
        return 0.0
    loads, latency = port_loads(sender.devices, sender.tensor, receiver.devices, receiver.tensor, cluster, rows, whole)
    return latency + max((part * row_bytes + messages * whole_bytes) / rate for part, messages, rate in loads)


def port_loads(
    senders: tuple[int, ...],
    sender_width: int,
    receivers: tuple[int, ...],
    receiver_width: int,
    cluster: Cluster,
    rows: float,
    whole: bool,
) -> tuple[list[tuple[float, int, float]], float]:
    """Rows, messages and bytes a second of each port between two stages, for one micro-batch; the longest latency."""
    ports: dict[tuple[str, int], tuple[float, int]] = {}
    latency = 0.0
    for source, target, common in row_overlaps(
        len(senders) // sender_width, len(receivers) // receiver_width, rows, whole
    ):
        for shard in range(receiver_width):
            a = senders[source * sender_width + shard % sender_width]
            b = receivers[target * receiver_width + shard]
            latency = max(latency, cluster.link(a, b).latency_s)
            for port in port_pairs(a, b, cluster):
                part, messages = ports.get(port, (0.0, 0))
                ports[port] = part + common, messages + 1
    return [(part, messages, port_rate(port, cluster)) for port, (part, messages) in ports.items()], latency


def port_pairs(a: int, b: int, cluster: Cluster) -> list[tuple[str, int]]:
    """The ports that a message from a to b passes."""
    first, second = cluster.devices[a].machine, cluster.devices[b].machine
    if first == second:
        return [("out", a), ("in", b)]
    found = [("machine out", first), ("machine in", second)]
    if cluster.links.intra[first] is not None:
        found.append(("out", a))
    if cluster.links.intra[second] is not None:
        found.append(("in", b))
    return found


def port_rate(port: tuple[str, int], cluster: Cluster) -> float:
    """Bytes per second through a port."""
    name, index = port
    link = cluster.links.inter if name.startswith("machine") else cluster.links.intra[cluster.devices[index].machine]
    assert link is not None
    return link.bandwidth_bytes_per_s


def stage_memory(plan: Plan, index: int, flow: Flow, options: tuple[Option, ...], rows: float, rules: Rules) -> float:
    """Bytes on one device of a stage at the fullest moment of the step.

    Parameters, their gradients and optimizer state; what each micro-batch in flight
    keeps for its backward; the working space of one micro-batch; the boundary
    buffers: one micro-batch more coming in, one going out, each way.
    """
    stage = plan.stages[index]
    held = sum(option.parameter_bytes for option in options)
    held += (1 + rules.optimizer_bytes_per_parameter_byte) * sum(option.gradient_bytes for option in options)
    flying = plan.warm_up(index)
    activations = rows * (
        flying * sum(option.saved_bytes for option in options) + sum(option.working_bytes for option in options)
    )
    coming, going = (size * rows + fixed for size, fixed in (flow.coming, flow.going))
    buffers = 2 * (coming + going)
    if stage.recompute:
        buffers += flying * coming
    return held + activations + buffers


def backward_ends(plan: Plan, stages: tuple[StageFigures, ...], micro_batches: int) -> list[float]:
    """When the last backward of each stage ends."""
    forward, backward, there, back = (
        np.array([[getattr(stage, name) for stage in stages]])
        for name in ("forward_s", "backward_s", "send_s", "return_s")
    )
    line = forward, backward, there[:, :-1], back[:, :-1]
    found: list[float] = ends(line, micro_batches, plan.schedule, plan.in_flight)[0].tolist()
    return found


def tied_reduces(plan: Plan, chain: Chain, cluster: Cluster, last: list[float]) -> list[Reduce]:
    """One more all-reduce for the parameters that several stages hold, over all of their devices."""
    takes, first = 0.0, len(plan.stages)
    for shared in chain.shared:
        holders = [
            index for index, stage in enumerate(plan.stages) if any(block in stage.blocks for block in shared.blocks)
        ]
        if len(holders) > 1:
            members = sum(plan.stages[index].replicas for index in holders)
            takes += ring_seconds(shared.parameter_bytes, members, ring_link(plan.devices, cluster))
            first = min(first, holders[0])
    return [Reduce(last[first], takes, len(plan.stages), ())] if takes > 0 else []


def reduces_end(reduces: list[Reduce]) -> float:
    """When the last all-reduce ends; rings that leave their machines share the ports and wait for one another."""
    ports = shared_ports(reduces)
    free: dict[tuple[int, ...], float] = {}
    last = 0.0
    for reduce in sorted(reduces, key=lambda one: (one.ready_s, -one.stage)):
        used = ports[reduce.stage]
        end = max(reduce.ready_s, *(free.get(one, 0.0) for one in used)) + reduce.takes_s
        last = max(last, end)
        free.update((one, end) for one in used)
    return last


def shared_ports(reduces: list[Reduce]) -> dict[int, list[tuple[int, ...]]]:
    """For each stage what it must have to itself: the stage, and each set of stages whose rings share a machine."""
    users: dict[int, set[int]] = {}
    for stage, machines in {reduce.stage: reduce.machines for reduce in reduces}.items():
        for machine in machines:
            users.setdefault(machine, set()).add(stage)
    sets = sorted({tuple(sorted(stages)) for stages in users.values() if len(stages) > 1})
    stages = {reduce.stage for reduce in reduces}
    return {stage: [(stage,), *(one for one in sets if stage in one)] for stage in stages}
