"""Tensor widths as alternatives of the plan, worked out only where they can win.

What a width costs is known better and better, at a growing price, and never less than it was thought to be:

    bound      from the products with weights and the links (`passes/shard_bound.py`); takes milliseconds
    modelled   cut for the whole model, a block's own time divided by its part of the work; about half a second
    measured   each block timed as one rank of a group computes it; seconds, and only where ranks are at hand

The best plan is searched with what is known; the widths in it are looked at more closely, and the search
is done again until all that the best plan uses is known as well as it can be. Widths that lose by less
than they cost are never worked out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from torch import fx

from efftra_fx.cluster import Cluster, Link
from efftra_fx.cost import Chain
from efftra_fx.errors import MemoryPlanError

from .planned import Planned
from .shard_bound import bounded
from .shard_cost import with_tensor

LEAST_GAIN = 0.02  # of the step: less is within what predictions err by, and one rank each waits for nobody


@dataclass(frozen=True)
class Searched:
    """The best plan; the chain with the options that are known well, and with all; widths still to be measured."""

    planned: Planned
    chain: Chain
    every: Chain
    wanted: frozenset[int]


def possible_widths(cluster: Cluster) -> set[int]:
    """Return the widths from 2 to 8 that fill a machine without a rest."""
    counts = Counter(device.machine for device in cluster.devices)
    return {width for width in range(2, 9) if any(count % width == 0 for count in counts.values())}


def known_widths(chain: Chain) -> set[int]:
    """Return the widths, above 1, that a chain has options for."""
    return {option.tensor for block in chain.blocks for option in block.options if option.tensor > 1}


def search_widths(
    gm: fx.GraphModule,
    chain: Chain,
    cluster: Cluster,
    rows: int,
    find: Callable[[Chain], Planned],
    widths: set[int],
    *,
    measurable: bool,
) -> Searched:
    """Search the best plan with groups of these widths, or none.

    With `measurable` it stops where the best plan has widths that are modelled, and says which are to be measured.
    Raises what `find` raises where no width helps.
    """
    widths = widths - known_widths(chain)
    known = chain
    try:
        plain: Planned | None = find(chain)
    except MemoryPlanError:
        if not widths:
            raise
        plain = None
    modelled: set[int] = set() if plain is not None else set(widths)
    while True:
        known = with_tensor(gm, chain, modelled, least=measurable) if modelled else chain
        link = best_link(cluster)
        every = bounded(gm, known, widths - modelled, link, rows) if link and widths - modelled else known
        if plain is not None and known_widths(every) == known_widths(chain):
            return Searched(plain, chain, every, frozenset())
        best = find(every)
        used = {stage.tensor for stage in best.plan.stages} & widths
        if plain is not None and best.step_s > (1 - LEAST_GAIN) * plain.step_s:
            best, used = plain, set()
        if not used:
            return Searched(best, chain if measurable else known, every, frozenset())
        if used <= modelled:
            return Searched(best, known, every, frozenset(used) if measurable else frozenset())
        modelled |= used


def best_link(cluster: Cluster) -> Link | None:
    """Return the best link that a group may have: the highest bandwidth and the lowest latency inside machines."""
    links = [link for link in cluster.links.intra if link is not None]
    if not links:
        return None
    return Link(max(link.bandwidth_bytes_per_s for link in links), min(link.latency_s for link in links))


__all__ = ["Searched", "best_link", "known_widths", "possible_widths", "search_widths"]
