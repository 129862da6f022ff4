"""Break programs in every way that comes to mind: one edit of one rank, or of both ends of a message."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from random import Random
from typing import Any, TypeVar

from efftra_fx.program import Instruction, RankProgram, Recv, Send, Wiring, match_messages

_Changed = TypeVar("_Changed")
Programs = dict[int, RankProgram]
WAYS = ("drop", "double", "swap", "move", "alter", "alter", "alter", "head", "exchange", "both_ends", "insert")


def mutate(programs: Mapping[int, RankProgram], wiring: Wiring, random: Random) -> Programs:
    """Return programs with one random edit, which may change nothing; raise ProgramError if it cannot exist."""
    rank = random.choice(sorted(programs))
    program = programs[rank]
    line = list(program.instructions)
    at = random.randrange(len(line)) if line else 0
    match random.choice(WAYS):
        case "drop" if line:
            del line[at]
        case "double" if line:
            line.insert(random.randrange(len(line) + 1), line[at])
        case "swap" if line:
            other = random.randrange(len(line))
            line[at], line[other] = line[other], line[at]
        case "move" if line:
            one = line.pop(at)
            line.insert(random.randrange(len(line) + 1), one)
        case "alter" if line:
            line[at] = alter(line[at], wiring, random)
        case "head":
            return {**programs, rank: _alter_head(program, random)}
        case "exchange":
            other = random.choice(sorted(programs))
            theirs = programs[other].instructions
            return {
                **programs,
                rank: replace(program, instructions=theirs),
                other: replace(programs[other], instructions=program.instructions),
            }
        case "both_ends":
            return _alter_both_ends(programs, wiring, random)
        case "insert":
            source = programs[random.choice(sorted(programs))].instructions
            if source:
                line.insert(random.randrange(len(line) + 1), random.choice(source))
        case _:
            pass
    return {**programs, rank: replace(program, instructions=tuple(line))}


def alter(instruction: Instruction, wiring: Wiring, random: Random) -> Instruction:
    """Return the instruction with one field changed, or as another kind of instruction with the same fields."""
    names = [one.name for one in fields(instruction)]
    if not names:
        return instruction
    name = random.choice(names)
    return _with(instruction, name, _other(getattr(instruction, name), wiring, random))


def _with(one: _Changed, name: str, value: object) -> _Changed:
    data: Any = one
    changed: _Changed = replace(data, **{name: value})
    return changed


def _other(old: object, wiring: Wiring, random: Random) -> object:
    match old:
        case bool():
            return not old
        case int():
            return old + random.choice((-2, -1, 1, 2))
        case str():
            names = [one.name for one in wiring.values] + [one.name for one in wiring.parameters]
            return random.choice([*names, "float32", "float16", "int64", "nothing"])
        case tuple() if old and random.random() < 0.3:
            return old[:-1]
        case tuple() if old and random.random() < 0.3:
            return old[::-1]
        case tuple() if old and random.random() < 0.7:
            at = random.randrange(len(old))
            return (*old[:at], _other(old[at], wiring, random), *old[at + 1 :])
        case tuple():
            return (*old, old[-1] if old else 1)
        case _:
            raise AssertionError(f"a field of an unknown type: {old!r}")


def _alter_head(program: RankProgram, random: Random) -> RankProgram:
    match random.choice(("rank", "rows", "micro_batches", "stage", "replica")):
        case "stage":
            return replace(program, stage=random.choice((None, 0, 1, 2, 3)))
        case name:
            return replace(program, **{name: getattr(program, name) + random.choice((-1, 1, 2))})


def _alter_both_ends(programs: Mapping[int, RankProgram], wiring: Wiring, random: Random) -> Programs:
    """Drop a message, or change it, or exchange it with the next of its pair, on both sides alike."""
    ends = [(here, there) for here, there in sorted(match_messages(programs).items()) if here < there]
    if not ends:
        return dict(programs)
    at = random.randrange(len(ends))
    lines = {rank: list(program.instructions) for rank, program in programs.items()}
    (rank, index), (peer, peer_index) = ends[at]
    mine, theirs = lines[rank][index], lines[peer][peer_index]
    assert isinstance(mine, Send | Recv) and isinstance(theirs, Send | Recv)
    match random.choice(("drop", "change", "exchange")):
        case "drop":
            del lines[rank][index], lines[peer][peer_index]
        case "change":
            name = random.choice(("value", "micro_batch", "start", "stop", "dtype", "shape", "gradient"))
            new = _other(getattr(mine, name), wiring, random)
            lines[rank][index], lines[peer][peer_index] = _with(mine, name, new), _with(theirs, name, new)
        case _:
            (other, other_index), (other_peer, other_peer_index) = ends[(at + 1) % len(ends)]
            if (other, other_peer) == (rank, peer):
                line, far = lines[rank], lines[peer]
                line[index], line[other_index] = line[other_index], line[index]
                far[peer_index], far[other_peer_index] = far[other_peer_index], far[peer_index]
    return {rank: replace(program, instructions=tuple(lines[rank])) for rank, program in programs.items()}
