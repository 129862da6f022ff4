"""What the price of a plan takes into account."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rules:
    """What the price of a plan takes into account.

    `overlap`: the gradients of a block are reduced as soon as its last backward is
    done, not the whole stage's. `whole_rows`: rows are never cut in two (a part of 10
    rows over 3 replicas takes as long as 4 rows). `forwarded_skips`: a value read by a
    later stage passes through every stage between, instead of going there straight.
    """

    overlap: bool = True
    whole_rows: bool = True
    forwarded_skips: bool = False
    optimizer_bytes_per_parameter_byte: float = 2.0


DEFAULT_RULES = Rules()
