"""Find how a graph's outputs are best added into tensors that exist already.

A weight gradient of one micro-batch is added to those of the ones before. Written apart,
that costs the whole gradient three passes over memory; a matrix product adds its result
itself, and a lookup table's gradient touches only the rows that were looked up. A gradient
that is a sum of such terms (a weight used twice) is added term by term.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import fx

from efftra_fx.errors import EmitError

aten = torch.ops.aten


class Writer(Protocol):
    """What writes the text of expressions."""

    def text(self, value: Any) -> str:
        """Return the expression for one argument."""
        ...

    def constant(self, value: Any, hint: str) -> str:
        """Return a global name for a value."""
        ...


Statement = Callable[[Writer], str]


@dataclass
class Sums:
    """What happens to outputs that are added into buffers.

    `results` names, by index of the output, the buffer that is returned for it; `inlined` nodes
    are computed by the statement that adds them; `added` nodes are added by name once they exist
    (or copied, the first time, when overwriting); `dissolved` nodes need not be computed. At the
    `starts` buffers are first touched, at the `finals` they are complete.
    """

    buffers: list[str] = field(default_factory=list)
    results: dict[int, str] = field(default_factory=dict)
    inlined: dict[fx.Node, Statement] = field(default_factory=dict)
    added: dict[fx.Node, list[tuple[str, bool]]] = field(default_factory=dict)
    dissolved: set[fx.Node] = field(default_factory=set)
    starts: dict[fx.Node, list[int]] = field(default_factory=dict)
    finals: dict[fx.Node, list[int]] = field(default_factory=dict)


def find_sums(graph: fx.Graph, into: Sequence[int], overwrite: bool) -> Sums:
    """Return how the outputs that `into` lists by index are added into buffers."""
    sums = Sums()
    order = {node: index for index, node in enumerate(graph.nodes)}
    output = next(iter(reversed(graph.nodes)))
    results = output.args[0]
    for index in into:
        if not isinstance(results, (list, tuple)) or not 0 <= index < len(results):
            raise EmitError(f"output {index} is to be added into a tensor, but the graph has no such output")
        if not isinstance(node := results[index], fx.Node):
            raise EmitError(f"output {index} is {node}, which cannot be added into a tensor")
        buffer = f"into_{len(sums.buffers)}_{node.name}"
        sums.buffers.append(buffer)
        sums.results[index] = buffer
        alone = len(node.users) == 1 and sum(value is node for value in results) == 1
        terms = sorted(_terms(node, alone, sums.dissolved), key=lambda term: order[term[0]])
        sums.starts.setdefault(terms[0][0], []).append(len(sums.buffers) - 1)
        sums.finals.setdefault(terms[-1][0], []).append(len(sums.buffers) - 1)
        for position, (term, single) in enumerate(terms):
            first = overwrite and position == 0
            statement = _inline(term, buffer, first) if single else None
            if statement is not None:
                sums.inlined[term] = statement
            else:
                sums.added.setdefault(term, []).append((buffer, first))
    return sums


def _terms(node: fx.Node, alone: bool, dissolved: set[fx.Node]) -> list[tuple[fx.Node, bool]]:
    """Take a sum apart; each term comes with whether nothing else uses it."""
    if alone and node.target in _COPIES and isinstance(copied := node.args[0], fx.Node) and _same_shape(node, copied):
        dissolved.add(node)
        return _terms(copied, len(copied.users) == 1, dissolved)
    if not alone or node.target is not aten.add.Tensor or node.kwargs or not _same_shape(node, *node.args[:2]):
        return [(node, alone)]
    dissolved.add(node)
    one, other = node.args
    assert isinstance(one, fx.Node) and isinstance(other, fx.Node)
    if one is other:
        return [(one, False), (one, False)]
    return [*_terms(one, len(one.users) == 1, dissolved), *_terms(other, len(other.users) == 1, dissolved)]


# What only makes memory of its own: whoever adds the value up needs no copy of it.
_COPIES = frozenset({aten.clone.default})


def _same_shape(*nodes: Any) -> bool:
    values = [node.meta.get("val") if isinstance(node, fx.Node) else None for node in nodes]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    return len(tensors) == len(nodes) and len({(value.shape, value.dtype) for value in tensors}) == 1


def _inline(node: fx.Node, buffer: str, first: bool) -> Statement | None:
    """Return the statement that computes a node right into a buffer, if its operator can."""
    match node.target:
        case aten.mm.default:
            return _product(node, buffer, first)
        case aten.sum.dim_IntList if first and not node.kwargs:
            return lambda writer: f"torch_sum({_texts(writer, node.args)}, out={buffer})".replace(
                "torch_sum", writer.constant(torch.sum, "torch_sum")
            )
        case aten.embedding_dense_backward.default if not node.args[4]:
            return _lookup(node, buffer, first)
    return None


def _product(node: fx.Node, buffer: str, first: bool) -> Statement:
    def write(writer: Writer) -> str:
        arguments = _texts(writer, node.args)
        if first:
            return f"{writer.constant(torch.mm, 'torch_mm')}({arguments}, out={buffer})"
        return f"{buffer}.addmm_({arguments})"

    return write


def _lookup(node: fx.Node, buffer: str, first: bool) -> Statement:
    """Add the rows that were looked up; those of the padding index get nothing."""

    def write(writer: Writer) -> str:
        gradient, indices, _, padding, _ = node.args
        rows = f"{writer.text(gradient)}.reshape(-1, {buffer}.shape[1])"
        places = f"{writer.text(indices)}.reshape(-1)"
        if isinstance(padding, int) and padding >= 0:
            rows += f".masked_fill(({places} == {padding}).unsqueeze(1), 0)"
        return f"{buffer}{'.zero_()' if first else ''}.index_add_(0, {places}, {rows})"

    return write


def _texts(writer: Writer, values: Sequence[Any]) -> str:
    return ", ".join(writer.text(value) for value in values)
