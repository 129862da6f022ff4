"""Whatever model, cluster and plan are drawn: programs are proven sound, the simulator ends, the result is right."""

from __future__ import annotations

from functools import partial
from random import SystemRandom

import pytest
from hypothesis import Phase, given, note, seed, settings
from hypothesis import strategies as st
from rig import Rig, assert_close
from strategies import example_of_recipe, plans, recipes
from strategies_programs import clusters

from efftra_fx import verify
from efftra_fx.cluster import Cluster
from efftra_fx.passes import shard
from efftra_fx.passes.shard_choice import Prices
from efftra_fx.plan import Plan
from efftra_fx.runtime.simulate import Durations, simulate

RANKS = 6
PHASES = (Phase.generate,)  # to shrink a model takes minutes, and the note says it all
WIDEST = 4
LOTS, MODELS, PLANS = 2, 8, 63  # 1,008 cases


def one_case(rig: Rig, plan: Plan, cluster: Cluster, rows: int) -> None:
    """Prove, simulate and run one plan with a batch of so many rows."""
    program, batch = rig.first.with_plan(plan), rig.example.data(rows)
    expected = rig.expected(rows, 1)
    rig.model.zero_grad()
    loss = program.step(*batch.args)
    gradients = {n: p.grad for n, p in program.named_parameters() if p.grad is not None}
    assert abs(float(loss) - expected.losses[0]) <= 1e-9 * max(abs(expected.losses[0]), 1.0)
    assert_close(expected.gradients, gradients, 1e-9, "gradient")
    programs = program.programs
    assert {p.rows for p in programs.values()} == {rows}
    verify(programs, wiring=program.wiring, plan=plan)
    times = Durations(lambda stage, count: 0.1 * stage + count, lambda stage, count: 2.0 * count)
    timeline = simulate(programs, program.wiring, times, cluster.link)
    assert timeline.step_s > 0


@st.composite
def cases(draw: st.DrawFn, rig: Rig, widest: int) -> tuple[Plan, Cluster, int]:
    """Draw a plan, a cluster that it may run on, and a number of rows."""
    joined = not rig.first.built.front.tail.linear
    return draw(plans(rig.blocks, RANKS, joined, widest)), draw(clusters(RANKS)), draw(st.integers(1, 13))


def many_cases(data: st.DataObject, count: int, widest: int) -> None:
    """Capture one drawn model and run it by many drawn plans."""
    recipe = data.draw(recipes())
    rig = Rig(example_of_recipe(recipe), RANKS)
    for _ in range(count):
        plan, cluster, rows = data.draw(cases(rig, widest))
        try:
            one_case(rig, plan, cluster, rows)
        except Exception:
            note(f"{recipe!r}\n{plan!r}\n{rows} rows")
            raise


def lot_of_cases(lot: int, models: int, count: int, widest: int = 1) -> None:
    """Draw so many models and plans for each; each lot draws others, also where draws repeat from run to run."""
    start = lot if settings.default is not None and settings.default.derandomize else SystemRandom().getrandbits(32)

    @seed(start)
    @settings(max_examples=models, phases=PHASES)
    @given(st.data())
    def draw(data: st.DataObject) -> None:
        many_cases(data, count, widest)

    draw()


@pytest.mark.parametrize("lot", range(LOTS))
def test_any_plan_of_any_model_is_sound_and_equals_one_device(lot: int) -> None:
    lot_of_cases(lot, MODELS, PLANS)


@pytest.fixture
def free_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tiny layers be cut: they would be left whole, since sums cost more than they."""
    monkeypatch.setattr(shard, "Prices", partial(Prices, sum_s=0.0, summed_byte_s=1e-13))


@pytest.mark.usefixtures("free_sums")
def test_any_plan_with_tensor_groups_is_sound_and_equals_one_device() -> None:
    lot_of_cases(LOTS, 2, 8, WIDEST)


@pytest.mark.long
@pytest.mark.timeout(0)
@pytest.mark.usefixtures("free_sums")
@pytest.mark.parametrize("lot", range(10))
def test_ten_thousand_plans_with_tensor_groups_are_sound_and_equal_one_device(lot: int) -> None:
    lot_of_cases(LOTS + 1 + lot, 50, 20, WIDEST)


@pytest.mark.long
@pytest.mark.timeout(0)
@pytest.mark.parametrize("lot", range(100))
def test_a_hundred_thousand_cases_are_sound_and_equal_one_device(lot: int) -> None:
    lot_of_cases(LOTS + lot, 16, 63)
