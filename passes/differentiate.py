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

The backward and the weight part also exist in a form that leaves out the products of large
weight gradients and gives their operands instead (see `deferred.py`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import fx

from efftra_fx.emit import Emitted, emit
from efftra_fx.errors import DifferentiateError
from efftra_fx.walks import ancestors

from .deferred import Product, find_product
from .gradients import own_gradients, separate
from .joint import Joint, record_joint
from .slices import cut, is_check, is_random, storage_bytes


@dataclass(frozen=True, eq=False)
class Part:
    """A flat graph and how its function is called.

    `takes` and `gives` are the sizes of its groups of placeholders and outputs: the function
    takes a sequence a group and returns a list a group (the only group comes bare). A group
    that it `consumes` must be a list, and is emptied. `weights` lists by index the outputs that
    are weight gradients, those that are None left out.
    """

    name: str
    cut: Callable[[], fx.GraphModule] = field(repr=False)
    takes: tuple[int, ...]
    gives: tuple[int, ...]
    consumes: tuple[bool, ...]
    groups: tuple[str, ...]
    weights: tuple[int, ...] = ()

    @cached_property
    def graph(self) -> fx.GraphModule:
        """The flat graph, cut out of the whole at first use: few parts of a stage are ever called."""
        return self.cut()

    @cached_property
    def function(self) -> Emitted:
        """The generated function, compiled at first use."""
        return self._emit(self.name)

    @cached_property
    def accumulate(self) -> Emitted:
        """Like `function`, with one more argument: tensors to add the weight gradients into.

        One tensor for each of `weights`; they are returned in their place.
        """
        return self._emit(f"{self.name}_accumulate", self.weights)

    @cached_property
    def overwrite(self) -> Emitted:
        """Like `accumulate`, but what the tensors hold before is lost."""
        return self._emit(f"{self.name}_overwrite", self.weights, True)

    @cached_property
    def accumulate_telling(self) -> Emitted:
        """Like `accumulate`, with one more argument: a function that is told, by position, what is complete."""
        return self._emit(f"{self.name}_accumulate", self.weights, tells=True)

    @cached_property
    def overwrite_telling(self) -> Emitted:
        """Like `overwrite`, telling what is complete as `accumulate_telling` does."""
        return self._emit(f"{self.name}_overwrite", self.weights, True, True)

    def _emit(
        self, name: str, into: tuple[int, ...] | None = None, overwrite: bool = False, tells: bool = False
    ) -> Emitted:
        return emit(
            self.graph,
            name=name,
            takes=self.takes,
            gives=self.gives,
            consumes=self.consumes,
            groups=self.groups,
            into=into,
            overwrite=overwrite,
            tells=tells,
        )


@dataclass(frozen=True, eq=False)
class Differentiated:
    """A stage as explicit graphs.

    - `forward.function(inputs) -> outputs, stash`
    - `backward.function(stash, grads) -> input_gradients, weight_gradients`
    - `backward_input.function(stash, grads) -> input_gradients, weight_stash`
    - `backward_weight.function(weight_stash) -> weight_gradients`
    - `backward_deferring.function(stash, grads) -> input_gradients, weight_gradients, terms`
    - `weight_deferring.function(weight_stash) -> weight_gradients, terms`

    `grads` has one contiguous tensor for each output flagged in `grad_outputs`. Input gradients
    come for each input that is in `wrt` and no weight, weight gradients for each weight, in
    the order of the inputs; where there is none it is None (known beforehand: `input_gradients`,
    `weight_gradients`). A weight gradient has memory of its own and its weight's strides.
    Stashes and `grads` are lists; the function that is given one empties it, so that each value
    is freed at its last use.

    The deferring forms give None for the weights of `products`; `finish(products, terms of all
    micro-batches)` makes their gradients.

    `saved_bytes` is what the forward's stash keeps allocated beyond the stage's inputs,
    `weight_saved_bytes` and `terms_bytes` the same for the weight stash and the terms;
    `kept_inputs` are the inputs (by index) that the forward's stash keeps alive.
    """

    forward: Part
    backward: Part
    backward_input: Part
    backward_weight: Part
    backward_deferring: Part
    weight_deferring: Part
    products: tuple[Product, ...]
    input_gradients: tuple[bool, ...]
    weight_gradients: tuple[bool, ...]
    saved_bytes: int
    weight_saved_bytes: int
    terms_bytes: int
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
    latter stand for tensors on `device`), whose values are not used, or plain numbers, which are built in. What
    the functions are given later must have the examples' shapes, strides and dtypes. With
    `recompute` the forward keeps only its inputs and random masks, and the backward runs it again.

    Raises `DifferentiateError` when flags don't fit, or when shapes depend on values.
    """
    if len(weight_inputs) != len(wrt):
        raise DifferentiateError(f"wrt has {len(wrt)} flags and weight_inputs {len(weight_inputs)}; give one an input")
    if any(weight and not flag for weight, flag in zip(weight_inputs, wrt, strict=True)):
        index = next(i for i, weight in enumerate(weight_inputs) if weight and not wrt[i])
        raise DifferentiateError(f"input {index} is flagged as a weight but not in wrt; flag it in both")
    joint = record_joint(gm, example_inputs, wrt=wrt, grad_outputs=grad_outputs, device=device)
    return _slice(joint, tuple(wrt), tuple(weight_inputs), recompute)


def _slice(joint: Joint, wrt: tuple[bool, ...], weights: tuple[bool, ...], recompute: bool) -> Differentiated:
    graph, inputs = joint.graph, list(joint.inputs)
    tangents = [node for node in joint.tangents if node is not None]
    separate(graph)
    late = own_gradients(joint, weights)
    early = [grad for grad, flag, weight in zip(joint.gradients, wrt, weights, strict=True) if flag and not weight]
    found = [found for index, grad in enumerate(late) if grad and (found := find_product(index, grad))]
    products = tuple(product for product, _, _ in found)
    terms = [operand for _, *operands in found for operand in operands]
    deferred = {product.weight for product in products}
    now = [None if index in deferred else grad for index, grad in enumerate(late)]

    known = _forward_nodes(joint)
    if recompute:
        known = {node for node in known if is_random(node)} | set(inputs)
    stash = _crossing(graph, [*early, *late], known, tangents)
    first = ancestors(early, frozenset([*stash, *tangents]))
    weight_stash = _crossing(graph, late, first | set(stash) | set(tangents), [])

    def part(name: str, sources: dict[str, list[fx.Node]], *results: Sequence[Any]) -> Part:
        flat = [value for group in results for value in group]
        given = [node for group in sources.values() for node in group]
        also = [node for node in graph.nodes if is_random(node) or is_check(node)] if name == "forward" else []
        place = next((i for i, group in enumerate(results) if group is late or group is now), len(results))
        offset = sum(map(len, results[:place]))
        added = [offset + i for i, grad in enumerate(results[place] if place < len(results) else ()) if grad]
        return Part(
            name,
            partial(cut, joint.module, graph, sources=given, results=flat, also=also),
            takes=tuple(map(len, sources.values())),
            gives=tuple(map(len, results)),
            consumes=tuple(group != "inputs" for group in sources),
            groups=tuple(sources),
            weights=tuple(added),
        )

    coming = {"stash": stash, "grads": tangents}
    waiting = {"weight_stash": weight_stash}
    return Differentiated(
        forward=part("forward", {"inputs": inputs}, joint.outputs, stash),
        backward=part("backward", coming, early, late),
        backward_input=part("backward_input", coming, early, weight_stash),
        backward_weight=part("backward_weight", waiting, late),
        backward_deferring=part("backward_deferring", coming, early, now, terms),
        weight_deferring=part("weight_deferring", waiting, now, terms),
        products=products,
        input_gradients=tuple(grad is not None for grad in early),
        weight_gradients=tuple(grad is not None for grad in late),
        saved_bytes=storage_bytes(stash, without=inputs),
        weight_saved_bytes=storage_bytes(weight_stash, without=inputs),
        terms_bytes=storage_bytes(terms, without=inputs),
        kept_inputs=tuple(index for index, node in enumerate(inputs) if node in set(stash)),
        recompute=recompute,
    )


def _forward_nodes(joint: Joint) -> set[fx.Node]:
    """Return what the forward computes: all that outputs need, and all that draws random numbers."""
    stops = frozenset(joint.inputs)
    random = [node for node in joint.graph.nodes if is_random(node)]
    nodes = ancestors([*joint.outputs, *random], stops) | stops
    return nodes | {node for node in joint.graph.nodes if node.target is operator.getitem and node.args[0] in nodes}


def _crossing(graph: fx.Graph, results: Sequence[Any], known: set[fx.Node], given: Sequence[fx.Node]) -> list[fx.Node]:
    """Return the known values that computing `results` needs, in the order of the graph.

    A tuple-valued node does not cross; its items do.
    """
    stops = frozenset(node for node in known if _can_cross(node)) | frozenset(given)
    reached = ancestors(results, stops)
    return [node for node in graph.nodes if node in reached and node in stops and node in known]


def _can_cross(node: fx.Node) -> bool:
    return node.op != "get_attr" and isinstance(node.meta.get("val"), torch.Tensor)
