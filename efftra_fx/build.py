"""From a captured step to what the ranks of this process run: costs agreed, plan chosen, stages placed."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import zip_longest
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from efftra_fx.cluster import Cluster
from efftra_fx.collectives import Ranges, take
from efftra_fx.compiler import Back, Front, Options, Progress, Report, back_end
from efftra_fx.cost import Chain, CostTable, NodeCost, Option, Timing
from efftra_fx.errors import EfftraError, PlanError, ReduceOrderError
from efftra_fx.hooks import has_hooks
from efftra_fx.meta import ROLE
from efftra_fx.passes.measure import cache_file, load_costs, save_costs
from efftra_fx.passes.planned import Planned
from efftra_fx.passes.shard_code import MeetingCode, MeetingForward, local_example, meeting_code
from efftra_fx.passes.shard_cuts import Placement
from efftra_fx.passes.split import StageGraph
from efftra_fx.passes.stage_code import Flags, ForwardCode, TrainingCode, example_of, stage_code
from efftra_fx.passes.stage_compile import check_backend
from efftra_fx.passes.tail import Tail
from efftra_fx.passes.tail_code import NewsFunction, TailFunction
from efftra_fx.plan import Plan
from efftra_fx.plan_choice import candidate_widths, choose_plan, cost_chain, cost_widths, promising_widths
from efftra_fx.program import AllReduce, Join, Load, Message, RankProgram, ReduceLoss, Value
from efftra_fx.runtime.step import BoundaryPart, StageWork, Tensors
from efftra_fx.runtime.transport import Transport
from efftra_fx.world import World

StageFunctions = Callable[[int], TrainingCode | ForwardCode | MeetingCode | MeetingForward]  # by number of rows


@dataclass(frozen=True)
class Built:
    """All that one compilation made, for the ranks of this process."""

    front: Front
    back: Back
    chain: Chain
    planned: Planned | None
    works: dict[int, StageWork | None]
    tensors: dict[int, Tensors]
    tails: dict[int, TailFunction]
    news: dict[int, NewsFunction]
    values: dict[str, Value]
    shapes: dict[int, dict[str, tuple[tuple[int, ...], torch.dtype]]]  # by rank, by parameter; "" is the loss
    codes: dict[Any, StageFunctions]

    @cached_property
    def buffers(self) -> dict[str, frozenset[int]]:
        """The stages that read or write each buffer; -1 for every rank."""
        news = self.front.news
        return used_buffers([self.front.tail, *([] if news is None else [news.tail])], self.back.stages)

    def shares(self, rank: int) -> dict[str, Share]:
        """Return which shares of which parameters a rank holds; those that it holds whole are left out."""
        return rank_shares(self.back, rank)


@dataclass(frozen=True)
class Share:
    """A rank's share of a parameter: the ranges of indices along a dimension of so many."""

    dim: int
    ranges: Ranges
    size: int

    def of(self, tensor: Tensor) -> Tensor:
        """Return the share of a whole tensor, a view of it where the share is one run."""
        return take(tensor, self.dim, self.ranges, self.size)

    def put(self, whole: Tensor, share: Tensor) -> None:
        """Write the share into a whole tensor."""
        at = 0
        for start, stop in self.ranges:
            whole.narrow(self.dim, start, stop - start).copy_(share.narrow(self.dim, at, stop - start))
            at += stop - start

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Return the share's shape."""
        return (*whole[: self.dim], sum(b - a for a, b in self.ranges), *whole[self.dim + 1 :])


def rank_shares(back: Back, rank: int) -> dict[str, Share]:
    """Return which shares of which parameters a rank holds; those that it holds whole are left out."""
    for stage, sharded in zip(back.plan.stages, back.sharded, strict=True):
        if rank in stage.devices and sharded is not None:
            number = stage.devices.index(rank) % stage.tensor
            return {name: _share(place, number) for name, place in sharded.parameters.items() if place.cut is not None}
    return {}


def _share(place: Placement, number: int) -> Share:
    assert place.cut is not None
    return Share(place.dim, place.cut.parts[number], place.cut.size)


def measured_chain(
    front: Front, cluster: Cluster, options: Options, world: World | None, report: Report, progress: Progress | None
) -> Chain:
    """Return the chain with costs measured on all ranks at once, or taken from the disk; a collective call.

    Tensor widths that the plan may have are measured too. Nothing is run where the plan is given, since
    nothing has to be chosen.
    """
    fixed = options.plan is not None or options.cuts is not None
    if fixed and options.costs == "measured":
        options = replace(options, costs="estimated")
    device = str(world.device) if world is not None else "cpu"
    if options.costs != "measured":
        return cost_chain(front, options, device, report, progress, None)[0]
    chain = _kept(
        [], world, report, front, device, lambda known: cost_chain(front, options, device, report, progress, known)
    )
    if world is None:  # without ranks, as planning for a cluster that is not at hand: modelled
        return chain
    asked = sorted(candidate_widths(options))
    while widths := asked or world.broadcast(
        promising_widths(front, chain, cluster, options, report) if world.first else None
    ):
        measure = partial(cost_widths, front, chain, set(widths), device, report, progress)
        chain = _kept(["widths", *map(str, widths)], world, report, front, device, measure)
        if asked:
            break
    return chain


def _kept(
    parts: Sequence[str],
    world: World | None,
    report: Report,
    front: Front,
    device: str,
    measure: Callable[[CostTable | None], tuple[Chain, CostTable]],
) -> Chain:
    """Measure what the disk does not have, keep it there, and agree on it with all ranks."""
    blocks = next(text for name, text in reversed(report.texts) if name == "blocks.txt")
    size = world.size if world is not None else 1
    file = cache_file([blocks, device, device_name(device), torch.__version__, str(size), str(front.rows), *parts])
    known = load_costs(file)
    if world is not None and not all(world.gather(known is not None)):
        known = None
    chain, table = measure(known)
    if known is None and (world is None or world.first):
        save_costs(file, table)
    return chain if world is None else agreed_chain(chain, world)


def device_name(device: str) -> str:
    """Return what kind of device it is, for the key under which costs are kept."""
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else f"cpu x{torch.get_num_threads()}"


def agreed_chain(chain: Chain, world: World) -> Chain:
    """Return the chain with the median of all ranks' times, so that every rank knows the same."""
    ways: list[NodeCost | Option] = []
    for block in chain.blocks:
        ways += [block, *block.options]
    mine = [[w.forward.fixed_s, w.forward.per_row_s, w.backward.fixed_s, w.backward.per_row_s] for w in ways]
    everyone = world.gather(mine)
    agreed = iter([median(one[index][k] for one in everyone) for index in range(len(ways)) for k in range(4)])

    def times() -> dict[str, Timing]:
        return {"forward": Timing(next(agreed), next(agreed)), "backward": Timing(next(agreed), next(agreed))}

    blocks = []
    for block in chain.blocks:
        own = replace(block, **times())  # type: ignore[arg-type]
        blocks.append(replace(own, options=tuple(replace(option, **times()) for option in block.options)))  # type: ignore[arg-type]
    return replace(chain, blocks=tuple(blocks))


def agreed_plan(
    front: Front, chain: Chain, cluster: Cluster, options: Options, world: World | None, report: Report
) -> tuple[Back, Planned | None]:
    """Choose a plan on the first rank, tell all others, and cut the graph by it; a collective call."""
    problem: EfftraError | None = None
    planned: Planned | None = None
    answer = ""
    if world is None or world.first:
        try:
            choice = choose_plan(front, chain, cluster, options, report)
            planned = choice if isinstance(choice, Planned) else None
            answer = (choice.plan if isinstance(choice, Planned) else choice).to_json()
        except EfftraError as error:
            problem = error
    if world is not None:
        world.agree(problem, -2)
        answer = world.broadcast(answer)
    if problem is not None:
        raise problem
    return back_end(front, Plan.from_json(answer), report, cluster=cluster), planned


def place(
    front: Front,
    back: Back,
    chain: Chain,
    planned: Planned | None,
    world: World | None,
    report: Report,
    known: dict[Any, StageFunctions] | None = None,
    base: Built | None = None,
    backend: str | None = None,
) -> Built:
    """Give each rank of this process its stage's code and tensors; without ranks only the plan is kept.

    `known` has code of stages of the same captured step: what is equal is used again, what is new is added.
    With `base`, parameters and buffers are those that it holds. With a `backend` of `torch.compile`, stages are
    compiled by it; raises PlanError for stages that cannot be.
    """
    begin = time.perf_counter()
    _check_cut(front, back)
    if backend is not None:
        _check_compiled(back, backend, world)
    values = {v.name: v for v in back.wiring.values}
    built = Built(front, back, chain, planned, {}, {}, {}, {}, values, {}, {} if known is None else known)
    if world is None:
        return built
    constant_stage = max(s for s, graph in enumerate(back.stages) if graph.boundaries)
    places = {rank: s for s, stage in enumerate(back.plan.stages) for rank in stage.devices}
    for transport in world.transports:
        rank = transport.rank
        built.shapes[rank] = _shapes(front, back, rank)
        held = _held(front, back, places.get(rank), transport)
        if base is not None:
            held = Tensors(base.tensors[rank].parameters, base.tensors[rank].buffers, held.constants)
        built.tensors[rank] = held
        built.tails[rank] = TailFunction(front.tail, held.buffers, constant_stage, transport.device)
        if front.news is not None:
            beside = len(world.transports) > 1
            built.news[rank] = NewsFunction(front.news, held.buffers, transport.device, beside)
        built.works[rank] = None
        if rank in places:
            code = _code(front, back, values, world.device.type, built.codes, places[rank], rank, backend)
            built.works[rank] = _work(front, back, places[rank], rank, code)
    report.timed("place", begin)
    return built


def written_buffers(back: Back) -> dict[str, tuple[int, int]]:
    """Return the buffers that ranks of one stage write: the stage, and the first of its ranks."""
    stages = enumerate(zip(back.stages, back.plan.stages, strict=True))
    return {name: (index, stage.devices[0]) for index, (graph, stage) in stages for name in graph.buffers}


def used_buffers(tails: Iterable[Tail], stages: Sequence[StageGraph]) -> dict[str, frozenset[int]]:
    """Return the stages that read or write each buffer; -1 for every rank, which computes the tails."""
    found: dict[str, set[int]] = {}
    for tail in tails:
        for node in tail.gm.graph.nodes:
            if node.op == "placeholder" and ROLE[node].kind == "buffer":
                found.setdefault(ROLE[node].name, set()).add(-1)
    for index, graph in enumerate(stages):
        for name in (*graph.buffers, *(role.name for role in graph.roles if role.kind == "buffer")):
            found.setdefault(name, set()).add(index)
    return {name: frozenset(places) for name, places in found.items()}


def _check_cut(front: Front, back: Back) -> None:
    for index, sharded in enumerate(back.sharded):
        cut = [name for name, where in sharded.parameters.items() if where.cut is not None] if sharded else []
        for name in cut:
            if has_hooks(front.tensors["parameter", name]):
                raise PlanError(
                    f"parameter '{name}' has hooks, which need its whole gradient, but stage {index} cuts it over "
                    f"{back.plan.stages[index].tensor} ranks; remove the hooks, or give a plan with tensor width 1"
                )


def _check_compiled(back: Back, backend: str, world: World | None) -> None:
    for index, (sharded, synced) in enumerate(zip(back.sharded, back.synced, strict=True)):
        if sharded is not None or synced is not None:
            what = "is several ranks wide" if sharded is not None else "takes statistics over its replicas"
            raise PlanError(
                f"stage {index} {what}, so it meets other ranks on its way and cannot be compiled; leave "
                "compile_stages out, or give a plan with tensor width 1 and batch_norm='local'"
            )
    check_backend(backend, world.device.type if world is not None else "cpu")


def _shapes(front: Front, back: Back, rank: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    shares = rank_shares(back, rank)
    shapes = {p.name: (p.shape, getattr(torch, p.dtype)) for p in back.wiring.parameters}
    shapes |= {name: (share.shape(shapes[name][0]), shapes[name][1]) for name, share in shares.items()}
    shapes[""] = ((), front.loss_dtype)
    return shapes


def _code(
    front: Front,
    back: Back,
    values: Mapping[str, Value],
    device: str,
    known: dict[Any, StageFunctions],
    index: int,
    rank: int,
    backend: str | None,
) -> StageFunctions:
    inputs = {name: (front.examples[name], dim) for name, dim in front.dims.items()}
    example = example_of(values, front.tensors, inputs)
    trainable = {p.name for p in back.wiring.parameters if p.trainable}
    graph, stage, sharded = back.stages[index], back.plan.stages[index], back.sharded[index]
    number, synced = stage.devices.index(rank) % stage.tensor, back.synced[index]
    flags = Flags(graph, values, trainable, index)
    outputs = (graph.sends, graph.boundaries, graph.buffers, graph.parts)
    blocks = (stage.first_block, stage.stop_block)
    placed = None if sharded is None else (number, tuple(sorted((n, str(p)) for n, p in sharded.parameters.items())))
    met = stage.replicas if synced is not None else 1
    key = (blocks, graph.roles, outputs, flags.wrt, flags.outputs, stage.recompute, device, stage.tensor, placed, met)
    if key not in known:
        if sharded is not None:
            example = local_example(example, sharded.parameters, number)
        if sharded is None and synced is None:
            known[key] = stage_code(graph, flags, example, stage.recompute, device, backend)
        else:
            own = sharded.stages[number] if sharded is not None else graph
            own = synced.stages[number] if synced is not None else own
            known[key] = meeting_code(own, flags, example, stage.recompute, device)
    return known[key]


def _work(front: Front, back: Back, stage: int, rank: int, code: StageFunctions) -> StageWork:
    graph = back.stages[stage]
    kinds = {b.name: b for b in front.tail.boundaries}
    bounds = tuple(BoundaryPart(n, kinds[n].kind, kinds[n].dim) for n in graph.boundaries)
    news = {} if front.news is None else {b.name: b for b in front.news.tail.boundaries}
    planned, synced = back.plan.stages[stage], back.synced[stage]
    number = planned.devices.index(rank) % planned.tensor
    return StageWork(
        stage,
        graph.roles,
        graph.sends,
        bounds,
        graph.buffers,
        code,
        back.random[stage],
        once=frozenset(name for name in graph.buffers if name in front.counters),
        group=tuple(sorted(planned.devices)),
        together=tensor_group(back.plan, rank),
        beside=() if synced is None else planned.devices[number :: planned.tensor],
        shared=frozenset() if synced is None else synced.buffers,
        parts=tuple(BoundaryPart(n, news[n].kind, news[n].dim) for n in graph.parts),
    )


def tensor_group(plan: Plan, rank: int) -> tuple[int, ...]:
    """Return the ranks that compute a wide replica together with this one, by number; none where it computes alone."""
    for stage in plan.stages:
        if rank in stage.devices and stage.tensor > 1:
            first = stage.devices.index(rank) // stage.tensor * stage.tensor
            return stage.devices[first : first + stage.tensor]
    return ()


def _held(front: Front, back: Back, stage: int | None, transport: Transport) -> Tensors:
    """Return the tensors that a rank holds: its stage's parameters, those of no stage, and all buffers.

    A share of a parameter is a tensor of its own.
    """
    shares = rank_shares(back, transport.rank)
    staged = {p.name: p.stages for p in back.wiring.parameters}
    tensors = Tensors({}, {}, {})
    for (kind, name), tensor in front.tensors.items():
        mine = name not in staged or (stage is not None and stage in staged[name])
        if kind == "parameter" and name in shares:
            own = shares[name].of(tensor.detach()).to(transport.device).clone(memory_format=torch.contiguous_format)
            tensors.parameters[name] = nn.Parameter(own, tensor.requires_grad)
        elif kind == "parameter" and mine:
            tensors.parameters[name] = _on(tensor, transport.device)
        elif kind == "buffer":
            tensors.buffers[name] = _on(tensor, transport.device)
        elif kind == "constant":
            tensors.constants[name] = _on(tensor, transport.device)
    return tensors


def _on(tensor: Tensor, device: torch.device) -> Tensor:
    if tensor.device == device:
        return tensor
    moved = tensor.detach().to(device)
    return nn.Parameter(moved, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else moved


def stage_times(chain: Chain, plan: Plan, rows: int) -> tuple[tuple[float, float], ...]:
    """Return each stage's seconds, forward and backward, for one micro-batch of the largest size."""
    size = -(-rows // plan.micro_batches)
    times = []
    for stage in plan.stages:
        blocks = [chain.blocks[index] for index in stage.blocks]
        part = size / stage.replicas
        times.append((sum(b.forward.at(part) for b in blocks), sum(b.backward.at(part) for b in blocks)))
    return tuple(times)


def check_meetings(programs: Mapping[int, RankProgram], works: Mapping[int, StageWork | None], world: World) -> None:
    """Check that ranks which meet in their computations meet in the same sums in the same order; a collective call.

    Raises ReduceOrderError naming two ranks and the first sums that differ.
    """
    if all(program.width == 1 and not program.synced for program in programs.values()):
        return
    mine: list[Any] = []
    for rank, work in works.items():
        if work is None or not work.meets:
            continue
        cells = [i for i in programs[rank].instructions if isinstance(i, Load)]
        sizes = sorted({cell.stop - cell.start for cell in cells})
        if work.together:
            sums = [f"{n} rows {_within_group(m)}" for n in sizes for m in _meetings(work, n)]
            mine.append([rank, list(work.together), sums])
        for rows in sizes if work.beside else ():
            mine.append([rank, [-1, *work.beside], [m for m in _meetings(work, rows) if "replicas" in m]])
    first: dict[tuple[int, ...], tuple[int, list[str]]] = {}
    for rank, group, sums in sorted(one for some in world.gather(mine) for one in some):
        other, expected = first.setdefault(tuple(group), (rank, sums))
        for here, there in zip_longest(expected, sums, fillvalue="nothing"):
            if here != there:
                raise ReduceOrderError(
                    f"rank {rank} sums {there} where rank {other} sums {here}; ranks that meet must do so in the same "
                    "sums in the same order"
                )


def _within_group(meeting: str) -> str:
    """Return what all ranks of a tensor group say alike: of a meeting over replicas each has its own channels."""
    return f"{meeting.partition('[')[0]} over replicas" if "over replicas" in meeting else meeting


def _meetings(work: StageWork, rows: int) -> tuple[str, ...]:
    code = work.code(rows)
    return code.meetings if isinstance(code, MeetingCode | MeetingForward) else ()


def connections(programs: Mapping[int, RankProgram]) -> tuple[list[tuple[int, ...]], list[tuple[int, int]]]:
    """Return all groups and pairs of ranks that talk, in an order that is the same on every rank."""
    groups: set[tuple[int, ...]] = set()
    pairs: set[tuple[int, int]] = set()
    for rank in sorted(programs):
        for instruction in programs[rank].instructions:
            if isinstance(instruction, AllReduce | Join | ReduceLoss):
                groups.add(instruction.ranks)
            elif isinstance(instruction, Message):
                pairs.add((min(rank, instruction.peer), max(rank, instruction.peer)))
    members: dict[tuple[Any, ...], list[int]] = {}
    for rank, program in sorted(programs.items()):
        if program.width > 1:
            members.setdefault((program.stage, program.replica), []).append(rank)
        if program.synced:
            cells = [i.micro_batch for i in program.instructions if isinstance(i, Load)]
            for micro_batch in (*cells, None):  # with rows of a micro-batch, and all of them
                members.setdefault((program.stage, "replicas", program.tensor, micro_batch), []).append(rank)
    groups |= {tuple(ranks) for ranks in members.values() if len(ranks) > 1}
    return sorted(groups), sorted(pairs)


def make_bar(world: World | None, wanted: bool | None) -> Progress | None:
    """Return a progress bar for the first rank: shown on terminals, or as wanted."""
    shown = sys.stderr.isatty() if wanted is None else wanted
    if not shown or (world is not None and not world.first):
        return None
    from tqdm import tqdm

    return lambda items, text: tqdm(items, desc=text, leave=False)
