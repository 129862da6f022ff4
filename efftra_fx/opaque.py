"""Operators that run Python as it is, as one node of a graph, with autograd just around it.

The forward runs without autograd, and the backward runs it again with it. What it draws the second time
is what it drew the first: the state of the random generators is one of the operator's results, which
the backward is given. An operand that no gradient reaches (an expert that no row took) gets minus zeros: added to
anything they change nothing, so a sum of gradients is all minus zeros only if nobody gave one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, fx

from efftra_fx import private
from efftra_fx.capture_checkpoints import checkpoints_inline
from efftra_fx.chance import NoChance
from efftra_fx.errors import CaptureError

NAMESPACE = "efftra_opaque"
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
_COUNT = itertools.count()
_WHOLE: set[Any] = set()
_RUNS: dict[Any, Function] = {}  # operators live as long as the process, and so does what they call
_RETURNED: dict[Any, int] = {}
_SETTINGS: dict[Any, tuple[tuple[str, torch.dtype, bool], ...]] = {}

NOTHING = -0.0  # what is a sum of nothing: 0.0 + NOTHING is 0.0, and NOTHING + NOTHING is NOTHING

_WANTS_GRADIENTS = ("does not require grad", "not have been used in the graph")

Function = Callable[[Sequence[Tensor]], list[Tensor]]


class OtherSizesError(CaptureError):
    """Raise where an operator gives other sizes than those of its operands say: its sizes depend on values."""


def make_operator(
    name: str,
    run: Function,
    shape: Function,
    draws: bool = False,
    wanted: Sequence[bool] | None = None,
    whole: bool = False,
    rests: bool = False,
    returned: int | None = None,
) -> Any:
    """Return a new differentiable operator from tensors to tensors.

    `run` computes it (and is differentiated by autograd, when its backward runs); `shape` returns fake
    results for fake operands. One that `draws` random numbers gives the state before that as further results.
    `wanted` says which operands get gradients (all that can, if it is left out); `whole` that the operator must
    see the whole batch, whatever it gives for parts; `rests` that it need not run where no gradient comes in;
    `returned` how many of the results are what the code returns, where the others are new values of buffers.
    """
    settings = _autocast_settings()
    derives: list[bool] = []  # whether it has been seen to ask for gradients in its forward
    planned: list[int] = []  # how many results there are, once shapes were asked for

    def moving(operands: Sequence[Tensor]) -> list[bool]:
        asked = wanted if wanted is not None else (True,) * len(operands)
        return [flag and _differentiable(t) for flag, t in zip(asked, operands, strict=True)]

    stem = "".join(char if char.isalnum() else "_" for char in name).strip("_")
    stem = stem if stem and not stem[0].isdigit() else f"call_{stem}"  # a path of a sequence may be a number
    full = f"{stem}_{next(_COUNT)}"
    backward = f"{full}_backward"
    tags = (torch.Tag.nondeterministic_seeded,) if draws else ()
    _LIBRARY.define(f"{full}(Tensor[] operands) -> Tensor[]", tags=tags)
    _LIBRARY.define(f"{backward}(Tensor[] operands, Tensor[] gradients, Tensor[] states) -> Tensor[]")

    def cast_run(operands: Sequence[Tensor]) -> list[Tensor]:
        with _autocast(settings), checkpoints_inline():
            return run(operands)

    def leaves_of(operands: Sequence[Tensor]) -> list[Tensor]:
        return [t.detach().requires_grad_(flag) for t, flag in zip(operands, moving(operands), strict=True)]

    def plain_run(operands: Sequence[Tensor], states: Sequence[Tensor]) -> list[Tensor]:
        if not derives:
            try:
                with torch.no_grad():
                    return cast_run(operands)
            except RuntimeError as error:
                if not any(words in str(error) for words in _WANTS_GRADIENTS):
                    raise
            derives.append(True)  # it computes derivatives itself, of what it was given
            _set_states(states, operands)
        with torch.enable_grad():
            return cast_run(leaves_of(operands))

    def forward_impl(operands: list[Tensor]) -> list[Tensor]:
        states = random_states(operands) if draws else []
        with private.above_autograd():
            results = [*(_own(t) for t in plain_run(operands, states)), *states]
        if planned and len(results) != planned[0]:
            raise CaptureError(
                f"'{name}' runs as it is and gave {len(results) - len(states)} tensors, where it gave"
                f" {planned[0] - len(states)} when the model was captured: what it returns depends on values or on"
                " random numbers (layers that are dropped, say); let it return as many tensors in every call"
            )
        return results

    def forward_shape(operands: list[Tensor]) -> list[Tensor]:
        results = [*shape(operands), *(torch.empty_like(s) for s in (random_states(operands) if draws else ()))]
        planned[:] = [len(results)]
        return results

    def backward_impl(operands: list[Tensor], gradients: list[Tensor], states: list[Tensor]) -> list[Tensor]:
        if rests and not any(bool(g.any()) for g in gradients):
            moved = [t for t, flag in zip(operands, moving(operands), strict=True) if flag]
            return [torch.zeros_like(t, memory_format=torch.contiguous_format) for t in moved]
        with private.above_autograd(), torch.enable_grad():
            leaves = leaves_of(operands)
            with _states_set(states, leaves):
                results = cast_run(leaves)
            pairs = [(r, g) for r, g in zip(results, gradients, strict=True) if r.requires_grad]
            moved = [t for t in leaves if t.requires_grad]
            found: Sequence[Tensor | None] = [None] * len(moved)
            if pairs:
                found = torch.autograd.grad([r for r, _ in pairs], moved, [g for _, g in pairs], allow_unused=True)
        return [_nobodys_for(t) if g is None else _own(g).add_(0.0) for t, g in zip(moved, found, strict=True)]

    def backward_shape(operands: list[Tensor], gradients: list[Tensor], states: list[Tensor]) -> list[Tensor]:
        moved = [t for t, flag in zip(operands, moving(operands), strict=True) if flag]
        return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in moved]

    for key, implementation in ((full, forward_impl), (backward, backward_impl)):
        _LIBRARY.impl(key, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{full}", forward_shape, lib=_LIBRARY)
    torch.library.register_fake(f"{NAMESPACE}::{backward}", backward_shape, lib=_LIBRARY)
    operator = getattr(getattr(torch.ops, NAMESPACE), full).default
    behind = getattr(getattr(torch.ops, NAMESPACE), backward).default

    def remember(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.counts = len(inputs[0]), len(output) - (len(random_states(inputs[0])) if draws else 0)
        ctx.save_for_backward(*inputs[0], *output)

    def differentiate(ctx: Any, gradients: list[Tensor | None]) -> Any:
        given, made = ctx.counts
        operands, results = ctx.saved_tensors[:given], ctx.saved_tensors[given : given + made]
        filled = [torch.zeros_like(r) if g is None else g for g, r in zip(gradients[:made], results, strict=True)]
        found = iter(behind(list(operands), filled, list(ctx.saved_tensors[given + made :])))
        return ([next(found) if flag else None for flag in moving(operands)],)

    torch.library.register_autograd(f"{NAMESPACE}::{full}", differentiate, setup_context=remember, lib=_LIBRARY)
    _RUNS[operator] = cast_run
    _SETTINGS[operator] = settings
    if returned is not None:
        _RETURNED[operator] = returned
    if whole:
        _WHOLE.add(operator)
    return operator


def needs_whole_batch(target: Any) -> bool:
    """Say whether a node's target is an operator that must see the whole batch."""
    return target in _WHOLE


def returned_by(node: fx.Node) -> list[fx.Node]:
    """Return the results of a node that its code returns, and that are no new values of buffers."""
    count = _RETURNED.get(node.target, len(node.users))
    return [user for user in node.users if int(user.args[1]) < count]  # type: ignore[arg-type]


def run_without_chance(operator: Any, operands: Sequence[Tensor]) -> list[Tensor]:
    """Return what an operator gives where every draw gives the same fixed number."""
    with torch.no_grad(), NoChance():
        return [_own(t) for t in _RUNS[operator](operands)]


def draws(operator: Any) -> bool:
    """Say whether an operator draws random numbers."""
    return torch.Tag.nondeterministic_seeded in operator.tags


def pulled_back(
    operator: Any,
    operands: Sequence[Tensor],
    gradients: Callable[[Sequence[Tensor]], Sequence[Tensor]],
    unit: float = 0.5,
) -> list[Tensor | None]:
    """Return the operands' gradients as an operator's own code gives them, every draw the same fixed number.

    `gradients` makes the results' gradients; an operand that gets none has None. `unit` is what is drawn between
    0 and 1.
    """
    with torch.enable_grad(), NoChance(unit):
        leaves = [t.detach().requires_grad_(_differentiable(t)) for t in operands]
        results = _RUNS[operator]([*leaves])
        pairs = [(r, g) for r, g in zip(results, gradients(results), strict=True) if r.requires_grad]
        moved = [t for t in leaves if t.requires_grad]
        if not pairs or not moved:
            return [None] * len(leaves)
        found = iter(torch.autograd.grad([r for r, _ in pairs], moved, [g for _, g in pairs], allow_unused=True))
    return [next(found) if t.requires_grad else None for t in leaves]


def lowers_precision(operator: Any) -> bool:
    """Say whether an operator runs under autocast."""
    return any(enabled for _, _, enabled in _SETTINGS[operator])


def random_states(operands: Sequence[Tensor]) -> list[Tensor]:
    """Return the states of the generators that code on these tensors may draw from."""
    device = next((t.device for t in operands if t.device.type == "cuda"), None)
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device is not None else [])]


@contextmanager
def _states_set(states: Sequence[Tensor], operands: Sequence[Tensor]) -> Iterator[None]:
    """Draw from these states meanwhile, and leave the present ones as they are."""
    if not states:
        yield
        return
    devices = [t.device for t in operands if t.device.type == "cuda"][:1]
    with torch.random.fork_rng(devices=devices):
        _set_states(states, operands)
        yield


def _set_states(states: Sequence[Tensor], operands: Sequence[Tensor]) -> None:
    if states:
        torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.cuda.set_rng_state(state, next(t.device for t in operands if t.device.type == "cuda"))


def _autocast_settings() -> tuple[tuple[str, torch.dtype, bool], ...]:
    return tuple((kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in ("cpu", "cuda"))


@contextmanager
def _autocast(settings: Sequence[tuple[str, torch.dtype, bool]]) -> Iterator[None]:
    with ExitStack() as stack:
        for kind, dtype, enabled in settings:
            stack.enter_context(torch.autocast(kind, dtype, enabled))
        yield


def _nobodys_for(tensor: Tensor) -> Tensor:
    return torch.full_like(tensor, NOTHING, memory_format=torch.contiguous_format)


def nobodys(gradient: Tensor) -> bool:
    """Say whether a sum of gradients is one that no operator made here has given anything to."""
    parts = torch.view_as_real(gradient.resolve_conj()) if gradient.is_complex() else gradient
    return bool((torch.signbit(parts) & (parts == 0)).all())


def is_opaque(target: Any) -> bool:
    """Say whether a node's target is an operator made here."""
    return isinstance(target, torch._ops.OpOverload) and target.namespace == NAMESPACE


def kind_of(target: Any) -> Any:
    """Return what is equal for operators that were made of the same code: each capture makes its own."""
    return target.name().rpartition("_")[0] if is_opaque(target) else target


def _own(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor that shares memory with nothing else."""
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _differentiable(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


__all__ = [
    "NOTHING",
    "OtherSizesError",
    "draws",
    "is_opaque",
    "kind_of",
    "lowers_precision",
    "make_operator",
    "needs_whole_batch",
    "nobodys",
    "pulled_back",
    "random_states",
    "returned_by",
    "run_without_chance",
]
