"""Widths are alternatives of the plan: worked out where they may win, and only there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from efftra_fx import Cluster, Link, compile
from efftra_fx.api import CompiledModel
from efftra_fx.cluster import Links
from efftra_fx.passes import measure_widths, shard_cost, time_blocks
from efftra_fx.passes.width_search import possible_widths


def planned(link: Link, width: int = 600, rows: int = 4, **options: Any) -> CompiledModel:
    """Plan large layers for a few rows: gradients are far more than what is computed with them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 16))
    if hook := options.pop("hook", None):
        dict(model.named_parameters())["2.weight"].register_hook(hook)
    cluster = options.pop("cluster", None) or Cluster.uniform(devices_per_machine=2, intra=link)
    x, y = torch.randn(rows, 16), torch.randn(rows, 16)
    options = {"costs": "estimated", **options}
    return compile(model, cluster, example_inputs=(x,), example_target=y, loss_fn=F.mse_loss, **options)


def test_links_far_below_ten_gigabytes_a_second_may_have_groups() -> None:
    plan = planned(Link(1e9, 1e-6), rows=64, width=1500).plan
    assert [stage.tensor for stage in plan.stages] == [2]
    assert "data parallelism alone: " in plan.explain()


def test_what_loses_by_its_bound_is_not_worked_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: Any, **options: Any) -> Any:
        raise AssertionError("worked out")

    monkeypatch.setattr(shard_cost, "choose", never)
    plan = planned(Link(1e6, 1e-2)).plan
    assert {stage.tensor for stage in plan.stages} == {1}


def test_only_widths_that_would_win_are_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Times stand still here: a block takes as long as a slow memory needs to read what goes into it."""
    monkeypatch.setenv("EFFTRA_FX_CACHE", str(tmp_path))
    timed: list[str] = []
    honest = time_blocks.time_blocks

    def spying(items: Any, *rest: Any) -> Any:
        timed.extend(item.name for item in items)
        return honest(items, *rest)

    def read(run: Sequence[time_blocks.Item], rows: int, *_: Any) -> list[time_blocks.Point]:
        seconds = [item.operand_bytes(rows) / 1e9 for item in run]
        return [
            time_blocks.Point(rows, s, 2 * s, item.make(rows).saved_bytes) for s, item in zip(seconds, run, strict=True)
        ]

    monkeypatch.setattr(time_blocks, "time_run", read)
    monkeypatch.setattr(measure_widths, "time_blocks", spying)
    local = Cluster.local(2)
    crawling = replace(local, links=Links((Link(1.0, 1.0),)))
    slow = planned(Link(1.0), cluster=crawling, costs="measured")
    assert not timed and {stage.tensor for stage in slow.plan.stages} == {1}
    fast = planned(Link(1.0), cluster=replace(local, links=Links((Link(1e12),))), costs="measured", rows=2, width=1500)
    assert timed and {stage.tensor for stage in fast.plan.stages} == {2}


def test_no_width_is_chosen_that_could_not_run() -> None:
    """Compiled stages cannot meet other ranks on their way, and hooks need whole gradients."""
    link = Link(1e9, 1e-6)
    compiled = planned(link, rows=64, width=1500, compile_stages=True).plan
    assert {stage.tensor for stage in compiled.stages} == {1}
    assert "no tensor groups: stages that meet other ranks on their way cannot be compiled" in compiled.explain()
    hooked = planned(link, rows=64, width=1500, hook=lambda gradient: gradient).plan
    assert {stage.tensor for stage in hooked.stages} == {1}
    assert "no tensor groups: hooks on parameters need whole gradients, and '2.weight' has some" in hooked.explain()


def test_widths_fill_machines() -> None:
    assert possible_widths(Cluster.uniform(2, 4, intra=Link(1e9), inter=Link(1e9))) == {2, 4}
    assert possible_widths(Cluster.uniform(1, 6, intra=Link(1e9))) == {2, 3, 6}
    assert possible_widths(Cluster.uniform(3, 1, inter=Link(1e9))) == set()
