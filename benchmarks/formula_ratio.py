"""How far the formula of a step is below the replayed schedule, over random plans.

    python benchmarks/formula_ratio.py [--plans N] [--seed N]

Uneven plans draw every time from six values between 0 and 4, balanced ones keep all
stages within 10 % of one another; 1 to 12 stages, 1 to 64 micro-batches. All times are simulated.
"""

from __future__ import annotations

import argparse
import sys

import numpy as np

from efftra_fx.passes.clock import ends
from efftra_fx.passes.pricing import Prices
from efftra_fx.passes.replay import formula_steps
from efftra_fx.passes.table import Floats

ORDERS = (("1f1b", 1), ("1f1b", 2), ("gpipe", 1))
MICRO_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64)
AT_ONCE = 50  # plans of one depth, micro-batch count and order


def main() -> int:
    """Print the table."""
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--plans", type=int, default=60_000, help="random plans in each row (default 60,000)")
    words.add_argument("--seed", type=int, default=0)
    options = words.parse_args()
    print(f"{'formula / replay':26}{'least':>8}{'1 in 1000':>11}{'1 in 100':>10}{'largest':>9}{'equal':>8}")
    for schedule, multiplicity in ORDERS:
        for balanced in (False, True):
            found = ratios(np.random.default_rng(options.seed), options.plans, schedule, multiplicity, balanced)
            name = f"{schedule}{' deep' if multiplicity == 2 else ''}, {'balanced' if balanced else 'uneven'}"
            low, lower = np.quantile(found, [0.001, 0.01])
            equal = float((found > 1 - 1e-9).mean())
            print(f"{name:26}{found.min():8.3f}{low:11.3f}{lower:10.3f}{found.max():9.3f}{equal:8.1%}", flush=True)
    return 0


def ratios(rng: np.random.Generator, plans: int, schedule: str, multiplicity: int, balanced: bool) -> Floats:
    """Formula over replay of so many random plans."""
    found = []
    for _ in range(-(-plans // AT_ONCE)):
        depth, micro = int(rng.integers(1, 13)), int(rng.choice(MICRO_BATCHES))
        prices = random_prices(rng, depth, balanced)
        line = prices.forward_s, prices.backward_s, prices.there_s, prices.back_s
        replayed = (ends(line, micro, schedule, multiplicity) + prices.extra_s).max(axis=1)
        formula = formula_steps(prices, micro, schedule, multiplicity)
        found.append(formula[replayed > 0] / replayed[replayed > 0])
    return np.concatenate(found)


def random_prices(rng: np.random.Generator, depth: int, balanced: bool) -> Prices:
    """Plans of one depth with random seconds."""
    forward, backward, reduce = (rng.choice([0.0, 0.1, 0.5, 1.0, 1.7, 4.0], (AT_ONCE, depth)) for _ in range(3))
    there, back = (rng.choice([0.0, 0.0, 0.1, 0.5, 1.0, 4.0], (AT_ONCE, depth - 1)) for _ in range(2))
    if balanced:
        forward, backward = 1 + forward / 40, 2 + backward / 20
        there, back = there / 8, back / 8
    none, whole = np.zeros((AT_ONCE, depth)), np.zeros((AT_ONCE, depth), dtype=np.int64)
    return Prices(
        forward,
        backward,
        there,
        back,
        reduce,
        reduce,
        none[:, 0],
        whole[:, 0],
        none,
        none,
        none,
        none > 0,
        whole,
        whole,
    )


if __name__ == "__main__":
    sys.exit(main())
