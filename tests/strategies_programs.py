"""Random wirings, plans, clusters, and the programs that come of them."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

from efftra_fx.cluster import Cluster, Device, Link, Links
from efftra_fx.passes.lower import lower
from efftra_fx.plan import Plan, Stage
from efftra_fx.program import Parameter, RankProgram, Value, Wiring

DTYPES = ("float32", "float64", "bfloat16", "int64", "bool")


@dataclass(frozen=True)
class Case:
    """A wiring, a plan for it, and the other arguments of `lower`."""

    wiring: Wiring
    plan: Plan
    rows: int
    ranks: int
    bucket_bytes: int = 64
    defer_weights: int = 1
    times: tuple[tuple[float, float], ...] | None = None

    def lower(self) -> dict[int, RankProgram]:
        return lower(
            self.plan,
            self.wiring,
            self.rows,
            ranks=self.ranks,
            bucket_bytes=self.bucket_bytes,
            defer_weights=self.defer_weights,
            times=self.times,
        )


@st.composite
def wirings(draw: st.DrawFn, max_stages: int = 5) -> Wiring:
    """Draw a random DAG of stages: skips, several consumers, all kinds of values, shared and frozen parameters."""
    stages = draw(st.integers(1, max_stages))
    backward = tuple(draw(st.lists(st.sampled_from((True, True, True, False)), min_size=stages, max_size=stages)))
    values = []
    for index in range(draw(st.integers(0, 5)) if stages > 1 else 0):
        producer = draw(st.integers(0, stages - 2))
        consumers = draw(st.sets(st.integers(producer + 1, stages - 1), min_size=1, max_size=3))
        shape = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
        values.append(
            Value(
                f"v{index}",
                draw(st.sampled_from(DTYPES)),
                shape,
                draw(st.sampled_from(("rows", "rows", "rows", "whole", "sum"))),
                draw(st.integers(0, len(shape) - 1)),
                producer,
                tuple(sorted(consumers)),
                tuple(draw(st.booleans()) for _ in consumers),
            )
        )
    parameters = tuple(
        Parameter(
            f"p{index}.weight",
            draw(st.sampled_from(DTYPES[:3])),
            (draw(st.integers(1, 8)),),
            tuple(sorted(draw(st.sets(st.integers(0, stages - 1), min_size=1, max_size=2)))),
            draw(st.sampled_from((True, True, False))),
        )
        for index in range(draw(st.integers(0, 4)))
    )
    joined = draw(st.sampled_from((False, False, True)))
    return Wiring(stages, tuple(values), parameters, backward, joined, draw(st.sampled_from((True, True, False))))


@st.composite
def cases(draw: st.DrawFn, max_stages: int = 5, max_rows: int = 13) -> Case:
    """Draw a wiring and everything else that lowering takes; replicas are uneven, ranks in any order and some idle."""
    wiring = draw(wirings(max_stages))
    replicas = [draw(st.integers(1, 3)) for _ in range(wiring.stages)]
    idle = draw(st.integers(0, 2))
    ranks = sum(replicas) + idle
    order = iter(draw(st.permutations(range(ranks))))
    stages = tuple(
        Stage(index, index + 1, tuple(next(order) for _ in range(count))) for index, count in enumerate(replicas)
    )
    plan = Plan(
        stages,
        draw(st.integers(1, 7)),
        "gpipe" if wiring.joined else draw(st.sampled_from(("1f1b", "gpipe"))),
        draw(st.integers(1, 2)),
    )
    seconds = st.sampled_from((0.0, 0.5, 1.0, 3.0))
    times = st.tuples(*(st.tuples(seconds, seconds) for _ in range(wiring.stages)))
    return Case(
        wiring,
        plan,
        draw(st.integers(1, max_rows)),
        ranks,
        draw(st.sampled_from((1, 16, 1000))),
        draw(st.sampled_from((1, 1, 2, 3))),
        draw(st.none() | times),
    )


@st.composite
def clusters(draw: st.DrawFn, ranks: int) -> Cluster:
    """Draw machines that hold `ranks` devices together, with any links."""
    machines = sorted(draw(st.integers(0, 2)) for _ in range(ranks))
    links = [Link(draw(st.sampled_from((1e3, 1e6, 1e9))), draw(st.sampled_from((0.0, 1e-5, 1e-2)))) for _ in range(4)]
    devices = tuple(Device(machine, "cpu", None, draw(st.sampled_from((1.0, 0.4)))) for machine in machines)
    return Cluster(devices, Links(tuple(links[:3]), links[3]))
