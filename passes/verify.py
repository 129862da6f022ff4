"""What makes a plan, or a set of programs, sound.

Nothing is sent, reduced or cut that was not proven here to be matched, ordered and
complete. The layout that programs must follow is worked out from their heads and
the wiring, never taken from whoever made them: so hand-edited programs, and those
read back from a text, are held to the same.

Two sets of programs that both pass compute the same gradients and the same loss.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import zip_longest

from efftra_fx.cluster import Cluster
from efftra_fx.errors import (
    CoverageError,
    DeadlockError,
    DeviceError,
    DeviceMemoryError,
    DtypeError,
    EdgeError,
    HeaderError,
    OwnerError,
    ReduceOrderError,
    WiringError,
)
from efftra_fx.memory import Memory, track_memory
from efftra_fx.plan import Plan
from efftra_fx.program import (
    AllReduce,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Instruction,
    Join,
    RankProgram,
    ReduceLoss,
    Wiring,
)
from efftra_fx.units import size_text

from .deadlock import SEMANTICS, describe_deadlock, find_deadlock
from .expected import expect, place
from .lower import has_gradient, reduce_groups
from .routes import Devices, Widths
from .verify_messages import verify_messages
from .verify_rank import verify_rank


def verify_plan(plan: Plan, blocks: int, cluster: Cluster | None = None) -> None:
    """Check that each of `blocks` blocks is in one stage, and each device of the cluster in at most one.

    Raises CoverageError or DeviceError.
    """
    owners: dict[int, int] = {}
    for index, stage in enumerate(plan.stages):
        for block in stage.blocks:
            if block >= blocks:
                raise CoverageError(f"stage {index} has block {block}, but there are {blocks}, counted from 0")
            if block in owners:
                raise CoverageError(f"block {block} is in stage {owners[block]} and in stage {index}, expected one")
            owners[block] = index
    for block in range(blocks):
        if block not in owners:
            raise CoverageError(f"block {block} of {blocks} is in no stage, expected one")
    if any(owners[block] > owners[block + 1] for block in range(blocks - 1)):
        raise CoverageError("the stages do not follow the order of the blocks")
    users: dict[int, int] = {}
    for index, stage in enumerate(plan.stages):
        for device in stage.devices:
            if device in users:
                raise DeviceError(f"device {device} is used by stage {users[device]} and by stage {index}")
            if cluster is not None and device >= len(cluster.devices):
                raise DeviceError(f"stage {index} uses device {device}, but the cluster has {len(cluster.devices)}")
            users[device] = index


def verify_wiring(wiring: Wiring) -> None:
    """Check that values go forward, and that every name is known once and every parameter owned.

    Raises WiringError, EdgeError or OwnerError.
    """
    for what, names in (
        ("value", [value.name for value in wiring.values]),
        ("parameter", [parameter.name for parameter in wiring.parameters]),
    ):
        for name, count in Counter(names).items():
            if count > 1:
                raise WiringError(f"{what} {name!r} is there {count} times, expected once")
    for value in wiring.values:
        for stage in (value.producer, *value.consumers):
            _check_stage(f"value {value.name!r}", stage, wiring)
        if len(set(value.consumers)) != len(value.consumers):
            raise WiringError(f"value {value.name!r} lists a consumer twice: {list(value.consumers)}")
        for consumer in value.consumers:
            if consumer <= value.producer:
                raise EdgeError(
                    f"value {value.name!r} is produced in stage {value.producer} but consumed in stage {consumer}; "
                    f"values must go to later stages"
                )
    for parameter in wiring.parameters:
        if not parameter.stages:
            raise OwnerError(f"parameter {parameter.name!r} belongs to no stage, expected at least one")
        for stage in parameter.stages:
            _check_stage(f"parameter {parameter.name!r}", stage, wiring)


def verify_programs(
    programs: Mapping[int, RankProgram], wiring: Wiring, plan: Plan | None = None, memory: Memory | None = None
) -> None:
    """Check that the programs, by rank, together do one step: each work once, and nobody waits forever.

    With a plan, that they follow it; with a memory, that each rank's fits. Raises the
    VerifyError of the kind that fits, naming rank, instruction, expected and found.
    """
    verify_wiring(wiring)
    expected = expect(programs, wiring, plan)
    verify_messages(programs, expected)
    for rank in expected.ranks:
        reductions = _reductions(rank, wiring, expected.devices, expected.widths)
        verify_rank(programs[rank], wiring, expected, reductions)
    _verify_collectives(programs, wiring)
    _verify_meetings(programs, wiring, expected.devices, expected.widths)
    for semantics in SEMANTICS:
        stuck = find_deadlock(programs, semantics)
        if stuck:
            raise DeadlockError(f"with {semantics} messages {describe_deadlock(programs, stuck)}")
    if memory is not None:
        _verify_memory(programs, wiring, memory)


def _check_stage(what: str, stage: int, wiring: Wiring) -> None:
    if not 0 <= stage < wiring.stages:
        raise WiringError(f"{what} names stage {stage}, but there are {wiring.stages}, counted from 0")


def _reductions(rank: int, wiring: Wiring, devices: Devices, widths: Widths) -> dict[str, tuple[int, ...]]:
    """Return the group of each parameter that the rank must reduce."""
    return {
        parameter.name: group
        for parameter in wiring.parameters
        if has_gradient(parameter, wiring)
        for group in reduce_groups(parameter, devices, widths)
        if rank in group
    }


def _verify_meetings(programs: Mapping[int, RankProgram], wiring: Wiring, devices: Devices, widths: Widths) -> None:
    """Check that ranks which meet in their computations compute the same things in the same order.

    Those are the ranks of a tensor group, and the replicas of a synced stage: of these, one without rows of a
    micro-batch leaves its computations out, and the last one never does.
    """
    for stage, (ranks, width) in enumerate(zip(devices, widths, strict=True)):
        for start in range(0, len(ranks) if width > 1 else 0, width):
            for rank in ranks[start : start + width]:
                _verify_order(programs, ranks[start], rank, "ranks of a tensor group")
        for rank in ranks if stage in wiring.synced else ():
            _verify_order(programs, ranks[-1], rank, "replicas of a synced stage")


def _verify_order(programs: Mapping[int, RankProgram], first: int, rank: int, who: str) -> None:
    line, other = _computations(programs[rank]), _computations(programs[first])
    own = {work for _, work in line}
    if programs[rank].replica != programs[first].replica:
        other = [(at, work) for at, work in other if work in own]
    for (here, mine), (there, its) in zip_longest(other, line, fillvalue=(-1, None)):
        if mine != its:
            words = [
                place(one, at, work) if work is not None else f"the end of rank {one}"
                for one, at, work in ((first, here, mine), (rank, there, its))
            ]
            raise ReduceOrderError(f"{words[0]} meets {words[1]}: {who} must compute the same, in one order")


def _computations(program: RankProgram) -> list[tuple[int, Instruction | None]]:
    kinds = Forward | Backward | BackwardInput | BackwardWeight
    return [(i, one) for i, one in enumerate(program.instructions) if isinstance(one, kinds)]


def _verify_collectives(programs: Mapping[int, RankProgram], wiring: Wiring) -> None:
    dtypes = {parameter.name: parameter.dtype for parameter in wiring.parameters}
    lines: dict[tuple[int, ...], dict[int, list[tuple[int, Instruction]]]] = {}
    for rank, program in programs.items():
        for index, instruction in enumerate(program.instructions):
            match instruction:
                case AllReduce(parameters, ranks):
                    mixed = {dtypes[name] for name in parameters}
                    if len(mixed) > 1:
                        raise DtypeError(f"{place(rank, index, instruction)} mixes {', '.join(sorted(mixed))}")
                    lines.setdefault(ranks, {}).setdefault(rank, []).append((index, instruction))
                case Join(ranks=ranks) | ReduceLoss(ranks=ranks):
                    lines.setdefault(ranks, {}).setdefault(rank, []).append((index, instruction))
                case _:
                    pass
    for group, members in lines.items():
        first = members[group[0]]
        for rank in group[1:]:
            for (here, mine), (there, other) in zip(first, members[rank], strict=False):
                if mine != other:
                    raise ReduceOrderError(
                        f"{place(group[0], here, mine)} meets {place(rank, there, other)}: "
                        f"all members of a group must meet its collectives in the same order"
                    )


def _verify_memory(programs: Mapping[int, RankProgram], wiring: Wiring, memory: Memory) -> None:
    if len(memory.limit_bytes) <= max(programs) or len(memory.static_bytes) != wiring.stages:
        raise HeaderError(
            f"the memory knows {len(memory.limit_bytes)} ranks and {len(memory.static_bytes)} stages, "
            f"but the programs have ranks up to {max(programs)} and {wiring.stages} stages"
        )
    for rank in sorted(programs):
        limit = memory.limit_bytes[rank]
        for index, held in enumerate(track_memory(programs[rank], wiring, memory)):
            if limit is not None and held > limit:
                raise DeviceMemoryError(
                    f"{place(rank, index, programs[rank].instructions[index])} needs {size_text(held)} "
                    f"but the device has {size_text(limit)}; add devices or micro-batches"
                )
