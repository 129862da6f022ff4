"""The equations of a step, written once in sympy; the numeric forms are generated from them.

For stages s = 0 … S - 1 of one micro-batch (seconds): f, b forward and backward, c, c' the
boundary behind the stage there and back; a the all-reduce that is left when the
stage's last backward ends; m micro-batches; K_s in flight. The longest of a stage, a
channel, a pair of neighbours and a round trip is the period P (1F1B):

    step = Σ (f + c) + (m - 1) P + max over s ( Σ_{k >= s} b_k + Σ_{k >= s, k < S - 1} c'_k + a_s )

For GPipe P is the longest of the forwards (and channels) plus that of the backwards.
Shapes: one number a stage, in order; the boundary behind the last stage is 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import sympy as sp

MICRO_BATCHES = sp.Symbol("m", positive=True)


@dataclass(frozen=True)
class StageTerms:
    """The symbols of one stage, or their numbers: seconds, and micro-batches in flight."""

    forward: sp.Expr
    backward: sp.Expr
    there: sp.Expr
    back: sp.Expr
    reduce: sp.Expr
    flying: sp.Expr


def stage_symbols(index: int) -> StageTerms:
    """f_s, b_s, c_s, c'_s, a_s, K_s."""
    names = [f"{letter}_{index}" for letter in ("f", "b", "c", "d", "a", "K")]
    return StageTerms(*(sp.Symbol(name, nonnegative=True) for name in names))


def period(stages: Sequence[StageTerms], schedule: str, multiplicity: int = 1) -> sp.Expr:
    """Seconds between one micro-batch and the next in the steady state."""
    if schedule == "gpipe":
        ahead = sp.Max(*(term for stage in stages for term in (stage.forward, stage.there)))
        behind = sp.Max(*(term for stage in stages for term in (stage.backward, stage.back)))
        return ahead + behind
    terms: list[sp.Expr] = []
    for index, stage in enumerate(stages):
        terms += [stage.forward + stage.backward, stage.there, stage.back]
        for reach in range(1, min(3, len(stages) - index)):  # strict alternation ties neighbours together
            terms.append(round_trip(stages[index : index + reach + 1]) / (multiplicity * reach + 1))
        terms.append(round_trip(stages[index:]) / stage.flying)
    return sp.Max(*terms)


def round_trip(stages: Sequence[StageTerms]) -> sp.Expr:
    """One micro-batch through these stages, there and back."""
    last = len(stages) - 1
    return sp.Add(
        *(
            stage.forward + stage.backward + (stage.there + stage.back if at < last else 0)
            for at, stage in enumerate(stages)
        )
    )


def tail(stages: Sequence[StageTerms]) -> sp.Expr:
    """The last micro-batch's way back and the all-reduces that outlast it."""
    ways = []
    for index in range(len(stages)):
        way = sp.Add(*(stage.backward for stage in stages[index:]), *(stage.back for stage in stages[index:-1]))
        ways.append(way + stages[index].reduce)
    return sp.Max(*ways)


def step(
    stages: Sequence[StageTerms], schedule: str, multiplicity: int = 1, micro_batches: sp.Expr = MICRO_BATCHES
) -> sp.Expr:
    """The synchronous step."""
    first = sp.Add(*(stage.forward + stage.there for stage in stages))
    return first + (micro_batches - 1) * period(stages, schedule, multiplicity) + tail(stages)


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
