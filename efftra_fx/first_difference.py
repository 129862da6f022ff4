"""Where a captured graph first leaves the eager model: the node, its operator, module and line.

Only when a check has failed, eager runs once more and the value of every operator is written
down, in the forward and in the backward. Then the graph is run node by node, each node
differentiated by itself:

    forward     a value that eager has not is wrong; the first wrong one has operands that eager has
    backward    a gradient that eager has not is wrong; the first wrong one comes from gradients that eager has

Only nodes on the way to the result that differs are looked at, so values that a functional
graph has and eager keeps in no tensor do no harm. Where a graph has lost something (a hook),
the first wrong node is the next one, and what it comes after is named too.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from efftra_fx.meta import OUTPUTS, PATH, ROLE, SOURCE
from efftra_fx.places import line_of_caller
from efftra_fx.private import running_sequence_number
from efftra_fx.walks import ancestors

_WHOLE = 1 << 14  # elements up to which a value is kept whole
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-6, torch.float16: 5e-3, torch.bfloat16: 1e-2}


@dataclass
class Values:
    """Tensors that were seen, each as some of its elements and two means."""

    by_form: dict[tuple[tuple[int, ...], torch.dtype], list[Tensor]] = field(default_factory=dict)

    def add(self, tensor: Tensor) -> None:
        """Write down a tensor's value as it is now."""
        self.by_form.setdefault((tuple(tensor.shape), tensor.dtype), []).append(_digest(tensor))

    def has(self, tensor: Tensor) -> bool:
        """Say whether a tensor of this form was seen with this value, to rounding."""
        known = self.by_form.get((tuple(tensor.shape), tensor.dtype))
        if not known:
            return False
        mine = _digest(tensor)
        if not mine.numel():
            return True
        stacked = torch.stack(known)
        gap = (stacked - mine).abs().amax(1)
        scale = stacked.abs().amax(1).clamp(min=1e-12)
        return bool((gap <= _TOLERANCE.get(tensor.dtype, 0.0) * scale).any())


def _digest(tensor: Tensor) -> Tensor:
    value = tensor.detach()
    if value.is_complex():
        value = torch.view_as_real(value.resolve_conj())
    if value.numel() <= _WHOLE:
        return value.reshape(-1).to(torch.float64).nan_to_num()
    places = torch.linspace(0, value.numel() - 1, _WHOLE, device=value.device, dtype=torch.float64).long()
    some = value[torch.unravel_index(places, value.shape)].to(torch.float64)
    means = torch.stack([value.to(torch.float64).mean(), value.to(torch.float64).abs().mean()])
    return torch.cat([some, means]).nan_to_num()


class EagerRecord(TorchDispatchMode):
    """Write down what every operator takes and gives while eager runs, and who writes into memory."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.forward, self.backward = Values(), Values()
        self.writers: dict[int, str] = {}  # the line that wrote into a storage last, by its address
        self.aliases: dict[int, list[Tensor]] = {}
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator, and write its values down."""
        values = self.forward if running_sequence_number() < 0 else self.backward
        for tensor in _tensors((args, kwargs)):
            self._note(values, tensor)
        out = func(*args, **(kwargs or {}))
        for written in _written(func, args, kwargs or {}):
            address = written.untyped_storage().data_ptr()
            self.writers[address] = line_of_caller()
            for alias in self.aliases.get(address, []):
                values.add(alias)
        for tensor in _tensors(out):
            self._note(values, tensor)
        return out

    def _note(self, values: Values, tensor: Tensor) -> None:
        if tensor.is_nested or id(tensor) in self.known:  # held in `aliases`, so no other tensor can have its id
            return
        self.known.add(id(tensor))
        self.aliases.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
        values.add(tensor)

    @contextmanager
    def on(self) -> Iterator[None]:
        """Record while this lasts; a backward begins with a gradient of one."""
        for dtype in _TOLERANCE:
            self.backward.add(torch.ones((), dtype=dtype))
        with self:
            yield

    def writer(self, tensor: Tensor) -> str:
        """Return the line that wrote into a tensor's memory last; empty where none did."""
        return self.writers.get(tensor.untyped_storage().data_ptr(), "")


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for position, entry in enumerate(func._schema.arguments):
        if entry.alias_info is not None and entry.alias_info.is_write:
            found += _tensors(args[position] if position < len(args) else kwargs.get(entry.name))
    return found


class _Runs(fx.Interpreter):
    """Run a graph node by node, each with operands of its own that ask for gradients."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.values: dict[fx.Node, Any] = {}
        self.moving = _moving(gm)
        self.leaves: dict[fx.Node, dict[fx.Node, Tensor]] = {}
        self.now: fx.Node | None = None

    def run_node(self, node: fx.Node) -> Any:
        """Run one node and keep its value."""
        self.now = node
        if node.op != "call_function":
            value = super().run_node(node)
        else:
            leaves: dict[fx.Node, Tensor] = {}
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: self._operand(n, leaves))
            target: Any = node.target
            value = target(*args, **kwargs)
            self.leaves[node] = leaves
        self.values[node] = value
        return value

    def _operand(self, node: fx.Node, leaves: dict[fx.Node, Tensor]) -> Any:
        value = self.values[node]
        if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
            return value
        if node not in self.moving:
            return value.detach()
        if node not in leaves:
            leaves[node] = value.detach().requires_grad_()
        return leaves[node]


def _moving(gm: fx.GraphModule) -> set[fx.Node]:
    """Return the nodes that follow from trainable parameters, also behind a detach."""
    found: set[fx.Node] = set()
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            if ROLE[node].trainable:
                found.add(node)
        elif any(n in found for n in node.all_input_nodes):
            found.add(node)
    return found


def run_nodes(gm: fx.GraphModule, operands: Sequence[Any]) -> _Runs | str:
    """Run a graph node by node; return its values, or where and why it stops."""
    runs = _Runs(gm)
    try:
        with torch.random.fork_rng(), torch.enable_grad():
            torch.manual_seed(0)
            runs.run(*operands, enable_io_processing=False)
    except Exception as error:  # what an operator raises is the answer
        assert runs.now is not None
        return f"{_place(runs.now)} does not run: {str(error).splitlines()[0]}"
    return runs


def differs_forward(gm: fx.GraphModule, operands: Sequence[Any], record: EagerRecord, result: int) -> str:
    """Say which node is the first whose value eager does not have, on the way to one of the graph's results."""
    runs = run_nodes(gm, operands)
    if isinstance(runs, str):
        return runs
    start = _results(gm)[result]
    if not isinstance(start, fx.Node):
        return "the graph has a constant there"
    return _first_value(gm, start, _wrong_values(gm, runs, record))


def _wrong_values(gm: fx.GraphModule, runs: _Runs, record: EagerRecord) -> dict[fx.Node, bool]:
    return {n: not _has(record.forward, runs.values[n], n, runs) for n in gm.graph.nodes if n.op != "output"}


def _first_value(gm: fx.GraphModule, start: fx.Node, wrong: dict[fx.Node, bool]) -> str:
    order = list(gm.graph.nodes)
    doubtful: set[fx.Node] = set()  # something right follows from it, so eager may just not keep it
    for node in reversed(order):
        if any(not wrong[u] or u in doubtful for u in node.users if u.op != "output"):
            doubtful.add(node)
    found = _walk(start, wrong, lambda n: n.all_input_nodes)
    node = next(n for n in sorted(order, key=lambda n: n in doubtful) if n in found)
    if node.op == "placeholder":
        role = ROLE[node]
        reader = next(iter(node.users))
        return f"the first value that differs is the {role.kind} '{role.name}', read by {_place(reader)}"
    return f"the first node that differs is {_place(node)}{_after(node, node.all_input_nodes)}"


def differs_backward(gm: fx.GraphModule, operands: Sequence[Any], record: EagerRecord, parameter: str) -> str:
    """Say which node is the first whose backward gives what eager's does not, on the way to one parameter."""
    runs = run_nodes(gm, operands)
    if isinstance(runs, str):
        return runs
    start = next((n for n in gm.graph.nodes if n.op == "placeholder" and ROLE[n].name == parameter), None)
    if start is None or not start.users:
        return f"no node reads '{parameter}'"
    gradients, parts = _gradients(gm, runs)
    reached = {n for n, g in gradients.items() if any(t is not None for t in g)}
    wrong = {
        n: not (n in reached and all(t is None or record.backward.has(t) for t in gradients[n]))
        for n in ancestors(_results(gm)[: OUTPUTS[gm].loss]) | reached
    }
    found = _walk(start, wrong, lambda n: [u for u in n.users if u in wrong])
    node = next(n for n in reversed(gm.graph.nodes) if n in found)
    users = [u for u in node.users if u in wrong]
    for lost in (False, True):
        for user in users:
            part = parts.get((user, node))
            if (part is None) if lost else (part is not None and not record.backward.has(part)):
                values = _wrong_values(gm, runs, record)
                if values[user] or any(values[n] for n in user.all_input_nodes):
                    return _first_value(gm, user, values)
                return f"the first node whose backward differs is {_place(user)}{_after(user, list(user.users))}"
    return f"the first gradient that differs is that of {_place(node)}"


def _has(values: Values, value: Any, node: fx.Node, runs: _Runs) -> bool:
    if isinstance(value, (tuple, list)):
        taken = [u for u in node.users if u.target is operator.getitem]
        return all(_has(values, runs.values[u], u, runs) for u in taken)
    return not isinstance(value, Tensor) or values.has(value)


def _walk(start: fx.Node, wrong: dict[fx.Node, bool], before: Callable[[fx.Node], Sequence[fx.Node]]) -> set[fx.Node]:
    """Follow wrong nodes from `start`; return those before which nothing is wrong."""
    found: set[fx.Node] = set()
    pending, seen = [start], {start}
    while pending:
        node = pending.pop()
        earlier = [n for n in before(node) if wrong[n]]
        if not earlier:
            found.add(node)
        pending += [n for n in earlier if n not in seen]
        seen.update(earlier)
    return found


def _results(gm: fx.GraphModule) -> Sequence[Any]:
    output = next(n for n in reversed(gm.graph.nodes) if n.op == "output")
    results: Sequence[Any] = output.args[0]
    return results


Gradients = dict[fx.Node, list[Tensor | None]]


def _gradients(gm: fx.GraphModule, runs: _Runs) -> tuple[Gradients, dict[tuple[fx.Node, fx.Node], Tensor | None]]:
    """Return each node's gradient, and what each node gives to each of its operands' gradients."""
    found: Gradients = {}
    parts: dict[tuple[fx.Node, fx.Node], Tensor | None] = {}
    loss = _results(gm)[0]
    found[loss] = [torch.ones_like(runs.values[loss])]
    for node in reversed(gm.graph.nodes):
        given = found.get(node)
        if node.op != "call_function" or given is None:
            continue
        if node.target is operator.getitem:
            source, index = node.args
            whole = found.setdefault(source, [None] * len(runs.values[source]))
            whole[index] = _sum(whole[index], given[0])
            parts[node, source] = given[0]
            continue
        for operand, part in _backward(runs.values[node], runs.leaves[node], given).items():
            parts[node, operand] = part
            if part is not None:
                found[operand] = [_sum(found.get(operand, [None])[0], part)]
    return found, parts


def _backward(
    value: Any, leaves: dict[fx.Node, Tensor], given: Sequence[Tensor | None]
) -> dict[fx.Node, Tensor | None]:
    results = [value] if isinstance(value, Tensor) else list(value)
    pairs = [(r, g) for r, g in zip(results, given, strict=True) if g is not None and r.requires_grad]
    if not pairs or not leaves:
        return dict.fromkeys(leaves)
    parts = torch.autograd.grad([r for r, _ in pairs], list(leaves.values()), [g for _, g in pairs], allow_unused=True)
    return dict(zip(leaves, parts, strict=True))


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    return one + other


def _after(node: fx.Node, others: Sequence[fx.Node]) -> str:
    """Return the modules that a node's values come from where they are not its own, in words."""
    paths = dict.fromkeys(f"'{PATH[n]}'" for n in others if PATH.get(n) and PATH[n] != PATH.get(node))
    return f", after {' and '.join(paths)}" if paths else ""


def _place(node: fx.Node) -> str:
    """Return a node's name, operator, module and line in words."""
    path, source = PATH.get(node), SOURCE.get(node)
    where = f" in module '{path}'" if path else ""
    return f"{node.name} ({node.target}){where}{f' at {source}' if source else ''}"
