"""Turn a flat graph into one flat Python function.

The function calls each operator directly, in graph order, and deletes each value after
its last use, so that memory is freed as early as the graph allows. It runs below
autograd: it records nothing, and what it returns are normal tensors.
"""

from __future__ import annotations

import itertools
import linecache
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import torch
from torch import fx

from efftra_fx import private
from efftra_fx.errors import EmitError
from efftra_fx.operators import Spelling, spell

_FILES = itertools.count()


class Emitted(Protocol):
    """A generated function; `source` is its text."""

    source: str

    def __call__(self, *args: Any) -> Any: ...


def emit(
    gm: fx.GraphModule,
    *,
    name: str = "run",
    takes: Sequence[int] | None = None,
    gives: Sequence[int] | None = None,
    consumes: Sequence[bool] = (),
) -> Emitted:
    """Generate, compile and return the function that computes `gm`.

    Without `takes` the function takes one argument a placeholder; with it, one sequence a
    group, of that many placeholders each. A group flagged in `consumes` must be a list, and is
    emptied, so that its values are freed at their last use and not when the caller returns. Without
    `gives` it returns a tuple of the graph's outputs (or the value alone if the graph returns
    one bare value); with it, a tuple of lists of that many outputs each (a single
    group comes bare).

    The function is re-entrant and may run in several threads at once.

    Raises `EmitError` for a graph that is not flat or whose groups don't add up.
    """
    writer = _Writer(gm, name)
    source = writer.write(takes, gives, consumes)
    file = f"<efftra {name} {next(_FILES)}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    exec(compile(source, file, "exec"), writer.names)
    function = cast(Emitted, writer.names[name])
    function.source = source
    return function


class _Writer:
    """The text of one function and the global names that it needs."""

    def __init__(self, gm: fx.GraphModule, name: str) -> None:
        self.gm = gm
        self.name = name
        self.names: dict[str, Any] = {}
        self.constants: dict[int, str] = {}
        self.taken = {node.name for node in gm.graph.nodes} | {name, "group"}

    def write(self, takes: Sequence[int] | None, gives: Sequence[int] | None, consumes: Sequence[bool]) -> str:
        nodes = list(self.gm.graph.nodes)
        inputs = [node for node in nodes if node.op == "placeholder"]
        last = _last_uses(nodes)
        arguments = [node.name for node in inputs] if takes is None else [f"group{i}" for i in range(len(takes))]
        self.taken.update(arguments)
        guard = self.constant(private.below_autograd, "below_autograd")
        lines = [f"def {self.name}({', '.join(arguments)}):", f"    with {guard}():"]
        if takes is not None:
            lines += [f"        {line}" for line in _unpack(inputs, takes, consumes)]
        lines += [f"        {line}" for line in _delete([node for node in inputs if not node.users])]
        for node in nodes:
            if node.op == "placeholder":
                continue
            if node.op == "output":
                lines.append(f"        return {self.result(node.args[0], gives)}")
                continue
            lines += [f"        {line}" for line in (self.statement(node), *_delete(last.get(node, [])))]
        return "\n".join(lines) + "\n"

    def statement(self, node: fx.Node) -> str:
        if node.op == "get_attr":
            value = self.gm
            for part in str(node.target).split("."):
                value = getattr(value, part)
            return f"{node.name} = {self.constant(value, str(node.target))}"
        if node.op != "call_function":
            raise EmitError(f"node {node.name} is a {node.op}, expected a graph of functions; inline it first")
        if node.target is operator.getitem:
            return f"{node.name} = {self.text(node.args[0])}[{self.text(node.args[1])}]"
        return f"{node.name} = {self.call(node)}"

    def call(self, node: fx.Node) -> str:
        """Return the expression that calls a node's function."""
        spelling = Spelling(cast(Callable[..., Any], node.target))
        if isinstance(node.target, torch._ops.OpOverload):
            spelling = _spell(node)
        args = list(node.args)
        texts = [self.text(value) for value in ([*args[:-1], *args[-1]] if spelling.spread else args)]  # type: ignore[misc]
        texts += [f"{key}={self.text(value)}" for key, value in node.kwargs.items()]
        if spelling.function is None:
            return f"{texts[0]}.{spelling.method}({', '.join(texts[1:])})"
        return f"{self.constant(spelling.function, _function_name(node.target))}({', '.join(texts)})"

    def result(self, value: Any, gives: Sequence[int] | None) -> str:
        if gives is None:
            return self.text(tuple(value) if isinstance(value, (list, tuple)) else value)
        if not isinstance(value, (list, tuple)) or len(value) != sum(gives):
            found = len(value) if isinstance(value, (list, tuple)) else 1
            raise EmitError(f"graph {self.name} returns {found} values, expected {sum(gives)} for groups {list(gives)}")
        flat = iter(value)
        groups = [self.text(list(itertools.islice(flat, size))) for size in gives]
        return ", ".join(groups)

    def text(self, value: Any) -> str:
        """Return the expression for one argument."""
        match value:
            case fx.Node():
                return value.name
            case tuple():
                return f"({', '.join(self.text(item) for item in value)}{',' if len(value) == 1 else ''})"
            case list():
                return f"[{', '.join(self.text(item) for item in value)}]"
            case dict():
                return f"{{{', '.join(f'{key!r}: {self.text(item)}' for key, item in value.items())}}}"
            case slice():
                return f"slice({self.text(value.start)}, {self.text(value.stop)}, {self.text(value.step)})"
            case None | bool() | int() | str():
                return repr(value)
            case float() if math.isfinite(value):
                return repr(value)
            case _:
                return self.constant(value, str(value).rpartition(".")[2])

    def constant(self, value: Any, hint: str) -> str:
        """Return the global name under which the function sees `value`."""
        if id(value) in self.constants:
            return self.constants[id(value)]
        stem = "".join(char if char.isalnum() else "_" for char in hint).strip("_") or "constant"
        stem = f"_{stem}" if stem[0].isdigit() else stem
        name = stem
        for number in itertools.count(2):
            if name not in self.taken:
                break
            name = f"{stem}_{number}"
        self.taken.add(name)
        self.names[name] = value
        self.constants[id(value)] = name
        return name


def _unpack(inputs: Sequence[fx.Node], takes: Sequence[int], consumes: Sequence[bool]) -> list[str]:
    if sum(takes) != len(inputs):
        raise EmitError(f"the graph has {len(inputs)} placeholders, expected {sum(takes)} for groups {list(takes)}")
    lines = []
    flat = iter(inputs)
    for index, size in enumerate(takes):
        names = ", ".join(node.name for node in itertools.islice(flat, size))
        lines.append(f"[{names}] = group{index}")
        if index < len(consumes) and consumes[index]:
            lines.append(f"group{index}.clear()")
    return lines


def _last_uses(nodes: Sequence[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """Map each node to the values that nobody needs after it."""
    seen: set[fx.Node] = set()
    last: dict[fx.Node, list[fx.Node]] = {}
    for node in reversed(nodes):
        values = [node] if node.op == "call_function" and not node.users else []
        values += [value for value in node.all_input_nodes if value not in seen]
        seen.update(values)
        if values and node.op != "output":
            last[node] = values
    return last


def _delete(values: Sequence[fx.Node]) -> list[str]:
    return [f"del {', '.join(value.name for value in values)}"] if values else []


def _spell(node: fx.Node) -> Spelling:
    """Return how to write a node's call; without the kinds of its arguments it is written boxed."""
    overload = cast(torch._ops.OpOverload, node.target)
    if any("val" not in value.meta for value in node.all_input_nodes):
        return Spelling(private.boxed(overload))
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda value: value.meta["val"])
    return spell(overload, args, kwargs)


def _function_name(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return str(target).removeprefix("aten.").removesuffix(".default")
    return getattr(target, "__name__", str(target))
