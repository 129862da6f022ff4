"""Opaque nodes: user code that runs as it is, as one node of the graph.

What cannot be captured (Python that decides by values) and what must not be looked into (a
custom `autograd.Function`, whose backward a tracer would lose) becomes one operator. Its
forward runs the user's own code; its backward runs it again, under autograd, and asks
autograd for the gradients. Nothing cuts through it, and it has costs like any node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from efftra_fx.containers import Tree, take_apart
from efftra_fx.errors import CaptureError
from efftra_fx.opaque import OtherSizesError, make_operator, random_states
from efftra_fx.stand_ins import call_with, places_of

_INSIDE: ContextVar[bool] = ContextVar(
    "a custom function is running, which is one node with all that it calls", default=False
)


@contextmanager
def functions_kept_whole() -> Iterator[None]:
    """While this lasts, every call of a custom `autograd.Function` becomes an opaque operator."""
    original = torch.autograd.Function.__dict__["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        plain = original.__get__(None, cls)
        if cls.__module__.partition(".")[0] == "torch":
            return plain(*args, **kwargs)
        return _call_function(cls, lambda *a: plain(*a, **kwargs), args)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        torch.autograd.Function.apply = original  # type: ignore[method-assign]


@contextmanager
def alignments_kept_whole() -> Iterator[None]:
    """While this lasts, `ctc_loss` is an opaque operator with a loss a row: its memory depends on values."""
    original: Any = torch.nn.functional.ctc_loss

    def run(operands: Sequence[Tensor], blank: int, zero_infinity: bool) -> list[Tensor]:
        return [original(*operands, blank, "none", zero_infinity)]

    def ctc_loss(
        log_probs: Tensor,
        targets: Tensor,
        input_lengths: Any,
        target_lengths: Any,
        blank: int = 0,
        reduction: str = "mean",
        zero_infinity: bool = False,
    ) -> Tensor:
        if not (isinstance(input_lengths, Tensor) and isinstance(target_lengths, Tensor)) or log_probs.ndim != 3:
            plain: Tensor = original(log_probs, targets, input_lengths, target_lengths, blank, reduction, zero_infinity)
            return plain
        operator = make_operator(
            "ctc_loss",
            lambda operands: run(operands, blank, zero_infinity),
            lambda operands: [operands[0].new_empty(operands[0].shape[1])],
        )
        each: Tensor = operator([log_probs, targets, input_lengths, target_lengths])[0]
        if reduction == "none":
            return each
        if reduction == "sum":
            return each.sum()
        return (each / target_lengths.clamp(min=1).to(each.dtype)).mean()

    torch.nn.functional.ctc_loss = ctc_loss
    try:
        yield
    finally:
        torch.nn.functional.ctc_loss = original


def _call_function(cls: Any, call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    leaves, tree = take_apart(args)
    flat = [leaf for _, leaf in leaves]
    places = [i for i, leaf in enumerate(flat) if isinstance(leaf, Tensor)]
    if not places:
        return call(*args)
    seen: list[Tree] = []
    counts: list[int] = []

    def run(operands: Sequence[Tensor]) -> list[Tensor]:
        filled = list(flat)
        for place, operand in zip(places, operands, strict=True):
            filled[place] = operand
        outside = _INSIDE.set(True)
        try:
            results, structure = take_apart(call(*tree.rebuild(filled)))
        finally:
            _INSIDE.reset(outside)
        seen.append(structure)
        counts.append(len(results))
        return [value for _, value in results]

    def shape(operands: Sequence[Tensor]) -> list[Tensor]:
        with torch.no_grad():
            return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in run(operands)]

    operands = [flat[i] for i in places]
    spy = Spy()  # type: ignore[no-untyped-call]

    def watched(fakes: Sequence[Tensor]) -> list[Tensor]:
        with spy:
            return shape(fakes)

    found = make_operator(cls.__name__, run, watched)(operands)
    if spy.drew:  # what was just captured is used by nobody, and goes
        found = make_operator(cls.__name__, run, shape, draws=True)(operands)
    return seen[-1].rebuild(list(found)[: counts[-1]])


class Spy(TorchDispatchMode):
    """See whether anything draws random numbers."""

    drew = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.drew = self.drew or torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Seen:
    """One call of a module on real tensors: shapes of its tensor operands and results, and what it did besides.

    `constants` are the results that are no tensors, None where one is, and `tensors` says where; `written` are
    buffers by name, and `filled` the operands that it writes into, by number.
    """

    operands: tuple[tuple[int, ...], ...]
    results: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    structure: Tree
    constants: tuple[Any, ...]
    tensors: tuple[bool, ...]
    draws: bool
    written: tuple[str, ...]
    filled: tuple[int, ...] = ()


class Watch:
    """Write down each call of some modules while the model runs on real tensors."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self.calls: dict[str, list[Seen]] = {path: [] for path in modules}
        self.modules = modules

    @property
    def draws(self) -> bool:
        """Whether any of the calls drew random numbers."""
        return any(seen.draws for calls in self.calls.values() for seen in calls)

    @contextmanager
    def on(self) -> Iterator[None]:
        """Watch while this lasts."""
        with ExitStack() as stack:
            for path, module in self.modules.items():
                stack.enter_context(forward_replaced(module, self._watched(path, module, module.forward)))
            yield

    def _watched(self, path: str, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            operands = [t for _, t in take_apart((args, kwargs))[0] if isinstance(t, Tensor)]
            held = {name: (b, b._version, b.detach().clone()) for name, b in module.named_buffers()}
            versions = [t._version for t in operands]
            states = random_states([*module.parameters(), *operands])
            output = forward(*args, **kwargs)
            leaves, structure = take_apart(output)
            results = [t for _, t in leaves]
            after = random_states([*module.parameters(), *operands])
            now = dict(module.named_buffers())
            written = tuple(name for name, before in held.items() if _is_written(now[name], *before))
            tensors = [t for t in results if isinstance(t, Tensor)]
            self.calls[path].append(
                Seen(
                    tuple(tuple(t.shape) for t in operands),
                    tuple(tuple(t.shape) for t in tensors),
                    tuple(t.dtype for t in tensors),
                    structure,
                    tuple(None if isinstance(t, Tensor) else t for t in results),
                    tuple(isinstance(t, Tensor) for t in results),
                    any(not torch.equal(a, b) for a, b in zip(states, after, strict=True)),
                    written,
                    tuple(i for i, (t, v) in enumerate(zip(operands, versions, strict=True)) if t._version != v),
                )
            )
            return output

        return watched


def _is_written(now: Tensor, buffer: Tensor, version: int, value: Tensor) -> bool:
    """Say whether a buffer was assigned or written; kernels of batch norms write without a new version."""
    return now is not buffer or buffer._version != version or not torch.equal(buffer, value)


@contextmanager
def modules_kept_whole(
    modules: Mapping[str, nn.Module],
    first: Watch,
    second: Watch,
    halves: tuple[Watch, Watch] | None = None,
    extremes: Sequence[Watch] = (),
    undivided: bool = False,
) -> Iterator[None]:
    """While this lasts, calls of these modules become opaque operators.

    `first` and `second` watched the model on batches of different sizes: from them the shapes of results
    are known. `halves` watched it on the halves of the first batch, where it takes them: what adds up to the whole's
    size without following the rows was selected by values. `extremes` watched it on the first batch with the least
    and the most that it may draw. `undivided` ones see the whole batch.
    Raises NotKeptError for a module that cannot be one node.
    """
    with ExitStack() as stack:
        for path, module in modules.items():
            calls = list(zip(first.calls[path], second.calls[path], strict=False))
            parts = list(zip(*(half.calls[path] for half in halves), strict=False)) if halves is not None else []
            others = [watch.calls[path] for watch in extremes if len(watch.calls[path]) == len(first.calls[path])]
            for one, other in (
                *calls,
                *(pair for found in others for pair in zip(first.calls[path], found, strict=True)),
            ):
                _refuse_other_results(path, one, other)
            for (one, other), pieces in zip(calls, parts, strict=False):
                _refuse_selections(path, (one, other), pieces)
            stack.enter_context(forward_replaced(module, _opaque_forward(path, module, iter(calls), undivided)))
        yield


class NotKeptError(CaptureError):
    """Raise where the module at `path` cannot be one node, for a `problem`; one around it might."""

    def __init__(self, path: str, problem: str, way_out: str) -> None:
        super().__init__(
            f"{called(path)} cannot be captured, and cannot be kept as it is since it {problem}; {way_out}"
        )
        self.path, self.problem = path, problem


def _refuse_other_results(path: str, one: Seen, other: Seen) -> None:
    if one.structure == other.structure and one.constants == other.constants:
        return
    tensors = [sum(seen.tensors) for seen in (one, other)]
    counts = f" ({tensors[0]} tensors and {tensors[1]})" if tensors[0] != tensors[1] else ""
    raise NotKeptError(
        path,
        f"returns other things from call to call{counts}, by values of the batch or by random numbers",
        "return the same number of tensors each time, and nothing besides (use_cache=False leaves out a cache)",
    )


def _refuse_selections(path: str, pair: tuple[Seen, Seen], halves: tuple[Seen, Seen]) -> None:
    """Raise NotKeptError where results of the halves of a batch show that values decide a size, or what is returned."""
    whole, rules = pair[0], _size_rules(path, pair)
    for half in halves:
        _refuse_other_results(path, whole, half)
    for number, rule in enumerate(rules):
        pieces = [half.results[number] for half in halves]
        if any(len(piece) != len(rule) for piece in pieces):  # of a single row, which may lose its dimension
            continue
        for size, said, *found in zip(whole.results[number], rule, *pieces, strict=True):
            expected = [said if isinstance(said, int) else h.operands[said[0]][said[1]] * said[2] for h in halves]
            if found != expected and sum(found) == size:
                raise _unexplained(path, size, found[0])


def _opaque_forward(
    path: str, module: nn.Module, calls: Iterator[tuple[Seen, Seen]], undivided: bool
) -> Callable[..., Any]:
    bare = _Bare(module)
    original = module.forward
    modes = [(inner, inner.training) for inner in module.modules()]

    def forward(*args: Any, **kwargs: Any) -> Any:
        if _INSIDE.get():
            return original(*args, **kwargs)
        pair = next(calls, None)
        if pair is None:
            raise NotKeptError(
                path, "is called more often while it is captured than when it runs", "call it as often each time"
            )
        leaves, tree = take_apart((args, kwargs))
        flat = [leaf for _, leaf in leaves]
        places = [i for i, leaf in enumerate(flat) if isinstance(leaf, Tensor)]
        state = {n: t for n, t in (*module.named_parameters(), *module.named_buffers())}
        names, places_in = list(state), places_of(module)
        written = [n for n in names if any(n in seen.written for seen in pair)]
        into = sorted({number for seen in pair for number in seen.filled})

        sizes_of = _size_rule(path, pair)

        def run(operands: Sequence[Tensor]) -> list[Tensor]:
            # What it writes into must not be what it was given.
            own = [t.clone() if i in into else t for i, t in enumerate(operands[len(names) :])]
            filled = list(flat)
            for place, operand in zip(places, own, strict=True):
                filled[place] = operand
            given, named = tree.rebuild(filled)
            held = {n: t.clone() if n in written else t for n, t in zip(names, operands, strict=False)}
            put = {f"module.{place}": held[n] for place, n in places_in.items()}
            with forward_replaced(module, original), _modes_set(modes):
                output, news = call_with(bare, put, (written, *given), named)
            sizes = sizes_of(operands[len(names) :])
            results = _as_said([value for _, value in take_apart(output)[0] if isinstance(value, Tensor)], sizes)
            _refuse_other_sizes(path, results, sizes)
            return [*results, *(own[i] for i in into), *(value.detach() for value in news)]

        def shape(operands: Sequence[Tensor]) -> list[Tensor]:
            sizes, device = sizes_of(operands[len(names) :]), operands[0].device
            made = [torch.empty(s, dtype=d, device=device) for s, d in zip(sizes, pair[0].dtypes, strict=True)]
            kept = [*(operands[len(names) + i] for i in into), *(operands[names.index(n)] for n in written)]
            return [*made, *(torch.empty_like(t) for t in kept)]

        count = len(pair[0].results) + len(into)
        operands = [*state.values(), *(flat[i] for i in places)]
        operator = make_operator(
            path,
            run,
            shape,
            draws=any(seen.draws for seen in pair),
            wanted=[t.requires_grad for t in operands],
            whole=undivided,
            returned=count,
        )
        found = list(operator(operands))
        with torch.no_grad():
            for name, value in zip(written, found[count:], strict=False):
                state[name].copy_(value)
        for number, value in zip(into, found[count - len(into) : count], strict=True):
            flat[places[number]].copy_(value)
        tensors = iter(found[: count - len(into)])
        kinds = zip(pair[0].constants, pair[0].tensors, strict=True)
        return pair[0].structure.rebuild([next(tensors) if is_tensor else constant for constant, is_tensor in kinds])

    return forward


@contextmanager
def _modes_set(modes: Sequence[tuple[nn.Module, bool]]) -> Iterator[None]:
    """Let modules train or not as when they were captured."""
    before = [(module, module.training) for module, _ in modes]
    for module, training in modes:
        module.training = training
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


class _Bare(nn.Module):
    """A module without its own hooks: they were captured around it. It also returns the buffers that it has written."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, written: Sequence[str], *args: Any, **kwargs: Any) -> Any:
        output = self.module.forward(*args, **kwargs)
        return output, [self.module.get_buffer(name) for name in written]


def called(path: str) -> str:
    """Return what a module at a path is called in words."""
    return f"module '{path}'" if path else "the model"


def _as_said(results: Sequence[Tensor], expected: Sequence[Sequence[int]]) -> list[Tensor]:
    """Return results with all dimensions: of a single row, `squeeze()` drops what it does not of several."""

    def long(sizes: Sequence[int]) -> list[int]:
        return [size for size in sizes if size != 1]

    return [
        *(
            t.reshape(list(sizes)) if t.ndim < len(sizes) and long(t.shape) == long(sizes) else t
            for t, sizes in zip(results, expected, strict=False)
        ),
        *results[len(expected) :],
    ]


def _refuse_other_sizes(path: str, results: Sequence[Tensor], expected: Sequence[Sequence[int]]) -> None:
    for result, sizes in zip(results, expected, strict=False):  # an operator says itself where it gives another number
        if tuple(result.shape) != tuple(sizes):
            raise OtherSizesError(
                f"{called(path)} runs as it is and gave a tensor of sizes {list(result.shape)}, where its arguments' "
                f"sizes say {list(sizes)}: its results' sizes depend on values; give them a fixed size (by masks in "
                "place of selections, total_length= of pad_packed_sequence)"
            )


_Rule = list[tuple[int, int, int] | int]


def _size_rules(path: str, pair: tuple[Seen, Seen]) -> list[_Rule]:
    """Return for each result its sizes: each is constant, or a multiple of an operand's size."""
    one, two = pair
    if [len(a) for a in one.results] != [len(b) for b in two.results]:
        raise NotKeptError(
            path, "has results with other numbers of dimensions in other batches", "let them have the same in each"
        )
    return [
        [x if x == y else _multiple(path, x, y, one, two) for x, y in zip(a, b, strict=True)]
        for a, b in zip(one.results, two.results, strict=True)
    ]


def _size_rule(path: str, pair: tuple[Seen, Seen]) -> Callable[[Sequence[Tensor]], list[list[Any]]]:
    """Return what gives sizes of results for operands."""
    rules = _size_rules(path, pair)

    def sizes(operands: Sequence[Tensor]) -> list[list[Any]]:
        return [[r if isinstance(r, int) else operands[r[0]].shape[r[1]] * r[2] for r in rule] for rule in rules]

    return sizes


def _multiple(path: str, x: int, y: int, one: Seen, two: Seen) -> tuple[int, int, int]:
    for index, (a, b) in enumerate(zip(one.operands, two.operands, strict=True)):
        for dim, (p, q) in enumerate(zip(a, b, strict=True)):
            if p != q and p and x % p == 0 and x // p * q == y:
                return index, dim, x // p
    raise _unexplained(path, x, y)


def _unexplained(path: str, x: int, y: int) -> NotKeptError:
    return NotKeptError(
        path,
        f"has results with sizes that its arguments' sizes do not explain ({x} and {y} for two batches)",
        "give them a fixed size, for instance by masks in place of selections",
    )


@contextmanager
def forward_replaced(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Let a module call this in place of its own forward while this lasts."""
    before = module.__dict__.get("forward")
    object.__setattr__(module, "forward", forward)
    try:
        yield
    finally:
        if before is None:
            object.__delattr__(module, "forward")
        else:
            object.__setattr__(module, "forward", before)
