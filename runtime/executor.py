"""Run one rank's program: instructions become closures once, and then only the closures run.

    program text                        what its closure does
    load s0 m0 [0:4]                    take the rows of the inputs
    recv x m0 [0:4] <- 1 ...            post the receive
    forward s0 m0                       wait for what it reads; call the stage's function
    send x m0 [0:4] -> 1 ...            hand the tensor to the transport
    all_reduce weight [0, 1]            start the sum of the gradients

An executor is a generator, so that ranks of one process can take turns (`run_all`); where
each rank has its own process it is simply run to its end.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, assert_never

import torch
from torch import Tensor

from efftra_fx.program import (
    AllReduce,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Instruction,
    Join,
    Load,
    Message,
    RankProgram,
    Recv,
    ReduceLoss,
    Send,
    Update,
    Value,
)
from efftra_fx.program_text import print_instruction

from .buffers import replicas_with_rows, write_buffers
from .drawing import drawing
from .meetings import Company, meet
from .news import write_news
from .parts import assemble, gather_parts, rows_of
from .step import Action, Batch, BoundaryPart, NewsCode, StageWork, Step, StepResult, TailCode, Tensors, Waiting
from .transport import Handle, Incoming, Outgoing, Transport
from .weights import Gradients


class Executor:
    """One rank of a plan for one size of the global batch; `run` does one step."""

    def __init__(
        self,
        program: RankProgram,
        values: Mapping[str, Value],
        work: StageWork | None,
        tensors: Tensors,
        tail: TailCode | None,
        transport: Transport,
        shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
        record: Callable[[], float] | None = None,
        news: NewsCode | None = None,
    ) -> None:
        self.program, self.values, self.work, self.tensors = program, values, work, tensors
        self.tail, self.transport, self.shapes, self.clock = tail, transport, shapes, record
        self.news = news
        self.device = transport.device
        self.names = {name: index for index, name in enumerate(sorted(values))}
        self.cells = {i.micro_batch: (i.start, i.stop) for i in program.instructions if isinstance(i, Load)}
        self.last_sends = _last_sends(program.instructions)
        makers = [k for k, i in enumerate(program.instructions) if isinstance(i, Backward | BackwardWeight)]
        self.several, self.last_maker = len(makers) > 1, makers[-1] if makers else -1
        names = [role.name for role in work.roles if role.kind == "parameter"] if work is not None else []
        reduces = [i for i in program.instructions if isinstance(i, AllReduce)]
        strides = {name: tensor.stride() for name, tensor in tensors.parameters.items()}
        self.gradients = Gradients(names, reduces, shapes, strides, self.device)
        self.actions = list(self._close(program.instructions))

    def run(
        self, batch: Batch, seed: int = 0, scale: float = 1.0
    ) -> Generator[tuple[Handle[Any], str], None, StepResult]:
        """Run one step; yields where this rank would have to wait for ranks of the same process.

        All gradients are multiplied by `scale`, from where the backward begins; the loss is not.
        """
        step = Step(batch, seed, self.gradients.start(), scale)
        timeline: list[tuple[int, float, float]] = []
        clock = self.clock
        with torch.no_grad():
            if self.tail is not None and self.tail.linear and self.work is not None and self.work.boundaries:
                with drawing(seed if self.tail.random else None, self.device):
                    step.seeds, step.constant = self.tail.seeds(batch)
            for index, needs, action in self.actions:
                begin = clock() if clock else 0.0
                for key in needs:
                    for message, handle in step.pending.pop(key, ()):
                        what = print_instruction(message) if not handle.ready() else ""
                        while not handle.ready():
                            yield handle, what
                        piece = (message.start, message.stop, handle.wait(what))
                        step.arrived.setdefault(key, []).append(piece)
                waiting = action(step)
                if waiting is not None:
                    yield from waiting
                if clock:
                    timeline.append((index, begin, clock()))
        loss = step.reduced.wait("reduce_loss") if step.reduced is not None else step.loss
        return StepResult(loss, step.weights, step.parts, timeline)

    def _close(
        self, instructions: Sequence[Instruction]
    ) -> Generator[tuple[int, list[tuple[str, int, bool]], Action], None, None]:
        """Yield a closure for each instruction, with the values that it waits for; messages in a row make one group."""
        needed = _needs(instructions)
        group: list[Send | Recv] = []
        for index, instruction in enumerate(instructions):
            if isinstance(instruction, Send | Recv):
                group.append(instruction)
                continue
            if group:
                yield index - 1, [], self._messages(group)
                group = []
            yield index, needed.get(index, []), self._action(instruction, index == self.last_maker)
        if group:
            yield len(instructions) - 1, [], self._messages(group)

    def _action(self, instruction: Instruction, last: bool) -> Action:
        match instruction:
            case Load():
                return self._load(instruction)
            case Forward(micro_batch=micro_batch):
                return self._forward(micro_batch)
            case Backward(micro_batch=micro_batch):
                return self._backward(micro_batch, last)
            case BackwardInput(micro_batch=micro_batch):
                return self._backward_input(micro_batch)
            case BackwardWeight(micro_batches=micro_batches):
                return self._backward_weight(micro_batches, last)
            case AllReduce():
                return self._all_reduce(instruction)
            case Join():
                return self._join(instruction)
            case ReduceLoss():
                return self._reduce_loss(instruction)
            case Update():
                return self._update()
            case Send() | Recv():
                return self._messages([instruction])
            case _:
                assert_never(instruction)

    def _messages(self, group: Sequence[Send | Recv]) -> Action:
        recvs = [m for m in group if isinstance(m, Recv)]
        sends = [m for m in group if isinstance(m, Send)]
        incoming = [Incoming(m.shape, getattr(torch, m.dtype), self.device, m.peer, self._tag(m)) for m in recvs]
        transport, exchange = self.transport, len(group) > 1
        leaving = [(m, m.peer, self._tag(m), m in self.last_sends) for m in sends]

        def act(step: Step) -> None:
            outgoing = [Outgoing(self._take(step, m, last), peer, tag) for m, peer, tag, last in leaving]
            if exchange:
                _, handles = transport.exchange(outgoing, incoming)
            else:
                handles = [transport.recv(*i) for i in incoming]
                for o in outgoing:
                    transport.send(*o)
            for message, handle in zip(recvs, handles, strict=True):
                step.pending.setdefault(_key(message), []).append((message, handle))

        return act

    def _tag(self, message: Message) -> int:
        return (message.micro_batch * len(self.names) + self.names[message.value]) * 2 + message.gradient

    def _take(self, step: Step, message: Send, last: bool) -> Tensor:
        """Return the rows that a message carries, contiguous; the last message lets the tensor go."""
        key = _key(message)
        tensor = step.outgoing.pop(key) if last else step.outgoing[key]
        value = self.values[message.value]
        if value.kind == "rows":
            first, stop = self.cells[message.micro_batch]
            if (first, stop) != (message.start, message.stop):
                tensor = rows_of(tensor, value.dim, first, stop, message.start, message.stop)
        return tensor.contiguous()

    def _load(self, load: Load) -> Action:
        assert self.work is not None
        names = [r.name for r in self.work.roles if r.kind == "input"]
        micro_batch, start, stop = load.micro_batch, load.start, load.stop

        def act(step: Step) -> None:
            batch = step.batch
            operands = {}
            for name in names:
                dim, tensor = batch.dims[name], batch.tensors[name]
                operands[name] = tensor if dim is None else tensor.narrow(dim, start, stop - start).contiguous()
            step.operands[micro_batch] = operands

        return act

    def _forward(self, micro_batch: int) -> Action:
        work, tensors = self.work, self.tensors
        assert work is not None
        first, stop = self.cells[micro_batch]
        code = work.code(stop - first)
        differentiate = any(isinstance(i, Backward | BackwardInput | BackwardWeight) for i in self.program.instructions)
        count, bounds, company = len(work.sends), work.boundaries, self._company(micro_batch)
        share = (stop - first) / self.program.rows
        salt = (self.program.stage or 0, micro_batch, self.program.replica)

        def collect(step: Step) -> list[Any]:
            inputs = step.operands.pop(micro_batch)
            operands: list[Any] = []
            for role in work.roles:
                if role.kind == "parameter":
                    operands.append(tensors.parameters[role.name])
                elif role.kind == "buffer":
                    current = None if role.name in work.once else step.buffers.get(role.name)
                    operands.append(tensors.buffers[role.name] if current is None else current)
                elif role.kind == "constant":
                    operands.append(tensors.constants[role.name])
                elif role.kind == "input":
                    operands.append(inputs[role.name])
                else:
                    pieces = step.arrived.pop((role.name, micro_batch, False), [])
                    operands.append(assemble(pieces, self.values[role.name], first, stop, self.device))
            return operands

        def together(step: Step) -> Waiting:
            meeting: Any = code.forward(collect(step))
            seed = _mix(step.seed, *salt) if work.random else None
            outputs, saved = yield from meet(meeting, self.transport, company, f"forward m{micro_batch}", seed)
            finish(step, outputs, saved)

        def act(step: Step) -> None:
            operands = collect(step)
            with drawing(_mix(step.seed, *salt) if work.random else None, self.device):
                outputs, saved = code.forward(operands)
            finish(step, outputs, saved)

        def finish(step: Step, outputs: Sequence[Any], saved: Any) -> None:
            if differentiate:
                step.saved[micro_batch] = saved
            for name, output in zip(work.sends, outputs, strict=False):
                step.outgoing[name, micro_batch, False] = output
            for bound, output in zip(bounds, outputs[count:], strict=False):
                self._bound(step, bound, output, (first, stop), share)
            rest = iter(outputs[count + len(bounds) :])
            for name, output in zip(work.buffers, rest, strict=False):
                step.buffers[name] = output
            for part, output in zip(work.parts, rest, strict=True):
                if not self.program.tensor:  # the ranks of a tensor group all have it; the first counts it
                    step.news.setdefault(part.name, []).append((first, stop, output))

        return together if work.meets else act

    def _company(self, micro_batch: int) -> Company:
        """Return whom this rank meets when it computes a micro-batch."""
        work = self.work
        assert work is not None
        beside = replicas_with_rows(self.program, work.beside, micro_batch)
        return Company(work.together, beside, len(work.beside))

    def _bound(self, step: Step, bound: BoundaryPart, output: Tensor, rows: tuple[int, int], share: float) -> None:
        """Count a part's boundary value: towards the loss where that is linear, kept for the join otherwise.

        The ranks of a tensor group all have it; the first counts it.
        """
        if self.program.tensor:
            return
        if self.tail is None or not self.tail.linear:
            step.parts.setdefault(bound.name, []).append((*rows, output))
            return
        seed = step.seeds.get(bound.name)
        if seed is None:
            return
        part = (output * seed).sum() if output.ndim else output * seed
        if bound.kind == "whole":
            part = part * share
        step.loss = part if step.loss is None else step.loss + part

    def _output_gradients(self, step: Step, micro_batch: int) -> list[Tensor | None]:
        work = self.work
        assert work is not None
        first, stop = self.cells[micro_batch]
        gradients: list[Tensor | None] = []
        for name in work.sends:
            value = self.values[name]
            pieces = step.arrived.pop((name, micro_batch, True), None)
            if pieces is not None:
                gradients.append(assemble(pieces, value, first, stop, self.device))
            elif any(value.gradients):
                shape = value.part_shape(stop - first)
                gradients.append(torch.zeros(shape, dtype=getattr(torch, value.dtype), device=self.device))
            else:
                gradients.append(None)
        for bound in work.boundaries:
            seed = step.seeds.get(bound.name)
            if seed is None:  # a boundary without a gradient, such as a count
                gradients.append(None)
                continue
            if bound.kind == "rows":
                width = seed.shape[bound.dim] // self.program.rows
                seed = seed.narrow(bound.dim, first * width, (stop - first) * width).contiguous()
            elif bound.kind == "whole":
                seed = seed * ((stop - first) / self.program.rows)
            gradients.append(seed if step.scale == 1.0 else seed * step.scale)
        gradients.extend([None] * (len(work.buffers) + len(work.parts)))
        return gradients

    def _backward(self, micro_batch: int, last: bool) -> Action:
        work = self.work
        assert work is not None
        first, stop = self.cells[micro_batch]
        code, defer, company = work.code(stop - first), self.several, self._company(micro_batch)

        def together(step: Step) -> Waiting:
            gradients = self._output_gradients(step, micro_batch)
            sums = step.gradients.open(code)
            meeting: Any = code.backward(step.saved.pop(micro_batch), gradients, sums, False)
            values = yield from meet(meeting, self.transport, company, f"backward m{micro_batch}")
            self._give_values(step, micro_batch, values)
            step.gradients.close(last)

        def act(step: Step) -> None:
            gradients = self._output_gradients(step, micro_batch)
            sums = step.gradients.open(code, self.transport if last else None)
            values = code.backward(step.saved.pop(micro_batch), gradients, sums, defer)
            self._give_values(step, micro_batch, values)
            step.gradients.close(last)

        return together if work.meets else act

    def _backward_input(self, micro_batch: int) -> Action:
        work = self.work
        assert work is not None
        first, stop = self.cells[micro_batch]
        code, company = work.code(stop - first), self._company(micro_batch)

        def together(step: Step) -> Waiting:
            meeting: Any = code.backward_input(step.saved.pop(micro_batch), self._output_gradients(step, micro_batch))
            what = f"backward_input m{micro_batch}"
            values, step.kept[micro_batch] = yield from meet(meeting, self.transport, company, what)
            self._give_values(step, micro_batch, values)

        def act(step: Step) -> None:
            gradients = self._output_gradients(step, micro_batch)
            values, step.kept[micro_batch] = code.backward_input(step.saved.pop(micro_batch), gradients)
            self._give_values(step, micro_batch, values)

        return together if work.meets else act

    def _backward_weight(self, micro_batches: tuple[int, ...], last: bool) -> Action:
        work = self.work
        assert work is not None
        codes = [work.code(self.cells[m][1] - self.cells[m][0]) for m in micro_batches]
        defer = self.several

        def together(step: Step) -> Waiting:
            for micro_batch, code in zip(micro_batches, codes, strict=True):
                meeting: Any = code.backward_weight(step.kept.pop(micro_batch), step.gradients.open(code), False)
                yield from meet(meeting, self.transport, self._company(micro_batch), f"backward_weight m{micro_batch}")
            step.gradients.close(last)

        def act(step: Step) -> None:
            for micro_batch, code in zip(micro_batches, codes, strict=True):
                code.backward_weight(step.kept.pop(micro_batch), step.gradients.open(code), defer)
            step.gradients.close(last)

        return together if work.meets else act

    def _give_values(self, step: Step, micro_batch: int, gradients: Sequence[Tensor | None]) -> None:
        assert self.work is not None
        names = [role.name for role in self.work.roles if role.kind == "value"]
        for name, gradient in zip(names, gradients, strict=True):
            if gradient is not None:
                step.outgoing[name, micro_batch, True] = gradient

    def _all_reduce(self, reduce: AllReduce) -> Action:
        transport = self.transport

        def act(step: Step) -> None:
            step.gradients.reduce(reduce, transport)

        return act

    def _join(self, join: Join) -> Action:
        tail, transport = self.tail, self.transport
        assert tail is not None and self.work is not None
        bounds = self.work.boundaries

        def act(step: Step) -> Waiting:
            values = yield from gather_parts(transport, join.ranks, bounds, step.parts, print_instruction(join))
            with drawing(step.seed if tail.random else None, self.device):
                loss, step.seeds = tail.join(step.batch, values)
            step.loss = loss / len(join.ranks)
            step.parts.clear()

        return act

    def _reduce_loss(self, reduce: ReduceLoss) -> Action:
        transport = self.transport
        dtype = self.shapes[""][1]
        adds_constant = self.program.replica == self.program.tensor == 0 and self.tail is not None
        adds_constant = adds_constant and self.program.stage == self.tail.constant_stage  # type: ignore[union-attr]

        def act(step: Step) -> None:
            loss = step.loss
            if loss is None:
                loss = torch.zeros((), dtype=dtype, device=self.device)
            if step.constant is not None and adds_constant:
                loss = loss + step.constant
            step.reduced = transport.all_reduce(loss.detach().to(dtype).reshape(1).clone(), reduce.ranks)

        return act

    def _update(self) -> Action:
        transport = self.transport

        def act(step: Step) -> Waiting:
            step.weights = yield from step.gradients.results()
            if step.reduced is not None:
                while not step.reduced.ready():
                    yield step.reduced, "reduce_loss"
            if self.work is not None:
                yield from write_buffers(step, self.work, self.tensors.buffers, self.program, transport)
            if self.news is not None:
                yield from write_news(step, self.news, self.tensors.buffers, transport)
            transport.drain()

        return act


def _key(message: Message) -> tuple[str, int, bool]:
    return message.value, message.micro_batch, message.gradient


def _needs(instructions: Sequence[Instruction]) -> dict[int, list[tuple[str, int, bool]]]:
    """Map each computing instruction to the received values that it is the first to need."""
    received: dict[tuple[int, bool], list[tuple[str, int, bool]]] = {}
    for instruction in instructions:
        if isinstance(instruction, Recv):
            keys = received.setdefault((instruction.micro_batch, instruction.gradient), [])
            if _key(instruction) not in keys:
                keys.append(_key(instruction))
    needs: dict[int, list[tuple[str, int, bool]]] = {}
    for index, instruction in enumerate(instructions):
        if isinstance(instruction, Forward):
            needs[index] = received.get((instruction.micro_batch, False), [])
        elif isinstance(instruction, Backward | BackwardInput):
            needs[index] = received.get((instruction.micro_batch, True), [])
    return needs


def _last_sends(instructions: Sequence[Instruction]) -> frozenset[Send]:
    last: dict[tuple[str, int, bool], Send] = {}
    for instruction in instructions:
        if isinstance(instruction, Send):
            last[_key(instruction)] = instruction
    return frozenset(last.values())


def _mix(*numbers: int) -> int:
    """Mix numbers into a seed (the finaliser of splitmix64 over a running state)."""
    state = 0x9E3779B97F4A7C15
    for number in numbers:
        state = (state ^ (number & 0xFFFFFFFFFFFFFFFF)) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        state = (state ^ (state >> 31)) & 0xFFFFFFFFFFFFFFFF
    return state >> 1


def drive(generator: Generator[tuple[Handle[Any], str], None, Any]) -> Any:
    """Run a rank that has its process for itself to its end, and return what it returns."""
    try:
        while True:
            handle, what = next(generator)
            handle.wait(what)
    except StopIteration as stop:
        return stop.value
