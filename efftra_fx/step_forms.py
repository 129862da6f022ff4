"""The captured step for each form of batch that was met, the first what was compiled, and what runs it on ranks."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from efftra_fx.alike import same_capture
from efftra_fx.build import Built, check_meetings, connections, stage_times
from efftra_fx.compiler import Options, Report
from efftra_fx.errors import EfftraError
from efftra_fx.front_end import check_parts
from efftra_fx.passes.lower import lower
from efftra_fx.passes.verify import verify_programs
from efftra_fx.program import RankProgram
from efftra_fx.runtime.executor import Executor
from efftra_fx.signature import Call
from efftra_fx.variants import (
    MANY_VARIANTS,
    MOST_DESCRIBED,
    MOST_VARIANTS,
    capture_again,
    choose,
    lay_out,
    note_of_many,
)
from efftra_fx.varying import Traces
from efftra_fx.world import World


@dataclass
class StepForms:
    """Forms of a step over the same tensors, by number; `met` is the one that a batch of a description had last.

    `executors` are kept by form and number of rows, with the programs that they run.
    """

    first: Built
    model: nn.Module
    options: Options
    report: Report
    more: list[Built] = field(default_factory=list)
    traces: Traces = field(default_factory=Traces)
    met: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0  # that capturing further ones took
    executors: dict[tuple[int, int], tuple[dict[int, RankProgram], dict[int, Executor]]] = field(default_factory=dict)

    @property
    def all(self) -> list[Built]:
        """Every form, the first what was compiled."""
        return [self.first, *self.more]

    def choose(self, call: Call, tensors: Sequence[Tensor], described: str) -> int:
        """Return the form that a batch is for; raises NotCaptured where it is a new one."""
        buffers = next(iter(self.first.tensors.values())).buffers
        likely = self.met.get(described, 0)
        return choose(self.all, self.model, self.options.loss_fn, call, tensors, buffers, likely)

    def note(self, described: str, form: int) -> None:
        """Keep in mind which form a batch of this description had."""
        if len(self.met) >= MOST_DESCRIBED:
            self.met.clear()
        self.met[described] = form

    def add(self, call: Call, tensors: Sequence[Tensor], reason: str, world: World) -> int:
        """Capture the step for a new form of batch, and lay it out on the tensors that are held; a collective call."""
        problem: EfftraError | None = None
        built: Built | None = None
        begin = time.perf_counter()
        try:
            front = capture_again(self.model, self.all, self.traces, call, tensors, self.options, reason)
            built = lay_out(self.first, front, world, self.options.backend)
        except EfftraError as error:
            problem = error
        world.agree(problem, world.calls)
        assert built is not None
        same_capture(built.front, self.options, world)
        self.seconds += time.perf_counter() - begin
        if len(self.more) == MANY_VARIANTS:
            self.traces.notes.append(note_of_many(MANY_VARIANTS, self.seconds, reason))
        tell(self.traces.notes, world)
        if len(self.more) == MOST_VARIANTS:
            self.more.clear()
            self.met.clear()
            self.executors = {key: value for key, value in self.executors.items() if key[0] == 0}
        self.more.append(built)
        return len(self.more)

    def executors_of(self, rows: int, form: int, world: World) -> dict[int, Executor]:
        """Return this process's executors for a batch's size and form; lowered, verified and kept at first use."""
        if (form, rows) in self.executors:
            return self.executors[form, rows][1]
        built = self.all[form]
        begin = time.perf_counter()
        known = built.back.plan.blocks == len(built.chain.blocks)  # another form of batch may have other blocks
        times = stage_times(built.chain, built.back.plan, rows) if known else None
        programs = lower(built.back.plan, built.back.wiring, rows, ranks=world.size, times=times)
        self.report.timed("lower", begin)
        begin = time.perf_counter()
        verify_programs(programs, built.back.wiring, built.back.plan)
        self.report.timed("verify", begin)
        check_parts(built.front, programs)
        world.prepare(*connections(programs))
        begin = time.perf_counter()
        executors = {
            t.rank: Executor(
                programs[t.rank],
                built.values,
                built.works[t.rank],
                built.tensors[t.rank],
                built.tails[t.rank],
                t,
                built.shapes[t.rank],
                news=built.news.get(t.rank),
            )
            for t in world.transports
        }
        check_meetings(programs, built.works, world)
        self.report.timed("differentiate", begin)
        self.executors[form, rows] = (programs, executors)
        if len(self.executors) > MOST_VARIANTS:
            del self.executors[next(iter(self.executors))]
        return executors


def tell(notes: list[str], world: World) -> None:
    """Print what nobody has been told yet."""
    while notes:
        note = notes.pop(0)
        if world.first:
            print(f"efftra_fx: {note}", file=sys.stderr)


__all__ = ["StepForms", "tell"]
