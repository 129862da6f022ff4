"""Numbers and tensors that are read in Python and change from step to step, as tensors that a graph takes.

A weight of a loss, a temperature or a mask that follows a schedule would make another captured step for each of its
values. Where a second value is met, the step is captured with such a number as a tensor in its place, and from then on
that tensor is given the present value before each step. The graph computes with it whatever its value is: where Python
asks for the value (a branch, a rounded number, a key, `dropout(p=...)`), the step is captured for each value as before.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial, reduce
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from efftra_fx.errors import CaptureError
from efftra_fx.places import is_user_file
from efftra_fx.python_reads import Read, Which, as_it_is, same

_MANY = 64  # numbers and tensors in one value that are worth a tensor each


class _Form(str):
    """What numbers, or tensors of the same form, share."""


_NUMBERS = {float: _Form("a number"), int: _Form("a whole number")}


@dataclass(frozen=True)
class Setting:
    """What is read in Python, and the tensors that a graph takes in its place; `kind` is what values must be alike in.

    A list or dictionary of numbers has a tensor for each.
    """

    read: Read
    kind: Any
    tensors: tuple[Tensor, ...]

    @classmethod
    def of(cls, read: Read) -> Setting:
        """Make one of the present value."""
        value = read.look()
        return cls(read, kind_of(as_it_is(value)), tuple(map(_tensor, _leaves(value))))

    @property
    def fits(self) -> bool:
        """Whether the present value can be given to the tensors."""
        value = self.read.look()
        return same(kind_of(as_it_is(value)), self.kind) and len(_leaves(value)) == len(self.tensors)

    def feed(self) -> None:
        """Give the present value to the tensors."""
        for tensor, leaf in zip(self.tensors, _leaves(self.read.look()), strict=True):
            tensor.fill_(leaf) if is_number(leaf) else tensor.copy_(leaf)

    @property
    def text(self) -> str:
        """The present value as text; of tensors a few numbers."""
        some = (one if is_number(one) else one.flatten()[:8].tolist() for one in _leaves(self.read.look()))
        return ", ".join(map(str, some))


class Number(NamedTuple):
    """A tensor that stands for a number of Python, which may be `whole`."""

    tensor: Tensor
    whole: bool


class NumbersOfPython(TorchFunctionMode):
    """While this is on, tensors that stand for Python's numbers, and what is computed of them alone, promote as those.

    A number takes the dtype of the tensors that it meets, where a tensor without dimensions, in double precision, would
    give its own to others without dimensions and to integers. Raises CaptureError where a tensor is made of one,
    or where it meets less than single precision, in which Python's numbers are not rounded first.
    """

    def __init__(self, numbers: list[Number]) -> None:
        super().__init__()
        self.numbers = numbers

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call a function of torch."""
        kwargs = kwargs or {}
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        others = [one for one in given if self._number(one) is None]
        if len(others) == len(given) or getattr(function, "__name__", "") == "__get__":
            return function(*args, **kwargs)
        if function in _MAKERS:
            raise CaptureError(f"{function.__name__} makes a tensor of a number")
        if not others:
            result = function(*args, **kwargs)
            found = [one for one in tree_leaves(result) if isinstance(one, Tensor) and not one.ndim]
            self.numbers += [Number(one, self._any_whole(given)) for one in found]
            return result
        dtype = _dtype_met(others)
        if self._any_whole(given) and not any(one.is_floating_point() or one.is_complex() for one in others):
            raise CaptureError("a whole number meets whole numbers")  # of which some are whole, and some are not
        if dtype is not None:
            as_met = partial(self._converted, dtype)
            args, kwargs = tree_map(as_met, args), tree_map(as_met, dict(kwargs))
        return function(*args, **kwargs)

    def _number(self, value: Any) -> Number | None:
        return next((one for one in self.numbers if one.tensor is value), None)

    def _any_whole(self, values: Sequence[Tensor]) -> bool:
        return any(one is not None and one.whole for one in map(self._number, values))

    def _converted(self, dtype: torch.dtype, value: Any) -> Any:
        return value.to(dtype) if self._number(value) is not None else value


_TOLD_BY = ("__hash__", "__format__", "__repr__", "__copy__", "__deepcopy__", "__reduce_ex__")


@contextmanager
def _not_told_apart(numbers: list[Number]) -> Iterator[None]:
    """While this lasts, raise CaptureError where a user's line takes such a number for a key, a text or a copy."""

    def asked(name: str, plain: Callable[..., Any], tensor: Tensor, *args: Any) -> Any:
        if is_user_file(sys._getframe(2).f_code.co_filename) and any(one.tensor is tensor for one in numbers):
            raise CaptureError(f"{name} of a number is asked for")
        return plain(tensor, *args)

    def replaced(kind: type, name: str) -> Any:
        plain = getattr(kind, name)
        return lambda tensor, *args: asked(name, plain, tensor, *args)

    kinds = [(kind, name) for kind in (Tensor, FakeTensor) for name in _TOLD_BY if hasattr(kind, name)]
    before = [(kind, name, vars(kind).get(name)) for kind, name in kinds if kind is Tensor or name in vars(kind)]
    for kind, name, _ in before:
        setattr(kind, name, replaced(kind, name))
    try:
        yield
    finally:
        for kind, name, own in before:
            if own is None:
                delattr(kind, name)
            else:
                setattr(kind, name, own)


_MAKERS = (torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor)


def _dtype_met(others: Sequence[Tensor]) -> torch.dtype | None:
    """Return what a number of Python is converted to where it meets these; None where promotion sees to it."""
    floating = [one for one in others if one.is_floating_point() or one.is_complex()]
    if any(one.dtype.itemsize < torch.float32.itemsize for one in floating):
        raise CaptureError("a number meets less than single precision")
    if not floating:
        return torch.get_default_dtype()
    if any(one.ndim for one in floating):
        return None
    dtypes = (one.dtype.to_real() for one in floating)
    return reduce(torch.promote_types, dtypes)


def may_be_set(read: Read) -> bool:
    """Say whether a value that has moved can be given to a graph: others of its kind, in numbers or tensors alone."""
    if read.holder is None or read.by_forward:
        return False
    kind, leaves = kind_of(read.now), _leaves(read.look())
    return 0 < len(leaves) <= _MANY and len(leaves) == _numbers_in(kind) and same(kind_of(read.value), kind)


@contextmanager
def stood_in(settings: Sequence[Setting], tensors: Sequence[Tensor]) -> Iterator[None]:
    """While this lasts, have these tensors in the places of what is read; raises CaptureError where one takes none."""
    before, source, numbers = [(one.read, one.read.look()) for one in settings], iter(tensors), list[Number]()
    try:
        for read, value in before:
            given = [next(source) for _ in _leaves(value)]
            pairs = zip(given, _leaves(value), strict=True)
            numbers += [Number(t, isinstance(leaf, int)) for t, leaf in pairs if is_number(leaf)]
            try:
                read.put(_put_together(value, iter(given)))
            except (AttributeError, TypeError) as error:  # a frozen object
                raise CaptureError(f"{read} cannot be set: {error}") from error
        with NumbersOfPython(numbers) if numbers else nullcontext(), _not_told_apart(numbers):
            yield
    finally:
        for read, value in before:
            with suppress(AttributeError, TypeError):  # it took no other
                read.put(value)


@contextmanager
def as_noted(reads: Sequence[Read]) -> Iterator[None]:
    """While this lasts, have the values that these reads were noted with."""
    before = [(read, read.look()) for read in reads]
    try:
        for read in reads:
            read.put(_noted(read.value, read.look()))
        yield
    finally:
        for read, value in before:
            read.put(value)


def kind_of(value: Any) -> Any:
    """Return what two values (as they are) share that differ in numbers and tensors of the same form alone."""
    if is_number(value):
        return _NUMBERS[int if isinstance(value, int) else float]
    if isinstance(value, Which) and _is_plain(value.held):
        return _Form(f"a tensor {list(value.held.shape)} {value.held.dtype} {value.held.device}")
    if isinstance(value, tuple):
        return tuple(map(kind_of, value))
    if isinstance(value, dict):
        return {key: kind_of(held) for key, held in value.items()}
    return value


def _numbers_in(kind: Any) -> int:
    """Return how many numbers and tensors a kind has: more than can be reached in a value of a class of its own."""
    if isinstance(kind, dict):
        return sum(map(_numbers_in, kind.values()))
    if isinstance(kind, _Form):
        return 1
    return sum(map(_numbers_in, kind)) if isinstance(kind, tuple) else 0


def is_number(value: Any) -> TypeGuard[float]:
    """Say whether a value is a number that is computed with, whole or not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_plain(value: Any) -> bool:
    """Say whether a value is a tensor that nothing trains."""
    return isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and not value.requires_grad


def _leaves(value: Any) -> list[Any]:
    """Return the numbers and tensors in a value, in order."""
    if is_number(value) or _is_plain(value):
        return [value]
    if isinstance(value, SimpleNamespace):
        value = vars(value)
    if isinstance(value, dict):
        return [leaf for held in value.values() for leaf in _leaves(held)]
    if type(value) in (list, tuple):
        return [leaf for held in value for leaf in _leaves(held)]
    return []


def _put_together(value: Any, tensors: Iterator[Tensor]) -> Any:
    """Return a value with tensors in the places of its numbers and tensors."""
    if is_number(value) or _is_plain(value):
        return next(tensors)
    if isinstance(value, SimpleNamespace):
        return SimpleNamespace(**_put_together(vars(value), tensors))
    if isinstance(value, dict):
        return {key: _put_together(held, tensors) for key, held in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_put_together(held, tensors) for held in value)
    return value


def _tensor(leaf: Any) -> Tensor:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else torch.tensor(float(leaf), dtype=torch.float64)


def _noted(value: Any, now: Any) -> Any:
    """Return the value that a read was noted with, from what it is compared by and the present value of its kind."""
    if isinstance(value, Which):
        return value.held
    if isinstance(now, SimpleNamespace):
        return SimpleNamespace(**_noted(value, vars(now)))
    if isinstance(value, dict):
        return {key: _noted(held, now[key]) for key, held in value.items()}
    if isinstance(value, tuple):
        return type(now)(_noted(held, one) for held, one in zip(value[1:], now, strict=True))
    return value


__all__ = ["Setting", "as_noted", "kind_of", "may_be_set", "stood_in"]
