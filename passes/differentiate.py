"""Differentiate a stage ahead of time: one forward graph in, explicit forward and backward graphs out.

What does not depend on the incoming gradients is forward; what crosses over is saved.
The part that only weight gradients need can be run apart from, and later than, the part
that the stage before waits for.

    inputs ──► forward ──► outputs
                  │ stash
                  ▼
    gradients ─► backward ──────────────► input gradients, weight gradients
    gradients ─► backward_input ────────► input gradients
                  │ weight stash
                  ▼
                 backward_weight ───────► weight gradients
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx

from efftra_fx.emit import Emitted, emit
from efftra_fx.errors import DifferentiateError

from .joint import Joint, record_joint
from .slices import ancestors, cut, descendants, is_random, storage_bytes, storages


@dataclass(frozen=True, eq=False)
class Part:
    """A flat graph and how its function is called.

    `takes` and `gives` are the sizes of its groups of placeholders and outputs: the function
    takes a sequence a group and returns a list a group (the only group comes bare). A group
    that it `consumes` must be a list, and is emptied.
    """

    name: str
    graph: fx.GraphModule
    takes: tuple[int, ...]
    gives: tuple[int, ...]
    consumes: tuple[bool, ...]
    weights: tuple[int, ...] = ()  # which outputs are weight gradients, by index; those that are None left out

    @cached_property
    def function(self) -> Emitted:
        """The generated function, compiled at first use."""
        return emit(self.graph, name=self.name, takes=self.takes, gives=self.gives, consumes=self.consumes)

    @cached_property
    def accumulate(self) -> Emitted:
        """Like `function`, with one more argument: tensors to add the weight gradients into.

        One tensor for each weight that has a gradient; they are returned in its place.
        """
        return self._into("accumulate", False)

    @cached_property
    def overwrite(self) -> Emitted:
        """Like `accumulate`, but what the tensors hold before is lost."""
        return self._into("overwrite", True)

    def _into(self, how: str, overwrite: bool) -> Emitted:
        return emit(
            self.graph,
            name=f"{self.name}_{how}",
            takes=self.takes,
            gives=self.gives,
            consumes=self.consumes,
            into=self.weights,
            overwrite=overwrite,
        )


@dataclass(frozen=True, eq=False)
class Differentiated:
    """A stage as explicit graphs.

    - `forward.function(inputs) -> outputs, stash`
    - `backward.function(stash, grads) -> input_gradients, weight_gradients`
    - `backward_input.function(stash, grads) -> input_gradients, weight_stash`
    - `backward_weight.function(weight_stash) -> weight_gradients`

    `grads` has one contiguous tensor for each output flagged in `grad_outputs`. Input gradients
    come for each input that is in `wrt` and no weight, weight gradients for each weight, in
    the order of the inputs; where there is none it is None (known beforehand: `input_gradients`,
    `weight_gradients`). Stashes and `grads` are lists; the function that is given one empties it, so
    that each value is freed at its last use.

    `saved_bytes` is what the forward's stash keeps allocated beyond the stage's inputs;
    `kept_inputs` are the inputs (by index) that it keeps alive.
    """

    forward: Part
    backward: Part
    backward_input: Part
    backward_weight: Part
    input_gradients: tuple[bool, ...]
    weight_gradients: tuple[bool, ...]
    saved_bytes: int
    weight_saved_bytes: int
    kept_inputs: tuple[int, ...]
    recompute: bool


def differentiate(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    wrt: Sequence[bool],
    grad_outputs: Sequence[bool],
    weight_inputs: Sequence[bool],
    recompute: bool = False,
    device: torch.device | str = "cpu",
) -> Differentiated:
    """Return the explicit forward and backward graphs of a stage, specialised to the examples' shapes.

    `wrt` flags the inputs whose gradients are wanted, `weight_inputs` those of them that are weights,
    `grad_outputs` the outputs that get a gradient. Examples may be real, fake or meta tensors (the
    latter stand for tensors on `device`), and plain numbers; their values are not used. With
    `recompute` the forward keeps only its inputs and random masks, and the backward runs it again.

    Raises `DifferentiateError` when flags don't fit, or when shapes depend on values.
    """
    if len(weight_inputs) != len(wrt) or any(weight and not flag for weight, flag in zip(weight_inputs, wrt)):
        raise DifferentiateError("weight_inputs needs one flag for each input, set only where wrt is set")
    joint = record_joint(gm, example_inputs, wrt=wrt, grad_outputs=grad_outputs, device=device)
    return _slice(joint, tuple(wrt), tuple(weight_inputs), recompute)


def _slice(joint: Joint, wrt: tuple[bool, ...], weights: tuple[bool, ...], recompute: bool) -> Differentiated:
    graph, inputs = joint.graph, joint.inputs
    tangents = [node for node in joint.tangents if node is not None]
    late = _weight_gradients(joint, weights)
    early = [grad for grad, flag, weight in zip(joint.gradients, wrt, weights, strict=True) if flag and not weight]

    forward = ancestors(joint.outputs, frozenset(inputs))
    forward |= {node for node in graph.nodes if is_random(node)}
    forward |= ancestors(forward, frozenset(inputs))
    forward |= set(inputs)
    forward |= {node for node in graph.nodes if node.target is operator.getitem and node.args[0] in forward}
    known = {node for node in forward if is_random(node)} | set(inputs) if recompute else forward

    stash = _crossing(graph, [*early, *late], known, tangents)
    first = ancestors(early, frozenset([*stash, *tangents]))
    weight_stash = _crossing(graph, late, first | set(stash) | set(tangents), [])

    def part(
        name: str, sources: Sequence[Sequence[fx.Node]], results: Sequence[Sequence[Any]], *consumes: bool
    ) -> Part:
        piece = cut(
            joint.module,
            graph,
            sources=[node for group in sources for node in group],
            results=[value for group in results for value in group],
        )
        offset = sum(map(len, results)) - len(late)
        weights = tuple(offset + index for index, grad in enumerate(late) if grad is not None)
        return Part(
            name,
            piece,
            tuple(map(len, sources)),
            tuple(map(len, results)),
            consumes,
            weights if results[-1] is late else (),
        )

    return Differentiated(
        forward=part("forward", [inputs], [joint.outputs, stash], False),
        backward=part("backward", [stash, tangents], [early, late], True, True),
        backward_input=part("backward_input", [stash, tangents], [early, weight_stash], True, True),
        backward_weight=part("backward_weight", [weight_stash], [late], True),
        input_gradients=tuple(grad is not None for grad in early),
        weight_gradients=tuple(grad is not None for grad in late),
        saved_bytes=storage_bytes(stash, without=inputs),
        weight_saved_bytes=storage_bytes(weight_stash, without=inputs),
        kept_inputs=tuple(index for index, node in enumerate(inputs) if node in set(stash)),
        recompute=recompute,
    )


def _weight_gradients(joint: Joint, weights: tuple[bool, ...]) -> list[fx.Node | None]:
    """Return the weights' gradients, each in memory of its own and laid out like its weight.

    So a caller may add to them in place and reduce them over ranks.
    """
    wanted = [(node, grad) for node, grad, flag in zip(joint.inputs, joint.gradients, weights, strict=True) if flag]
    others = [grad for grad, flag in zip(joint.gradients, weights, strict=True) if not flag]
    given = [node for node in (*joint.inputs, *joint.tangents) if node is not None]
    used = {key for node in (*given, *others, *joint.outputs) if isinstance(node, fx.Node) for key in storages(node)}
    tangential = descendants(joint.graph, {node for node in joint.tangents if node is not None})
    used |= {key for node in joint.graph.nodes if node not in tangential for key in storages(node)}
    result: list[fx.Node | None] = []
    for weight, grad in wanted:
        if grad is not None:
            if not used.isdisjoint(storages(grad)) or grad.meta["val"].stride() != weight.meta["val"].stride():
                grad = _clone(joint.graph, grad, weight)
            used.update(storages(grad))
        result.append(grad)
    return result


def _clone(graph: fx.Graph, grad: fx.Node, weight: fx.Node) -> fx.Node:
    like = weight.meta["val"]
    formats = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)
    fits = (form for form in formats if like.dim() == _RANKS.get(form, like.dim()) and like.is_contiguous(memory_format=form))
    layout = next(fits, torch.preserve_format)
    clone = graph.create_node(
        "call_function", torch.ops.aten.clone.default, (grad,), {"memory_format": layout}, name=f"{grad.name}_clone"
    )
    clone.meta = {**grad.meta, "val": grad.meta["val"].clone(memory_format=layout)}
    return clone


_RANKS = {torch.channels_last: 4, torch.channels_last_3d: 5}


def _crossing(graph: fx.Graph, results: Sequence[Any], known: set[fx.Node], given: Sequence[fx.Node]) -> list[fx.Node]:
    """Return the known values that computing `results` needs, in the order of the graph.

    A tuple-valued node does not cross; its items do.
    """
    stops = frozenset(node for node in known if _can_cross(node)) | frozenset(given)
    reached = ancestors(results, stops)
    return [node for node in graph.nodes if node in reached and node in stops and node in known]


def _can_cross(node: fx.Node) -> bool:
    return node.op != "get_attr" and isinstance(node.meta.get("val"), torch.Tensor)
