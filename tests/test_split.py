"""Every node in exactly one stage, every crossing value with its contract, and all stages together the whole graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from models import ZOO, Batch, Example
from rig import Rig, rig_of
from strategies import example_of_recipe, recipes
from torch import Tensor, fx, nn

from efftra_fx.compiler import Front
from efftra_fx.errors import PlanError
from efftra_fx.meta import BLOCK, FREE, OUTPUTS, ROLE, STAGE
from efftra_fx.passes.split import AssignStages, StageGraph, split_stages, wire
from efftra_fx.program import Wiring

PHASES = (Phase.explicit, Phase.reuse, Phase.generate)


def split(front: Front, stops: tuple[int, ...]) -> tuple[tuple[StageGraph, ...], Wiring]:
    """Cut a captured step behind these blocks."""
    gm = AssignStages(stops)(front.gm)
    stages = split_stages(gm, len(stops))
    return stages, wire(gm, stages, not front.tail.linear)


def run_stages(front: Front, stages: tuple[StageGraph, ...], inputs: dict[str, Tensor]) -> list[Tensor]:
    """Run one stage after the other on the whole batch; return boundary and buffer values as the whole graph does."""
    values: dict[str, Any] = {}
    results: dict[str, Any] = {}
    for stage in stages:
        operands = []
        for role in stage.roles:
            if role.kind == "value":
                operands.append(values[role.name])
            else:
                operands.append(inputs[role.name] if role.kind == "input" else front.tensors[role.kind, role.name])
        outputs = stage.gm(*operands)
        names = (*stage.sends, *stage.boundaries, *stage.buffers)
        values.update(zip(names, outputs, strict=True))
        results.update(zip((*stage.boundaries, *stage.buffers), outputs[len(stage.sends) :], strict=True))
    return [results[name] for name in (*(b.name for b in front.tail.boundaries), *OUTPUTS[front.gm].buffers)]


def run_whole(front: Front, inputs: dict[str, Tensor]) -> list[Tensor]:
    """Run the graph before it was cut."""
    roles = [ROLE[n] for n in front.gm.graph.nodes if n.op == "placeholder"]
    operands = [inputs[r.name] if r.kind == "input" else front.tensors[r.kind, r.name] for r in roles]
    return list(front.gm(*operands))


class Skipping(nn.Module):
    """A skip over a stage, a weight used twice, a frozen weight, a detached value, and a value made of inputs alone."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.frozen = nn.Parameter(torch.randn(6), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        mask = (x > 0).double()
        first = self.a(x)
        second = self.b(first * mask) * self.frozen
        third = self.c(second.detach()) * mask
        return self.a(third + first)  # type: ignore[no-any-return]


SKIPPING = Example(
    "skipping", Skipping, ZOO["mlp"].batch, lambda output, target: F.mse_loss(output[:, 0], target.double())
)


def test_a_skip_a_tied_weight_a_detached_value_and_a_mask() -> None:
    front = rig_of(SKIPPING).first.built.front
    stages, wiring = split(front, (1, 2, 3, 4))
    nodes = {n.name: n for n in front.gm.graph.nodes}
    first, detached = (next(v for v in wiring.values if v.producer == producer) for producer in (0, 1))
    assert first.kind == "rows" and first.shape == (1, 6) and first.consumers == (1, 2)
    assert first.gradients == (False, True)  # b's result is detached, so only the skip brings a gradient back
    assert detached.consumers == (2,) and detached.gradients == (False,)
    for stage in stages:  # the mask is computed again where it is read, and never crosses
        assert not any(FREE[nodes[name]] for name in stage.sends)
    parameters = {p.name: p for p in wiring.parameters}
    assert parameters["a.weight"].stages == (0, 3) and parameters["a.weight"].trainable
    assert not parameters["frozen"].trainable
    assert parameters["b.weight"].stages == (1,) and not parameters["b.weight"].trainable  # behind the detach
    assert wiring.backward == (True, False, True, True)


def check_stages(front: Front, stops: tuple[int, ...]) -> None:
    """Hold the promises of a cut."""
    stages, wiring = split(front, stops)
    nodes = {n.name: n for n in front.gm.graph.nodes}
    owners: dict[str, list[int]] = {}
    for index, stage in enumerate(stages):
        stage.gm.graph.lint()
        for node in stage.gm.graph.nodes:
            if node.op == "call_function" and not FREE[node]:
                owners.setdefault(node.name, []).append(index)
        for role in stage.roles:
            if role.kind == "value":
                assert not FREE[nodes[role.name]]
    assert owners == {n.name: [STAGE[n]] for n in front.gm.graph.nodes if STAGE.on(n)}
    for value in wiring.values:
        assert all(consumer > value.producer for consumer in value.consumers)
        assert [value.name in {r.name for r in s.roles if r.kind == "value"} for s in stages] == [
            index in value.consumers for index in range(len(stages))
        ]
        example = nodes[value.name].meta["val"]
        sizes = [size for d, size in enumerate(example.shape) if value.kind != "rows" or d != value.dim]
        assert sizes == [size for d, size in enumerate(value.shape) if value.kind != "rows" or d != value.dim]
    boundaries = [name for stage in stages for name in stage.boundaries]
    assert sorted(boundaries) == sorted(b.name for b in front.tail.boundaries)


def check_equal(rig: Rig, stops: tuple[int, ...], rows: int) -> None:
    """Hold the stages together to the whole graph, values and gradients of the sum of all outputs."""
    front = rig.first.built.front
    stages, _ = split(front, stops)
    batch: Batch = rig.example.data(rows)
    names = front.captured.call.tensor_names
    tensors = [t for t in (*batch.args, *batch.kwargs.values(), batch.target) if isinstance(t, Tensor)]
    inputs = dict(zip(names, tensors, strict=True))
    ours, theirs = run_stages(front, stages, inputs), run_whole(front, inputs)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)


@settings(max_examples=4, phases=PHASES)
@given(st.data())
def test_any_cut_of_any_model_keeps_every_node_once_and_computes_the_same(data: st.DataObject) -> None:
    rig = Rig(example_of_recipe(data.draw(recipes())), 1)
    for _ in range(10):
        cuts = data.draw(st.sets(st.integers(1, max(rig.blocks - 1, 1)), max_size=rig.blocks - 1))
        stops = (*sorted(cut for cut in cuts if cut < rig.blocks), rig.blocks)
        check_stages(rig.first.built.front, stops)
        check_equal(rig, stops, data.draw(st.integers(1, 7)))


@pytest.mark.parametrize("name", ["unet", "lstm", "resnet"])
def test_a_cut_behind_every_block_computes_the_same(name: str) -> None:
    rig = rig_of(ZOO[name])
    stops = tuple(range(1, rig.blocks + 1))
    check_stages(rig.first.built.front, stops)
    check_equal(rig, stops, 5)


def test_the_encoders_memory_goes_straight_to_every_decoder_stage() -> None:
    front = rig_of(ZOO["t5"]).first.built.front
    blocks = rig_of(ZOO["t5"]).blocks
    _, wiring = split(front, tuple(blocks * (i + 1) // 6 for i in range(6)))
    memory = max(wiring.values, key=lambda value: len(value.consumers))
    assert len(memory.consumers) >= 2 and memory.kind == "rows" and all(memory.gradients)


def test_a_stage_without_a_node_is_refused() -> None:
    front = rig_of(ZOO["mlp"]).first.built.front
    gm = AssignStages((2, 4))(front.gm)
    with pytest.raises(PlanError, match="stage 2 has no node; use fewer stages"):
        split_stages(gm, 3)
    assert len(split_stages(gm, 3, allow_empty=True)) == 3


def test_the_stage_of_a_node_is_that_of_its_block() -> None:
    front = rig_of(ZOO["mlp"]).first.built.front
    gm: fx.GraphModule = AssignStages((1, 3, 4))(front.gm)
    for node in gm.graph.nodes:
        if BLOCK.on(node):
            assert STAGE[node] == (0, 1, 1, 2)[BLOCK[node]]
