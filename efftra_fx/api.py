"""compile(model, cluster): from a model to a step that several ranks compute together."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from efftra_fx.check import CheckReport, compare_gradients, one_device_step
from efftra_fx.cluster import Cluster
from efftra_fx.compiler import (
    Back,
    Front,
    Options,
    Report,
    back_end,
    check_inputs,
    choose_plan,
    cost_chain,
    front_end,
)
from efftra_fx.cost import CostTable
from efftra_fx.dump import write_dumps
from efftra_fx.errors import CheckpointError, EfftraError, InputError, PlanError
from efftra_fx.evaluation import Evaluation, compile_evaluation, run_evaluation
from efftra_fx.passes.lower import lower
from efftra_fx.passes.measure import cache_file, load_costs, save_costs
from efftra_fx.passes.partition import Planned
from efftra_fx.passes.stage_code import Flags, example_of, stage_code
from efftra_fx.passes.tail_code import TailFunction
from efftra_fx.passes.verify import verify_programs
from efftra_fx.plan import Plan
from efftra_fx.program import AllReduce, Join, Message, RankProgram, ReduceLoss, Value, Wiring
from efftra_fx.program_text import print_programs
from efftra_fx.runtime.checkpoint import Owned, share_tensors
from efftra_fx.runtime.executor import Batch, BoundaryPart, Executor, StageWork, StepResult, Tensors
from efftra_fx.runtime.transport import Transport
from efftra_fx.signature import Call, read_call
from efftra_fx.trace import LossFn
from efftra_fx.world import Turns, World

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def compile(
    model: nn.Module,
    cluster: Cluster,
    *,
    example_inputs: Sequence[Any] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    example_target: Any = None,
    loss_fn: LossFn | None = None,
    optimizer: OptimizerFactory | None = None,
    stages: int | None = None,
    replicas: Sequence[int] | None = None,
    micro_batches: int | None = None,
    schedule: str | None = None,
    plan: Plan | str | Path | None = None,
    cuts: Sequence[str] | None = None,
    tensor: Sequence[int] | None = None,
    batch_dims: Mapping[str, int | None] | None = None,
    costs: CostTable | str = "measured",
    optimizer_states: float = 2.0,
    timeout: float = 300.0,
    dump: str | Path | None = None,
    progress: bool | None = None,
) -> CompiledModel:
    """Compile a model for a cluster; its `step` equals one device's step on the whole batch.

    Without examples, tracing and planning happen at the first `step`, and `optimizer` (a function from
    parameters to an optimizer) is needed, since parameters are placed only then; with `optimizer`, `step`
    also updates the parameters and clears the gradients.

    `stages`, `replicas`, `micro_batches`, `schedule` ("1f1b" or "gpipe"), `cuts` (module paths at which
    stages begin) or a whole `plan` (a `Plan` or its file) fix parts of the plan; the search fills in the
    rest. `batch_dims` says along which dimension a tensor carries the batch where that is not dimension 0
    (None: it does not). `costs` is "measured", "estimated" (from operation counts, nothing is run), or a
    table. `optimizer_states` is the optimizer's state in bytes for each byte of parameters (Adam: 2).
    `timeout` limits every wait, in seconds. `dump` (or EFFTRA_FX_DUMP) is a folder for what each pass made.

    Raises an `EfftraError` that says what cannot be had and why.
    """
    if isinstance(plan, (str, Path)):
        plan = Plan.load(plan)
    fixed = {"stages": stages, "replicas": replicas, "micro_batches": micro_batches, "schedule": schedule, "cuts": cuts}
    doubled = [name for name, value in fixed.items() if value is not None]
    if plan is not None and doubled:
        raise PlanError(f"plan= fixes everything, so {doubled[0]}= cannot be given too")
    if isinstance(costs, str) and costs not in ("measured", "estimated"):
        raise PlanError(f"costs must be 'measured', 'estimated' or a CostTable, got {costs!r}")
    options = Options(
        loss_fn=loss_fn,
        stages=stages,
        replicas=None if replicas is None else tuple(replicas),
        micro_batches=micro_batches,
        schedule=schedule,
        plan=plan,
        cuts=None if cuts is None else tuple(cuts),
        tensor=None if tensor is None else tuple(tensor),
        batch_dims=dict(batch_dims or {}),
        costs=costs,
        optimizer_states=optimizer_states,
    )
    folder = dump if dump is not None else os.environ.get("EFFTRA_FX_DUMP")
    compiled = CompiledModel(model, cluster, options, optimizer, timeout, folder, progress)
    if example_inputs is not None or example_kwargs is not None:
        inputs = (example_inputs,) if isinstance(example_inputs, Tensor) else tuple(example_inputs or ())
        compiled.build(inputs, dict(example_kwargs or {}), example_target)
    elif optimizer is None:
        raise InputError(
            "compile without example inputs needs optimizer=lambda parameters: ..., since parameters are placed only "
            "at the first step; or give example_inputs="
        )
    return compiled


@dataclass(frozen=True)
class Built:
    """All that one compilation made."""

    front: Front
    back: Back
    planned: Planned | None
    works: dict[int, StageWork | None]
    tensors: dict[int, Tensors]
    tails: dict[int, TailFunction]
    values: dict[str, Value]
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]]


class CompiledModel:
    """A model laid over the ranks of a cluster; made by `compile`."""

    def __init__(
        self,
        model: nn.Module,
        cluster: Cluster,
        options: Options,
        make_optimizer: OptimizerFactory | None,
        timeout_s: float,
        dump: str | Path | None,
        progress: bool | None,
    ) -> None:
        self.model, self.cluster, self.options = model, cluster, options
        self.make_optimizer, self.timeout_s, self.dump_folder = make_optimizer, timeout_s, dump
        self.optimizer: torch.optim.Optimizer | None = None
        self.report = Report()
        self.steps = 0
        self._progress = progress
        self._built: Built | None = None
        self._executors: dict[int, tuple[dict[int, RankProgram], dict[int, Executor]]] = {}
        self._evaluations: dict[str, Evaluation] = {}

    @cached_property
    def world(self) -> World:
        """The ranks of this process, connected to all others at first use."""
        return World(self.cluster, self.timeout_s)

    @property
    def built(self) -> Built:
        """What compilation made; raises InputError before the first step where that does the compiling."""
        if self._built is None:
            raise InputError("nothing is compiled yet: call step once, or give example_inputs= to compile")
        return self._built

    def build(self, args: Sequence[Any], kwargs: Mapping[str, Any], target: Any) -> None:
        """Trace, measure, plan and split for these example inputs; a collective call."""
        runs = self.cluster.where != "described"
        front: Front | None = None
        problem: EfftraError | None = None
        try:
            call, tensors = read_call(self.model.forward, args, kwargs, target)
            front = front_end(self.model, call, tensors, self.options, self.report)
        except EfftraError as error:
            problem = error
        if runs:
            self.world.agree(problem, -1)
        if problem is not None:
            raise problem
        assert front is not None
        back, planned = self._plan(front, runs)
        self._built = self._place(front, back, planned) if runs else _only_planned(front, back, planned)
        self._executors.clear()
        if runs:
            self._programs(front.rows)
        if self.dump_folder is not None and (not runs or self.world.first):
            self.dump(self.dump_folder)
        for note in front.notes:
            if not runs or self.world.first:
                print(f"efftra_fx: {note}", file=sys.stderr)
        if self.make_optimizer is not None:
            self.optimizer = self.make_optimizer(self.parameters())

    def _plan(self, front: Front, runs: bool) -> tuple[Back, Planned | None]:
        device = str(self.world.device) if runs else "cpu"
        chain, planned = None, None
        text = [p for n, p in self.report.texts if n == "blocks.txt"][-1]
        key = [text, device, torch.__version__, str(self.world.size if runs else 1), str(front.rows)]
        file = cache_file(key)
        known = load_costs(file) if self.options.costs == "measured" else None
        if runs and len(self.world.transports) == 1 and self.world.size > 1:
            known = known if all(self.world.gather(known is not None)) else None
        chain, table = cost_chain(front, self._quick(), device, self.report, self._bar(), known)
        if self.options.costs == "measured" and self.options.plan is None:
            if runs and len(self.world.transports) == 1:
                chain = _agreed(chain, self.world)
            if known is None and (not runs or self.world.first):
                save_costs(file, table)
        problem: EfftraError | None = None
        answer = ""
        try:
            if not runs or self.world.first:
                choice = choose_plan(front, chain, self.cluster, self.options, self.report)
                planned = choice if isinstance(choice, Planned) else None
                plan = choice.plan if isinstance(choice, Planned) else choice
                answer = plan.to_json()
        except EfftraError as error:
            problem = error
        if runs:
            self.world.agree(problem, -2)
            answer = self.world.broadcast(answer)
        if problem is not None:
            raise problem
        return back_end(front, Plan.from_json(answer), self.report), planned

    def _quick(self) -> Options:
        """Return the options, with estimated costs where the plan is given and nothing has to be chosen."""
        fixed = self.options.plan is not None or self.options.cuts is not None
        return replace(self.options, costs="estimated") if fixed and self.options.costs == "measured" else self.options

    def _bar(self) -> Any:
        wanted = sys.stderr.isatty() if self._progress is None else self._progress
        if not wanted or (self.cluster.where != "described" and not self.world.first):
            return None
        from tqdm import tqdm

        return lambda items, text: tqdm(items, desc=text, leave=False)

    def _place(self, front: Front, back: Back, planned: Planned | None) -> Built:
        begin = time.perf_counter()
        values = {v.name: v for v in back.wiring.values}
        inputs = {name: (front.examples[name], dim) for name, dim in front.dims.items()}
        example = example_of(values, front.tensors, inputs)
        trainable = {p.name for p in back.wiring.parameters if p.trainable}
        shapes = {p.name: (p.shape, getattr(torch, p.dtype)) for p in back.wiring.parameters}
        shapes[""] = ((), front.loss_dtype)
        constant_stage = max(s for s, graph in enumerate(back.stages) if graph.boundaries)
        codes = []
        for index, (graph, stage) in enumerate(zip(back.stages, back.plan.stages, strict=True)):
            flags = Flags(graph, values, trainable, index)
            codes.append(stage_code(graph, flags, example, stage.recompute, self.world.device.type))
        places = {rank: s for s, stage in enumerate(back.plan.stages) for rank in stage.devices}
        works: dict[int, StageWork | None] = {}
        tensors: dict[int, Tensors] = {}
        tails: dict[int, TailFunction] = {}
        kinds = {b.name: b for b in front.tail.boundaries}
        for transport in self.world.transports:
            place = places.get(transport.rank)
            tensors[transport.rank] = _held(front, back, place, transport)
            tails[transport.rank] = TailFunction(
                front.tail, tensors[transport.rank].buffers, constant_stage, transport.device
            )
            if place is None:
                works[transport.rank] = None
                continue
            graph = back.stages[place]
            bounds = tuple(BoundaryPart(n, kinds[n].kind, kinds[n].dim) for n in graph.boundaries)
            works[transport.rank] = StageWork(
                place, graph.roles, graph.sends, bounds, graph.buffers, codes[place], back.random[place]
            )
        self.report.timed("place", begin)
        return Built(front, back, planned, works, tensors, tails, values, shapes)

    def _programs(self, rows: int) -> dict[int, Executor]:
        """Return this process's executors for a batch size; lowered, verified and kept at first use."""
        if rows in self._executors:
            return self._executors[rows][1]
        built = self.built
        begin = time.perf_counter()
        programs = lower(built.back.plan, built.back.wiring, rows, ranks=self.world.size)
        self.report.timed("lower", begin)
        begin = time.perf_counter()
        verify_programs(programs, built.back.wiring, built.back.plan)
        self.report.timed("verify", begin)
        groups, pairs = _connections(programs)
        self.world.prepare(groups, pairs)
        begin = time.perf_counter()
        executors = {}
        for transport in self.world.transports:
            rank = transport.rank
            executors[rank] = Executor(
                programs[rank],
                built.values,
                built.works[rank],
                built.tensors[rank],
                built.tails[rank],
                transport,
                built.shapes,
            )
        self.report.timed("differentiate", begin)
        self._executors[rows] = (programs, executors)
        return executors

    def step(self, *args: Any, target: Any = None, **kwargs: Any) -> Tensor:
        """Compute loss and gradients of the global batch, which every rank gives alike; a collective call.

        Returns the whole batch's loss, a scalar without a graph, the same on every rank. Gradients are
        added to `.grad` of `parameters()`. With an optimizer factory, parameters are updated too.
        Raises InputError, before anything is sent, where the batch is not what the step was compiled for.
        """
        if self._built is None:
            self.build(args, kwargs, target)
        batch = self._batch(args, kwargs, target)
        seed = int(torch.empty((), dtype=torch.int64).random_().item())
        results = self._run(batch, seed)
        self._add_gradients(results)
        loss = next(r.loss for r in results.values() if r.loss is not None)
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()
        return loss.reshape(())

    def _batch(self, args: Sequence[Any], kwargs: Mapping[str, Any], target: Any) -> Batch:
        front = self.built.front
        problem: EfftraError | None = None
        rows, tensors, call = 0, (), front.captured.call
        try:
            call, tensors = read_call(self.model.forward, args, kwargs, target)
            rows = check_inputs(front, call, tensors)
        except EfftraError as error:
            problem = error
        self.steps += 1
        self.world.agree(problem, self.steps)
        if problem is not None:
            raise problem
        device = self.world.device
        named = {n: t.detach().to(device) for n, t in zip(call.tensor_names, tensors, strict=True)}
        return Batch(rows, named, front.dims)

    def _run(self, batch: Batch, seed: int) -> dict[int, StepResult]:
        executors = self._programs(batch.rows)

        def work(transport: Transport) -> Turns[tuple[int, StepResult]]:
            result = yield from executors[transport.rank].run(batch, seed)
            return transport.rank, result

        return dict(self.world.run(work))

    def _add_gradients(self, results: Mapping[int, StepResult]) -> None:
        done: set[int] = set()
        for rank in sorted(results):
            held = self.built.tensors[rank].parameters
            for name, gradient in results[rank].gradients.items():
                parameter = held[name]
                if id(parameter) in done:
                    continue
                done.add(id(parameter))
                if parameter.grad is None:
                    parameter.grad = gradient
                else:
                    parameter.grad = parameter.grad + gradient

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this process's parameters under the model's own names, in the model's order."""
        held: dict[str, nn.Parameter] = {}
        for rank in self.world.ranks:
            for name, tensor in self.built.tensors[rank].parameters.items():
                if isinstance(tensor, nn.Parameter):
                    held.setdefault(name, tensor)
        placed = {p.name for p in self.built.back.wiring.parameters}
        for name, parameter in self._all_parameters():
            if name in held and (name in placed or self.world.first):
                yield name, held[name]

    def _all_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self.model.named_parameters()
        if isinstance(self.options.loss_fn, nn.Module):
            for name, parameter in self.options.loss_fn.named_parameters():
                yield "loss_fn." + name, parameter

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield this process's parameters, for an optimizer; an idle rank yields one empty parameter,
        since optimizers refuse to have none."""
        empty = True
        for _, parameter in self.named_parameters():
            empty = False
            yield parameter
        if empty:
            yield nn.Parameter(torch.empty(0))

    @property
    def plan(self) -> Plan:
        """The plan, blocks in the model's own names."""
        return self.built.back.plan

    @property
    def wiring(self) -> Wiring:
        """The distributed graph as data: what crosses between stages, and who holds which parameter."""
        return self.built.back.wiring

    @property
    def programs(self) -> dict[int, RankProgram]:
        """Every rank's program, for the batch size of the last new size of batch."""
        if not self._executors:
            return lower(self.plan, self.wiring, self.built.front.rows, ranks=len(self.cluster.devices))
        return next(reversed(self._executors.values()))[0]

    def state_dict(self) -> dict[str, Tensor]:
        """Return the whole state under the model's own names, the same on every rank; a collective call."""
        tensors = self._share(self._owned(gradients=False))
        first: dict[int, str] = {}
        own: dict[str, Tensor] = {}
        for items in (
            self.model.named_parameters(remove_duplicate=False),
            self.model.named_buffers(remove_duplicate=False),
        ):
            for name, tensor in items:
                own[name] = tensors[first.setdefault(id(tensor), name)]
        return {name: own.get(name, value) for name, value in self.model.state_dict().items()}

    def _owned(self, gradients: bool) -> list[tuple[Owned, Tensor | None]]:
        """List every tensor with its owner, and this process's copy of it where it has one."""
        back = self.built.back
        stages = {p.name: min(p.stages) for p in back.wiring.parameters}
        writers = {name: s for s, graph in enumerate(back.stages) for name in graph.buffers}
        trained = {p.name for p in back.wiring.parameters if p.trainable}
        listed: list[tuple[Owned, Tensor | None]] = []
        named: list[tuple[str, Tensor, int]] = [
            (n, p, stages.get(n, -1)) for n, p in self._all_parameters() if not gradients or n in trained
        ]
        if not gradients:
            named += [(n, b, writers.get(n, -1)) for n, b in self.model.named_buffers()]
        for name, tensor, stage in named:
            owner = 0 if stage < 0 else back.plan.stages[stage].devices[0]
            mine = None
            if owner in self.built.tensors:
                held = self.built.tensors[owner]
                mine = held.parameters.get(name, held.buffers.get(name))
                mine = tensor if mine is None else mine
            listed.append((Owned(name, owner, tuple(tensor.shape), tensor.dtype), mine))
        return listed

    def _share(self, listed: Sequence[tuple[Owned, Tensor | None]]) -> dict[str, Tensor]:
        if len(self.world.transports) > 1 or self.world.size == 1:
            return {item.name: t.detach().clone() for item, t in listed if t is not None}
        mine = {item.name: t for item, t in listed if t is not None}
        items = [item for item, _ in listed]
        return self.world.run(lambda t: share_tensors(t, items, mine))[0]

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over a whole state under the model's own names, from any plan or the plain model.

        Every rank gives the same state. Raises CheckpointError naming what is missing, unknown or of another shape.
        """
        expected = self.model.state_dict()
        missing = [name for name in expected if name not in state]
        unknown = [name for name in state if name not in expected]
        if missing or unknown:
            what = f"'{missing[0]}' is missing" if missing else f"'{unknown[0]}' is not in the model"
            raise CheckpointError(
                f"the state does not fit the model: {what} ({len(missing)} missing, {len(unknown)} unknown)"
            )
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape != expected[name].shape:
                raise CheckpointError(f"'{name}' has shape {list(value.shape)}, expected {list(expected[name].shape)}")
        self.model.load_state_dict(dict(state))
        if self._built is None:
            return
        own: dict[str, Tensor] = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        with torch.no_grad():
            for held in self.built.tensors.values():
                for name, tensor in (*held.parameters.items(), *held.buffers.items()):
                    if name in own and own[name] is not tensor:
                        tensor.copy_(own[name])

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's output in eval mode without gradients, whole and the same on every rank; a collective call."""
        if self._built is None:
            raise InputError("evaluate needs a compiled model: give example_inputs= to compile, or call step once")
        problem: EfftraError | None = None
        batch = evaluation = None
        try:
            call, tensors = read_call(self.model.forward, args, kwargs, None)
            evaluation = self._evaluation(call, tensors)
            rows = next(t.shape[d] for t, d in zip(tensors, evaluation.dims, strict=True) if d is not None)
            named = {n: t.detach().to(self.world.device) for n, t in zip(call.tensor_names, tensors, strict=True)}
            batch = Batch(rows, named, dict(zip(call.tensor_names, evaluation.dims, strict=True)))
        except EfftraError as error:
            problem = error
        self.steps += 1
        self.world.agree(problem, self.steps)
        if problem is not None:
            raise problem
        assert evaluation is not None and batch is not None
        return run_evaluation(evaluation, self.plan, self.world, self.built.tensors, batch)

    def _evaluation(self, call: Call, tensors: Sequence[Tensor]) -> Evaluation:
        shapes = [[size for d, size in enumerate(t.shape) if d] for t in tensors]
        key = repr((call.leaves, shapes, [str(t.dtype) for t in tensors]))
        found = self._evaluations.get(key)
        if found is None:
            owners = {p.name: p.stages for p in self.wiring.parameters}
            found = compile_evaluation(self.model, call, tensors, self.plan, owners)
            self._evaluations[key] = found
        return found

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """Clip all ranks' gradients by one norm over the whole model, each parameter counted once; a collective call.

        Returns the total norm before clipping, the same on every rank.
        """
        owned = {item.name for item, _ in self._owned(gradients=True) if item.owner in self.world.ranks}
        powers, largest = torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
        for name, parameter in self.named_parameters():
            if name in owned and parameter.grad is not None:
                norm = torch.linalg.vector_norm(parameter.grad.detach().double(), norm_type).cpu()
                powers += norm**norm_type if norm_type != float("inf") else 0.0
                largest = torch.maximum(largest, norm.reshape(1))
        shared = self.world.gather([float(powers), float(largest)])
        if norm_type == float("inf"):
            total = torch.tensor([one[1] for one in shared], dtype=torch.float64).max()
        else:
            total = torch.tensor([one[0] for one in shared], dtype=torch.float64).sum() ** (1.0 / norm_type)
        if error_if_nonfinite and not bool(torch.isfinite(total)):
            raise InputError(f"the total norm of the gradients is {float(total)}, so they cannot be clipped")
        factor = float(torch.clamp(max_norm / (total + 1e-6), max=1.0))
        for _, parameter in self.named_parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad * factor
        return total.to(torch.get_default_dtype()) if total.dtype != torch.float64 else total

    def check(self, *args: Any, target: Any = None, repeats: int = 3, show: bool = True, **kwargs: Any) -> CheckReport:
        """Run one step as planned and one on one device from the same weights; print and return how they compare.

        A collective call. Gradients, buffers, parameters and random state are left as they were.
        """
        if self._built is None:
            self.build(args, kwargs, target)
        state = self.state_dict()
        buffers = {rank: {n: b.clone() for n, b in t.buffers.items()} for rank, t in self.built.tensors.items()}
        times, results = [], {}
        for _ in range(max(repeats, 1)):
            batch = self._batch(args, kwargs, target)
            begin = time.perf_counter()
            results = self._run(batch, 0)
            times.append(time.perf_counter() - begin)
            for rank, held in self.built.tensors.items():
                for name, buffer in held.buffers.items():
                    buffer.copy_(buffers[rank][name])
        gradients = self._share_gradients(results)
        loss = float(next(r.loss for r in results.values() if r.loss is not None))
        data = None
        if self.world.first:
            call, tensors = read_call(self.model.forward, args, kwargs, target)
            data = self._against_one_device(state, call, list(tensors), gradients, repeats)
        data = self.world.broadcast(data)
        report = CheckReport(loss, data[0], data[1], data[2], data[3], median(times), data[4], self.built.front.notes)
        if show and self.world.first:
            print(report)
        return report

    def _against_one_device(
        self,
        state: Mapping[str, Tensor],
        call: Call,
        tensors: list[Tensor],
        gradients: Mapping[str, Tensor],
        repeats: int,
    ) -> list[Any]:
        seconds = []
        for _ in range(max(repeats, 1)):
            loss, expected, one = one_device_step(self.model, state, call, tensors, self.options.loss_fn, 0)
            seconds.append(one)
        worst, name, tolerance = compare_gradients(expected, gradients)
        return [loss, worst, name, tolerance, median(seconds)]

    def _share_gradients(self, results: Mapping[int, StepResult]) -> dict[str, Tensor]:
        mine: dict[str, Tensor] = {}
        for result in results.values():
            mine.update(result.gradients)
        if len(self.world.transports) > 1 or self.world.size == 1:
            return mine
        items = [item for item, _ in self._owned(gradients=True)]
        return self.world.run(lambda t: share_tensors(t, items, mine))[0]

    def dump(self, directory: str | Path) -> None:
        """Write what every pass made, the plan and the programs into a folder, as numbered text files."""
        texts = [("compile.txt", self.report.table() + "\n"), *self.report.texts]
        texts.append(("plan.json", self.plan.to_json()))
        texts.append(("explain.txt", self.plan.explain() + "\n"))
        texts.append(("programs.txt", print_programs(self.programs, self.wiring)))
        write_dumps(directory, texts)


def _held(front: Front, back: Back, place: int | None, transport: Transport) -> Tensors:
    """Return the tensors that a rank holds: its stage's parameters, those of no stage, and all buffers."""
    staged = {p.name: p.stages for p in back.wiring.parameters}
    parameters: dict[str, Tensor] = {}
    buffers: dict[str, Tensor] = {}
    constants: dict[str, Tensor] = {}
    for (kind, name), tensor in front.tensors.items():
        moved = tensor if tensor.device == transport.device else _moved(tensor, transport.device)
        if kind == "parameter" and (name not in staged or (place is not None and place in staged[name])):
            parameters[name] = moved
        elif kind == "buffer":
            buffers[name] = moved
        elif kind == "constant":
            constants[name] = moved
    return Tensors(parameters, buffers, constants)


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    moved = tensor.detach().to(device)
    return nn.Parameter(moved, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else moved


def _only_planned(front: Front, back: Back, planned: Planned | None) -> Built:
    return Built(front, back, planned, {}, {}, {}, {v.name: v for v in back.wiring.values}, {})


def _connections(programs: Mapping[int, RankProgram]) -> tuple[list[tuple[int, ...]], list[tuple[int, int]]]:
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


def _agreed(chain: Any, world: World) -> Any:
    """Return the chain with the median of all ranks' times, so that every rank plans alike."""
    mine = [[b.forward.fixed_s, b.forward.per_row_s, b.backward.fixed_s, b.backward.per_row_s] for b in chain.blocks]
    everyone = world.gather(mine)
    blocks = []
    for index, block in enumerate(chain.blocks):
        numbers = [median(one[index][k] for one in everyone) for k in range(4)]
        forward = replace(block.forward, fixed_s=numbers[0], per_row_s=numbers[1])
        backward = replace(block.backward, fixed_s=numbers[2], per_row_s=numbers[3])
        blocks.append(replace(block, forward=forward, backward=backward))
    return replace(chain, blocks=tuple(blocks))
