"""What programs compute, found by computing it: a small model made of whole numbers.

Every stage is a made-up function modulo a prime, with made-up gradients: linear in
the gradients that arrive, and dependent on what the forward saved. A sum over parts
is exact, so any cut of the batch must give the very same numbers as one device. The
machine below knows instructions only, and no rule of the verifier: it binds what
arrives, in order of arrival, to what the receive says that it is.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache

from efftra_fx.program import (
    AllReduce,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Join,
    Load,
    RankProgram,
    Recv,
    ReduceLoss,
    Send,
    Update,
    Value,
    Wiring,
)

PRIME = 2**61 - 1
Rows = dict[int, int]
Payload = list[int] | int
Channels = dict[tuple[int, int], list[tuple[Payload, Send]]]


class OracleError(Exception):
    """The programs cannot be run to their ends, or read what is not there."""


@cache
def number(*parts: object) -> int:
    """Return a fixed number for a name."""
    text = repr(parts).encode()
    return zlib.crc32(text) * 2654435761 % PRIME + 1


@dataclass
class Saved:
    """What a cell keeps: its rows' hidden numbers and what it read."""

    hidden: Rows
    whole: Mapping[str, int]
    grads: dict[str, Rows | int] = field(default_factory=dict)


class Model:
    """The functions of all stages."""

    def __init__(self, wiring: Wiring) -> None:
        self.wiring = wiring
        self.values = {value.name: value for value in wiring.values}
        self.reads = [[v for v in wiring.values if stage in v.consumers] for stage in range(wiring.stages)]
        self.gives = [[v for v in wiring.values if v.producer == stage] for stage in range(wiring.stages)]
        self.weights = [[p for p in wiring.parameters if stage in p.stages] for stage in range(wiring.stages)]
        self.last = wiring.stages - 1

    def forward(
        self, stage: int, rows: Iterable[int], inputs: Mapping[str, Rows | int]
    ) -> tuple[Saved, dict[str, Rows | int], int]:
        """Return what is saved, the values that the stage gives, and its part of the loss (last stage only)."""
        weight = sum(number(p.name) for p in self.weights[stage])
        whole = {v.name: _scalar(inputs, v) for v in self.reads[stage] if v.kind == "whole"}
        sums = sum(number("c", v.name) * _scalar(inputs, v) for v in self.reads[stage] if v.kind == "sum")
        hidden = {}
        for row in rows:
            mixed = number("x", row) + weight + sum(number("w", name) * one for name, one in whole.items())
            for v in self.reads[stage]:
                if v.kind == "rows":
                    mixed += number("r", v.name, stage) * _row(inputs, v, row)
            hidden[row] = (mixed * mixed + stage) % PRIME
        total = (sum(hidden.values()) + sums) % PRIME
        outputs: dict[str, Rows | int] = {}
        for v in self.gives[stage]:
            factor = number("o", v.name)
            if v.kind == "rows":
                outputs[v.name] = {row: factor * h % PRIME for row, h in hidden.items()}
            elif v.kind == "whole":
                outputs[v.name] = factor * (weight + sum(whole.values())) % PRIME
            else:
                outputs[v.name] = factor * total % PRIME
        return Saved(hidden, whole), outputs, total if stage == self.last else 0

    def backward(self, stage: int, saved: Saved, seed: int) -> tuple[dict[str, Rows | int], Rows]:
        """Return the gradients of what the stage read, and its parameters' part of each row (-1: of no row)."""
        arriving = saved.grads
        of_sum = seed if stage == self.last else 0
        of_whole = 0
        for v in self.gives[stage]:
            if v.kind == "sum":
                of_sum += number("o", v.name) * _number(arriving.get(v.name, 0))
            elif v.kind == "whole":
                of_whole += number("o", v.name) * _number(arriving.get(v.name, 0))
        part: Rows = {-1: of_whole % PRIME}
        for row, h in saved.hidden.items():
            gradient = of_sum
            for v in self.gives[stage]:
                if v.kind == "rows":
                    gradient += number("o", v.name) * _rows(arriving.get(v.name, {})).get(row, 0)
            part[row] = gradient * h % PRIME
        whole = (sum(one for row, one in part.items() if row >= 0) + part[-1]) % PRIME
        back: dict[str, Rows | int] = {}
        for v in self.reads[stage]:
            if v.kind == "rows":
                factor = number("r", v.name, stage)
                back[v.name] = {row: factor * one % PRIME for row, one in part.items() if row >= 0}
            elif v.kind == "whole":
                back[v.name] = number("w", v.name) * whole % PRIME
            else:
                back[v.name] = number("c", v.name) * of_sum % PRIME
        return back, part

    def gradients(self, stage: int, part: Rows) -> dict[str, int]:
        """Return what a cell adds to the gradients of the stage's trainable parameters."""
        total = sum(part.values()) % PRIME
        return {p.name: number("g", p.name, stage) * total % PRIME for p in self.weights[stage] if p.trainable}

    def seed(self, total: int) -> int:
        """Return what the backward starts from, given the loss's sum over the whole batch."""
        return number("seed", total) if self.wiring.joined else 7


def on_one_device(wiring: Wiring, rows: int) -> tuple[dict[str, int], int]:
    """Return every parameter's gradient, and the loss, of a whole batch on one device."""
    model = Model(wiring)
    values: dict[str, Rows | int] = {}
    saved = []
    loss = 0
    for stage in range(wiring.stages):
        kept, outputs, loss = model.forward(stage, range(rows), values)
        saved.append(kept)
        values |= outputs
    gradients: dict[str, int] = {}
    for stage in reversed(range(wiring.stages)):
        if not wiring.backward[stage]:
            continue
        back, part = model.backward(stage, saved[stage], model.seed(loss))
        for name, one in model.gradients(stage, part).items():
            gradients[name] = (gradients.get(name, 0) + one) % PRIME
        for name, gradient in back.items():
            value = model.values[name]
            if wiring.returns_gradient(value, stage):
                _add(saved[value.producer].grads, name, gradient)
    return gradients, loss % PRIME


def on_ranks(programs: Mapping[int, RankProgram], wiring: Wiring) -> tuple[dict[int, dict[str, int]], dict[int, int]]:
    """Run the programs; return each rank's gradients and the loss that it learned (if it did) at its update.

    Raises OracleError if they do not end, or an instruction finds nothing to work on.
    """
    ranks = {rank: _Rank(program, Model(wiring)) for rank, program in programs.items()}
    channels: Channels = {}
    moving = True
    while moving:
        moving = False
        for rank in programs:
            while _step(rank, ranks, channels):
                moving = True
    if any(one.ended is None for one in ranks.values()):
        raise OracleError("not all ranks reach their update")
    if any(channels.values()):
        raise OracleError("a message was never received")
    ended = {rank: one.ended for rank, one in ranks.items() if one.ended is not None}
    return {rank: one[0] for rank, one in ended.items()}, {r: one[1] for r, one in ended.items() if one[1] is not None}


class _Rank:
    def __init__(self, program: RankProgram, model: Model) -> None:
        self.program, self.model = program, model
        self.at = 0
        self.rows: dict[int, range] = {}
        self.pending: list[Recv] = []
        self.inputs: dict[int, dict[str, Rows | int]] = {}
        self.gradients_in: dict[int, dict[str, Rows | int]] = {}
        self.saved: dict[int, Saved] = {}
        self.outputs: dict[int, dict[str, Rows | int]] = {}
        self.back: dict[int, dict[str, Rows | int]] = {}
        self.parts: dict[int, Rows] = {}
        self.gradients: dict[str, int] = {}
        self.partial = 0
        self.loss: int | None = None
        self.seed: int | None = None if model.wiring.joined else 7
        self.ended: tuple[dict[str, int], int | None] | None = None


def _step(rank: int, ranks: Mapping[int, _Rank], channels: Channels) -> bool:
    me = ranks[rank]
    if me.at == len(me.program.instructions):
        return False
    instruction = me.program.instructions[me.at]
    if me.ended is not None:
        raise OracleError("an instruction follows update")
    match instruction:
        case Load(micro_batch=k, start=start, stop=stop):
            me.rows[k] = range(start, stop)
        case Recv():
            me.pending.append(instruction)
        case Send(peer=peer):
            channels.setdefault((rank, peer), []).append((_payload(me, instruction), instruction))
            if peer not in ranks:
                raise OracleError("there is no such peer")
        case AllReduce(ranks=members) | Join(ranks=members) | ReduceLoss(ranks=members):
            return _meet(members, instruction, ranks)
        case Update():
            me.ended = dict(me.gradients), me.loss
        case Forward() | Backward() | BackwardInput() | BackwardWeight():
            while me.pending:  # stricter than a rank is: it waits for all that it has posted, where it can
                if not _receive(rank, me, channels):
                    break
            if _waits(me, instruction):
                return False
            _compute(me, instruction)
    me.at += 1
    return True


def _waits(me: _Rank, instruction: Forward | Backward | BackwardInput | BackwardWeight) -> bool:
    if isinstance(instruction, BackwardWeight):
        return False
    gradient = not isinstance(instruction, Forward)
    return any((one.micro_batch, one.gradient) == (instruction.micro_batch, gradient) for one in me.pending)


def _receive(rank: int, me: _Rank, channels: Channels) -> bool:
    """Take one message that is there; each sender's in the order in which it sent them."""
    seen: set[int] = set()
    for receive in me.pending:
        line = channels.get((receive.peer, rank))
        if receive.peer not in seen and line:
            payload, sent = line.pop(0)
            if (sent.dtype, sent.shape) != (receive.dtype, receive.shape):
                raise OracleError("a message does not fit its buffer")
            me.pending.remove(receive)
            _bind(me, receive, payload)
            return True
        seen.add(receive.peer)
    return False


def _payload(me: _Rank, send: Send) -> Payload:
    from_cell = (me.back if send.gradient else me.outputs).get(send.micro_batch, {})
    if send.value not in from_cell:
        raise OracleError(f"{send} has nothing to send")
    if send.shape != me.model.values[send.value].part_shape(send.stop - send.start):
        raise OracleError("the tensor has another shape")
    if send.dtype != me.model.values[send.value].dtype:
        raise OracleError("the tensor has another dtype")
    held = from_cell[send.value]
    if isinstance(held, int):
        return held
    if not set(range(send.start, send.stop)) <= set(held):
        raise OracleError("the cell does not hold these rows")
    return [held[row] for row in range(send.start, send.stop)]


def _bind(me: _Rank, receive: Recv, payload: Payload) -> None:
    into = me.gradients_in if receive.gradient else me.inputs
    cell = into.setdefault(receive.micro_batch, {})
    value = me.model.values.get(receive.value)
    if value is None:
        raise OracleError("there is no such value")
    part = payload if isinstance(payload, int) else dict(zip(range(receive.start, receive.stop), payload, strict=True))
    if isinstance(part, int) != (value.kind != "rows"):
        raise OracleError("a message of another kind")
    if receive.gradient or value.kind == "sum":
        _add(cell, receive.value, part)
    elif isinstance(part, dict) and receive.value in cell:
        cell[receive.value] = _rows(cell[receive.value]) | part
    else:
        cell[receive.value] = part


def _compute(me: _Rank, instruction: Forward | Backward | BackwardInput | BackwardWeight) -> None:
    model = me.model
    match instruction:
        case Forward(stage, k):
            if k not in me.rows or not 0 <= stage < model.wiring.stages:
                raise OracleError("nothing is loaded")
            saved, me.outputs[k], part = model.forward(stage, me.rows[k], me.inputs.get(k, {}))
            me.saved[k] = saved
            me.partial += part
        case Backward(stage, k) | BackwardInput(stage, k):
            if k not in me.saved or me.seed is None and stage == model.last:
                raise OracleError("nothing to go back from")
            me.saved[k].grads = dict(me.gradients_in.get(k, {}))
            me.back[k], me.parts[k] = model.backward(stage, me.saved[k], me.seed or 0)
            if isinstance(instruction, Backward):
                _accumulate(me, model.gradients(stage, me.parts[k]))
        case BackwardWeight(stage, micro_batches):
            for k in micro_batches:
                if k not in me.parts:
                    raise OracleError("nothing to add up")
                _accumulate(me, model.gradients(stage, me.parts[k]))


def _meet(members: tuple[int, ...], instruction: AllReduce | Join | ReduceLoss, ranks: Mapping[int, _Rank]) -> bool:
    for member in members:
        if member not in ranks:
            raise OracleError("there is no such member")
        here = ranks[member]
        if here.at == len(here.program.instructions) or here.program.instructions[here.at] != instruction:
            return False
    group = [ranks[member] for member in members]
    match instruction:
        case AllReduce(parameters=names):
            for name in names:
                total = sum(one.gradients.get(name, 0) for one in group) % PRIME
                for one in group:
                    one.gradients[name] = total
        case Join():
            total = sum(one.partial for one in group) % PRIME
            for one in group:
                one.seed = one.model.seed(total)
        case ReduceLoss():
            total = sum(one.partial for one in group) % PRIME
            for one in group:
                one.loss = total
    for one in group:
        one.at += 1
    return True


def _accumulate(me: _Rank, gradients: Mapping[str, int]) -> None:
    for name, one in gradients.items():
        me.gradients[name] = (me.gradients.get(name, 0) + one) % PRIME


def _add(into: dict[str, Rows | int], name: str, part: Rows | int) -> None:
    if isinstance(part, int):
        into[name] = (_number(into.get(name, 0)) + part) % PRIME
    else:
        held = _rows(into.get(name, {}))
        into[name] = held | {row: (held.get(row, 0) + one) % PRIME for row, one in part.items()}


def _row(inputs: Mapping[str, Rows | int], value: Value, row: int) -> int:
    rows = _rows(inputs.get(value.name, {}))
    if row not in rows:
        raise OracleError(f"row {row} of {value.name} is not there")
    return rows[row]


def _scalar(inputs: Mapping[str, Rows | int], value: Value) -> int:
    if value.name not in inputs and value.kind == "whole":
        raise OracleError(f"{value.name} is not there")
    return _number(inputs.get(value.name, 0))


def _rows(held: Rows | int) -> Rows:
    assert isinstance(held, dict)
    return held


def _number(held: Rows | int) -> int:
    assert isinstance(held, int)
    return held
