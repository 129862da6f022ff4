"""Write the graph that one rank of a tensor group runs.

Each call gets the rank's own operands: where a value lies otherwise than a call needs it, a graph
function of `collectives` changes that, once for each value and placement. Results of the stage are
whole again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import fx

from efftra_fx import collectives
from efftra_fx.meta import CONSTANTS, PLACED, ROLE

from .shard_axes import operands
from .shard_candidates import Candidates, Place, is_item, place_of
from .shard_choice import Choice
from .shard_cuts import WHOLE, Placement
from .shard_local import localise
from .shard_parts import DRAWING_PARTS


def rewrite(gm: fx.GraphModule, found: Candidates, choice: Choice, rank: int, whole: bool = True) -> fx.GraphModule:
    """Return the graph of one rank; nodes keep their names, `PLACED` says how each value lies.

    Results are put together unless `whole` is False: then they are given as they lie.
    """
    return _Writer(gm, found, choice, rank, whole).write()


@dataclass
class _Writer:
    gm: fx.GraphModule
    found: Candidates
    choice: Choice
    rank: int
    whole: bool
    graph: fx.Graph = field(default_factory=fx.Graph)
    copies: dict[fx.Node, fx.Node] = field(default_factory=dict)
    changed: dict[tuple[Place, Placement], fx.Node] = field(default_factory=dict)

    def write(self) -> fx.GraphModule:
        for node in self.gm.graph.nodes:
            if node.op == "output":
                values = [self.leaving(n) if isinstance(n, fx.Node) else n for n in node.args[0]]
                self.graph.output(tuple(values))
            elif node in self.choice.strategies and node.op == "call_function":
                self.copies[node] = self.call(node)
            else:
                self.copies[node] = self.graph.node_copy(node, self.plain)
                if node.op == "placeholder":
                    PLACED[self.copies[node]] = str(self.choice.strategies[node].outputs[0])
                elif is_item(node) and place_of(node)[0] in self.choice.strategies:
                    PLACED[self.copies[node]] = str(self.native(place_of(node)))
        result = fx.GraphModule(self.gm, self.graph)
        result.graph.eliminate_dead_code(lambda node: node.is_impure() or node.target in DRAWING_PARTS)
        if CONSTANTS.on(self.gm):
            CONSTANTS[result] = CONSTANTS[self.gm]
        return result

    def leaving(self, node: fx.Node) -> fx.Node:
        return self.operand(node, WHOLE if self.whole else self.native(place_of(node)))

    def native(self, place: Place) -> Placement:
        node, index = place
        return self.choice.strategies[node].outputs[index] if node in self.choice.strategies else WHOLE

    def plain(self, node: fx.Node) -> fx.Node:
        """Return an operand of what is computed whole everywhere, or the call that an item belongs to."""
        return self.copies[node]

    def call(self, node: fx.Node) -> fx.Node:
        strategy = self.choice.strategies[node]
        wanted = iter(strategy.inputs)
        given = set(operands(node))

        def local(operand: fx.Node) -> fx.Node:
            return self.operand(operand, next(wanted)) if operand in given else self.copies[operand]

        args, kwargs = fx.node.map_arg((node.args, node.kwargs), local)
        target, args, kwargs = localise(node, strategy, self.rank, args, kwargs)
        made = self.graph.create_node("call_function", target, args, kwargs, name=node.name)
        made.meta.update(node.meta)
        PLACED[made] = ", ".join(dict.fromkeys(map(str, strategy.outputs)))
        return made

    def operand(self, node: fx.Node, wanted: Placement) -> fx.Node:
        """Return the rank's own part of a value, placed as wanted."""
        place = place_of(node)
        have = self.native(place)
        if have == wanted:
            return self.copies[node]
        moving = place in self.found.moving
        if not moving and {have.kind, wanted.kind} <= {"whole", "copied"}:
            return self.copies[node]
        key = (place, wanted)
        if key not in self.changed:
            self.changed[key] = self.change(self.copies[node], place, have, wanted, moving)
        return self.changed[key]

    def change(self, copy: fx.Node, place: Place, have: Placement, wanted: Placement, moving: bool) -> fx.Node:
        source = _where(have, self.rank)
        target = _where(wanted, self.rank)
        match have.kind, wanted.kind:
            case ("whole", "copied"):
                return self.add(copy, wanted, collectives.copy)
            case ("whole", "cut"):
                return self.add(copy, wanted, collectives.share if moving else collectives.part, *target)
            case ("copied", "cut"):
                return self.add(copy, wanted, collectives.part, *target)
            case ("whole", "partial"):
                return self.add(copy, wanted, collectives.first, self.rank)
            case ("copied", "whole"):
                return self.add(copy, wanted, collectives.keep, self.rank)
            case ("copied", "partial"):
                kept = self.add(copy, WHOLE, collectives.keep, self.rank)
                return self.add(kept, wanted, collectives.first, self.rank)
            case ("cut", "whole"):
                return self.add(copy, wanted, collectives.gather, *source)
            case ("cut", "copied"):
                return self.add(copy, wanted, collectives.gather_copy if moving else collectives.gather, *source)
            case ("cut", "cut"):
                whole = self.add(copy, WHOLE, collectives.gather, *source)
                return self.add(whole, wanted, collectives.share if moving else collectives.part, *target)
            case ("cut", "partial"):
                return self.add(copy, wanted, collectives.spread, *source)
            case ("partial", "whole"):
                return self.add(copy, wanted, collectives.reduce)
            case ("partial", "copied"):
                return self.add(self.add(copy, WHOLE, collectives.reduce), wanted, collectives.copy)
            case ("partial", "cut"):
                return self.add(copy, wanted, collectives.reduce_share, *target)
        raise AssertionError(f"{have} cannot become {wanted}")

    def add(self, operand: fx.Node, placed: Placement, function: Any, *args: Any) -> fx.Node:
        name = f"{operand.name}_{function.__name__}"
        made = self.graph.create_node("call_function", function, (operand, *args), {}, name=name)
        made.meta.update({k: v for k, v in operand.meta.items() if k != f"efftra.{ROLE.name}"})
        PLACED[made] = str(placed)
        return made


def _where(place: Placement, rank: int) -> tuple[Any, ...]:
    """Return dimension, all ranks' ranges, the size that they are ranges of, and the rank."""
    return () if place.cut is None else (place.dim, place.cut.parts, place.cut.size, rank)


__all__ = ["rewrite"]
