"""Blocks follow each other along the chain, and a cut lies where the fewest bytes cross."""

from __future__ import annotations

import pytest
import torch
from hypothesis import Phase, given, settings
from models import ZOO, Example
from rig import Rig, rig_of
from strategies import example_of_recipe, recipes
from torch import Tensor, fx, nn

from efftra_fx.meta import BATCH, BLOCK, FREE, Split
from efftra_fx.passes.blocks import FoldBlocks, block_names, chain_nodes, crossing_bytes, cut_positions, size_at
from efftra_fx.passes.shapes import elements, is_heavy

PHASES = (Phase.explicit, Phase.reuse, Phase.generate)


class Bottleneck(nn.Module):
    """Wide, narrow, wide: one should cut where it is narrow."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 32), nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        wide = self.one(x).relu()
        narrow = wide[:, :2] + 1
        return self.two((narrow * 2).tanh())  # type: ignore[no-any-return]


BOTTLENECK = Example("bottleneck", Bottleneck, ZOO["mlp"].batch, ZOO["mlp"].loss_fn)


def test_between_two_layers_the_cut_lies_behind_the_last_of_the_narrow_places() -> None:
    gm = rig_of(BOTTLENECK).first.built.front.gm
    first = [n for n in chain_nodes(gm) if BLOCK[n] == 0]
    second = [n for n in chain_nodes(gm) if BLOCK[n] == 1]
    assert rig_of(BOTTLENECK).blocks == 2
    assert "tanh" in first[-1].name and "linear" in second[0].name
    assert crossing_bytes(chain_nodes(gm))[len(first) - 1] == 2 * 8 * 64  # two float64 a row, 64 rows


def test_blocks_carry_the_names_of_their_layers() -> None:
    assert block_names(rig_of(BOTTLENECK).first.built.front.gm) == ("one", "two")
    names = block_names(rig_of(ZOO["resnet"]).first.built.front.gm)
    assert names[0] == "stem" and names[-1] == "fc" and "layers.1.conv1" in names


def crosses(node: fx.Node, place: dict[fx.Node, int], position: int) -> bool:
    """Say whether a value is needed on both sides of a place."""
    return place[node] <= position < max((place[u] for u in node.users if u in place), default=-1)


def check_blocks(gm: fx.GraphModule) -> None:
    """Hold the promises of the fold."""
    nodes = chain_nodes(gm)
    place = {node: index for index, node in enumerate(nodes)}
    numbers = [BLOCK[node] for node in nodes]
    assert numbers[0] == 0 and all(b - a in (0, 1) for a, b in zip(numbers, numbers[1:], strict=False))
    assert not any(BLOCK.on(node) for node in gm.graph.nodes if node not in place)
    found = crossing_bytes(nodes)
    for position, bytes_found in enumerate(found):
        crossing = [node for node in nodes if crosses(node, place, position)]
        barred = [n for n in crossing if not isinstance(n.meta["val"], Tensor) or BATCH[n].kind in ("mixed", "local")]
        expected = (
            None
            if barred
            else sum(size_at(elements(n.meta["val"]), 64) * n.meta["val"].element_size() for n in crossing)
        )
        assert bytes_found == expected, position
    for position in cut_positions(nodes, 256):
        assert found[position] is not None
        assert BLOCK[nodes[position]] + 1 == BLOCK[nodes[position + 1]]
    heavy = [position for position, node in enumerate(nodes) if is_heavy(node)]
    for left, right in zip(heavy, heavy[1:], strict=False):
        between = [found[p] for p in range(left, right) if found[p] is not None]
        cuts = [p for p in cut_positions(nodes, 256) if left <= p < right]
        assert len(cuts) == (1 if between else 0)
        if cuts:
            assert found[cuts[0]] == min(b for b in between if b is not None)


@settings(max_examples=5, phases=PHASES)
@given(recipes())
def test_blocks_of_any_model_keep_their_promises(recipe: object) -> None:
    check_blocks(Rig(example_of_recipe(recipe), 1).first.built.front.gm)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["unet", "lstm", "moe"])
def test_blocks_of_whole_models_keep_their_promises(name: str) -> None:
    check_blocks(rig_of(ZOO[name]).first.built.front.gm)


def test_where_there_may_be_few_blocks_the_cheapest_cuts_are_kept() -> None:
    gm = rig_of(ZOO["unet"]).first.built.front.gm
    nodes = chain_nodes(gm)
    found = crossing_bytes(nodes)
    every = cut_positions(nodes, 256)
    for most in (1, 2, 4):
        few = cut_positions(nodes, most)
        assert len(few) == most - 1 and set(few) <= set(every)
        costs = sorted(found[p] or 0 for p in every)
        assert sorted(found[p] or 0 for p in few) == costs[: most - 1]
    before = {node: BLOCK[node] for node in nodes}
    assert max(BLOCK[n] for n in chain_nodes(FoldBlocks(most=2)(gm))) == 1
    FoldBlocks()(gm)
    assert {node: BLOCK[node] for node in nodes} == before


def test_a_value_that_depends_on_samples_together_never_crosses() -> None:
    graph = fx.Graph()
    nodes = [graph.placeholder("x")]
    for index in range(3):
        nodes.append(graph.call_function(torch.relu, (nodes[-1],)))
        nodes[-1].meta["val"] = torch.empty(4, 2, device="meta")
        FREE[nodes[-1]], BATCH[nodes[-1]] = False, Split("mixed" if index == 1 else "rows")
    graph.output(nodes[-1])
    assert crossing_bytes(nodes[1:]) == [32, None, 0]
