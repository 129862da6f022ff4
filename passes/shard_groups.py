"""Where the tensor groups of given widths go: each inside one machine, whose link is the fastest that there is."""

from __future__ import annotations

from collections.abc import Sequence

from efftra_fx.cluster import Cluster
from efftra_fx.errors import PlacementError

Shape = tuple[int, int]  # replicas, width


def place_groups(shapes: Sequence[Shape], cluster: Cluster) -> tuple[tuple[int, ...], ...]:
    """Return each stage's devices, replica by replica, so that no tensor group leaves its machine.

    Stages follow one another through the machines as far as that goes; machines with faster links come
    first. All ways to deal groups out to machines are tried before giving up.

    Raises PlacementError, with the groups and the machines, where there is no such placement.
    """
    free: dict[int, list[int]] = {}
    for index, device in enumerate(cluster.devices):
        free.setdefault(device.machine, []).append(index)
    order = sorted(free, key=lambda machine: (-_bandwidth(cluster, machine), machine))
    groups = [(stage, width) for stage, (replicas, width) in enumerate(shapes) for _ in range(replicas)]
    chosen = _deal([width for _, width in groups], [len(free[machine]) for machine in order])
    if chosen is None:
        widths = ", ".join(str(width) for _, width in sorted(groups, key=lambda one: -one[1]))
        sizes = ", ".join(str(len(free[machine])) for machine in sorted(free))
        raise PlacementError(
            f"groups of {widths} ranks do not fit inside the machines, which have {sizes} devices, and a tensor group "
            "sums over the link inside its machine at every layer; choose widths that divide a machine, fewer "
            "replicas, or give a plan= that says where each group goes"
        )
    found: list[list[int]] = [[] for _ in shapes]
    for (stage, width), place in zip(groups, chosen, strict=True):
        devices = free[order[place]]
        found[stage] += devices[:width]
        del devices[:width]
    return tuple(tuple(devices) for devices in found)


def leaves_machine(devices: Sequence[int], width: int, cluster: Cluster) -> bool:
    """Say whether a group of so many devices, taken in order, lies on several machines."""
    machines = [cluster.devices[device].machine for device in devices]
    return any(len(set(machines[at : at + width])) > 1 for at in range(0, len(machines), width))


def _bandwidth(cluster: Cluster, machine: int) -> float:
    link = cluster.links.intra[machine]
    return 0.0 if link is None else link.bandwidth_bytes_per_s


def _deal(widths: Sequence[int], rooms: Sequence[int]) -> list[int] | None:
    """Return for each group the machine that it goes to, near the one before it; None if there is no way."""
    dead: set[tuple[int, tuple[int, ...]]] = set()

    def place(at: int, left: list[int], last: int) -> list[int] | None:
        if at == len(widths):
            return []
        state = at, tuple(sorted(left))
        if state in dead:
            return None
        for machine in sorted(range(len(left)), key=lambda one: (one != last, one)):
            if left[machine] >= widths[at]:
                left[machine] -= widths[at]
                rest = place(at + 1, left, machine)
                left[machine] += widths[at]
                if rest is not None:
                    return [machine, *rest]
        dead.add(state)
        return None

    return place(0, list(rooms), 0)


__all__ = ["leaves_machine", "place_groups"]
