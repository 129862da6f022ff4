"""For long lines the fewest devices under a bound follow from a closed form."""

from __future__ import annotations

import numpy as np
import pytest

from efftra_fx.cluster import Cluster, Device, Link, Links
from efftra_fx.cost import Chain, Crossing, NodeCost, Timing
from efftra_fx.errors import MemoryPlanError
from efftra_fx.passes.candidates import Request, Search
from efftra_fx.passes.partition import partition
from efftra_fx.passes.placement import layouts
from efftra_fx.passes.rules import Rules
from efftra_fx.passes.table import Table
from efftra_fx.passes.wide import fewest, stretched, wide_scan


def chain_of(blocks: int, weight: float = 1e6) -> Chain:
    """Equal blocks of 1 ms and 2 ms a row."""
    one = NodeCost("b", Timing(0, 1e-3), Timing(0, 2e-3), weight, weight, 1e4, 1e4)
    return Chain((one,) * blocks, tuple(Crossing(index, (index + 1,), 1e4) for index in range(blocks - 1)))


def test_the_fewest_devices_are_those_that_just_keep_the_bound() -> None:
    """4 blocks of 3 ms a row, 10 rows: 120 ms; under 50 ms a stage of all needs 3 devices, of one block 1."""
    cluster = Cluster.uniform(2, 50, None, Link(1e10), Link(1e9))
    rules = Rules(whole_rows=False)
    table = Table(chain_of(4), cluster, rules)
    search = Search(chain_of(4), cluster, rules, Request(100), table)
    devices, _ = fewest(search, np.arange(5), 10.0, np.array([0.05, 1e-9]), 0, whole=False)
    assert (devices[0, 0, 4], devices[0, 0, 1], devices[0, 0, 2]) == (3, 1, 2)
    assert devices[1, 0, 4] > 1e6


def test_its_shapes_are_plans_within_the_line() -> None:
    cluster = Cluster.uniform(10, 8, None, Link(1e10), Link(1e9))
    rules = Rules(whole_rows=False)
    search = Search(chain_of(30), cluster, rules, Request(640), Table(chain_of(30), cluster, rules))
    layout = layouts(cluster, search.table)[0]
    shapes = wide_scan(search, layout, 16)
    assert shapes
    for cuts, counts, ways, skip in shapes:
        assert cuts[0] == 0 and cuts[-1] == 30 and list(cuts) == sorted(set(cuts))
        assert len(counts) == len(ways) == len(cuts) - 1
        assert min(counts) >= 1 and skip + sum(counts) <= layout.size


def test_devices_left_over_are_shared_out_in_whole_replicas() -> None:
    assert stretched(((0, 2, 4), (2, 4), (1, 1), 10), 12, [1, 2]) == ((0, 2, 4), (4, 8), (1, 1), 0)


@pytest.mark.parametrize("order", [0, 1])
def test_a_long_line_of_two_kinds_is_planned(order: int) -> None:
    kinds = [Device(0, "fast", None, 1.0), Device(1, "slow", None, 0.4)]
    first, second = kinds if order == 0 else kinds[::-1]
    devices = tuple(
        Device(machine, kind.kind, None, kind.speed) for machine, kind in enumerate([first] * 5 + [second] * 5)
        for _ in range(8)
    )  # fmt: skip
    cluster = Cluster(devices, Links((Link(1e11),) * 10, Link(1e10)))
    planned = partition(chain_of(40), cluster, 640, whole_rows=False)
    alone = Cluster.uniform(5, 8, None, Link(1e11), Link(1e10), kind="fast")
    assert planned.step_s <= partition(chain_of(40), alone, 640, whole_rows=False).step_s * (1 + 1e-9)


def test_memory_binds_on_a_long_line() -> None:
    cluster = Cluster.uniform(12, 8, 1, Link(1e11), Link(1e10))
    planned = partition(chain_of(24, weight=1e8), cluster, 960)
    assert max(planned.memory_bytes) <= 1e9 and len(planned.plan.stages) > 9
    with pytest.raises(MemoryPlanError, match="no plan fits"):
        partition(chain_of(24, weight=1e9), cluster, 960)
