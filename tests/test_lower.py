"""Plans become programs: what is sent where, when it is received, and what is reduced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies_programs import Case, cases

from efftra_fx.errors import PlanError
from efftra_fx.passes.lower import lower, plan_buckets
from efftra_fx.passes.verify import verify_programs
from efftra_fx.plan import Plan, Stage
from efftra_fx.program import (
    AllReduce,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Join,
    Load,
    Parameter,
    RankProgram,
    Recv,
    ReduceLoss,
    Send,
    Update,
    Value,
    Wiring,
    awaited_receives,
)
from efftra_fx.program_text import print_program, print_programs

COMPUTES = (Forward, Backward, BackwardInput, BackwardWeight)


def chain(stages: int, replicas: int = 1, micro_batches: int = 4, schedule: str = "1f1b", in_flight: int = 1) -> Case:
    """Equal stages in a row, one parameter each."""
    values = tuple(Value(f"x{s}", "float32", (1, 4), "rows", 0, s, (s + 1,), (True,)) for s in range(stages - 1))
    parameters = tuple(Parameter(f"w{s}", "float32", (4,), (s,), True) for s in range(stages))
    wiring = Wiring(stages, values, parameters, (True,) * stages, False)
    devices = (tuple(range(s * replicas, (s + 1) * replicas)) for s in range(stages))
    plan = Plan(tuple(Stage(s, s + 1, d) for s, d in enumerate(devices)), micro_batches, schedule, in_flight)
    return Case(wiring, plan, 2 * micro_batches * replicas, stages * replicas)


def encoder_decoder() -> Case:
    """Three stages on 2 + 1 + 1 ranks: the encoder's memory skips the middle, the table is tied to the head."""
    wiring = Wiring(
        stages=3,
        values=(
            Value("memory", "float32", (1, 8), "rows", 0, 0, (1, 2), (True, True)),
            Value("mask", "bool", (1, 3), "rows", 0, 0, (2,), (False,)),
            Value("hidden", "float32", (1, 8), "rows", 0, 1, (2,), (True,)),
        ),
        parameters=(
            Parameter("table.weight", "float32", (10, 8), (0, 2), True),
            Parameter("encoder.weight", "float32", (8, 8), (0,), True),
            Parameter("decoder.weight", "float32", (8, 8), (1,), True),
        ),
        backward=(True, True, True),
        joined=False,
    )
    plan = Plan((Stage(0, 1, (0, 1)), Stage(1, 2, (2,)), Stage(2, 3, (3,))), 2)
    return Case(wiring, plan, 5, 5)


def works(program: RankProgram) -> str:
    letters = {Forward: "F", Backward: "B", BackwardInput: "I", Join: "J"}
    text = []
    for one in program.instructions:
        if isinstance(one, Forward | Backward | BackwardInput):
            text.append(f"{letters[type(one)]}{one.micro_batch}")
        elif isinstance(one, BackwardWeight):
            text.append("W" + "".join(str(k) for k in one.micro_batches))
        elif isinstance(one, Join):
            text.append("J")
    return " ".join(text)


def test_one_stage_on_one_rank_needs_no_messages() -> None:
    case = chain(1, micro_batches=2)
    assert print_program(case.lower()[0]).splitlines()[1:] == [
        "  load s0 m0 [0:2]",
        "  forward s0 m0",
        "  backward s0 m0",
        "  load s0 m1 [2:4]",
        "  forward s0 m1",
        "  backward s0 m1",
        "  reduce_loss [0]",
        "  update",
    ]


def test_a_skip_a_mask_a_tied_table_and_an_idle_rank_print_as_ever(golden: Callable[[str, str], None]) -> None:
    case = encoder_decoder()
    golden("programs_encoder_decoder.txt", print_programs(case.lower(), case.wiring))


def test_a_joined_loss_prints_as_ever(golden: Callable[[str, str], None]) -> None:
    case = chain(2, micro_batches=2, schedule="gpipe")
    case = replace(case, wiring=replace(case.wiring, joined=True))
    golden("programs_joined.txt", print_programs(case.lower(), case.wiring))


@pytest.mark.parametrize(
    ("schedule", "in_flight", "lines"),
    [
        ("1f1b", 1, ["F0 F1 F2 B0 F3 B1 B2 B3", "F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"]),
        ("1f1b", 2, ["F0 F1 F2 F3 B0 B1 B2 B3", "F0 F1 F2 B0 F3 B1 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"]),
        ("gpipe", 1, ["F0 F1 F2 F3 B0 B1 B2 B3"] * 3),
    ],
)
def test_each_rank_works_in_the_order_of_the_schedule(schedule: str, in_flight: int, lines: list[str]) -> None:
    programs = chain(3, schedule=schedule, in_flight=in_flight).lower()
    assert [works(programs[rank]) for rank in range(3)] == lines


def test_the_loss_is_joined_between_forwards_and_backwards() -> None:
    case = chain(2, replicas=2, micro_batches=2, schedule="gpipe")
    programs = replace(case, wiring=replace(case.wiring, joined=True)).lower()
    assert [works(programs[rank]) for rank in range(4)] == ["F0 F1 B0 B1"] * 2 + ["F0 F1 J B0 B1"] * 2
    assert Join(1, (2, 3)) in programs[2].instructions


def test_a_batch_smaller_than_its_micro_batches_leaves_the_empty_ones_out() -> None:
    case = replace(chain(2, replicas=2, micro_batches=5), rows=3)
    programs = case.lower()
    verify_programs(programs, case.wiring, case.plan)
    # a micro-batch of one row belongs to the second replica: the first computes nothing and still reduces
    assert [works(programs[rank]) for rank in range(4)] == ["", "F0 F1 B0 F2 B1 B2", "", "F0 B0 F1 B1 F2 B2"]
    assert programs[0].instructions == (AllReduce(("w0",), (0, 1)), ReduceLoss((0, 1, 2, 3)), Update())


def test_nothing_goes_back_to_a_stage_without_anything_to_differentiate() -> None:
    case = chain(3)
    wiring = replace(case.wiring, backward=(False, True, True))
    programs = replace(case, wiring=wiring).lower()
    assert works(programs[0]) == "F0 F1 F2 F3"
    assert not any(isinstance(one, Recv) for one in programs[0].instructions)
    assert not any(isinstance(one, Send) and one.gradient for one in programs[1].instructions)


def test_weight_gradients_are_put_off_only_where_there_are_weights() -> None:
    case = replace(chain(2), defer_weights=3)
    frozen = tuple(replace(p, trainable=p.name != "w1") for p in case.wiring.parameters)
    programs = replace(case, wiring=replace(case.wiring, parameters=frozen)).lower()
    assert works(programs[0]) == "F0 F1 I0 F2 I1 F3 I2 W012 I3 W3"
    assert works(programs[1]) == "F0 B0 F1 B1 F2 B2 F3 B3"


def test_gradients_are_reduced_once_over_all_that_hold_them_late_stages_first() -> None:
    case = encoder_decoder()
    devices = tuple(stage.devices for stage in case.plan.stages)
    assert plan_buckets(case.wiring, devices, 10**6) == (
        AllReduce(("encoder.weight",), (0, 1)),
        AllReduce(("table.weight",), (0, 1, 3)),
    )


def test_buckets_hold_one_dtype_and_about_so_many_bytes_in_the_order_of_the_backward() -> None:
    def parameter(name: str, dtype: str, size: int) -> Parameter:
        return Parameter(name, dtype, (size,), (0,), True)

    names = [("a", "float32", 2), ("b", "float32", 1), ("c", "float16", 1), ("d", "float32", 9), ("e", "float32", 1)]
    wiring = Wiring(1, (), tuple(parameter(*one) for one in names), (True,), False)
    buckets = plan_buckets(wiring, ((0, 1),), 12)
    assert [bucket.parameters for bucket in buckets] == [("c",), ("e",), ("d",), ("b", "a")]


def test_frozen_parameters_and_lone_ranks_reduce_nothing() -> None:
    frozen = Parameter("w", "float32", (1,), (0,), False)
    assert plan_buckets(Wiring(1, (), (frozen,), (True,), False), ((0, 1),), 1) == ()
    trainable = replace(frozen, trainable=True)
    assert plan_buckets(Wiring(1, (), (trainable,), (True,), False), ((0,),), 1) == ()
    assert plan_buckets(Wiring(1, (), (trainable,), (False,), False), ((0, 1),), 1) == ()


REFUSED: list[tuple[Callable[[Case], object], str]] = [
    (lambda case: lower(replace(case.plan, stages=case.plan.stages[:1]), case.wiring, 8), "1 stages .* split into 2"),
    (lambda case: lower(case.plan, case.wiring, 0), "at least 1 row, got 0"),
    (lambda case: lower(case.plan, case.wiring, 8, defer_weights=0), "1 or more, got 0"),
    (lambda case: lower(case.plan, case.wiring, 8, ranks=1), "uses device 1 but there are 1 ranks"),
    (lambda case: lower(case.plan, case.wiring, 8, times=((1.0, 1.0),)), "each of 2 stages, got 1"),
    (lambda case: lower(case.plan, replace(case.wiring, joined=True), 8), "schedule is '1f1b'; use 'gpipe'"),
]


@pytest.mark.parametrize(("call", "words"), REFUSED)
def test_a_plan_that_does_not_fit_the_graph_is_refused(call: Callable[[Case], object], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        call(chain(2))


@given(st.integers(2, 5), st.integers(1, 3), st.integers(1, 12), st.integers(1, 2))
def test_receives_of_a_chain_stand_at_most_a_few_computations_early(
    stages: int, replicas: int, micro_batches: int, in_flight: int
) -> None:
    case = chain(stages, replicas, micro_batches, in_flight=in_flight)
    for program in case.lower().values():
        for at, receives in awaited_receives(program).items():
            for receive in receives:
                between = program.instructions[receive + 1 : at]
                early = sum(isinstance(one, COMPUTES) for one in between)
                assert early <= (2 if in_flight == 1 else 2 * stages)


def test_a_receive_stands_before_the_computation_that_runs_meanwhile() -> None:
    line = chain(2).lower()[1].instructions
    # while rank 1 computes micro-batch 0, rank 0 sends it micro-batch 1
    received = line.index(Recv("x0", 1, 2, 4, 0, "float32", (2, 4), False))
    assert received < line.index(Forward(1, 0)) < line.index(Load(1, 1, 2, 4))


@given(cases())
def test_lowering_is_the_same_every_time(case: Case) -> None:
    assert print_programs(case.lower(), case.wiring) == print_programs(case.lower(), case.wiring)


def test_times_move_receives_to_where_messages_really_arrive() -> None:
    case = chain(2)
    slow_first = replace(case, times=((3.0, 6.0), (1.0, 2.0)))
    slow_last = replace(case, times=((1.0, 2.0), (3.0, 6.0)))
    first, last = (print_program(one.lower()[1]) for one in (slow_first, slow_last))
    assert first != last
    for one in (slow_first, slow_last):
        verify_programs(one.lower(), one.wiring, one.plan)
