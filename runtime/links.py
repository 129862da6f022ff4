"""Measure the links between launched ranks with the transport that will carry the messages."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from efftra_fx.cluster import Cluster, Device, Link, Links

from .transport import Data, Transport

SMALL_BYTES = 64
ROUND_TRIPS = 30
SIZES_BYTES = (1 << 20, 8 << 20)  # the second only where the first is quick
QUICK_S = 0.02
LARGE_TRIPS = 5
PROBE_TAG = 1


@dataclass(frozen=True)
class Measured:
    """Links by machine, where it has several ranks, and the one between machines, if there are several."""

    intra: dict[int, Link]
    inter: Link | None


def measure(transport: Transport, machines: Sequence[int]) -> Measured:
    """Measure one pair of ranks for each kind of link, one after the other; a collective call.

    `machines[rank]` is the machine of a rank. Every rank gets the numbers of the pair's lower rank.
    """
    pairs = {machine: pair for machine in sorted(set(machines)) if (pair := first_pair(machines, machine))}
    first_ranks = [machines.index(machine) for machine in sorted(set(machines))]
    across = (first_ranks[0], first_ranks[1]) if len(first_ranks) > 1 else None
    transport.prepare([], [*pairs.values(), *([across] if across else [])])
    intra = {machine: measure_pair(transport, pair) for machine, pair in pairs.items()}
    return Measured(intra, measure_pair(transport, across) if across else None)


def first_pair(machines: Sequence[int], machine: int) -> tuple[int, int] | None:
    """Return the first two ranks of a machine, if it has two."""
    ranks = [rank for rank, other in enumerate(machines) if other == machine]
    return (ranks[0], ranks[1]) if len(ranks) > 1 else None


def measure_pair(transport: Transport, pair: tuple[int, int]) -> Link:
    """Time round trips of small and large messages between two ranks; the others wait for the numbers."""
    numbers: Data = None
    if transport.rank in pair:
        peer = pair[1] if transport.rank == pair[0] else pair[0]
        first = transport.rank == pair[0]
        small_s = trip_s(transport, peer, first, SMALL_BYTES, ROUND_TRIPS)
        large_bytes = SIZES_BYTES[0]
        large_s = trip_s(transport, peer, first, large_bytes, LARGE_TRIPS)
        # both must take the same way: the lower rank decides, by a message of one byte or two
        if told(transport, peer, large_s < QUICK_S if first else None):
            large_bytes = SIZES_BYTES[1]
            large_s = trip_s(transport, peer, first, large_bytes, LARGE_TRIPS)
        numbers = [large_bytes / max(large_s - small_s, 1e-9), small_s]
        transport.drain("measuring links")
    bandwidth, latency_s = transport.broadcast_data(numbers, pair[0]).wait()
    return Link(bandwidth, latency_s)


def trip_s(transport: Transport, peer: int, first: bool, size_bytes: int, count: int) -> float:
    """Return the time in seconds of one way, half a round trip; the lower quartile, for other work only adds."""
    payload = torch.zeros(size_bytes, dtype=torch.uint8, device=transport.device)
    taken_s = []
    for _ in range(count + 1):  # the first warms up
        began_s = time.perf_counter()
        if first:
            transport.send(payload, peer, PROBE_TAG)
        receive(transport, peer, size_bytes)
        if not first:
            transport.send(payload, peer, PROBE_TAG)
        taken_s.append(time.perf_counter() - began_s)
    return sorted(taken_s[1:])[count // 4] / 2


def receive(transport: Transport, peer: int, size_bytes: int) -> torch.Tensor:
    """Receive bytes and wait until they are there, on a GPU too."""
    device = transport.device
    got = transport.recv((size_bytes,), torch.uint8, device, peer, PROBE_TAG).wait("measuring links")
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return got


def told(transport: Transport, peer: int, answer: bool | None) -> bool:
    """Tell the peer an answer, or (`None`) be told it."""
    if answer is None:
        return bool(receive(transport, peer, 1).item())
    transport.send(torch.tensor([answer], dtype=torch.uint8, device=transport.device), peer, PROBE_TAG)
    return answer


def machines_of(facts: Sequence[Data]) -> list[int]:
    """Number the machines in order of their first rank."""
    names = list(dict.fromkeys(fact["machine"] for fact in facts))
    return [names.index(fact["machine"]) for fact in facts]


def describe_cluster(facts: Sequence[Data], measured: Measured) -> Cluster:
    """Make a cluster of what each rank is and what was measured; ranks of a machine share its memory.

    Ranks that share GPUs, or have more threads together than their machine has cores, cannot all compute at
    full speed at once (`Cluster.slots`); the memory of a GPU that several share is given in equal parts.
    """
    machines = machines_of(facts)
    places = [(fact["machine"], fact["gpu"]) for fact in facts]
    devices = tuple(
        Device(
            machine,
            fact["kind"],
            None if fact["memory_bytes"] is None else fact["memory_bytes"] // places.count(place),
            speed_of(fact),
        )
        for machine, fact, place in zip(machines, facts, places, strict=True)
    )
    numbers = range(max(machines) + 1)
    intra = tuple(measured.intra.get(machine) for machine in numbers)
    slots = tuple(
        slots_of([fact for fact, at in zip(facts, machines, strict=True) if at == number]) for number in numbers
    )
    return Cluster(devices, Links(intra, measured.inter), where="ranks", slots=slots if any(slots) else ())


def speed_of(fact: Data) -> float:
    """Return the part of its threads' time that a rank gets when it computes alone."""
    if fact["gpu"] or not fact.get("cores"):
        return 1.0
    return min(1.0, float(fact["cores"]) / float(fact["threads"]))


def slots_of(facts: Sequence[Data]) -> float | None:
    """Return how many ranks of a machine compute at once as fast as alone; `None` where all do."""
    gpus = {fact["gpu"] for fact in facts}
    if all(gpus):
        slots = float(len(gpus))
    elif all(fact.get("cores") for fact in facts):
        slots = max(fact["cores"] for fact in facts) / max(fact["threads"] for fact in facts)
    else:
        return None
    return max(slots, 1.0) if slots < len(facts) else None
