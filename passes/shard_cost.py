"""What each block costs when it is computed by a tensor group: modelled from one choice for the whole model.

The graph of all blocks is sharded as one stage; then each block's part of work, memory and sums is
read off. Seconds are the block's own seconds (measured, where costs are) times its part of the work.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod

from torch import Tensor, fx

from efftra_fx.cost import Chain, NodeCost, Option, Timing
from efftra_fx.meta import BLOCK, ROLE, STAGE

from .shard_axes import operands, results
from .shard_candidates import Candidates, Place, find_candidates, place_of
from .shard_choice import Choice, Prices, changes_of, choose, inner_exchanges, strategy_cost, value_bytes
from .shard_cuts import Placement
from .shard_rules import base_strategies
from .split import AssignStages, split_stages


@dataclass
class _Part:
    """What the busiest rank has of a block, as fractions and in bytes."""

    work_s: float = 0.0
    whole_work_s: float = 0.0
    kept: float = 0.0
    whole_kept: float = 0.0
    held: float = 0.0
    whole_held: float = 0.0
    sums: float = 0.0
    sum_bytes: float = 0.0


def with_tensor(gm: fx.GraphModule, chain: Chain, widths: Iterable[int], prices: Prices | None = None) -> Chain:
    """Return the chain with an option for each width above 1 beside each block's own."""
    AssignStages((len(chain.blocks),))(gm)
    (stage,) = split_stages(gm, 1)
    for node in gm.graph.nodes:
        node.meta.pop(f"efftra.{STAGE.name}", None)
    blocks = list(chain.blocks)
    for width in sorted({w for w in widths if w > 1}):
        found = find_candidates(stage.gm, width)
        used = prices or Prices()
        parts = _parts(found, choose(found, used), used, len(blocks))
        blocks = [_with_option(block, width, part, used.rows) for block, part in zip(blocks, parts, strict=True)]
    return replace(chain, blocks=tuple(blocks))


def _with_option(block: NodeCost, width: int, part: _Part, rows: int) -> NodeCost:
    work = part.work_s / part.whole_work_s if part.whole_work_s else 1.0
    held = part.held / part.whole_held if part.whole_held else 1.0
    kept = part.kept / part.whole_kept if part.whole_kept else 1.0

    def timing(whole: Timing) -> Timing:
        return Timing(whole.fixed_s, whole.per_row_s * work)

    option = Option(
        timing(block.forward),
        timing(block.backward),
        block.parameter_bytes * held,
        block.gradient_bytes * held,
        block.saved_bytes * kept,
        tensor=width,
        reduces=part.sums / 2,  # an option counts them each way
        reduce_bytes=part.sum_bytes / 2 / rows,
    )
    return replace(block, options=(*block.options, option))


def _parts(found: Candidates, choice: Choice, prices: Prices, blocks: int) -> list[_Part]:
    parts = [_Part() for _ in range(blocks)]
    for node, strategy in choice.strategies.items():
        if node.op == "call_function" and BLOCK.on(node):
            part = parts[BLOCK[node]]
            part.work_s += strategy_cost(node, strategy, found, prices)
            part.whole_work_s += strategy_cost(node, base_strategies(node)[0], found, prices)
            for index, place in enumerate(strategy.outputs):
                size = value_bytes((node, index), prices.rows)
                part.kept += size * place.share
                part.whole_kept += size
            _add_sums(part, node, strategy.inputs, found, choice, prices)
            number, moved = inner_exchanges(node, strategy, prices.rows, found.width)
            part.sums += number
            part.sum_bytes += moved
    _add_held(parts, found, choice)
    return parts


def _add_sums(
    part: _Part, node: fx.Node, wanted: Iterable[Placement], found: Candidates, choice: Choice, prices: Prices
) -> None:
    """Count the sums for operands that this call is the first to need placed so."""
    for operand, target in zip(operands(node), wanted, strict=True):
        place = place_of(operand)
        if place[0] not in choice.strategies or not _is_first(place, node, target, found, choice):
            continue
        source = choice.strategies[place[0]].outputs[place[1]]
        weight = sum(changes_of(source, target, place in found.moving) or ())
        part.sums += weight
        part.sum_bytes += weight * value_bytes(place, prices.rows)


def _is_first(place: Place, node: fx.Node, target: Placement, found: Candidates, choice: Choice) -> bool:
    readers = [reader for reader, at in found.readers[place] if choice.strategies[reader].inputs[at] == target]
    return readers[0] is node


def _add_held(parts: list[_Part], found: Candidates, choice: Choice) -> None:
    for node, strategy in choice.strategies.items():
        if node.op != "placeholder" or ROLE[node].kind != "parameter":
            continue
        value = results(node)[0]
        assert isinstance(value, Tensor)
        size = float(prod(int(d) for d in value.shape) * value.element_size())
        for block in {BLOCK[reader] for reader, _ in found.readers.get((node, 0), ()) if BLOCK.on(reader)}:
            parts[block].held += size * strategy.outputs[0].share
            parts[block].whole_held += size


__all__ = ["with_tensor"]
