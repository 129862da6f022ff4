"""What programs must hold, worked out from their heads and the wiring alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from efftra_fx.errors import HeaderError
from efftra_fx.plan import Plan
from efftra_fx.program import Instruction, RankProgram, Recv, Send, Wiring
from efftra_fx.program_text import print_instruction

from .routes import Cell, Devices, Widths, find_routes, lay_out_cells


@dataclass(frozen=True)
class Expected:
    """The layout of a step: the ranks of each stage in order of replicas, and what each rank must do, in any order."""

    ranks: tuple[int, ...]
    devices: Devices
    widths: Widths
    cells: Mapping[int, Mapping[int, Cell]]  # by rank, by micro-batch
    sends: Mapping[int, frozenset[Send]]
    receives: Mapping[int, frozenset[Recv]]


def expect(programs: Mapping[int, RankProgram], wiring: Wiring, plan: Plan | None) -> Expected:
    """Work out the layout; raise HeaderError where the programs' heads disagree, or do not follow the plan."""
    rows, micro_batches = _common_sizes(programs)
    devices, widths = _devices(programs, wiring)
    if plan is not None:
        planned = tuple(stage.devices for stage in plan.stages)
        if planned != devices:
            raise HeaderError(f"the plan puts the stages on devices {planned}, but the programs on {devices}")
        wide = tuple(stage.tensor for stage in plan.stages)
        if wide != widths:
            raise HeaderError(f"the plan has stages {wide} ranks wide, but the programs {widths}")
        if plan.micro_batches != micro_batches:
            raise HeaderError(f"the plan has {plan.micro_batches} micro-batches, but the programs {micro_batches}")
    cells = lay_out_cells(devices, rows, micro_batches, widths)
    by_rank: dict[int, dict[int, Cell]] = {rank: {} for rank in programs}
    for cell in (cell for stage in cells for micro_batch in stage for cell in micro_batch):
        by_rank[cell.rank][cell.micro_batch] = cell
    sends: dict[int, set[Send]] = {rank: set() for rank in programs}
    receives: dict[int, set[Recv]] = {rank: set() for rank in programs}
    for route in find_routes(wiring, cells):
        if route.forward:
            sends[route.source.rank].add(route.send())
            receives[route.target.rank].add(route.recv())
        if route.gradient:
            sends[route.target.rank].add(route.send_gradient())
            receives[route.source.rank].add(route.recv_gradient())
    return Expected(
        tuple(sorted(programs)),
        devices,
        widths,
        by_rank,
        {rank: frozenset(some) for rank, some in sends.items()},
        {rank: frozenset(some) for rank, some in receives.items()},
    )


def place(rank: int, index: int, instruction: Instruction) -> str:
    """Name an instruction in a message.

    >>> from efftra_fx.program import Forward
    >>> place(1, 3, Forward(0, 2))
    'rank 1, instruction 3 (forward s0 m2)'
    """
    return f"rank {rank}, instruction {index} ({print_instruction(instruction)})"


def _common_sizes(programs: Mapping[int, RankProgram]) -> tuple[int, int]:
    if not programs:
        raise HeaderError("there are no programs, expected one for each rank")
    first = programs[min(programs)]
    for rank in sorted(programs):
        program = programs[rank]
        if program.rank != rank:
            raise HeaderError(f"the program of rank {rank} says that it is of rank {program.rank}")
        if (program.rows, program.micro_batches) != (first.rows, first.micro_batches):
            raise HeaderError(
                f"rank {rank} has {program.rows} rows in {program.micro_batches} micro-batches, "
                f"but rank {first.rank} has {first.rows} in {first.micro_batches}"
            )
    return first.rows, first.micro_batches


def _devices(programs: Mapping[int, RankProgram], wiring: Wiring) -> tuple[Devices, Widths]:
    """Return each stage's ranks, replica by replica, and how many ranks a replica of it has."""
    widths: dict[int, int] = {}
    devices: list[dict[int, int]] = [{} for _ in range(wiring.stages)]
    for rank in sorted(programs):
        program = programs[rank]
        if program.stage is None:
            if program.replica:
                raise HeaderError(f"rank {rank} is idle but says that it is replica {program.replica}, expected 0")
            continue
        if program.stage >= wiring.stages:
            raise HeaderError(f"rank {rank} computes stage {program.stage}, but there are {wiring.stages} stages")
        if program.synced != (program.stage in wiring.synced):
            known = "synced" if program.stage in wiring.synced else "not synced"
            raise HeaderError(f"stage {program.stage} is {known}, but the program of rank {rank} says otherwise")
        width = widths.setdefault(program.stage, program.width)
        if program.width != width:
            raise HeaderError(
                f"rank {rank} says that stage {program.stage} is {program.width} wide, another rank {width}"
            )
        other = devices[program.stage].setdefault(program.replica * width + program.tensor, rank)
        if other != rank:
            what = f"replica {program.replica}" + (f", number {program.tensor}," if width > 1 else "")
            raise HeaderError(f"ranks {other} and {rank} are both {what} of stage {program.stage}")
    for stage, replicas in enumerate(devices):
        if sorted(replicas) != list(range(len(replicas))) or not replicas:
            raise HeaderError(f"stage {stage} has replicas {sorted(replicas)}, expected 0, 1, … without a gap")
        if len(replicas) % widths[stage]:
            raise HeaderError(
                f"stage {stage} has {len(replicas)} ranks, expected a multiple of its width {widths[stage]}"
            )
    ranks = tuple(tuple(replicas[q] for q in range(len(replicas))) for replicas in devices)
    return ranks, tuple(widths[stage] for stage in range(len(ranks)))
