"""Run the very programs that ranks would run, against a clock instead of devices.

Model: a rank does one instruction after another. A message moves once it has been
posted on both sides and the messages before it between the same two ranks, in the
same direction, have left; sending costs the rank no time. A computation starts when
what it receives is there; in a synced stage it starts and ends together with those of
the other replicas that have rows of the same micro-batch. Where a stage is several
ranks wide, its computations stop at each exchange until all ranks of the group have
come to it. A collective starts when all its members have come and are done with those
before, and costs what a ring costs; only `join` and `update` wait for its end. Every
time is a maximum or a sum of earlier times, so no order of events has to be kept: each
rank is followed as far as times are known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import assert_never

from efftra_fx.cluster import Link
from efftra_fx.cost import Exchanged
from efftra_fx.errors import DeadlockError
from efftra_fx.memory import Memory, peak_memory
from efftra_fx.program import (
    AllReduce,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Instruction,
    Join,
    Load,
    RankProgram,
    Recv,
    ReduceLoss,
    Send,
    Update,
    Wiring,
    awaited_receives,
    match_messages,
)
from efftra_fx.program_text import print_instruction

from .timeline import Exchange, Span, Timeline

SCALAR_BYTES = 8
_COMPUTATIONS = (Forward, Backward, BackwardInput, BackwardWeight)


def no_exchanges(stage: int, rows: int, backward: bool) -> tuple[Exchanged, ...]:
    """Return nothing: what ranks of a group exchange is part of the durations."""
    return ()


@dataclass(frozen=True)
class Durations:
    """Seconds that a stage needs for a cell of so many rows, as functions of (stage, rows).

    Where weight gradients are computed apart, `input_share` of the backward is for
    the gradients of the inputs. `speed` divides the times of each rank; a rank that
    it does not list has speed 1. `exchanges` lists what a wide stage's ranks exchange
    in the forward or the backward of so many rows; the seconds are without them. Those
    of a backward take place while the gradients of the inputs are computed.
    """

    forward_s: Callable[[int, int], float]
    backward_s: Callable[[int, int], float]
    input_share: float = 0.5
    speed: tuple[float, ...] = ()
    exchanges: Callable[[int, int, bool], Sequence[Exchanged]] = no_exchanges

    def inside(self, instruction: Instruction, rows: Mapping[int, int]) -> Sequence[Exchanged]:
        """Return what the ranks of a group exchange on the way of an instruction."""
        match instruction:
            case Forward(stage, k):
                return self.exchanges(stage, rows[k], False)
            case Backward(stage, k) | BackwardInput(stage, k):
                return self.exchanges(stage, rows[k], True)
            case _:
                return ()

    def of(self, rank: int, instruction: Instruction, rows: Mapping[int, int]) -> float:
        """Return the seconds of an instruction, given the rows of the rank's micro-batches; 0 if it computes none."""
        match instruction:
            case Forward(stage, k):
                seconds = self.forward_s(stage, rows[k])
            case Backward(stage, k):
                seconds = self.backward_s(stage, rows[k])
            case BackwardInput(stage, k):
                seconds = self.input_share * self.backward_s(stage, rows[k])
            case BackwardWeight(stage, micro_batches):
                seconds = (1 - self.input_share) * self.backward_s(stage, sum(rows[k] for k in micro_batches))
            case Load() | Send() | Recv() | AllReduce() | Join() | ReduceLoss() | Update():
                return 0.0
            case _:
                assert_never(instruction)
        return seconds / (self.speed[rank] if rank < len(self.speed) else 1.0)


def simulate(
    programs: Mapping[int, RankProgram],
    wiring: Wiring,
    durations: Durations,
    link: Callable[[int, int], Link],
    memory: Memory | None = None,
    overlap_reduce: bool = False,
) -> Timeline:
    """Return when every instruction runs; with a memory, each rank's peak bytes too.

    `link(a, b)` is the link from rank a to rank b. With `overlap_reduce` a gradient
    bucket is ready as soon as its share of the rank's last backward is computed, not
    only at its end.

    Raises DeadlockError, naming where each rank stands, if the programs do not end.
    """
    run = _Run(programs, wiring, durations, link, overlap_reduce)
    run.to_the_end()
    spans = tuple(
        Span(rank, index, instruction, *run.spans[rank, index])
        for rank in sorted(programs)
        for index, instruction in enumerate(programs[rank].instructions)
    )
    peaks = {} if memory is None else {rank: peak_memory(programs[rank], wiring, memory) for rank in sorted(programs)}
    return Timeline(spans, "simulated", peaks, tuple(run.exchanged))


def all_reduce_s(size_bytes: int, ranks: tuple[int, ...], link: Callable[[int, int], Link]) -> float:
    """Return the seconds of a ring all-reduce over the slowest of its links.

    Each rank sends 2(n - 1) times an nth of the bytes, one after another.
    """
    count = len(ranks)
    if count == 1:
        return 0.0
    ring = [link(a, b) for a, b in zip(ranks, ranks[1:] + ranks[:1], strict=True)]
    return 2 * (count - 1) * max(one.seconds(size_bytes / count) for one in ring)


def exchange_s(exchange: Exchanged, ranks: tuple[int, ...], link: Callable[[int, int], Link]) -> float:
    """Return the seconds of an exchange: a ring all-reduce, or one of its two halves."""
    return all_reduce_s(int(exchange.size_bytes), ranks, link) * (1.0 if exchange.kind == "sum" else 0.5)


@dataclass
class _Way:
    """How far a rank has come in a computation with exchanges: when it began, the next exchange, and the time."""

    start_s: float
    next: int
    now_s: float
    arrived: bool = False


class _Run:
    def __init__(
        self,
        programs: Mapping[int, RankProgram],
        wiring: Wiring,
        durations: Durations,
        link: Callable[[int, int], Link],
        overlap_reduce: bool,
    ) -> None:
        self.programs = programs
        self.durations = durations
        self.link = link
        self.sizes = {parameter.name: parameter.size_bytes for parameter in wiring.parameters}
        self.at = dict.fromkeys(programs, 0)
        self.clock_s = dict.fromkeys(programs, 0.0)
        self.spans: dict[tuple[int, int], tuple[float, float]] = {}
        self.posted_s: dict[tuple[int, int], float] = {}
        self.free_s: dict[tuple[int, int], float] = {}
        self.ends = match_messages(programs)
        self.awaited = {rank: awaited_receives(program) for rank, program in programs.items()}
        self.rows = {
            rank: {one.micro_batch: one.stop - one.start for one in program.instructions if isinstance(one, Load)}
            for rank, program in programs.items()
        }
        self.lane_s = dict.fromkeys(programs, 0.0)  # when a rank's collectives so far have ended
        self.backward_span: dict[int, tuple[float, float]] = {}
        self.reduced_bytes = dict.fromkeys(programs, 0)
        self.all_reduced_bytes = {
            rank: sum(self.bucket_bytes(one) for one in program.instructions if isinstance(one, AllReduce))
            for rank, program in programs.items()
        }
        self.overlap_reduce = overlap_reduce
        self.meetings: dict[Instruction, list[int]] = {}
        for rank, program in programs.items():
            for one in program.instructions if program.synced else ():
                if isinstance(one, _COMPUTATIONS):
                    self.meetings.setdefault(one, []).append(rank)
        groups: dict[tuple[int | None, int], list[int]] = {}
        for rank, program in sorted(programs.items()):
            groups.setdefault((program.stage, program.replica), []).append(rank)
        self.groups = {rank: tuple(group) for group in groups.values() for rank in group}
        self.ways: dict[int, _Way] = {}  # of the ranks that are in the middle of a computation
        self.arrivals: dict[tuple[tuple[int, ...], int], dict[int, float]] = {}  # by group and number of the exchange
        self.passed = dict.fromkeys(programs, 0)  # exchanges so far
        self.exchanged: list[Exchange] = []
        self.moved = False  # whether any rank has come further in this round

    def to_the_end(self) -> None:
        self.moved = True
        while self.moved:
            self.moved = False
            for rank in self.programs:
                while self.step(rank):
                    self.moved = True
        stuck = [rank for rank, at in sorted(self.at.items()) if at < len(self.programs[rank].instructions)]
        if stuck:
            places = (f"rank {rank} at {self.at[rank]} ({print_instruction(self.present(rank))})" for rank in stuck)
            raise DeadlockError(f"the programs do not end, waiting are {'; '.join(places)}")

    def present(self, rank: int) -> Instruction:
        return self.programs[rank].instructions[self.at[rank]]

    def step(self, rank: int) -> bool:
        """Follow the rank over its present instruction, if its time is known already."""
        if self.at[rank] == len(self.programs[rank].instructions):
            return False
        instruction = self.present(rank)
        match instruction:
            case Send() | Recv():
                self.post(rank, instruction)
                return True
            case AllReduce(ranks=ranks):
                return self.meet(ranks, instruction, self.bucket_bytes(instruction))
            case Join(ranks=ranks) | ReduceLoss(ranks=ranks):
                return self.meet(ranks, instruction, SCALAR_BYTES)
            case Update():
                needed = [index for index, one in enumerate(self.programs[rank].instructions) if _is_message(one)]
            case _:
                needed = list(self.awaited[rank].get(self.at[rank], ()))
        if self.programs[rank].synced and isinstance(instruction, _COMPUTATIONS):
            return self.compute_together(instruction)
        if not all((rank, index) in self.spans for index in needed):
            return False
        start_s = max([self.clock_s[rank], *(self.spans[rank, index][1] for index in needed)])
        if isinstance(instruction, Update):
            start_s = max(start_s, self.lane_s[rank])
        end = self.compute(rank, instruction, start_s)
        if end is None:
            return False
        end_s = end
        if isinstance(instruction, Backward | BackwardWeight):
            self.backward_span[rank] = start_s, end_s
        self.finish(rank, start_s, end_s)
        return True

    def compute_together(self, instruction: Instruction) -> bool:
        """Follow all ranks that meet in a computation over it, once each of them has come to it."""
        ranks = self.meetings[instruction]
        begins = []
        for rank in ranks:
            at, program = self.at[rank], self.programs[rank]
            needed = self.awaited[rank].get(at, ())
            if at == len(program.instructions) or program.instructions[at] != instruction:
                return False
            if not all((rank, index) in self.spans for index in needed):
                return False
            begins.append(max([self.clock_s[rank], *(self.spans[rank, index][1] for index in needed)]))
        start_s = max(begins)
        end_s = start_s + max(self.alone_s(rank, instruction) for rank in ranks)
        for rank in ranks:
            if isinstance(instruction, Backward | BackwardWeight):
                self.backward_span[rank] = start_s, end_s
            self.finish(rank, start_s, end_s)
        return True

    def alone_s(self, rank: int, instruction: Instruction) -> float:
        """Return the seconds of a computation and its exchanges, waits left out."""
        group, rows = self.groups[rank], self.rows[rank]
        inside = self.durations.inside(instruction, rows) if len(group) > 1 else ()
        return self.durations.of(rank, instruction, rows) + sum(exchange_s(one, group, self.link) for one in inside)

    def compute(self, rank: int, instruction: Instruction, start_s: float) -> float | None:
        """Return when a computation ends; None while other ranks of the group have not come to an exchange."""
        seconds = self.durations.of(rank, instruction, self.rows[rank])
        group = self.groups[rank]
        inside = self.durations.inside(instruction, self.rows[rank]) if len(group) > 1 else ()
        if not inside:
            return start_s + seconds
        way = self.ways.setdefault(rank, _Way(start_s, 0, start_s))
        while way.next < len(inside):
            exchange = inside[way.next]
            there = self.arrivals.setdefault((group, self.passed[rank]), {})
            if not way.arrived:
                done = inside[way.next - 1].at if way.next else 0.0
                way.now_s += seconds * (exchange.at - done)
                way.arrived, there[rank] = True, way.now_s
            if len(there) < len(group):
                return None
            end_s = max(there.values()) + exchange_s(exchange, group, self.link)
            self.exchanged.append(Exchange(rank, self.at[rank], exchange.kind, way.now_s, max(there.values()), end_s))
            way.now_s, way.arrived, way.next = end_s, False, way.next + 1
            self.passed[rank] += 1
            self.moved = True
        del self.ways[rank]
        return way.now_s + seconds * (1 - inside[-1].at)

    def finish(self, rank: int, start_s: float, end_s: float) -> None:
        self.spans[rank, self.at[rank]] = start_s, end_s
        self.clock_s[rank] = end_s
        self.at[rank] += 1

    def post(self, rank: int, message: Send | Recv) -> None:
        """Post one end of a message; if the other is posted too, its time is known."""
        here = rank, self.at[rank]
        self.posted_s[here] = self.clock_s[rank]
        self.at[rank] += 1
        there = self.ends.get(here)
        if there is None or there not in self.posted_s:
            return
        sent, received = (here, there) if isinstance(message, Send) else (there, here)
        pair = sent[0], received[0]
        link = self.link(*pair)
        start_s = max(self.posted_s[sent], self.posted_s[received], self.free_s.get(pair, 0.0))
        self.free_s[pair] = start_s + message.size_bytes / link.bandwidth_bytes_per_s
        self.spans[sent] = self.posted_s[sent], self.free_s[pair]
        self.spans[received] = self.posted_s[received], start_s + link.seconds(message.size_bytes)

    def meet(self, ranks: tuple[int, ...], collective: Instruction, size_bytes: int) -> bool:
        """Pass a collective with all its members, once the last has come."""
        for member in ranks:
            there = self.at[member] < len(self.programs[member].instructions)
            if not there or self.present(member) != collective:
                return False
        start_s = max(max(self.ready_s(member, collective), self.lane_s[member]) for member in ranks)
        end_s = start_s + all_reduce_s(size_bytes, ranks, self.link)
        for member in ranks:
            self.lane_s[member] = end_s
            self.spans[member, self.at[member]] = start_s, end_s
            self.at[member] += 1
            if isinstance(collective, Join):
                self.clock_s[member] = end_s
        return True

    def ready_s(self, rank: int, collective: Instruction) -> float:
        """Return when the rank's share of a collective is computed."""
        if not self.overlap_reduce or not isinstance(collective, AllReduce) or rank not in self.backward_span:
            return self.clock_s[rank]
        self.reduced_bytes[rank] += self.bucket_bytes(collective)
        start_s, end_s = self.backward_span[rank]
        return start_s + (end_s - start_s) * self.reduced_bytes[rank] / max(self.all_reduced_bytes[rank], 1)

    def bucket_bytes(self, bucket: AllReduce) -> int:
        return sum(self.sizes[name] for name in bucket.parameters)


def _is_message(instruction: Instruction) -> bool:
    return isinstance(instruction, Send | Recv)
