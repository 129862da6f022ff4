"""Values that are read in Python, as they are, with how to look them up, and those around functions.

Numbers and words stand for themselves, lists and dictionaries for what is in them, tensors, functions and other
objects for which they are.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from types import CellType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from efftra_fx.places import is_user_file

PLAIN = (bool, int, float, complex, str, type(None))
MISSING = type("Missing", (), {"__repr__": lambda _: "missing"})()
_DEPTH = 2  # functions that are called by functions
_GROWING = frozenset({"append", "extend", "insert"})  # what is done to lists that are kept for somebody else
MANY = 1000  # a list of more is told by which it is

LEFT: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()  # attributes that some forward leaves


class Which:
    """Stands for an object by which it is, not by what is in it."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Which) and self.held is other.held

    def __hash__(self) -> int:
        return id(self.held)

    def __repr__(self) -> str:
        shape = f" {list(self.held.shape)}" if isinstance(self.held, Tensor) else ""
        return f"a {type(self.held).__name__}{shape}"


def as_it_is(value: Any) -> Any:
    """Return what is compared to tell whether a value is still the same: see the module's words.

    A list, tuple, set, dictionary, namespace or array of NumPy stands for what is in it, unless it is long.
    """
    if isinstance(value, PLAIN) or value is MISSING:
        return value
    if type(value).__module__ == "numpy" and getattr(value, "size", MANY + 1) <= MANY:
        return str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, SimpleNamespace):
        value = vars(value)
    if isinstance(value, dict) and len(value) <= MANY:
        return {key: as_it_is(held) for key, held in value.items()}
    if isinstance(value, list | tuple) and len(value) <= MANY:
        return type(value) is list, *map(as_it_is, value)
    if isinstance(value, set | frozenset) and len(value) <= MANY:
        return frozenset(map(as_it_is, value))
    return Which(value)


@dataclass(frozen=True)
class Read:
    """A name that was read in Python, in words, with its value as it was and how to look it up; maybe a `module`'s.

    `holder` has the value under that name: a dictionary, a cell of a function, or an object; None where a class has it.
    """

    place: str
    name: Any
    value: Any
    look: Callable[[], Any]
    module: nn.Module | None = None
    holder: Any = None

    def __str__(self) -> str:
        return self.place

    @property
    def now(self) -> Any:
        """The value that it has at present, as it is."""
        return as_it_is(self.look())

    @property
    def moved(self) -> bool:
        """Whether it has another value now."""
        held = self.look()
        return held is not self.value and not same(as_it_is(held), self.value)  # most are: numbers and words

    @property
    def key(self) -> tuple[int, Any]:
        """Tells where it lies: the same for two that read the same."""
        return id(self.holder), self.name

    def put(self, value: Any) -> None:
        """Let it have another value; raises AttributeError or TypeError where its holder takes none."""
        if isinstance(self.holder, dict):
            self.holder[self.name] = value
        elif isinstance(self.holder, CellType):
            self.holder.cell_contents = value
        else:
            setattr(self.holder, self.name, value)

    @property
    def by_forward(self) -> bool:
        """Whether a forward is known to leave values there."""
        return self.module is not None and self.name in LEFT.get(self.module, ())


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(value, b[key]) for key, value in a.items())  # in the same order
    if isinstance(a, Tensor):
        return a is b or (a.dtype == b.dtype and a.device == b.device and torch.equal(a, b))
    return bool(a == b) or bool(a != a and b != b)  # a NaN is still the same


def variables_of(function: Any, whose: str = "the loss", depth: int = _DEPTH) -> list[Read]:
    """Return the variables outside of a function that its code names: a weight that is changed later counts.

    Those it finds under constant keys in a dictionary, and as attributes of an object, are
    among them, the function's own object included, and those of the functions that it calls by name, if they are
    a user's. What the code writes itself is not.
    """
    while isinstance(function, partial):
        function = function.func
    owner = getattr(function, "__self__", None)
    if not isinstance(function, FunctionType | MethodType | nn.Module):
        owner, function = function, inspect.getattr_static(type(function), "__call__", None)
    function = getattr(function, "__func__", function)
    if not isinstance(function, FunctionType) or not is_user_file(function.__code__.co_filename):
        return []
    code = _Named.of(function.__code__)
    known = function.__globals__
    outer = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    places: list[tuple[str, Any, Callable[[], Any], Any]] = [
        *((name, _content(cell), partial(_content, cell), cell) for name, cell in outer.items()),
        *((name, known.get(name, MISSING), partial(known.get, name), known) for name in code.variables),
    ]
    found = []

    def note(place: str, name: Any, value: Any, look: Callable[[], Any], holder: Any) -> None:
        if _counts(value, code):
            found.append(Read(f"{place} of {whose}", name, as_it_is(value), look, holder=holder))

    for name, value, look, holder in places:
        if name not in code.written and not isinstance(value, dict):
            note(f"variable '{name}'", name, value, look, holder)
        if isinstance(value, FunctionType) and depth:
            found += variables_of(value, whose, depth - 1)
    for name, value in [*((name, value) for name, value, *_ in places), ("self", owner)]:
        if isinstance(value, dict):
            for key in sorted(code.keys & value.keys(), key=repr) if not code.writes_items else ():
                note(f"'{name}[{key!r}]'", key, value[key], partial(value.get, key), value)
        elif _may_hold(value):
            own = getattr(value, "__dict__", None) or _slots(value)
            for attribute in sorted(code.attributes & own.keys() - code.written):
                look = partial(getattr, value, attribute, MISSING)
                note(f"'{name}.{attribute}'", attribute, own[attribute], look, value)
            for attribute in sorted(code.attributes) if depth else ():
                called = own.get(attribute) if isinstance(value, ModuleType) else _method(value, attribute)
                if isinstance(called, FunctionType | MethodType):
                    found += variables_of(called, whose, depth - 1)
    return found


def _slots(value: Any) -> dict[str, Any]:
    names = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    return {name: getattr(value, name) for name in names if isinstance(name, str) and hasattr(value, name)}


def _method(value: Any, name: str) -> Any:
    found = inspect.getattr_static(type(value), name, None)
    return MethodType(found, value) if isinstance(found, FunctionType) else None


def _may_hold(value: Any) -> bool:
    """Say whether a value around code may hold what the code takes from it: an object, or a user's module of code."""
    if isinstance(value, ModuleType):
        file = getattr(value, "__file__", None)
        return file is not None and is_user_file(file)
    return not isinstance(value, nn.Module | FunctionType | type)


def _counts(value: Any, code: _Named) -> bool:
    """Say whether a value around code decides what it computes: numbers, words, tensors, and lists that it reads."""
    if isinstance(value, (*PLAIN, Tensor)) and not isinstance(value, nn.Parameter):
        return True
    if isinstance(value, list | tuple) and not code.attributes & _GROWING:
        return all(isinstance(held, (*PLAIN, Tensor)) for held in value)
    return False


@dataclass
class _Named:
    """What code names outside of itself, functions inside it too."""

    variables: dict[str, None]
    attributes: set[str]
    keys: set[Any]
    written: set[str]
    writes_items: bool = False

    @classmethod
    @lru_cache(maxsize=4096)
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


__all__ = ["LEFT", "MANY", "MISSING", "PLAIN", "Read", "Which", "as_it_is", "same", "variables_of"]
