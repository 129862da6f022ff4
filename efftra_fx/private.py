"""Everything of torch that is private and still needed, each behind a function of ours.

A release of torch that renames one of these breaks one function here and its test,
and nothing else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.utils.checkpoint
from torch._dispatch.python import enable_python_dispatcher
from torch._export.utils import (
    _collect_all_valid_cia_ops_for_aten_namespace,
    _is_preservable_cia_op,
    _special_op_to_preserve_cia,
)
from torch._functorch._aot_autograd.functional_utils import from_fun, has_data_mutation, to_fun
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.export._trace import _ignore_backend_decomps
from torch.export.exported_program import _override_composite_implicit_decomp
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import PropagateUnbackedSymInts, ShapeEnv
from torch.utils import _pytree as pytree


@functools.cache
def _autograd_keys(*more: str) -> torch._C.DispatchKeySet:
    names = [name for name in dir(torch._C.DispatchKey) if name.startswith(("Autograd", *more))]
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
    for name in names:
        keys = keys | torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name))
    return keys


def below_autograd() -> AbstractContextManager[None]:
    """Return a guard under which operators skip autograd, view tracking and autocast.

    Unlike inference mode it makes normal tensors: gradients computed under it can be
    handed to an optimizer. It holds for the calling thread only.
    """
    return torch._C._ExcludeDispatchKeyGuard(_autograd_keys("Autocast"))


def boxed(overload: torch._ops.OpOverload) -> Callable[..., Any]:
    """Return the boxed call of one overload without the Python layer around it."""
    return overload._op


def unboxed(name: str) -> tuple[Callable[..., Any], ...]:
    """Return torch's own unboxed bindings of that name; which overload one takes is its own choice."""
    names = ("_VariableFunctions", "_nn", "_linalg", "_special", "_fft")
    places = [getattr(torch._C, place) for place in names if hasattr(torch._C, place)]
    return tuple(getattr(place, name) for place in places if hasattr(place, name))


def is_plain_method(name: str) -> bool:
    """Tell whether tensors have a method of that name that is torch's binding and no Python code."""
    bound = getattr(torch._C.TensorBase, name, None)
    return bound is not None and callable(bound) and getattr(torch.Tensor, name) is bound


def is_composite(overload: torch._ops.OpOverload, device: str) -> bool:
    """Tell whether torch runs the operator by calling others, and has no kernel of its own for that kind of device."""
    if not overload._can_decompose():
        return False
    key = torch._C._dispatch_key_for_device(device)
    name: str = overload.name()
    return not torch._C._dispatch_has_kernel_for_dispatch_key(name, key)


def sequence_number() -> int:
    """Return the number that autograd gives to the next node recorded in this thread."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]


def running_sequence_number() -> int:
    """Return the number of the autograd node that runs now in this thread, -1 when none does."""
    node = torch._C._current_autograd_node()
    return -1 if node is None else int(node._sequence_nr())


def above_autograd() -> AbstractContextManager[None]:
    """Return a guard under which operators are recorded by autograd again, even inside `below_autograd`.

    Autocast stays as it is: its keys are out of the way where it is off.
    """
    included = torch._C._dispatch_tls_local_include_set()
    excluded = torch._C._dispatch_tls_local_exclude_set() - _autograd_keys()
    return torch._C._ForceDispatchKeyGuard(included, excluded)


def compilation_error() -> type[Exception]:
    """Return the exception that `torch.compile` raises where it cannot compile; loads the compiler."""
    import torch._dynamo.exc

    return torch._dynamo.exc.TorchDynamoException


def module_hooks(module: torch.nn.Module, backward: bool = False) -> list[Callable[..., Any]]:
    """Return the hooks on a module's forward, or on its backward."""
    names = ("_backward_hooks", "_backward_pre_hooks") if backward else ("_forward_hooks", "_forward_pre_hooks")
    return [hook for name in names for hook in getattr(module, name).values()]


def global_hooks(backward: bool = False) -> list[Callable[..., Any]]:
    """Return the hooks on the forward of all modules, or on their backward."""
    kinds = ("backward_hooks", "backward_pre_hooks") if backward else ("forward_hooks", "forward_pre_hooks")
    return [hook for kind in kinds for hook in getattr(torch.nn.modules.module, f"_global_{kind}").values()]


def tensor_hooks(tensor: torch.Tensor) -> tuple[list[Callable[..., Any]], list[Callable[..., Any]]]:
    """Return the hooks on a tensor's gradient, and those that are called when that was accumulated."""
    after = getattr(tensor, "_post_accumulate_grad_hooks", None)
    return list((tensor._backward_hooks or {}).values()), list((after or {}).values())


def hook_numbers(model: torch.nn.Module) -> tuple[int, ...]:
    """Return the numbers of all hooks on a model's modules: they change when a hook comes or goes."""
    numbers: list[int] = []
    for module in model.modules():
        if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
            for hooks in (module._forward_hooks, module._forward_pre_hooks):
                numbers += hooks
            for others in (module._backward_hooks, module._backward_pre_hooks):
                numbers += others
    return tuple(numbers)


@contextmanager
def checkpoints_without_hooks() -> Iterator[None]:
    """While this lasts, checkpoints that are not reentrant save what any other code saves, in their forward context."""
    name = "_checkpoint_without_reentrant_generator"
    before = getattr(torch.utils.checkpoint, name)

    def plain(function: Any, preserve_rng_state: bool, context_fn: Callable[[], Any], *_: Any, **__: Any) -> Any:
        with context_fn()[0]:
            yield

    setattr(torch.utils.checkpoint, name, plain)
    try:
        yield
    finally:
        setattr(torch.utils.checkpoint, name, before)


def shapes_in_python() -> AbstractContextManager[None]:
    """Return a guard under which composite operators are taken apart by torch's Python rules, as its tracer does.

    Those in C++ would take symbolic sizes for numbers (that of LSTM does).
    """
    guard: AbstractContextManager[None] = enable_python_dispatcher()
    return guard


def storage_of(tensor: torch.Tensor) -> int:
    """Return what is the same for tensors in the same memory, fake ones included, while one of them lives."""
    return int(tensor.untyped_storage()._cdata)


def batches_inside(target: Any) -> bool:
    """Tell whether a node of an exported graph begins or ends a `torch.vmap`, whose operators see one row alone."""
    return getattr(target, "__module__", None) == "torch._functorch.predispatch"


@functools.cache
def takes_part(target: Any) -> bool:
    """Tell whether a node of an exported graph writes, or stands for other operators, so that it cannot be copied."""
    if isinstance(target, torch._ops.HigherOrderOperator):
        return True
    if not isinstance(target, torch._ops.OpOverload):
        return False
    lifts = (torch.ops.aten.lift.default, torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)
    if target in lifts or target is torch.ops.aten.native_batch_norm.default or target._schema.is_mutable:
        return True
    return target._can_decompose() and not _is_preservable_cia_op(target)


@contextmanager
def functional_rules(targets: Iterable[Any]) -> Iterator[None]:
    """While this lasts, operators that write nothing are kept whole where a graph of these targets is traced.

    The flags are those under which the exporter decomposes.
    """
    own = {t for t in targets if isinstance(t, torch._ops.OpOverload) and _is_preservable_cia_op(t)}
    kept = dict.fromkeys(own | _collect_all_valid_cia_ops_for_aten_namespace(), _special_op_to_preserve_cia)
    with _ignore_backend_decomps(), _override_composite_implicit_decomp(kept):
        yield


def trace_functional(gm: torch.fx.GraphModule, examples: Sequence[Any]) -> tuple[torch.fx.GraphModule, list[int]]:
    """Return a graph without its writes, and which placeholders it wrote: their new values are the first results.

    The examples are fake tensors, and sizes; to be called under `functional_rules`.
    """
    written: list[int] = []

    def run(*given: Any) -> list[Any]:
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.Functionalize)):
            operands = [to_fun(one) for one in given]
            with torch.fx.traceback.preserve_node_meta():
                results = PropagateUnbackedSymInts(gm).run(*operands, enable_io_processing=False)
            tensors = [(i, t) for i, t in enumerate(operands) if isinstance(t, torch.Tensor)]
            written[:] = [i for i, t in tensors if has_data_mutation(t)]
            return [from_fun(operands[i]) for i in written] + [from_fun(r) for r in pytree.tree_leaves(results)]

    mode = detect_fake_mode(list(examples)) or nullcontext()
    detached = [e.detach() if isinstance(e, torch.Tensor) else e for e in examples]
    with torch.no_grad(), mode, enable_python_dispatcher(), FunctionalTensorMode(export=True):
        found = make_fx(run, decomposition_table={}, record_module_stack=True)(*detached)
    return found, written


def changes_shape_in_place(target: Any) -> bool:
    """Tell whether a node of an exported graph makes another view of a tensor out of the tensor itself."""
    if not isinstance(target, torch._ops.OpOverload) or target is torch.ops.aten.detach_.default:
        return False
    return torch.Tag.inplace_view in target.tags


def least_size(size: torch.SymInt) -> int:
    """Return the least value that a symbolic size may have by what was assumed of it while it was traced."""
    return int(size.node.shape_env.bound_sympy(size.node.expr).lower)


def symbolic_size(environment: ShapeEnv, expression: Any, hint: int) -> torch.SymInt | int:
    """Return a size that an expression of the environment's symbols gives; `hint` is what it is for the example."""
    size: torch.SymInt | int = environment.create_symintnode(expression, hint=hint)
    return size


def fake_of_layout(
    fakes: FakeTensorMode, like: torch.Tensor, shape: Sequence[Any], stride: Sequence[Any], offset: Any
) -> torch.Tensor:
    """Return a fake tensor of this layout, else like another: its dtype, its device."""
    plain = torch.empty_strided(shape, stride, dtype=like.dtype, device="meta")
    if not isinstance(offset, int) or offset:
        plain = plain.as_strided(shape, stride, offset)
    return FakeTensor(fakes, plain, like.device)


def size_expression(size: torch.SymInt, given: bool = False) -> Any:
    """Return a symbolic size as an expression of its environment's symbols.

    What was found to be equal since is put in, but for the size that was `given`.
    """
    return size.node._expr if given else size.node.expr


def traced_conditions(
    size: torch.SymInt, symbols: Collection[Any]
) -> tuple[dict[Any, tuple[Any, Any]], tuple[Any, ...]]:
    """Return bounds of these symbols of a size's environment, and the conditions that tracing assumed of them."""
    environment = size.node.shape_env
    ranges = {symbol: environment.var_to_range.get(symbol) for symbol in symbols}
    bounds = {symbol: (found.lower, found.upper) for symbol, found in ranges.items() if found is not None}
    known = {a: b for a, b in environment.replacements.items() if a not in symbols}
    return bounds, tuple(dict.fromkeys(guard.expr.xreplace(known) for guard in environment.guards))
