"""Which placements are worth considering for each value of a stage, and how each call can be computed.

Cuts start where they pay (`seed_strategies`: the features of a linear layer, heads, channels, a
vocabulary) and spread from value to value through the rules, forward and backward, until nothing
new is found. Cuts that started alike are one family; pieces of a split or a join are cut together
only if they are of one family.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx

from efftra_fx.meta import FREE, ROLE, Role

from .shard_axes import extents, operands, results
from .shard_cuts import COPIED, WHOLE, Cut, Placement, cut_along
from .shard_rules import Strategy, base_strategies, complete, fits, seed_strategies

Place = tuple[fx.Node, int]  # a value: the call or placeholder that makes it, and which of its results it is
_MOST_CUTS = 16


@dataclass(frozen=True)
class Candidates:
    """The strategies of each call and placeholder, and what reads each value.

    `strategies[node][0]` is always the one that leaves everything whole. `readers` lists for each
    value (call, operand's index); `moving` are values with gradients.
    """

    strategies: dict[fx.Node, tuple[Strategy, ...]]
    readers: dict[Place, tuple[tuple[fx.Node, int], ...]]
    moving: frozenset[Place]
    outputs: tuple[Place, ...]
    width: int


def place_of(node: fx.Node) -> Place:
    """Return the value that a node stands for."""
    if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        if isinstance(node.args[0].meta.get("val"), (tuple, list)):
            return node.args[0], int(node.args[1])  # type: ignore[arg-type]
    return node, 0


def is_item(node: fx.Node) -> bool:
    """Say whether a node only picks one result of a call."""
    return place_of(node)[0] is not node


def is_fixed(node: fx.Node) -> bool:
    """Say whether a node is always computed whole: it needs only inputs, or is no computation."""
    return node.op == "get_attr" or (node.op == "call_function" and bool(FREE.get(node)))


def find_candidates(
    gm: fx.GraphModule,
    width: int,
    forced: Mapping[str, Placement] | None = None,
    trained: frozenset[str] | None = None,
) -> Candidates:
    """Return the candidates for a tensor group of `width` ranks; `forced` fixes parameters by name.

    `trained` names the parameters that get gradients (default: those that require one).
    """
    spread = _Spread(gm, width, dict(forced or {}), trained)
    for node in spread.calls:
        for strategy in seed_strategies(node, width) if node not in spread.rounded else ():
            family = next(str(p.cut) for p in (*strategy.inputs, *strategy.outputs) if p.cut is not None)
            spread.enter(node, strategy, family)
    for node, place in spread.given():
        assert place.cut is not None
        spread.meet((node, 0), place.dim, place.cut, str(place.cut))
    spread.run()
    return spread.result()


@dataclass
class _Spread:
    gm: fx.GraphModule
    width: int
    forced: dict[str, Placement]
    trained: frozenset[str] | None
    calls: list[fx.Node] = field(init=False)
    rounded: set[fx.Node] = field(init=False)
    readers: dict[Place, list[tuple[fx.Node, int]]] = field(default_factory=dict)
    strategies: dict[fx.Node, dict[Strategy, None]] = field(default_factory=dict)
    cuts: dict[Place, dict[tuple[int, Cut], set[str]]] = field(default_factory=dict)
    queue: deque[tuple[Place, int, Cut, str]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        nodes = list(self.gm.graph.nodes)
        self.calls = [n for n in nodes if n.op == "call_function" and not is_fixed(n) and not is_item(n)]
        self.rounded = rounded_calls(self.gm, self.calls)
        for node in self.calls:
            ways = base_strategies(node)
            self.strategies[node] = dict.fromkeys(ways[:1] if node in self.rounded else ways)
            for index, operand in enumerate(operands(node)):
                self.readers.setdefault(place_of(operand), []).append((node, index))

    def given(self) -> list[tuple[fx.Node, Placement]]:
        """Return the parameters that are forced to be cut."""
        found = []
        for node in self.gm.graph.nodes:
            if node.op == "placeholder" and ROLE[node].kind == "parameter":
                place = self.forced.get(ROLE[node].name)
                if place is not None and place.cut is not None:
                    found.append((node, place))
        return found

    def enter(self, node: fx.Node, strategy: Strategy, family: str) -> None:
        """Add a way of a call, and let its cuts spread."""
        self.strategies[node].setdefault(strategy)
        for index, place in enumerate(strategy.outputs):
            if place.cut is not None:
                self.meet((node, index), place.dim, place.cut, family)
        for operand, place in zip(operands(node), strategy.inputs, strict=True):
            if place.cut is not None and not is_fixed(operand):
                self.meet(place_of(operand), place.dim, place.cut, family)

    def meet(self, place: Place, dim: int, cut: Cut, family: str) -> None:
        known = self.cuts.setdefault(place, {})
        if (dim, cut) not in known and len(known) >= _MOST_CUTS:
            return
        families = known.setdefault((dim, cut), set())
        if family not in families:
            families.add(family)
            self.queue.append((place, dim, cut, family))

    def run(self) -> None:
        while self.queue:
            place, dim, cut, family = self.queue.popleft()
            node, index = place
            if node in self.strategies:
                self.try_call(node, True, index, dim, cut, family)
            for reader, operand in self.readers.get(place, ()):
                self.try_call(reader, False, operand, dim, cut, family)

    def try_call(self, node: fx.Node, result: bool, index: int, dim: int, cut: Cut, family: str) -> None:
        given = operands(node)

        def find(of_result: bool, which: int, along: int) -> Cut | None:
            place = (node, which) if of_result else place_of(given[which])
            for (at, one), families in self.cuts.get(place, {}).items():
                if at == along and family in families:
                    return one
            if of_result and not self.readers.get(place):
                size = extents(results(node)[which])[along]
                return None if size is None else Cut.even(size, self.width)
            return None

        strategy = None if node in self.rounded else complete(node, result, index, dim, cut, find)
        if strategy is not None:
            self.enter(node, strategy, family)

    def result(self) -> Candidates:
        found = {node: tuple(some) for node, some in self.strategies.items()}
        for node in self.gm.graph.nodes:
            if node.op == "placeholder":
                found[node] = tuple(self.of_placeholder(node))
        output = next(n for n in reversed(self.gm.graph.nodes) if n.op == "output")
        outputs = tuple(place_of(n) for n in output.args[0] if isinstance(n, fx.Node))
        readers = {place: tuple(some) for place, some in self.readers.items()}
        return Candidates(found, readers, frozenset(moving_values(self.gm, self.trained)), outputs, self.width)

    def of_placeholder(self, node: fx.Node) -> list[Strategy]:
        role, whole = ROLE[node], Strategy((), (WHOLE,))
        if role.kind != "parameter":
            return [whole]
        forced = self.forced.get(role.name)
        if forced is not None:
            return [Strategy((), (forced,))]
        found = [whole] + ([Strategy((), (COPIED,))] if is_trained(role, self.trained) else [])
        for dim, cut in self.cuts.get((node, 0), {}):
            if fits(node.meta["val"], dim, cut):
                found.append(Strategy((), (cut_along(dim, cut),), cut.share))
        return found


def rounded_calls(gm: fx.GraphModule, calls: Sequence[fx.Node]) -> set[fx.Node]:
    """Return the calls of a float64 model that compute with less: they stay whole.

    Sums in another order differ in their last digits. In float64 nobody sees it, but behind a cast to
    float32 it would be 1e-8 of results that are otherwise exact, and float64 is chosen to check them.
    """
    weights = [n for n in gm.graph.nodes if n.op == "placeholder" and ROLE[n].kind == "parameter"]
    if not any(n.meta["val"].dtype is torch.float64 for n in weights):
        return set()
    coarse = (torch.float32, torch.float16, torch.bfloat16)
    return {
        node
        for node in calls
        if any(
            isinstance(v, Tensor) and v.dtype in coarse
            for v in (*results(node), *(n.meta["val"] for n in operands(node)))
        )
    }


def is_trained(role: Role, trained: frozenset[str] | None) -> bool:
    """Say whether a parameter gets a gradient."""
    return role.trainable if trained is None else role.name in trained


def moving_values(gm: fx.GraphModule, trained: frozenset[str] | None = None) -> set[Place]:
    """Return the values through which gradients may flow: those that depend on a parameter or an earlier stage."""
    moving: set[Place] = set()
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            role = ROLE[node]
            if (role.kind == "parameter" and is_trained(role, trained)) or (
                role.kind == "value" and _smooth(node.meta["val"])
            ):
                moving.add((node, 0))
        elif node.op == "call_function" and not is_item(node):
            if str(node.target) != "aten.detach.default" and any(place_of(n) in moving for n in _tensors(node)):
                moving |= {(node, i) for i, value in enumerate(results(node)) if _smooth(value)}
    return moving


def _tensors(node: fx.Node) -> list[fx.Node]:
    return [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), (Tensor, tuple, list))]


def _smooth(value: object) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


__all__ = ["Candidates", "Place", "find_candidates", "is_fixed", "is_item", "moving_values", "place_of"]
