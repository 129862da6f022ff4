"""Sound programs pass, and whatever passes computes what one device computes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mutate_programs import Programs, mutate
from program_oracle import OracleError, on_one_device, on_ranks
from strategies_programs import Case, cases
from wait_graph import can_end

from efftra_fx import errors
from efftra_fx.cluster import Cluster, Link
from efftra_fx.memory import Memory
from efftra_fx.passes.deadlock import SEMANTICS
from efftra_fx.passes.verify import verify_plan, verify_programs, verify_wiring
from efftra_fx.plan import Plan, Stage
from efftra_fx.program import (
    Instruction,
    Parameter,
    Value,
    Wiring,
)
from efftra_fx.program_text import parse_instruction, print_programs

EDITS = 8  # broken programs for each drawn case
LONG = 100_000


def a_case(**changes: object) -> Case:
    """Two stages, the first on ranks 0 and 1, the second on rank 2, and parameters of every kind."""
    wiring = Wiring(
        stages=2,
        values=(Value("x", "float32", (1, 4), "rows", 0, 0, (1,), (True,)),),
        parameters=(
            Parameter("tied", "float32", (4,), (0, 1), True),
            Parameter("twice", "float32", (4,), (0,), True),
            Parameter("lone", "float32", (4,), (1,), True),
            Parameter("frozen", "float32", (4,), (0,), False),
        ),
        backward=(True, True),
        joined=False,
    )
    plan = Plan((Stage(0, 1, (0, 1)), Stage(1, 2, (2,))), 2)
    return replace(Case(wiring, plan, rows=8, ranks=3), **changes)  # type: ignore[arg-type]


def joined_case() -> Case:
    case = a_case()
    return replace(case, wiring=replace(case.wiring, joined=True), plan=replace(case.plan, schedule="gpipe"))


def edited(programs: Programs, rank: int, edit: Callable[[list[Instruction]], object]) -> Programs:
    """Return the programs with `edit` done to the list of one rank's instructions."""
    line = list(programs[rank].instructions)
    edit(line)
    return {**programs, rank: replace(programs[rank], instructions=tuple(line))}


def rewritten(programs: Programs, rank: int, old: str, new: str | None) -> Programs:
    """Return the programs with one line of one rank rewritten to others, or dropped."""

    def edit(line: list[Instruction]) -> None:
        at = line.index(parse_instruction(old))
        line[at : at + 1] = [parse_instruction(one) for one in (new or "").splitlines()]

    return edited(programs, rank, edit)


def moved(programs: Programs, rank: int, text: str, before: str) -> Programs:
    """Return the programs with one line of one rank moved in front of another."""

    def edit(line: list[Instruction]) -> None:
        one = line.pop(line.index(parse_instruction(text)))
        line.insert(line.index(parse_instruction(before)), one)

    return edited(programs, rank, edit)


SEND = "send x m0 [0:2] -> 2 float32[2, 4]"
RECV = "recv x m0 [0:2] <- 0 float32[2, 4]"
LATE = "recv x m1 [4:6] <- 0 float32[2, 4]"

REWRITES: list[tuple[str, int, str, str | None, type[errors.VerifyError], str]] = [
    ("a receive without its send", 0, SEND, None, errors.UnmatchedReceiveError, "rank 0 lacks the send"),
    ("a send without its receive", 2, RECV, None, errors.UnmatchedSendError, "rank 2 lacks the receive"),
    ("a wrong peer", 0, SEND, SEND.replace("-> 2", "-> 1"), errors.PeerError, "peer 1, expected 2"),
    ("a wrong dtype", 0, SEND, SEND.replace("float32", "float64"), errors.DtypeError, "float64, expected float32"),
    ("a wrong shape", 2, RECV, RECV.replace("[2, 4]", "[2, 5]"), errors.ShapeError, r"\[2, 5\], expected \[2, 4\]"),
    ("wrong rows", 0, SEND, SEND.replace("0:2", "0:3"), errors.RowsError, r"\[0:3\], expected \[0:2\]"),
    ("an unknown value", 0, SEND, SEND.replace("x m0", "y m0"), errors.MessageError, "not asked for"),
    ("a load of wrong rows", 0, "load s0 m1 [4:6]", "load s0 m1 [4:7]", errors.LoadError, r"\[4:7\], expected \[4:6\]"),
    ("a missing load", 0, "load s0 m1 [4:6]", None, errors.OrderError, "before the load of micro-batch 1"),
    ("a missing forward", 2, "forward s1 m1", None, errors.OrderError, "before the forward of micro-batch 1"),
    ("a missing backward", 0, "backward s0 m1", None, errors.ReduceError, "before the backward of micro-batch 1"),
    ("a backward without weights", 0, "backward s0 m1", "backward_input s0 m1", errors.ReduceError, "micro-batch 1"),
    ("a forward instead", 0, "backward s0 m1", "forward s0 m1", errors.CellError, "for the second time"),
    ("another stage's forward", 0, "forward s0 m0", "forward s1 m0", errors.DeviceError, "serves one stage"),
    (
        "a group too small",
        0,
        "all_reduce [0, 1] twice",
        "all_reduce [0, 1, 2] twice",
        errors.ReduceError,
        r"expected \[0, 1\]",
    ),
    ("a gradient not reduced", 1, "all_reduce [0, 1, 2] tied", None, errors.ReduceError, "never reduces 'tied'"),
    ("a frozen one reduced", 0, "all_reduce [0, 1] twice", "all_reduce [0, 1] frozen", errors.ReduceError, "must not"),
    ("a loss not learned", 1, "reduce_loss [0, 1, 2]", None, errors.LossReductionError, "rank 1 lacks reduce_loss"),
    ("a loss of some", 1, "reduce_loss [0, 1, 2]", "reduce_loss [1, 2]", errors.LossReductionError, "expected all"),
    ("a load of nothing", 0, "load s0 m1 [4:6]", "load s0 m1 [4:6]\nload s0 m7 [0:1]", errors.LoadError, "has no rows"),
    ("a load twice", 0, "load s0 m1 [4:6]", "load s0 m1 [4:6]\nload s0 m1 [4:6]", errors.LoadError, "second time"),
    ("a forward of nothing", 0, "forward s0 m1", "forward s0 m1\nforward s0 m7", errors.CellError, "has no rows"),
    ("a send twice", 0, SEND, f"{SEND}\n{SEND}", errors.UnmatchedSendError, "has no receive any more"),
    ("a receive twice", 2, RECV, f"{RECV}\n{RECV}", errors.UnmatchedReceiveError, "has no send any more"),
    ("a loss twice", 1, "reduce_loss [0, 1, 2]", "reduce_loss [0, 1, 2]\n" * 2, errors.LossReductionError, "second"),
    ("a reduction twice", 1, "all_reduce [0, 1] twice", "all_reduce [0, 1] twice\n" * 2, errors.ReduceError, "second"),
    ("no update", 2, "update", None, errors.UpdateError, "lacks update"),
    ("a join for nothing", 2, "update", "join s1 [2]", errors.JoinError, "needs no join"),
]


@pytest.mark.parametrize(
    ("rank", "old", "new", "kind", "words"), [r[1:] for r in REWRITES], ids=[r[0] for r in REWRITES]
)
def test_one_wrong_line_is_named(
    rank: int, old: str, new: str | None, kind: type[errors.VerifyError], words: str
) -> None:
    case = a_case()
    with pytest.raises(kind, match=words):
        verify_programs(rewritten(case.lower(), rank, old, new), case.wiring)


MOVES: list[tuple[str, int, str, str, type[errors.VerifyError], str]] = [
    ("a send before its value", 0, SEND, "forward s0 m0", errors.OrderError, "before the forward of micro-batch 0"),
    ("a receive after its use", 2, LATE, "backward s1 m1", errors.OrderError, "before a receive that it needs"),
    ("an early reduction", 0, "all_reduce [0, 1] twice", "backward s0 m1", errors.ReduceError, "micro-batch 1"),
    ("an early loss", 2, "reduce_loss [0, 1, 2]", "forward s1 m1", errors.LossReductionError, "micro-batch 1"),
    ("an early update", 2, "update", "reduce_loss [0, 1, 2]", errors.UpdateError, "behind update"),
    (
        "reductions in another order",
        0,
        "all_reduce [0, 1, 2] tied",
        "all_reduce [0, 1] twice",
        errors.DeadlockError,
        "buffered",
    ),
    (
        "messages in another order",
        2,
        LATE,
        RECV,
        errors.MessageOrderError,
        "in the order in which they are sent",
    ),
]


@pytest.mark.parametrize(("rank", "text", "before", "kind", "words"), [m[1:] for m in MOVES], ids=[m[0] for m in MOVES])
def test_a_line_in_the_wrong_place_is_named(
    rank: int, text: str, before: str, kind: type[errors.VerifyError], words: str
) -> None:
    case = a_case()
    programs = case.lower()
    line = programs[rank].instructions
    if line.index(parse_instruction(text)) + 1 == line.index(parse_instruction(before)):
        text, before = before, text
    with pytest.raises(kind, match=words):
        verify_programs(moved(programs, rank, text, before), case.wiring)


def test_a_message_that_both_ends_forgot_is_named() -> None:
    case = a_case()
    programs = rewritten(rewritten(case.lower(), 0, SEND, None), 2, RECV, None)
    with pytest.raises(errors.MessageError, match="rank 0 lacks send x m0 .*, and rank 2 lacks its receive"):
        verify_programs(programs, case.wiring)


def alone(**changes: object) -> Case:
    """One stage on one rank."""
    wiring = Wiring(1, (), (Parameter("w", "float32", (4,), (0,), True),), (True,), False)
    return Case(replace(wiring, **changes), Plan((Stage(0, 1, (0,)),), 2, "gpipe"), 4, 1)  # type: ignore[arg-type]


LACKING: list[tuple[Case, tuple[str, ...], type[errors.VerifyError], str]] = [
    (
        alone(loss=False),
        ("load s0 m1 [2:4]", "forward s0 m1", "backward s0 m1"),
        errors.LoadError,
        "never loads rows",
    ),
    (alone(loss=False), ("forward s0 m1", "backward s0 m1"), errors.CellError, "lacks forward s0 m1"),
    (alone(), ("backward s0 m1",), errors.CellError, "lacks backward s0 m1"),
    (replace(alone(), defer_weights=2), ("backward_weight s0 m0 m1",), errors.CellError, "lacks backward_weight s0 m0"),
    (alone(joined=True, backward=(False,), loss=False), ("join s0 [0]",), errors.JoinError, "rank 0 lacks join s0"),
]


@pytest.mark.parametrize(("case", "dropped", "kind", "words"), LACKING, ids=[one[3] for one in LACKING])
def test_work_that_is_never_done_is_named(
    case: Case, dropped: tuple[str, ...], kind: type[errors.VerifyError], words: str
) -> None:
    programs = case.lower()
    for text in dropped:
        programs = rewritten(programs, 0, text, None)
    with pytest.raises(kind, match=words):
        verify_programs(programs, case.wiring)


def test_work_that_the_wiring_does_not_ask_for_is_named() -> None:
    programs = alone().lower()
    with pytest.raises(errors.CellError, match="stage 0 has nothing to differentiate"):
        verify_programs(programs, alone(backward=(False,)).wiring)
    with pytest.raises(errors.LossReductionError, match="no loss was asked for"):
        verify_programs(programs, alone(loss=False).wiring)
    with pytest.raises(errors.CellError, match="stage 0 has no trainable parameters"):
        verify_programs(replace(alone(), defer_weights=2).lower(), alone(parameters=()).wiring)


def test_members_that_meet_one_group_in_different_orders_are_named() -> None:
    case = a_case(bucket_bytes=1)
    twice = case.wiring.parameters[1]
    parameters = (*case.wiring.parameters, replace(twice, name="again"))
    case = replace(case, wiring=replace(case.wiring, parameters=parameters))
    programs = case.lower()
    first, second = "all_reduce [0, 1] again", "all_reduce [0, 1] twice"
    assert [parse_instruction(one) in programs[0].instructions for one in (first, second)] == [True, True]
    with pytest.raises(errors.ReduceOrderError, match="rank 0, instruction .* meets rank 1, instruction"):
        verify_programs(moved(programs, 1, second, first), case.wiring)


def test_a_bucket_of_two_dtypes_is_named() -> None:
    case = a_case()
    parameters = tuple(replace(p, dtype="float64") if p.name == "twice" else p for p in case.wiring.parameters)
    other = replace(case.wiring.parameters[1], name="again")
    case = replace(case, wiring=replace(case.wiring, parameters=(*parameters, other)))
    programs = case.lower()
    for rank in (0, 1):
        programs = rewritten(programs, rank, "all_reduce [0, 1] again", "all_reduce [0, 1] again, twice")
        programs = rewritten(programs, rank, "all_reduce [0, 1] twice", None)
    with pytest.raises(errors.DtypeError, match="mixes float32, float64"):
        verify_programs(programs, case.wiring)


def test_a_join_stands_between_the_forwards_and_the_backwards() -> None:
    case = joined_case()
    programs = case.lower()
    verify_programs(programs, case.wiring, case.plan)
    with pytest.raises(errors.JoinError, match="before the forward of micro-batch 1"):
        verify_programs(moved(programs, 2, "join s1 [2]", "forward s1 m1"), case.wiring)
    with pytest.raises(errors.JoinError, match="stands before join"):
        verify_programs(moved(programs, 2, "backward s1 m0", "join s1 [2]"), case.wiring)
    with pytest.raises(errors.JoinError, match="stands before join"):
        verify_programs(rewritten(programs, 2, "join s1 [2]", None), case.wiring)
    with pytest.raises(errors.JoinError, match="for the second time"):
        verify_programs(rewritten(programs, 2, "join s1 [2]", "join s1 [2]\njoin s1 [2]"), case.wiring)
    with pytest.raises(errors.LossReductionError, match="stands before join, which computes the loss"):
        verify_programs(moved(programs, 2, "reduce_loss [0, 1, 2]", "join s1 [2]"), case.wiring)
    with pytest.raises(errors.JoinError, match="expected stage 1 over its ranks"):
        verify_programs(rewritten(programs, 2, "join s1 [2]", "join s1 [1, 2]"), case.wiring)


def test_a_deadlock_says_where_each_rank_stands() -> None:
    case = a_case()
    programs = case.lower()
    programs = moved(programs, 2, LATE, "forward s1 m1")
    programs = moved(programs, 0, "send x m1 [4:6] -> 2 float32[2, 4]", "reduce_loss [0, 1, 2]")
    with pytest.raises(errors.DeadlockError, match=r"rank 2 waits at instruction \d+ \(forward s1 m1\)"):
        verify_programs(programs, case.wiring)


HEADS: list[tuple[str, dict[str, int | None], str]] = [
    ("rows", {"rows": 9}, "has 9 rows"),
    ("micro-batches", {"micro_batches": 3}, "in 3"),
    ("rank", {"rank": 5}, "says that it is of rank 5"),
    ("stage", {"stage": 7}, "there are 2 stages"),
    ("replica", {"replica": 0}, "both replica 0"),
    ("gap", {"replica": 2}, "without a gap"),
    ("idle", {"stage": None}, "says that it is replica 1"),
]


@pytest.mark.parametrize(("changes", "words"), [h[1:] for h in HEADS], ids=[h[0] for h in HEADS])
def test_heads_that_disagree_are_named(changes: dict[str, int | None], words: str) -> None:
    case = a_case()
    programs = case.lower()
    programs[1] = replace(programs[1], **changes)  # type: ignore[arg-type]
    with pytest.raises(errors.HeaderError, match=words):
        verify_programs(programs, case.wiring)


def test_programs_that_follow_another_plan_are_named() -> None:
    case = a_case()
    other = replace(case.plan, stages=(Stage(0, 1, (1, 0)), Stage(1, 2, (2,))))
    with pytest.raises(errors.HeaderError, match="the plan puts the stages on devices"):
        verify_programs(case.lower(), case.wiring, other)
    with pytest.raises(errors.HeaderError, match="4 micro-batches, but the programs 2"):
        verify_programs(case.lower(), case.wiring, replace(case.plan, micro_batches=4))
    with pytest.raises(errors.HeaderError, match="there are no programs"):
        verify_programs({}, case.wiring)


def test_a_wiring_that_goes_backward_or_forgets_an_owner_is_named() -> None:
    wiring = a_case().wiring
    value, tied = wiring.values[0], wiring.parameters[0]
    with pytest.raises(errors.EdgeError, match="'x' is produced in stage 1 but consumed in stage 0"):
        verify_wiring(replace(wiring, values=(replace(value, producer=1, consumers=(0,)),)))
    with pytest.raises(errors.EdgeError, match="'x' is produced in stage 1 but consumed in stage 1"):
        verify_wiring(replace(wiring, values=(replace(value, producer=1),)))
    with pytest.raises(errors.OwnerError, match="'tied' belongs to no stage"):
        verify_wiring(replace(wiring, parameters=(replace(tied, stages=()),)))
    with pytest.raises(errors.WiringError, match="'tied' is there 2 times"):
        verify_wiring(replace(wiring, parameters=(tied, tied)))
    with pytest.raises(errors.WiringError, match="names stage 2, but there are 2"):
        verify_wiring(replace(wiring, values=(replace(value, consumers=(2,)),)))
    with pytest.raises(errors.WiringError, match="lists a consumer twice"):
        verify_wiring(replace(wiring, values=(replace(value, consumers=(1, 1), gradients=(True, True)),)))


def unchecked(stages: tuple[Stage, ...]) -> Plan:
    """Return a plan that was never checked when it was made."""
    plan = Plan((Stage(0, 1, (0,)),), 1)
    object.__setattr__(plan, "stages", stages)
    return plan


def test_a_plan_has_each_block_once_and_each_device_once() -> None:
    cluster = Cluster.uniform(1, 2, intra=Link(1e9))
    good = unchecked((Stage(0, 2, (0,)), Stage(2, 3, (1,))))
    verify_plan(good, 3, cluster)
    with pytest.raises(errors.CoverageError, match="block 3 of 4 is in no stage"):
        verify_plan(good, 4)
    with pytest.raises(errors.CoverageError, match="stage 1 has block 2, but there are 2"):
        verify_plan(good, 2)
    with pytest.raises(errors.CoverageError, match="block 1 is in stage 0 and in stage 1"):
        verify_plan(unchecked((Stage(0, 2, (0,)), Stage(1, 3, (1,)))), 3)
    with pytest.raises(errors.CoverageError, match="do not follow the order"):
        verify_plan(unchecked((Stage(1, 2, (0,)), Stage(0, 1, (1,)))), 2)
    with pytest.raises(errors.DeviceError, match="device 0 is used by stage 0 and by stage 1"):
        verify_plan(unchecked((Stage(0, 1, (0,)), Stage(1, 2, (0,)))), 2)
    with pytest.raises(errors.DeviceError, match="uses device 2, but the cluster has 2"):
        verify_plan(unchecked((Stage(0, 1, (0,)), Stage(1, 2, (2,)))), 2, cluster)


def test_a_program_larger_than_its_device_is_named() -> None:
    case = a_case()
    programs = case.lower()
    # rank 0 holds 100 bytes, keeps 10 a row for 2 rows of 2 micro-batches, and receives a gradient of 32
    memory = Memory((172, 172, None), (100, 0), lambda stage, rows: 10 * rows)
    verify_programs(programs, case.wiring, memory=memory)
    with pytest.raises(
        errors.DeviceMemoryError, match=r"rank 0, instruction \d+ \(.*\) needs 172 B but the device has 171 B"
    ):
        verify_programs(programs, case.wiring, memory=replace(memory, limit_bytes=(171, 172, None)))
    with pytest.raises(errors.HeaderError, match="knows 1 ranks"):
        verify_programs(programs, case.wiring, memory=replace(memory, limit_bytes=(10,)))


def check_sound(case: Case) -> None:
    """Lowered programs pass, and compute what one device computes."""
    programs = case.lower()
    verify_programs(programs, case.wiring, case.plan)
    check_same(programs, case)


def check_same(programs: Programs, case: Case) -> None:
    """Every rank ends with every gradient it holds, and the loss, as one device has them."""
    gradients, loss = on_one_device(case.wiring, case.rows)
    found, losses = on_ranks(programs, case.wiring)
    for rank, program in programs.items():
        for parameter in case.wiring.parameters:
            if program.stage in parameter.stages and parameter.name in gradients:
                assert found[rank].get(parameter.name, 0) == gradients[parameter.name], (rank, parameter.name)
    assert losses == (dict.fromkeys(programs, loss) if case.wiring.loss else {})


def check_edits(case: Case, seed: int) -> Counter[str]:
    """Whatever the verifier accepts of broken programs computes the same and ends under every semantics."""
    programs, random = case.lower(), Random(seed)
    outcomes: Counter[str] = Counter()
    for _ in range(EDITS):
        broken = programs
        try:
            for _ in range(random.choice((1, 1, 1, 2, 3))):
                broken = mutate(broken, case.wiring, random)
            verify_programs(broken, case.wiring)
        except (errors.ProgramError, errors.VerifyError) as error:
            outcomes[type(error).__name__] += 1
            continue
        outcomes["accepted"] += 1
        try:
            check_same(broken, case)
        except OracleError as error:
            raise AssertionError(f"{error}\n{print_programs(broken, case.wiring)}") from error
        assert all(can_end(broken, semantics) for semantics in SEMANTICS), print_programs(broken, case.wiring)
    return outcomes


@settings(max_examples=500)
@given(cases())
def test_lowered_programs_are_sound_and_equal_one_device(case: Case) -> None:
    check_sound(case)


@settings(max_examples=400)
@given(cases(4, 9), st.integers(0, 2**32))
def test_no_edit_that_changes_the_result_slips_through(case: Case, seed: int) -> None:
    check_edits(case, seed)


def test_every_single_drop_double_and_swap_of_a_program_is_caught_or_the_same() -> None:
    for case in (a_case(), joined_case(), a_case(defer_weights=2)):
        programs = case.lower()
        for rank, program in programs.items():
            line = program.instructions
            edits = [line[:at] + line[at + 1 :] for at in range(len(line))]
            edits += [line[:at] + (line[at],) + line[at:] for at in range(len(line))]
            for at in range(len(line)):
                for to in range(at + 1, len(line)):
                    edits.append((*line[:at], line[to], *line[at + 1 : to], line[at], *line[to + 1 :]))
            for edit in edits:
                broken = {**programs, rank: replace(program, instructions=edit)}
                try:
                    verify_programs(broken, case.wiring)
                except errors.VerifyError:
                    continue
                check_same(broken, case)


@pytest.mark.long
@pytest.mark.timeout(0)
@settings(max_examples=LONG)
@given(cases(), st.integers(0, 2**32))
def test_a_hundred_thousand_cases_are_sound_and_no_edit_slips_through(case: Case, seed: int) -> None:
    check_sound(case)
    check_edits(case, seed)
