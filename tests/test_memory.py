"""What a rank holds at each instruction, counted by hand."""

from __future__ import annotations

from dataclasses import replace

from efftra_fx.memory import Memory, peak_memory, track_memory
from efftra_fx.program import Parameter, RankProgram, Value, Wiring
from efftra_fx.program_text import parse_instruction

WIRING = Wiring(
    2,
    (Value("x", "float32", (1, 2), "rows", 0, 0, (1,), (True,)),),
    (Parameter("w", "float32", (1,), (0, 1), True),),
    (True, True),
    False,
)
MEMORY = Memory((None, None), (100, 200), lambda stage, rows: 10 * rows, lambda stage, rows: 1000 * rows)


def held(text: str, wiring: Wiring = WIRING, stage: int | None = 0) -> tuple[int, ...]:
    line = tuple(parse_instruction(one) for one in text.strip().splitlines())
    return track_memory(RankProgram(0, 9, 3, stage, 0, line), wiring, MEMORY)


def test_received_parts_are_held_until_taken_and_saved_values_until_the_backward() -> None:
    text = """
        recv x m0 [0:3] <- 1 float32[3, 2]
        load s1 m0 [0:3]
        forward s1 m0
        backward s1 m0
        update
    """
    assert held(text, stage=1) == (224, 224, 224 + 30 + 3000, 200 + 30 + 3000, 200)


def test_a_weight_gradient_put_off_keeps_its_saved_values() -> None:
    text = """
        load s0 m0 [0:1]
        forward s0 m0
        backward_input s0 m0
        load s0 m1 [1:2]
        forward s0 m1
        backward_input s0 m1
        backward_weight s0 m0 m1
        update
    """
    assert held(text) == (100, 1110, 1110, 110, 1120, 1120, 2120, 100)
    frozen = replace(WIRING, parameters=())
    assert held(text, frozen)[:6] == (100, 1110, 1110, 100, 1110, 1110)


def test_a_stage_without_backward_keeps_nothing_and_an_idle_rank_has_nothing() -> None:
    text = """
        load s0 m0 [0:1]
        forward s0 m0
        update
    """
    assert held(text, replace(WIRING, backward=(False, True))) == (100, 1110, 100)
    assert held("update", stage=None) == (0,)


def test_the_peak_is_the_most_that_is_held() -> None:
    line = tuple(parse_instruction(one) for one in ("load s0 m0 [0:1]", "forward s0 m0", "update"))
    assert peak_memory(RankProgram(0, 1, 1, 0, 0, line), WIRING, MEMORY) == 1110
    assert peak_memory(RankProgram(0, 1, 1, 0, 0, ()), WIRING, MEMORY) == 0
