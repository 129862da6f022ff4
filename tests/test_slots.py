"""Devices that cannot all compute at once: prices, the best plan, its bound, and what is said of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import plan_oracle as oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies_plans import chains
from test_partition import chain_of

from efftra_fx.cluster import Cluster, Device, Link, Links
from efftra_fx.cost import Chain
from efftra_fx.errors import ClusterError, MemoryPlanError, PlanError
from efftra_fx.passes.evaluate import evaluate
from efftra_fx.passes.explain import explain
from efftra_fx.passes.partition import partition
from efftra_fx.passes.rules import Rules
from efftra_fx.passes.slots import parts_of
from efftra_fx.plan import Plan


def crowded(devices: int, slots: float, machines: int = 1, link: Link | None = None) -> Cluster:
    """Equal machines whose devices share slots."""
    link = link or Link(1e9, 1e-5)
    cluster = Cluster.uniform(machines, devices, intra=link, inter=link)
    return replace(cluster, slots=(slots,) * machines)


def slowed(plan: Plan, cluster: Cluster) -> Cluster:
    """One crowded machine as a plan finds it, reckoned apart from the product."""
    assert cluster.machines == 1 and cluster.slots[0] is not None
    share = min(1.0, cluster.slots[0] / len(plan.devices))
    return replace(cluster, devices=tuple(replace(one, speed=one.speed * share) for one in cluster.devices), slots=())


@settings(max_examples=25)
@given(chains(most=3), st.integers(2, 4), st.floats(1.0, 4.0), st.integers(1, 3))
def test_the_plan_is_the_best_of_all_plans_each_at_the_speed_that_it_leaves(
    chain: Chain, devices: int, slots: float, rows: int
) -> None:
    cluster = crowded(devices, slots)
    every = list(oracle.every_plan(len(chain.blocks), cluster, rows))
    prices = [oracle.step_seconds(plan, chain, slowed(plan, cluster), rows, True, True, False) for plan in every]
    planned = partition(chain, cluster, rows)
    assert planned.proven and planned.lower_bound_s == pytest.approx(planned.step_s)
    assert planned.step_s == pytest.approx(min(prices), rel=1e-9, abs=1e-12)
    assert evaluate(planned.plan, chain, cluster, rows).step_s == planned.step_s == planned.plan.predicted_step_s
    for other in planned.alternatives:
        assert other.plan is not None
        assert other.step_s == pytest.approx(evaluate(other.plan, chain, cluster, rows).step_s)
        assert other.step_s >= planned.step_s * (1 - 1e-9)


@settings(max_examples=15)
@given(chains(most=4), st.integers(1, 2), st.integers(1, 3), st.floats(0.5, 3.0), st.integers(1, 4))
def test_no_plan_of_a_crowded_cluster_is_below_the_bound(
    chain: Chain, machines: int, devices: int, slots: float, rows: int
) -> None:
    cluster = crowded(devices, slots, machines)
    planned = partition(chain, cluster, rows)
    for plan in oracle.every_plan(len(chain.blocks), cluster, rows):
        step_s = evaluate(plan, chain, cluster, rows, Rules()).step_s
        assert step_s >= planned.lower_bound_s * (1 - 1e-9)


def test_devices_beyond_the_slots_are_left_idle_where_they_bring_nothing() -> None:
    chain = chain_of(4)
    planned = partition(chain, crowded(4, 2.0), 16)
    assert len(planned.plan.devices) == 2
    assert partition(chain, crowded(4, 4.0), 16).step_s < planned.step_s
    one = partition(chain, crowded(4, 1.0), 16)
    assert len(one.plan.devices) == 1
    alone = Cluster.uniform(1, 1)
    assert one.step_s == pytest.approx(partition(chain, alone, 16).step_s)
    labels = {other.label for other in planned.alternatives}
    assert {"one device", "data parallelism alone"} <= labels


def test_what_is_fixed_is_had_at_the_speed_that_is_left() -> None:
    chain, free, few = chain_of(4), Cluster.uniform(1, 4, intra=Link(1e12)), crowded(4, 2.0, link=Link(1e12))
    fixed = {"replicas": (4,), "micro_batches": 1}
    four = partition(chain, few, 16, **fixed)  # type: ignore[arg-type]
    assert len(four.plan.devices) == 4
    assert four.step_s == pytest.approx(2 * partition(chain, free, 16, **fixed).step_s, rel=1e-3)  # type: ignore[arg-type]
    assert len(partition(chain, few, 16, stages=3).plan.stages) == 3
    with pytest.raises(PlanError, match="stages=5 needs as many devices, the cluster has 4"):
        partition(chain, few, 16, stages=5)


@pytest.mark.parametrize("replicas", [None, (2, 1), (1, 2), (2, 2), (3,)])
@pytest.mark.parametrize("slots", [1.0, 4.0])
def test_no_stage_gets_less_than_one_group_of_a_width(replicas: tuple[int, ...] | None, slots: float) -> None:
    chain = chain_of(12)
    wide = (2, 3, 4)
    blocks = tuple(
        replace(block, options=tuple(replace(block.base, tensor=width, reduces=1, reduce_bytes=1e3) for width in wide))
        for block in chain.blocks
    )
    with np.errstate(divide="raise"):
        planned = partition(replace(chain, blocks=blocks), crowded(4, slots), 64, replicas=replicas)
    assert all(stage.replicas >= 1 for stage in planned.plan.stages)


def test_memory_may_need_more_devices_than_there_are_slots() -> None:
    chain = chain_of(4, weight=1e9)
    limited = crowded(4, 1.0)
    limited = replace(limited, devices=tuple(replace(one, memory_bytes=int(5e9)) for one in limited.devices))
    assert len(partition(chain, limited, 4).plan.devices) == 4
    with pytest.raises(MemoryPlanError, match="no plan fits the memory"):
        partition(chain_of(4, weight=5e9), limited, 4)


def test_parts_start_where_sharing_begins_and_take_the_faster_devices_first() -> None:
    cluster = crowded(4, 2.5, machines=2)
    assert [part.kept for part in parts_of(cluster)] == [(0, 1, 4, 5), (0, 1, 2, 4, 5, 6), tuple(range(8))]
    assert [round(part.share, 3) for part in parts_of(cluster)] == [1.0, 0.833, 0.625]
    assert {one.speed for one in parts_of(cluster)[-1].cluster.devices} == {0.625}
    assert [len(part.kept) for part in parts_of(cluster, least=5)] == [6, 8]
    mixed = Cluster((Device(0, speed=1.0), Device(0, speed=3.0)), Links((Link(1e9),)), slots=(1.0,))
    assert [part.kept for part in parts_of(mixed)] == [(1,), (0, 1)]


def test_the_explanation_says_how_many_compute_at_once_and_what_more_would_bring() -> None:
    chain = chain_of(4)
    cluster = crowded(4, 2.0)
    text = explain(partition(chain, cluster, 16), chain, cluster, 16)
    assert "machine 0 computes on 2 of its 4 devices at once at full speed; 2 are used, each at full speed" in text
    assert "slots for all devices: predicted step" in text
    roomy = Cluster.uniform(1, 4, intra=Link(1e9, 1e-5))
    assert "at once" not in explain(partition(chain, roomy, 16), chain, roomy, 16)


def test_slots_are_read_from_a_file_and_bad_ones_named() -> None:
    text = "[[machine]]\ndevices = 4\nslots = 2\nlink = { bandwidth_gb_per_s = 1 }\n"
    cluster = Cluster.parse(text)
    assert cluster.slots == (2.0,) and cluster.crowded
    assert not Cluster.parse(text.replace("slots = 2\n", "")).crowded
    with pytest.raises(ClusterError, match=r"machine\[0\].slots must be between"):
        Cluster.parse(text.replace("slots = 2", "slots = 0"))
    with pytest.raises(ClusterError, match=r"slots must list a number, or None, for each machine"):
        replace(cluster, slots=(1.0, 1.0))
    with pytest.raises(ClusterError, match=r"slots\[0\] must be a number, got 'two'"):
        replace(cluster, slots=("two",))  # type: ignore[arg-type]
