"""Programs of stages several ranks wide are sound, and unsound ones are caught."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies_programs import Case, cases

from efftra_fx.errors import HeaderError, PlanError, ReduceError, ReduceOrderError, VerifyError
from efftra_fx.passes.deadlock import find_deadlock
from efftra_fx.passes.lower import reduce_groups
from efftra_fx.passes.routes import find_routes, lay_out_cells
from efftra_fx.passes.verify import verify_programs
from efftra_fx.plan import Plan, Stage
from efftra_fx.program import AllReduce, BackwardWeight, Forward, Parameter, RankProgram, Value, Wiring
from efftra_fx.program_text import parse_program, print_program


@st.composite
def wide_cases(draw: st.DrawFn) -> Case:
    """Draw a case and make its stages wide, some synced; what several stages share has partial gradients."""
    case = draw(cases(max_stages=3, max_rows=7))
    widths = [draw(st.sampled_from((1, 2, 2, 3))) for _ in case.plan.stages]
    counts = [min(len(stage.devices), 2) * width for stage, width in zip(case.plan.stages, widths, strict=True)]
    order = iter(draw(st.permutations(range(sum(counts)))))
    stages = tuple(
        Stage(s, s + 1, tuple(next(order) for _ in range(count)), width)
        for s, (count, width) in enumerate(zip(counts, widths, strict=True))
    )
    parameters = tuple(
        replace(p, partial=any(widths[s] > 1 for s in p.stages) and (len(p.stages) > 1 or draw(st.booleans())))
        for p in case.wiring.parameters
    )
    synced = tuple(s for s, stage in enumerate(stages) if stage.replicas > 1 and draw(st.booleans()))
    wiring = replace(case.wiring, parameters=parameters, synced=synced)
    return replace(case, plan=replace(case.plan, stages=stages), wiring=wiring, ranks=sum(counts))


@settings(max_examples=40, deadline=None)
@given(wide_cases())
def test_lowered_programs_of_wide_stages_are_sound_and_print(case: Case) -> None:
    programs = case.lower()
    verify_programs(programs, case.wiring, case.plan)
    for program in programs.values():
        assert parse_program(print_program(program)) == program


@settings(max_examples=40, deadline=None)
@given(wide_cases())
def test_every_rank_gets_each_value_once_and_each_gradient_once(case: Case) -> None:
    devices = tuple(stage.devices for stage in case.plan.stages)
    widths = tuple(stage.tensor for stage in case.plan.stages)
    cells = lay_out_cells(devices, case.rows, case.plan.micro_batches, widths)
    routes = find_routes(case.wiring, cells)
    for value in (v for v in case.wiring.values if v.kind == "rows"):
        for consumer in value.consumers:
            mine = [r for r in routes if r.value is value and r.target.stage == consumer]
            for k, targets in enumerate(cells[consumer]):
                for target in targets:
                    rows = [(r.start, r.stop) for r in mine if r.forward and r.target == target]
                    assert sorted(i for a, b in rows for i in range(a, b)) == list(range(target.start, target.stop))
                for source in cells[value.producer][k] if case.wiring.returns_gradient(value, consumer) else ():
                    rows = [(r.start, r.stop) for r in mine if r.gradient and r.source == source]
                    assert sorted(i for a, b in rows for i in range(a, b)) == list(range(source.start, source.stop))


def two_wide(parameters: tuple[Parameter, ...] = ()) -> tuple[dict[int, RankProgram], Wiring, Plan]:
    value = Value("x", "float32", (4,), "rows", 0, 0, (1,), (True,))
    wiring = Wiring(2, (value,), parameters, (True, True), False)
    plan = Plan((Stage(0, 1, (0, 1, 2, 3), 2), Stage(1, 2, (4,))), 2)
    case = Case(wiring, plan, 4, 5)
    return case.lower(), wiring, plan


def test_shares_are_reduced_over_ranks_with_the_same_number() -> None:
    share = Parameter("w", "float32", (4,), (0,), True)
    programs, *_ = two_wide((share, replace(share, name="v", partial=True)))
    groups = {
        r: {i.parameters: i.ranks for i in programs[r].instructions if isinstance(i, AllReduce)} for r in programs
    }
    assert groups[0] == {("w",): (0, 2), ("v",): (0, 1, 2, 3)}
    assert groups[3] == {("w",): (1, 3), ("v",): (0, 1, 2, 3)}


def test_shared_parameters_of_a_wide_stage_must_have_partial_gradients() -> None:
    with pytest.raises(PlanError, match="gradients there must be partial sums"):
        reduce_groups(Parameter("w", "float32", (4,), (0, 1), True), ((0, 1), (2,)), (2, 1))


def test_members_of_a_tensor_group_that_compute_in_different_orders_are_caught() -> None:
    programs, wiring, plan = two_wide()
    lines = list(programs[1].instructions)
    first, second = (i for i, one in enumerate(lines) if isinstance(one, Forward))
    lines[first], lines[second] = lines[second], lines[first]
    loads = [i for i, one in enumerate(lines) if type(one).__name__ == "Load"]
    lines.insert(loads[0] + 1, lines.pop(loads[1]))
    with pytest.raises(VerifyError):
        verify_programs({**programs, 1: replace(programs[1], instructions=tuple(lines))}, wiring, plan)


def test_a_member_that_leaves_out_a_computation_holds_up_its_group() -> None:
    programs, wiring, plan = two_wide()
    short = tuple(one for one in programs[1].instructions if one != Forward(0, 1))
    changed = {**programs, 1: replace(programs[1], instructions=short)}
    assert find_deadlock(changed, "buffered")
    with pytest.raises(VerifyError):
        verify_programs(changed, wiring, plan)


def test_the_order_of_meetings_is_compared_before_anything_else_waits() -> None:
    from efftra_fx.passes.verify import _verify_meetings

    programs, wiring, _ = two_wide()
    works = [one for one in programs[1].instructions if isinstance(one, Forward)]
    turned = replace(programs[1], instructions=tuple(works[::-1]))
    with pytest.raises(ReduceOrderError, match="must compute the same"):
        _verify_meetings({**programs, 1: turned}, wiring, ((0, 1, 2, 3), (4,)), (2, 1))


def test_a_synced_stage_puts_off_no_weight_gradients() -> None:
    """Its replicas meet in each micro-batch, also where one has no rows of the next."""
    weights = tuple(Parameter(name, "float32", (1,), (stage,), True) for stage, name in enumerate("vw"))
    wiring = Wiring(2, (), weights, (True, True), False, synced=(0,))
    plan = Plan((Stage(0, 1, (0, 1)), Stage(1, 2, (2,))), 2)
    programs = Case(wiring, plan, rows=3, ranks=3, defer_weights=2).lower()
    verify_programs(programs, wiring, plan)
    late = {r: [one for one in p.instructions if isinstance(one, BackwardWeight)] for r, p in programs.items()}
    assert late == {0: [], 1: [], 2: [BackwardWeight(1, (0, 1))]}


def test_widths_other_than_the_plan_says_are_caught() -> None:
    programs, wiring, plan = two_wide()
    narrow = replace(plan, stages=(replace(plan.stages[0], tensor=1), plan.stages[1]))
    with pytest.raises(HeaderError, match=r"stages \(1, 1\) ranks wide, but the programs \(2, 1\)"):
        verify_programs(programs, wiring, narrow)


def test_a_share_reduced_over_a_whole_stage_is_caught() -> None:
    programs, wiring, plan = two_wide((Parameter("w", "float32", (4,), (0,), True),))
    wrong = {
        rank: replace(
            program,
            instructions=tuple(
                AllReduce(i.parameters, (0, 1, 2, 3)) if isinstance(i, AllReduce) else i for i in program.instructions
            ),
        )
        for rank, program in programs.items()
    }
    with pytest.raises(ReduceError, match=r"over ranks \[0, 1, 2, 3\], expected \[0, 2\]"):
        verify_programs(wrong, wiring, plan)
