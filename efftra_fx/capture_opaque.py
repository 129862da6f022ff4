"""Opaque nodes: user code that runs as it is, as one node of the graph.

What cannot be captured (Python that decides by values) and what must not be looked into (a
custom `autograd.Function`, whose backward a tracer would lose) becomes one operator. Its
forward runs the user's own code; its backward runs it again, under autograd, and asks
autograd for the gradients. Nothing cuts through it, and it has costs like any node.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from efftra_fx import private
from efftra_fx.containers import Tree, take_apart
from efftra_fx.errors import CaptureError

NAMESPACE = "efftra_opaque"
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
_COUNT = itertools.count()
_KEPT: list[Any] = []  # operators live as long as the process, and so does what they call

Function = Callable[[Sequence[Tensor]], list[Tensor]]


def make_operator(name: str, run: Function, shape: Function) -> Any:
    """Return a new differentiable operator from tensors to tensors.

    `run` computes it (and is differentiated by autograd, when its backward runs); `shape` returns fake
    results for fake operands.
    """
    settings = _autocast_settings()
    stem = "".join(char if char.isalnum() else "_" for char in name).strip("_") or "call"
    full = f"{stem}_{next(_COUNT)}"
    backward = f"{full}_backward"
    _LIBRARY.define(f"{full}(Tensor[] operands) -> Tensor[]")
    _LIBRARY.define(f"{backward}(Tensor[] operands, Tensor[] gradients) -> Tensor[]")

    def forward_impl(operands: list[Tensor]) -> list[Tensor]:
        with private.above_autograd(), torch.no_grad(), _autocast(settings):
            return [_own(t) for t in run(operands)]

    def backward_impl(operands: list[Tensor], gradients: list[Tensor]) -> list[Tensor]:
        with private.above_autograd(), torch.enable_grad():
            leaves = [t.detach().requires_grad_(_differentiable(t)) for t in operands]
            with _autocast(settings):
                results = run(leaves)
            pairs = [(r, g) for r, g in zip(results, gradients, strict=True) if r.requires_grad]
            wanted = [t for t in leaves if t.requires_grad]
            found: Sequence[Tensor | None] = [None] * len(wanted)
            if pairs:
                found = torch.autograd.grad([r for r, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True)
        return [torch.zeros_like(t) if g is None else _own(g) for t, g in zip(wanted, found, strict=True)]

    def backward_shape(operands: list[Tensor], gradients: list[Tensor]) -> list[Tensor]:
        return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in operands if _differentiable(t)]

    for key, implementation in ((full, forward_impl), (backward, backward_impl)):
        _LIBRARY.impl(key, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{full}", shape, lib=_LIBRARY)
    torch.library.register_fake(f"{NAMESPACE}::{backward}", backward_shape, lib=_LIBRARY)
    operator = getattr(getattr(torch.ops, NAMESPACE), full).default
    behind = getattr(getattr(torch.ops, NAMESPACE), backward).default

    def remember(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.count = len(inputs[0])
        ctx.save_for_backward(*inputs[0], *output)

    def differentiate(ctx: Any, gradients: list[Tensor | None]) -> Any:
        operands, results = ctx.saved_tensors[: ctx.count], ctx.saved_tensors[ctx.count :]
        filled = [torch.zeros_like(r) if g is None else g for g, r in zip(gradients, results, strict=True)]
        found = iter(behind(list(operands), filled))
        return ([next(found) if _differentiable(t) else None for t in operands],)

    torch.library.register_autograd(f"{NAMESPACE}::{full}", differentiate, setup_context=remember, lib=_LIBRARY)
    _KEPT.append((run, shape))
    return operator


def _autocast_settings() -> tuple[tuple[str, torch.dtype, bool], ...]:
    return tuple((kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in ("cpu", "cuda"))


@contextmanager
def _autocast(settings: Sequence[tuple[str, torch.dtype, bool]]) -> Iterator[None]:
    with ExitStack() as stack:
        for kind, dtype, enabled in settings:
            stack.enter_context(torch.autocast(kind, dtype, enabled))
        yield


def is_opaque(target: Any) -> bool:
    """Say whether a node's target is an operator made here."""
    return isinstance(target, torch._ops.OpOverload) and target.namespace == NAMESPACE


def _own(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor that shares memory with nothing else."""
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _differentiable(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


@contextmanager
def functions_kept_whole() -> Iterator[None]:
    """While this lasts, every call of a custom `autograd.Function` becomes an opaque operator."""
    original = torch.autograd.Function.__dict__["apply"]
    plain = original.__func__

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if cls.__module__.partition(".")[0] == "torch":
            return plain(cls, *args, **kwargs)
        return _call_function(cls, lambda *a: plain(cls, *a, **kwargs), args)

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

    def run(operands: Sequence[Tensor]) -> list[Tensor]:
        filled = list(flat)
        for place, operand in zip(places, operands, strict=True):
            filled[place] = operand
        results, structure = take_apart(call(*tree.rebuild(filled)))
        seen.append(structure)
        return [value for _, value in results]

    def shape(operands: Sequence[Tensor]) -> list[Tensor]:
        with torch.no_grad():
            return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in run(operands)]

    found = make_operator(cls.__name__, run, shape)([flat[i] for i in places])
    return seen[-1].rebuild(list(found))


@dataclass(frozen=True)
class Seen:
    """One call of a module on real tensors: shapes of its tensor operands and results, and what it did besides."""

    operands: tuple[tuple[int, ...], ...]
    results: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    structure: Tree
    problem: str | None


class Watch:
    """Write down each call of some modules while the model runs on real tensors."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self.calls: dict[str, list[Seen]] = {path: [] for path in modules}
        self.modules = modules

    @contextmanager
    def on(self) -> Iterator[None]:
        """Watch while this lasts."""
        with ExitStack() as stack:
            for path, module in self.modules.items():
                stack.enter_context(_forward_replaced(module, self._watched(path, module, module.forward)))
            yield

    def _watched(self, path: str, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            operands = [t for _, t in take_apart((args, kwargs))[0] if isinstance(t, Tensor)]
            before = [b.detach().clone() for b in module.buffers()]
            state = torch.get_rng_state()
            output = forward(*args, **kwargs)
            leaves, structure = take_apart(output)
            results = [t for _, t in leaves]
            problem = None
            if not all(isinstance(t, Tensor) for t in results):
                problem = "returns more than tensors"
            elif not torch.equal(state, torch.get_rng_state()):
                problem = "draws random numbers"
            elif any(not torch.equal(a, b) for a, b in zip(before, module.buffers(), strict=True)):
                problem = "writes its buffers"
            tensors = [t for t in results if isinstance(t, Tensor)]
            self.calls[path].append(
                Seen(
                    tuple(tuple(t.shape) for t in operands),
                    tuple(tuple(t.shape) for t in tensors),
                    tuple(t.dtype for t in tensors),
                    structure,
                    problem,
                )
            )
            return output

        return watched


@contextmanager
def modules_kept_whole(modules: Mapping[str, nn.Module], first: Watch, second: Watch) -> Iterator[None]:
    """While this lasts, calls of these modules become opaque operators.

    `first` and `second` watched the model on batches of different sizes: from them the shapes of results
    are known. Raises CaptureError for a module that cannot be one node.
    """
    with ExitStack() as stack:
        for path, module in modules.items():
            calls = list(zip(first.calls[path], second.calls[path], strict=False))
            for one, _ in calls:
                if one.problem is not None:
                    raise CaptureError(
                        f"module '{path}' cannot be captured, and cannot be kept as it is since it {one.problem}; "
                        "decide by shapes instead of values there, or move that part out of the model"
                    )
            stack.enter_context(_forward_replaced(module, _opaque_forward(path, module, iter(calls))))
        yield


def _opaque_forward(path: str, module: nn.Module, calls: Iterator[tuple[Seen, Seen]]) -> Callable[..., Any]:
    bare = _Bare(module)
    original = module.forward
    modes = [(inner, inner.training) for inner in module.modules()]

    def forward(*args: Any, **kwargs: Any) -> Any:
        pair = next(calls, None)
        if pair is None:
            raise CaptureError(f"module '{path}' is called more often while it is captured than when it runs")
        leaves, tree = take_apart((args, kwargs))
        flat = [leaf for _, leaf in leaves]
        places = [i for i, leaf in enumerate(flat) if isinstance(leaf, Tensor)]
        state = {n: t for n, t in (*module.named_parameters(), *module.named_buffers())}
        names = list(state)

        def run(operands: Sequence[Tensor]) -> list[Tensor]:
            filled = list(flat)
            for place, operand in zip(places, operands[len(names) :], strict=True):
                filled[place] = operand
            given, named = tree.rebuild(filled)
            held = {f"module.{n}": t for n, t in zip(names, operands, strict=False)}
            with _forward_replaced(module, original), _modes_set(modes):
                output = torch.func.functional_call(bare, held, given, named)
            return [value for _, value in take_apart(output)[0]]

        operator = make_operator(path, run, _shape_rule(path, pair, len(names)))
        found = operator([*state.values(), *(flat[i] for i in places)])
        return pair[0].structure.rebuild(list(found))

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
    """A module without its own hooks: they were captured around it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.forward(*args, **kwargs)


def _shape_rule(path: str, pair: tuple[Seen, Seen], skipped: int) -> Function:
    """Return what gives fake results for fake operands: each size is constant, or a multiple of an operand's size."""
    one, two = pair
    rules: list[list[tuple[int, int, int] | int]] = []
    for a, b in zip(one.results, two.results, strict=True):
        rule: list[tuple[int, int, int] | int] = []
        for x, y in zip(a, b, strict=True):
            rule.append(x if x == y else _multiple(path, x, y, one, two))
        rules.append(rule)

    def shape(operands: Sequence[Tensor]) -> list[Tensor]:
        inputs = operands[skipped:]
        results = []
        for rule, dtype in zip(rules, one.dtypes, strict=True):
            sizes = [r if isinstance(r, int) else inputs[r[0]].shape[r[1]] * r[2] for r in rule]
            results.append(torch.empty(sizes, dtype=dtype, device=operands[0].device))
        return results

    return shape


def _multiple(path: str, x: int, y: int, one: Seen, two: Seen) -> tuple[int, int, int]:
    for index, (a, b) in enumerate(zip(one.operands, two.operands, strict=True)):
        for dim, (p, q) in enumerate(zip(a, b, strict=True)):
            if p != q and p and x % p == 0 and x // p * q == y:
                return index, dim, x // p
    raise CaptureError(
        f"module '{path}' cannot be captured, and its results have sizes that its arguments' sizes do not explain "
        f"({x} and {y} for two batches); give them a fixed size, for instance by masks in place of selections"
    )


@contextmanager
def _forward_replaced(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    before = module.__dict__.get("forward")
    object.__setattr__(module, "forward", forward)
    try:
        yield
    finally:
        if before is None:
            object.__delattr__(module, "forward")
        else:
            object.__setattr__(module, "forward", before)
