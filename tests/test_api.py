"""What a user calls: compile, step, and what a compiled model shows of itself."""

from __future__ import annotations

import copy
import gc
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import ZOO, Batch, Example
from rig import assert_close, assert_same, lay_out, rig_of, train_eagerly, train_planned
from torch import Tensor, nn

from efftra_fx import Cluster, CompiledModel, Plan, compile, verify
from efftra_fx.errors import InputError
from efftra_fx.program_text import print_programs

MLP = ZOO["mlp"]


def compiled(model: nn.Module | None = None, **options: Any) -> CompiledModel:
    """Compile the small model for four ranks of this process."""
    batch = MLP.data(12)
    given: dict[str, Any] = {"loss_fn": MLP.loss_fn, "costs": "estimated", **options}
    return compile(
        MLP.build() if model is None else model,
        Cluster.local(4),
        example_inputs=batch.args,
        example_target=batch.target,
        **given,
    )


@cache
def wide() -> CompiledModel:
    """A program on three ranks, for tests that only look."""
    return rig_of(MLP).program(lay_out(4, (2, 1), 3))


def test_the_loop_of_a_single_device_script_trains_the_users_own_model() -> None:
    model = MLP.build()
    expected = train_eagerly(MLP, model, MLP.data(12))
    program = compiled(model, replicas=(2, 1), micro_batches=3)
    optimizer = torch.optim.AdamW(program.parameters(), lr=0.01)
    for _ in range(3):
        loss = program.step(*MLP.data(12).args, target=MLP.data(12).target)
        optimizer.step()
        optimizer.zero_grad()
    assert loss.shape == () and not loss.requires_grad and loss.dtype == torch.float64
    assert_close(expected.parameters, dict(model.named_parameters()), 1e-8, "parameter")


def test_without_examples_everything_happens_at_the_first_step() -> None:
    model = MLP.build()
    expected = train_eagerly(MLP, model, MLP.data(12))
    program = compile(
        model,
        Cluster.local(3),
        loss_fn=MLP.loss_fn,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        costs="estimated",
    )
    batch = MLP.data(12)
    losses = tuple(float(program.step(*batch.args, target=batch.target)) for _ in range(3))
    assert losses == pytest.approx(expected.losses, rel=1e-9)
    assert_close(expected.parameters, dict(model.named_parameters()), 1e-8, "parameter")
    assert all(p.grad is None for p in program.parameters())


def test_gradients_of_several_steps_add_up() -> None:
    rig = rig_of(MLP)
    program = rig.program(lay_out(4, (1, 1), 2))
    rig.model.zero_grad()
    for seed in (1, 2):
        batch = MLP.data(12, seed)
        program.step(*batch.args, target=batch.target)
    found = {n: p.grad for n, p in program.named_parameters() if p.grad is not None}
    twin = copy.deepcopy(rig.model)
    twin.zero_grad()
    for seed in (1, 2):
        MLP.loss(twin, MLP.data(12, seed)).backward()
    assert_close({n: p.grad for n, p in twin.named_parameters() if p.grad is not None}, found, 1e-9, "gradient")
    rig.model.zero_grad()


def test_parameters_are_the_models_own_in_its_order_and_under_its_names() -> None:
    program = wide()
    assert [(n, id(p)) for n, p in program.named_parameters()] == [
        (n, id(p)) for n, p in program.model.named_parameters()
    ]
    assert [id(p) for p in program.parameters()] == [id(p) for p in program.model.parameters()]


FIXED: dict[str, dict[str, Any]] = {
    "stages": {"stages": 3},
    "replicas": {"replicas": (1, 3)},
    "micro-batches": {"micro_batches": 5},
    "schedule": {"schedule": "gpipe", "stages": 2},
    "cuts": {"cuts": ("2", "6")},
    "cuts and replicas": {"cuts": ("4",), "replicas": (3, 1), "micro_batches": 2, "schedule": "gpipe"},
}


@pytest.mark.parametrize("what", FIXED)
def test_what_is_fixed_of_a_plan_is_kept_and_the_rest_is_searched(what: str) -> None:
    fixed = FIXED[what]
    plan = compiled(**fixed).plan
    assert len(plan.stages) == fixed.get("stages", len(plan.stages))
    assert tuple(stage.replicas for stage in plan.stages) == fixed.get(
        "replicas", tuple(s.replicas for s in plan.stages)
    )
    assert plan.micro_batches == fixed.get("micro_batches", plan.micro_batches)
    assert plan.schedule == fixed.get("schedule", plan.schedule)
    for path, stage in zip(fixed.get("cuts", ()), plan.stages[1:], strict=False):
        assert stage.names[0] == path


def test_a_plan_that_was_saved_is_the_plan_of_the_next_run(tmp_path: Path) -> None:
    plan = wide().plan
    plan.save(tmp_path / "plan.json")
    again = rig_of(MLP).first.with_plan(tmp_path / "plan.json")
    assert again.plan == plan and again.plan.stages[0].names == plan.stages[0].names
    edited = (tmp_path / "plan.json").read_text().replace('"micro_batches": 3', '"micro_batches": 6')
    (tmp_path / "plan.json").write_text(edited)
    assert compiled(plan=tmp_path / "plan.json").plan.micro_batches == 6


def test_another_plan_goes_on_from_the_weights_that_were_trained() -> None:
    rig = rig_of(MLP)
    expected = train_eagerly(MLP, rig.model, MLP.data(12), 6)
    program = rig.program(lay_out(4, (2, 1), 3))
    optimizer = torch.optim.AdamW(program.parameters(), lr=0.01)
    batch, losses = MLP.data(12), []
    for step in range(6):
        if step == 3:
            program = program.with_plan(lay_out(4, (1, 1, 1), 2, "gpipe"))
        losses.append(float(program.step(*batch.args, target=batch.target)))
        optimizer.step()
        optimizer.zero_grad()
    assert tuple(losses) == pytest.approx(expected.losses, rel=1e-8)


def test_plans_programs_and_their_text_are_verified_by_one_call() -> None:
    program = wide()
    verify(program)
    verify(program.plan)
    verify(program.plan, cluster=program.cluster)
    verify(program.programs, wiring=program.wiring, plan=program.plan)
    verify(print_programs(program.programs, program.wiring))


def test_a_model_that_draws_no_random_numbers_leaves_the_callers_alone() -> None:
    program = rig_of(MLP).program(lay_out(4, (1, 1), 2))
    batch = MLP.data(12)
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    program.step(*batch.args, target=batch.target)
    assert torch.equal(torch.rand(4), expected)


def test_gradients_are_clipped_by_the_norm_of_the_whole_model() -> None:
    rig = rig_of(MLP)
    batch = MLP.data(12)
    for norm_type in (2.0, 1.0, float("inf")):
        program = rig.program(lay_out(4, (2, 1, 1), 2))
        rig.model.zero_grad()
        program.step(*batch.args, target=batch.target)
        twin = copy.deepcopy(rig.model)
        twin.zero_grad()
        MLP.loss(twin, batch).backward()
        expected = torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.01, norm_type)
        found = program.clip_grad_norm_(0.01, norm_type)
        assert float(found) == pytest.approx(float(expected), rel=1e-9)
        gradients = {n: p.grad for n, p in twin.named_parameters() if p.grad is not None}
        assert_close(
            gradients, {n: p.grad for n, p in program.named_parameters() if p.grad is not None}, 1e-9, "clipped"
        )
    rig.model.zero_grad()


def test_a_step_inside_inference_mode_leaves_ordinary_gradients() -> None:
    rig = rig_of(MLP)
    batch = MLP.data(12)
    program = rig.program(lay_out(4, (1, 1), 2))
    with torch.inference_mode():
        inside = program.step(*(x.clone() for x in batch.args), target=batch.target)
        outputs = program.evaluate(*batch.args)
    for parameter in program.parameters():
        assert parameter.grad is not None and not parameter.grad.is_inference()
    rig.model.zero_grad()
    assert torch.equal(program.step(*batch.args, target=batch.target), inside)
    assert torch.equal(program.evaluate(*batch.args), outputs)
    rig.model.zero_grad()


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 1000.0, float("inf")])
def test_a_gradient_that_is_no_number_makes_every_norm_none(norm_type: float) -> None:
    rig = rig_of(MLP)
    program = rig.program(lay_out(4, (1, 1), 2))
    first, *_, last = program.parameters()
    first.grad, last.grad = torch.full_like(first, 1e9), torch.full_like(last, float("nan"))
    with pytest.raises(InputError, match="the total norm of the gradients is nan"):
        program.clip_grad_norm_(1.0, norm_type, error_if_nonfinite=True)
    assert program.clip_grad_norm_(1.0, norm_type).isnan()
    rig.model.zero_grad()


class Losing(nn.Module):
    """Returns its loss in one of the ways of libraries; a part is frozen, a part is never used."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.one, self.two, self.three = nn.Linear(6, 6), nn.Linear(6, 3), nn.Linear(6, 3)
        self.two.bias.requires_grad_(False)

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        logits = self.two(self.one(x).tanh())
        loss = F.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits} if self.how == "mapping" else loss


@pytest.mark.parametrize("how", ["mapping", "scalar"])
def test_the_models_own_loss_is_found_and_frozen_and_unused_parameters_get_no_gradient(how: str) -> None:
    def batch(rows: int) -> Batch:
        return Batch((torch.randn(rows, 6, dtype=torch.float64),), {"labels": torch.randint(0, 3, (rows,))})

    rig = rig_of(Example(how, lambda: Losing(how), batch))
    found = rig.found(lay_out(rig.blocks, (2, 1), 3), 13)
    assert_same(rig.expected(13), found)
    assert set(found.gradients) == {"one.weight", "one.bias", "two.weight"}
    assert torch.equal(found.parameters["two.bias"], rig.start["two.bias"])
    assert torch.equal(found.parameters["three.weight"], rig.start["three.weight"])


class Scored(nn.Module):
    """A loss with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output * self.scale, target)


def test_a_loss_that_is_a_module_has_its_parameters_trained_too() -> None:
    score = Scored()
    model = MLP.build()
    batch = MLP.data(12)
    program = compiled(model, loss_fn=score, stages=2, micro_batches=3)
    assert "loss_fn.scale" in dict(program.named_parameters())
    loss = program.step(*batch.args, target=batch.target)
    expected = score(model(*batch.args), batch.target)
    (gradient,) = torch.autograd.grad(expected, [score.scale])
    assert float(loss) == pytest.approx(float(expected.detach()), rel=1e-12)
    assert score.scale.grad is not None and float(score.scale.grad) == pytest.approx(float(gradient), rel=1e-9)


def test_ranks_that_the_plan_leaves_idle_learn_the_loss_too() -> None:
    program = rig_of(MLP).program(lay_out(4, (1,), 2))
    batch = MLP.data(12)
    results = program._run(*program._batch(batch.args, {}, batch.target), 0)
    assert set(results) == {0, 1, 2, 3}
    assert len({float(r.loss) for r in results.values() if r.loss is not None}) == 1


def test_the_report_says_what_each_part_of_the_compilation_took() -> None:
    table = rig_of(MLP).first.report.table()
    for part in ("trace", "check capture", "prove batch", "measure", "plan", "split", "total"):
        assert part in table
    assert "(measured)" in table


def test_a_searched_plan_says_why_it_was_chosen() -> None:
    program = compiled()
    assert program.plan.explain()
    again = compiled(plan=program.plan)
    for plan in (again.plan, compiled(cuts=("2", "4")).plan):
        assert plan.predicted_step_s is not None
        assert "this plan was given; no other was searched for\n  one device: " in plan.explain()
        sends = [line for line in plan.explain().splitlines() if line.startswith("stage") and "; sends " in line]
        assert len(sends) == len(plan.stages) - 1
    assert isinstance(program.plan, Plan) and program.plan.predicted_step_s is not None


def test_training_a_searched_plan_equals_training_on_one_device() -> None:
    program = compiled()
    expected = train_eagerly(MLP, program.model, MLP.data(12))
    assert_same(expected, train_planned(program, MLP.data(12)))


@pytest.mark.parametrize("fixed", [dict(stages=1, replicas=(2,)), dict(stages=2, replicas=(2, 1), micro_batches=2)])
def test_a_step_leaves_no_tensors_for_the_garbage_collector(fixed: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.randn(6, 2, dtype=torch.float64)
    program = compile(
        model,
        Cluster.local(3),
        example_inputs=(x,),
        example_target=y,
        loss_fn=nn.functional.mse_loss,
        costs="estimated",
        **fixed,
    )

    def tensors_after(steps: int) -> int:
        for _ in range(steps):
            program.step(x, target=y)
            for parameter in program.parameters():
                parameter.grad = None
        return sum(type(value) is Tensor for value in gc.get_objects())

    tensors_after(1)
    gc.collect()
    gc.disable()
    try:
        assert tensors_after(3) == tensors_after(3), "a cycle of references keeps gradients until a collection"
    finally:
        gc.enable()
