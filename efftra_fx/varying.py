"""One trace for every size of the dimensions that vary from batch to batch.

Once a second size of a dimension is met (another length, say), the step is captured with that
dimension as a symbol too. Every further size is then put into that one trace: fake tensors of the
real sizes run through its graph, numbers that follow the size become constants, and what is left
is the graph that a capture at this size would give, with the rows alone still a symbol. Where the model fixes
the dimension (a recurrent net, say), the traces at two sizes are joined into one. What the
tracer has assumed of the symbols (a branch on the length) must hold for the new size, and the
specialised graph is checked against eager like any other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from efftra_fx.assumed import assumed_of
from efftra_fx.capture_align import align
from efftra_fx.captured import Captured, flags_of
from efftra_fx.errors import CaptureError, EfftraError
from efftra_fx.meta import CONSTANTS, OUTPUTS, PATH, ROLE, SOURCE
from efftra_fx.private import shapes_in_python, size_expression
from efftra_fx.put_in import Sizes, like
from efftra_fx.python_reads import Read
from efftra_fx.signature import Call, difference
from efftra_fx.step_module import LossFn
from efftra_fx.trace import capture, capture_with_settings

Moving = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Varying:
    """A step captured with some dimensions as symbols; `moving` are each tensor's, `example` the tensors it was of."""

    captured: Captured
    moving: Moving
    example: tuple[Tensor, ...]

    def fits(self, call: Call, tensors: Sequence[Tensor], flags: tuple[Any, ...], reads: Sequence[Read] = ()) -> bool:
        """Say whether a batch differs from the example in rows and these dimensions alone, and the trace allows it.

        It must be given what is read as `reads`, too.
        """
        settings = self.captured.settings
        return (
            self.captured.flags == flags
            and {read.key for read in reads} <= {one.read.key for one in settings}
            and all(one.fits for one in settings)
            and difference(self.captured.call, call) is None
            and moving_dims(self.example, tensors, self.captured.batch_leaves, self.moving) is not None
            and self.captured.allows(tensors)
        )


def moving_dims(
    before: Sequence[Tensor], after: Sequence[Tensor], batch_leaves: Sequence[int | None], within: Moving | None = None
) -> Moving | None:
    """Return for each tensor the dimensions, rows apart, whose size is another one now.

    None where dtypes or numbers of dimensions differ, where an empty dimension or one of size one
    is met, or where a dimension outside of `within` differs.
    """
    found: list[tuple[int, ...]] = []
    for index, (one, other, rows) in enumerate(zip(before, after, batch_leaves, strict=True)):
        if one.dtype != other.dtype or one.ndim != other.ndim:
            return None
        dims = tuple(d for d in range(one.ndim) if d != rows and one.shape[d] != other.shape[d])
        if any(min(one.shape[d], other.shape[d]) < 2 for d in dims):
            return None
        if within is not None and not set(dims) <= set(within[index]):
            return None
        found.append(dims)
    return tuple(found)


@dataclass
class Traces:
    """The traces that were made for all sizes; `fixed` are dimensions that the model fixes, and why.

    `notes` are what nobody has been told yet, of `what`.
    """

    what: str = "step"
    known: list[Varying] = field(default_factory=list)
    fixed: dict[Moving, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    refused: Counter[Moving] = field(default_factory=Counter)
    unset: list[tuple[Read, ...]] = field(default_factory=list)  # what could not be given to a graph
    fixed_set: dict[Moving, str] = field(default_factory=dict)  # as `fixed`, for traces that are given what is read

    def find(
        self,
        model: nn.Module,
        call: Call,
        tensors: Sequence[Tensor],
        batch_leaves: Sequence[int | None],
        loss_fn: LossFn | None,
        forms: Sequence[Form],
        want: str = "loss",
        reads: tuple[Read, ...] = (),
    ) -> Varying | None:
        """Return a trace that a batch can be put into; one is made where a known form differs in sizes alone.

        It is given what is read as `reads`.
        """
        flags = flags_of(model)
        for varying in self.known:
            if varying.fits(call, tensors, flags, reads):
                return varying
        moving = _moving_among(call, tensors, flags, forms)
        rows = next(t.shape[d] for t, d in zip(tensors, batch_leaves, strict=True) if d is not None)
        known = self.fixed if not reads else self.fixed_set
        if moving is None or moving in known or rows < _LEAST_ROWS:
            return None
        found = capture_varying(model, call, tensors, batch_leaves, moving, loss_fn, want, reads)
        if isinstance(found, Varying):
            self.known.append(found)
            del self.known[:-_MOST_TRACES]
            return found if found.captured.allows(tensors) else None
        known[moving] = found
        return None

    def settings(self, call: Call, forms: Sequence[Captured]) -> tuple[Read, ...]:
        """Return what a graph would have to be given to be right at the present values; none where nothing is known.

        That is where a form, the latest first, is for other values alone, and it was not tried before in vain.
        """
        vain = [{read.key for read in reads} for reads in self.unset]
        for captured in reversed(forms):
            reads = captured.python.settings_of_now() if difference(captured.call, call) is None else ()
            if reads and {read.key for read in reads} not in vain:
                return reads
        return ()

    def ways(self, varying: Varying | None) -> tuple[Varying | None, ...]:
        """Return how a form can be had: from a trace, if there is one, and without."""
        return (varying, None) if varying is not None else (None,)

    def let_go(self, varying: Varying | None, reads: tuple[Read, ...]) -> None:
        """Let go of a trace that is not the model with what is read given to it; or of giving it, with no trace."""
        if varying is None:
            self.unset.append(reads)
        self.known = [one for one in self.known if one is not varying]

    def refuse(self, varying: Varying, note: str) -> None:
        """Let go of a trace that was not the model at some sizes; what is refused again and again is not made anew."""
        self.notes.append(note)
        self.known = [one for one in self.known if one is not varying]
        self.refused[varying.moving] += 1
        if self.refused[varying.moving] >= _MOST_REFUSED:
            self.fixed[varying.moving] = ""  # why was said

    def join(self, call: Call, captured: Captured, tensors: Sequence[Tensor], forms: Sequence[Form]) -> None:
        """Make one trace for all sizes of two forms that differ in numbers alone, where the model fixes the sizes."""
        for before, example in reversed(forms):  # the latest was tried with the most rows
            moving = _moving_among(call, tensors, captured.flags, [(before, example)])
            reason = self.fixed.get(moving) if moving is not None else None
            if moving is None or reason is None:
                continue
            found = _joined(before, example, captured, tensors, moving)
            if found is not None:
                self.known.append(found)
            elif reason:
                self.notes.append(
                    f"the {self.what} is captured anew for another {_names(call, moving)}, since {reason}"
                )
                self.fixed[moving] = ""  # once is enough
            return


Form = tuple[Captured, Sequence[Tensor]]  # a step captured at these tensors' sizes
_MOST_TRACES = 64
_MOST_REFUSED = 3
_LEAST_ROWS = 3  # the tracer takes one row for no symbol, and rows must not look like lengths


def _names(call: Call, moving: Moving) -> str:
    return "size of " + ", ".join(f"'{name}'" for name, dims in zip(call.tensor_names, moving, strict=True) if dims)


def _moving_among(
    call: Call, tensors: Sequence[Tensor], flags: tuple[Any, ...], forms: Sequence[Form]
) -> Moving | None:
    """Return the dimensions in which a batch differs from forms that are otherwise alike; None without such a form."""
    moving: Moving | None = None
    for captured, example in forms:
        if captured.flags != flags or difference(captured.call, call) is not None:
            continue
        dims = moving_dims(example, tensors, captured.batch_leaves)
        if dims is not None and any(dims):
            moving = (
                dims if moving is None else tuple(tuple(sorted({*a, *b})) for a, b in zip(moving, dims, strict=True))
            )
    return moving


def _joined(
    before: Captured, example: Sequence[Tensor], captured: Captured, tensors: Sequence[Tensor], moving: Moving
) -> Varying | None:
    """Return one trace from two captured at two sizes: numbers that follow the size are computed from it."""
    places = [(index, d) for index, dims in enumerate(moving) for d in dims]
    pairs = {(example[index].shape[d], tensors[index].shape[d]) for index, d in places}
    plain = not (
        before.opaque or captured.opaque or before.whole_loss or captured.whole_loss or before.guards or captured.guards
    )
    alike = before.out_tree == captured.out_tree and _same_constants(before.gm, captured.gm)
    if len(pairs) != 1 or not plain or not alike:
        return None
    index, dim = places[0]
    try:
        gm = align(before.gm, captured.gm, pairs.pop(), (captured.call.tensor_names[index], dim))
    except CaptureError:  # the two differ in more than numbers; each size is captured, as was said
        return None
    return Varying(replace(before, gm=gm), moving, shapes_of(example))


def _same_constants(one: fx.GraphModule, other: fx.GraphModule) -> bool:
    a, b = CONSTANTS[one], CONSTANTS[other]
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def shapes_of(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return what stands for tensors where their values do not matter: what is kept must not hold batches."""
    return tuple(torch.empty_like(tensor, device="meta") for tensor in tensors)


def capture_varying(
    model: nn.Module,
    call: Call,
    tensors: Sequence[Tensor],
    batch_leaves: Sequence[int | None],
    moving: Moving,
    loss_fn: LossFn | None,
    want: str = "loss",
    reads: Sequence[Read] = (),
) -> Varying | str:
    """Capture a step with the moving dimensions as symbols; return why not where the model fixes them.

    The step is given what is read in Python as `reads`.
    """
    used = {size for t, dims in zip(tensors, moving, strict=True) for size in (t.shape[d] for d in dims)}
    example = _other_rows(tensors, batch_leaves, used)
    if example is None:
        return "the batch has too few rows to tell rows from lengths"
    try:
        if reads:
            captured = capture_with_settings(model, call, example, batch_leaves, loss_fn, reads, want, moving)
        else:
            captured = capture(model, call, example, batch_leaves, loss_fn, want, moving=moving)
    except EfftraError as error:
        return str(error)
    if captured.opaque or captured.whole_loss or (captured.guards is not None and captured.guards.lines):
        return "it decides by values"
    if not captured.symbolic:
        return "it fixes the number of rows"
    for name, node, dims in zip(call.tensor_names, _inputs(captured.gm), moving, strict=True):
        fixed = [d for d in dims if _number(node.meta["val"].shape[d]) is not None]
        if fixed:
            return f"it fixes dimension {fixed[0]} of '{name}'"
    return Varying(captured, moving, shapes_of(example))


def _other_rows(tensors: Sequence[Tensor], batch_leaves: Sequence[int | None], used: set[int]) -> list[Tensor] | None:
    """Return the tensors with a number of rows that no moving dimension has, so that no symbol stands for both."""
    rows = next(t.shape[d] for t, d in zip(tensors, batch_leaves, strict=True) if d is not None)
    count = next((n for n in range(rows, 1, -1) if n not in used), None)
    if count is None:
        return None
    return [t if d is None else t.narrow(d, 0, count) for t, d in zip(tensors, batch_leaves, strict=True)]


def specialise(varying: Varying, call: Call, tensors: Sequence[Tensor], values: Mapping[str, Tensor]) -> Captured:
    """Return the captured step for the sizes of these tensors, rows still a symbol.

    `values` are the model's parameters and buffers by name. Raises CaptureError for sizes that an operator refuses.
    """
    general = varying.captured
    fakes = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    graph = fx.Graph()
    inputs = [_fake(fakes, tensor, rows) for tensor, rows in zip(tensors, general.batch_leaves, strict=True)]
    writer = _Writer(graph, fakes, _sizes(varying, tensors, inputs, fakes))
    leaves = iter(inputs)
    for node in general.gm.graph.nodes:
        if node.op == "placeholder":
            role = ROLE[node]
            if role.kind == "input":
                writer.copy(node, next(leaves))
            else:
                held = CONSTANTS[general.gm] if role.kind == "constant" else values
                writer.copy(node, like(fakes, held[role.name]))
        elif node.op == "output":
            graph.output(writer.operands(node.args[0], writer.nodes))
        elif node.op == "get_attr":
            writer.copy(node, getattr(general.gm, str(node.target)))
        else:
            writer.run(node)
    graph.eliminate_dead_code()
    gm = fx.GraphModule(general.gm, graph)
    OUTPUTS[gm], CONSTANTS[gm] = OUTPUTS[general.gm], CONSTANTS[general.gm]
    if not all(
        dim is None or _number(node.meta["val"].shape[dim]) is None
        for node, dim in zip(_inputs(gm), general.batch_leaves, strict=True)
    ):
        raise CaptureError("an operator fixes the number of rows at this size")
    assumed = (*general.assumed, *filter(None, [assumed_of(_inputs(gm))]))
    return replace(_numbers_apart(general, gm), gm=gm, call=call, assumed=assumed)


def _numbers_apart(general: Captured, gm: fx.GraphModule) -> Captured:
    """Take leaves of the output that have become numbers out of the graph; a capture at these sizes has them apart."""
    tree = general.out_tree
    if tree is None:
        return general
    output = next(n for n in reversed(gm.graph.nodes) if n.op == "output")
    count, results = OUTPUTS[gm].loss, list(output.args[0])
    source = iter(results[:count])
    leaves = [next(source) if m else constant for m, constant in zip(tree.moving, tree.constants, strict=True)]
    moving = tuple(isinstance(leaf, fx.Node) for leaf in leaves)
    kept = tuple(leaf for leaf, moves in zip(leaves, moving, strict=True) if moves)
    output.args = ((*kept, *results[count:]),)
    gm.recompile()
    OUTPUTS[gm] = replace(OUTPUTS[gm], loss=len(kept))
    constants = tuple(None if moves else leaf for leaf, moves in zip(leaves, moving, strict=True))
    return replace(general, out_tree=replace(tree, moving=moving, constants=constants))


def named_state(model: nn.Module, loss_fn: Any) -> dict[str, Tensor]:
    """Return the parameters and buffers that a captured step reads, by the names in its roles."""
    found: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    if isinstance(loss_fn, nn.Module):
        for name, tensor in (*loss_fn.named_parameters(), *loss_fn.named_buffers()):
            found[f"loss_fn.{name}"] = tensor
    return found


def _sizes(
    varying: Varying, tensors: Sequence[Tensor], inputs: Sequence[Tensor], fakes: FakeTensorMode
) -> Sizes | None:
    """Return what the symbols of a trace become for these inputs; None where it was joined of two, without symbols."""
    known: dict[sympy.Symbol, sympy.Expr] = {}
    environment: ShapeEnv | None = None
    rows: tuple[sympy.Symbol, int] | None = None
    captured = varying.captured
    for node, tensor, fake, dim, dims in zip(
        _inputs(captured.gm), tensors, inputs, captured.batch_leaves, varying.moving, strict=True
    ):
        for place in (*(() if dim is None else (dim,)), *dims):
            traced, size = node.meta["val"].shape[place], fake.shape[place]
            if not isinstance(traced, torch.SymInt) or not isinstance(traced.node._expr, sympy.Symbol):
                return None
            environment = traced.node.shape_env
            if place == dim:
                if not isinstance(size, torch.SymInt) or not isinstance(size_expression(size), sympy.Symbol):
                    return None
                rows = (size_expression(size), tensor.shape[place])
                known[traced.node._expr] = rows[0]
            else:
                known[traced.node._expr] = sympy.Integer(tensor.shape[place])
    if environment is None or rows is None:
        return None
    assert fakes.shape_env is not None
    assumed = {a: b for a, b in environment.replacements.items() if a not in known}
    return Sizes(fakes, fakes.shape_env, known, assumed, *rows)


def _fake(fakes: FakeTensorMode, tensor: Tensor, rows: int | None) -> Tensor:
    """Return a fake of a tensor with its rows as a symbol, the same for all tensors with as many rows."""
    sizes = [DimDynamic.DUCK if d == rows else DimDynamic.STATIC for d in range(tensor.ndim)]
    return fakes.from_tensor(tensor.detach(), symbolic_context=StatelessSymbolicContext(sizes))


class _Writer:
    """Copy nodes into a graph while fake values run through them; sizes that have become numbers are written out."""

    def __init__(self, graph: fx.Graph, fakes: FakeTensorMode, sizes: Sizes | None) -> None:
        self.graph, self.fakes, self.sizes = graph, fakes, sizes
        self.values: dict[fx.Node, Any] = {}
        self.nodes: dict[fx.Node, Any] = {}  # a node of the new graph, or a number

    def run(self, node: fx.Node) -> None:
        """Find a node's fake value; copy it unless that is a number."""
        value = self.sizes.value(node.meta.get("val")) if self.sizes is not None else None
        if value is None:
            value = self._computed(node)
        number = _number(value)
        if number is None:
            self.copy(node, value)
        else:
            self.values[node] = self.nodes[node] = number

    def _computed(self, node: fx.Node) -> Any:
        args, kwargs = self.operands((node.args, node.kwargs), self.values)
        target: Any = node.target
        try:
            with self.fakes, shapes_in_python(), torch.no_grad():
                return target(*args, **kwargs)
        except Exception as error:  # whatever an operator raises for sizes that it does not take
            raise CaptureError(f"{node.name} does not take this size: {str(error).splitlines()[0]}") from error

    def copy(self, node: fx.Node, value: Any) -> None:
        """Copy a node with this value."""
        args, kwargs = self.operands((node.args, node.kwargs), self.nodes)
        copy = self.graph.create_node(node.op, node.target, args, kwargs, node.name)
        copy.meta.update({k: v for k, v in node.meta.items() if k in ("nn_module_stack", "stack_trace")})
        if ROLE.on(node):
            ROLE[copy] = ROLE[node]
        for key in (PATH, SOURCE):
            if key.on(node):
                key[copy] = key[node]
        copy.meta["val"] = value
        self.values[node], self.nodes[node] = value, copy

    def operands(self, given: Any, known: Mapping[fx.Node, Any]) -> Any:
        """Return arguments with every node replaced."""
        return fx.node.map_arg(given, lambda n: known[n])


def _number(value: Any) -> int | float | bool | None:
    """Return a value that does not follow the rows as a plain number, None for anything else."""
    if isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) and value.node.expr.is_number:
        kind = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}[type(value)]
        number: int | float | bool = kind(value)
        return number
    return None


def _inputs(gm: fx.GraphModule) -> list[fx.Node]:
    return [n for n in gm.graph.nodes if n.op == "placeholder" and ROLE[n].kind == "input"]
