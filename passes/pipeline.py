"""What a pass is, and the line of passes: order checked before anything runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import ClassVar, Protocol

from torch import fx


class Pass(Protocol):
    """A frozen dataclass whose fields are its options; takes a graph and returns one."""

    name: ClassVar[str]
    needs: ClassVar[tuple[str, ...]]
    gives: ClassVar[tuple[str, ...]]

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule: ...


After = Callable[[str, fx.GraphModule, float], None]


def check_order(passes: Sequence[Pass], given: Sequence[str]) -> None:
    """Raise ValueError where a pass stands before the one that gives what it needs."""
    known = set(given)
    for one in passes:
        missing = [key for key in one.needs if key not in known]
        if missing:
            raise ValueError(f"pass {one.name} needs {', '.join(missing)}, which no pass before it gives")
        known.update(one.gives)


def run_passes(
    gm: fx.GraphModule, passes: Sequence[Pass], given: Sequence[str], after: After | None = None
) -> fx.GraphModule:
    """Run passes in order; the graph lints after each, and `after` is told its name, result and seconds."""
    check_order(passes, given)
    for one in passes:
        begin = time.perf_counter()
        gm = one(gm)
        gm.graph.lint()
        if after is not None:
            after(one.name, gm, time.perf_counter() - begin)
    return gm
