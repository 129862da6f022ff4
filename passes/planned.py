"""What the planner gives back."""

from __future__ import annotations

from dataclasses import dataclass

from efftra_fx.plan import Plan

from .evaluate import Figures


@dataclass(frozen=True)
class Alternative:
    """Another plan, what it is, and its predicted step; `plan=None` when it does not fit the memory."""

    label: str
    step_s: float
    plan: Plan | None


@dataclass(frozen=True)
class Planned:
    """The best plan found, the bound below which no plan can be, and what else was looked at.

    `proven`: every plan was looked at. `limited` says which search limit was hit, if any.
    """

    plan: Plan
    figures: Figures
    lower_bound_s: float
    candidates: int
    alternatives: tuple[Alternative, ...] = ()
    proven: bool = False
    limited: str = ""

    @property
    def step_s(self) -> float:
        """Predicted seconds of one step."""
        return self.figures.step_s

    @property
    def memory_bytes(self) -> tuple[int, ...]:
        """Bytes on the fullest device of each stage."""
        return self.figures.memory_bytes
