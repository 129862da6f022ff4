"""What each block costs when it is computed by a tensor group, by one choice for the whole model.

The graph of all blocks is sharded as one stage; then each block's part of work, memory and sums is
read off. Seconds are measured (`measure_widths`), or modelled: the block's own times its part of the work.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from weakref import WeakKeyDictionary

from torch import Tensor, fx

from efftra_fx.cost import Chain, NodeCost, Option, Timing
from efftra_fx.meta import BLOCK, ROLE, STAGE

from .shard_axes import operands, results
from .shard_candidates import Candidates, Place, find_candidates, place_of
from .shard_choice import Choice, Prices, changes_of, choose, inner_exchanges, strategy_cost, value_bytes
from .shard_cuts import Placement
from .shard_rules import base_strategies
from .split import AssignStages, split_stages

_KEPT: WeakKeyDictionary[fx.GraphModule, dict[Prices, dict[int, Cost]]] = WeakKeyDictionary()  # what was worked out
_SLOW_BYTE_S = 1e-9  # to read, differentiate and write a byte of weights takes no longer


@dataclass
class BlockPart:
    """What the busiest rank has of a block, as fractions and in bytes."""

    work_s: float = 0.0
    whole_work_s: float = 0.0
    kept: float = 0.0
    whole_kept: float = 0.0
    held: float = 0.0
    whole_held: float = 0.0
    sums: float = 0.0
    sum_bytes: float = 0.0

    @property
    def work(self) -> float:
        """The part of the block's work that the busiest rank does."""
        return self.work_s / self.whole_work_s if self.whole_work_s else 1.0


@dataclass(frozen=True)
class Cost:
    """What a width makes of each block, and the choice that says so."""

    width: int
    found: Candidates
    choice: Choice
    parts: tuple[BlockPart, ...]
    rows: int


def with_tensor(gm: fx.GraphModule, chain: Chain, widths: Iterable[int], *, least: bool = False) -> Chain:
    """Return the chain with a modelled option for each width above 1 that it has none for.

    With `least`, what takes as long for any number of rows is divided as far as it may be the weights' doing,
    so that no measured time should be less.
    """
    return with_costs(chain, width_costs(gm, chain, widths), {}, least=least)


def width_costs(gm: fx.GraphModule, chain: Chain, widths: Iterable[int], prices: Prices | None = None) -> list[Cost]:
    """Return what each width above 1 makes of the blocks, where the chain has no option for it yet."""
    present = {option.tensor for block in chain.blocks for option in block.options}
    wanted = sorted({width for width in widths if width > 1} - present)
    used = Prices() if prices is None else prices
    kept: dict[int, Cost] = _KEPT.setdefault(gm, {}).setdefault(used, {})
    fresh = [width for width in wanted if width not in kept]
    if fresh:
        AssignStages((len(chain.blocks),))(gm)
        (stage,) = split_stages(gm, 1)
        for node in gm.graph.nodes:
            node.meta.pop(f"efftra.{STAGE.name}", None)
    for width in fresh:
        found = find_candidates(stage.gm, width)
        choice = choose(found, used)
        parts = tuple(_parts(found, choice, used, len(chain.blocks)))
        kept[width] = Cost(width, found, choice, parts, used.rows)
    return [kept[width] for width in wanted]


def with_costs(
    chain: Chain, costs: Iterable[Cost], measured: Mapping[tuple[int, int], NodeCost], *, least: bool = False
) -> Chain:
    """Return the chain with the options of these widths; `measured` has times by width and block, where known.

    `least` is that of `with_tensor`.
    """
    blocks = list(chain.blocks)
    for cost in costs:
        blocks = [
            replace(
                block, options=(*block.options, _option(block, cost, part, measured.get((cost.width, index)), least))
            )
            for index, (block, part) in enumerate(zip(blocks, cost.parts, strict=True))
        ]
    return replace(chain, blocks=tuple(blocks))


def _option(block: NodeCost, cost: Cost, part: BlockPart, measured: NodeCost | None, least: bool) -> Option:
    held = part.held / part.whole_held if part.whole_held else 1.0
    kept = part.kept / part.whole_kept if part.whole_kept else 1.0

    weights_s = block.parameter_bytes * (1 - held) * _SLOW_BYTE_S if least else 0.0

    def timing(whole: Timing) -> Timing:
        return Timing(max(whole.fixed_s - weights_s, whole.fixed_s * min(part.work, 1.0)), whole.per_row_s * part.work)

    return Option(
        timing(block.forward) if measured is None else measured.forward,
        timing(block.backward) if measured is None else measured.backward,
        block.parameter_bytes * held,
        block.gradient_bytes * held,
        block.saved_bytes * kept if measured is None else measured.saved_bytes,
        tensor=cost.width,
        reduces=part.sums / 2,  # an option counts them each way
        reduce_bytes=part.sum_bytes / 2 / cost.rows,
    )


def _parts(found: Candidates, choice: Choice, prices: Prices, blocks: int) -> list[BlockPart]:
    parts = [BlockPart() for _ in range(blocks)]
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
    part: BlockPart, node: fx.Node, wanted: Iterable[Placement], found: Candidates, choice: Choice, prices: Prices
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


def _add_held(parts: list[BlockPart], found: Candidates, choice: Choice) -> None:
    for node, strategy in choice.strategies.items():
        if node.op != "placeholder" or ROLE[node].kind != "parameter":
            continue
        value = results(node)[0]
        assert isinstance(value, Tensor)
        size = float(prod(int(d) for d in value.shape) * value.element_size())
        for block in {BLOCK[reader] for reader, _ in found.readers.get((node, 0), ()) if BLOCK.on(reader)}:
            parts[block].held += size * strategy.outputs[0].share
            parts[block].whole_held += size


__all__ = ["BlockPart", "Cost", "width_costs", "with_costs", "with_tensor"]
