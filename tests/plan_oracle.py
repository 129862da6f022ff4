"""A second, plain way to price a plan and to try every plan there is, written apart from the planner.

One event at a time, one message at a time, plain loops; nothing is shared with `passes`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from efftra_fx.cluster import Cluster
from efftra_fx.cost import Chain
from efftra_fx.plan import Plan, Stage


def part_of(rows: float, parts: int, index: int, whole: bool) -> tuple[float, float]:
    """First and last row of one part."""
    if whole:
        return float(index * int(rows) // parts), float((index + 1) * int(rows) // parts)
    return index * rows / parts, (index + 1) * rows / parts


def micro_rows(plan: Plan, rows: int, whole: bool) -> float:
    """Rows of the largest micro-batch."""
    return float(math.ceil(rows / plan.micro_batches)) if whole else rows / plan.micro_batches


def compute(stage: Stage, chain: Chain, cluster: Cluster, rows: float) -> tuple[float, list[float]]:
    """Forward seconds of the slowest device and its backward seconds block by block."""
    worst: tuple[float, float, list[float]] | None = None
    for device in stage.devices:
        one = cluster.devices[device]
        forward, backward = 0.0, []
        for index in stage.blocks:
            option = chain.blocks[index].option(stage.tensor, stage.recompute, one.kind)
            assert option is not None
            forward += option.forward.at(rows) / one.speed
            backward.append(option.backward.at(rows) / one.speed)
        total = forward + sum(backward)
        if worst is None or total > worst[0]:
            worst = total, forward, backward
    assert worst is not None
    return worst[1], worst[2]


def message(a: Stage, b: Stage, cluster: Cluster, rows: float, row_bytes: float, whole: bool) -> float:
    """Seconds of one micro-batch between two stages: the busiest port, one pair of replicas at a time."""
    if row_bytes <= 0:
        return 0.0
    used: dict[tuple[str, int], float] = {}
    latency = 0.0
    for p, sender in enumerate(a.devices):
        for q, receiver in enumerate(b.devices):
            left, right = part_of(rows, a.replicas, p, whole), part_of(rows, b.replicas, q, whole)
            common = min(left[1], right[1]) - max(left[0], right[0])
            if common <= 1e-12 * rows:
                continue
            size = common * row_bytes
            m, n = cluster.devices[sender].machine, cluster.devices[receiver].machine
            latency = max(latency, cluster.link(sender, receiver).latency_s)
            ends = [("device out", sender, m), ("device in", receiver, n)]
            for name, device, machine in ends:
                link = cluster.links.intra[machine]
                if link is not None:
                    key = (name, device)
                    used[key] = used.get(key, 0.0) + size / link.bandwidth_bytes_per_s
            if m != n:
                assert cluster.links.inter is not None
                for key in (("machine out", m), ("machine in", n)):
                    used[key] = used.get(key, 0.0) + size / cluster.links.inter.bandwidth_bytes_per_s
    return latency + max(used.values())


def crossing_bytes(plan: Plan, chain: Chain, index: int, forwarded: bool, back: bool) -> float:
    """Bytes a row from stage `index` to the next, or back."""
    here, following = plan.stages[index], plan.stages[index + 1]
    total = 0.0
    for crossing in chain.crossings:
        if back and not crossing.gradient:
            continue
        if forwarded:
            crosses = crossing.producer_block < here.stop_block and max(crossing.consumer_blocks) >= here.stop_block
        else:
            crosses = crossing.producer_block in here.blocks and any(
                reader in following.blocks for reader in crossing.consumer_blocks
            )
        total += crossing.bytes_per_row if crosses else 0.0
    return total


def last_backwards(plan: Plan, times: list[tuple[float, float]], there: list[float], back: list[float]) -> list[float]:
    """One event at a time: the earliest thing that can start does."""
    depth, m = len(plan.stages), plan.micro_batches
    orders: list[list[tuple[str, int]]] = []
    for index in range(depth):
        ahead = plan.warm_up(index)
        order = [("F", i) for i in range(ahead)]
        for i in range(m):
            order.append(("B", i))
            if i + ahead < m:
                order.append(("F", i + ahead))
        orders.append(order)
    come = {(0, i): 0.0 for i in range(m)}
    home: dict[tuple[int, int], float] = {}
    free, out, ret, at = [0.0] * depth, [0.0] * depth, [0.0] * depth, [0] * depth
    while any(at[index] < len(orders[index]) for index in range(depth)):
        for index in range(depth):
            if at[index] == len(orders[index]):
                continue
            what, i = orders[index][at[index]]
            ready = come.get((index, i)) if what == "F" else home.get((index, i))
            if ready is None:
                continue
            free[index] = max(free[index], ready) + times[index][0 if what == "F" else 1]
            at[index] += 1
            if what == "F" and index + 1 < depth:
                out[index] = max(out[index], free[index]) + there[index]
                come[index + 1, i] = out[index]
            elif what == "F":
                home[index, i] = free[index]
            elif index > 0:
                ret[index] = max(ret[index], free[index]) + back[index - 1]
                home[index - 1, i] = ret[index]
    return free


def exchange(stage: Stage, chain: Chain, cluster: Cluster) -> tuple[float, float]:
    """Seconds of the replicas' exchanges in one micro-batch, one message of a ring after another."""
    machines = {cluster.devices[device].machine for device in stage.devices}
    link = cluster.links.inter if len(machines) > 1 else cluster.links.intra[min(machines)]
    forward = backward = 0.0
    for index in stage.blocks:
        block = chain.blocks[index]
        for _ in range(block.exchanges if stage.replicas > 1 else 0):
            assert link is not None
            size = block.exchange_bytes / block.exchanges
            for _ in range(2 * (stage.replicas - 1)):
                forward += link.latency_s + size / link.bandwidth_bytes_per_s
                backward += link.latency_s + size / stage.replicas / link.bandwidth_bytes_per_s
    return forward, backward


def step_seconds(
    plan: Plan, chain: Chain, cluster: Cluster, rows: int, overlap: bool, whole: bool, forwarded: bool
) -> float:
    """The price of a plan (tensor width 1, nothing shared)."""
    size = micro_rows(plan, rows, whole)
    costs = []
    for stage in plan.stages:
        share = math.ceil(size / stage.replicas) if whole else size / stage.replicas
        costs.append(compute(stage, chain, cluster, share))
    there, back = [], []
    for index in range(len(plan.stages) - 1):
        a, b = plan.stages[index], plan.stages[index + 1]
        there.append(message(a, b, cluster, size, crossing_bytes(plan, chain, index, forwarded, False), whole))
        back.append(message(b, a, cluster, size, crossing_bytes(plan, chain, index, forwarded, True), whole))
    met = [exchange(stage, chain, cluster) for stage in plan.stages]
    times = [(f + more, sum(b) + again) for (f, b), (more, again) in zip(costs, met, strict=True)]
    ends = last_backwards(plan, times, there, back)
    jobs = []
    for index, stage in enumerate(plan.stages):
        members = stage.replicas
        machines = sorted({cluster.devices[device].machine for device in stage.devices})
        link = cluster.links.inter if len(machines) > 1 else cluster.links.intra[machines[0]]
        weights = [chain.blocks[block].gradient_bytes for block in stage.blocks]
        if members < 2 or sum(weights) == 0:
            continue
        assert link is not None
        seconds = [2 * (members - 1) / members * weight / link.bandwidth_bytes_per_s for weight in weights]
        seconds[next(at for at, weight in enumerate(weights) if weight)] += 2 * (members - 1) * link.latency_s
        ports = [f"stage {index}"] + ([f"machine {one}" for one in machines] if len(machines) > 1 else [])
        if not overlap:
            jobs.append((ends[index], -index, 0, sum(seconds), ports))
            continue
        for block in range(len(weights)):
            left = sum(costs[index][1][:block])
            if seconds[block] > 0:
                jobs.append((ends[index] - left, -index, -block, seconds[block], ports))
    clock: dict[str, float] = {}
    finish = max(ends)
    for ready, _, _, takes, ports in sorted(jobs):
        end = max([ready, *(clock.get(port, 0.0) for port in ports)]) + takes
        finish = max(finish, end)
        clock.update(dict.fromkeys(ports, end))
    return finish


def fits(plan: Plan, chain: Chain, cluster: Cluster, rows: int, whole: bool, forwarded: bool, optimizer: float) -> bool:
    """Whether every device holds its stage at the fullest moment."""
    size = micro_rows(plan, rows, whole)
    for index, stage in enumerate(plan.stages):
        share = math.ceil(size / stage.replicas) if whole else size / stage.replicas
        flying = plan.warm_up(index)
        coming = going = 0.0
        for crossing in chain.crossings:
            before, after = (
                crossing.producer_block < stage.first_block,
                max(crossing.consumer_blocks) >= stage.stop_block,
            )
            reads = any(block in stage.blocks for block in crossing.consumer_blocks)
            makes = crossing.producer_block in stage.blocks
            coming += crossing.bytes_per_row if before and (reads or (forwarded and after)) else 0.0
            going += crossing.bytes_per_row if after and (makes or (forwarded and before)) else 0.0
        needed = share * 2 * (coming + going) + (share * flying * coming if stage.recompute else 0.0)
        for block in stage.blocks:
            option = chain.blocks[block].option(1, stage.recompute, "")
            assert option is not None
            needed += option.parameter_bytes + (1 + optimizer) * option.gradient_bytes
            needed += share * (flying * option.saved_bytes + option.working_bytes)
        for device in stage.devices:
            limit = cluster.devices[device].memory_bytes
            if limit is not None and needed > limit:
                return False
    return True


def every_plan(blocks: int, cluster: Cluster, rows: int, recompute: bool = False) -> Iterator[Plan]:
    """All cuts, all assignments of devices (in any order within a stage), micro-batches and schedules.

    Of device orders that read the same (machine, kind, speed, memory) only the first is tried.
    """
    devices = len(cluster.devices)
    for depth in range(1, min(blocks, devices) + 1):
        for inner in itertools.combinations(range(1, blocks), depth - 1):
            cuts = (0, *inner, blocks)
            for used in range(depth, devices + 1):
                for order in distinct_orders(cluster, used):
                    for ends in itertools.combinations(range(1, used), depth - 1):
                        starts = (0, *ends, used)
                        for ways in itertools.product((False, True) if recompute else (False,), repeat=depth):
                            stages = tuple(
                                Stage(cuts[s], cuts[s + 1], order[starts[s] : starts[s + 1]], 1, ways[s])
                                for s in range(depth)
                            )
                            for m in range(1, rows + 1):
                                for schedule, deep in (("1f1b", 1), ("1f1b", 2), ("gpipe", 1)):
                                    yield Plan(stages, m, schedule, deep)


def distinct_orders(cluster: Cluster, used: int) -> list[tuple[int, ...]]:
    """Orders of so many devices, one for each sequence of equal-looking devices."""
    seen: dict[tuple[object, ...], tuple[int, ...]] = {}
    for order in itertools.permutations(range(len(cluster.devices)), used):
        seen.setdefault(tuple(cluster.devices[device] for device in order), order)
    return list(seen.values())
