"""Stages that run through `torch.compile` give what generated code gives."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import ZOO
from ranks import run_ranks
from rig import Trained, assert_close, assert_same, lay_out, rig_of, train_planned
from torch import Tensor, nn

from efftra_fx import Cluster, CompiledModel, compile
from efftra_fx.errors import EmitError, PlanError
from efftra_fx.private import compilation_error

BACKEND = "aot_eager"  # differentiates and functionalises as inductor's front does, and generates no code


def of_zoo(name: str, cluster: Cluster, **options: Any) -> CompiledModel:
    example = ZOO[name]
    batch = example.data(12)
    return compile(
        example.build(),
        cluster,
        example_inputs=batch.args,
        example_kwargs=batch.kwargs,
        example_target=batch.target,
        loss_fn=example.loss_fn,
        costs="estimated",
        progress=False,
        **{"stages": 1, "replicas": (1,), "micro_batches": 1, "compile_stages": BACKEND, **options},
    )


@pytest.mark.parametrize(
    ("name", "shape", "micro_batches", "schedule"),
    [("mlp", (2, 1), 4, "1f1b"), ("mlp", (1, 1, 1), 7, "gpipe"), ("unet", (1, 2), 2, "1f1b")],
)
def test_they_train_as_one_device_does(name: str, shape: tuple[int, ...], micro_batches: int, schedule: str) -> None:
    program = of_zoo(name, Cluster.local(4))
    plan = lay_out(program.plan.blocks, shape, micro_batches, schedule, recompute=[False, True, False][: len(shape)])
    assert_same(rig_of(ZOO[name]).expected(13), train_planned(program.with_plan(plan), ZOO[name].data(13)))


def small(*between: nn.Module, **options: Any) -> tuple[CompiledModel, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), *between, nn.Linear(5, 3)).double()
    x, target = torch.randn(6, 4, dtype=torch.float64), torch.arange(6) % 3
    fixed = {"loss_fn": F.cross_entropy, "costs": "estimated", "progress": False, **options}
    return compile(model, Cluster.local(2), example_inputs=(x,), example_target=target, **fixed), x, target


def both(ways: tuple[bool | str, ...], *between: nn.Module, **options: Any) -> None:
    """Hold compiled stages against generated code."""
    results: list[tuple[float, Mapping[str, Tensor | None]]] = []
    for way in ways:
        program, x, target = small(*between, stages=1, replicas=(1,), micro_batches=2, compile_stages=way, **options)
        torch.manual_seed(1)
        loss = float(program.step(x, target=target))
        results.append((loss, {n: p.grad for n, p in program.named_parameters()}))
    assert results[1][0] == pytest.approx(results[0][0], rel=1e-12)
    for name, gradient in results[0][1].items():
        torch.testing.assert_close(results[1][1][name], gradient, rtol=1e-9, atol=1e-12)


def test_masks_that_any_plan_draws_are_those_of_code_that_is_not_compiled() -> None:
    both((False, BACKEND), nn.Dropout(0.5), rng="layout_free")


@pytest.mark.long
@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="inductor needs a C++ compiler")
def test_inductor_compiles_them(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._inductor.config

    monkeypatch.setattr(torch._inductor.config, "compile_threads", 1)  # leave no workers behind
    both((False, True), nn.Dropout(0.5), rng="layout_free")


def graphs() -> int:
    """Return how many graphs were compiled in this process so far."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def test_each_stage_is_compiled_once_for_equal_micro_batches_and_once_more_for_a_smaller_last_one() -> None:
    program = of_zoo("mlp", Cluster.local(2), stages=2, replicas=(1, 1), micro_batches=4)
    batch, before = ZOO["mlp"].data(12), graphs()
    for _ in range(3):
        program.step(*batch.args, target=batch.target)
    assert graphs() - before == 2 * 2  # forward and backward of two stages
    uneven = ZOO["mlp"].data(11)
    for _ in range(2):
        program.step(*uneven.args, target=uneven.target)
    assert graphs() - before == 2 * 2 * 2


def test_a_missing_compiler_is_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(EmitError, match="'no-such-compiler' was not found; install one, .*CXX.*aot_eager"):
        small(compile_stages=True)


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(EmitError, match="names no backend of torch.compile: 'fast'; they are .*aot_eager"):
        small(compile_stages="fast")
    with pytest.raises(PlanError, match="compile_stages must be True, False or a backend .* got 3"):
        small(compile_stages=3)


def test_a_stage_that_meets_other_ranks_is_refused() -> None:
    with pytest.raises(PlanError, match="stage 0 is several ranks wide, .* cannot be compiled; leave compile"):
        small(tensor=(2,), compile_stages=BACKEND)


def test_the_compilers_own_error_is_known() -> None:
    def breaks(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x

    with pytest.raises(compilation_error()):
        torch.compile(breaks, backend="eager", fullgraph=True)(torch.ones(1))


def train_here() -> tuple[Trained, dict[str, Any]]:
    torch.set_num_threads(1)
    program = of_zoo("mlp", Cluster.from_env(), stages=2, replicas=(1, 1), micro_batches=3, timeout=60.0)
    trained = train_planned(program, ZOO["mlp"].data(12))
    return trained, dict(program.state_dict())


def test_ranks_of_their_own_train_as_one_device_does() -> None:
    expected = rig_of(ZOO["mlp"]).expected(12)
    for trained, state in run_ranks(train_here, 2, limit_s=240.0):
        assert trained.losses == pytest.approx(expected.losses, rel=1e-9)
        assert_close(expected.gradients, trained.gradients, 1e-9, "gradient", some=True)
        assert_close(expected.parameters, {n: state[n] for n in expected.parameters}, 1e-8, "parameter")
