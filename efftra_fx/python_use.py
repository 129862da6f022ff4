"""What a call of the model reads in Python, and whether what was captured of it holds for the values of now.

What forward reads of modules' plain attributes, and the loss function of the variables around it, is noted
with its values. A captured step is for these. For those that forward writes itself, it may be for others too.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

PLAIN = (bool, int, float, complex, str, type(None))
MISSING = object()
_ENOUGH = 4  # values of an attribute that forward writes, after which its value is taken not to matter

Place = tuple[nn.Module, str]
LEFT: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()  # attributes that some forward leaves


@dataclass(frozen=True)
class Read:
    """A name that was read in Python, in words, with its value and how to look it up again; maybe a `module`'s."""

    place: str
    name: str
    value: Any
    look: Callable[[], Any]
    module: nn.Module | None = None

    def __str__(self) -> str:
        return self.place

    @property
    def now(self) -> Any:
        """The value that it has at present."""
        return self.look()

    @property
    def moved(self) -> bool:
        """Whether it has another value now."""
        return not _same(self.now, self.value)

    @property
    def by_forward(self) -> bool:
        """Whether a forward is known to leave values there."""
        return self.module is not None and self.name in LEFT.get(self.module, ())


@dataclass(frozen=True)
class PythonUse:
    """What a forward read in Python, and the attributes that it wrote and the modules that it hooked, in words.

    `left` is what it leaves on modules, the same for any rows. `others` are uses of the same computation from
    other values of what forward writes itself, and `met` the one that was met last.
    """

    reads: tuple[Read, ...] = ()
    writes: tuple[str, ...] = ()
    hooked: tuple[str, ...] = ()
    left: Mapping[Place, Any] = field(default_factory=dict)
    others: list[PythonUse] = field(default_factory=list)
    met: list[PythonUse] = field(default_factory=list)

    def moved(self) -> str | None:
        """Say which attribute that forward reads is another one now, or None."""
        read = next((read for read in self.reads if read.moved), None)
        return None if read is None else f"{read} was {read.value!r} when it was captured and is {read.now!r} now"

    def holds(self, tried: Callable[[], PythonUse | None]) -> bool:
        """Say whether what was captured is right for the present values.

        Where only what forward writes itself has others it is `tried`, which gives their use if it is; that it
        was for several, and left the same from all, is enough.
        """
        cases = (self, *self.others)
        use = next((case for case in cases if not any(read.moved for read in case.reads)), None)
        if use is None and any(all(read.by_forward for read in case.reads if read.moved) for case in cases):
            last = cases[-_ENOUGH:]
            if len(last) == _ENOUGH and all(_alike_left(case.left, last[0].left) for case in last):
                use = last[-1]
            else:
                use = tried()
                self.others.extend([use] if use is not None else ())
        self.met[:] = [use] if use is not None else []
        return use is not None

    def leave(self) -> None:
        """Put on modules what a forward would have left there."""
        for (module, name), value in (self.met[0] if self.met else self).left.items():
            vars(module)[name] = value


def same_left(first: Mapping[Place, Any], others: Sequence[Mapping[Place, Any]]) -> dict[Place, Any]:
    """Return what forward leaves on modules whatever the rows are: the same after its `first` call and all `others`.

    Nothing where something is left that cannot be told by its value, since the rest may belong to it.
    """
    left = {}
    for place, value in first.items():
        if not _is_told(value):
            return {}
        if all(place in other and _same(value, other[place]) for other in others):
            left[place] = value
    return left


def _alike_left(a: Mapping[Place, Any], b: Mapping[Place, Any]) -> bool:
    return a.keys() == b.keys() and all(_same(value, b[place]) for place, value in a.items())


def _is_told(value: Any) -> bool:
    """Say whether a value can be told by what it is: plain, or a tensor that autograd does not follow."""
    if isinstance(value, tuple):
        return all(map(_is_told, value))
    if isinstance(value, Tensor):
        return not value.requires_grad
    return isinstance(value, (*PLAIN, torch.dtype, torch.device, torch.Size))


def _same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, Tensor):
        return a is b or (a.dtype == b.dtype and a.device == b.device and torch.equal(a, b))
    return bool(a == b)


def variables_of(function: Any) -> list[Read]:
    """Return the plain variables outside of a function that its code names: a weight that is changed later counts.

    Those it finds under constant keys in a dictionary, and as attributes of an object, are
    among them, the function's own object included. What the code writes itself is not.
    """
    while isinstance(function, partial):
        function = function.func
    owner = getattr(function, "__self__", None)
    if not isinstance(function, FunctionType | MethodType | nn.Module):
        owner, function = function, inspect.getattr_static(type(function), "__call__", None)
    function = getattr(function, "__func__", function)
    if not isinstance(function, FunctionType):
        return []
    code = _Named.of(function.__code__)
    known = function.__globals__
    outer = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    places: list[tuple[str, Any, Callable[[], Any]]] = [
        *((name, _content(cell), partial(_content, cell)) for name, cell in outer.items()),
        *((name, known.get(name, MISSING), partial(known.get, name)) for name in code.variables),
    ]
    found = [
        Read(f"variable '{name}' of the loss", name, value, look)
        for name, value, look in places
        if isinstance(value, PLAIN) and name not in code.written
    ]
    for name, value, _ in [*places, ("self", owner, None)]:
        if isinstance(value, dict):
            for key in sorted(code.keys & value.keys(), key=repr) if not code.writes_items else ():
                if isinstance(value[key], PLAIN):
                    found.append(Read(f"'{name}[{key!r}]' of the loss", name, value[key], partial(value.get, key)))
        elif not isinstance(value, nn.Module | ModuleType | type) and isinstance(
            own := getattr(value, "__dict__", None), dict
        ):
            for attribute in sorted(code.attributes & own.keys() - code.written):
                if isinstance(own[attribute], PLAIN):
                    look = partial(own.get, attribute)
                    found.append(Read(f"'{name}.{attribute}' of the loss", attribute, own[attribute], look))
    return found


@dataclass
class _Named:
    """What code names outside of itself, functions inside it too."""

    variables: dict[str, None]
    attributes: set[str]
    keys: set[Any]
    written: set[str]
    writes_items: bool = False

    @classmethod
    def of(cls, code: CodeType) -> _Named:
        """Read it off the instructions."""
        found = cls({}, set(), set(), set())
        for one in dis.get_instructions(code):
            if one.opname == "LOAD_GLOBAL":
                found.variables[one.argval] = None
            elif one.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                found.attributes.add(one.argval)
            elif one.opname in ("STORE_GLOBAL", "STORE_DEREF", "STORE_ATTR"):
                found.written.add(one.argval)
            elif one.opname == "STORE_SUBSCR":
                found.writes_items = True
        for const in code.co_consts:
            if isinstance(const, CodeType):
                inner = cls.of(const)
                found.variables |= inner.variables
                found.attributes |= inner.attributes
                found.keys |= inner.keys
                found.written |= inner.written
                found.writes_items |= inner.writes_items
            elif isinstance(const, str | int):
                found.keys.add(const)
        return found


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it has none yet
        return MISSING


__all__ = ["LEFT", "MISSING", "PLAIN", "Place", "PythonUse", "Read", "same_left", "variables_of"]
