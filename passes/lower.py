"""Lower a plan and its wiring to one straight-line program a rank.

All stages' work is laid out in one order of time. Going through it, each work is
written into the programs of its stage's ranks; right after a work, each part that
it sends is written as a `Send` into the sender's program and as a `Recv` into the
receiver's, each at its present end. So a receive stands in front of the computation
that is running while the part is on its way, and one order of time exists that all
programs agree with: nobody can wait for what comes later in it. That holds with
buffers, when sends block until received, when the messages between two ranks are
processed one after another, and when runs of messages are batched: on both sides
of a pair of ranks, messages in both directions stand in the same order.

    stage 0   F0 ──send──┐  F1
                         │
    stage 1      F? recv ┘ … F0        the receive is posted before whatever stage 1 computes meanwhile
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from efftra_fx.errors import PlanError
from efftra_fx.plan import Plan
from efftra_fx.program import (
    AllReduce,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Instruction,
    Join,
    Load,
    Parameter,
    RankProgram,
    ReduceLoss,
    Update,
    Wiring,
)

from .routes import Cell, Route, find_routes, lay_out_cells
from .schedule import Times, Work, order_of_work

# As in DistributedDataParallel (Li et al., VLDB 2020): the first sum starts soon, the others are worth their latency.
BUCKET_BYTES = 25 * 2**20
FIRST_BUCKET_BYTES = 2**20


def lower(
    plan: Plan,
    wiring: Wiring,
    rows: int,
    *,
    ranks: int | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    defer_weights: int = 1,
    times: Times | None = None,
) -> dict[int, RankProgram]:
    """Return every rank's program for one step over a global batch of `rows` rows.

    `ranks` is the size of the world: devices that the plan leaves idle get a program
    too, so that they learn the loss. Gradients are all-reduced in buckets of about
    `bucket_bytes`. Weight gradients are computed once for `defer_weights`
    micro-batches, but for synced stages, whose replicas meet in each. `times` are each
    stage's measured or predicted seconds (forward, backward) of a micro-batch: they only
    help to post receives at the right moment.

    Raises PlanError when plan and wiring do not fit together.
    """
    world = _check(plan, wiring, rows, ranks, defer_weights, times)
    devices = tuple(stage.devices for stage in plan.stages)
    widths = tuple(stage.tensor for stage in plan.stages)
    cells = lay_out_cells(devices, rows, plan.micro_batches, widths)
    lines: dict[int, list[Instruction]] = {rank: [] for rank in world}
    _write_work(lines, plan, wiring, cells, order_of_work(plan, wiring, len(cells[0]), times, defer_weights))
    for bucket in plan_buckets(wiring, devices, bucket_bytes, widths):
        for rank in bucket.ranks:
            lines[rank].append(bucket)
    places = {rank: (stage, q) for stage, line in enumerate(devices) for q, rank in enumerate(line)}
    programs = {}
    for rank in world:
        if wiring.loss:
            lines[rank].append(ReduceLoss(world))
        stage, place = places.get(rank, (None, 0))
        width = 1 if stage is None else widths[stage]
        instructions = (*lines[rank], Update())
        programs[rank] = RankProgram(
            rank,
            rows,
            plan.micro_batches,
            stage,
            place // width,
            instructions,
            place % width,
            width,
            stage in wiring.synced,
        )
    return programs


def plan_buckets(
    wiring: Wiring, devices: tuple[tuple[int, ...], ...], bucket_bytes: int, widths: tuple[int, ...] | None = None
) -> tuple[AllReduce, ...]:
    """Return the gradient all-reduces of a step, in the one order that all ranks keep.

    A parameter is reduced over its groups (see `reduce_groups`), once. What is
    complete first comes first: late stages before early ones, and within a stage
    the parameters that the backward reaches first. Buckets hold one dtype; the first of each kind is
    small, because it is made while the backward still holds all that the forward kept.
    """
    groups: dict[tuple[tuple[int, ...], str, bool], list[Parameter]] = {}
    for parameter in reversed(wiring.parameters):
        if has_gradient(parameter, wiring):
            groups.setdefault((parameter.stages, parameter.dtype, parameter.partial), []).append(parameter)
    buckets = []
    for key in sorted(groups, key=lambda key: (-min(key[0]), key)):
        for ranks in reduce_groups(groups[key][0], devices, widths):
            buckets += [AllReduce(names, ranks) for names in _fill_buckets(groups[key], bucket_bytes)]
    return tuple(buckets)


def reduce_groups(
    parameter: Parameter, devices: tuple[tuple[int, ...], ...], widths: tuple[int, ...] | None
) -> tuple[tuple[int, ...], ...]:
    """Return the groups of ranks that add up their gradients of a parameter; a rank alone makes no group.

    Usually that is one group: all ranks of all stages that read it. In a stage wider than one rank,
    ranks with the same number in their replicas hold the same share, or the same gradient, and add
    those up; only gradients that are partial sums within a replica are added over all ranks.
    Raises PlanError for a parameter of several stages, one of them wide, that is not of the last kind.
    """
    wide = [s for s in parameter.stages if widths is not None and widths[s] > 1]
    if not wide or parameter.partial:
        found: tuple[tuple[int, ...], ...] = (reduce_group(parameter.stages, devices),)
    elif len(parameter.stages) > 1:
        raise PlanError(
            f"parameter {parameter.name!r} is read in stages {list(parameter.stages)}, of which stage {wide[0]} is "
            f"wider than one rank, so its gradients there must be partial sums"
        )
    else:
        assert widths is not None
        ranks, width = devices[wide[0]], widths[wide[0]]
        found = tuple(tuple(sorted(ranks[j::width])) for j in range(width))
    return tuple(group for group in found if len(group) > 1)


def has_gradient(parameter: Parameter, wiring: Wiring) -> bool:
    """Say whether any rank computes a gradient of the parameter."""
    return parameter.trainable and any(wiring.backward[stage] for stage in parameter.stages)


def is_reduced(parameter: Parameter, wiring: Wiring, devices: tuple[tuple[int, ...], ...]) -> bool:
    """Say whether the parameter gets a gradient that several ranks must add up."""
    return has_gradient(parameter, wiring) and len(reduce_group(parameter.stages, devices)) > 1


def reduce_group(stages: Iterable[int], devices: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    """Return all ranks of these stages, in rising order."""
    return tuple(sorted({rank for stage in stages for rank in devices[stage]}))


def _check(
    plan: Plan, wiring: Wiring, rows: int, ranks: int | None, defer_weights: int, times: Times | None
) -> tuple[int, ...]:
    if len(plan.stages) != wiring.stages:
        raise PlanError(f"the plan has {len(plan.stages)} stages but the graph was split into {wiring.stages}")
    if rows < 1:
        raise PlanError(f"a step needs at least 1 row, got {rows}")
    if defer_weights < 1:
        raise PlanError(f"defer_weights must be 1 or more, got {defer_weights}")
    if times is not None and len(times) != wiring.stages:
        raise PlanError(f"times must hold one pair for each of {wiring.stages} stages, got {len(times)}")
    if wiring.joined and plan.schedule != "gpipe":
        raise PlanError(
            f"the loss needs all forwards before any backward, but the schedule is {plan.schedule!r}; use 'gpipe'"
        )
    used = sorted(device for stage in plan.stages for device in stage.devices)
    if ranks is not None and used[-1] >= ranks:
        raise PlanError(f"the plan uses device {used[-1]} but there are {ranks} ranks, counted from 0")
    return tuple(used) if ranks is None else tuple(range(ranks))


def _write_work(
    lines: Mapping[int, list[Instruction]],
    plan: Plan,
    wiring: Wiring,
    cells: list[list[list[Cell]]],
    order: Iterable[tuple[int, Work]],
) -> None:
    leaving: dict[tuple[int, int], list[Route]] = {}
    returning: dict[tuple[int, int], list[Route]] = {}
    for route in find_routes(wiring, cells):
        leaving.setdefault((route.source.stage, route.source.micro_batch), []).append(route)
        if route.gradient:
            returning.setdefault((route.target.stage, route.source.micro_batch), []).append(route)
    for routes in leaving.values():
        routes.sort(key=lambda route: route.target.stage)  # the next stage needs its part first
    for routes in returning.values():
        routes.sort(key=lambda route: -route.source.stage)
    last = wiring.stages - 1
    join = Join(last, tuple(sorted(plan.stages[last].devices))) if wiring.joined else None
    for stage, work in order:
        k = work.micro_batches[0]
        if work.kind == "forward":
            for cell in cells[stage][k]:
                lines[cell.rank] += (Load(stage, k, cell.start, cell.stop), Forward(stage, k))
            for route in leaving.get((stage, k), ()):
                if route.forward:
                    lines[route.target.rank].append(route.recv())
                    lines[route.source.rank].append(route.send())
            if join is not None and stage == last and k == len(cells[last]) - 1:
                for rank in join.ranks:
                    lines[rank].append(join)
        elif wiring.backward[stage]:
            for rank in plan.stages[stage].devices:
                lines[rank] += _backward(rank, stage, work, cells)
            if work.kind != "backward_weight":
                for route in returning.get((stage, k), ()):
                    lines[route.source.rank].append(route.recv_gradient())
                    lines[route.target.rank].append(route.send_gradient())


def _backward(rank: int, stage: int, work: Work, cells: list[list[list[Cell]]]) -> list[Instruction]:
    """Return what the rank does for this work; nothing if its replica has no rows there."""
    mine = tuple(k for k in work.micro_batches if any(cell.rank == rank for cell in cells[stage][k]))
    if not mine:
        return []
    if work.kind == "backward_weight":
        return [BackwardWeight(stage, mine)]
    return [BackwardInput(stage, mine[0]) if work.kind == "backward_input" else Backward(stage, mine[0])]


def _fill_buckets(parameters: list[Parameter], bucket_bytes: int) -> list[tuple[str, ...]]:
    buckets: list[tuple[str, ...]] = []
    names: tuple[str, ...] = ()
    filled = 0
    for parameter in parameters:
        limit = bucket_bytes if buckets else min(bucket_bytes, FIRST_BUCKET_BYTES)
        if names and filled + parameter.size_bytes > limit:
            buckets.append(names)
            names, filled = (), 0
        names += (parameter.name,)
        filled += parameter.size_bytes
    return [*buckets, names]
