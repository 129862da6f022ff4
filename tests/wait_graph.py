"""Deadlock in another way: programs end exactly if the graph of who waits for whom has no cycle."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from graphlib import CycleError, TopologicalSorter
from itertools import groupby

from efftra_fx.program import (
    AllReduce,
    Join,
    RankProgram,
    Recv,
    ReduceLoss,
    Send,
    Update,
    awaited_receives,
    match_messages,
)

Node = Hashable


def can_end(programs: Mapping[int, RankProgram], semantics: str) -> bool:
    """Say whether all programs end; every message must have its other end, every collective all its members."""
    graph: dict[Node, set[Node]] = {}
    ends = match_messages(programs)
    met: dict[Node, int] = {}

    def after(node: Node, *earlier: Node) -> None:
        graph.setdefault(node, set()).update(earlier)

    def message(at: tuple[int, int]) -> Node:
        return ("message", min(at, ends[at]))

    for rank, program in programs.items():
        before: Node = ("start", rank)
        arrival: dict[int, Node] = {}
        groups = _groups(rank, program, semantics)
        last_of_queue: dict[int, Node] = {}
        for queue, indices in groups:
            whole = ("group", rank, queue, indices)
            for index in indices:
                after(message((rank, index)), ("passed", rank, indices[-1]))
                after(whole, message((rank, index)))
                if queue in last_of_queue:
                    after(message((rank, index)), last_of_queue[queue])
                arrival[index] = whole
            last_of_queue[queue] = whole
        awaited = awaited_receives(program)
        for index, instruction in enumerate(program.instructions):
            here: Node = ("passed", rank, index)
            after(here, before)
            match instruction:
                case Send() if semantics == "rendezvous":
                    after(here, ("passed", *ends[rank, index]))
                case AllReduce(ranks=ranks) | Join(ranks=ranks) | ReduceLoss(ranks=ranks):
                    count = met[rank, instruction] = met.get((rank, instruction), 0) + 1
                    meeting = ("meeting", instruction, count)
                    after(meeting, before)
                    after(here, meeting)
                    for member in ranks:
                        after(meeting, ("came", member, instruction, count))
                    after(("came", rank, instruction, count), before)
                case Update() if groups:
                    after(here, *arrival.values())
                case _:
                    for receive in awaited.get(index, ()):
                        after(here, arrival[receive] if groups else ("passed", *ends[rank, receive]))
            before = here
    try:
        tuple(TopologicalSorter(graph).static_order())
    except CycleError:
        return False
    return True


def _groups(rank: int, program: RankProgram, semantics: str) -> list[tuple[int, tuple[int, ...]]]:
    """Return the groups of messages, in order, each with the queue it belongs to."""
    line = list(enumerate(program.instructions))
    if semantics == "paired":
        return [(one.peer, (index,)) for index, one in line if isinstance(one, Send | Recv)]
    if semantics == "batched":
        runs = groupby(line, key=lambda one: isinstance(one[1], Send | Recv))
        return [(0, tuple(index for index, _ in run)) for is_message, run in runs if is_message]
    return []
