"""Which bounds on the period the dynamic program is run for.

The looser the bound, the shorter the way of a micro-batch may be: so one run with the
loosest says how good any tighter one can be, and most need not be run.
"""

from __future__ import annotations

import numpy as np

from .candidates import Search
from .dynamic import Program, fastest_period, thinned
from .pricing import IMPOSSIBLE, Batch
from .table import Layout

FINE = tuple(1.0 + 0.04 * step for step in range(1, 17))  # the same, where it is cheap
RATIOS = (1.02, 1.07, 1.13, 1.2, 1.28, 1.37, 1.5, 1.75, 2.2, 3.5)  # bounds, over the fastest period
FEW, FEW_SHORT = (
    2,
    8,
)  # micro-batches for each stage up to which plans are also looked for as if there were no rhythm; on short chains
NEAR, FAR_OFF = 1.02, 1.15  # times the best of this scan, and of all: bounds above are not tried


def scan(search: Search, layout: Layout, micro_batches: int, most: int, layers: int, rounds: int) -> list[Batch]:
    """Plans for a scan of bounds on the period, from tight to loose."""
    pricer = search.pricer(layout, micro_batches)
    positions = thinned(search.table, most)
    every = len(positions) > search.table.blocks
    program = Program(search, pricer, positions, layers)
    tightest = fastest_period(search, layout, pricer.micro_rows)
    if micro_batches == 1 or tightest <= 0:
        ratios: tuple[float, ...] = RATIOS[:1]
    else:
        ratios = (*FINE, *RATIOS[7:]) if layout.size <= 8 else RATIOS[:rounds]
    periods = [max(tightest, 1e-12) * ratio if micro_batches > 1 else IMPOSSIBLE / 2 for ratio in ratios]
    found: list[Batch] = []
    tight: list[float] = []  # the least y under the tightest bound that has a plan, for each order
    orders = {None: (False, True), "1f1b": (False,), "gpipe": (True,)}[search.request.schedule]
    for gpipe in orders if micro_batches > 1 else orders[:1]:
        program.set_order(gpipe)
        runs = Runs(program, periods[:: 3 if gpipe and len(orders) > 1 else 1])
        if tight and runs.tightest() >= tight[0]:
            continue  # the bounds that GPipe is free of do not bind
        if not gpipe and 1 < micro_batches <= (FEW_SHORT if every else FEW) * layers:
            few = program.run(IMPOSSIBLE / 2, micro_batches)
            found += [few[0]] if few is not None else []
        runs.subdivide()
        tight.append(runs.tightest())
        found += runs.found
    return found


class Runs:
    """Runs of the program for some of a row of periods, those that may hold a good plan.

    The looser the bound on the period P, the less y: no plan with its period in (P, Q] is
    below (m - 1) P + y(Q). So the loosest bound is tried first, and what lies between is
    divided for as long as it may be better.
    """

    def __init__(self, program: Program, periods: list[float]) -> None:
        self.program, self.search = program, program.search
        self.more = program.pricer.micro_batches - 1
        self.periods = [period for period in periods if self.more * period <= self.search.least_s] or periods[:1]
        self.known: dict[int, float] = {}
        self.found: list[Batch] = []
        self.best = np.inf

    def least(self, at: int) -> float:
        """The least y under one bound; infinite when there is no plan."""
        if at not in self.known:
            answer = self.program.run(self.periods[at])
            self.known[at] = np.inf
            if answer is not None:
                self.found.append(answer[0])
                self.known[at] = float(answer[1].min())
                self.best = min(self.best, self.more * self.periods[at] + self.known[at])
        return self.known[at]

    def tightest(self) -> float:
        """The least y under the tightest bound."""
        return self.least(0)

    def subdivide(self) -> None:
        """Run what may hold a good plan."""
        last = len(self.periods) - 1
        pending = [(0, last)] if self.least(last) < np.inf else []
        while pending:
            low, high = pending.pop()
            limit = min(self.best * NEAR, self.search.least_s * FAR_OFF)
            if low == high or self.more * self.periods[low] + self.known[high] > limit:
                continue
            middle = (low + high) // 2
            if self.least(middle) < np.inf:
                pending.append((low, middle))
            pending.append((middle + 1, high))
