"""The equations of a step, written once; with sympy symbols they are the formula, with numbers its value.

For stages s = 0 … S - 1 of one micro-batch (seconds): f, b forward and backward, c, d the
boundary behind the stage there and back; a the all-reduce that is left when the
stage's last backward ends; m micro-batches; K_s of them in flight. A schedule is a
graph of events, and a step is its longest path. The formula is the longest of those
paths that come to one stage, repeat one loop there, and go home:

    step = max over s, e >= s of  begin_s + q trip(s, e) + (n - q k)(f_s + b_s) + end_s

    begin_s    until the first backward of s has ended
    trip       one micro-batch from s to e and back, after which s is k micro-batches
               further: k = K_s - K_e + 1, since stages alternate strictly
    n, q       m - 1 - K_s micro-batches between the first backward and the last forward; n // k
    end_s      from the start of the last forward of s to the end of the step

and of the paths that stay in one stage or channel all the time. Each is a path of the
schedule, so no step is below the formula. GPipe has no loops: there the formula is the step.
Shapes: one number a stage, in order; the boundary behind the last stage is 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import sympy as sp

MICRO_BATCHES = sp.Symbol("m", positive=True)


@dataclass(frozen=True)
class StageTerms:
    """The symbols of one stage, or their numbers: seconds, and micro-batches in flight (at most m)."""

    forward: Any
    backward: Any
    there: Any
    back: Any
    reduce: Any
    flying: Any


@dataclass(frozen=True)
class Route:
    """A path of the schedule: `before`, then `times` times `each`, then `after` (seconds).

    `stage` is where it repeats, `far` the end of the way that it repeats. `kind` is
    compute, forward, backward, there, back (the boundary behind the stage) or loop.
    `exists` is a condition: m may be too small for a loop.
    """

    kind: str
    stage: int
    far: int
    before: Any
    times: Any
    each: Any
    after: Any
    exists: Any = True

    @property
    def total(self) -> Any:
        """Seconds of the whole path; 0 for one that does not exist."""
        whole = self.before + self.times * self.each + self.after
        return whole if self.exists is True else either(self.exists, whole)


def largest(*terms: Any) -> Any:
    """The largest of some numbers, or sympy's Max."""
    return sp.Max(*terms, evaluate=False) if any(isinstance(term, sp.Expr) for term in terms) else max(terms)


def either(condition: Any, value: Any) -> Any:
    """The value where the condition holds, 0 where not."""
    if isinstance(condition, sp.Basic):
        return sp.Piecewise((value, condition), (0, True))
    return value if condition else 0.0


def stage_symbols(index: int) -> StageTerms:
    """f_s, b_s, c_s, d_s, a_s, K_s."""
    names = [f"{letter}_{index}" for letter in ("f", "b", "c", "d", "a", "K")]
    return StageTerms(*(sp.Symbol(name, nonnegative=True) for name in names))


class Ways:
    """Sums along the line of stages that all routes are made of; lists with one entry a stage."""

    def __init__(self, stages: Sequence[StageTerms]) -> None:
        self.stages = stages
        self.arrive: list[Any] = [0]  # until the first micro-batch is at stage s
        self.home: list[Any] = [0]  # from the end of a backward of s until its gradient has passed all stages before
        for stage in stages[:-1]:
            self.arrive.append(self.arrive[-1] + stage.forward + stage.there)
            self.home.append(self.home[-1] + stage.backward + stage.back)
        self.rest: list[Any] = []  # the same, with the all-reduces that outlast it
        self.ahead: list[Any] = []  # the longest forward or channel on the way to stage s
        self.behind: list[Any] = []
        for s, stage in enumerate(stages):
            ways = [self.home[s] - self.home[k] + stages[k].reduce for k in range(s + 1)]
            self.rest.append(largest(*ways))
            before = stages[s - 1] if s else None
            self.ahead.append(largest(stage.forward, *((self.ahead[-1], before.there) if before else ())))
            self.behind.append(largest(stage.backward, *((self.behind[-1], before.back) if before else ())))

    def begin(self, s: int) -> Any:
        """Until the first backward of stage s has ended: any later stage may hold it up by its warm-up."""
        ways = []
        for e in range(s, len(self.stages)):
            there = self.arrive[e] + (self.stages[e].flying - 1) * self.ahead[e] + self.stages[e].forward
            ways.append(there + self.stages[e].backward + self.home[e] - self.home[s])
        return largest(*ways)

    def end(self, s: int) -> Any:
        """From the start of the last forward of stage s to the end of the step: any later stage may wind down last."""
        ways = []
        for e in range(s, len(self.stages)):
            stage, more = self.stages[e], self.stages[e].flying - 1
            there = self.arrive[e] - self.arrive[s] + stage.forward + stage.backward
            ways += [there + more * stage.backward + self.rest[e], there + more * self.behind[e] + self.home[e]]
        return largest(*ways)

    def trip(self, s: int, e: int) -> Any:
        """One micro-batch from the start of its forward on s to e and back to the end of its backward on s."""
        far = self.stages[e]
        return self.arrive[e] - self.arrive[s] + far.forward + far.backward + self.home[e] - self.home[s]


def routes(
    stages: Sequence[StageTerms], schedule: str, multiplicity: int = 1, m: Any = MICRO_BATCHES
) -> Iterator[Route]:
    """The paths that the formula is the longest of."""
    ways, last = Ways(stages), len(stages) - 1
    if schedule == "gpipe" or last == 0:
        yield from gpipe_routes(ways, m)
        return
    for s, stage in enumerate(stages):
        begin, end, own = ways.begin(s), ways.end(s), stage.forward + stage.backward
        yield Route("compute", s, s, ways.arrive[s], m, own, ways.rest[s])
        yield Route("backward", s, s, begin, m - 1, stage.backward, ways.rest[s])
        yield Route("forward", s, s, ways.arrive[s], m - 1, stage.forward, end)
        if s < last:
            there = ways.arrive[s] + stage.forward
            yield Route("there", s, s + 1, there, m, stage.there, ways.end(s + 1))
            yield Route("back", s, s + 1, ways.begin(s + 1), m, stage.back, stage.backward + ways.rest[s])
        between = m - 1 - stage.flying
        for e in range(s, last + 1):
            ahead = multiplicity * (e - s) + 1
            # of whole numbers between // ahead, too, but half a step away from where rounding would turn it over
            middle = (2 * between + 1) / sp.Integer(2 * ahead)
            times = sp.floor(middle) if isinstance(between, sp.Expr) else between // ahead
            left = (between - ahead * times) * own
            yield Route("loop", s, e, begin, times, ways.trip(s, e), left + end, between >= 0)


def gpipe_routes(ways: Ways, m: Any) -> Iterator[Route]:
    """All forwards, then all backwards: each takes its sum and m - 1 times its longest part."""
    stages = ways.stages
    first = ways.arrive[-1] + stages[-1].forward
    for s, stage in enumerate(stages):
        part = stages[s:-1]
        slowest = largest(stages[-1].backward, *(term for one in part for term in (one.backward, one.back)))
        way = ways.home[-1] - ways.home[s] + stages[-1].backward
        yield Route("gpipe", s, s, first, m - 1, ways.ahead[-1] + slowest, way + stage.reduce)


def step(stages: Sequence[StageTerms], schedule: str, multiplicity: int = 1, micro_batches: Any = MICRO_BATCHES) -> Any:
    """The synchronous step: the longest route."""
    return largest(*(route.total for route in routes(stages, schedule, multiplicity, micro_batches)))


def stage_memory() -> sp.Expr:
    """Bytes of one device: w parameters, g gradients, z optimizer bytes a gradient byte, K in flight, x rows."""
    w, g, z, flying, rows, saved, working, coming, going = sp.symbols("w g z K x s v i o", nonnegative=True)
    return w + g * (1 + z) + rows * (flying * saved + working) + 2 * (coming + going)


def ring_all_reduce() -> sp.Expr:
    """Seconds of a ring over r members: n bytes through a link of B bytes/s and latency L."""
    members, size, bandwidth, latency = sp.symbols("r n B L", positive=True)
    return 2 * (members - 1) * (size / (members * bandwidth) + latency)


@cache
def numeric_step(stages: int, schedule: str, multiplicity: int = 1) -> Callable[..., float]:
    """The step as a function of (m, f_0, b_0, c_0, d_0, a_0, K_0, f_1, …), generated from `step`."""
    symbols = [stage_symbols(index) for index in range(stages)]
    flat = [
        getattr(one, name) for one in symbols for name in ("forward", "backward", "there", "back", "reduce", "flying")
    ]
    generated: Callable[..., float] = sp.lambdify([MICRO_BATCHES, *flat], step(symbols, schedule, multiplicity), "math")
    return generated
