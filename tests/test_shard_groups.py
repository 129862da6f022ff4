"""Tensor groups of given widths stay inside machines, and what they exchange is told."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from efftra_fx import Cluster, Link, compile
from efftra_fx.api import CompiledModel
from efftra_fx.cluster import Device, Links
from efftra_fx.cost import Exchanged
from efftra_fx.errors import PlacementError
from efftra_fx.passes.shard_explain import exchanges, timed_exchanges
from efftra_fx.passes.shard_groups import leaves_machine, place_groups
from efftra_fx.runtime.simulate import Durations, simulate


def machines(*sizes: int, fast: int | None = None) -> Cluster:
    """Make machines of so many devices; the links inside one of them may be ten times as fast."""
    devices = tuple(Device(index, "cpu") for index, size in enumerate(sizes) for _ in range(size))
    intra = tuple(Link(1e11 if index == fast else 1e10) for index in range(len(sizes)))
    return Cluster(devices, Links(intra, Link(1e9)))


def can_be_packed(widths: list[int], rooms: list[int]) -> bool:
    """Say, by trying every subset for the first machine, whether groups fit into machines."""
    if not widths:
        return True
    if not rooms:
        return False
    places = range(len(widths))
    return any(
        sum(widths[i] for i in chosen) <= rooms[0]
        and can_be_packed([w for i, w in enumerate(widths) if i not in chosen], rooms[1:])
        for count in range(len(widths) + 1)
        for chosen in combinations(places, count)
    )


@given(
    st.lists(st.tuples(st.integers(1, 2), st.integers(1, 4)), min_size=1, max_size=3),
    st.lists(st.integers(1, 5), min_size=1, max_size=3),
)
def test_groups_are_placed_inside_machines_whenever_that_can_be(
    shapes: list[tuple[int, int]], sizes: list[int]
) -> None:
    cluster = machines(*sizes)
    widths = [width for replicas, width in shapes for _ in range(replicas)]
    if not can_be_packed(widths, sizes):
        with pytest.raises(PlacementError, match="do not fit inside the machines"):
            place_groups(shapes, cluster)
        return
    places = place_groups(shapes, cluster)
    assert [len(devices) for devices in places] == [replicas * width for replicas, width in shapes]
    used = [device for devices in places for device in devices]
    assert len(set(used)) == len(used)
    assert not any(leaves_machine(devices, width, cluster) for devices, (_, width) in zip(places, shapes, strict=True))


def test_groups_take_the_fastest_machine_first() -> None:
    assert place_groups([(1, 2), (1, 1)], machines(2, 3, fast=1)) == ((2, 3), (4,))


def test_a_group_that_would_straddle_goes_to_a_machine_with_room() -> None:
    assert place_groups([(1, 2), (1, 3)], machines(3, 2)) == ((3, 4), (0, 1, 2))


def compiled(cluster: Cluster, **options: Any) -> CompiledModel:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 8))
    x, y = torch.randn(8, 8), torch.randint(8, (8,))
    return compile(
        model, cluster, example_inputs=(x,), example_target=y, loss_fn=F.cross_entropy, costs="estimated", **options
    )


def test_a_plan_of_given_widths_keeps_groups_inside_machines_and_explains_itself() -> None:
    program = compiled(machines(3, 2), tensor=(2, 3), micro_batches=2)
    assert [stage.devices for stage in program.plan.stages] == [(3, 4), (0, 1, 2)]
    text = program.plan.explain()
    assert "step = " in text and "[predicted]" in text and "2 micro-batches in flight" in text
    assert "stage 0: ranks [3, 4], inside a machine, over 10 GB/s" in text
    assert "stage 1: ranks [0, 1, 2], inside a machine, over 10 GB/s" in text
    assert "parameters are cut" in text
    lines = text.splitlines()
    assert all(any(f"{way} of 4 row(s): " in line for line in lines) for way in ("forward", "backward"))
    assert type(program.plan).from_json(program.plan.to_json()).explain() == text


def test_widths_that_no_machine_has_room_for_are_refused() -> None:
    with pytest.raises(PlacementError, match="groups of 3, 2, 2 ranks do not fit .* which have 3, 3, 1 devices"):
        compiled(machines(3, 3, 1), tensor=(2, 3), replicas=(2, 1))


def test_a_wide_stage_of_a_model_is_simulated_with_its_own_exchanges() -> None:
    program = compiled(machines(2), tensor=(2,), micro_batches=2)
    sharded = program.built.back.sharded[0]
    assert sharded is not None

    def inside(stage: int, rows: int, backward: bool) -> tuple[Exchanged, ...]:
        return timed_exchanges(sharded, rows, backward)

    for backward in (False, True):
        found = inside(0, 4, backward)
        assert sorted((one.kind, one.size_bytes) for one in found) == sorted(
            (one.kind, one.size_bytes) for one in exchanges(sharded, 4) if one.backward == backward
        )
        assert [one.at for one in found] == sorted(one.at for one in found)
    assert inside(0, 4, False)
    durations = Durations(lambda stage, rows: 1.0, lambda stage, rows: 2.0, speed=(1.0, 0.5), exchanges=inside)
    timeline = simulate(program.programs, program.wiring, durations, machines(2).link)
    assert timeline.waiting_s(0) > 0.0 and timeline.waiting_s(1) == 0.0
    assert timeline.busy_s(0) == pytest.approx(2 * 3.0)
