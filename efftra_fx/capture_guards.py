"""Branches on values: take the way that the example takes, and write down what must hold for it.

Python that asks a tensor for its value (`if mask.all()`, `int(lengths.max())`, `.item()`)
cannot be put into a graph. The model is run once on the example and each answer is written
down with the line that asked. While the graph is captured, the same lines get the same
answers, and what was asked becomes a guard: a tensor that must have this value whenever
the graph is used. Guards that need only inputs are checked before a step does anything.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor

from efftra_fx.errors import CaptureError
from efftra_fx.meta import CONSTANTS, ROLE, Role
from efftra_fx.places import decides_an_error, line_of_caller
from efftra_fx.walks import ancestors

_METHODS = ("__bool__", "__int__", "__float__", "__index__", "item", "tolist")
Ask = Callable[[Any, str, bool, Callable[[], Any]], Any]


@dataclass(frozen=True)
class Asked:
    """A question for a value while the model is captured: the tensor, its answer, and the user's line that asked.

    `stops` says that it only decides whether an error is raised; the answer is that none is.
    """

    value: Any
    answer: Any
    line: str
    stops: bool = False


@dataclass(frozen=True)
class Guards:
    """What must hold for a captured graph: `gm` gives tensors from inputs, `expected` their values.

    `lines` are the user's lines that asked.
    """

    gm: fx.GraphModule
    expected: tuple[Any, ...]
    lines: tuple[str, ...]

    @property
    def roles(self) -> tuple[Role, ...]:
        """What the graph takes."""
        return tuple(ROLE[n] for n in self.gm.graph.nodes if n.op == "placeholder")

    def broken(self, inputs: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> str | None:
        """Return the line whose answer is another one for this batch, or None."""
        operands = []
        for role in self.roles:
            held = {"input": inputs, "buffer": buffers, "constant": CONSTANTS[self.gm]}[role.kind]
            operands.append(held[role.name])
        with torch.no_grad():
            found = self.gm(*operands)
        for value, expected, line in zip(found, self.expected, self.lines, strict=True):
            if _answer(value) != expected:
                return f"{line} (the answer was {expected!r} and is {_answer(value)!r})"
        return None


@dataclass
class Answers:
    """The answers of one run of the model, by the line that asked, in order."""

    by_line: dict[str, deque[Any]] = field(default_factory=dict)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Write down every answer that real tensors give."""

        def ask(value: Any, line: str, stops: bool, proceed: Callable[[], Any]) -> Any:
            answer = proceed()
            self.by_line.setdefault(line, deque()).append(answer)
            return answer

        with asking(ask):
            yield

    @contextmanager
    def replaying(self, guards: list[Asked]) -> Iterator[None]:
        """Give the recorded answers, and note each asked tensor with its answer and line."""
        left = {line: deque(answers) for line, answers in self.by_line.items()}

        def ask(value: Any, line: str, stops: bool, proceed: Callable[[], Any]) -> Any:
            if not isinstance(value, FakeTensor):
                return proceed()  # a constant
            if not left.get(line):
                raise CaptureError(
                    f"{line} asks for a value while the model is captured that it does not ask for when it runs; "
                    "the way through the model must depend on its inputs alone"
                )
            answer = left[line].popleft()
            guards.append(Asked(value, answer, line, stops))
            return answer

        with asking(ask):
            yield


@contextmanager
def no_questions() -> Iterator[None]:
    """Raise AsksValuesError at the first question for a value."""

    def ask(value: Any, line: str, stops: bool, proceed: Callable[[], Any]) -> Any:
        if not isinstance(value, FakeTensor):
            return proceed()  # a constant
        raise AsksValuesError(
            f"the model cannot be captured as a graph: it branches on, or takes a size from, the value of a tensor "
            f"at {line}; replace the branch by torch.where, or move it out of forward"
        )

    with asking(ask):
        yield


class NotCapturedError(CaptureError):
    """Raise where a model is no graph, and might yet run as it is."""


class CountsRowsError(NotCapturedError):
    """Raise where what a model computes goes by how many rows there are: as it is, it must see the whole batch."""


class AsksValuesError(NotCapturedError):
    """Raise where Python asks for a value, or cannot be traced for another `reason`.

    `paths` are the modules in which it does, the innermost first.
    """

    paths: tuple[str, ...] = ()
    reason: str = "it asks for values"


@contextmanager
def asking(ask: Ask) -> Iterator[None]:
    """Hand every question for a tensor's value to `ask(tensor, line, stops, proceed)`, also those of torch's Python."""
    with ExitStack() as stack:
        for name in _METHODS:
            stack.enter_context(_replaced(Tensor, name, _method(getattr(Tensor, name), ask)))
        stack.enter_context(_replaced(FakeTensor, "tolist", _method(FakeTensor.tolist, ask)))  # it has one of its own
        for name, value in (("equal", _equal), ("allclose", _all_close), ("is_nonzero", lambda a: a != 0)):
            stack.enter_context(_replaced(torch, name, _function(getattr(torch, name), value, ask)))
        yield


def _method(original: Any, ask: Ask) -> Any:
    def asked(self: Tensor, *args: Any) -> Any:
        return ask(self, line_of_caller(), decides_an_error(sys._getframe(1)), lambda: original(self, *args))

    return asked


def _function(original: Any, value: Callable[..., Any], ask: Ask) -> Any:
    def asked(*args: Any, **kwargs: Any) -> Any:
        stops = decides_an_error(sys._getframe(1))
        return ask(value(*args, **kwargs), line_of_caller(), stops, lambda: original(*args, **kwargs))

    return asked


def _equal(a: Tensor, b: Tensor) -> Tensor:
    return (a == b).all() if a.shape == b.shape else torch.tensor(False)


def _all_close(*args: Any, **kwargs: Any) -> Tensor:
    return torch.isclose(*args, **kwargs).all()


@contextmanager
def _replaced(holder: Any, name: str, value: Any) -> Iterator[None]:
    own = name in vars(holder)
    before = getattr(holder, name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        if own:
            setattr(holder, name, before)
        else:
            delattr(holder, name)


def _answer(value: Any) -> Any:
    return value.tolist() if isinstance(value, Tensor) else value


def split_guards(
    gm: fx.GraphModule, results: Sequence[Any], asked: Sequence[Asked], written: Sequence[str]
) -> tuple[Guards, list[fx.Node]]:
    """Return the guards as a graph of their own, and those nodes among `results` that need more than inputs, or chance.

    `results` are the nodes that were `asked`, `written` the buffers that the step writes: their values are not
    those of the example when the next step asks. What depends on parameters and only decides an error is left out.
    """
    free: dict[fx.Node, bool] = {}
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            role = ROLE[node]
            free[node] = role.kind in ("input", "constant") or (role.kind == "buffer" and role.name not in written)
        elif node.op == "call_function":
            free[node] = not _draws(node) and all(free[n] for n in node.all_input_nodes)
    kept: dict[tuple[Any, str], tuple[Any, Any, str]] = {}
    bound: list[fx.Node] = []
    for result, one in zip(results, asked, strict=True):
        if isinstance(result, fx.Node) and not free[result]:
            bound += [] if one.stops else [result]
        elif isinstance(result, fx.Node) and _reads(result):
            kept.setdefault((result, one.line), (result, _answer(one.answer), one.line))
    nodes = [result for result, _, _ in kept.values()]
    graph = _copy(gm, nodes)
    guards = fx.GraphModule(gm, graph)
    CONSTANTS[guards] = CONSTANTS[gm]
    return Guards(guards, tuple(a for _, a, _ in kept.values()), tuple(line for _, _, line in kept.values())), bound


def _draws(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def depends_on_chance(node: fx.Node) -> bool:
    """Say whether a value is computed from random numbers."""
    return any(_draws(n) for n in ancestors([node]))


def _reads(node: fx.Node) -> bool:
    """Say whether a value needs more than constants."""
    needed = ancestors([node])
    return any(n.op == "placeholder" and ROLE[n].kind != "constant" for n in needed)


def _copy(gm: fx.GraphModule, results: Sequence[Any]) -> fx.Graph:
    needed = ancestors(results)
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        if node in needed:
            copies[node] = graph.node_copy(node, lambda n: copies[n])
    graph.output(tuple(copies[n] if isinstance(n, fx.Node) else n for n in results))
    return graph
