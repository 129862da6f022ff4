"""What forward reads and writes in Python: plain attributes of modules, and random numbers that are not torch's.

A captured step runs no Python. A number that forward counts up on a module, or draws from
`random` or NumPy, would stay for ever what it was during capture. Where that changes what is
computed it is refused by name; where it does not, it is said. What forward leaves behind whatever the
rows are (the longest length so far, a table for a length) is put there after each step in its place. What
a user sets between steps (a dropout's `p`, a temperature) makes another form of step.
"""

from __future__ import annotations

import dis
import inspect
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

_PLAIN = (bool, int, float, complex, str, type(None))
_OWN = frozenset({*nn.Module().__dict__, "training"})  # switches that a captured step is compared by anyway
_KINDS_OF_HOOKS = ("_hooks", "_hooks_with_kwargs", "_always_called")
_HOOKS = tuple(name for name in nn.Module().__dict__ if name.endswith(_KINDS_OF_HOOKS))
_MISSING = object()
_ENOUGH = 4  # values of an attribute that forward writes, after which its value is taken not to matter
_MOST = 0x12DD9BB3  # the word of a Mersenne twister that comes out as ones alone


Place = tuple[nn.Module, str]
_LEFT: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()  # attributes that some forward leaves


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
        return self.module is not None and self.name in _LEFT.get(self.module, ())


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
            if len(last) == _ENOUGH and all(_same_left(case.left, last[0].left) for case in last):
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


class PythonState:
    """The Python state of modules as it is now: plain attributes, hooks, and generators outside of torch."""

    def __init__(self, *models: nn.Module) -> None:
        self.modules = {module: path for model in models for path, module in model.named_modules()}
        self.attributes = {module: _attributes(module) for module in self.modules}
        self.sizes = {(m, name): _size(value) for m, held in self.attributes.items() for name, value in held.items()}
        self.hooks = {module: _hooks(module) for module in self.modules}
        self.draws = _draws()

    def extremes(self) -> Iterator[None]:
        """Put the generators outside of torch into states that give least, then most, and back at the end."""
        try:
            for word in (0, _MOST):
                _set_draws(word)
                yield
        finally:
            _restore_draws(self.draws)

    def drawn(self) -> str | None:
        """Say which generator outside of torch has been drawn from since, or None."""
        return next((name for name, state in _draws().items() if state != self.draws.get(name, state)), None)

    def written(self) -> list[str]:
        """Return the attributes that are others now, in words."""
        return list(self._named(self._changed()))

    def hooked(self) -> list[str]:
        """Return the modules that have other hooks now, in words."""
        return [f"hooks of '{self.modules[module] or 'the model'}'" for module in self._hooked()]

    def changed(self, assigned: Iterable[Place] = ()) -> dict[Place, Any]:
        """Return the attributes that are others now, as they are, and those that were `assigned`."""
        places = dict.fromkeys((*self._changed(), *(place for place in assigned if place[0] in self.modules)))
        return {(module, name): vars(module).get(name, _MISSING) for module, name in places if name not in _OWN}

    def use(
        self,
        read: Mapping[Place, Any],
        loss_fn: Any = None,
        left: Mapping[Place, Any] | None = None,
        changed: Iterable[Place] | None = None,
    ) -> PythonUse:
        """Return what was read, and written since, or what is known to be `changed`.

        Of what forward writes itself, only what it leaves (`left`) is among what it reads.
        """
        places, left = self._changed() if changed is None else list(changed), left or {}
        for module, name in left:
            _LEFT.setdefault(module, set()).add(name)
        reads = (
            Read(_place(self.modules[m], n), n, value, partial(vars(m).get, n), m)
            for (m, n), value in read.items()
            if (m, n) in left or (m, n) not in places
        )
        writes = self._named([place for place in places if place not in left])
        return PythonUse((*reads, *variables_of(loss_fn)), writes, tuple(self.hooked()), left)

    def _named(self, places: Iterable[Place]) -> tuple[str, ...]:
        return tuple(_place(self.modules[module], name) for module, name in places)

    def restore(self) -> None:
        """Give the modules the attributes and hooks that they had, and the generators outside of torch their states.

        A forward that installs its hooks at its first call marks that in an attribute: both must go back.
        """
        _restore_draws(self.draws)
        for module in self._hooked():
            for name, before in self.hooks[module].items():
                held = vars(module)[name]
                held.clear()
                held.update(before)
        for module, name in self._changed():
            value = self.attributes[module].get(name, _MISSING)
            if value is _MISSING:
                del vars(module)[name]
            else:
                vars(module)[name] = value

    def _hooked(self) -> list[nn.Module]:
        return [module for module, before in self.hooks.items() if _hooks(module) != before]

    def _changed(self) -> list[Place]:
        changed = []
        for module, before in self.attributes.items():
            now = _attributes(module)
            for name in dict.fromkeys((*before, *now)):
                a, b = before.get(name, _MISSING), now.get(name, _MISSING)
                same = type(a) is type(b) and a == b if isinstance(a, _PLAIN) else a is b
                if not same or _size(b) != self.sizes.get((module, name)):
                    changed.append((module, name))
        return changed


@contextmanager
def python_kept(*models: object) -> Iterator[None]:
    """Give the modules among these, and the generators outside of torch, their Python state back at the end."""
    before = PythonState(*(model for model in models if isinstance(model, nn.Module)))
    try:
        yield
    finally:
        before.restore()


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


def _same_left(a: Mapping[Place, Any], b: Mapping[Place, Any]) -> bool:
    return a.keys() == b.keys() and all(_same(value, b[place]) for place, value in a.items())


def _is_told(value: Any) -> bool:
    """Say whether a value can be told by what it is: plain, or a tensor that autograd does not follow."""
    if isinstance(value, tuple):
        return all(map(_is_told, value))
    if isinstance(value, Tensor):
        return not value.requires_grad
    return isinstance(value, (*_PLAIN, torch.dtype, torch.device, torch.Size))


def _same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, Tensor):
        return a is b or (a.dtype == b.dtype and a.device == b.device and torch.equal(a, b))
    return bool(a == b)


@dataclass(frozen=True)
class Noted:
    """Plain attributes of modules that were read before they were assigned, with their values, and those assigned.

    Only what a module keeps itself counts, and neither parameters, buffers nor modules.
    """

    reads: dict[Place, Any] = field(default_factory=dict)
    assigned: dict[Place, None] = field(default_factory=dict)


@contextmanager
def reads_noted(state: PythonState) -> Iterator[Noted]:
    """While this lasts, write down the attributes that are read and assigned."""
    noted = Noted()
    plain, assign = object.__getattribute__, nn.Module.__setattr__

    def get(module: Any, name: str) -> Any:
        value = plain(module, name)
        if isinstance(value, _PLAIN) and name not in _OWN and name in plain(module, "__dict__"):
            if module in state.modules and (module, name) not in noted.assigned:
                noted.reads.setdefault((module, name), value)
        return value

    def put(module: nn.Module, name: str, value: Any) -> None:
        assign(module, name, value)
        if name in plain(module, "__dict__"):
            noted.assigned[module, name] = None

    nn.Module.__getattribute__ = get  # type: ignore[method-assign]
    nn.Module.__setattr__ = put  # type: ignore[method-assign, assignment]
    try:
        yield noted
    finally:
        del nn.Module.__getattribute__
        nn.Module.__setattr__ = assign  # type: ignore[method-assign]


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
        *((name, known.get(name, _MISSING), partial(known.get, name)) for name in code.variables),
    ]
    found = [
        Read(f"variable '{name}' of the loss", name, value, look)
        for name, value, look in places
        if isinstance(value, _PLAIN) and name not in code.written
    ]
    for name, value, _ in [*places, ("self", owner, None)]:
        if isinstance(value, dict):
            for key in sorted(code.keys & value.keys(), key=repr) if not code.writes_items else ():
                if isinstance(value[key], _PLAIN):
                    found.append(Read(f"'{name}[{key!r}]' of the loss", name, value[key], partial(value.get, key)))
        elif not isinstance(value, nn.Module | ModuleType | type) and isinstance(
            own := getattr(value, "__dict__", None), dict
        ):
            for attribute in sorted(code.attributes & own.keys() - code.written):
                if isinstance(own[attribute], _PLAIN):
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
        return _MISSING


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in _OWN}


def _hooks(module: nn.Module) -> dict[str, dict[int, Any]]:
    return {name: dict(held) for name in _HOOKS if (held := vars(module).get(name)) is not None}


def _size(value: Any) -> int | None:
    return len(value) if isinstance(value, list | dict | set) else None


def _draws() -> dict[str, Any]:
    numpy: Any = sys.modules.get("numpy.random")
    states: dict[str, Any] = {"random": random.getstate()}
    if numpy is not None:
        kind, key, *rest = numpy.get_state()
        states["numpy.random"] = (kind, key.tobytes(), *rest)
    return states


def _set_draws(word: int) -> None:
    """Let `random` and NumPy give the number that a word of their state stands for, a few hundred times."""
    words = [word] * 600 + list(range(1, 25))  # the rest ends what draws until a number fits
    random.setstate((3, (*words, 0), None))
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.set_state(("MT19937", numpy.array(words, dtype=numpy.uint32), 0, 0, 0.0))


def _restore_draws(states: dict[str, Any]) -> None:
    random.setstate(states["random"])
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and "numpy.random" in states:
        kind, key, *rest = states["numpy.random"]
        numpy.random.set_state((kind, numpy.frombuffer(key, dtype=numpy.uint32), *rest))


def _place(path: str, name: str) -> str:
    return f"'{path}.{name}'" if path else f"'{name}' of the model"


__all__ = ["Noted", "PythonState", "PythonUse", "Read", "python_kept", "reads_noted", "same_left", "variables_of"]
