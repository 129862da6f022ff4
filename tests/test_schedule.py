"""Orders of work are the known ones, keep few micro-batches in flight, and never wait for themselves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies_programs import Case, cases

from efftra_fx.errors import PlanError
from efftra_fx.passes.schedule import Work, order_of_work, stage_work, warm_up
from efftra_fx.plan import Plan, Stage
from efftra_fx.program import Value, Wiring

SHORT = {"forward": "F", "backward": "B", "backward_input": "I", "backward_weight": "W"}


def short(works: tuple[Work, ...]) -> str:
    return " ".join(SHORT[work.kind] + "".join(str(k) for k in work.micro_batches) for work in works)


def test_one_forward_one_backward_is_as_drawn_in_the_papers() -> None:
    lines = [short(stage_work(warm_up("1f1b", behind, 4), 4)) for behind in (3, 2, 1)]
    assert lines == ["F0 F1 F2 B0 F3 B1 B2 B3", "F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"]


def test_gpipe_does_all_forwards_first() -> None:
    assert short(stage_work(warm_up("gpipe", 1, 3), 3)) == "F0 F1 F2 B0 B1 B2"


def test_twice_in_flight_hides_slow_transfers_with_more_forwards() -> None:
    assert [warm_up("1f1b", behind, 9, in_flight=2) for behind in (3, 2, 1)] == [5, 3, 1]


def test_fewer_micro_batches_than_stages_are_all_warm_up() -> None:
    assert short(stage_work(warm_up("1f1b", 4, 2), 2)) == "F0 F1 B0 B1"


def test_weight_gradients_may_be_computed_apart_and_together() -> None:
    assert short(stage_work(2, 5, defer_weights=2)) == "F0 F1 I0 F2 I1 W01 F3 I2 F4 I3 W23 I4 W4"


def test_an_unknown_schedule_is_refused() -> None:
    with pytest.raises(PlanError, match="one of 1f1b, gpipe, got 'zb'"):
        warm_up("zb", 1, 1)
    with pytest.raises(PlanError, match="in_flight must be 1 or 2, got 3"):
        warm_up("1f1b", 1, 1, 3)


@given(st.sampled_from(("1f1b", "gpipe")), st.integers(1, 6), st.integers(1, 9), st.integers(1, 2), st.integers(1, 4))
def test_each_work_is_done_once_in_order_and_in_flight_is_bounded(
    schedule: str, behind: int, micro_batches: int, in_flight: int, defer_weights: int
) -> None:
    bound = warm_up(schedule, behind, micro_batches, in_flight)
    works = stage_work(bound, micro_batches, defer_weights)
    for kinds in (("forward",), ("backward", "backward_input"), ("backward", "backward_weight")):
        done = [k for work in works if work.kind in kinds for k in work.micro_batches]
        assert done == list(range(micro_batches))
    flying = most = 0
    for work in works:
        flying += {"forward": 1, "backward": -1, "backward_input": -1, "backward_weight": 0}[work.kind]
        assert flying >= 0
        most = max(most, flying)
    assert most == bound


def test_the_works_of_a_chain_line_up_in_time() -> None:
    values = tuple(Value(f"x{s}", "float32", (1,), "rows", 0, s, (s + 1,), (True,)) for s in range(2))
    wiring = Wiring(3, values, (), (True,) * 3, False)
    plan = Plan(tuple(Stage(s, s + 1, (s,)) for s in range(3)), 2)
    order = [f"{SHORT[work.kind]}{stage}.{work.micro_batches[0]}" for stage, work in order_of_work(plan, wiring, 2)]
    assert order == "F0.0 F0.1 F1.0 F1.1 F2.0 B2.0 F2.1 B1.0 B2.1 B0.0 B1.1 B0.1".split()


@given(cases())
def test_every_work_stands_behind_what_it_needs(case: Case) -> None:
    micro_batches = min(case.rows, case.plan.micro_batches)
    order = order_of_work(case.plan, case.wiring, micro_batches, case.times, case.defer_weights)
    forwards: set[tuple[int, int]] = set()
    backwards: set[tuple[int, int]] = set()
    for stage, work in order:
        for k in work.micro_batches:
            match work.kind:
                case "forward":
                    assert all((v.producer, k) in forwards for v in case.wiring.values if stage in v.consumers)
                    forwards.add((stage, k))
                case "backward" | "backward_input":
                    consumers = {c for v in case.wiring.values if v.producer == stage for c in v.consumers}
                    assert (stage, k) in forwards and all((c, k) in backwards for c in consumers)
                    backwards.add((stage, k))
                case "backward_weight":
                    assert (stage, k) in backwards
    everything = {(stage, k) for stage in range(case.wiring.stages) for k in range(micro_batches)}
    assert forwards == backwards == everything
    assert order == order_of_work(case.plan, case.wiring, micro_batches, case.times, case.defer_weights)
