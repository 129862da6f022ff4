"""The lines of device positions that the searches lay stages on.

Kinds of device are tried in every order (up to four kinds; beyond that, by speed both
ways), each kind alone too; machines are kept together. The order of the file plays no part.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import permutations

from efftra_fx.cluster import Cluster

from .table import Layout, Table

Group = tuple[int, ...]
Signature = tuple[tuple[str, float, int], ...]
MOST_KINDS = 4
MOST_SPREAD = 64  # devices up to which stages are also spread over machines


def layouts(cluster: Cluster, table: Table) -> list[Layout]:
    """Contiguous, repeated and spread placements, without doubles."""
    found: dict[tuple[Group, ...], Layout] = {}
    for label, order in lines(cluster):
        if order not in found:
            found[order] = Layout(cluster, label, order, table)
    return list(found.values())


def lines(cluster: Cluster) -> Iterator[tuple[str, tuple[Group, ...]]]:
    """(label, order by copy) of every placement, the plainest first."""
    everything = tuple(range(len(cluster.devices)))
    for subset in [everything, *by_kind(cluster, everything)]:
        for line in orders(cluster, subset):
            yield "contiguous", (line,)
        for groups in repeated(cluster, subset):
            yield "repeated", groups
    machines = by_machine(cluster, everything)
    if 1 < len(machines) < len(everything) <= MOST_SPREAD:
        yield "spread", (tuple(spread(machines)),)


def kind_of(cluster: Cluster, device: int) -> tuple[str, float, int]:
    """What makes two devices alike."""
    one = cluster.devices[device]
    return one.kind, one.speed, -1 if one.memory_bytes is None else one.memory_bytes


def by_kind(cluster: Cluster, devices: Group) -> list[Group]:
    """The devices of each kind alone, when there are several."""
    kinds: dict[tuple[str, float, int], list[int]] = {}
    for device in devices:
        kinds.setdefault(kind_of(cluster, device), []).append(device)
    return [tuple(kinds[kind]) for kind in sorted(kinds)] if len(kinds) > 1 else []


def by_machine(cluster: Cluster, devices: Group) -> list[Group]:
    """The devices of each machine, machines in order."""
    machines: dict[int, list[int]] = {}
    for device in devices:
        machines.setdefault(cluster.devices[device].machine, []).append(device)
    return [tuple(machines[machine]) for machine in sorted(machines)]


def orders(cluster: Cluster, devices: Group) -> Iterator[Group]:
    """The devices in line, machine by machine, for each order of the kinds."""
    kinds = sorted({kind_of(cluster, device) for device in devices})
    if len(kinds) <= MOST_KINDS:
        ranks = [dict(zip(one, range(len(one)), strict=True)) for one in permutations(kinds)]
    else:
        speeds = sorted(kinds, key=lambda kind: (kind[1], kind))
        ranks = [{kind: index for index, kind in enumerate(one)} for one in (speeds, speeds[::-1])]
    for rank in ranks:
        sorted_machines = []
        for machine in by_machine(cluster, devices):
            inside = sorted(machine, key=lambda device: (rank[kind_of(cluster, device)], device))
            first = sum(rank[kind_of(cluster, device)] for device in inside) / len(inside)
            sorted_machines.append((first, inside[0], inside))
        yield tuple(device for _, _, machine in sorted(sorted_machines) for device in machine)


def repeated(cluster: Cluster, devices: Group) -> Iterator[tuple[Group, ...]]:
    """Equal groups of devices: whole machines of each sort, then equal parts of every machine."""
    sorts: dict[Signature, list[Group]] = {}
    for machine in by_machine(cluster, devices):
        signature = tuple(sorted(kind_of(cluster, device) for device in machine))
        sorts.setdefault(signature, []).append(machine)
    common = math.gcd(*(len(machines) for machines in sorts.values()))
    for copies in divisors(common)[1:]:
        yield tuple(
            tuple(
                device
                for signature in sorted(sorts)
                for machine in share_of(sorts[signature], copy, copies)
                for device in sorted(machine, key=lambda device: (kind_of(cluster, device), device))
            )
            for copy in range(copies)
        )
    if len(sorts) == 1 and len(by_kind(cluster, devices)) == 0:
        machines = next(iter(sorts.values()))
        for parts in divisors(len(machines[0]))[1:]:
            size = len(machines[0]) // parts
            yield tuple(machine[part * size : (part + 1) * size] for machine in machines for part in range(parts))


def share_of(machines: list[Group], copy: int, copies: int) -> list[Group]:
    """The machines of one copy."""
    size = len(machines) // copies
    return machines[copy * size : (copy + 1) * size]


def divisors(number: int) -> list[int]:
    """All divisors, 1 first."""
    return [one for one in range(1, number + 1) if number % one == 0]


def spread(machines: list[Group]) -> Iterator[int]:
    """One device of each machine in turn."""
    for index in range(max(len(machine) for machine in machines)):
        for machine in machines:
            if index < len(machine):
                yield machine[index]
