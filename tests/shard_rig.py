"""Stage graphs written by hand, and ranks of a tensor group run in lockstep against one device."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from efftra_fx.collectives import take
from efftra_fx.meta import CONSTANTS, FREE, ROLE, Role
from efftra_fx.passes.differentiate import differentiate
from efftra_fx.passes.shard_candidates import Candidates, find_candidates
from efftra_fx.passes.shard_choice import Choice
from efftra_fx.passes.shard_cuts import Placement
from efftra_fx.passes.shard_rewrite import rewrite
from efftra_fx.passes.shard_segments import Segments, run_together

Operands = dict[str, Tensor]


@dataclass
class Maker:
    """A graph under construction; tensors are float64 parameters or inputs, `rows` the dimension of their batch."""

    graph: fx.Graph = field(default_factory=fx.Graph)
    mode: FakeTensorMode = field(default_factory=lambda: FakeTensorMode(shape_env=ShapeEnv()))
    tensors: Operands = field(default_factory=dict)
    rows: int | None = None

    def parameter(self, tensor: Tensor) -> fx.Node:
        return self.placeholder("parameter", tensor, None)

    def input(self, tensor: Tensor, rows: int | None = None) -> fx.Node:
        return self.placeholder("input", tensor, rows)

    def value(self, tensor: Tensor, rows: int | None = None) -> fx.Node:
        """A value of an earlier stage: whole, with a gradient."""
        return self.placeholder("value", tensor, rows)

    def placeholder(self, kind: str, tensor: Tensor, rows: int | None) -> fx.Node:
        name = f"{kind}_{len(self.tensors)}"
        node = self.graph.placeholder(name)
        sizes = [DimDynamic.DYNAMIC if d == rows else DimDynamic.STATIC for d in range(tensor.ndim)]
        context: Any = StatelessSymbolicContext(dynamic_sizes=sizes)
        node.meta["val"] = self.mode.from_tensor(tensor, symbolic_context=context)
        ROLE[node] = Role(kind, name, trainable=kind == "parameter" and tensor.is_floating_point())
        FREE[node] = kind == "input"
        self.tensors[name] = tensor
        return node

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        values = fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
        with self.mode:
            node.meta["val"] = target(*values[0], **values[1])
        FREE[node] = all(FREE[n] for n in node.all_input_nodes)
        return node

    def item(self, node: fx.Node, index: int) -> fx.Node:
        return self.call(operator.getitem, node, index)

    def finish(self, *outputs: fx.Node) -> fx.GraphModule:
        self.graph.output(tuple(outputs))
        gm = fx.GraphModule(torch.nn.Module(), self.graph)
        CONSTANTS[gm] = {}
        return gm


def candidates(gm: fx.GraphModule, width: int) -> Candidates:
    return find_candidates(gm, width)


def whole_choice(found: Candidates) -> Choice:
    """Leave everything whole."""
    return Choice({node: some[0] for node, some in found.strategies.items()}, 0.0)


@dataclass
class Outcome:
    outputs: list[Tensor]
    gradients: dict[str, Tensor]
    meetings: tuple[str, ...]


def run(gms: Sequence[fx.GraphModule], operands: Sequence[Operands], seed: int = 0) -> list[Outcome]:
    """Run forward and backward of the ranks' graphs; outputs' gradients are fixed random numbers."""
    pieces = []
    for gm, held in zip(gms, operands, strict=True):
        nodes = [n for n in gm.graph.nodes if n.op == "placeholder"]
        examples = [held[n.name].to("meta") for n in nodes]
        wrt = [ROLE[n].kind in ("parameter", "value") and held[n.name].is_floating_point() for n in nodes]
        weights = [w and ROLE[n].kind == "parameter" for n, w in zip(nodes, wrt, strict=True)]
        results = next(n for n in gm.graph.nodes if n.op == "output").args[0]
        flags = [n.meta["val"].is_floating_point() for n in results]
        parts = differentiate(gm, examples, wrt=wrt, grad_outputs=flags, weight_inputs=weights)
        pieces.append((nodes, wrt, weights, flags, parts))

    def segments(part: Any) -> Segments:
        return Segments(part.name, part.graph, part.takes, part.gives, part.consumes)

    forwards = [segments(parts.forward) for *_, parts in pieces]
    backwards = [segments(parts.backward) for *_, parts in pieces]
    starts = [
        drawing(forward([held[n.name] for n in nodes]), seed)
        for forward, (nodes, *_), held in zip(forwards, pieces, operands, strict=True)
    ]
    done = run_together(starts)
    seeds = [[fixed(o, i) for i, (o, f) in enumerate(zip(outs, pieces[0][3], strict=True)) if f] for outs, _ in done]
    back = run_together([b(list(stash), list(g)) for b, (_, stash), g in zip(backwards, done, seeds, strict=True)])
    outcomes = []
    for (nodes, wrt, weights, _, _), (outs, _), (early, late), forward, backward in zip(
        pieces, done, back, forwards, backwards, strict=True
    ):
        firsts, lasts = iter(early), iter(late)
        found = {}
        for node, flag, weight in zip(nodes, wrt, weights, strict=True):
            if flag:
                gradient = next(lasts) if weight else next(firsts)
                if gradient is not None:
                    found[node.name] = gradient
        outcomes.append(Outcome(list(outs), found, (*forward.sums, "|", *backward.sums)))
    return outcomes


def drawing(meeting: Any, seed: int) -> Any:
    """Let a rank draw its random numbers as if it ran alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        state = torch.get_rng_state()
    reply = None
    while True:
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(state)
            try:
                asked = meeting.send(reply)
            except StopIteration as stop:
                return stop.value
            finally:
                state = torch.get_rng_state()
        reply = yield asked


def fixed(like: Tensor, index: int) -> Tensor:
    """Return numbers that depend on shape and index alone."""
    generator = torch.Generator().manual_seed(index)
    return torch.randn(like.shape, generator=generator, dtype=torch.float64).to(like.dtype)


def share_of(tensor: Tensor, place: Placement, rank: int) -> Tensor:
    if place.cut is None:
        return tensor
    return take(tensor, place.dim, place.cut.parts[rank], place.cut.size).contiguous()


def hold_against_one_device(maker: Maker, gm: fx.GraphModule, found: Candidates, choice: Choice) -> None:
    """Run the group that a choice makes; outputs and gradients must be those of one device, on every rank."""
    (expected,) = run([gm], [maker.tensors])
    placed, outcomes = run_group(maker, gm, found, choice)
    assert len({outcome.meetings for outcome in outcomes}) == 1
    for outcome in outcomes:
        for mine, whole in zip(outcome.outputs, expected.outputs, strict=True):
            close(mine, whole)
    for name, whole in expected.gradients.items():
        place = placed[name]
        parts = [o.gradients.get(name) for o in outcomes]
        if place.kind == "copied":
            close(sum(p for p in parts if p is not None), whole)  # type: ignore[arg-type]
            continue
        for rank, part in enumerate(parts):
            wanted = share_of(whole, place, rank)
            close(torch.zeros_like(wanted) if part is None else part, wanted)


def run_group(
    maker: Maker, gm: fx.GraphModule, found: Candidates, choice: Choice
) -> tuple[dict[str, Placement], list[Outcome]]:
    """Run the group that a choice makes; return where operands lie, and what each rank has."""
    graphs = [rewrite(gm, found, choice, rank) for rank in range(found.width)]
    placed = {n.name: choice.strategies[n].outputs[0] for n in gm.graph.nodes if n.op == "placeholder"}
    operands = [
        {name: share_of(tensor, placed[name], rank) for name, tensor in maker.tensors.items()}
        for rank in range(found.width)
    ]
    return placed, run(graphs, operands)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)


Build = Callable[[Maker], fx.Node]
