"""Programs stand still exactly where somebody waits for what comes later."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mutate_programs import Programs
from strategies_programs import Case, cases
from wait_graph import can_end

from efftra_fx.errors import MessageError
from efftra_fx.passes.deadlock import SEMANTICS, describe_deadlock, find_deadlock
from efftra_fx.passes.expected import expect
from efftra_fx.passes.verify_messages import verify_messages
from efftra_fx.program import RankProgram
from efftra_fx.program_text import parse_instruction


def facing(first: tuple[str, ...], second: tuple[str, ...]) -> Programs:
    """Return two ranks that hold just these lines."""
    lines = {0: (*first, "update"), 1: (*second, "update")}
    return {
        rank: RankProgram(rank, 1, 1, rank, 0, tuple(parse_instruction(text) for text in line))
        for rank, line in lines.items()
    }


OUT, IN = "send x m0 [0:1] -> 1 float32[1]", "recv x m0 [0:1] <- 0 float32[1]"
BACK, FROM = "send x m0 [0:1] -> 0 float32[1] gradient", "recv x m0 [0:1] <- 1 float32[1] gradient"


@pytest.mark.parametrize(
    ("first", "second", "stuck"),
    [
        ((OUT, FROM), (IN, BACK), ()),
        ((FROM, OUT), (IN, BACK), ("paired",)),
        ((OUT, FROM), (BACK, IN), ("rendezvous", "paired")),
        ((FROM, "load s0 m0 [0:1]", OUT), (IN, "load s1 m0 [0:1]", BACK), ("paired", "batched")),
        ((FROM, "backward s0 m0", OUT), (IN, "forward s1 m0", BACK), SEMANTICS),
    ],
    ids=["one order", "receive first", "send first", "early receives on both sides", "a circle"],
)
def test_facing_messages_end_or_not_as_messages_behave(
    first: tuple[str, ...], second: tuple[str, ...], stuck: tuple[str, ...]
) -> None:
    programs = facing(first, second)
    assert tuple(semantics for semantics in SEMANTICS if find_deadlock(programs, semantics)) == stuck


def test_a_deadlock_is_told_by_rank_and_instruction() -> None:
    programs = facing((FROM, "backward s0 m0", OUT), (IN, "forward s1 m0", BACK))
    stuck = find_deadlock(programs, "buffered")
    assert stuck == ((0, 1), (1, 1))
    assert describe_deadlock(programs, stuck) == (
        "rank 0 waits at instruction 1 (backward s0 m0); rank 1 waits at instruction 1 (forward s1 m0)"
    )


@settings(max_examples=150)
@given(cases(3, 6), st.integers(0, 2**32))
def test_a_deadlock_is_a_cycle_of_waiting(case: Case, seed: int) -> None:
    programs, random = case.lower(), Random(seed)
    for _ in range(8):
        broken = programs
        for _ in range(random.choice((0, 1, 2, 4))):
            rank = random.choice(sorted(programs))
            line = list(broken[rank].instructions)
            at = random.randrange(len(line))
            line.insert(max(0, at + random.randint(-4, 4)), line.pop(at))
            broken = {**broken, rank: replace(broken[rank], instructions=tuple(line))}
        try:
            verify_messages(broken, expect(broken, case.wiring, None))
        except MessageError:
            continue
        for semantics in SEMANTICS:
            assert (not find_deadlock(broken, semantics)) == can_end(broken, semantics), semantics
