"""Programs print short and stable, and what is printed is read back as the same data."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies_programs import Case, cases, wirings

from efftra_fx.errors import ProgramError
from efftra_fx.passes.verify import verify_programs
from efftra_fx.program import (
    AllReduce,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Instruction,
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
)
from efftra_fx.program_text import (
    parse_instruction,
    parse_program,
    parse_programs,
    print_instruction,
    print_program,
    print_programs,
    print_wiring,
)

COUNTS = st.integers(0, 10**6)
ROWS = st.tuples(COUNTS, st.integers(1, 10**6)).map(lambda pair: (pair[0], pair[0] + pair[1]))
NAMES = st.text(min_size=0, max_size=8) | st.sampled_from(
    ("a.b_1", "gradient", "m0", "0", "x y", 'a"b', "\\", "yes", "\n")
)
RANKS = st.sets(st.integers(0, 99), min_size=1, max_size=5).map(lambda ranks: tuple(sorted(ranks)))
SHAPES = st.lists(COUNTS, max_size=4).map(tuple)
MESSAGES = st.tuples(NAMES, COUNTS, ROWS, COUNTS, NAMES, SHAPES, st.booleans()).map(
    lambda t: (t[0], t[1], *t[2], *t[3:])
)
INSTRUCTIONS: st.SearchStrategy[Instruction] = st.one_of(
    st.tuples(COUNTS, COUNTS, ROWS).map(lambda t: Load(t[0], t[1], *t[2])),
    st.builds(Forward, COUNTS, COUNTS),
    st.builds(Backward, COUNTS, COUNTS),
    st.builds(BackwardInput, COUNTS, COUNTS),
    st.builds(BackwardWeight, COUNTS, st.lists(COUNTS, min_size=1, max_size=4).map(tuple)),
    MESSAGES.map(lambda t: Send(*t)),
    MESSAGES.map(lambda t: Recv(*t)),
    st.builds(AllReduce, st.lists(NAMES, min_size=1, max_size=4).map(tuple), RANKS),
    st.builds(Join, COUNTS, RANKS),
    st.builds(ReduceLoss, RANKS),
    st.just(Update()),
)

SHOWN: list[tuple[Instruction, str]] = [
    (Load(0, 1, 4, 8), "load s0 m1 [4:8]"),
    (Forward(0, 1), "forward s0 m1"),
    (Backward(2, 0), "backward s2 m0"),
    (BackwardInput(2, 0), "backward_input s2 m0"),
    (BackwardWeight(2, (0, 1)), "backward_weight s2 m0 m1"),
    (Send("x", 0, 0, 4, 3, "float32", (4, 16), False), "send x m0 [0:4] -> 3 float32[4, 16]"),
    (Recv("x", 0, 0, 4, 1, "float32", (), True), "recv x m0 [0:4] <- 1 float32[] gradient"),
    (AllReduce(("a.weight", "odd name"), (0, 2)), 'all_reduce [0, 2] a.weight, "odd name"'),
    (Join(1, (2, 3)), "join s1 [2, 3]"),
    (ReduceLoss((0, 1)), "reduce_loss [0, 1]"),
    (Update(), "update"),
]


@pytest.mark.parametrize(("instruction", "text"), SHOWN, ids=[type(one[0]).__name__ for one in SHOWN])
def test_an_instruction_is_one_short_line(instruction: Instruction, text: str) -> None:
    assert print_instruction(instruction) == text
    assert parse_instruction(text) == instruction


@given(INSTRUCTIONS)
def test_any_instruction_is_read_back(instruction: Instruction) -> None:
    text = print_instruction(instruction)
    assert parse_instruction(text) == instruction
    assert "\n" not in text and text.isascii()


@given(
    st.builds(
        RankProgram,
        COUNTS,
        st.integers(1, 99),
        st.integers(1, 99),
        st.none() | COUNTS,
        COUNTS,
        st.lists(INSTRUCTIONS, max_size=6).map(tuple),
    )
)
def test_any_program_is_read_back(program: RankProgram) -> None:
    assert parse_program(print_program(program)) == program


@given(wirings(), NAMES, NAMES)
def test_any_wiring_is_read_back(wiring: Wiring, name: str, dtype: str) -> None:
    value = Value(name, dtype, (2, 3), "whole", -1, 4, (), ())
    odd = Wiring(1, (value,), (Parameter(name, dtype, (), (), True),), (False,), True, False)
    assert parse_programs(print_wiring(wiring)) == ({}, wiring)
    assert parse_programs(print_wiring(odd)) == ({}, odd)


@given(cases(3, 6))
def test_a_dump_alone_can_be_verified(case: Case) -> None:
    programs = case.lower()
    text = "# a note\n\n" + print_programs(programs, case.wiring)
    read, wiring = parse_programs(text)
    assert (read, wiring) == (programs, case.wiring)
    assert print_programs(read, wiring) == text.partition("\n\n")[2]
    verify_programs(read, wiring)


TEXTS: list[tuple[Callable[[str], object], str, str]] = [
    (parse_instruction, "forwards s0 m0", "'forwards', which is not an instruction"),
    (parse_instruction, "forward s0", "ends too early"),
    (parse_instruction, "forward 0 m0", "expected s and a number but found '0'"),
    (parse_instruction, "forward s0 m0 m1", "found 'm1' after the end"),
    (parse_instruction, "load s0 m0 [0-4]", "expected ':' but found '-4'"),
    (parse_instruction, "load s0 m0 [4:4]", "hold nothing"),
    (parse_instruction, "send x m0 [0:4] <- 1 float32[]", "expected '->' but found '<-'"),
    (parse_instruction, "send x m0 [0:4] -> 1 float32[4 4]", "expected ',' but found '4'"),
    (parse_instruction, "send x m0 [0:4] -> one float32[4]", "expected a number but found 'one'"),
    (parse_instruction, "send 3 m0 [0:4] -> 1 float32[4]", "expected a name but found '3'"),
    (parse_instruction, r'send "\x" m0 [0:4] -> 1 float32[4]', "cannot read the name"),
    (parse_instruction, "all_reduce [0, 1] a; b", "cannot read '; b'"),
    (parse_instruction, "", "ends too early"),
    (parse_program, "forward s0 m0", "line 1: expected a line that starts with 'program'"),
    (parse_program, "", "expected the text of one program, found 0"),
    (parse_program, "program rank=0 stage=0 replica=0 rows=1 micro_batches=1\n  go", "line 2: 'go' starts with 'go'"),
    (parse_program, "program rank=0 stage=x replica=0 rows=1 micro_batches=1", "expected a number but found 'x'"),
    (parse_program, "program rank=0 replica=0", "line 1: expected 'stage' but found 'replica'"),
    (parse_programs, "", "expected a line that starts with 'wiring' but found 'nothing'"),
    (
        parse_programs,
        "wiring stages=1 backward=[maybe] joined=no loss=yes",
        "line 1: expected yes or no but found 'maybe'",
    ),
    (
        parse_programs,
        "wiring stages=1 backward=[no] joined=no loss=yes\n  thing x",
        "line 2: expected a value or parameter",
    ),
    (
        parse_programs,
        "wiring stages=1 backward=[no] joined=no loss=yes\n"
        + 2 * "program rank=0 stage=0 replica=0 rows=1 micro_batches=1\n",
        "rank 0 has two programs",
    ),
]


@pytest.mark.parametrize(("parse", "text", "words"), TEXTS)
def test_a_text_that_is_not_understood_is_refused(parse: Callable[[str], object], text: str, words: str) -> None:
    with pytest.raises(ProgramError, match=words.replace("[", r"\[")):
        parse(text)


@given(cases(3, 6), st.integers(0, 10**6), st.sampled_from('[]:,="x0 \n-'))
def test_a_damaged_text_is_refused_or_read_as_something_else(case: Case, at: int, letter: str) -> None:
    text = print_programs(case.lower(), case.wiring)
    at %= len(text)
    damaged = text[:at] + letter + text[at + 1 :]
    try:
        programs, wiring = parse_programs(damaged)
    except ProgramError:
        return
    assert parse_programs(print_programs(programs, wiring)) == (programs, wiring)
