"""Cut pieces out of a joint graph: what a set of values needs, down to a set of sources."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx

from efftra_fx.errors import DifferentiateError
from efftra_fx.walks import ancestors


def cut(
    module: torch.nn.Module,
    graph: fx.Graph,
    *,
    sources: Sequence[fx.Node],
    results: Sequence[Any],
    also: Iterable[fx.Node] = (),
) -> fx.GraphModule:
    """Return the graph that computes `results` from `sources`, in the order of `graph`.

    Placeholders are the sources, in order, under their own names. Results may be nodes,
    None or plain constants. The nodes `also` named are computed whether or not a result needs them.
    """
    needed = ancestors([*results, *also], frozenset(sources))
    piece = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for source in sources:
        copies[source] = piece.placeholder(source.name)
        copies[source].meta = dict(source.meta)
    for node in graph.nodes:
        if node not in needed or node in copies:
            continue
        if node.op == "placeholder":
            raise DifferentiateError(f"a piece of the graph needs {node.name}, which it is not given")
        copies[node] = piece.node_copy(node, copies.__getitem__)
    piece.output(tuple(copies[value] if isinstance(value, fx.Node) else value for value in results))
    return fx.GraphModule(module, piece)


def storage_bytes(values: Iterable[fx.Node], without: Iterable[fx.Node] = ()) -> int:
    """Return the bytes that stay allocated while `values` live; shared storage counts once."""
    held = {key for node in without for key in storages(node)}
    sizes = {key: size for node in values for key, size in storages(node).items() if key not in held}
    return sum(sizes.values())


def storages(node: fx.Node) -> dict[int, int]:
    """Return the memory that a node's value lies in: its identity, and its size in bytes."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return {}
    storage = value.untyped_storage()
    return {int(storage._cdata): int(storage.nbytes())}


def is_random(node: fx.Node) -> bool:
    """Tell whether a node draws random numbers, or picks from one that does."""
    if node.target is operator.getitem:
        return is_random(node.all_input_nodes[0])
    return draws(node)


def draws(node: fx.Node) -> bool:
    """Tell whether an operator's call draws random numbers, as its arguments are."""
    if not isinstance(node.target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    if argument(node, "train") is False or argument(node, "training") is False:
        return False
    if argument(node, "dropout_p") == 0.0:  # attention draws only for its dropout
        return False
    between = argument(node, "dropout")  # a recurrent net draws only between its layers
    return between is None or (between > 0 and argument(node, "num_layers") > 1)


def is_check(node: fx.Node) -> bool:
    """Tell whether a node is computed only for the error that it may raise."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.name.startswith("aten::_assert_async")


def argument(node: fx.Node, name: str) -> Any:
    """Return the argument of an operator's call by its name in the schema, its default if not given, else None."""
    assert isinstance(node.target, torch._ops.OpOverload)
    for index, declared in enumerate(node.target._schema.arguments):
        if declared.name == name:
            given = node.args[index] if index < len(node.args) else node.kwargs.get(name)
            return declared.default_value if given is None else given
    return None
