"""A cluster is read strictly: what it cannot mean is an error that names the field."""

from __future__ import annotations

from pathlib import Path

import pytest

from efftra_fx.cluster import Cluster, Device, Link, Links
from efftra_fx.errors import ClusterError

EXAMPLES = Path(__file__).parent.parent / "examples" / "clusters"

GOOD = """
[inter]
bandwidth_gb_per_s = 1.25
latency_us = 10

[[machine]]
count = 2
devices = 3
kind = "V100"
memory_gb = 16
link = { bandwidth_gb_per_s = 10, latency_us = 5 }

[[machine]]
link = { bandwidth_gb_per_s = 25 }
[[machine.device]]
count = 2
kind = "A100"
memory_gb = 40
[[machine.device]]
speed = 0.5
"""


def test_a_file_gives_machines_devices_and_links() -> None:
    cluster = Cluster.parse(GOOD)
    assert [device.machine for device in cluster.devices] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert [device.kind for device in cluster.devices[5:]] == ["V100", "A100", "A100", "cpu"]
    assert cluster.devices[0].memory_bytes == 16_000_000_000
    assert cluster.devices[8].speed == 0.5
    assert cluster.link(0, 1) == Link(1e10, 5e-6)
    assert cluster.link(0, 3) == Link(1.25e9, 10e-6)
    assert cluster.machines == 3 and not cluster.homogeneous and cluster.where == "described"


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("latency_us = 10", "latency_ms = 10", "inter: unknown key 'latency_ms'"),
        ("devices = 3", "devices = 0", r"machine\[0\].devices must be a whole number"),
        ("devices = 3", "devices = 2.5", r"machine\[0\].devices must be a whole number"),
        ("devices = 3\n", "", r"machine\[0\].devices is missing"),
        ("memory_gb = 16", "memory_gb = -1", r"machine\[0\].memory_gb must be between"),
        ("memory_gb = 16", 'memory_gb = "lots"', r"machine\[0\].memory_gb must be a number"),
        ("bandwidth_gb_per_s = 1.25", "bandwidth_gb_per_s = 0", "inter.bandwidth_gb_per_s must be between"),
        ("bandwidth_gb_per_s = 1.25", "bandwidth_gb_per_s = nan", "inter.bandwidth_gb_per_s must be between"),
        ("bandwidth_gb_per_s = 1.25\n", "", "inter.bandwidth_gb_per_s is missing"),
        ("link = { bandwidth_gb_per_s = 25 }\n", "", r"machine\[1\].link is missing"),
        ("[inter]\nbandwidth_gb_per_s = 1.25\nlatency_us = 10\n", "", "inter is missing: 3 machines"),
        ("speed = 0.5", "speed = 0", r"machine\[1\].device\[1\].speed must be between"),
        ('kind = "V100"', "kind = 3", r"machine\[0\].kind must be a name"),
        ("count = 2\ndevices", "count = true\ndevices", r"machine\[0\].count must be a whole number"),
        ("[[machine]]\nlink", "[[machine]]\nkind = 'x'\nlink", r"machine\[1\].kind and machine\[1\].device are both"),
        ("[inter]", "[inter", "not TOML"),
        ("count = 2\ndevices", "count = 99999\ndevices", r"machine\[0\]: a cluster of more than 100000 devices"),
    ],
)
def test_a_wrong_file_is_an_error_that_names_the_field(old: str, new: str, words: str) -> None:
    assert old in GOOD
    with pytest.raises(ClusterError, match=words) as caught:
        Cluster.parse(GOOD.replace(old, new, 1), "here.toml")
    assert str(caught.value).startswith("here.toml: ")


def test_an_empty_file_is_an_error() -> None:
    with pytest.raises(ClusterError, match=r"at least one \[\[machine\]\]"):
        Cluster.parse("")


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="cannot read the cluster file"):
        Cluster.load(tmp_path / "none.toml")


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.stem)
def test_every_example_file_loads(path: Path) -> None:
    cluster = Cluster.load(path)
    if not path.stem.startswith("mixed"):
        machines, devices = (int(part) for part in path.stem.split("_")[0].split("x"))
        assert (cluster.machines, len(cluster.devices)) == (machines, machines * devices)
        assert cluster.homogeneous and cluster.devices[0].memory_bytes == 16_000_000_000


def test_a_cluster_that_cannot_be_is_an_error() -> None:
    with pytest.raises(ClusterError, match="at least one device, found 0"):
        Cluster((), Links(()))
    with pytest.raises(ClusterError, match="machine 0 has several devices but no link"):
        Cluster((Device(0), Device(0)), Links((None,)))
    with pytest.raises(ClusterError, match="2 machines need a link"):
        Cluster((Device(0), Device(1)), Links((None, None)))
    with pytest.raises(ClusterError, match="machine 1 has no link entry"):
        Cluster((Device(0), Device(1)), Links((None,), Link(1e9)))
    with pytest.raises(ClusterError, match="where must be one of"):
        Cluster((Device(0),), Links((None,)), where="nowhere")
    with pytest.raises(ClusterError, match="devices_per_machine must be a whole number from 1 to 1000000, got 0"):
        Cluster.uniform(2, 0)
    with pytest.raises(ClusterError, match="latency_s must be between"):
        Link(1e9, -1.0)
    with pytest.raises(ClusterError, match="no link from device 0 to device 0"):
        Cluster.local(2).link(0, 0)
    with pytest.raises(ClusterError, match="no device 7"):
        Cluster.local(2).link(0, 7)
    with pytest.raises(ClusterError, match="ranks must be a whole number from 1 to 100000, got 0"):
        Cluster.local(0)


def test_a_local_cluster_says_that_its_ranks_live_here() -> None:
    cluster = Cluster.local(4)
    assert cluster.where == "local" and len(cluster.devices) == 4 and cluster.machines == 1


def test_memory_limits_can_be_taken_off() -> None:
    cluster = Cluster.uniform(2, 2, 16, Link(1e10), Link(1e9)).without_memory_limits()
    assert {device.memory_bytes for device in cluster.devices} == {None}


def test_a_link_takes_its_latency_and_its_bytes() -> None:
    assert Link(1e9, 0.001).seconds(1e6) == pytest.approx(0.002)
    assert Link(1e9, 0.001).seconds(0) == 0.0
