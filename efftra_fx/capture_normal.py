"""Bring a captured graph into the form that all passes expect: no checks, and every operator differentiable."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from efftra_fx.errors import CaptureError
from efftra_fx.opaque import is_opaque

aten = torch.ops.aten
_SPARSE = "efftra.sparse"
_CHECKS = frozenset(
    {
        aten._assert_scalar.default,
        aten._assert_tensor_metadata.default,
        aten.sym_constrain_range.default,
        aten.sym_constrain_range_for_size.default,
        aten._assert_async.msg,
        aten._assert_async.default,
    }
)
_SCATTERS = frozenset({aten.slice_scatter.default, aten.select_scatter.default})
_LIKE_ONLY = frozenset({aten.randint_like.default, aten.randint_like.low_dtype})


def make_normal(graph: fx.Graph) -> None:
    """Drop checks, let views copy where they must, and spell out what depends on memory or on one row.

    Changes the graph in place; raises CaptureError for a view of memory that its operand does not fill.
    """
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and node.target in _CHECKS:
            graph.erase_node(node)
    graph.eliminate_dead_code()
    _read_sizes_off_inputs(graph)
    for node in list(graph.nodes):
        _make_dense(node)
        if node.target in (aten.view.default, aten._unsafe_view.default):
            node.target = aten.reshape.default  # an operator may lay its real result out unlike its traced one
        elif node.target in _LIKE_ONLY:
            _read_shape_only(graph, node)
        elif node.target is aten.rrelu.default:
            _spell_random_leak(graph, node)
        elif node.target is aten.copy.default:
            _spell_copy(graph, node)
        elif node.target in _SCATTERS and node.meta["val"].is_complex():
            _scatter_parts(graph, node)
        elif node.target in (aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims):
            _squeeze_what_is_one(graph, node)
        elif node.target is aten.as_strided.default:
            _lay_out(graph, node)
        elif node.target is aten.masked_select.default and node.users and all(is_opaque(u.target) for u in node.users):
            _pad_selection(graph, node)


def sparse_lines(graph: fx.Graph) -> tuple[str, ...]:
    """Return the lines whose gradients the model wants sparse; here they are dense."""
    return tuple(dict.fromkeys(_line(node) for node in graph.nodes if node.meta.get(_SPARSE)))


def _make_dense(node: fx.Node) -> None:
    """Take dense gradients where an operator is asked for sparse ones, which no stage can add up or send."""
    schema = getattr(node.target, "_schema", None)
    for position, entry in enumerate(schema.arguments if schema is not None else ()):
        if entry.name not in ("sparse", "sparse_grad"):
            continue
        if position < len(node.args) and node.args[position] is True:
            node.args = (*node.args[:position], False, *node.args[position + 1 :])
            node.meta[_SPARSE] = True
        elif node.kwargs.get(entry.name) is True:
            node.kwargs = {**node.kwargs, entry.name: False}
            node.meta[_SPARSE] = True


def _read_sizes_off_inputs(graph: fx.Graph) -> None:
    """Take sizes from placeholders that have them: what needs a size alone then needs no computed value."""
    known: dict[Any, tuple[fx.Node, int]] = {}
    for node in graph.nodes:
        if node.op == "placeholder" and isinstance(value := node.meta.get("val"), torch.Tensor):
            for dim, size in enumerate(value.shape):
                if isinstance(size, torch.SymInt):
                    known.setdefault(size.node.expr, (node, dim))
        elif node.target is aten.sym_size.int and isinstance(size := node.meta.get("val"), torch.SymInt):
            node.args = known.get(size.node.expr, node.args)


def _pad_selection(graph: fx.Graph, node: fx.Node) -> None:
    """Give an operator that takes packed rows or padded ones (targets with their lengths) the padded ones.

    Each row's selected elements come first, in their order; how many they are it knows from the lengths.
    """
    values: Any = node.args[0]
    mask: Any = node.args[1]
    shape = values.meta["val"].shape
    if len(shape) != 2 or tuple(mask.meta["val"].shape) != tuple(shape):
        return
    with graph.inserting_before(node):
        chosen = _like(graph.call_function(aten.logical_not.default, (mask,)), node, mask.meta["val"].bool())
        ranks = mask.meta["val"].to(torch.int64)
        order = graph.call_function(aten.sort.stable, (chosen,), {"stable": True, "dim": 1})
        _like(order, node, (mask.meta["val"].bool(), ranks))
        places = _like(graph.call_function(operator.getitem, (order, 1)), node, ranks)
        padded = graph.call_function(aten.gather.default, (values, 1, places))
        _like(padded, node, values.meta["val"].clone())
    node.replace_all_uses_with(padded)
    graph.erase_node(node)


def _read_shape_only(graph: fx.Graph, node: fx.Node) -> None:
    """Let an operator that reads a tensor's shape and has no derivative take it detached."""
    like: Any = node.args[0]
    with graph.inserting_before(node):
        node.replace_input_with(like, _like(graph.call_function(aten.detach.default, (like,)), node, like.meta["val"]))


def _spell_random_leak(graph: fx.Graph, node: fx.Node) -> None:
    """Replace an operator that writes its slopes into memory of its own by one that returns them."""
    x, lower, upper, training = (*node.args, *(0.125, 1 / 3, False)[len(node.args) - 1 :])[:4]
    if not training:
        return
    with graph.inserting_before(node):
        fake: Any = x.meta["val"]  # type: ignore[union-attr]
        noise = _like(graph.call_function(aten.zeros_like.default, (x,)), node, fake.detach())
        args = (x, noise, lower, upper, True)
        both = _like(graph.call_function(aten.rrelu_with_noise_functional.default, args), node, (fake, fake.detach()))
        slopes = _like(graph.call_function(operator.getitem, (both, 1)), node, fake.detach())
        # The slopes are 1 where x is positive; the operator's own derivative takes those that it was given.
        leaked = _like(graph.call_function(aten.mul.Tensor, (x, slopes)), node, node.meta["val"])
    node.replace_all_uses_with(leaked)
    graph.erase_node(node)


def _squeeze_what_is_one(graph: fx.Graph, node: fx.Node) -> None:
    """Name the dimensions that are squeezed, so that a part of one row keeps its dimension of rows."""
    value: Any = node.args[0]
    shape = value.meta["val"].shape
    given = node.args[1] if len(node.args) > 1 else range(len(shape))
    dims = [given] if isinstance(given, int) else list(given)  # type: ignore[arg-type]
    ones = [d for d in dims if isinstance(d, int) and _is_one(shape[d])]
    node.target, node.args = (aten.squeeze.dims, (value, ones)) if ones else (aten.alias.default, (value,))


def _is_one(size: Any) -> bool:
    return bool(size.node.expr == 1) if isinstance(size, torch.SymInt) else bool(size == 1)


def _lay_out(graph: fx.Graph, node: fx.Node) -> None:
    """Put the operand of a view of memory into memory as it was laid out when it was traced."""
    value: Any = node.args[0]
    fake = value.meta["val"]
    offset = node.args[3] if len(node.args) > 3 else node.kwargs.get("storage_offset")
    sizes, strides = [_hint(s) for s in fake.shape], [_hint(s) for s in fake.stride()]
    order = sorted(range(fake.ndim), key=lambda d: (-strides[d], sizes[d] == 1))
    dense = 1
    for d in reversed(order):
        if sizes[d] != 1 and strides[d] != dense:
            raise CaptureError(
                f"as_strided reads memory around its operand of shape {sizes} and strides {strides}"
                f"{_line(node)}; call contiguous() before it"
            )
        dense *= sizes[d]
    if _hint(fake.storage_offset()) or (offset is not None and not isinstance(offset, int)):
        raise CaptureError(f"as_strided reads memory before its operand{_line(node)}; call contiguous() before it")
    with graph.inserting_before(node):
        ordered = _like(graph.call_function(aten.permute.default, (value, order)), node, fake.permute(order))
        filled = graph.call_function(aten.clone.default, (ordered,), {"memory_format": torch.contiguous_format})
        _like(filled, node, fake.permute(order).clone(memory_format=torch.contiguous_format))
    node.args = (filled, *node.args[1:3], offset or 0)
    node.kwargs = {}


def _hint(size: Any) -> int:
    return size if isinstance(size, int) else int(size.node.hint)


def _line(node: fx.Node) -> str:
    lines = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines()]
    files = [line for line in lines if line.startswith("File")]
    return f" at {files[-1]}" if files else ""


def _scatter_parts(graph: fx.Graph, node: fx.Node) -> None:
    """Write into real and imaginary parts: what writes complex numbers into a part of a tensor has no derivative."""
    fake, write = node.meta["val"], node.target
    assert callable(write)
    arguments: Any = node.args
    into, source, dim, *rest = (*arguments, 0)[: max(3, len(arguments))]
    with graph.inserting_before(node):
        parts = []
        for value in (into, source):
            held = value.meta["val"]
            if held.is_conj():
                held = held.resolve_conj()
                value = _like(graph.call_function(aten.resolve_conj.default, (value,)), node, held)
            parts.append(
                _like(graph.call_function(aten.view_as_real.default, (value,)), node, torch.view_as_real(held))
            )
        args = (*parts, dim % fake.ndim, *rest)
        written = _like(graph.call_function(write, args), node, torch.view_as_real(fake.clone()))
        written.kwargs = node.kwargs
        whole = _like(graph.call_function(aten.view_as_complex.default, (written,)), node, fake)
    node.replace_all_uses_with(whole)
    graph.erase_node(node)


def _spell_copy(graph: fx.Graph, node: fx.Node) -> None:
    """Replace a copy into memory that nobody reads, which has no derivative, by the source expanded and converted."""
    into: Any = node.args[0]
    value: Any = node.args[1]
    with graph.inserting_before(node):
        if tuple(into.meta["val"].shape) != tuple(value.meta["val"].shape):
            fake = into.meta["val"].to(value.meta["val"].dtype)
            value = _like(graph.call_function(aten.expand_as.default, (value, into)), node, fake)
        fake, kind = node.meta["val"], into.meta["val"].dtype
        if kind != value.meta["val"].dtype:
            value = _like(graph.call_function(aten._to_copy.default, (value,), {"dtype": kind}), node, fake)
        else:
            value = _like(graph.call_function(aten.alias.default, (value,)), node, fake)
    node.replace_all_uses_with(value)
    graph.erase_node(node)


def _like(node: fx.Node, other: fx.Node, value: Any) -> fx.Node:
    node.meta.update({k: v for k, v in other.meta.items() if k in ("nn_module_stack", "stack_trace")})
    node.meta["val"] = value
    return node
