"""Blocks of a tensor group are timed with their shares' shapes, once for what is equal, and kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from efftra_fx import Cluster, compile
from efftra_fx.api import CompiledModel
from efftra_fx.passes import measure_widths, time_blocks
from efftra_fx.passes.block_graphs import block_graphs
from efftra_fx.passes.measure_widths import cut_block
from efftra_fx.passes.shard_cost import width_costs


class Layers(nn.Module):
    """Equal residual pairs of a wide and a narrow layer."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(64, 257) for _ in range(count))
        self.down = nn.ModuleList(nn.Linear(257, 64) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(up(x).relu())
        return x


def program(costs: str = "measured", count: int = 4, **options: Any) -> CompiledModel:
    torch.manual_seed(0)
    x = torch.randn(8, 64)
    return compile(
        Layers(count),
        Cluster.local(2),
        example_inputs=(x,),
        example_target=torch.randn(8, 64),
        loss_fn=F.mse_loss,
        costs=costs,
        **options,
    )


def test_blocks_are_timed_as_one_rank_computes_them_once_for_equal_ones(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("EFFTRA_FX_CACHE", str(tmp_path))
    timed: list[list[tuple[int, ...]]] = []
    honest = time_blocks.time_run

    def spying(run: Any, rows: int, *rest: Any) -> Any:
        for item in run:
            if isinstance(item.make(rows), measure_widths._Alone):
                roles = [role for role in item.graph.stage.roles if role.kind == "parameter"]
                timed.append([tuple(item.example(role, rows).shape) for role in roles])
        return honest(run, rows, *rest)

    monkeypatch.setattr(time_blocks, "time_run", spying)
    made = program(tensor=(2,), micro_batches=2)
    shapes = {shape for shapes in timed for shape in shapes}
    assert {(129, 64), (64, 129)} <= shapes and not shapes & {(257, 64), (64, 257)}
    assert len(timed) < 2 * len(made.built.chain.blocks)  # two sizes a block, equal ones once
    chain = made.built.chain
    assert all(block.option(tensor=2) is not None for block in chain.blocks)
    count = len(timed)
    again = program(tensor=(2,), micro_batches=2)
    assert len(timed) == count  # from the disk
    assert [b.options for b in again.built.chain.blocks] == [b.options for b in chain.blocks]


def test_nothing_is_timed_where_costs_are_estimated_or_no_width_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: Any, **options: Any) -> Any:
        raise AssertionError("timed")

    monkeypatch.setattr(measure_widths, "time_blocks", never)
    program("estimated", tensor=(2,), micro_batches=2)
    program(count=1, tensor=(2,), replicas=(1,), micro_batches=2)
    program(count=1, cuts=("down.0",))


def test_a_cut_block_computes_with_shares_and_hands_on_what_lies_cut() -> None:
    made = program("estimated", tensor=(2,), micro_batches=2)
    front, chain = made.built.front, made.built.chain
    (cost,) = width_costs(front.gm, chain, {2})
    graphs = block_graphs(front.gm, len(chain.blocks), False)
    cuts = [cut_block(graph, cost.found, cost.choice) for graph in graphs]
    places = {name: str(place) for cut in cuts for name, place in cut.placed.items()}
    assert places["model.up.0.weight" if "model.up.0.weight" in places else "up.0.weight"].startswith("cut dim 0")
    values = [str(p) for cut in cuts for name, p in cut.placed.items() if p.cut is not None and "weight" not in name]
    assert any(place.startswith("cut dim 1") for place in values)  # hidden values cross blocks as shares
