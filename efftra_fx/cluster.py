"""The devices that a plan may use and the links between them.

Bytes are bytes, seconds are seconds; 1 GB is 10**9 bytes. A file that describes a
cluster is TOML, and every key in it must be known:

    [inter]                          # between machines; needed when there are two or more
    bandwidth_gb_per_s = 1.25
    latency_us = 10

    [[machine]]
    count = 4                        # so many equal machines
    devices = 4
    kind = "V100"
    memory_gb = 16                   # leave it out: no limit
    speed = 1.0                      # relative: 2.0 computes twice as fast
    slots = 2                        # so many devices compute at once at their speed; leave it out: all
    link = { bandwidth_gb_per_s = 10, latency_us = 5 }   # inside the machine

A machine with devices of several kinds lists them instead of `devices`:

    [[machine]]
    link = { bandwidth_gb_per_s = 25 }
    [[machine.device]]
    count = 2
    kind = "A100-40"
    memory_gb = 40
"""

from __future__ import annotations

import importlib
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from efftra_fx.errors import ClusterError
from efftra_fx.units import number_text

GB = 1e9
MOST_DEVICES = 100_000
WHERE = ("described", "local", "ranks")


@dataclass(frozen=True)
class Link:
    """One direction of a connection: payload bytes per second and seconds before the first byte."""

    bandwidth_bytes_per_s: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        check_number("bandwidth_bytes_per_s", self.bandwidth_bytes_per_s, low=1.0, high=1e15)
        check_number("latency_s", self.latency_s, low=0.0, high=10.0)

    def seconds(self, size_bytes: float) -> float:
        """Time for one message; nothing to send takes no time."""
        return self.latency_s + size_bytes / self.bandwidth_bytes_per_s if size_bytes > 0 else 0.0


@dataclass(frozen=True)
class Device:
    """One device of machine `machine`; `memory_bytes=None` is no limit, `speed` divides compute times."""

    machine: int
    kind: str = "cpu"
    memory_bytes: int | None = None
    speed: float = 1.0

    def __post_init__(self) -> None:
        read_count("machine", self.machine, least=0)
        if not isinstance(self.kind, str):
            raise ClusterError(f"kind must be a name, got {self.kind!r}")
        if self.memory_bytes is not None:
            check_number("memory_bytes", self.memory_bytes, low=1.0, high=1e15)
        check_number("speed", self.speed, low=1e-6, high=1e6)


@dataclass(frozen=True)
class Links:
    """The link inside each machine (`None`: it has one device) and the one between machines (`None`: one machine)."""

    intra: tuple[Link | None, ...]
    inter: Link | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.intra, list | tuple):
            raise ClusterError(f"links.intra must list a Link, or None, for each machine, got {self.intra!r}")
        object.__setattr__(self, "intra", tuple(self.intra))
        for name, link in (
            *((f"links.intra[{i}]", link) for i, link in enumerate(self.intra)),
            ("links.inter", self.inter),
        ):
            if not isinstance(link, Link | None):
                raise ClusterError(f"{name} must be a Link or None, got {link!r}")


@dataclass(frozen=True)
class Cluster:
    """Devices in rank order and their links.

    `where` says what the ranks are: "described" (planning only), "local" (all ranks
    live in this process) or "ranks" (one process each, under `torch.distributed`).
    `slots` says, machine by machine, how many of its devices can compute at once at their
    `speed` (`None`, or nothing: all of them); more in use share what there is, as ranks do
    that share cores.
    """

    devices: tuple[Device, ...]
    links: Links
    where: str = "described"
    slots: tuple[float | None, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.devices, list | tuple) or not all(isinstance(one, Device) for one in self.devices):
            raise ClusterError(f"devices must list Devices, got {self.devices!r:.200}")
        object.__setattr__(self, "devices", tuple(self.devices))
        if not isinstance(self.links, Links):
            raise ClusterError(f"links must be Links, got {self.links!r}")
        if not self.devices:
            raise ClusterError("devices: a cluster needs at least one device, found 0")
        if self.where not in WHERE:
            raise ClusterError(f"where must be one of {', '.join(WHERE)}, got {self.where!r}")
        machines = sorted({device.machine for device in self.devices})
        for machine in machines:
            if machine >= len(self.links.intra):
                raise ClusterError(f"links.intra: machine {machine} has no link entry, found {len(self.links.intra)}")
            alone = sum(device.machine == machine for device in self.devices) == 1
            if self.links.intra[machine] is None and not alone:
                raise ClusterError(f"links.intra: machine {machine} has several devices but no link between them")
        if len(machines) > 1 and self.links.inter is None:
            raise ClusterError(f"links.inter: {len(machines)} machines need a link between them, found none")
        if not isinstance(self.slots, list | tuple) or len(self.slots) > max(machines) + 1:
            raise ClusterError(f"slots must list a number, or None, for each machine, got {self.slots!r:.200}")
        object.__setattr__(self, "slots", tuple(self.slots))
        for machine, slots in enumerate(self.slots):
            if slots is not None:
                check_number(f"slots[{machine}]", slots, low=1e-6, high=1e6)

    @classmethod
    def uniform(
        cls,
        machines: int = 1,
        devices_per_machine: int = 1,
        memory_gb: float | None = None,
        intra: Link | None = None,
        inter: Link | None = None,
        kind: str = "cpu",
        speed: float = 1.0,
    ) -> Cluster:
        """Describe equal machines; `memory_gb=None` is no limit; raise ClusterError naming the field.

        >>> len(Cluster.uniform(machines=2, devices_per_machine=4, intra=Link(1e10), inter=Link(1e9)).devices)
        8
        """
        read_count("machines", machines)
        read_count("devices_per_machine", devices_per_machine)
        if machines * devices_per_machine > MOST_DEVICES:
            raise ClusterError(f"a cluster of more than {MOST_DEVICES} devices cannot be meant")
        memory = None
        if memory_gb is not None:
            check_number("memory_gb", memory_gb, low=1e-6, high=1e6)
            memory = int(memory_gb * GB)
        devices = tuple(
            Device(machine, kind, memory, speed) for machine in range(machines) for _ in range(devices_per_machine)
        )
        return cls(devices, Links((intra,) * machines, inter))

    @classmethod
    def local(cls, ranks: int) -> Cluster:
        """Describe `ranks` CPU ranks inside this process."""
        read_count("ranks", ranks, most=MOST_DEVICES)
        copying = Link(4e9, 20e-6)
        return cls((Device(0),) * ranks, Links((copying,)), where="local")

    @classmethod
    def from_env(cls) -> Cluster:
        """Describe the ranks that were launched, links measured; this process alone when there was no launcher.

        The measuring needs the runtime, which stands above this file, so it is looked up by name.
        """
        launch = importlib.import_module("efftra_fx.runtime.launch")
        cluster = launch.measured_cluster()
        if not isinstance(cluster, cls):
            raise ClusterError(f"measured_cluster must give a Cluster, got {type(cluster).__name__}")
        return cluster

    @classmethod
    def load(cls, path: str | Path) -> Cluster:
        """Read a TOML file; raise ClusterError naming the file and the field."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, ValueError, TypeError) as error:
            raise ClusterError(f"{path}: cannot read the cluster file: {error}") from error
        return cls.parse(text, str(path))

    @classmethod
    def parse(cls, text: str, name: str = "cluster") -> Cluster:
        """Read the TOML text of a cluster file; `name` stands before every error."""
        try:
            return read_cluster(tomllib.loads(text))
        except RecursionError:
            raise ClusterError(f"{name}: not TOML: lists and tables are nested too deeply") from None
        except ValueError as error:
            raise ClusterError(f"{name}: not TOML: {error}") from error
        except ClusterError as error:
            raise ClusterError(f"{name}: {error}") from None

    @property
    def machines(self) -> int:
        """Number of machines that hold a device."""
        return len({device.machine for device in self.devices})

    @property
    def homogeneous(self) -> bool:
        """Whether every device has the same kind, memory and speed."""
        return len({(device.kind, device.memory_bytes, device.speed) for device in self.devices}) == 1

    @property
    def crowded(self) -> bool:
        """Whether some machine has more devices than can compute at once at their full speed."""
        return self.working(range(len(self.devices))).devices != self.devices

    def working(self, devices: Iterable[int]) -> Cluster:
        """The same cluster, each device as fast as it is while these compute at the same time; without `slots`."""
        if not any(slots is not None for slots in self.slots):
            return self if not self.slots else replace(self, slots=())
        used = Counter(self.devices[device].machine for device in devices)
        slowed = tuple(
            replace(device, speed=device.speed * self.slot_share(device.machine, used[device.machine]))
            for device in self.devices
        )
        return replace(self, devices=slowed, slots=())

    def slot_share(self, machine: int, used: int) -> float:
        """The part of its speed that a device of a machine has while `used` of the machine's devices compute."""
        slots = self.slots[machine] if machine < len(self.slots) else None
        return 1.0 if slots is None else min(1.0, slots / max(used, 1))

    def link(self, a: int, b: int) -> Link:
        """The link from device a to device b, two different ranks; raise ClusterError for anything else."""
        for rank in (a, b):
            if not 0 <= rank < len(self.devices):
                raise ClusterError(f"no device {rank}, the cluster has 0 to {len(self.devices) - 1}")
        first, second = self.devices[a].machine, self.devices[b].machine
        link = self.links.intra[first] if first == second else self.links.inter
        if a == b or link is None:
            raise ClusterError(f"no link from device {a} to device {b}, give two different devices")
        return link

    def without_memory_limits(self) -> Cluster:
        """The same cluster with devices of unlimited memory."""
        return replace(self, devices=tuple(replace(device, memory_bytes=None) for device in self.devices))


def check_number(name: str, value: object, low: float, high: float) -> float:
    """Give the number back as a float, or raise ClusterError when it is none or cannot be meant."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ClusterError(f"{name} must be a number, got {value!r}")
    if not low <= value <= high:
        raise ClusterError(f"{name} must be between {low:g} and {high:g}, got {number_text(value)}")
    return float(value)


def read_cluster(data: Mapping[str, Any]) -> Cluster:
    """Turn parsed TOML into a cluster."""
    check_keys("the file", data, {"inter", "machine"})
    inter = read_link("inter", data["inter"]) if "inter" in data else None
    tables = data.get("machine")
    if not isinstance(tables, list) or not tables:
        raise ClusterError("machine: the file needs at least one [[machine]] table")
    devices: list[Device] = []
    intra: list[Link | None] = []
    slots: list[float | None] = []
    for index, table in enumerate(tables):
        name = f"machine[{index}]"
        check_keys(name, table, {"count", "devices", "kind", "memory_gb", "speed", "slots", "link", "device"})
        link = read_link(f"{name}.link", table["link"]) if "link" in table else None
        groups = read_groups(name, table)
        if link is None and sum(count for count, _ in groups) > 1:
            raise ClusterError(f"{name}.link is missing: a machine of several devices needs a link inside")
        copies = read_count(f"{name}.count", table.get("count", 1))
        if len(devices) + copies * sum(count for count, _ in groups) > MOST_DEVICES:
            raise ClusterError(f"{name}: a cluster of more than {MOST_DEVICES} devices cannot be meant")
        for _ in range(copies):
            devices += [replace(one, machine=len(intra)) for count, one in groups for _ in range(count)]
            intra.append(link)
            slots.append(read_slots(name, table))
    if inter is None and len(intra) > 1:
        raise ClusterError(f"inter is missing: {len(intra)} machines need a link between them")
    return Cluster(tuple(devices), Links(tuple(intra), inter), slots=tuple(slots) if any(slots) else ())


def read_slots(name: str, table: Mapping[str, Any]) -> float | None:
    """How many devices of the machine compute at once at full speed; `None` for all."""
    return check_number(f"{name}.slots", table["slots"], low=1e-6, high=1e6) if "slots" in table else None


def read_groups(name: str, table: Mapping[str, Any]) -> list[tuple[int, Device]]:
    """The kinds of device of one machine, each with how many there are."""
    if "device" not in table:
        if "devices" not in table:
            raise ClusterError(f"{name}.devices is missing: say how many devices the machine has")
        return [(read_count(f"{name}.devices", table["devices"]), read_device(name, table))]
    doubled = sorted({"devices", "kind", "memory_gb", "speed"} & set(table))
    if doubled:
        raise ClusterError(f"{name}.{doubled[0]} and {name}.device are both given: use one of them")
    groups = []
    tables = table["device"]
    if not isinstance(tables, list) or not tables:
        raise ClusterError(f"{name}.device must be a list of tables, got {tables!r}")
    for index, group in enumerate(tables):
        inner = f"{name}.device[{index}]"
        check_keys(inner, group, {"count", "kind", "memory_gb", "speed"})
        groups.append((read_count(f"{inner}.count", group.get("count", 1)), read_device(inner, group)))
    return groups


def read_device(name: str, table: Mapping[str, Any]) -> Device:
    """One device, its machine still to be set."""
    kind = table.get("kind", "cpu")
    if not isinstance(kind, str) or not kind:
        raise ClusterError(f"{name}.kind must be a name, got {kind!r}")
    memory = None
    if "memory_gb" in table:
        memory = int(check_number(f"{name}.memory_gb", table["memory_gb"], low=1e-6, high=1e6) * GB)
    return Device(0, kind, memory, check_number(f"{name}.speed", table.get("speed", 1.0), low=1e-6, high=1e6))


def read_link(name: str, table: object) -> Link:
    """A link table: bandwidth in GB/s, latency in microseconds."""
    check_keys(name, table, {"bandwidth_gb_per_s", "latency_us"})
    assert isinstance(table, Mapping)
    if "bandwidth_gb_per_s" not in table:
        raise ClusterError(f"{name}.bandwidth_gb_per_s is missing")
    bandwidth = check_number(f"{name}.bandwidth_gb_per_s", table["bandwidth_gb_per_s"], low=1e-6, high=1e6)
    latency = check_number(f"{name}.latency_us", table.get("latency_us", 0.0), low=0.0, high=1e7)
    return Link(bandwidth * GB, latency / 1e6)


def read_count(name: str, value: object, least: int = 1, most: int = 1_000_000) -> int:
    """A whole number from `least` to `most`."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        found = number_text(value) if isinstance(value, int) and not isinstance(value, bool) else repr(value)
        raise ClusterError(f"{name} must be a whole number from {least} to {most}, got {found}")
    return value


def check_keys(name: str, table: object, known: set[str]) -> None:
    """Raise ClusterError when `table` is no table or holds a key that nobody reads."""
    if not isinstance(table, Mapping):
        raise ClusterError(f"{name} must be a table, got {table!r}")
    unknown = sorted(set(table) - known)
    if unknown:
        raise ClusterError(f"{name}: unknown key {unknown[0]!r}, known are {', '.join(sorted(known))}")
