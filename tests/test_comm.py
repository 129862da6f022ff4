"""The distributed graph of a whole plan, run in one process, equals the model."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import Phase, given, note, settings
from hypothesis import strategies as st
from models import NORMED, TWO_LAYERS, ZOO, Batch
from rig import Rig, assert_close, lay_out, rig_of
from strategies import example_of_recipe, plans, recipes
from torch import Tensor, fx

from efftra_fx import CompiledModel, ops
from efftra_fx.dump import print_graph
from efftra_fx.meta import OUTPUTS, ROLE
from efftra_fx.passes.comm import InsertComm, operands_of
from efftra_fx.passes.pipeline import run_passes
from efftra_fx.plan import Plan
from efftra_fx.signature import read_call

PHASES = (Phase.explicit, Phase.reuse, Phase.generate)


def graph_for(program: CompiledModel, rows: int) -> fx.GraphModule:
    """Return the distributed graph for a batch of so many rows."""
    front, back = program.built.front, program.built.back
    comm = InsertComm(back.plan, back.wiring, back.stages, front.tail, front.dims, rows, front.counters)
    return run_passes(front.gm, (comm,), ("role", "outputs", "stage"))


def call_graph(program: CompiledModel, gm: fx.GraphModule, batch: Batch) -> tuple[Tensor, ...]:
    """Call it with the model's own tensors."""
    call, tensors = read_call(program.model.forward, batch.args, batch.kwargs, batch.target)
    inputs = dict(zip(call.tensor_names, tensors, strict=True))
    results: tuple[Tensor, ...] = gm(*operands_of(gm, program.built.front.tensors, inputs))
    return results


def both(rig: Rig, plan: Plan, rows: int) -> tuple[tuple[Tensor, dict[str, Tensor]], tuple[Tensor, dict[str, Tensor]]]:
    """Return loss and gradients of the model, and those of the graph under autograd."""
    program, batch = rig.first.with_plan(plan), rig.example.data(rows)
    results = []
    for loss in (rig.example.loss(rig.model, batch), call_graph(program, graph_for(program, rows), batch)[0]):
        wanted = {n: p for n, p in rig.model.named_parameters() if p.requires_grad}
        found = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
        gradients = {n: g for n, g in zip(wanted, found, strict=True) if g is not None}
        results.append((loss.detach(), gradients))
    return results[0], results[1]


def assert_bits(rig: Rig, plan: Plan, rows: int) -> None:
    """Hold the graph's loss and gradients to the model's, bit for bit."""
    (loss, gradients), (found, others) = both(rig, plan, rows)
    assert torch.equal(loss, found)
    for name, gradient in gradients.items():
        assert torch.equal(gradient, others[name]), name


def assert_nearly(rig: Rig, plan: Plan, rows: int) -> None:
    """Hold the graph's loss and gradients to the model's but for the order of sums."""
    (loss, gradients), (found, others) = both(rig, plan, rows)
    assert abs(float(loss - found)) <= 1e-12 * max(abs(float(loss)), 1.0)
    assert_close(gradients, others, 1e-12, "gradient")


def test_a_layer_on_two_replicas_reads(golden: Callable[[str, str], None]) -> None:
    rig = rig_of(TWO_LAYERS)
    program = rig.program(lay_out(rig.blocks, (2, 1), 2))
    golden("insert-comm.txt", re.sub(r"\bs\d+\b", "rows", print_graph(program.graph, "insert-comm")))


@pytest.mark.parametrize("name", ZOO)
def test_with_one_replica_a_stage_and_no_cut_of_the_batch_it_equals_the_model_bit_for_bit(name: str) -> None:
    rig = rig_of(ZOO[name])
    for count in (1, 3):
        assert_bits(rig, lay_out(rig.blocks, (1,) * count), 12)


@pytest.mark.parametrize("name", [name for name in ZOO if name != "gpt2"])
def test_with_replicas_and_micro_batches_it_equals_the_model_but_for_the_order_of_sums(name: str) -> None:
    rig = rig_of(ZOO[name])
    assert_nearly(rig, lay_out(rig.blocks, (2, 1), 2), 13)
    assert_nearly(rig, lay_out(rig.blocks, (1, 3), 7), 12)


@settings(max_examples=4, phases=PHASES)
@given(st.data())
def test_for_any_model_and_plan_it_equals_the_model(data: st.DataObject) -> None:
    recipe = data.draw(recipes())
    rig = Rig(example_of_recipe(recipe), 6)
    joined = not rig.first.built.front.tail.linear
    for _ in range(12):
        plan, rows = data.draw(plans(rig.blocks, 6, joined)), data.draw(st.integers(1, 13))
        note(f"{recipe!r}\n{plan!r}\n{rows} rows")
        assert_nearly(rig, plan, rows)
        alone = replace(plan, stages=tuple(replace(s, devices=s.devices[:1]) for s in plan.stages), micro_batches=1)
        (loss, gradients), (found, others) = both(rig, alone, rows)
        assert torch.equal(loss, found)
        assert_close(gradients, others, 1e-12, "gradient")  # a value used twice has a sum for its gradient


def test_it_takes_the_models_placeholders_and_returns_loss_and_new_buffers() -> None:
    rig = rig_of(NORMED)
    program = rig.program(lay_out(rig.blocks, (1, 1), 3))
    gm = program.graph
    roles = [ROLE[n] for n in gm.graph.nodes if n.op == "placeholder"]
    assert [r.name for r in roles if r.kind == "parameter"] == [n for n, _ in rig.model.named_parameters()]
    assert [r.name for r in roles if r.kind == "input"] == ["input", "target"]
    written = ("1.num_batches_tracked", "1.running_mean", "1.running_var")
    assert OUTPUTS[gm].buffers == written
    buffers = {name: buffer.clone() for name, buffer in rig.model.named_buffers()}
    batch = NORMED.data(12)
    news = dict(zip(written, call_graph(program, gm, batch)[1:], strict=True))
    for name, buffer in rig.model.named_buffers():
        assert torch.equal(buffer, buffers[name])  # the graph itself writes nothing
    with torch.no_grad():  # one device, the same parts in order
        for rows in torch.arange(12).chunk(3):
            rig.model(batch.args[0][rows])
    for name, buffer in rig.model.named_buffers():
        torch.testing.assert_close(news[name].to(buffer.dtype), buffer, rtol=1e-12, atol=1e-12)


def test_every_send_has_its_recv_and_shared_parameters_are_replicated_once() -> None:
    rig = rig_of(ZOO["gpt2"])
    program = rig.program(lay_out(rig.blocks, (2, 1, 1), 2))
    nodes = list(program.graph.graph.nodes)
    sends = [n for n in nodes if n.target is ops.send]
    assert sends
    for node in sends:
        (user,) = node.users
        assert user.target is ops.recv and user.kwargs == node.kwargs
        assert node.kwargs["source"] != node.kwargs["target"]
    copies = [n for n in nodes if n.target is ops.replicate]
    names = [ROLE[n.args[0]].name for n in copies]
    assert len(names) == len(set(names))
    tied = next(n for n in copies if ROLE[n.args[0]].name == "transformer.wte.weight")
    assert tied.kwargs["ranks"] == (0, 1, 3)
    calls = [n for n in nodes if n.op == "call_module" and n.target != "tail"]
    assert len(calls) == 2 * (2 + 1 + 1)


def test_rows_go_straight_from_every_replica_to_the_replicas_that_need_them() -> None:
    rig = rig_of(ZOO["mlp"])
    program = rig.program(lay_out(rig.blocks, (1, 3), 1))
    pairs = [(n.kwargs["source"], n.kwargs["target"]) for n in program.graph.graph.nodes if n.target is ops.send]
    assert pairs == [(0, 1), (0, 2), (0, 3)]
