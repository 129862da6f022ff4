"""Any model to a functional graph of the whole training step.

The graph computes `loss = loss_fn(model(*args, **kwargs), target)`. Its placeholders
are the parameters, buffers, constants and inputs, each with a `ROLE`; its outputs are
the loss and then the new values of the buffers that the forward writes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from efftra_fx.capture_regions import inline_grad_regions
from efftra_fx.containers import Tree, take_apart
from efftra_fx.errors import CaptureError, LossError
from efftra_fx.meta import CONSTANTS, OUTPUTS, PATH, ROLE, SOURCE, Outputs, Role
from efftra_fx.signature import Call, distinct

LossFn = Callable[..., Any]

_CHECKS = frozenset(
    {
        torch.ops.aten._assert_scalar.default,
        torch.ops.aten._assert_tensor_metadata.default,
        torch.ops.aten.sym_constrain_range.default,
        torch.ops.aten.sym_constrain_range_for_size.default,
        torch.ops.aten._assert_async.msg,
        torch.ops.aten._assert_async.default,
    }
)


@dataclass(frozen=True)
class Captured:
    """A captured computation.

    `gm` has placeholders with roles; `batch_leaves` says for each tensor leaf of the
    call along which dimension it splits by sample (None: it does not); `symbolic`
    says whether the number of rows is a symbol in the graph; `out_tree` is the
    structure of a captured model output (evaluation graphs).
    """

    gm: fx.GraphModule
    call: Call
    batch_leaves: tuple[int | None, ...]
    symbolic: bool
    out_tree: OutputTree | None = None


@dataclass(frozen=True)
class OutputTree:
    """How a model's output is put together: the leaves that the graph computes, and those that are constants."""

    tree: Tree
    moving: tuple[bool, ...]
    constants: tuple[Any, ...]

    def rebuild(self, values: Sequence[Any]) -> Any:
        """Return the output with these values at the leaves that the graph computes."""
        source = iter(values)
        flat = [next(source) if m else constant for m, constant in zip(self.moving, self.constants, strict=True)]
        return self.tree.rebuild(flat)


class _Step(nn.Module):
    def __init__(
        self, model: nn.Module, loss_fn: LossFn | None, call: Call, want: str, note_tree: Callable[[OutputTree], None]
    ) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn
        self.call_structure = call
        self.want = want
        self.note_tree = note_tree  # a tracer takes back what forward writes on modules, so it is told outside

    def forward(self, tensors: list[Tensor]) -> Any:
        args, kwargs, target = self.call_structure.rebuild(tensors)
        output = self.model(*args, **kwargs)
        if self.want == "loss":
            return loss_of(output, self.loss_fn, target, self.call_structure.has_target)
        leaves, tree = take_apart(output)
        flat = [leaf for _, leaf in leaves]
        moving = tuple(isinstance(leaf, (Tensor, torch.SymInt)) for leaf in flat)
        constants = tuple(None if m else leaf for leaf, m in zip(flat, moving, strict=True))
        self.note_tree(OutputTree(tree, moving, constants))
        return tuple(leaf for leaf, m in zip(flat, moving, strict=True) if m)


def loss_of(output: Any, loss_fn: LossFn | None, target: Any, has_target: bool) -> Tensor:
    """Return the scalar loss of a model output, in the ways in which a user may give it.

    Raises LossError where there is none or it is not a scalar tensor.
    """
    if loss_fn is not None:
        loss = loss_fn(output, target) if has_target else loss_fn(output)
        name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
    else:
        loss, name = _own_loss(output), "the model"
    if not isinstance(loss, Tensor):
        raise LossError(f"{name} returned {type(loss).__name__}, expected a scalar tensor as the loss")
    if loss.numel() != 1:
        raise LossError(
            f"{name} returned a loss of shape {list(loss.shape)}, expected a scalar; reduce it, for instance by .mean()"
        )
    return loss.reshape(())


def _own_loss(output: Any) -> Any:
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping) and output.get("loss") is not None:
        return output["loss"]
    loss = getattr(output, "loss", None)
    if loss is None:
        raise LossError(
            f"the model returned {type(output).__name__} without a loss; "
            "give loss_fn=, or the labels with which the model computes its own loss"
        )
    return loss


def capture(
    model: nn.Module,
    call: Call,
    tensors: Sequence[Tensor],
    batch_leaves: Sequence[int | None],
    loss_fn: LossFn | None = None,
    want: str = "loss",
) -> Captured:
    """Capture the step (`want="loss"`) or the model's output (`want="output"`) as a graph.

    Leaves with a batch dimension get a symbolic size there; where the model fixes that
    size, the graph is captured at the size of the example and `symbolic` is False.
    Raises CaptureError where the model cannot be captured.
    """
    trees: list[OutputTree] = []
    step = _Step(model, loss_fn, call, want, trees.append)
    step.training = model.training
    program = _export(step, distinct(tensors), batch_leaves)
    gm = _plain_graph(program, step)
    symbolic = all(
        dim is None or not isinstance(node.meta["val"].shape[dim], int)
        for node, dim in zip(_inputs(gm), batch_leaves, strict=True)
    )
    return Captured(gm, call, tuple(batch_leaves), symbolic, trees[-1] if trees else None)


def _export(step: _Step, tensors: tuple[Tensor, ...], batch_leaves: Sequence[int | None]) -> ExportedProgram:
    auto: Any = Dim.AUTO
    shapes = [None if dim is None else {dim: auto} for dim in batch_leaves]
    modes = {name: module.training for name, module in step.model.named_modules()}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.export.export(step, (list(tensors),), dynamic_shapes=(shapes,), strict=False)
            inline_grad_regions(program.graph_module)
            return program.run_decompositions({})
    except LossError:
        raise
    except Exception as error:
        if isinstance(error.__cause__, LossError):
            raise error.__cause__ from None
        raise CaptureError(_why(error)) from error
    finally:
        for name, module in step.model.named_modules():
            module.training = modes[name]


def _why(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    first = text.splitlines()[0]
    place = _user_line(error)
    if type(error).__name__.startswith("GuardOnDataDependent") or "data-dependent" in text:
        first = f"it branches on, or takes a size from, the value of a tensor ({first.split('. ')[0]})"
        remedy = "replace the branch by torch.where, or move it out of forward"
    else:
        remedy = "see the cause above"
    return f"the model cannot be captured as a graph: {first}{place}; {remedy}"


def _user_line(error: BaseException) -> str:
    place = ""
    trace = error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if "/torch/" not in file and "/efftra_fx/" not in file and not file.startswith("<"):
            place = f" at {file}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place


def _plain_graph(program: ExportedProgram, step: _Step) -> fx.GraphModule:
    """Return the program's graph with roles on placeholders, tied parameters merged and checks dropped."""
    gm = program.graph_module
    signature = program.graph_signature
    names = _canonical_names(step)
    constants: dict[str, Tensor] = {}
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    first: dict[tuple[str, str], fx.Node] = {}
    leaf_names = iter(step.call_structure.tensor_names)
    for node, spec in zip(placeholders, signature.input_specs, strict=True):
        role = _role(spec, names, leaf_names, program, constants)
        if role.kind != "input" and (role.kind, role.name) in first:
            node.replace_all_uses_with(first[role.kind, role.name])
            gm.graph.erase_node(node)
            continue
        first[role.kind, role.name] = node
        ROLE[node] = role
    mutated = [
        (spec.target, spec.kind)
        for spec in signature.output_specs
        if spec.kind in (OutputKind.BUFFER_MUTATION, OutputKind.USER_INPUT_MUTATION)
    ]
    for target, kind in mutated:
        if kind is OutputKind.USER_INPUT_MUTATION:
            raise CaptureError(f"the model writes into its input '{target}' in place; clone it in forward first")
    output = next(n for n in reversed(gm.graph.nodes) if n.op == "output")
    values = list(output.args[0])
    news, results = values[: len(mutated)], values[len(mutated) :]
    output.args = ((*results, *news),)
    _drop_checks(gm.graph)
    _allow_copies(gm.graph)
    _note_places(gm.graph)
    gm.graph.eliminate_dead_code()
    clean = fx.GraphModule(gm, gm.graph)
    clean.meta.clear()
    OUTPUTS[clean] = Outputs(len(results), tuple(names.get(str(t), _bare(str(t))) for t, _ in mutated))
    CONSTANTS[clean] = constants
    clean.recompile()
    return clean


def _canonical_names(step: _Step) -> dict[str, str]:
    """Map every name in the traced module to the model's own first name of the same tensor."""
    first: dict[int, str] = {}
    names: dict[str, str] = {}
    for items in (step.named_parameters(remove_duplicate=False), step.named_buffers(remove_duplicate=False)):
        for name, tensor in items:
            names[name] = first.setdefault(id(tensor), _bare(name))
    return names


def _bare(name: str) -> str:
    return name.removeprefix("model.")


def _role(
    spec: Any, names: Mapping[str, str], leaf_names: Any, program: ExportedProgram, constants: dict[str, Tensor]
) -> Role:
    kind, target = spec.kind, str(spec.target)
    if kind is InputKind.PARAMETER:
        return Role("parameter", names[target], bool(program.state_dict[target].requires_grad))
    if kind is InputKind.BUFFER:
        return Role("buffer", names[target])
    if kind is InputKind.USER_INPUT:
        return Role("input", next(leaf_names))
    if kind is InputKind.CONSTANT_TENSOR:
        constants[target] = program.constants[target]
        return Role("constant", target)
    raise CaptureError(f"the model holds a {kind.name.lower()} '{target}', which has no place in a graph of tensors")


def _allow_copies(graph: fx.Graph) -> None:
    """Let views copy where they must: an operator may lay its real result out in another way than its traced one."""
    for node in graph.nodes:
        if node.target in (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default):
            node.target = torch.ops.aten.reshape.default


def _drop_checks(graph: fx.Graph) -> None:
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and node.target in _CHECKS:
            graph.erase_node(node)


def _note_places(graph: fx.Graph) -> None:
    """Write module path and user's source line on every node under this package's own keys."""
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        stack = node.meta.get("nn_module_stack") or {}
        path = next((_bare(p) for p, _ in reversed(list(stack.values())) if p), "")
        PATH[node] = "" if path == "model" else path
        lines = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines()]
        users = [line for line in lines if line.startswith("File") and "/torch/" not in line]
        if users:
            SOURCE[node] = users[-1]


def _inputs(gm: fx.GraphModule) -> list[fx.Node]:
    return [n for n in gm.graph.nodes if n.op == "placeholder" and ROLE[n].kind == "input"]
