"""From what an exporter gives to a graph with roles on its placeholders, tied parameters merged and checks dropped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.export.graph_signature import InputKind
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from efftra_fx.capture_export import Exported
from efftra_fx.capture_guards import Asked, AsksValuesError, Guards, depends_on_chance, split_guards
from efftra_fx.capture_normal import make_normal
from efftra_fx.errors import CaptureError
from efftra_fx.meta import CONSTANTS, OUTPUTS, PATH, ROLE, SOURCE, Outputs, Role
from efftra_fx.places import is_user_file
from efftra_fx.step_module import Step
from efftra_fx.walks import ancestors


class WritesParametersError(CaptureError):
    """Raise where forward writes parameters, which no other way of capturing it would mend."""


class WritesInputsError(CaptureError):
    """Raise where forward writes into what it was given, which no other way of capturing it would mend."""


def plain_graph(exported: Exported, step: Step, asked: Sequence[Asked]) -> tuple[fx.GraphModule, Guards | None]:
    """Return the exported graph with roles on placeholders, tied parameters merged and checks dropped.

    The last results are those that were `asked`; they become the guards.
    """
    gm = exported.gm
    names = _canonical_names(step)
    constants: dict[str, Tensor] = {}
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    first: dict[tuple[str, str], fx.Node] = {}
    leaf_names = iter(step.call_structure.tensor_names)
    given = iter([tensor for one in step.settings for tensor in one.tensors])
    for node, (kind, target) in zip(placeholders, exported.placeholders, strict=True):
        role = _role(kind, target, names, leaf_names, exported, constants) or _given(next(given), constants)
        if role.kind != "input" and (role.kind, role.name) in first:
            node.replace_all_uses_with(first[role.kind, role.name])
            gm.graph.erase_node(node)
            continue
        first[role.kind, role.name] = node
        ROLE[node] = role
    output = next(n for n in reversed(gm.graph.nodes) if n.op == "output")
    mutated = [(placeholders[number], *exported.placeholders[number]) for number in exported.written]
    for (node, kind, target), value in zip(mutated, list(output.args[0]), strict=False):
        if kind is InputKind.USER_INPUT:
            name = ROLE[node].name
            raise WritesInputsError(
                f"the model writes into its input '{name}' in place{_line_of(value)}; clone it in forward first, or "
                f"compile a module around the model whose forward gives it {name}.clone()"
            )
        if kind is InputKind.PARAMETER:
            raise WritesParametersError(writes_parameter(names.get(target, _bare(target)), value))
    _lift(gm, constants)
    make_normal(gm.graph)
    values = list(output.args[0])
    news, results = values[: len(mutated)], values[len(mutated) :]
    _note_places(gm.graph, step)
    written = tuple(names.get(target, _bare(target)) for _, _, target in mutated)
    results, guards = _split_guards(gm, results, asked, written, constants)
    output.args = ((*results, *news),)
    gm.graph.eliminate_dead_code()
    _refuse_dynamic(gm)
    clean = fx.GraphModule(gm, gm.graph)
    clean.meta.clear()
    OUTPUTS[clean] = Outputs(len(results), written)
    CONSTANTS[clean] = constants
    clean.recompile()
    return clean, guards


def writes_parameter(name: str, value: fx.Node | None = None) -> str:
    return (
        f"forward writes parameter '{name}' in place{_line_of(value)}, which every part of the batch would do; where "
        "it does so at one call alone, call the model once before compile, and else write it between steps (under "
        "torch.no_grad(), into program.parameters()), or make it a buffer if nothing trains it"
    )


def _line_of(value: Any) -> str:
    """Say at which of the user's lines a node was computed; nothing where that is not known."""
    trace = value.meta.get("stack_trace") or "" if isinstance(value, fx.Node) else ""
    lines = [line.strip() for line in trace.splitlines()]
    users = [line for line in lines if line.startswith("File") and is_user_file(line.split('"')[1])]
    return f" at {users[-1]}" if users else ""


def _lift(gm: fx.GraphModule, constants: dict[str, Tensor]) -> None:
    """Make placeholders of the constants that a graph holds."""
    for node in list(gm.graph.nodes):
        value = getattr(gm, str(node.target)) if node.op == "get_attr" else None
        if not isinstance(value, Tensor):
            continue
        with gm.graph.inserting_before(next(iter(gm.graph.nodes))):
            placeholder = gm.graph.placeholder(f"c_{node.target}")
        placeholder.meta = dict(node.meta)
        ROLE[placeholder] = Role("constant", placeholder.name)
        constants[placeholder.name] = value
        node.replace_all_uses_with(placeholder)
        gm.graph.erase_node(node)


def _split_guards(
    gm: fx.GraphModule,
    results: list[Any],
    asked: Sequence[Asked],
    written: Sequence[str],
    constants: Mapping[str, Tensor],
) -> tuple[list[Any], Guards | None]:
    """Take the guards out of the results; raises AsksValuesError for questions that inputs alone do not answer."""
    if not asked:
        return results, None
    count = len(results) - len(asked)
    CONSTANTS[gm] = constants
    guards, bound = split_guards(gm, results[count:], asked, written)
    if bound:
        line = next(one.line for node, one in zip(results[count:], asked, strict=True) if node is bound[0])
        error = AsksValuesError(
            "the model cannot be captured as a graph: it branches on, or takes a size from, a value that depends on "
            f"{_origin(bound[0])} at {line}; replace the branch by torch.where (the number by the tensor), or put that "
            "part into a module of its own"
        )
        error.paths = _paths(bound[0])
        raise error
    return results[:count], guards


def _origin(node: fx.Node) -> str:
    """Say what makes a value another one at each step."""
    if depends_on_chance(node):
        return "random numbers"
    roles = [ROLE[n] for n in ancestors([node]) if n.op == "placeholder"]
    buffers = [f"'{role.name}'" for role in roles if role.kind == "buffer"]
    if buffers and not any(role.kind == "parameter" for role in roles):
        return f"buffer {', '.join(buffers)}, which the step itself writes,"
    return "parameters"


def _refuse_dynamic(gm: fx.GraphModule) -> None:
    """Raise AsksValuesError where a shape depends on values."""
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        for one in value if isinstance(value, (tuple, list)) else (value,):
            sizes = one.shape if isinstance(one, Tensor) else (one,)
            if any(isinstance(s, torch.SymInt) and free_unbacked_symbols(s) for s in sizes):
                line = SOURCE.get(node) or "a line that is not known"
                error = AsksValuesError(
                    f"the model cannot be captured as a graph: the shape of {node.name} depends on values at {line}; "
                    "use a mask (torch.where, multiplication) in place of a selection, or move it into loss_fn"
                )
                error.paths = _paths(node)
                raise error


def _paths(node: fx.Node) -> tuple[str, ...]:
    """Return the modules that a node was computed in, the innermost first."""
    stack = node.meta.get("nn_module_stack") or {}
    return tuple(_bare(path) for path, _ in reversed(list(stack.values())) if path and path != "model")


def _canonical_names(step: Step) -> dict[str, str]:
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
    kind: InputKind,
    target: str,
    names: Mapping[str, str],
    leaf_names: Iterator[str],
    exported: Exported,
    constants: dict[str, Tensor],
) -> Role | None:
    """Return what a placeholder stands for; None for what comes after the call's own tensors."""
    if kind is InputKind.PARAMETER:
        return Role("parameter", names[target], target in exported.trained)
    if kind is InputKind.BUFFER:
        return Role("buffer", names[target])
    if kind is InputKind.USER_INPUT:
        name = next(leaf_names, None)
        return None if name is None else Role("input", name)
    if kind is InputKind.CONSTANT_TENSOR:
        constants[target] = exported.constants[target]
        return Role("constant", target)
    raise CaptureError(f"the model holds a {kind.name.lower()} '{target}', which has no place in a graph of tensors")


def _given(tensor: Tensor, constants: dict[str, Tensor]) -> Role:
    """Return the role of a tensor that stands for what is read in Python."""
    name = f"setting_{len(constants)}"
    constants[name] = tensor
    return Role("constant", name)


def _note_places(graph: fx.Graph, step: Step) -> None:
    """Write module path and user's source line on every node under this package's own keys.

    Outside of modules the exporter keeps no lines; what is computed there belongs to the loss function.
    """
    code = getattr(step.loss_fn, "__code__", None)
    loss = f'File "{code.co_filename}", line {code.co_firstlineno}, in {code.co_name}' if code is not None else ""
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        stack = node.meta.get("nn_module_stack") or {}
        path = next((_bare(p) for p, _ in reversed(list(stack.values())) if p), "")
        PATH[node] = "" if path == "model" else path
        lines = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines()]
        users = [line for line in lines if line.startswith("File") and is_user_file(line.split('"')[1])]
        if users or loss:
            SOURCE[node] = users[-1] if users else loss


def inputs_of(gm: fx.GraphModule, kind: str = "input") -> list[fx.Node]:
    """Return the placeholders of a graph that stand for its inputs, or for those of another kind."""
    return [n for n in gm.graph.nodes if n.op == "placeholder" and ROLE[n].kind == kind]
