"""Batch norms over all replicas, and over the whole batch, train as one device does."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import run_ranks
from rig import assert_close, lay_out
from torch import Tensor, fx, nn
from torch.nn.functional import cross_entropy

from efftra_fx import Cluster, CompiledModel, Link, compile
from efftra_fx.errors import BatchError, DeadlockError, HeaderError, PlanError, ReduceOrderError
from efftra_fx.passes.comm import operands_of
from efftra_fx.passes.differentiate import differentiate
from efftra_fx.passes.shard_segments import Segments, run_together
from efftra_fx.passes.synced import batch_norm
from efftra_fx.passes.verify import verify_programs
from efftra_fx.program import Backward, Forward, Load, micro_batch_rows
from efftra_fx.program_text import parse_programs, print_programs
from efftra_fx.runtime.simulate import Durations, simulate

CHANNELS = 4


def spread(rows: int, *shape: int) -> Tensor:
    """Return rows that differ in size, so that statistics of a part are not those of the whole."""
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, CHANNELS, *shape, generator=generator, dtype=torch.float64)
    return x * torch.linspace(0.2, 4, rows).view(-1, *(1 for _ in x.shape[1:])) + 3


def net(norm: nn.Module, dims: int) -> nn.Module:
    """Return a net with the norm twice; no bias stands before one, whose gradient would be nothing but rounding."""
    torch.manual_seed(1)
    kernels: list[nn.Module] = [nn.Conv1d(4, 4, 3, bias=False), nn.Conv2d(4, 4, 3, bias=False)]
    layers = [nn.Linear(4, 4, bias=False), *kernels, nn.Conv3d(4, 4, (1, 2, 2), bias=False)]
    again = copy.deepcopy(norm)
    for one in (norm, again):
        for parameter in one.parameters():
            nn.init.uniform_(parameter, 0.5, 1.5)
    last = nn.LazyLinear(3)
    return nn.Sequential(layers[dims], norm, nn.Tanh(), copy.deepcopy(layers[dims]), again, nn.Flatten(), last).double()


KINDS: dict[str, tuple[nn.Module, Tensor]] = {
    "rows alone": (nn.BatchNorm1d(4), spread(7)),
    "sequences": (nn.BatchNorm1d(4), spread(5, 8)),
    "images": (nn.BatchNorm2d(4), spread(5, 6, 6)),
    "images, channels last": (nn.BatchNorm2d(4), spread(5, 6, 6).to(memory_format=torch.channels_last)),
    "volumes": (nn.BatchNorm3d(4), spread(5, 2, 4, 4)),
    "nothing learnt or kept": (nn.BatchNorm2d(4, affine=False, track_running_stats=False), spread(5, 6, 6)),
    "an average of all batches": (nn.BatchNorm2d(4, momentum=None), spread(5, 6, 6)),
}


def start(
    kind: str, batch_norm: str, replicas: tuple[int, ...], ranks: int = 4, **fixed: Any
) -> tuple[CompiledModel, nn.Module, Tensor]:
    """Compile a kind for ranks of this process; return it with a twin of the model and the batch."""
    norm, x = KINDS[kind]
    model = net(copy.deepcopy(norm), x.ndim - 2)
    with torch.no_grad():
        model.eval()(x)  # makes the last layer
    model.train()
    program = compile(
        model,
        Cluster.local(ranks),
        example_inputs=(x,),
        example_target=torch.arange(len(x)) % 3,
        loss_fn=cross_entropy,
        costs="estimated",
        batch_norm=batch_norm,
        replicas=replicas,
        **fixed,
    )
    return program, copy.deepcopy(model), x


def train_both(program: CompiledModel, twin: nn.Module, x: Tensor, micro_batches: int = 1) -> None:
    """Take three AdamW steps as planned and on one device, micro-batches in order; hold everything equal."""
    target = torch.arange(len(x)) % 3
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (program, twin))
    for _ in range(3):
        loss = program.step(x, target=target)
        expected = torch.zeros((), dtype=x.dtype)
        for low, high in micro_batch_rows(len(x), micro_batches):
            part = cross_entropy(twin(x[low:high]), target[low:high]) * ((high - low) / len(x))
            part.backward()
            expected += part.detach()
        assert torch.allclose(loss, expected, rtol=1e-9)
        gradients = {n: p.grad for n, p in twin.named_parameters() if p.grad is not None}
        found = {n: p.grad for n, p in program.named_parameters() if p.grad is not None}
        assert_close(
            gradients, {n: g for n, g in found.items() if g.shape == gradients[n].shape}, 1e-9, "gradient", True
        )
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    assert_close(twin.state_dict(), program.state_dict(), 1e-8, "value")


@pytest.mark.parametrize("kind", KINDS)
def test_exact_statistics_train_as_one_device(kind: str) -> None:
    program, twin, x = start(kind, "exact", (2,))
    assert program.plan.micro_batches == 1 and not program.built.front.notes
    assert program.check(x, target=torch.arange(len(x)) % 3, repeats=1, show=False).matches
    first = copy.deepcopy(twin)
    train_both(program, twin, x)
    program.load_state_dict(first.state_dict())
    train_both(program.with_plan(lay_out(program.plan.blocks, (3, 1))), first, x)


@pytest.mark.parametrize("kind", ["images", "an average of all batches"])
def test_synced_statistics_are_those_of_one_device_running_the_micro_batches_in_order(
    kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    program, twin, x = start(kind, "synced", (2, 1), micro_batches=2)
    assert "statistics of 1, 4 are those of each micro-batch, as if one device ran" in capsys.readouterr().err
    first = copy.deepcopy(twin)
    train_both(program, twin, x, 2)
    program.load_state_dict(first.state_dict())
    other = program.with_plan(lay_out(program.plan.blocks, (2, 2), 3))
    train_both(other, first, x, 3)  # of the 5 rows the last micro-batch has one, and one replica none


def test_local_statistics_differ_and_a_check_says_why() -> None:
    program, _, x = start("images", "local", (2,))
    report = program.check(x, target=torch.arange(len(x)) % 3, show=False)
    assert not report.matches
    assert "those of each micro-batch on each replica" in str(report) and "'exact' for the whole batch's" in str(report)


def test_exact_statistics_hold_where_tensor_groups_cut_the_channels() -> None:
    program, twin, x = start("images", "exact", (2,), tensor=(2,))
    assert program.plan.stages[0].tensor == 2 and program.built.shares(0)
    train_both(program, twin, x)


def test_exact_statistics_hold_where_ranks_of_a_group_have_different_numbers_of_channels() -> None:
    program, twin, x = start("images", "exact", (2,), ranks=6, tensor=(3,))
    assert len({p.shape[0] for p in (program.built.tensors[r].parameters["0.weight"] for r in range(3))}) == 2
    train_both(program, twin, x)


def test_exact_statistics_hold_where_the_forward_is_computed_again() -> None:
    program, twin, x = start("images", "exact", (2, 1))
    plan = replace(program.plan, stages=tuple(replace(s, recompute=True) for s in program.plan.stages))
    train_both(program.with_plan(plan), twin, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_statistics_of_narrow_values_are_exact_to_their_rounding(dtype: torch.dtype) -> None:
    model = net(nn.BatchNorm2d(4), 2)
    x = spread(6, 6, 6)
    model(x)
    model.to(dtype)
    target = torch.arange(6) % 3
    options: dict[str, Any] = {"example_target": target, "loss_fn": cross_entropy, "costs": "estimated"}
    program = compile(
        model, Cluster.local(2), example_inputs=(x.to(dtype),), replicas=(2,), batch_norm="exact", **options
    )
    assert program.check(x.to(dtype), target=target, show=False).matches


def test_autocast_around_the_step_casts_as_on_one_device() -> None:
    model, x, target = net(nn.BatchNorm2d(4), 2), spread(6, 6, 6).float(), torch.arange(6) % 3
    model(x.double())
    model.float()
    options: dict[str, Any] = {"example_target": target, "loss_fn": cross_entropy, "costs": "estimated"}
    with torch.autocast("cpu", torch.bfloat16):
        program = compile(model, Cluster.local(2), example_inputs=(x,), replicas=(2,), batch_norm="exact", **options)
        loss = program.step(x, target=target)
        expected = cross_entropy(model(x), target)
    assert torch.allclose(loss, expected.detach(), rtol=1e-2)


def norm_graph(affine: bool, replicas: int) -> fx.GraphModule:
    """Return a graph of a norm over so many replicas: from values, gain, shift and running statistics."""
    graph = fx.Graph()
    x, weight, bias, mean, var = (graph.placeholder(name) for name in ("x", "weight", "bias", "mean", "var"))
    given = (weight, bias) if affine else (None, None)
    made = graph.call_function(batch_norm, (x, *given, mean, var, 0.3, 1e-5, replicas))
    items = [graph.call_function(lambda t, i: t[i], (made, i)) for i in (0, 3, 4)]
    graph.output(tuple(items))
    return fx.GraphModule({}, graph)


@settings(max_examples=12, deadline=None)
@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
    st.lists(st.integers(1, 3), max_size=2),
    st.booleans(),
    st.sampled_from([0.0, 3.0, 1e4]),
)
def test_uneven_parts_make_the_norm_of_the_whole(
    sizes: list[int], rest: list[int], affine: bool, middle: float
) -> None:
    if sum(sizes) == 1 and all(size == 1 for size in rest):
        sizes = [*sizes, 1]
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    whole = random(sum(sizes), 3, *rest) + middle
    vectors = [random(3), random(3), random(3), random(3).abs()]
    seed = random(sum(sizes), 3, *rest)
    x, *learnt = (t.clone().requires_grad_() for t in (whole, *vectors[:2]))
    running = [v.clone() for v in vectors[2:]]
    gain, shift = learnt if affine else (None, None)
    out = nn.functional.batch_norm(x, running[0], running[1], gain, shift, True, 0.3, 1e-5)
    out.backward(seed)
    forwards, backwards, parts = [], [], []
    for part in whole.split(sizes):
        made = differentiate(
            norm_graph(affine, len(sizes)),
            [part, *vectors],
            wrt=[True, affine, affine, False, False],
            grad_outputs=[True, False, False],
            weight_inputs=[False, affine, affine, False, False],
        )
        pieces = [Segments(p.name, p.graph, p.takes, p.gives, p.consumes) for p in (made.forward, made.backward)]
        forwards.append(pieces[0]([part.contiguous(), *vectors]))
        backwards.append(pieces[1])
    outcomes = run_together(forwards)
    parts = [s.contiguous() for s in seed.split(sizes)]
    back = run_together([b(stash, [g]) for b, (_, stash), g in zip(backwards, outcomes, parts, strict=True)])
    close: dict[str, Any] = {"rtol": 1e-9 * max(1.0, middle), "atol": 1e-9 * max(1.0, middle)}
    assert torch.allclose(torch.cat([outputs[0] for outputs, _ in outcomes]), out.detach(), **close)
    for outputs, _ in outcomes:
        assert torch.allclose(outputs[1], running[0], **close) and torch.allclose(outputs[2], running[1], **close)
    assert x.grad is not None
    assert torch.allclose(torch.cat([values[0] for values, _ in back]), x.grad, **close)
    for index, parameter in enumerate(learnt if affine else ()):
        assert parameter.grad is not None
        total = sum(weights[index] for _, weights in back)
        assert torch.allclose(total, parameter.grad, **close)


def test_more_than_one_micro_batch_is_refused_for_exact_statistics() -> None:
    with pytest.raises(PlanError, match=r"needs the whole batch in one micro-batch.*has 2.*use micro_batches=1"):
        start("images", "exact", (2,), micro_batches=2)
    program, *_ = start("images", "exact", (2,))
    with pytest.raises(PlanError, match="has 3 micro-batches"):
        program.with_plan(replace(program.plan, micro_batches=3))
    with pytest.raises(PlanError, match="batch_norm must be one of local, synced, exact, got 'global'"):
        start("images", "global", (2,))


def test_a_model_without_such_norms_is_divided_whatever_is_asked() -> None:
    x, target = torch.randn(6, 4, 5), torch.arange(6) % 3
    options: dict[str, Any] = {"example_target": target, "loss_fn": cross_entropy, "costs": "estimated"}
    model = nn.Sequential(nn.Linear(5, 5), nn.InstanceNorm1d(4), nn.Flatten(), nn.Linear(20, 3))
    program = compile(model, Cluster.local(2), example_inputs=(x,), batch_norm="exact", micro_batches=3, **options)
    assert program.plan.micro_batches == 3


def test_one_row_a_replica_is_enough_for_synced_rows_and_one_in_all_is_not() -> None:
    program, twin, x = start("rows alone", "synced", (3,), micro_batches=3)
    train_both(program, twin, x, 3)
    with pytest.raises(BatchError, match="'1' normalises over all replicas' rows, but rank . gets only row 0 of 1"):
        program.step(x[:1], target=torch.zeros(1, dtype=torch.int64))


def test_the_graph_of_synced_stages_run_in_one_process_is_the_step() -> None:
    program, _, x = start("images", "synced", (2, 1), micro_batches=2)
    graph, target = program.graph, torch.arange(len(x)) % 3
    operands = operands_of(graph, program.built.front.tensors, {"input": x, "target": target})
    loss, *buffers = graph(*operands)
    assert torch.allclose(program.step(x, target=target), loss.detach(), rtol=1e-12)
    state = program.state_dict()
    for name, value in zip(sorted(n for n in state if "running" in n or "tracked" in n), buffers, strict=True):
        assert torch.allclose(state[name].double(), value.double(), rtol=1e-12), name


def test_replicas_that_meet_in_another_order_or_say_that_they_do_not_are_caught() -> None:
    program, *_ = start("images", "synced", (2, 1), micro_batches=2)
    programs, wiring, plan = program.programs, program.wiring, program.plan
    assert parse_programs(print_programs(programs, wiring)) == (programs, wiring)
    works = [i for i in programs[0].instructions if isinstance(i, Load | Forward)]
    turned = tuple([*works[2:], *works[:2], *(i for i in programs[0].instructions if i not in works)])
    with pytest.raises((ReduceOrderError, DeadlockError)):
        verify_programs({**programs, 0: replace(programs[0], instructions=turned)}, wiring, plan)
    with pytest.raises(HeaderError, match="stage 0 is synced, but the program of rank 1 says otherwise"):
        verify_programs({**programs, 1: replace(programs[1], synced=False)}, wiring, plan)
    with pytest.raises(HeaderError, match="stage 0 is not synced"):
        verify_programs(programs, replace(wiring, synced=()), plan)


def test_simulated_replicas_wait_for_each_other() -> None:
    program, *_ = start("images", "synced", (2,), micro_batches=1)
    durations = Durations(lambda stage, rows: float(rows), lambda stage, rows: 2.0 * rows)  # 2 rows and 3 rows
    spans = simulate(program.programs, program.wiring, durations, lambda a, b: Link(1e9)).spans
    found = {(s.rank, type(s.instruction)): (s.start_s, s.end_s) for s in spans}
    for rank in (0, 1):
        assert found[rank, Forward] == (0.0, 3.0)
        assert found[rank, Backward] == (3.0, 9.0)


@pytest.mark.parametrize(("batch_norm", "replicas"), [("local", (2,)), ("synced", (1,))])
def test_the_planner_pays_for_exchanges(batch_norm: str, replicas: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4))]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(4 * 64, 3))
    x, target = torch.randn(512, 4, 8, 8), torch.arange(512) % 3
    cluster = Cluster.uniform(1, 2, intra=Link(1e9, 3e-4))
    options: dict[str, Any] = {"example_target": target, "loss_fn": cross_entropy, "costs": "estimated"}
    program = compile(model, cluster, example_inputs=(x,), stages=1, batch_norm=batch_norm, micro_batches=1, **options)
    assert tuple(stage.replicas for stage in program.plan.stages) == replicas


def train_here(kind: str, layouts: tuple[tuple[tuple[int, ...], int], ...]) -> list[dict[str, Tensor]]:
    """On a rank of its own: take three steps by each plan from the first weights; return the states.

    The norms are such as sync by themselves, and would refuse to on CPUs.
    """
    torch.set_num_threads(1)
    norm, x = KINDS[kind]
    model = nn.SyncBatchNorm.convert_sync_batchnorm(net(copy.deepcopy(norm), x.ndim - 2))
    with torch.no_grad():
        model.eval()(x)
    model.train()
    first, target = copy.deepcopy(model.state_dict()), torch.arange(len(x)) % 3
    options: dict[str, Any] = {
        "example_target": target,
        "loss_fn": cross_entropy,
        "costs": "estimated",
        "timeout": 60.0,
    }
    program = compile(model, Cluster.from_env(), example_inputs=(x,), stages=1, **options)
    states = []
    for replicas, micro_batches in layouts:
        program = program.with_plan(lay_out(program.plan.blocks, replicas, micro_batches))
        program.load_state_dict(first)
        optimizer = torch.optim.AdamW(program.parameters(), lr=1e-2)
        for _ in range(3):
            program.step(x, target=target)
            optimizer.step()
            optimizer.zero_grad()
        states.append(dict(program.state_dict()))
    return states


def test_ranks_of_their_own_train_with_synced_statistics_as_one_device() -> None:
    layouts = (((2, 1), 1), ((3,), 3), ((1, 2), 2))
    found = run_ranks(train_here, 3, "images", layouts, limit_s=200.0)
    norm, x = KINDS["images"]
    target = torch.arange(len(x)) % 3
    for index, (_, micro_batches) in enumerate(layouts):
        twin = net(copy.deepcopy(norm), x.ndim - 2)
        with torch.no_grad():
            twin.eval()(x)
        twin.train()
        optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-2)
        for _ in range(3):
            for low, high in micro_batch_rows(len(x), micro_batches):
                (cross_entropy(twin(x[low:high]), target[low:high]) * ((high - low) / len(x))).backward()
            optimizer.step()
            optimizer.zero_grad()
        for state in (one[index] for one in found):
            assert_close(twin.state_dict(), state, 1e-8, "value")


def test_norms_that_sync_by_themselves_are_synced_unless_another_way_is_asked_for() -> None:
    model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    forward, x = nn.SyncBatchNorm.forward, torch.randn(6, 4)
    ways: tuple[tuple[dict[str, Any], str], ...] = (({}, "synced"), ({"batch_norm": "exact"}, "exact"))
    for options, expected in ways:
        program = compile(
            model, Cluster.local(2), example_inputs=(x,), loss_fn=lambda y: y.sum(), costs="estimated", **options
        )
        assert program.built.front.statistics == expected
    assert nn.SyncBatchNorm.forward is forward
