"""Costs of blocks: equal blocks are timed once, what was measured is kept as data, nothing is below zero."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import TWO_LAYERS, ZOO, Example
from rig import rig_of
from torch import nn

from efftra_fx import Cluster, compile
from efftra_fx.compiler import Front
from efftra_fx.cost import CostTable, NodeCost, Timing
from efftra_fx.meta import BLOCK, STAGE
from efftra_fx.passes import time_blocks
from efftra_fx.passes.block_graphs import block_graphs
from efftra_fx.passes.blocks import chain_nodes
from efftra_fx.passes.measure import (
    cache_file,
    load_costs,
    measure_chain,
    measure_nodes,
    sample_rows,
    save_costs,
)

EQUAL = Example(
    "equal layers",
    lambda: nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(6, 6), nn.Tanh())), nn.Linear(6, 3)),
    ZOO["mlp"].batch,
    ZOO["mlp"].loss_fn,
)


def chain_of(front: Front, **options: Any) -> Any:
    """Measure the blocks of a captured step."""
    inputs = {name: (front.examples[name], dim) for name, dim in front.dims.items()}
    return measure_chain(front.gm, front.tensors, inputs, front.rows, joined=not front.tail.linear, **options)


def test_equal_blocks_are_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    front = rig_of(EQUAL).first.built.front
    timed: list[int] = []
    honest = time_blocks.time_run

    def spying(run: Any, rows: int, *rest: Any) -> Any:
        timed.extend([rows] * len(run))
        return honest(run, rows, *rest)

    monkeypatch.setattr(time_blocks, "time_run", spying)
    chain, table = chain_of(front, repeats=1)
    unique = len({graph.key for graph in block_graphs(front.gm, 5, False)})
    assert len(chain.blocks) == 5 and len(table.costs) == unique == 3  # first (no gradient to its input), middle, last
    assert sorted(timed) == sorted([*sample_rows(12)] * unique)
    assert [block.name for block in chain.blocks] == ["0", "2", "4", "6", "8"]
    assert chain.blocks[1].forward == chain.blocks[2].forward == chain.blocks[3].forward


def test_measured_times_are_times_and_bytes_are_the_models() -> None:
    front = rig_of(TWO_LAYERS).first.built.front
    chain, _ = chain_of(front, repeats=2)
    for block in chain.blocks:
        for timing in (block.forward, block.backward):
            assert timing.fixed_s >= 0 and timing.per_row_s >= 0 and timing.at(8) > 0
    assert [block.parameter_bytes for block in chain.blocks] == [8 * (12 + 2), 8 * (6 + 3)]
    (crossing,) = chain.crossings
    assert crossing.bytes_per_row == 16 and crossing.producer_block == 0 and crossing.consumer_blocks == (1,)


def test_what_is_known_is_not_timed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    front = rig_of(EQUAL).first.built.front
    first, table = chain_of(front, repeats=1)
    monkeypatch.setattr(time_blocks, "time_run", lambda *args: pytest.fail("timed again"))
    again, same = chain_of(front, repeats=1, known=table)
    assert again == first and same.costs == table.costs


def test_estimating_runs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    front = rig_of(TWO_LAYERS).first.built.front
    monkeypatch.setattr(time_blocks, "filled", lambda *args: pytest.fail("made a tensor to run"))
    chain, _ = chain_of(front, repeats=0)
    assert all(block.forward.at(4) > 0 for block in chain.blocks)
    assert chain.blocks[0].forward.at(8) == pytest.approx(2 * chain.blocks[0].forward.at(4))


def test_measuring_leaves_no_stage_behind() -> None:
    front = rig_of(TWO_LAYERS).first.built.front
    chain_of(front, repeats=0)
    assert not any(STAGE.on(node) for node in front.gm.graph.nodes)


def test_single_nodes_are_timed_on_request_and_the_blocks_stay() -> None:
    front = rig_of(TWO_LAYERS).first.built.front
    before = {node: BLOCK[node] for node in chain_nodes(front.gm)}
    inputs = {name: (front.examples[name], dim) for name, dim in front.dims.items()}
    table = measure_nodes(front.gm, front.tensors, inputs, front.rows, repeats=1)
    names = [node.name for node in before]
    assert [cost.name for cost in table.costs] == names
    assert {node: BLOCK[node] for node in chain_nodes(front.gm)} == before


def test_costs_are_kept_on_disk_as_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EFFTRA_FX_CACHE", str(tmp_path / "cache"))
    one, two = cache_file(["graph", "cpu"]), cache_file(["graph", "cuda"])
    assert one != two and one.parent == tmp_path / "cache" and one == cache_file(["graph", "cpu"])
    assert load_costs(one) is None
    table = CostTable("rows (2, 6)", (NodeCost("a", Timing(1e-5, 1e-6), Timing(2e-5, 3e-6), 64, 32, 16, 8),))
    save_costs(one, table)
    assert load_costs(one) == table and load_costs(two) is None
    assert [path.name for path in one.parent.iterdir()] == [one.name]
    for broken in ("", "{", "[]", one.read_text().replace("1e-05", "-1")):
        one.write_text(broken)
        assert load_costs(one) is None  # then it is measured again


def test_a_second_compilation_measures_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EFFTRA_FX_CACHE", str(tmp_path))
    batch = TWO_LAYERS.data(12)
    given: dict[str, Any] = {
        "example_inputs": batch.args,
        "example_target": batch.target,
        "loss_fn": TWO_LAYERS.loss_fn,
    }
    first = compile(TWO_LAYERS.build(), Cluster.local(2), **given)
    monkeypatch.setattr(time_blocks, "time_run", lambda *args: pytest.fail("timed again"))
    second = compile(TWO_LAYERS.build(seed=1), Cluster.local(2), **given)
    assert second.plan == first.plan
    assert list(tmp_path.glob("costs-*.json"))


@given(st.integers(1, 10_000))
def test_samples_have_two_sizes_and_never_one_row(rows: int) -> None:
    small, large = sample_rows(rows)
    assert 2 <= small < large and (rows < 6 or large <= rows)


seconds = st.floats(0, 10, allow_nan=False)


@given(st.integers(1, 50), seconds, st.integers(0, 50), seconds)
def test_a_line_through_two_times_is_never_below_zero_and_meets_the_larger(
    x0: int, y0: float, more: int, y1: float
) -> None:
    line = time_blocks.line(x0, y0, x0 + more, y1)
    assert line.fixed_s >= 0 and line.per_row_s >= 0
    assert line.at(x0 + more) == pytest.approx(y1, rel=1e-9, abs=1e-12)


def test_a_meta_tensor_is_filled_with_harmless_values() -> None:
    for dtype in (torch.float32, torch.int64, torch.bool, torch.complex64):
        tensor = time_blocks.filled(torch.empty(2, 3, dtype=dtype, device="meta").T, "cpu")
        assert tensor.shape == (3, 2) and tensor.stride() == (1, 3) and tensor.dtype == dtype
        assert bool((tensor == (0.5 if dtype.is_floating_point or dtype.is_complex else 0)).all())


class Made:
    """Functions that say when they are run."""

    saved_bytes = 40

    def __init__(self, name: str, said: list[str]) -> None:
        self.name, self.said = name, said

    def forward(self, operands: list[Any]) -> Any:
        self.said.append(f"{self.name} there")
        return [torch.zeros(2)], self.name

    def backward(self, saved: Any, gradients: list[Any], sums: Any, defer: bool) -> Any:
        assert saved == self.name and len(gradients) == 1
        self.said.append(f"{self.name} back")


def items_of(said: list[str], count: int = 3) -> list[time_blocks.Item]:
    """Blocks of a captured step, each with functions that only say when they are run."""
    front = rig_of(EQUAL).first.built.front
    graphs = block_graphs(front.gm, 5, False)[:count]
    return [
        time_blocks.Item(
            str(index),
            graph,
            lambda rows, index=index: Made(str(index), said),  # type: ignore[misc]
            lambda role, rows: torch.empty(rows, 10, device="meta"),
        )
        for index, graph in enumerate(graphs)
    ]


def test_blocks_are_timed_in_the_order_of_a_step() -> None:
    said: list[str] = []
    costs = time_blocks.time_blocks(items_of(said), (4, 8), "cpu", 1)
    once = ["0 there", "1 there", "2 there", "2 back", "1 back", "0 back"]
    assert said == once * 4  # two sizes, each once to warm up
    assert list(costs) == ["0", "1", "2"] and all(cost.saved_bytes == 5 for cost in costs.values())


def test_what_does_not_fit_at_once_is_timed_in_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    items = items_of([])
    size = 2 * items[0].operand_bytes(8)
    assert [len(run) for run in time_blocks.runs(items, 8, 3 * size)] == [3]
    assert [len(run) for run in time_blocks.runs(items, 8, 2 * size)] == [2, 1]
    assert [len(run) for run in time_blocks.runs(items, 8, 1)] == [1, 1, 1]
    said: list[str] = []
    monkeypatch.setattr(time_blocks, "HELD_BYTES", 1)
    shown: list[tuple[int, str]] = []

    def progress(steps: Any, label: str) -> Any:
        shown.append((len(steps), label))
        return steps

    time_blocks.time_blocks(items_of(said), (4, 4), "cpu", 0 + 1, progress)
    assert said[:4] == ["0 there", "0 back", "0 there", "0 back"] and shown == [(3, "measuring blocks")]
