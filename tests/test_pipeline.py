"""Passes run in order, and what one needs must have been given before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import fx

from efftra_fx.passes.batch import ProveBatch
from efftra_fx.passes.blocks import FoldBlocks
from efftra_fx.passes.means import SeparateMeans
from efftra_fx.passes.pipeline import check_order, run_passes
from efftra_fx.passes.shapes import AnnotateShapes
from efftra_fx.passes.split import AssignStages


@dataclass(frozen=True)
class Double:
    """Doubles what the graph returns."""

    name: ClassVar[str] = "double"
    needs: ClassVar[tuple[str, ...]] = ("number",)
    gives: ClassVar[tuple[str, ...]] = ("doubled",)

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        output = next(iter(reversed(gm.graph.nodes)))
        with gm.graph.inserting_before(output):
            twice = gm.graph.call_function(torch.mul, (output.args[0], 2))
        output.args = (twice,)
        gm.recompile()
        return gm


@dataclass(frozen=True)
class Tangle:
    """Leaves a graph that reads a node of another graph."""

    name: ClassVar[str] = "tangle"
    needs: ClassVar[tuple[str, ...]] = ()
    gives: ClassVar[tuple[str, ...]] = ()

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        output = next(iter(reversed(gm.graph.nodes)))
        output.args = (fx.Graph().placeholder("elsewhere"),)
        return gm


def identity() -> fx.GraphModule:
    """A graph that returns what it gets."""
    return fx.symbolic_trace(lambda x: x + 0)


def test_passes_run_in_order_and_each_is_told_of() -> None:
    seen = []
    gm = run_passes(identity(), (Double(), Double()), ("number",), lambda name, graph, s: seen.append((name, s >= 0)))
    assert gm(torch.tensor(3)).item() == 12
    assert seen == [("double", True), ("double", True)]


def test_a_pass_before_what_it_needs_is_refused_before_anything_runs() -> None:
    gm = identity()
    with pytest.raises(ValueError, match="pass double needs number, which no pass before it gives"):
        run_passes(gm, (Double(),), ())
    assert gm(torch.tensor(3)).item() == 3


def test_a_pass_that_leaves_a_broken_graph_is_caught_at_once() -> None:
    with pytest.raises(RuntimeError):
        run_passes(identity(), (Tangle(),), ())


def test_the_passes_of_a_compilation_stand_in_an_order_that_holds() -> None:
    line = (SeparateMeans(()), ProveBatch({}, ()), AnnotateShapes(), FoldBlocks(), AssignStages((1,)))
    check_order(line, ("role", "outputs"))
    for index in (1, 3):
        with pytest.raises(ValueError, match="which no pass before it gives"):
            check_order(line[:index] + line[index + 1 :], ("role", "outputs"))
