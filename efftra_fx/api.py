"""compile(model, cluster): from a model to a step that several ranks compute together."""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, fx, nn

from efftra_fx.alike import agree_on_state, same_capture, same_start
from efftra_fx.build import (
    Built,
    agreed_plan,
    make_bar,
    measured_chain,
    place,
)
from efftra_fx.calls import every_rank
from efftra_fx.captured import Captured
from efftra_fx.check import (
    CheckReport,
    compare_gradients,
    loss_tolerance,
    one_device_graph,
    one_device_step,
    random_note,
)
from efftra_fx.cluster import Cluster
from efftra_fx.compiler import Front, Options, Report
from efftra_fx.cost import CostTable
from efftra_fx.draws import KEY_DIMS, keys_of
from efftra_fx.dump import print_dot, print_graph, write_dumps
from efftra_fx.errors import EfftraError, InputError
from efftra_fx.evaluation import Evaluation, rows_of_batch, run_evaluation
from efftra_fx.evaluation_forms import EvaluationForms
from efftra_fx.front_end import check_inputs, front_end
from efftra_fx.heap import keep_freed_memory
from efftra_fx.hooks import call_after_accumulation, hooked
from efftra_fx.joint_updates import note_parts
from efftra_fx.misuse import NotAModule
from efftra_fx.opaque import nobodys
from efftra_fx.optimizer_state import Laid, Names
from efftra_fx.own_tensors import OwnTensors, watch_state
from efftra_fx.passes.comm import InsertComm
from efftra_fx.passes.lower import lower
from efftra_fx.passes.measure import measure_nodes
from efftra_fx.passes.pipeline import run_passes
from efftra_fx.passes.reduction import Weight
from efftra_fx.plan import Plan
from efftra_fx.program import RankProgram, Wiring
from efftra_fx.program_text import print_programs
from efftra_fx.replicas import ReplicaWatch, same_replicas
from efftra_fx.request import check_optimizer, check_subjects, read_examples, read_options
from efftra_fx.runtime.step import Batch, StepResult
from efftra_fx.runtime.transport import Transport
from efftra_fx.scaling import scale_of, share_overflow
from efftra_fx.signature import Call, read_call, refuse_gradients
from efftra_fx.state import (
    Writers,
    check_state,
    clip_gradients,
    held_parameters,
    owned,
    problem_of_norm,
    refresh_copies,
    share,
    take_state,
    whole_gradients,
    whole_name,
    whole_state,
)
from efftra_fx.step_forms import StepForms
from efftra_fx.step_module import LossFn
from efftra_fx.turns import begin_turns, take_turn
from efftra_fx.variants import (
    NotCaptured,
    agree_on_batch,
    describe_batch,
    given_batch,
    refuse_different_batches,
    refuse_replaced,
    sample_numbers,
    with_settings,
)
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
    batch_norm: str = "local",
    loss_reduction: str | Weight | None = None,
    rng: str = "plan",
    compile_stages: bool | str = False,
    timeout: float = 300.0,
    dump: str | Path | None = None,
    progress: bool | None = None,
    keep_memory: bool = False,
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
    `loss_reduction` says how the losses of micro-batches make that of the whole batch, where the graph does not
    show it: "mean" (over rows), "sum", or a function of a micro-batch's args, kwargs and target that gives its
    weight. It is checked on the example; without it such a loss is computed once on the whole batch.
    `batch_norm` says over which rows a BatchNorm in training takes its statistics: "local" (those of a micro-batch
    that are on one replica), "synced" (all rows of a micro-batch) or "exact" (the whole batch, as on one device:
    the plan then has one micro-batch).
    `rng` says what random numbers depend on besides the seed: with "plan" the same seed and the same plan draw the
    same masks; with "layout_free" every plan draws the masks that one device would.
    `compile_stages=True` runs the stages' graphs through `torch.compile` (a name takes another of its backends).
    `progress` shows a bar while blocks are measured, and what each part of the compilation took (default: on
    terminals).
    `keep_memory` makes this process keep memory that it frees (on CPUs, with glibc): steps with large tensors
    become faster, and the process stays as large as its largest step.
    `timeout` limits every wait, in seconds. `dump` (or EFFTRA_FX_DUMP) is a folder for what each pass made.

    Raises an `EfftraError` that says what cannot be had and why.
    """
    check_subjects(model, cluster, loss_fn, optimizer, timeout)
    options = read_options(
        loss_fn=loss_fn,
        stages=stages,
        replicas=replicas,
        micro_batches=micro_batches,
        schedule=schedule,
        plan=plan,
        cuts=cuts,
        tensor=tensor,
        batch_dims=batch_dims,
        costs=costs,
        optimizer_states=optimizer_states,
        batch_norm=batch_norm,
        loss_reduction=loss_reduction,
        rng=rng,
        compile_stages=compile_stages,
    )
    if keep_memory:
        keep_freed_memory()
    folder = dump if dump is not None else os.environ.get("EFFTRA_FX_DUMP")
    compiled = CompiledModel(model, cluster, options, optimizer, timeout, folder, progress)
    if example_inputs is not None or example_kwargs is not None:
        compiled.build(*read_examples(example_inputs, example_kwargs), example_target)
    elif optimizer is None:
        raise InputError(
            "compile without example inputs needs optimizer=lambda parameters: ..., since parameters are placed only "
            "at the first step; or give example_inputs="
        )
    return compiled


class CompiledModel(NotAModule):
    """A model laid over the ranks of a cluster; made by `compile`."""

    def __init__(
        self,
        model: nn.Module,
        cluster: Cluster,
        options: Options,
        make_optimizer: OptimizerFactory | None = None,
        timeout_s: float = 300.0,
        dump: str | Path | None = None,
        progress: bool | None = None,
    ) -> None:
        self.model, self.cluster, self.options = model, cluster, options
        self.make_optimizer, self.timeout_s, self.dump_folder = make_optimizer, timeout_s, dump
        self.optimizer: torch.optim.Optimizer | None = None
        self.report = Report()
        self.progress = progress
        self._steps: StepForms | None = None
        self._known_parameters: tuple[Built, dict[str, nn.Parameter]] | None = None
        self._evaluations = EvaluationForms()
        self._written = Writers()
        self._watch = ReplicaWatch()
        self._number, self._place = next(_NUMBERS), 0

    @cached_property
    def world(self) -> World:
        """The ranks of this process, connected to all others at first use.

        Raises LaunchError for a cluster that is only described, or when other ranks were started than it has.
        """
        return World(self.cluster, self.timeout_s)

    @property
    def built(self) -> Built:
        """What compilation made; raises InputError before the first step where that does the compiling."""
        return self._compiled.first

    @property
    def _compiled(self) -> StepForms:
        if self._steps is None:
            raise InputError("nothing is compiled yet: call step once, or give example_inputs= to compile")
        return self._steps

    def _calling(self, name: str) -> AbstractContextManager[None]:
        """Be in a call that every rank makes meanwhile; this program's, where several share their connections."""
        if self.cluster.where == "described" and "world" not in self.__dict__:
            return nullcontext()
        number = 0 if name == "compile" else None  # what follows the connecting is the same call
        return self.world.calling(f"{name} of with_plan's program {self._place}" if self._place else name, number)

    @torch.inference_mode(False)
    def build(self, args: Sequence[Any], kwargs: Mapping[str, Any], target: Any) -> None:
        """Trace, measure, plan and split for these example inputs; a collective call."""
        with self._calling("compile"):
            self._build(args, kwargs, target)

    def _build(self, args: Sequence[Any], kwargs: Mapping[str, Any], target: Any) -> None:
        world = self.world if self.cluster.where != "described" else None
        if world is not None:
            self._same_start(world)
        front = self._front(args, kwargs, target, world)
        chain = measured_chain(front, self.cluster, self.options, world, self.report, make_bar(world, self.progress))
        back, planned = agreed_plan(front, chain, self.cluster, self.options, world, self.report)
        built = place(front, back, chain, planned, world, self.report, backend=self.options.backend)
        self._steps = StepForms(built, self.model, self.options, self.report)
        self._written = Writers()
        self._evaluations = EvaluationForms()
        if world is not None:
            self._steps.executors_of(front.rows, 0, world)
            _LATEST[self.model] = weakref.ref(self)
            self._begin(world)
        if self.dump_folder is not None and (world is None or world.first):
            self.dump(self.dump_folder)
        if world is None or world.first:
            for note in front.notes:
                print(f"efftra_fx: {note}", file=sys.stderr)
            if make_bar(world, self.progress) is not None:
                print(f"efftra_fx: compiled in\n{self.report.table()}", file=sys.stderr)
        if self.make_optimizer is not None and world is not None:
            self.optimizer = check_optimizer(self.make_optimizer(self.parameters()))

    def _same_start(self, world: World) -> None:
        """Bring every rank to the same weights: those of the model's last program, else rank 0's."""
        latest = _LATEST.get(self.model)
        before = latest() if latest is not None else None
        if before is not None and before.world.size > 1 and len(before.world.transports) == 1:
            self.model.load_state_dict(before.state_dict())
        self._take_turn(world)
        different = same_start(self.model, self.options.loss_fn, world)
        if different is not None and world.first:
            print(f"efftra_fx: ranks held different weights ('{different}'); all start from rank 0's", file=sys.stderr)

    def __repr__(self) -> str:
        """Say what is laid out, and how."""
        what = f"{type(self).__name__} of {type(self.model).__name__}"
        if self._steps is None:
            return f"<{what}, not compiled before its first step>"
        plan = self.plan
        stages = ", ".join(f"{len(s.blocks)} block(s) on {list(s.devices)}" for s in plan.stages)
        return f"<{what}: {plan.micro_batches} micro-batch(es), schedule {plan.schedule}; stages: {stages}>"

    def _take_turn(self, world: World) -> None:
        """Take over what other programs over the same tensors wrote; a collective call."""
        if take_turn(self._number, self.model, self.options.loss_fn, world) and self._steps is not None:
            self._own_tensors.note()

    def _begin(self, world: World) -> None:
        begin_turns(self._number, self.built, world)
        apart = len(self.plan.stages) > 1 or self.plan.stages[0].tensor > 1
        rank, held = next(iter(self.built.tensors.items()))
        shares = {id(held.parameters[name]) for name in self.built.shares(rank) if name in held.parameters}
        self._own_tensors = OwnTensors(self.built, self.model, self.options.loss_fn, world)
        if len(world.transports) < world.size and apart:
            watch_state(self.model)
        note_parts(self.parameters(), len(world.transports) < world.size and apart, shares)

    def _front(self, args: Sequence[Any], kwargs: Mapping[str, Any], target: Any, world: World | None) -> Front:
        problem: EfftraError | None = None
        front: Front | None = None
        try:
            call, tensors = read_call(self.model.forward, args, kwargs, target)
            refuse_gradients(call, tensors)
            front = front_end(self.model, call, tensors, self.options, self.report)
        except EfftraError as error:
            problem = error
        if world is not None:
            world.agree(problem, -1)
        if front is None:
            assert problem is not None
            raise problem
        if world is not None:
            same_capture(front, self.options, world)
        return front

    @property
    def _forms(self) -> list[Built]:
        """The step for each form of batch that was met; the first is what was compiled."""
        return self._compiled.all

    @torch.inference_mode(False)
    @every_rank
    def step(self, *args: Any, target: Any = None, scaler: torch.amp.GradScaler | None = None, **kwargs: Any) -> Tensor:
        """Compute loss and gradients of the global batch, which every rank gives alike; a collective call.

        Returns the whole batch's loss, a scalar without a graph, the same on every rank. Gradients are
        added to `.grad` of `parameters()`. With an optimizer factory, parameters are updated too.
        With a `scaler`, gradients come multiplied by its scale, and an overflow on one rank shows on every rank:
        go on with `scaler.step(optimizer)` and `scaler.update()` as on one device, and all ranks do the same.
        Raises InputError, before anything is sent, where the batch is not what the step was compiled for.
        """
        if self._steps is None:
            self.build(args, kwargs, target)
        scale = 1.0 if scaler is None else scale_of(scaler)
        form, batch = self._batch(args, kwargs, target, "" if scaler is None else f", scaled by {scale:g}")
        self._take_turn(self.world)
        self._watch.before_step(self.built, self.world, self._parameters)
        front, back = self._forms[form].front, self._forms[form].back
        joined = front.tail.random or (front.news is not None and front.news.tail.random)
        seed = self._seed(front.alone is not None or joined, back.random)
        results = self._run(form, batch, seed, scale)
        self._add_gradients(results, front.captured)
        front.captured.python.leave()
        self._watch.after_step(self._parameters)
        if scaler is not None:
            share_overflow(self.parameters(), self.world, self._stand_in)
        if self.optimizer is not None:
            if scaler is None:
                self.optimizer.step()
            else:
                scaler.step(self.optimizer)
                scaler.update()
            self.optimizer.zero_grad()
        return _loss(results)

    def _seed(self, alike: bool, random: Sequence[bool]) -> int:
        """Draw the seed of a step; a model that draws nothing leaves the caller's random state alone.

        Where several ranks must draw `alike`, rank 0's counts; that is a collective call.
        """
        if not alike and not any(random):
            return 0
        seed = int(torch.empty((), dtype=torch.int64).random_().item())
        if alike or any(one is not None for one in self.built.back.sharded):
            seed = self.world.broadcast(seed)
        return seed

    def _with_keys(self, batch: Batch, seed: int) -> Batch:
        return replace(batch, tensors={**batch.tensors, **keys_of(seed, batch.rows, self.world.device)})

    def _batch(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], target: Any, scaled: str = ""
    ) -> tuple[int, Batch]:
        """Return the checked global batch and the number of its form; raises on every rank where any rank's is wrong.

        A form that was not met before is captured now.
        """
        world = self.world
        problem: EfftraError | None = None
        found: tuple[Call, tuple[Tensor, ...]] | None = None
        form, new, described = -1, "", ""
        try:
            self._own_tensors.take_writes()
            self._own_tensors.take_switches()
            found = call, tensors = read_call(self.model.forward, args, kwargs, target)
            refuse_gradients(call, tensors)
            described = describe_batch(*found)
            form = self._compiled.choose(call, tensors, described)
        except NotCaptured as error:
            new = str(error)
        except EfftraError as error:
            problem = error
        numbers = self._sample(found)
        shown = with_settings(described, None if form < 0 else self._forms[form].front.captured) + scaled
        if not world.agree_on_call(problem, given_batch(shown, form, numbers)):
            if self._own_tensors.agree_on_switches():
                return self._batch(args, kwargs, target, scaled)
            refuse_different_batches(world, shown, form, numbers)
        self._own_tensors.note_switches()
        assert problem is None and found is not None
        if new:
            form = self._compiled.add(*found, new, world)
        self._compiled.note(described, form)
        front = self._forms[form].front
        front.captured.feed(held.constants for held in self._forms[form].tensors.values())
        return form, Batch(check_inputs(front, *found), self._named(*found), front.dims)

    def _named(self, call: Call, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        device = self.world.device
        return {name: t.detach().to(device).contiguous() for name, t in zip(call.tensor_names, tensors, strict=True)}

    def _run(self, form: int, batch: Batch, seed: int, scale: float = 1.0) -> dict[int, StepResult]:
        executors = self._compiled.executors_of(batch.rows, form, self.world)
        if self._forms[form].front.alone is not None:
            batch = self._with_keys(batch, seed)
        refresh_copies(self.built)
        self._written.bring(self.built, self._forms[form].buffers, self.world)

        def work(transport: Transport) -> Turns[tuple[int, StepResult]]:
            result = yield from executors[transport.rank].run(batch, seed, scale)
            return transport.rank, result

        results = dict(self.world.run(work))
        self._written.wrote(self._forms[form])
        return results

    def _add_gradients(self, results: Mapping[int, StepResult], captured: Captured) -> None:
        """Add a step's gradients to `.grad`; those of `seldom` parameters only if anything gave one."""
        done: set[int] = set()
        parameters = self._parameters
        found = whole_gradients(self.built, {rank: result.gradients for rank, result in results.items()})
        for rank in sorted(found):
            held = self.built.tensors[rank].parameters
            for name, gradient in found[rank].items():
                parameter = parameters.get(name, held[name])
                if id(parameter) in done or name in captured.never:
                    continue
                if name in captured.seldom and nobodys(gradient):
                    continue
                done.add(id(parameter))
                own = self._own(name, parameter)
                gradient = hooked(own, gradient)
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
                call_after_accumulation(own, parameter)

    def _own(self, name: str, parameter: Tensor) -> Tensor:
        """Return the model's own parameter, which has the user's hooks, also where this process holds a copy."""
        return self.built.front.tensors.get(("parameter", name), parameter)

    @property
    def _parameters(self) -> dict[str, nn.Parameter]:
        """This process's parameters by name, looked up once for what was built."""
        if self._known_parameters is None or self._known_parameters[0] is not self.built:
            self._known_parameters = self.built, dict(self.named_parameters())
        return self._known_parameters[1]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this process's parameters under the model's own names, in the model's order."""
        return held_parameters(self.built, self.world, self.model, self.options.loss_fn)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield this process's parameters, for an optimizer.

        A rank that trains none yields one more of its own, since optimizers and scalers refuse to have nothing.
        """
        found = dict(self.named_parameters())
        yield from found.values()
        trained = {p.name for p in self.wiring.parameters if p.trainable}
        if not any(name in trained for name in found):
            yield self._stand_in

    @cached_property
    def _stand_in(self) -> nn.Parameter:
        """What the optimizer of a rank that trains nothing has to do."""
        return nn.Parameter(torch.zeros(1, device=self.world.device))

    @property
    def rank(self) -> int:
        """This process's rank, the first of them where all ranks live in it; rank 0 logs and saves."""
        return self.world.ranks[0]

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
        """Every rank's program, for the batch size that was prepared last."""
        if not self._compiled.executors:
            return lower(self.plan, self.wiring, self.built.front.rows, ranks=len(self.cluster.devices))
        return next(reversed(self._compiled.executors.values()))[0]

    @every_rank
    def state_dict(self) -> dict[str, Tensor]:
        """Return the whole state under the model's own names, the same on every rank; a collective call."""
        problem: EfftraError | None = None
        try:
            self._own_tensors.take_writes()
        except EfftraError as error:
            problem = error
        self.world.agree_on_call(problem)
        self._take_turn(self.world)
        same_replicas(self.built, self.world)
        return whole_state(self.built, self.world, self.model, self.options.loss_fn, self._written.latest)

    @every_rank
    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Take over a whole state under the model's own names, from any plan or the plain model.

        Every rank gives the same state. Raises CheckpointError naming what is missing, unknown or of another shape;
        without `strict`, what is missing stays as it is and what is unknown is left out.
        """
        problem: EfftraError | None = None
        known: dict[str, Any] = {}
        try:
            known = check_state(self.model, state, strict)
        except EfftraError as error:
            problem = error
        if self._steps is None:  # all ranks start from rank 0's state
            if problem is not None:
                raise problem
        else:
            agree_on_state(self.world, problem, known)
        self.model.load_state_dict(known, strict=strict)
        if self._steps is not None:
            take_state(self.built, self.model, known)
            self._written.forget(known)
            self._own_tensors.note()

    @torch.inference_mode(False)
    @every_rank
    def optimizer_state_dict(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the state of the same optimizer over the whole model, the same on every rank; a collective call.

        It is what that optimizer's `state_dict()` would be on one device, which loads it, with `names` beside.
        Raises CheckpointError for what is no data.
        """
        return self._laid(optimizer).save()

    @torch.inference_mode(False)
    @every_rank
    def load_optimizer_state_dict(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        """Give an optimizer over this program's parameters its part of a whole state; a collective call.

        The state is from `optimizer_state_dict` under any plan, from an optimizer of the plain model, or one by names
        as `torch.distributed.checkpoint` makes them; every rank gives the same. Raises CheckpointError, before anything
        is changed, naming what does not fit.
        """
        self._laid(optimizer).load(state)

    def _laid(self, optimizer: torch.optim.Optimizer) -> Laid:
        names = Names(self.built, self.model, self.options.loss_fn, self._stand_in)
        return Laid(optimizer, names, self.built, self.world, self.model, self.options.loss_fn)

    @torch.inference_mode(False)
    @every_rank
    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's output in eval mode, without gradients; a collective call.

        The output is whole, rows in order, in the model's own containers, and the same on every rank.
        """
        problem: EfftraError | None = None
        found: tuple[Call, tuple[Tensor, ...]] | None = None
        evaluation: Evaluation | None = None
        described, form = "", -1
        try:
            if self._steps is not None:
                self._own_tensors.take_writes()
            else:
                raise InputError("evaluate needs a compiled model: give example_inputs= to compile, or step once")
            refuse_replaced(self.built.front)
            found = call, tensors = read_call(self.model.forward, args, kwargs, None)
            described = describe_batch(*found)
            buffers = next(iter(self.built.tensors.values())).buffers
            evaluation = self._evaluations.find(self.model, call, tensors, buffers, described)
            if evaluation is not None:
                form = next(k for k, one in enumerate(self._evaluations.kept) if one is evaluation)
                rows_of_batch(call, tensors, evaluation.dims)
        except EfftraError as error:
            problem = error
        shown = with_settings(described, None if evaluation is None else evaluation.captured)
        agree_on_batch(self.world, problem, shown, form, self._sample(found))
        assert found is not None
        if evaluation is None:
            evaluation = self._evaluations.add(*found, described, self.model, self.built, self.options, self.world)
        dims = dict(zip(found[0].tensor_names, evaluation.dims, strict=True))
        batch = Batch(rows_of_batch(*found, evaluation.dims), self._named(*found), {**dims, **KEY_DIMS})
        self._take_turn(self.world)
        refresh_copies(self.built)
        self._written.bring(self.built, evaluation.buffers, self.world)
        seed = self._seed(evaluation.alike or evaluation.tail.random, evaluation.random)
        batch = self._with_keys(batch, seed) if evaluation.alike else batch
        evaluation.captured.feed([evaluation.constants])
        output = run_evaluation(evaluation, self.plan, self.world, self.built.tensors, batch, seed)
        evaluation.captured.python.leave()
        return output

    def _sample(self, found: tuple[Call, tuple[Tensor, ...]] | None) -> dict[str, str]:
        """Return some of a batch's numbers, where there are other processes to compare them with."""
        several = self.world.size > 1 and len(self.world.transports) == 1
        return sample_numbers(*found) if several and found is not None else {}

    @every_rank
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> Tensor:
        """Clip all ranks' gradients by one norm over the whole model, each parameter counted once; a collective call.

        Returns the total norm before clipping, the same on every rank. (`torch.nn.utils.clip_grad_norm_` would
        see this rank's stage alone; `foreach` is taken as there, and changes nothing.) Raises InputError on all ranks
        for a norm that is not finite, if asked to.
        """
        problem = problem_of_norm(max_norm, norm_type)
        given = f"max_norm={max_norm}, norm_type={norm_type}, error_if_nonfinite={error_if_nonfinite}"
        self.world.agree_on_arguments(problem, given)
        listed = owned(self.built, self.model, self.options.loss_fn, gradients=True)
        counted = {whole_name(item.name) for item, _ in listed if item.owner in self.world.ranks}
        return clip_gradients(
            list(self.named_parameters()), counted, self.world, max_norm, norm_type, error_if_nonfinite
        )

    @torch.inference_mode(False)
    @every_rank
    def check(self, *args: Any, target: Any = None, repeats: int = 3, show: bool = True, **kwargs: Any) -> CheckReport:
        """Run one step as planned and one on one device from the same weights; print and return how they compare.

        A collective call. Gradients, buffers, parameters and random state are left as they were.
        """
        if self._steps is None:
            self.build(args, kwargs, target)
        state = self.state_dict()
        times, results, form, batch = self._timed_steps(args, kwargs, target, max(repeats, 1))
        gradients = self._whole_gradients(results)
        found: list[Any] = []
        front = self._forms[form].front
        if self.world.first:
            call, tensors = read_call(self.model.forward, args, kwargs, target)
            runs = [
                one_device_step(self.model, state, call, list(tensors), self.options.loss_fn, 0)
                if front.alone is None
                else one_device_graph(front.alone, front.tensors, state, self._with_keys(batch, 0).tensors)
                for _ in range(max(repeats, 1))
            ]
            loss, expected, _ = runs[-1]
            found = [loss, *compare_gradients(expected, gradients), median(run[2] for run in runs)]
        one_loss, worst, name, tolerance, one_s = self.world.broadcast(found)
        drawn = random_note(front.gm, front.tail.random) if front.alone is None else ()
        notes = (*self.built.front.notes, *drawn)
        planned = _loss(results)
        apart = max(loss_tolerance(planned.dtype), tolerance)
        report = CheckReport(float(planned), one_loss, worst, name, tolerance, median(times), one_s, notes, apart)
        if show and self.world.first:
            print(report)
        return report

    def _timed_steps(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], target: Any, repeats: int
    ) -> tuple[list[float], dict[int, StepResult], int, Batch]:
        """Run steps that leave no trace in buffers and gradients.

        Returns their seconds, the last one's results, and the form and the batch that they were.
        """
        times: list[float] = []
        results: dict[int, StepResult] = {}
        form, batch = self._batch(args, kwargs, target)
        self._written.bring(self.built, self._forms[form].buffers, self.world)
        before = {rank: {n: b.clone() for n, b in t.buffers.items()} for rank, t in self.built.tensors.items()}
        for _ in range(repeats):
            begin = time.perf_counter()
            results = self._run(form, batch, 0)
            times.append(time.perf_counter() - begin)
            for rank, held in self.built.tensors.items():
                for name, buffer in held.buffers.items():
                    buffer.copy_(before[rank][name])
        return times, results, form, batch

    def _whole_gradients(self, results: Mapping[int, StepResult]) -> dict[str, Tensor]:
        mine: dict[str, Tensor] = {}
        for found in whole_gradients(self.built, {rank: r.gradients for rank, r in results.items()}).values():
            mine.update({name: hooked(self._own(name, gradient), gradient) for name, gradient in found.items()})
        listed = owned(self.built, self.model, self.options.loss_fn, gradients=True)
        own = [(item, mine.get(whole_name(item.name)) if t is not None else None) for item, t in listed]
        return share(self.world, own, self.built)

    @every_rank
    def with_plan(self, plan: Plan | str | Path) -> CompiledModel:
        """Return the same captured step laid out by another plan, nothing traced or measured again; a collective call.

        Its programs are lowered and verified at its first step. It starts from this program's weights; go on with
        only one of the two. Raises what `compile` raises for a plan that cannot be had.
        """
        chosen = plan if isinstance(plan, Plan) else Plan.load(plan)
        if self.cluster.where != "described":
            self.world.agree_on_arguments(None, json.dumps(json.loads(chosen.to_json())))
        rest: dict[str, Any] = dict.fromkeys(("stages", "replicas", "micro_batches", "schedule", "cuts", "tensor"))
        options = replace(self.options, plan=chosen, **rest)
        other = CompiledModel(self.model, self.cluster, options, None, self.timeout_s, None, self.progress)
        world = self.world if self.cluster.where != "described" else None
        if world is not None:
            other.world = world
            world.programs += 1
            other._place = world.programs
            self._same_start(world)
        front, chain = self.built.front, self.built.chain
        back, planned = agreed_plan(front, chain, self.cluster, options, world, other.report)
        codes, backend = self.built.codes, self.options.backend
        laid = place(front, back, chain, planned, world, other.report, codes, backend=backend)
        other._steps = StepForms(laid, self.model, options, other.report)
        if world is not None:
            _LATEST[self.model] = weakref.ref(other)
            other._begin(world)
        return other

    @property
    def graph(self) -> fx.GraphModule:
        """The distributed graph: every part's computation a call, every message a node, the loss at the end.

        It takes the model's own parameters, buffers, constants and inputs (with rng="layout_free" also the keys of
        a step), for the batch size that was compiled for, and can be called in one process: it gives the model's
        loss, and autograd its gradients.
        """
        front, back = self.built.front, self.built.back
        comm = InsertComm(
            back.plan, back.wiring, back.stages, front.tail, front.dims, front.rows, front.counters, front.news
        )
        return run_passes(front.gm, (comm,), ("role", "outputs", "stage"))

    def node_costs(self, repeats: int = 3) -> CostTable:
        """Time every node of the captured step, forward and backward apart, on this process's device."""
        front = self.built.front
        inputs = {name: (front.examples[name], dim) for name, dim in front.dims.items()}
        device = str(self.world.device) if self.cluster.where != "described" else "cpu"
        return measure_nodes(front.gm, front.tensors, inputs, front.rows, device=device, repeats=repeats)

    def dump(self, directory: str | Path) -> None:
        """Write what every pass made, the plan and the programs into a folder, as numbered text files."""
        texts = [("compile.txt", self.report.table() + "\n"), *self.report.texts]
        graph = self.graph
        texts.append(("insert-comm.txt", print_graph(graph, "insert-comm")))
        texts.append(("insert-comm.dot", print_dot(graph, "insert-comm")))
        texts.append(("plan.json", self.plan.to_json()))
        texts.append(("explain.txt", self.plan.explain() + "\n"))
        texts.append(("programs.txt", print_programs(self.programs, self.wiring)))
        write_dumps(directory, texts)


_NUMBERS = itertools.count()
_LATEST: weakref.WeakKeyDictionary[nn.Module, weakref.ref[CompiledModel]] = weakref.WeakKeyDictionary()


def _loss(results: Mapping[int, StepResult]) -> Tensor:
    return next(r.loss for r in results.values() if r.loss is not None).reshape(())
