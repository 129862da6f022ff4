"""The planner picks tensor widths where they pay, and only there."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from efftra_fx import Cluster, Link, compile
from efftra_fx.api import CompiledModel
from efftra_fx.errors import MemoryPlanError
from efftra_fx.passes.shard_cost import with_tensor

MEGABYTE = 1e6


def planned(memory_bytes: float, link: Link, rows: int = 64, **options: Any) -> CompiledModel:
    """Plan one layer of 16 MB between small ones for a machine with two devices."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 2000), nn.ReLU(), nn.Linear(2000, 2000), nn.ReLU(), nn.Linear(2000, 8))
    cluster = Cluster.uniform(machines=1, devices_per_machine=2, memory_gb=memory_bytes / 1e9, intra=link)
    x, y = torch.randn(rows, 32), torch.randint(8, (rows,))
    return compile(
        model, cluster, example_inputs=(x,), example_target=y, loss_fn=F.cross_entropy, costs="estimated", **options
    )


FAST, SLOW = Link(1e11, 1e-6), Link(1e6, 1e-2)


def test_a_layer_too_large_for_a_device_is_cut() -> None:
    program = planned(50 * MEGABYTE, SLOW)
    assert [stage.tensor for stage in program.plan.stages].count(2) == 1
    text = program.plan.explain()
    assert ", 2 wide" in text and "ranks [0, 1], inside a machine" in text
    assert "data parallelism alone: does not fit the memory" in text
    assert "forward of 64 row(s): 1 gather of 512 kB" in text


def test_slow_links_keep_the_width_at_one_where_memory_allows() -> None:
    plan = planned(1000 * MEGABYTE, SLOW).plan
    assert all(stage.tensor == 1 for stage in plan.stages)
    assert "step = " in plan.explain() and "ranks [0, 1], inside a machine" not in plan.explain()
    assert "no tensor groups: over links of at most 0.001 GB/s inside machines, what they must sum" in plan.explain()


def test_fast_links_and_large_gradients_make_width_two_pay() -> None:
    program = planned(1000 * MEGABYTE, FAST, rows=2, micro_batches=1, stages=1)
    assert [stage.tensor for stage in program.plan.stages] == [2]


def test_where_the_width_stays_at_one_the_explanation_says_what_others_would_take() -> None:
    plan = planned(1000 * MEGABYTE, FAST, rows=512).plan
    assert [stage.tensor for stage in plan.stages] == [1]
    line = next(line for line in plan.explain().splitlines() if line.startswith("  2 wide: "))
    told = re.fullmatch(r"  2 wide: 1 stage\(s\) of 1 replica\(s\), at least ([0-9.]+) ms \(\+([0-9.]+)%\)", line)
    wide = planned(1000 * MEGABYTE, FAST, rows=512, tensor=(2,), micro_batches=plan.micro_batches).plan
    step = re.search(r"= ([0-9.]+) ms by the formula", wide.explain())
    assert told is not None and step is not None and plan.predicted_step_s is not None
    assert 0.98 * plan.predicted_step_s <= float(told[1]) / 1e3 <= float(step[1]) / 1e3
    assert float(told[2]) / 100 == pytest.approx(float(told[1]) / 1e3 / plan.predicted_step_s - 1, abs=1e-3)


def test_with_stages_fixed_the_explanation_speaks_of_as_many() -> None:
    text = planned(1000 * MEGABYTE, FAST, rows=512, stages=2).plan.explain()
    assert "2 wide: 1 stage(s)" not in text


def test_what_fits_no_device_and_no_width_is_refused() -> None:
    with pytest.raises(MemoryPlanError):
        planned(10 * MEGABYTE, FAST)


def test_a_given_width_is_priced_with_its_own_memory() -> None:
    wide, plain = (planned(1000 * MEGABYTE, FAST, tensor=(width,), micro_batches=1).plan for width in (2, 1))
    assert wide.stages[0].tensor == 2
    assert wide.memory_bytes[0] < 0.6 * plain.memory_bytes[0]


def test_options_divide_work_and_parameters_and_count_sums() -> None:
    program = planned(1000 * MEGABYTE, SLOW)
    chain = with_tensor(program.built.front.gm, program.built.chain, (2,))
    large = next(block for block in chain.blocks if block.parameter_bytes > 15 * MEGABYTE)
    option = large.option(tensor=2)
    assert option is not None
    assert option.parameter_bytes == pytest.approx(large.parameter_bytes / 2, rel=0.01)
    assert option.forward.per_row_s == pytest.approx(large.forward.per_row_s / 2, rel=0.1)
    assert sum(o.reduces for block in chain.blocks if (o := block.option(tensor=2)) is not None) >= 1
