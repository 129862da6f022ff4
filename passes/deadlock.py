"""Run programs without a clock, and see whether everybody gets to the end.

Four ways in which messages may behave, from lenient to strict; programs must end in
all of them. A computation always waits for what it receives, and a collective for
all its members; a computation of a replica wider than one rank is a collective of its ranks, and
one of a synced stage a collective of all its ranks that have rows of the micro-batch.

- buffered: a send never waits.
- rendezvous: a send blocks its rank until the matching receive has been posted.
- paired: messages between two ranks, in both directions, are processed one after
  another, in each side's program order (one stream a pair).
- batched: each run of neighbouring messages is one group; a rank's groups are
  processed one after another, and a computation waits for the whole group.

No message is ever given up, and more progress never hinders: so the order in which
ranks are tried plays no part, and one run decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, TypeAlias, get_args

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
    awaited_receives,
    match_messages,
)
from efftra_fx.program_text import print_instruction

Semantics: TypeAlias = Literal["buffered", "rendezvous", "paired", "batched"]
SEMANTICS: tuple[Semantics, ...] = get_args(Semantics)

At: TypeAlias = tuple[int, int]  # (rank, index of the instruction)


def find_deadlock(programs: Mapping[int, RankProgram], semantics: Semantics) -> tuple[At, ...]:
    """Return where each rank that cannot end stands still, by rank; empty if all end.

    Every message must have its other end, in the same order on both sides.
    """
    run = _Run(programs, semantics)
    run.to_the_end()
    return tuple((rank, at) for rank, at in sorted(run.at.items()) if at < len(programs[rank].instructions))


def describe_deadlock(programs: Mapping[int, RankProgram], stuck: tuple[At, ...]) -> str:
    """Say for each rank at which instruction it stands still."""
    return "; ".join(
        f"rank {rank} waits at instruction {at} ({print_instruction(programs[rank].instructions[at])})"
        for rank, at in stuck
    )


@dataclass
class _Queue:
    """Groups of messages that one side processes one after another."""

    groups: list[tuple[At, ...]]
    head: int = 0

    def current(self) -> tuple[At, ...]:
        return self.groups[self.head] if self.head < len(self.groups) else ()


class _Run:
    def __init__(self, programs: Mapping[int, RankProgram], semantics: Semantics) -> None:
        self.programs = programs
        self.semantics = semantics
        self.at = dict.fromkeys(programs, 0)
        self.ends = match_messages(programs)
        self.awaited = {rank: awaited_receives(program) for rank, program in programs.items()}
        self.groups = _meeting_groups(programs)
        self.done: set[At] = set()
        self.queues = _queues(programs, semantics)
        self.places = {at: (queue, group) for queue in self.queues for group in queue.groups for at in group}
        self.messages: dict[int, list[At]] = {rank: [] for rank in programs}
        for at in self.places:
            self.messages[at[0]].append(at)

    def to_the_end(self) -> None:
        moving = True
        while moving:
            moving = False
            for rank in self.programs:
                while self.step(rank):
                    moving = True
            for queue in self.queues:
                while self.process(queue):
                    moving = True

    def step(self, rank: int) -> bool:
        """Advance the rank over its present instruction, if it may."""
        at, instructions = self.at[rank], self.programs[rank].instructions
        if at == len(instructions):
            return False
        match instructions[at]:
            case Recv():
                free = True
            case Send():
                free = self.semantics != "rendezvous" or self.is_posted(self.ends.get((rank, at)))
            case AllReduce(ranks=ranks) | Join(ranks=ranks) | ReduceLoss(ranks=ranks) as collective:
                free = all(self.present(member) == collective for member in ranks)
                if free:
                    for member in set(ranks) - {rank}:
                        self.at[member] += 1
            case Update():
                free = all(one in self.done for one in self.messages[rank])
            case _:
                group = self.groups.get((rank, at), (rank,))
                free = all(self.may_compute(member, instructions[at]) for member in group)
                if free:
                    for member in set(group) - {rank}:
                        self.at[member] += 1
        if free:
            self.at[rank] += 1
        return free

    def may_compute(self, rank: int, instruction: object) -> bool:
        """Say whether the rank stands at this computation and has received what it needs there."""
        arrived = (self.has_arrived((rank, index)) for index in self.awaited[rank].get(self.at[rank], ()))
        return self.present(rank) == instruction and all(arrived)

    def present(self, rank: int) -> object:
        program = self.programs.get(rank)
        if program is None or self.at[rank] == len(program.instructions):
            return None
        return program.instructions[self.at[rank]]

    def is_posted(self, at: At | None) -> bool:
        return at is not None and self.at[at[0]] > at[1]

    def has_arrived(self, at: At) -> bool:
        if self.queues:
            return all(one in self.done for one in self.places[at][1])
        return self.is_posted(self.ends.get(at))

    def process(self, queue: _Queue) -> bool:
        """Pass the messages of the queue's first group whose other end is in a first group too."""
        group = queue.current()
        if not group or not self.is_active(queue, group):
            return False
        moved = False
        for one in group:
            other = self.ends.get(one)
            if one not in self.done and other is not None and self.is_active(*self.places[other]):
                self.done |= {one, other}
                moved = True
        if all(one in self.done for one in group):
            queue.head += 1
            moved = True
        return moved

    def is_active(self, queue: _Queue, group: tuple[At, ...]) -> bool:
        return self.is_posted(group[-1]) and queue.current() == group


_MEETINGS = (Forward, Backward, BackwardInput, BackwardWeight)


def _meeting_groups(programs: Mapping[int, RankProgram]) -> dict[At, tuple[int, ...]]:
    """Return for each computation in which ranks meet the ranks that must be there, by rank and index.

    Those of a tensor group are there always, those of other replicas where they have loaded rows.
    """
    loaded = {rank: {i.micro_batch for i in p.instructions if isinstance(i, Load)} for rank, p in programs.items()}
    groups: dict[At, tuple[int, ...]] = {}
    for rank, program in programs.items():
        own = [r for r, p in programs.items() if (p.stage, p.replica) == (program.stage, program.replica)]
        others = [r for r, p in programs.items() if program.synced and p.stage == program.stage]
        for index, instruction in enumerate(program.instructions if len(own) + len(others) > 1 else ()):
            if isinstance(instruction, _MEETINGS):
                several = instruction.micro_batches if isinstance(instruction, BackwardWeight) else None
                needed = {instruction.micro_batch} if several is None else set(several)  # type: ignore[union-attr]
                groups[rank, index] = tuple(r for r in programs if r in own or (r in others and needed & loaded[r]))
    return groups


def _queues(programs: Mapping[int, RankProgram], semantics: Semantics) -> list[_Queue]:
    if semantics == "paired":
        pairs: dict[At, list[tuple[At, ...]]] = {}
        for rank, program in programs.items():
            for index, instruction in enumerate(program.instructions):
                if isinstance(instruction, Send | Recv):
                    pairs.setdefault((rank, instruction.peer), []).append(((rank, index),))
        return [_Queue(groups) for groups in pairs.values()]
    if semantics == "batched":
        return [_Queue(_runs(rank, program)) for rank, program in programs.items()]
    return []


def _runs(rank: int, program: RankProgram) -> list[tuple[At, ...]]:
    runs = groupby(enumerate(program.instructions), key=lambda one: isinstance(one[1], Send | Recv))
    return [tuple((rank, index) for index, _ in run) for is_message, run in runs if is_message]
