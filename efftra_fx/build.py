"""From a captured step to what the ranks of this process run: costs agreed, plan chosen, stages placed."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from efftra_fx.cluster import Cluster
from efftra_fx.compiler import Back, Front, Options, Progress, Report, back_end, choose_plan, cost_chain
from efftra_fx.cost import Chain
from efftra_fx.errors import EfftraError
from efftra_fx.passes.measure import cache_file, load_costs, save_costs
from efftra_fx.passes.partition import Planned
from efftra_fx.passes.stage_code import Flags, ForwardCode, TrainingCode, example_of, stage_code
from efftra_fx.passes.tail_code import TailFunction
from efftra_fx.plan import Plan
from efftra_fx.program import AllReduce, Join, Message, RankProgram, ReduceLoss, Value
from efftra_fx.runtime.executor import BoundaryPart, StageWork, Tensors
from efftra_fx.runtime.transport import Transport
from efftra_fx.world import World

StageFunctions = Callable[[int], TrainingCode | ForwardCode]  # by number of rows


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
    values: dict[str, Value]
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]]
    codes: dict[Any, StageFunctions]


def measured_chain(
    front: Front, options: Options, world: World | None, report: Report, progress: Progress | None
) -> Chain:
    """Return the chain with costs measured on all ranks at once, or taken from the disk; a collective call.

    Nothing is run where the plan is given, since nothing has to be chosen.
    """
    fixed = options.plan is not None or options.cuts is not None
    if fixed and options.costs == "measured":
        options = replace(options, costs="estimated")
    device = str(world.device) if world is not None else "cpu"
    if options.costs != "measured":
        return cost_chain(front, options, device, report, progress, None)[0]
    blocks = next(text for name, text in reversed(report.texts) if name == "blocks.txt")
    size = world.size if world is not None else 1
    file = cache_file([blocks, device, device_name(device), torch.__version__, str(size), str(front.rows)])
    known = load_costs(file)
    if world is not None and not all(world.gather(known is not None)):
        known = None
    chain, table = cost_chain(front, options, device, report, progress, known)
    if known is None and (world is None or world.first):
        save_costs(file, table)
    return chain if world is None else agreed_chain(chain, world)


def device_name(device: str) -> str:
    """Return what kind of device it is, for the key under which costs are kept."""
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else f"cpu x{torch.get_num_threads()}"


def agreed_chain(chain: Chain, world: World) -> Chain:
    """Return the chain with the median of all ranks' times, so that every rank knows the same."""
    mine = [[b.forward.fixed_s, b.forward.per_row_s, b.backward.fixed_s, b.backward.per_row_s] for b in chain.blocks]
    everyone = world.gather(mine)
    blocks = []
    for index, block in enumerate(chain.blocks):
        numbers = [median(one[index][k] for one in everyone) for k in range(4)]
        forward = replace(block.forward, fixed_s=numbers[0], per_row_s=numbers[1])
        backward = replace(block.backward, fixed_s=numbers[2], per_row_s=numbers[3])
        blocks.append(replace(block, forward=forward, backward=backward))
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
    return back_end(front, Plan.from_json(answer), report), planned


def place(
    front: Front,
    back: Back,
    chain: Chain,
    planned: Planned | None,
    world: World | None,
    report: Report,
    known: dict[Any, StageFunctions] | None = None,
    base: Built | None = None,
) -> Built:
    """Give each rank of this process its stage's code and tensors; without ranks only the plan is kept.

    `known` has code of stages of the same captured step: what is equal is used again, what is new is added.
    With `base`, parameters and buffers are those that it holds.
    """
    begin = time.perf_counter()
    values = {v.name: v for v in back.wiring.values}
    shapes = {p.name: (p.shape, getattr(torch, p.dtype)) for p in back.wiring.parameters}
    shapes[""] = ((), front.loss_dtype)
    built = Built(front, back, chain, planned, {}, {}, {}, values, shapes, {} if known is None else known)
    if world is None:
        return built
    codes = _codes(front, back, values, world.device.type, built.codes)
    constant_stage = max(s for s, graph in enumerate(back.stages) if graph.boundaries)
    places = {rank: s for s, stage in enumerate(back.plan.stages) for rank in stage.devices}
    for transport in world.transports:
        rank = transport.rank
        held = _held(front, back, places.get(rank), transport)
        if base is not None:
            held = Tensors(base.tensors[rank].parameters, base.tensors[rank].buffers, held.constants)
        built.tensors[rank] = held
        built.tails[rank] = TailFunction(front.tail, held.buffers, constant_stage, transport.device)
        built.works[rank] = _work(front, back, places[rank], codes[places[rank]]) if rank in places else None
    report.timed("place", begin)
    return built


def _codes(
    front: Front, back: Back, values: Mapping[str, Value], device: str, known: dict[Any, StageFunctions]
) -> list[StageFunctions]:
    inputs = {name: (front.examples[name], dim) for name, dim in front.dims.items()}
    example = example_of(values, front.tensors, inputs)
    trainable = {p.name for p in back.wiring.parameters if p.trainable}
    codes = []
    for index, (graph, stage) in enumerate(zip(back.stages, back.plan.stages, strict=True)):
        flags = Flags(graph, values, trainable, index)
        outputs = (graph.sends, graph.boundaries, graph.buffers)
        blocks = (stage.first_block, stage.stop_block)
        key = (blocks, graph.roles, outputs, flags.wrt, flags.outputs, stage.recompute, device)
        if key not in known:
            known[key] = stage_code(graph, flags, example, stage.recompute, device)
        codes.append(known[key])
    return codes


def _work(front: Front, back: Back, stage: int, code: StageFunctions) -> StageWork:
    graph = back.stages[stage]
    kinds = {b.name: b for b in front.tail.boundaries}
    bounds = tuple(BoundaryPart(n, kinds[n].kind, kinds[n].dim) for n in graph.boundaries)
    return StageWork(
        stage,
        graph.roles,
        graph.sends,
        bounds,
        graph.buffers,
        code,
        back.random[stage],
        once=frozenset(name for name in graph.buffers if name in front.counters),
        group=back.plan.stages[stage].devices,
    )


def _held(front: Front, back: Back, stage: int | None, transport: Transport) -> Tensors:
    """Return the tensors that a rank holds: its stage's parameters, those of no stage, and all buffers."""
    staged = {p.name: p.stages for p in back.wiring.parameters}
    tensors = Tensors({}, {}, {})
    for (kind, name), tensor in front.tensors.items():
        mine = name not in staged or (stage is not None and stage in staged[name])
        if kind == "parameter" and mine:
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
    return sorted(groups), sorted(pairs)


def make_bar(world: World | None, wanted: bool | None) -> Progress | None:
    """Return a progress bar for the first rank: shown on terminals, or as wanted."""
    shown = sys.stderr.isatty() if wanted is None else wanted
    if not shown or (world is not None and not world.first):
        return None
    from tqdm import tqdm

    return lambda items, text: tqdm(items, desc=text, leave=False)
