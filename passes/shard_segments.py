"""Generated code that meets other ranks on its way: a flat graph cut into functions at its exchanges.

    run f0 ── start sum a ── run f1 (what needs no a) ── wait a ── run f2 …

The pieces are ordinary generated functions; a generator runs them one after another and yields
wherever it needs another rank, so that ranks of one process can take turns. Between the start of an
exchange and the wait for it stands everything that does not need its result: weight gradients, above all.
The order depends on the graph's structure alone, so all ranks of a group meet in the same order.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx

from efftra_fx.collectives import Exchange, exchange_of
from efftra_fx.emit import Emitted, emit

aten = torch.ops.aten

# Operators that certainly make memory of their own.
_MAKERS = frozenset(
    {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten.add.Tensor, aten.mul.Tensor}
    | {aten.sub.Tensor, aten.cat.default, aten.stack.default, aten.sum.dim_IntList}
)

Meeting = Generator[tuple[Exchange | None, Any], Any, Any]


@dataclass(frozen=True)
class _Run:
    """Compute some nodes: slots of operands, of results, and those that nobody needs afterwards."""

    function: Emitted
    takes: tuple[int, ...]
    gives: tuple[int, ...]
    frees: tuple[int, ...]


@dataclass(frozen=True)
class _Start:
    """Start an exchange with a slot's value; a fresh one may be overwritten."""

    exchange: Exchange
    slot: int
    node: int
    fresh: bool
    frees: tuple[int, ...]


@dataclass(frozen=True)
class _Wait:
    """Put the result of an exchange into its slot."""

    node: int
    slot: int


@dataclass(frozen=True, eq=False)
class Segments:
    """A flat graph as generated pieces; groups of operands and results as in `Part`.

    Calling it gives a generator. It yields (exchange, tensor) to start an exchange with other ranks
    and is sent a token; it yields (None, token) to wait for it and is sent the result. The tensor is
    contiguous and may be overwritten.
    """

    name: str
    graph: fx.GraphModule
    takes: tuple[int, ...]
    gives: tuple[int, ...]
    consumes: tuple[bool, ...]

    @property
    def sums(self) -> tuple[str, ...]:
        """What is exchanged, of which type and size, in the order in which it is started."""
        return tuple(_describe(node) for node in self._order[0] if _exchange(node) is not None)

    @cached_property
    def _order(self) -> tuple[list[fx.Node], dict[fx.Node, int]]:
        return _schedule(self.graph)

    @cached_property
    def _steps(self) -> tuple[list[_Run | _Start | _Wait], list[int], list[int | None], list[Any]]:
        return _cut(self.graph, self.name, *self._order)

    def __call__(self, *groups: Any) -> Meeting:
        steps, inputs, outputs, constants = self._steps
        slots: dict[int, Any] = {}
        at = iter(inputs)
        for size, group, consumed in zip(self.takes, groups, self.consumes, strict=True):
            assert len(group) == size
            for value in group:
                slots[next(at)] = value
            if consumed:
                group.clear()
        tokens: dict[int, Any] = {}
        value = None
        for step in steps:
            match step:
                case _Run(function, takes, gives, frees):
                    operands = [slots[slot] for slot in takes]
                    for slot in frees:
                        del slots[slot]
                    for slot, value in zip(gives, function(operands), strict=True):
                        slots[slot] = value
                    value = None
                case _Start(exchange, slot, node, fresh, frees):
                    value = slots[slot]
                    for gone in frees:
                        del slots[gone]
                    value = (
                        value if fresh and value.is_contiguous() else value.clone(memory_format=torch.contiguous_format)
                    )
                    tokens[node] = yield exchange, value
                    value = None
                case _Wait(node, slot):
                    slots[slot] = yield None, tokens.pop(node)
        flat = iter([c if slot is None else slots[slot] for slot, c in zip(outputs, constants, strict=True)])
        found = [[next(flat) for _ in range(size)] for size in self.gives]
        return found if len(found) > 1 else found[0]


def _exchange(node: fx.Node) -> Exchange | None:
    return exchange_of(node.target, node.args)


def _describe(node: fx.Node) -> str:
    value, exchange = node.meta["val"], _exchange(node)
    assert exchange is not None
    shape = list(exchange.counts or value.shape)
    where = " over replicas" if exchange.over == "replicas" else ""
    return f"{exchange.kind} {str(value.dtype).removeprefix('torch.')}{shape}{where}"


def _schedule(gm: fx.GraphModule) -> tuple[list[fx.Node], dict[fx.Node, int]]:
    """Return the calls in order, and for each exchange the position in that order before which it is waited for.

    Calls that draw random numbers keep their order: so they draw what they would draw on one device.
    """
    rest = [n for n in gm.graph.nodes if n.op in ("call_function", "get_attr")]
    order: list[fx.Node] = []
    waits: dict[fx.Node, int] = {}
    pending: list[fx.Node] = []
    done = {n for n in gm.graph.nodes if n.op == "placeholder"}
    while rest:
        held: list[fx.Node] = []
        drawing = True  # whether no call that draws is held up
        for node in rest:
            if any(n not in done for n in node.all_input_nodes) or (draws(node) and not drawing):
                held.append(node)
                drawing = drawing and not draws(node)
                continue
            order.append(node)
            if _exchange(node) is not None:
                pending.append(node)
            else:
                done.add(node)
        rest = held
        if rest:
            node = pending.pop(0)
            waits[node] = len(order)
            done.add(node)
    for node in pending:
        waits[node] = len(order)
    return order, waits


def draws(node: fx.Node) -> bool:
    """Say whether a call draws random numbers."""
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def _cut(
    gm: fx.GraphModule, name: str, order: Sequence[fx.Node], waits: dict[fx.Node, int]
) -> tuple[list[_Run | _Start | _Wait], list[int], list[int | None], list[Any]]:
    """Return the steps, the slots of the placeholders, and slots (or constants) of the outputs."""
    slot = {node: i for i, node in enumerate(n for n in gm.graph.nodes if n.op != "output")}
    output = next(n for n in reversed(gm.graph.nodes) if n.op == "output")
    results = list(output.args[0])
    events = _events(order, waits)
    needs = [set(_needed(event)) for event in events]
    kept = {n for n in results if isinstance(n, fx.Node)}
    alive = set(kept)
    after: list[set[fx.Node]] = []
    for need in reversed(needs):
        after.append(set(alive))
        alive |= need
    after.reverse()
    steps: list[_Run | _Start | _Wait] = []
    for event, need, later in zip(events, needs, after, strict=True):
        frees = tuple(slot[n] for n in sorted(need - later, key=slot.__getitem__))
        if isinstance(event, list):
            made = [n for n in event if n in later]
            sources = sorted(need, key=slot.__getitem__)
            function = _function(gm, f"{name}_{len(steps)}", sources, event, made)
            steps.append(_Run(function, tuple(map(slot.__getitem__, sources)), tuple(slot[n] for n in made), frees))
        else:
            started, node = event
            exchange = _exchange(node)
            if started and exchange is not None:
                operand = node.args[0]
                steps.append(_Start(exchange, slot[operand], slot[node], _is_fresh(operand, node), frees))
            else:
                steps.append(_Wait(slot[node], slot[node]))
    inputs = [slot[n] for n in gm.graph.nodes if n.op == "placeholder"]
    return (
        steps,
        inputs,
        [slot[n] if isinstance(n, fx.Node) else None for n in results],
        [None if isinstance(n, fx.Node) else n for n in results],
    )


def _events(order: Sequence[fx.Node], waits: dict[fx.Node, int]) -> list[Any]:
    """Return runs of nodes, and (True, node) or (False, node) where an exchange is started or waited for."""
    events: list[Any] = []
    run: list[fx.Node] = []

    def close() -> None:
        if run:
            events.append(list(run))
            run.clear()

    for position in range(len(order) + 1):
        for node in [n for n, at in waits.items() if at == position]:
            close()
            events.append((False, node))
        if position < len(order):
            node = order[position]
            if _exchange(node) is not None:
                close()
                events.append((True, node))
            else:
                run.append(node)
    close()
    return events


def _needed(event: Any) -> set[fx.Node]:
    if isinstance(event, list):
        inside = set(event)
        return {n for node in event for n in node.all_input_nodes if n not in inside}
    started, node = event
    return {node.args[0]} if started else set()


def _function(
    gm: fx.GraphModule, name: str, sources: Sequence[fx.Node], run: Sequence[fx.Node], made: Sequence[fx.Node]
) -> Emitted:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in sources:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in run:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[n] for n in made))
    piece = fx.GraphModule(gm, graph)
    return emit(piece, name=name, takes=(len(sources),), gives=(len(made),), consumes=(True,))


def _is_fresh(operand: Any, reader: fx.Node) -> bool:
    """Say whether an exchange may use the operand's own memory: nobody else sees it."""
    return operand.op == "call_function" and list(operand.users) == [reader] and operand.target in _MAKERS


def run_together(meetings: Sequence[Meeting]) -> list[Any]:
    """Run the ranks of a tensor group, or one of each replica, in one process, in lockstep; return what each returns.

    All must meet in the same order; a rank that does not is an AssertionError.
    """
    results: list[Any] = [None] * len(meetings)
    replies: list[Any] = [None] * len(meetings)
    while True:
        asked: list[Any] = []
        for index, meeting in enumerate(meetings):
            try:
                asked.append(meeting.send(replies[index]))
            except StopIteration as stop:
                results[index] = stop.value
        if not asked:
            return results
        assert len(asked) == len(meetings), "some ranks of a tensor group are done while others wait for them"
        exchanges = {exchange for exchange, _ in asked}
        assert len(exchanges) == 1, "ranks of a tensor group meet in different orders"
        exchange = exchanges.pop()
        things = [thing for _, thing in asked]
        replies = things if exchange is None else _exchanged(exchange, things)


def run_alone(meeting: Meeting, rank: int) -> Any:
    """Run one rank without the others, whose parts are made up as nothing, and return what it returns."""
    reply: Any = None
    while True:
        try:
            exchange, thing = meeting.send(reply)
        except StopIteration as stop:
            return stop.value
        if exchange is None or exchange.kind == "sum":
            reply = thing
        elif exchange.kind == "gather":
            reply = thing.new_zeros(sum(exchange.counts))
        else:
            reply = thing.view(-1).split(exchange.counts)[rank].clone()


def _exchanged(exchange: Exchange, tensors: Sequence[Tensor]) -> list[Tensor]:
    if exchange.kind == "gather" and exchange.over == "replicas":
        return [torch.stack(list(tensors)) for _ in tensors]
    if exchange.kind == "gather":
        assert tuple(t.numel() for t in tensors) == exchange.counts, "ranks of a tensor group gather other things"
        return [torch.cat([t.view(-1) for t in tensors]) for _ in tensors]
    assert len({(t.shape, t.dtype) for t in tensors}) == 1, "ranks of a tensor group sum different things"
    total = sum(tensors[1:], tensors[0].clone())
    if exchange.kind == "sum":
        return [total.clone() for _ in tensors]
    return [part.clone() for part in total.view(-1).split(exchange.counts)]


__all__ = ["Meeting", "Segments", "run_alone", "run_together"]
