"""The planner finds the best plan there is, keeps what is fixed, and says what cannot be had."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import plan_oracle as oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies_plans import chains, clusters, wide_chains

from efftra_fx.cluster import Cluster, Device, Link, Links
from efftra_fx.cost import Chain, Crossing, NodeCost, Timing
from efftra_fx.errors import MemoryPlanError, PlanError
from efftra_fx.passes import partition as planner
from efftra_fx.passes.evaluate import evaluate
from efftra_fx.passes.partition import partition
from efftra_fx.passes.rules import Rules
from efftra_fx.plan import Plan

OPTIMIZER = 2.0


def chain_of(blocks: int, weight: float = 1e6, per_row_s: float = 1e-3, row_bytes: float = 1e3) -> Chain:
    """Equal blocks in a line."""
    one = NodeCost("b", Timing(1e-4, per_row_s), Timing(1e-4, 2 * per_row_s), weight, weight, row_bytes, row_bytes)
    return Chain(
        tuple(replace(one, name=f"b{index}") for index in range(blocks)),
        tuple(Crossing(index, (index + 1,), row_bytes) for index in range(blocks - 1)),
    )


def best_of_all(chain: Chain, cluster: Cluster, rows: int, overlap: bool, whole: bool, forwarded: bool) -> float:
    """The least step of every plan that fits, by the oracle; infinite when none does."""
    best = float("inf")
    recompute = any(block.options for block in chain.blocks)
    for plan in oracle.every_plan(len(chain.blocks), cluster, rows, recompute):
        if oracle.fits(plan, chain, cluster, rows, whole, forwarded, OPTIMIZER):
            best = min(best, oracle.step_seconds(plan, chain, cluster, rows, overlap, whole, forwarded))
    return best


def check_against_all(chain: Chain, cluster: Cluster, rows: int, overlap: bool, whole: bool, forwarded: bool) -> None:
    """The planner's step is the least of all, and the oracle prices its plan the same."""
    best = best_of_all(chain, cluster, rows, overlap, whole, forwarded)
    options: dict[str, Any] = {"overlap": overlap, "whole_rows": whole, "forwarded_skips": forwarded}
    if best == float("inf"):
        with pytest.raises(MemoryPlanError, match="no plan fits"):
            partition(chain, cluster, rows, **options)
        return
    planned = partition(chain, cluster, rows, **options)
    assert planned.proven
    assert planned.step_s == pytest.approx(best, rel=1e-9, abs=1e-12)
    assert planned.lower_bound_s == planned.step_s
    again = oracle.step_seconds(planned.plan, chain, cluster, rows, overlap, whole, forwarded)
    assert again == pytest.approx(planned.step_s, rel=1e-9, abs=1e-12)
    assert oracle.fits(planned.plan, chain, cluster, rows, whole, forwarded, OPTIMIZER)


@settings(max_examples=40)
@given(chains(most=4), clusters(most=3), st.integers(1, 3), st.booleans(), st.booleans(), st.booleans())
def test_the_plan_is_the_best_of_all_plans(
    chain: Chain, cluster: Cluster, rows: int, overlap: bool, whole: bool, forwarded: bool
) -> None:
    check_against_all(chain, cluster, rows, overlap, whole, forwarded)


@settings(max_examples=10)
@given(chains(most=3, recompute=True), clusters(most=2), st.integers(1, 2), st.booleans())
def test_recompute_is_chosen_where_it_is_best(chain: Chain, cluster: Cluster, rows: int, overlap: bool) -> None:
    check_against_all(chain, cluster, rows, overlap, whole=True, forwarded=False)


def with_widths(plan: Plan, cluster: Cluster) -> Iterator[Plan]:
    """The plan with each stage one or two ranks wide, where its devices make pairs inside machines."""
    ways = []
    for stage in plan.stages:
        machines = [cluster.devices[device].machine for device in stage.devices]
        pairs = len(machines) % 2 == 0 and machines[::2] == machines[1::2]
        ways.append((stage, replace(stage, tensor=2)) if pairs else (stage,))
    for stages in itertools.product(*ways):
        yield replace(plan, stages=stages)


@settings(max_examples=25)
@given(wide_chains(most=3), clusters(most=4, kinds=1, limits=False), st.integers(1, 2), st.booleans(), st.booleans())
def test_the_plan_is_the_best_of_all_widths_and_whole_values_too(
    chain: Chain, cluster: Cluster, rows: int, overlap: bool, forwarded: bool
) -> None:
    rules = Rules(overlap=overlap, forwarded_skips=forwarded)
    best = min(
        evaluate(plan, chain, cluster, rows, rules).step_s
        for narrow in oracle.every_plan(len(chain.blocks), cluster, rows)
        for plan in with_widths(narrow, cluster)
    )
    planned = partition(chain, cluster, rows, overlap=overlap, forwarded_skips=forwarded)
    assert planned.proven
    assert planned.step_s == pytest.approx(best, rel=1e-9, abs=1e-12)


@pytest.mark.long
@settings(max_examples=2000)
@given(chains(most=5), clusters(most=4), st.integers(1, 4), st.booleans(), st.booleans(), st.booleans())
def test_the_plan_is_the_best_of_all_plans_on_thousands_of_problems(
    chain: Chain, cluster: Cluster, rows: int, overlap: bool, whole: bool, forwarded: bool
) -> None:
    check_against_all(chain, cluster, rows, overlap, whole, forwarded)


@pytest.mark.long
@settings(max_examples=60)
@given(chains(most=7), clusters(most=5), st.integers(1, 2), st.booleans(), st.booleans())
def test_the_plan_is_the_best_of_all_plans_of_seven_blocks_on_five_devices(
    chain: Chain, cluster: Cluster, rows: int, overlap: bool, whole: bool
) -> None:
    check_against_all(chain, cluster, rows, overlap, whole, forwarded=False)


@settings(max_examples=12)
@given(chains(most=7), clusters(most=5), st.integers(1, 12), st.booleans())
def test_the_plain_plans_are_never_better(chain: Chain, cluster: Cluster, rows: int, overlap: bool) -> None:
    try:
        planned = partition(chain, cluster, rows, overlap=overlap)
    except MemoryPlanError:
        return
    for other in planned.alternatives:
        assert other.plan is None or other.step_s >= planned.step_s * (1 - 1e-9)


@settings(max_examples=15)
@given(chains(most=6), st.integers(1, 8), st.booleans())
def test_a_mixed_cluster_is_never_slower_than_its_faster_kind_alone(chain: Chain, rows: int, flip: bool) -> None:
    fast = [Device(0, "fast", 40_000_000_000, 1.0)] * 2
    slow = [Device(1, "slow", 16_000_000_000, 0.4)] * 2
    if flip:
        fast, slow = [replace(d, machine=1) for d in fast], [replace(d, machine=0) for d in slow]
    mixed = tuple(slow + fast if flip else fast + slow)
    links = Links((Link(1e10), Link(1e10)), Link(1e9))
    alone = Cluster(tuple(replace(device, machine=0) for device in fast), Links((Link(1e10),)))
    assert partition(chain, Cluster(mixed, links), rows).step_s <= partition(chain, alone, rows).step_s * (1 + 1e-9)


def test_the_order_of_kinds_in_the_file_plays_no_part() -> None:
    chain = chain_of(8, weight=3e7)
    links = Links((Link(1e10), Link(1e10)), Link(1e9))
    fast, slow = Device(0, "fast", None, 1.0), Device(1, "slow", None, 0.4)
    one = Cluster((fast,) * 4 + (slow,) * 4, links)
    other = Cluster((replace(slow, machine=0),) * 4 + (replace(fast, machine=1),) * 4, links)
    assert partition(chain, one, 64).step_s == pytest.approx(partition(chain, other, 64).step_s, rel=1e-9)


@pytest.mark.parametrize("narrow", [32, 0])
@pytest.mark.parametrize(("machines", "devices", "weight"), [(1, 4, 3e7), (2, 2, 2e7), (2, 2, 2e6), (5, 1, 1e7)])
def test_a_search_that_does_not_try_everything_finds_what_trying_everything_finds(
    monkeypatch: pytest.MonkeyPatch, machines: int, devices: int, weight: float, narrow: int
) -> None:
    chain = chain_of(7, weight=weight, row_bytes=2e5)
    cluster = Cluster.uniform(machines, devices, None, Link(1e10), Link(1e9))
    proven = partition(chain, cluster, 12, micro_batches=6)
    monkeypatch.setattr(planner, "MOST_PLANS", 0)
    monkeypatch.setattr(planner, "NARROW", narrow)
    searched = partition(chain, cluster, 12, micro_batches=6)
    assert proven.proven and not searched.proven
    assert searched.lower_bound_s <= proven.step_s <= searched.step_s <= proven.step_s * 1.01


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
def test_the_number_of_stages_can_be_fixed(stages: int) -> None:
    for devices in (5, 12):
        planned = partition(chain_of(8), Cluster.uniform(1, devices, None, Link(1e10)), 16, stages=stages)
        assert len(planned.plan.stages) == stages


@pytest.mark.parametrize("replicas", [(2,), (3, 1), (1, 3), (2, 1, 1), (1, 2, 1), (7, 5)])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_replicas_micro_batches_and_schedule_can_be_fixed(replicas: tuple[int, ...], schedule: str) -> None:
    cluster = Cluster.uniform(1, 12, None, Link(1e10))
    planned = partition(chain_of(8), cluster, 14, replicas=replicas, micro_batches=7, schedule=schedule)
    assert tuple(stage.replicas for stage in planned.plan.stages) == replicas
    assert (planned.plan.micro_batches, planned.plan.schedule) == (7, schedule)


@pytest.mark.parametrize(
    ("fixed", "words"),
    [
        ({"stages": 9}, "stages=9 needs as many devices, the cluster has 4"),
        ({"stages": 4}, "chain.* has 3 blocks; ask for at most 3|has 3 blocks; ask for at most 3"),
        ({"stages": 2, "replicas": (1, 1, 1)}, "stages=2 but replicas"),
        ({"replicas": (3, 2)}, "need 5 devices, the cluster has 4"),
        ({"replicas": (0, 1)}, "replicas must be 1 or more"),
        ({"micro_batches": 9}, "micro_batches=9 but the batch has 8 rows"),
        ({"schedule": "zigzag"}, "schedule must be one of 1f1b, gpipe"),
        ({"in_flight": 3}, "in_flight must be 1 or 2"),
        ({"tensor": 8}, "tensor=8 needs as many devices"),
        ({"tensor": 2}, "tensor=2: .* has costs for tensor width 1 only"),
    ],
)
def test_a_fixed_part_that_cannot_be_had_is_an_error(fixed: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        partition(chain_of(3), Cluster.local(4), 8, **fixed)


def test_widths_that_no_cluster_of_this_size_can_have_are_left_out() -> None:
    wide = replace(chain_of(1).blocks[0].base, tensor=50_000)
    chain = replace(chain_of(3), blocks=tuple(replace(block, options=(wide,)) for block in chain_of(3).blocks))
    assert {stage.tensor for stage in partition(chain, Cluster.local(3), 8).plan.stages} == {1}


def test_no_rows_is_an_error() -> None:
    with pytest.raises(PlanError, match="rows must be 1 or more, got 0"):
        partition(chain_of(3), Cluster.local(4), 0)


@pytest.mark.parametrize("devices", [2, 8, 64])
def test_a_model_that_fits_nowhere_names_the_closest_plan_and_what_is_missing(devices: int) -> None:
    cluster = Cluster.uniform(1, devices, 0.05, Link(1e10))
    with pytest.raises(MemoryPlanError, match=r"closest has replicas .* needs .* GB but device \d+ has 50 MB"):
        partition(chain_of(4, weight=1e9), cluster, 8)


@pytest.mark.parametrize("devices", [4, 8, 40])
def test_memory_holds_at_every_moment(devices: int) -> None:
    chain = chain_of(12, weight=1e8, row_bytes=1e6)
    cluster = Cluster.uniform(1, devices, 1.7, Link(1e10))
    planned = partition(chain, cluster, 64)
    assert len(planned.plan.stages) > 1  # one device cannot hold twelve times 0.4 GB
    assert max(planned.memory_bytes) <= 1.7e9


def test_fewer_devices_than_given_are_used_where_that_is_faster() -> None:
    chain = chain_of(4, weight=1e9, per_row_s=1e-4, row_bytes=1e7)
    planned = partition(chain, Cluster.uniform(4, 1, None, None, Link(1e8)), 4)
    assert len(planned.plan.devices) == 1


def test_the_pipeline_is_repeated_on_every_machine_where_that_is_best() -> None:
    """Large activations stay inside the machines, and the heavy blocks are reduced by two and not by four."""
    light = NodeCost("light", Timing(0, 1e-3), Timing(0, 2e-3), 1e5, 1e5, 4e6, 4e6)
    heavy = replace(light, name="heavy", parameter_bytes=5e7, gradient_bytes=5e7)
    chain = Chain((light,) * 6 + (heavy,) * 2, tuple(Crossing(index, (index + 1,), 4e6) for index in range(7)))
    planned = partition(chain, Cluster.uniform(2, 4, None, Link(5e10), Link(2e8)), 256, overlap=False, micro_batches=16)
    assert planned.plan.placement == "repeated"
    assert {stage.replicas % 2 for stage in planned.plan.stages} == {0}


def test_tensor_parallel_groups_stay_inside_a_machine() -> None:
    block = chain_of(1).blocks[0]
    fast = replace(block.base, forward=Timing(0, 3e-4), backward=Timing(0, 6e-4), tensor=2, reduces=1, reduce_bytes=10)
    chain = replace(chain_of(6), blocks=tuple(replace(b, options=(fast,)) for b in chain_of(6).blocks))
    cluster = Cluster.uniform(4, 2, None, Link(1e11), Link(1e8))
    planned = partition(chain, cluster, 16)
    assert any(stage.tensor == 2 for stage in planned.plan.stages)
    for stage in planned.plan.stages:
        for at in range(0, len(stage.devices), stage.tensor):
            group = stage.devices[at : at + stage.tensor]
            assert len({cluster.devices[device].machine for device in group}) == 1


@settings(max_examples=6)
@given(chains(most=6, skips=False), st.integers(2, 6))
def test_more_of_anything_is_never_slower(chain: Chain, rows: int) -> None:
    base = Cluster.uniform(2, 2, 0.1, Link(1e9, 1e-3), Link(1e8, 2e-3))

    def planned(cluster: Cluster) -> float:
        try:
            return partition(chain, cluster, rows).step_s
        except MemoryPlanError:
            return float("inf")

    before = planned(base) * (1 + 1e-9)
    intra, inter = Link(1e9, 1e-3), Link(1e8, 2e-3)
    assert planned(Cluster.uniform(2, 2, 0.1, Link(2e9, 1e-3), inter)) <= before
    assert planned(Cluster.uniform(2, 2, 0.1, intra, Link(2e8, 2e-3))) <= before
    assert planned(Cluster.uniform(2, 2, 0.1, intra, Link(1e8, 1e-3))) <= before
    assert planned(Cluster.uniform(2, 2, 0.2, intra, inter)) <= before
    assert planned(Cluster.uniform(2, 2, 0.1, intra, inter, speed=2.0)) <= before


SAME = """
from efftra_fx.cluster import Cluster, Link
from efftra_fx.cost import Chain, Crossing, NodeCost, Timing
from efftra_fx.passes import partition as planner
from efftra_fx.passes.partition import partition
blocks = tuple(
    NodeCost(f"b{i}", Timing(0, 1e-3 * (1 + i % 3)), Timing(0, 2e-3 * (1 + i % 2)), 1e7, 1e7 * (i % 4), 1e5, 1e5)
    for i in range(14)
)
chain = Chain(blocks, tuple(Crossing(i, (i + 1,), 1e4 * (1 + i % 5)) for i in range(13)))
for cluster in (Cluster.uniform(2, 4, None, Link(1e10), Link(1e9)), Cluster.uniform(5, 8, None, Link(1e10), Link(1e9))):
    print(partition(chain, cluster, 32).plan.to_json())
"""


def test_the_plan_is_the_same_in_any_process_under_any_hash_seed() -> None:
    texts = set()
    for seed in ("0", "1", "12345"):
        done = subprocess.run(
            [sys.executable, "-c", SAME],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        )
        texts.add(done.stdout)
    assert len(texts) == 1 and "devices" in texts.pop()


def test_the_plan_reads_back_from_its_own_text() -> None:
    plan = partition(chain_of(6), Cluster.local(3), 8, stages=3).plan
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.stages[0].names[0] == "b0"


def test_a_time_limit_that_is_hit_is_said() -> None:
    chain = chain_of(30, weight=5e7, row_bytes=1e6)
    planned = partition(chain, Cluster.uniform(4, 4, None, Link(1e10), Link(1e8)), 64, limit_s=0.0)
    assert "time limit" in planned.limited
