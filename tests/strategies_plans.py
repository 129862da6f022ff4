"""Random chains, clusters and plans for the planner's tests, small enough to try every plan."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from efftra_fx.cluster import Cluster, Device, Link, Links
from efftra_fx.cost import Chain, Crossing, NodeCost, Timing
from efftra_fx.plan import Plan, Stage

SECONDS = st.sampled_from([0.0, 0.001, 0.002, 0.005, 0.01, 0.03])
BYTES = st.sampled_from([0, 10_000, 200_000, 3_000_000, 40_000_000])


@st.composite
def timings(draw: st.DrawFn) -> Timing:
    """A straight line in rows."""
    return Timing(draw(st.sampled_from([0.0, 0.0, 0.004])), draw(SECONDS))


@st.composite
def chains(draw: st.DrawFn, most: int = 7, skips: bool = True, recompute: bool = False) -> Chain:
    """Up to `most` blocks; with skips some values are read again later on."""
    size = draw(st.integers(1, most))
    blocks = []
    for index in range(size):
        weight = draw(BYTES)
        trained = weight if draw(st.booleans()) else 0
        cost = NodeCost(f"b{index}", draw(timings()), draw(timings()), weight, trained, 1000, draw(BYTES) / 100)
        if draw(st.integers(0, 3)) == 3:
            cost = replace(cost, exchanges=draw(st.integers(1, 3)), exchange_bytes=draw(BYTES) / 100)
        blocks.append(cost.with_recompute() if recompute else cost)
    crossings = []
    for index in range(size - 1):
        readers = {index + 1}
        if skips and draw(st.booleans()):
            readers.add(draw(st.integers(index + 1, size - 1)))
        crossings.append(Crossing(index, tuple(sorted(readers)), draw(BYTES) / 100, draw(st.booleans())))
    return Chain(tuple(blocks), tuple(crossings))


@st.composite
def wide_chains(draw: st.DrawFn, most: int = 4) -> Chain:
    """Chains whose blocks may be two ranks wide, and whose values have parts of fixed size."""
    chain = draw(chains(most))
    blocks = []
    for block in chain.blocks:
        half, sums = block.gradient_bytes / 2, draw(st.integers(0, 2))
        wide = replace(
            block.base, forward=draw(timings()), backward=draw(timings()), parameter_bytes=block.parameter_bytes / 2,
            gradient_bytes=half, tensor=2, reduces=sums, reduce_bytes=draw(BYTES) / 100 * (sums > 0),
        )  # fmt: skip
        blocks.append(replace(block, options=(wide,)))
    crossings = tuple(replace(one, whole_bytes=draw(BYTES) / 10) for one in chain.crossings)
    return replace(chain, blocks=tuple(blocks), crossings=crossings)


@st.composite
def clusters(draw: st.DrawFn, most: int = 5, kinds: int = 2, limits: bool = True) -> Cluster:
    """Up to `most` devices on one or two machines, of one or two kinds, in any order."""
    machines = sorted(draw(st.lists(st.integers(0, 1), min_size=1, max_size=most)))
    machines = [machine - machines[0] for machine in machines]
    memory = [40_000_000, 160_000_000, 400_000_000] if limits else [None]
    fast = Device(0, "fast", draw(st.sampled_from([None, *memory])), 1.0)
    slow = Device(0, "slow", draw(st.sampled_from([None, *memory])), 0.4)
    devices = []
    for machine in machines:
        kind = fast if kinds == 1 or draw(st.booleans()) else slow
        devices.append(Device(machine, kind.kind, kind.memory_bytes, kind.speed))
    latency = draw(st.sampled_from([0.0, 0.0005]))
    inside = Link(draw(st.sampled_from([1e9, 1e10])), latency / 2)
    between = Link(draw(st.sampled_from([2e8, 1e9])), latency)
    return Cluster(tuple(devices), Links((inside,) * (max(machines) + 1), between))


@st.composite
def plans(draw: st.DrawFn, blocks: int, devices: int, rows: int) -> Plan:
    """Any plan at all: any order of devices, some of them unused."""
    order = draw(st.permutations(range(devices)))
    depth = draw(st.integers(1, min(blocks, devices)))
    cuts = (
        sorted(draw(st.sets(st.integers(1, blocks - 1), min_size=depth - 1, max_size=depth - 1))) if depth > 1 else []
    )
    ends = sorted(draw(st.sets(st.integers(1, devices), min_size=depth, max_size=depth)))
    bounds, starts = (0, *cuts, blocks), (0, *ends)
    stages = tuple(
        Stage(bounds[index], bounds[index + 1], tuple(order[starts[index] : starts[index + 1]]))
        for index in range(depth)
    )
    schedule, in_flight = draw(st.sampled_from([("1f1b", 1), ("1f1b", 2), ("gpipe", 1)]))
    return Plan(stages, draw(st.integers(1, rows)), schedule, in_flight)
