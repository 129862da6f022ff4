"""What ran when, on every rank, and how to show it in a trace viewer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from efftra_fx.program import AllReduce, Instruction, Join, Recv, ReduceLoss, Send, Update
from efftra_fx.program_text import print_instruction

LANES = ("compute", "send", "receive", "reduce")


@dataclass(frozen=True)
class Span:
    """One instruction of one rank, by its index, and when it ran; seconds since the step began.

    A send lasts from its posting until its last byte has left, a receive from its
    posting until the last byte is there.
    """

    rank: int
    index: int
    instruction: Instruction
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Exchange:
    """One exchange of a rank with its tensor group, on the way of the instruction with this index.

    The rank came at `arrive_s`; from `start_s` on, when the last has come, values move until `end_s`.
    """

    rank: int
    index: int
    kind: str
    arrive_s: float
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """All spans of a step, by rank and index, and each rank's peak memory if it is known.

    `exchanges` are what wide stages exchange on the way of their computations, where that is known apart.

    `source` says where the times come from: "measured" or "simulated".
    """

    spans: tuple[Span, ...]
    source: str
    peak_bytes: Mapping[int, int] = field(default_factory=dict)
    exchanges: tuple[Exchange, ...] = ()

    @property
    def step_s(self) -> float:
        """Seconds from the beginning to the end of the last instruction."""
        return max((span.end_s for span in self.spans), default=0.0)

    def busy_s(self, rank: int) -> float:
        """Seconds for which the rank computes; what it waits and exchanges with its tensor group is left out."""
        spans = (span for span in self.spans if span.rank == rank)
        computing = sum(span.end_s - span.start_s for span in spans if _lane(span.instruction) == "compute")
        return computing - sum(one.end_s - one.arrive_s for one in self.exchanges if one.rank == rank)

    def waiting_s(self, rank: int) -> float:
        """Seconds for which the rank waits for others of its tensor group that come later to an exchange."""
        return sum(one.start_s - one.arrive_s for one in self.exchanges if one.rank == rank)


def trace_json(timeline: Timeline) -> str:
    """Return the timeline in the Trace Event Format, which chrome://tracing and Perfetto open.

    A rank is a process with one lane each for computing, sending, receiving and
    reducing; an arrow leads from each send to its receive. A rank that exchanges values
    with its tensor group has one lane more, with its waits and its exchanges. Times are
    in microseconds.
    """
    events: list[dict[str, Any]] = []
    for rank in sorted({span.rank for span in timeline.spans}):
        events.append(_name("process_name", rank, 0, f"rank {rank}"))
        events += (_name("thread_name", rank, lane, name) for lane, name in enumerate(LANES))
    for rank in sorted({one.rank for one in timeline.exchanges}):
        events.append(_name("thread_name", rank, len(LANES), "exchange"))
    for one in timeline.exchanges:
        if one.start_s > one.arrive_s:
            events.append(_exchange(one, f"wait to {one.kind}", one.arrive_s, one.start_s))
        events.append(_exchange(one, one.kind, one.start_s, one.end_s))
    counts: dict[tuple[str, int, int], int] = {}
    for span in timeline.spans:
        lane = LANES.index(_lane(span.instruction))
        start_us, end_us = _microseconds(span.start_s), _microseconds(span.end_s)
        events.append(
            {
                "name": print_instruction(span.instruction),
                "cat": LANES[lane],
                "ph": "X",
                "pid": span.rank,
                "tid": lane,
                "ts": start_us,
                "dur": round(end_us - start_us, 3),
                "args": {"index": span.index},
            }
        )
        events += _arrow(span, start_us, end_us, lane, counts)
    return json.dumps({"displayTimeUnit": "ms", "otherData": {"source": timeline.source}, "traceEvents": events}) + "\n"


def _name(what: str, rank: int, lane: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": rank, "tid": lane, "args": {"name": name}}


def _exchange(one: Exchange, name: str, start_s: float, end_s: float) -> dict[str, Any]:
    start_us, end_us = _microseconds(start_s), _microseconds(end_s)
    where = {"pid": one.rank, "tid": len(LANES), "ts": start_us, "dur": round(end_us - start_us, 3)}
    return {"name": name, "cat": "exchange", "ph": "X", **where, "args": {"index": one.index}}


def _arrow(
    span: Span, start_us: float, end_us: float, lane: int, counts: dict[tuple[str, int, int], int]
) -> list[dict[str, Any]]:
    """Return the end of an arrow for a message: the nth send of a directed pair leads to its nth receive."""
    match span.instruction:
        case Send(peer=peer):
            source, target, phase, at = span.rank, peer, "s", start_us
        case Recv(peer=peer):
            source, target, phase, at = peer, span.rank, "f", end_us
        case _:
            return []
    number = counts[phase, source, target] = counts.get((phase, source, target), 0) + 1
    arrow = {"name": "message", "cat": "message", "ph": phase, "id": f"{source}-{target}-{number}"}
    return [{**arrow, "pid": span.rank, "tid": lane, "ts": at, **({"bp": "e"} if phase == "f" else {})}]


def _lane(instruction: Instruction) -> str:
    match instruction:
        case Send():
            return "send"
        case Recv():
            return "receive"
        case AllReduce() | Join() | ReduceLoss() | Update():
            return "reduce"
        case _:
            return "compute"


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)
