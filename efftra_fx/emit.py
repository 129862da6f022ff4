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
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, cast

import torch
from torch import fx

from efftra_fx import private
from efftra_fx.errors import EmitError
from efftra_fx.operators import Spelling, spell
from efftra_fx.reuse import find_reuse
from efftra_fx.sums import Sums, find_sums

_FILES = itertools.count()

# Written as a reshape: a real kernel may lay its result out otherwise than its fake one, so that no view exists.
_VIEWS = frozenset({torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default})


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
    groups: Sequence[str] = (),
    into: Sequence[int] | None = None,
    overwrite: bool = False,
    tells: bool = False,
    boxed: bool = False,
) -> Emitted:
    """Generate, compile and return the function that computes `gm`.

    Without `takes` the function takes one argument a placeholder; with it, one sequence a
    group, of that many placeholders each; `groups` names the groups. A group flagged in `consumes`
    must be a list, and is emptied, so that its values are freed at their last use and not when
    the caller returns. Without `gives` it returns a tuple of the graph's outputs (or the value
    alone if the graph returns one bare value); with it, one list a group, of that many outputs
    each (the only group comes bare).

    With `into` the function takes one more argument, tensors by position, one for each of the
    outputs that `into` lists by index: these outputs are added into them, or overwrite
    them with `overwrite`, and are returned as those very tensors. Each is asked for no sooner than
    something is written there. A matrix product is added
    by the product itself, without a tensor of its own. With `tells` one more argument follows, a
    function that is told the position of each of these tensors as soon as it is complete.

    With `boxed` every operator is called through its boxed overload and none writes over an
    operand: slower, for comparison.

    The function is re-entrant and may run in several threads at once.

    Raises `EmitError` for a graph that is not flat or whose groups don't add up.
    """
    writer = _Writer(gm, name, find_sums(gm.graph, into or (), overwrite), into is not None, tells, boxed)
    source = writer.write(takes, gives, consumes, groups)
    file = f"<efftra {name} {next(_FILES)}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    exec(compile(source, file, "exec"), writer.names)
    function = cast(Emitted, writer.names[name])
    function.source = source
    return function


class _Writer:
    """The text of one function and the global names that it needs."""

    def __init__(self, gm: fx.GraphModule, name: str, sums: Sums, adds: bool, tells: bool, boxed: bool) -> None:
        self.gm = gm
        self.name = name
        self.sums = sums
        self.adds = adds
        self.tells = tells
        self.boxed = boxed
        self.reuse = {} if boxed else find_reuse(gm.graph)
        self.names: dict[str, Any] = {}
        self.constants: dict[int, str] = {}
        self.taken = {node.name for node in gm.graph.nodes} | {name, *sums.buffers}
        self.unpacked: set[fx.Node] = set()  # getitem nodes that their tuple's statement has assigned

    def write(
        self,
        takes: Sequence[int] | None,
        gives: Sequence[int] | None,
        consumes: Sequence[bool],
        groups: Sequence[str],
    ) -> str:
        nodes = list(self.gm.graph.nodes)
        inputs = [node for node in nodes if node.op == "placeholder"]
        hints = [*groups, *(f"group_{index}" for index in range(len(groups), len(takes or ())))]
        names = [self.fresh(hint) for hint in hints]
        buffers = self.fresh("buffers")
        tell = self.fresh("tell")
        arguments = [node.name for node in inputs] if takes is None else list(names)
        arguments += [buffers] if self.adds else []
        arguments += [tell] if self.tells else []
        body = [] if takes is None else _unpack(inputs, takes, names, consumes)
        last = _last_uses(nodes, self.sums)
        module = ""
        for node in nodes:
            if node.op == "output":
                body.append(f"return {self.result(node.args[0], gives)}")
                continue
            if (here := _module_of(node)) and here != module and node.op == "call_function":
                module = here
                body.append(f"# {module}")
            body += [f"{self.sums.buffers[index]} = {buffers}[{index}]" for index in self.sums.starts.get(node, ())]
            body += [*self.statement(node), *_delete(last.get(node, []))]
            if self.tells:
                body += [f"{tell}({index})" for index in self.sums.finals.get(node, ())]
        guard = self.constant(private.below_autograd, "below_autograd")
        lines = [f"def {self.name}({', '.join(arguments)}):", f"    with {guard}():"]
        return "\n".join([*lines, *(f"        {line}" for line in body)]) + "\n"

    def statement(self, node: fx.Node) -> Iterator[str]:
        """Yield the lines that compute a node and add it where it is to be added."""
        if node.op == "get_attr":
            value = self.gm
            for part in str(node.target).split("."):
                value = getattr(value, part)
            yield f"{node.name} = {self.constant(value, str(node.target))}"
        elif node.op not in ("call_function", "placeholder"):
            raise EmitError(f"node {node.name} is a {node.op}, expected a graph of functions; inline it first")
        elif node in self.sums.dissolved:
            return
        elif node in self.sums.inlined:
            yield self.sums.inlined[node](self)
            return
        elif node.op == "call_function" and node not in self.unpacked:
            yield self.assignment(node)
        for buffer, first in self.sums.added.get(node, ()):
            yield f"{buffer}.{'copy_' if first else 'add_'}({node.name})"

    def assignment(self, node: fx.Node) -> str:
        if node.target is operator.getitem:
            return f"{node.name} = {self.text(node.args[0])}[{self.text(node.args[1])}]"
        if (items := _items(node)) is None:
            return f"{node.name} = {self.call(node)}"
        self.unpacked.update(item for item in items if item is not None)
        if sum(item is not None for item in items) == 1:
            [(index, only)] = [(index, item) for index, item in enumerate(items) if item is not None]
            return f"{only.name} = {self.call(node)}[{index}]"
        unused = [self.fresh("unused") if item is None else "" for item in items]
        names = [item.name if item is not None else spare for item, spare in zip(items, unused, strict=True)]
        forget = [spare for spare in unused if spare]
        return f"{', '.join(names)} = {self.call(node)}" + (f"; del {', '.join(forget)}" if forget else "")

    def call(self, node: fx.Node) -> str:
        """Return the expression that calls a node's function."""
        spelling = Spelling(cast(Callable[..., Any], node.target))
        kwargs = dict(node.kwargs)
        over = self.reuse.get(node)
        if over is not None and over.overload is not None:
            kwargs[over.out] = node.args[over.operand]
            spelling = _spell(over.overload, node.args, kwargs)
        elif over is not None:
            first, *rest = (self.text(node.args[index]) for index in _first(over.operand, len(node.args)))
            rest += [f"{key}={self.text(value)}" for key, value in node.kwargs.items()]
            return f"{first}.{over.method}({', '.join(rest)})"
        elif node.target in _VIEWS and not kwargs and len(node.args) == 2:
            spelling = Spelling(None, "reshape", spread=isinstance(node.args[1], (list, tuple)) and bool(node.args[1]))
        elif isinstance(node.target, torch._ops.OpOverload):
            boxed = Spelling(private.boxed(node.target))
            spelling = boxed if self.boxed else _spell(node.target, node.args, kwargs)
        texts = [self.text(value) for value in spelling.positional(node.args)]
        texts += [f"{key}={self.text(value)}" for key, value in kwargs.items()]
        if spelling.function is None:
            return f"{texts[0]}.{spelling.method}({', '.join(texts[1:])})"
        return f"{self.constant(spelling.function, _function_name(node.target))}({', '.join(texts)})"

    def result(self, value: Any, gives: Sequence[int] | None) -> str:
        if not isinstance(value, (list, tuple)):
            if gives is None:
                return self.text(value)
            value = (value,)
        names = [self.sums.results.get(index) or self.text(item) for index, item in enumerate(value)]
        if gives is None:
            return f"({', '.join(names)}{',' if len(names) == 1 else ''})"
        if len(names) != sum(gives):
            raise EmitError(f"graph {self.name} returns {len(names)} values, expected {sum(gives)} for {list(gives)}")
        rest = iter(names)
        return ", ".join(f"[{', '.join(itertools.islice(rest, size))}]" for size in gives)

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
        if id(value) not in self.constants:
            name = self.fresh(hint)
            self.names[name] = value
            self.constants[id(value)] = name
        return self.constants[id(value)]

    def fresh(self, hint: str) -> str:
        """Return a name that nothing else has."""
        stem = "".join(char if char.isalnum() else "_" for char in hint).strip("_") or "constant"
        stem = f"_{stem}" if stem[0].isdigit() else stem
        names = (stem if number == 1 else f"{stem}_{number}" for number in itertools.count(1))
        name = next(name for name in names if name not in self.taken)
        self.taken.add(name)
        return name


def _unpack(
    inputs: Sequence[fx.Node], takes: Sequence[int], groups: Sequence[str], consumes: Sequence[bool]
) -> list[str]:
    if sum(takes) != len(inputs):
        raise EmitError(f"the graph has {len(inputs)} placeholders, expected {sum(takes)} for groups {list(takes)}")
    lines = []
    flat = iter(inputs)
    for group, size, consumed in itertools.zip_longest(groups, takes, consumes[: len(takes)], fillvalue=False):
        names = ", ".join(node.name for node in itertools.islice(flat, int(size)))
        lines.append(f"[{names}] = {group}")
        lines += [f"{group}.clear()"] if consumed else []
    return lines


def _last_uses(nodes: Sequence[fx.Node], sums: Sums) -> dict[fx.Node, list[fx.Node]]:
    """Map each node to the named values that nobody needs after its statements."""
    seen: set[fx.Node] = set()
    last: dict[fx.Node, list[fx.Node]] = {}
    for node in reversed(nodes):
        if node.op == "output":
            flat = node.args[0] if isinstance(node.args[0], (list, tuple)) else [node.args[0]]
            seen.update(v for i, v in enumerate(flat) if isinstance(v, fx.Node) and i not in sums.results)
            continue
        if node in sums.dissolved:
            continue
        named = node not in sums.inlined and (node.target is operator.getitem or _items(node) is None)
        values = [node] if named and node not in seen else []
        values += [value for value in node.all_input_nodes if value not in seen and _items(value) is None]
        seen.update(values)
        if values:
            last[node] = values
    return last


def _items(node: fx.Node) -> list[fx.Node | None] | None:
    """Return the getitem nodes of a tuple by index, if these are all that use it and its length is known."""
    value = node.meta.get("val")
    if node.op != "call_function" or not isinstance(value, (tuple, list)) or not node.users:
        return None
    items: list[fx.Node | None] = [None] * len(value)
    for user in node.users:
        if user.target is not operator.getitem or not isinstance(user.args[1], int) or items[user.args[1]] is not None:
            return None
        items[user.args[1]] = user
    return items


def _first(index: int, length: int) -> list[int]:
    """Return the indices below `length`, with `index` put first."""
    return [index, *(other for other in range(length) if other != index)]


def _delete(values: Sequence[fx.Node]) -> list[str]:
    return [f"del {', '.join(value.name for value in values)}"] if values else []


def _spell(overload: torch._ops.OpOverload, args: Any, kwargs: Any) -> Spelling:
    """Return how to write a call; without the kinds of its arguments it is written boxed."""
    try:
        plain, named = fx.map_arg((args, kwargs), lambda value: value.meta["val"])
    except KeyError:
        return Spelling(private.boxed(overload))
    return spell(overload, plain, named)


def _module_of(node: fx.Node) -> str:
    """Return the path of the module that a node comes from, if the graph says so."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [entry[0] for entry in stack.values() if isinstance(entry, tuple)]
    return str(paths[-1]).replace("\n", " ") if paths else ""


def _function_name(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return str(target).removeprefix("aten.").removesuffix(".default")
    return getattr(target, "__name__", str(target))
