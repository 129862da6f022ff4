"""How many bytes a rank holds at each moment of its program."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import assert_never

from efftra_fx.program import (
    AllReduce,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Join,
    Load,
    RankProgram,
    Recv,
    ReduceLoss,
    Send,
    Update,
    Wiring,
)


def _no_bytes(stage: int, rows: int) -> int:
    return 0


@dataclass(frozen=True)
class Memory:
    """What a step needs and what the devices have.

    `limit_bytes` is each rank's memory (None: no limit). `static_bytes` is what each
    stage holds all the time: parameters, gradients, optimizer states.
    `saved_bytes(stage, rows)` is what a cell of so many rows keeps from its forward
    for its backward, `working_bytes(stage, rows)` what it needs besides while it is
    computed, forward or backward.
    """

    limit_bytes: tuple[int | None, ...]
    static_bytes: tuple[int, ...]
    saved_bytes: Callable[[int, int], int]
    working_bytes: Callable[[int, int], int] = _no_bytes


def track_memory(program: RankProgram, wiring: Wiring, memory: Memory) -> tuple[int, ...]:
    """Return the bytes that the rank holds while each instruction runs.

    Received parts are held from their `Recv` to the computation that takes them,
    saved values from a cell's forward to the last of its backwards. A stage that
    has nothing to differentiate keeps nothing after its forward.
    """
    if program.stage is None:
        return (0,) * len(program.instructions)
    stage = program.stage
    held = memory.static_bytes[stage]
    arriving: dict[tuple[int, bool], int] = {}
    saved: dict[int, int] = {}
    rows: dict[int, int] = {}
    track: list[int] = []
    for instruction in program.instructions:
        freed = working = 0
        match instruction:
            case Load(micro_batch=k, start=start, stop=stop):
                rows[k] = stop - start
            case Recv(micro_batch=k, gradient=gradient):
                held += instruction.size_bytes
                arriving[k, gradient] = arriving.get((k, gradient), 0) + instruction.size_bytes
            case Forward(micro_batch=k):
                saved[k] = memory.saved_bytes(stage, rows.get(k, 0))
                held += saved[k]
                working = memory.working_bytes(stage, rows.get(k, 0))
                freed = arriving.pop((k, False), 0) + (0 if wiring.backward[stage] else saved.pop(k))
            case Backward(micro_batch=k):
                working = memory.working_bytes(stage, rows.get(k, 0))
                freed = arriving.pop((k, True), 0) + saved.pop(k, 0)
            case BackwardInput(micro_batch=k):
                working = memory.working_bytes(stage, rows.get(k, 0))
                freed = arriving.pop((k, True), 0) + (0 if wiring.has_weights(stage) else saved.pop(k, 0))
            case BackwardWeight(micro_batches=micro_batches):
                working = memory.working_bytes(stage, sum(rows.get(k, 0) for k in micro_batches))
                freed = sum(saved.pop(k, 0) for k in micro_batches)
            case Send() | AllReduce() | Join() | ReduceLoss() | Update():
                pass
            case _:
                assert_never(instruction)
        track.append(held + working)
        held -= freed
    return tuple(track)


def peak_memory(program: RankProgram, wiring: Wiring, memory: Memory) -> int:
    """Return the most bytes that the rank holds at any moment."""
    return max(track_memory(program, wiring, memory), default=0)
