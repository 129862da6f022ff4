"""Find code that runs as it is and decides something for all rows at once: `if x.sum() > 0`.

The few rows of the first proof may all take the same way, and a batch in training another. So such code runs on
more of the example's rows, together and each alone, and what it asks of values is written down. A question
that is asked as often for one row as for many is about the batch. Where it has had one answer throughout, the code
runs again with the other one: if that changes what it computes, the answer matters, and it must see the
whole batch. `any` of the rows that is true for a row alone is true with every other row too (and `all` that is
false), so these answers are not turned round.

Numbers of rows leave no questions (`if len(x) > 20`), so the code runs on several of them: each up to the few, and
about half of the example's, all, and twice as many.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode

from efftra_fx.capture_guards import asking
from efftra_fx.errors import CaptureError
from efftra_fx.meta import BATCH
from efftra_fx.opaque import is_opaque, needs_whole_batch, run_without_chance

from .batch_relation import close

_FAILS = (RuntimeError, IndexError, ValueError, TypeError, KeyError, ArithmeticError, AssertionError, CaptureError)
_NARROW_TOLERANCE = 1e-4  # of what computes in single precision, in one order for a row and in another for many
_EXTREMES = (0.0, 1e9, -1e9)
_ANY = frozenset({"any", "gt", "ge", "ne"})  # true for some rows: true for more
_ALL = frozenset({"all", "lt", "le", "eq"})
_AMONG_ROWS = frozenset({"any", "all"})

Values = Mapping[fx.Node, Any]


def deciding_together(gm: fx.GraphModule, whole: Values, rows: int, every: int) -> set[fx.Node]:
    """Return the opaque nodes that decide by several rows at once, or compute something else for a row alone.

    `whole` has the values of what they read, for a batch of `rows`, of which the example has `every`; `BATCH` says
    how these follow the rows.
    """
    return {
        node
        for node in gm.graph.nodes
        if node.op == "call_function"
        and is_opaque(node.target)
        and not needs_whole_batch(node.target)
        and _goes_by_rows(node)
        and (_decides(node, whole, rows) or _counts(node, whole, rows, every))
    }


def operands_of_opaque(gm: fx.GraphModule) -> set[fx.Node]:
    """Return the nodes that opaque nodes read."""
    return {n for node in gm.graph.nodes if is_opaque(node.target) for n in node.all_input_nodes}


@dataclass
class _Question:
    """What a line asked, in order, and whether an answer of true (false) can be another one with more rows."""

    answers: list[Any] = field(default_factory=list)
    lasting: set[bool] = field(default_factory=set)  # answers that stay with more rows
    stops: bool = False


_Questions = dict[str, _Question]


class _Origins(TorchDispatchMode):
    """Remember which operator made a truth value: `any`, `all`, or a comparison of a count."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: dict[int, tuple[Tensor, str]] = {}  # a tensor is kept, so that its number is no other's

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if isinstance(result, Tensor) and result.numel() == 1 and result.dtype is torch.bool:
            counted = args and isinstance(args[0], Tensor) and not args[0].is_floating_point() and args[0].numel() == 1
            if name in _AMONG_ROWS or (counted and name in _ANY | _ALL):
                self.made[id(result)] = result, name
        return result

    def lasting(self, value: Any) -> set[bool]:
        """Return the answers that more rows do not change."""
        tensor, name = self.made.get(id(value), (None, ""))
        if tensor is not value:
            return set()
        return {True} if name in _ANY else {False}


def _goes_by_rows(node: fx.Node) -> bool:
    known = [*node.all_input_nodes, *node.users]
    kinds = {BATCH[n].kind for n in known if isinstance(n.meta.get("val"), Tensor)}
    return "rows" in kinds and any(BATCH[n].kind == "rows" for n in node.all_input_nodes)


def _decides(node: fx.Node, whole: Values, rows: int) -> bool:
    try:
        together, asked = _asked(node, _rows_of(node, whole, rows, slice(0, rows)))
    except _FAILS:  # nothing to compare with: the check of the capture has run it as a whole
        return False
    alone: list[_Questions] = []
    for row in range(rows):
        try:
            results, own = _asked(node, _rows_of(node, whole, rows, slice(row, row + 1)))
        except _FAILS:
            continue  # one row alone may be too few
        alone.append(own)
        if not _same_rows(node, together, results, rows, row):
            return True
    for line, question in asked.items():
        others = [own[line].answers for own in alone if line in own]
        if question.stops or not others or any(len(answers) != len(question.answers) for answers in others):
            continue
        for answer in _other_answers(question, others):
            try:
                found, _ = _asked(node, _rows_of(node, whole, rows, slice(0, rows)), {line: answer})
            except _FAILS:
                continue
            if not _same(node, together, found):
                return True
    return False


def _counts(node: fx.Node, whole: Values, rows: int, every: int) -> bool:
    """Say whether a node computes something else for a row among other numbers of rows."""
    try:
        together, _ = _asked(node, _rows_of(node, whole, rows, slice(0, rows)))
    except _FAILS:
        return False
    for count in dict.fromkeys((*range(2, rows), every // 2, every, 2 * every)):
        if count in (0, 1, rows):
            continue
        places = torch.arange(count) % rows
        try:
            found, _ = _asked(node, _picked(node, whole, rows, places))
        except _FAILS:
            continue
        if not _same_picked(node, together, found, rows, places):
            return True
    return False


def _picked(node: fx.Node, whole: Values, rows: int, places: Tensor) -> list[Tensor]:
    """Return a node's operands with the rows at these places."""
    found = []
    for operand in node.args[0]:  # type: ignore[union-attr]
        value, split = whole[operand], BATCH[operand]  # type: ignore[index]
        if split.kind == "rows" and value.shape[split.dim] == rows * split.per_row:
            value = value.index_select(split.dim, _each(places, split.per_row).to(value.device))
        found.append(value)
    return found


def _each(places: Tensor, per_row: int) -> Tensor:
    """Return where all that belongs to the rows at these places lies."""
    return (places[:, None] * per_row + torch.arange(per_row)).flatten()


def _same_picked(node: fx.Node, together: Sequence[Tensor], found: Sequence[Tensor], rows: int, places: Tensor) -> bool:
    for user in node.users:
        index, split = user.args[1], BATCH[user]
        if split.kind != "rows":
            continue
        wanted = together[index].index_select(split.dim, _each(places, split.per_row).to(together[index].device))  # type: ignore[index]
        if not _close(wanted, found[index]):  # type: ignore[index]
            return False
    return True


def _other_answers(question: _Question, others: Sequence[Sequence[Any]]) -> tuple[Any, ...]:
    """Return answers that a line could have had in another batch."""
    every = [*question.answers, *(answer for answers in others for answer in answers)]
    first = every[0]
    if isinstance(first, bool):
        return (not first,) if set(every) == {first} and first not in question.lasting else ()
    return _EXTREMES if isinstance(first, float) and math.isfinite(first) else ()


def _asked(
    node: fx.Node, operands: Sequence[Tensor], instead: Mapping[str, Any] | None = None
) -> tuple[list[Tensor], _Questions]:
    """Run a node's own code; return its results and what it asked. Lines of `instead` get that answer."""
    questions: _Questions = {}
    origins = _Origins()

    def ask(value: Any, line: str, stops: bool, proceed: Callable[[], Any]) -> Any:
        lasting = origins.lasting(value)
        answer = proceed()
        question = questions.setdefault(line, _Question(lasting=lasting, stops=stops))
        question.answers.append(answer)
        question.lasting &= lasting
        other = (instead or {}).get(line)
        return other if type(other) is type(answer) else answer

    with asking(ask), origins:
        try:
            results = run_without_chance(node.target, operands)
        except RuntimeError:  # an operator that knows no doubles computes in single precision
            questions.clear()
            narrow = [t.float() if t.dtype is torch.float64 else t for t in operands]
            results = run_without_chance(node.target, narrow)
    return results, questions


def _rows_of(node: fx.Node, whole: Values, rows: int, part: slice) -> list[Tensor]:
    """Return a node's operands with only the rows of a part."""
    found = []
    for operand in node.args[0]:  # type: ignore[union-attr]
        value, split = whole[operand], BATCH[operand]  # type: ignore[index]
        if split.kind == "rows" and value.shape[split.dim] == rows * split.per_row:
            count = (part.stop - part.start) * split.per_row
            value = value.narrow(split.dim, part.start * split.per_row, count)
        found.append(value)
    return found


def _same_rows(node: fx.Node, together: Sequence[Tensor], alone: Sequence[Tensor], rows: int, row: int) -> bool:
    for user in node.users:
        index, split = user.args[1], BATCH[user]
        if split.kind != "rows":
            continue
        wanted = together[index]  # type: ignore[index]
        if wanted.shape[split.dim] != rows * split.per_row:
            return False
        own = wanted.narrow(split.dim, row * split.per_row, split.per_row)
        if not _close(own, alone[index]):  # type: ignore[index]
            return False
    return True


def _same(node: fx.Node, one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    """Say whether the results are equal that follow rows or parts."""
    known = [user.args[1] for user in node.users if BATCH[user].kind in ("rows", "sum")]
    return all(_close(one[index], other[index]) for index in known)  # type: ignore[index]


def _close(a: Tensor, b: Tensor) -> bool:
    return close(a, b) if a.dtype in (torch.float64, torch.complex128) else close(a, b, _NARROW_TOLERANCE)


__all__ = ["deciding_together", "operands_of_opaque"]
