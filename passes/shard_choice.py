"""Choose placements for all values of a stage at least cost: an integer program, solved exactly.

One variable a strategy z[call, s] (exactly one is chosen), one a pair of placements on each edge
e[edge, p, q] with the strategies as its marginals, and one a change of placement w[value, p, q],
which is paid once however many calls need it:

    minimise  Σ cost(s) z[call, s] + Σ change(p, q) w[value, p, q]
    Σ_s z[call, s] = 1        Σ_q e[edge, p, q] = Σ_{s: result p} z[maker, s]
    w[value, p, q] ≥ e[edge, p, q]        Σ_p e[edge, p, q] = Σ_{s: operand q} z[reader, s]

On a chain the relaxation is integral (the local polytope of Alpa's intra-operator pass), so solving
is quick. Calls that look alike, with neighbourhoods that look alike, share their variables: equal
blocks are solved once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array
from torch import Tensor, fx

from efftra_fx.errors import PlanError
from efftra_fx.meta import ROLE

from .blocks import size_at
from .shapes import FREE_VIEWS, elements, operations
from .shard_axes import extents, operands, results
from .shard_candidates import Candidates, Place, place_of
from .shard_cuts import Placement
from .shard_rules import Strategy

_ROUNDS = 3
_HAND_ON = frozenset({torch.ops.aten.add.Tensor, torch.ops.aten.sub.Tensor})  # their gradients take nothing


@dataclass(frozen=True)
class Prices:
    """What things cost a rank, in seconds: an operation, a byte of memory moved, a byte summed, a sum, a byte held.

    `rows` is the number of rows of a micro-batch. `summed_byte_s` is for one byte of the value that is
    summed over the group; putting shares together, or summing into shares, moves half as much.
    `held_byte_s` is for each byte of parameters: gradients, optimizer, room.
    """

    rows: int = 8
    operation_s: float = 5e-11
    moved_byte_s: float = 2e-10
    summed_byte_s: float = 2e-9
    sum_s: float = 1e-6
    held_byte_s: float = 1.5e-9


@dataclass(frozen=True)
class Choice:
    """The strategy chosen for each call and placeholder, and the cost in seconds a micro-batch."""

    strategies: dict[fx.Node, Strategy]
    cost_s: float


def choose(found: Candidates, prices: Prices, limit_s: float = 30.0) -> Choice:
    """Return the cheapest choice of strategies; raises PlanError if the solver gives up."""
    if found.width == 1:
        return Choice({node: some[0] for node, some in found.strategies.items()}, 0.0)
    model = _Model(found, prices, _classes(found))
    model.build()
    chosen, cost = model.solve(limit_s)
    return Choice({n: some[chosen[model.classes[n]]] for n, some in found.strategies.items()}, cost)


# costs


SUM, SECTIONS = 1.0, 0.5  # what an exchange moves, as a part of what a sum of the whole value does (a ring's bytes)


def changes_of(source: Placement, target: Placement, moving: bool) -> tuple[float, ...] | None:
    """Return what a change of placement takes, forward and backward: a sum or sections each; None: impossible."""
    if source == target:
        return ()
    match source.kind, target.kind:
        case ("whole", "copied"):
            return (SUM,) if moving else ()
        case ("whole", "cut"):
            return (SECTIONS,) if moving else ()
        case (
            ("whole", "partial") | ("copied", "whole") | ("copied", "cut") | ("copied", "partial") | ("cut", "partial")
        ):
            return ()
        case ("cut", "whole"):
            return (SECTIONS,)
        case ("cut", "copied") | ("cut", "cut"):
            return (SECTIONS, SECTIONS) if moving else (SECTIONS,)
        case ("partial", "whole"):
            return (SUM,)
        case ("partial", "copied"):
            return (SUM, SUM) if moving else (SUM,)
        case ("partial", "cut"):
            return (SECTIONS, SECTIONS) if moving else (SECTIONS,)
    return None


def value_bytes(place: Place, rows: int) -> float:
    """Return the bytes of a whole value."""
    value = results(place[0])[place[1]]
    return float(size_at(elements(value), rows) * value.element_size()) if isinstance(value, Tensor) else 0.0


def change_cost(place: Place, source: Placement, target: Placement, moving: bool, prices: Prices) -> float:
    """Return the seconds of a change of placement; sections are copied where they are laid together or taken apart."""
    changes = changes_of(source, target, moving)
    assert changes is not None
    copied = 2 * sum(weight == SECTIONS for weight in changes) + (source.kind == "cut" and target.kind == "partial")
    byte_s = sum(changes) * prices.summed_byte_s + copied * prices.moved_byte_s
    return len(changes) * prices.sum_s + value_bytes(place, prices.rows) * byte_s


def inner_exchanges(node: fx.Node, strategy: Strategy, rows: int, width: int) -> tuple[int, float]:
    """Return the exchanges that a call itself makes, and the bytes that they move, in those of sums."""
    if strategy.inner != "classes":
        return 0, 0.0
    logits = operands(node)[0]
    one = value_bytes(place_of(logits), rows) / (extents(logits.meta["val"])[1] or 1)
    return 2, (width * SECTIONS + 2) * one


def strategy_cost(node: fx.Node, strategy: Strategy, found: Candidates, prices: Prices) -> float:
    """Return the seconds that a rank spends on a call, or for holding a parameter."""
    passes = 3 if any((node, i) in found.moving for i in range(len(results(node)))) else 1
    if node.op == "placeholder":
        if not strategy.outputs or not any(found.readers.get((node, 0), ())):
            return 0.0
        value = value_bytes((node, 0), prices.rows)
        extra = value * prices.summed_byte_s / 4 if strategy.outputs[0].kind == "copied" else 0.0
        return value * strategy.outputs[0].share * prices.held_byte_s + extra if _held(node) else 0.0
    work = size_at(operations(node), prices.rows) * strategy.share * prices.operation_s
    moved = sum(value_bytes((node, i), prices.rows) * place.share for i, place in enumerate(strategy.outputs)) + sum(
        value_bytes(place_of(o), prices.rows) * place.share
        for o, place in zip(operands(node), strategy.inputs, strict=True)
    )
    if node.target in FREE_VIEWS:
        moved = 0.0
    elif node.target in _HAND_ON:
        passes = 1
    number, summed = inner_exchanges(node, strategy, prices.rows, found.width)
    inner = number * prices.sum_s + summed * prices.summed_byte_s
    return passes * (work + moved * prices.moved_byte_s) + inner


def _held(node: fx.Node) -> bool:
    return ROLE[node].kind == "parameter"


# calls that look alike


def _classes(found: Candidates) -> dict[fx.Node, int]:
    """Number calls so that those with the same number look alike some steps around, and have the same strategies."""
    labels: dict[fx.Node, Any] = {node: _label(node, some) for node, some in found.strategies.items()}
    numbers = _number(labels)
    around: dict[fx.Node, list[fx.Node]] = {node: [] for node in labels}
    for (maker, _), readers in found.readers.items():
        for reader, _ in readers:
            if maker in around:
                around[maker].append(reader)
    for _ in range(_ROUNDS):
        labels = {
            node: (
                numbers[node],
                tuple(numbers.get(place_of(o)[0], -1) for o in operands(node)),
                tuple(sorted(numbers[reader] for reader in around[node])),
            )
            for node in labels
        }
        numbers = _number(labels)
    return numbers


def _label(node: fx.Node, strategies: Sequence[Strategy]) -> Any:
    shapes = tuple(
        (str(v.dtype), tuple(str(size) for size in v.shape)) if isinstance(v, Tensor) else str(type(v))
        for v in results(node)
    )
    return node.op, str(node.target) if node.op == "call_function" else "", shapes, tuple(strategies)


def _number(labels: Mapping[fx.Node, Any]) -> dict[fx.Node, int]:
    known: dict[Any, int] = {}
    return {node: known.setdefault(label, len(known)) for node, label in labels.items()}


# the integer program


@dataclass
class _Model:
    found: Candidates
    prices: Prices
    classes: dict[fx.Node, int]
    costs: list[float] = field(default_factory=list)
    whole: list[int] = field(default_factory=list)  # 1 where a variable is an integer
    index: dict[Any, int] = field(default_factory=dict)
    targets: dict[tuple[int, int], dict[Placement, int]] = field(default_factory=dict)
    rows: list[dict[int, float]] = field(default_factory=list)
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)

    def variable(self, key: Any, cost: float, integer: bool = False) -> int:
        """Return a variable, made at first use; costs of all that share it add up."""
        if key not in self.index:
            self.index[key] = len(self.costs)
            self.costs.append(0.0)
            self.whole.append(int(integer))
        self.costs[self.index[key]] += cost
        return self.index[key]

    def constrain(self, row: dict[int, float], low: float, high: float) -> None:
        self.rows.append(row)
        self.low.append(low)
        self.high.append(high)

    def build(self) -> None:
        done: set[Any] = set()
        for node, strategies in self.found.strategies.items():
            own = [
                self.variable(
                    ("z", self.classes[node], s), strategy_cost(node, strategy, self.found, self.prices), True
                )
                for s, strategy in enumerate(strategies)
            ]
            if self.classes[node] not in done:
                done.add(self.classes[node])
                self.constrain(dict.fromkeys(own, 1.0), 1, 1)
        for place, readers in self.found.readers.items():
            if place[0] in self.found.strategies:
                self.add_value(place, readers, place in self.found.outputs, done)
        for place in self.found.outputs:
            if place[0] in self.found.strategies and place not in self.found.readers:
                self.add_value(place, (), True, done)

    def add_value(self, place: Place, readers: Iterable[tuple[fx.Node, int]], is_output: bool, done: set[Any]) -> None:
        node, number = place
        made = [s.outputs[number] for s in self.found.strategies[node]]
        sources = list(dict.fromkeys(made))
        cls = self.classes[node]
        moving = place in self.found.moving
        paid: set[tuple[int, int]] = set()
        ends: list[tuple[Any, list[Placement], list[int]]] = []
        for reader, at in readers:
            wanted = [s.inputs[at] for s in self.found.strategies[reader]]
            own = [self.index["z", self.classes[reader], s] for s in range(len(wanted))]
            ends.append(((self.classes[reader], at), wanted, own))
        if is_output:
            ends.append((("output", 0), [Placement("whole")], []))
        for end, wanted, own in ends:
            targets = list(dict.fromkeys(wanted))
            key = ("e", cls, number, end)
            fresh = key not in done
            done.add(key)
            for p, source in enumerate(sources):
                for q, target in enumerate(targets):
                    edge = self.variable((*key, p, q), 0.0)
                    if source == target:
                        continue
                    pair = (p, self.target_number(cls, number, target))
                    price = change_cost(place, source, target, moving, self.prices)
                    change = self.variable(("w", cls, number, *pair), 0.0 if pair in paid else price)
                    paid.add(pair)
                    if fresh:
                        self.constrain({change: 1.0, edge: -1.0}, 0, np.inf)
            if not fresh:
                continue
            for p, source in enumerate(sources):
                row = {self.index[(*key, p, q)]: 1.0 for q in range(len(targets))}
                for s, one in enumerate(made):
                    if one == source:
                        row[self.index["z", cls, s]] = -1.0
                self.constrain(row, 0, 0)
            for q, target in enumerate(targets):
                row = {self.index[(*key, p, q)]: 1.0 for p in range(len(sources))}
                if own:
                    for variable, one in zip(own, wanted, strict=True):
                        if one == target:
                            row[variable] = row.get(variable, 0.0) - 1.0
                    self.constrain(row, 0, 0)
                else:
                    self.constrain(row, 1, 1)

    def target_number(self, cls: int, number: int, target: Placement) -> int:
        known = self.targets.setdefault((cls, number), {})
        return known.setdefault(target, len(known))

    def solve(self, limit_s: float) -> tuple[dict[int, int], float]:
        data, columns, starts = [], [], [0]
        for row in self.rows:
            columns += list(row)
            data += list(row.values())
            starts.append(len(columns))
        size = len(self.costs)
        matrix = csr_array((np.array(data), np.array(columns), np.array(starts)), shape=(len(self.rows), size))
        scale = max(max(self.costs, default=0.0), 1e-30)
        answer = milp(
            np.array(self.costs) / scale,
            integrality=np.array(self.whole),
            bounds=Bounds(0, 1),
            constraints=LinearConstraint(matrix, np.array(self.low), np.array(self.high)),
            options={"time_limit": limit_s, "mip_rel_gap": 1e-6},
        )
        if answer.x is None:
            raise PlanError(f"no placements were found in {limit_s:g} s: {answer.message}; use tensor width 1")
        chosen: dict[int, int] = {}
        for key, at in self.index.items():
            if key[0] == "z" and answer.x[at] > 0.5:
                chosen[key[1]] = key[2]
        return chosen, float(answer.fun) * scale


__all__ = ["Choice", "Prices", "change_cost", "changes_of", "choose", "inner_exchanges", "strategy_cost", "value_bytes"]
