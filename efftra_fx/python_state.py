"""What forward reads and writes in Python: plain attributes of modules, and random numbers that are not torch's.

A captured step runs no Python. A number that forward counts up on a module, or draws from
`random` or NumPy, would stay for ever what it was during capture. Where that changes what is
computed it is refused by name; where it does not, it is said. What forward leaves behind whatever the
rows are (the longest length so far, a table for a length) is put there after each step in its place. What
a user sets between steps (a dropout's `p`, a temperature) makes another form of step.
"""

from __future__ import annotations

import copy
import enum
import inspect
import os
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

from torch import Tensor, nn

from efftra_fx.environment import environment_noted
from efftra_fx.places import is_user_file
from efftra_fx.python_reads import LEFT, MANY, MISSING, PLAIN, Read, as_it_is, variables_of
from efftra_fx.python_use import Place, PythonUse

# switches that a captured step is compared by anyway, and what any call reads, which computes the same
_OWN = frozenset({*nn.Module().__dict__, "training", "_compiled_call_impl"})
_KINDS_OF_HOOKS = ("_hooks", "_hooks_with_kwargs", "_always_called")
_HOOKS = tuple(name for name in nn.Module().__dict__ if name.endswith(_KINDS_OF_HOOKS))
_CONTAINERS = (list, dict, set)
_NO_OBJECTS = (nn.Module, Tensor, type, enum.Enum, FunctionType, MethodType, ModuleType)
_FOREIGN = ("torch", "efftra_fx", "logging", "threading")
_WRITTEN_IN_PYTHON = 1 << 9  # flags of types: Py_TPFLAGS_HEAPTYPE, and with the next Py_TPFLAGS_IMMUTABLETYPE
_KIND = 3 << 8
_MOST = 0x12DD9BB3  # the word of a Mersenne twister that comes out as ones alone


class PythonState:
    """The Python state of modules as it is now: plain attributes, hooks, and generators outside of torch."""

    def __init__(self, *models: nn.Module) -> None:
        self.modules = {module: path for model in models for path, module in model.named_modules()}
        self.attributes = {module: _attributes(module) for module in self.modules}
        self.contents = {
            (module, name): (as_it_is(value), copy.copy(value))
            for module, held in self.attributes.items()
            for name, value in held.items()
            if isinstance(value, _CONTAINERS)
        }
        self.hooks = {module: _hooks(module) for module in self.modules}
        self.draws = generators()

    def extremes(self) -> Iterator[None]:
        """Put the generators outside of torch into states that give least, then most, and back at the end."""
        try:
            for word in (0, _MOST):
                _set_draws(word)
                yield
        finally:
            set_generators(self.draws)

    def drawn(self) -> str | None:
        """Say which generator outside of torch has been drawn from since, or None."""
        return next((name for name, state in generators().items() if state != self.draws.get(name, state)), None)

    def written(self) -> list[str]:
        """Return the attributes that are others now, in words."""
        return list(self._named(self._changed()))

    def hooked(self) -> list[str]:
        """Return the modules that have other hooks now, in words."""
        return [f"hooks of '{self.modules[module] or 'the model'}'" for module in self._hooked()]

    def changed(self, assigned: Iterable[Place] = ()) -> dict[Place, Any]:
        """Return the attributes that are others now, as they are, and those that were `assigned`."""
        places = dict.fromkeys((*self._changed(), *(place for place in assigned if place[0] in self.modules)))
        return {(module, name): vars(module).get(name, MISSING) for module, name in places if name not in _OWN}

    def use(
        self,
        noted: Noted,
        loss_fn: Any = None,
        left: Mapping[Place, Any] | None = None,
        changed: Iterable[Place] | None = None,
    ) -> PythonUse:
        """Return what was read, and written since, or what is known to be `changed`.

        Of what forward writes itself on modules, only what it leaves (`left`) is among what it reads.
        """
        places, left = self._changed() if changed is None else list(changed), left or {}
        for module, name in left:
            LEFT.setdefault(module, set()).add(name)
        reads = [
            Read(_place(self.modules[m], n), n, value, _look(m, n), m, vars(m) if n in vars(m) else None)
            for (m, n), value in noted.reads.items()
            if (m, n) in left or (m, n) not in places
        ]
        reads += noted.of_objects.values()
        for function in (*noted.functions, *self._hooks()):
            reads += variables_of(function, f"{getattr(function, '__qualname__', 'a hook')}()")
        writes = self._named([place for place in places if place not in left])
        return PythonUse((*reads, *variables_of(loss_fn)), writes, tuple(self.hooked()), left)

    def _hooks(self) -> dict[Any, None]:
        hooks = ((*module._forward_pre_hooks.values(), *module._forward_hooks.values()) for module in self.modules)
        return dict.fromkeys(hook for some in hooks for hook in some)

    def _named(self, places: Iterable[Place]) -> tuple[str, ...]:
        return tuple(_place(self.modules[module], name) for module, name in places)

    def restore(self) -> None:
        """Give the modules the attributes and hooks that they had, and the generators outside of torch their states.

        A forward that installs its hooks at its first call marks that in an attribute: both must go back.
        """
        set_generators(self.draws)
        for module in self._hooked():
            for name, before in self.hooks[module].items():
                held = vars(module)[name]
                held.clear()
                held.update(before)
        for module, name in self._changed():
            value = self.attributes[module].get(name, MISSING)
            if value is MISSING:
                del vars(module)[name]
                continue
            vars(module)[name] = value
            if isinstance(value, _CONTAINERS):
                _fill(value, self.contents[module, name][1])

    def _hooked(self) -> list[nn.Module]:
        return [module for module, before in self.hooks.items() if _hooks(module) != before]

    def _changed(self) -> list[Place]:
        changed = []
        for module, before in self.attributes.items():
            now = _attributes(module)
            for name in dict.fromkeys((*before, *now)):
                a, b = before.get(name, MISSING), now.get(name, MISSING)
                same = type(a) is type(b) and a == b if isinstance(a, PLAIN) else a is b
                if not same or (isinstance(a, _CONTAINERS) and as_it_is(a) != self.contents[module, name][0]):
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


@dataclass(frozen=True)
class Noted:
    """Attributes of modules that were read before they were assigned, as they were, and those assigned.

    Neither parameters, buffers nor modules count, and of a class only what a user wrote. `of_objects` are read of
    objects that modules keep (a configuration), by object and name; `functions` are the methods that were read.
    """

    reads: dict[Place, Any] = field(default_factory=dict)
    assigned: dict[Place, None] = field(default_factory=dict)
    of_objects: dict[tuple[int, str], Read] = field(default_factory=dict)
    functions: dict[FunctionType, None] = field(default_factory=dict)

    def method(self, function: Any) -> bool:
        """Note a method that was read, if a user wrote it; say whether it is one."""
        if not isinstance(function, FunctionType) or not is_user_file(function.__code__.co_filename):
            return False
        self.functions[function] = None
        return True


@contextmanager
def reads_noted(state: PythonState) -> Iterator[Noted]:
    """While this lasts, write down the attributes that are read and assigned."""
    noted = Noted()
    plain, assign = object.__getattribute__, nn.Module.__setattr__
    objects = _Objects(noted)

    def get(module: Any, name: str) -> Any:
        try:
            value = plain(module, name)
        except AttributeError:
            own = plain(module, "__dict__")
            if not any(name in own.get(kind, ()) for kind in ("_parameters", "_buffers", "_modules")):
                note(module, name, MISSING)
            raise
        note(module, name, value)
        return value

    def note(module: nn.Module, name: str, value: Any) -> None:
        place = module, name
        if name in _OWN or name.startswith("__") or module not in state.modules or place in noted.assigned:
            return
        if name in plain(module, "__dict__"):
            if place not in noted.reads:
                noted.reads[place] = as_it_is(value)
            objects.watch(value, state.modules[module], name)
        elif place not in noted.reads:
            of_class = getattr(type(module), name, MISSING)
            if noted.method(of_class) or isinstance(of_class, (*PLAIN, *_CONTAINERS, tuple)) or value is MISSING:
                noted.reads[place] = as_it_is(of_class)

    def put(module: nn.Module, name: str, value: Any) -> None:
        assign(module, name, value)
        if name in plain(module, "__dict__"):
            noted.assigned[module, name] = None

    nn.Module.__getattribute__ = get  # type: ignore[method-assign]
    nn.Module.__setattr__ = put  # type: ignore[method-assign, assignment]
    try:
        with environment_noted(lambda read: noted.of_objects.setdefault((id(os.environ), read.name), read)):
            yield noted
    finally:
        del nn.Module.__getattribute__
        nn.Module.__setattr__ = assign  # type: ignore[method-assign]
        objects.leave()


class _Objects:
    """Notes what is read of objects, by a `__getattribute__` of their class that lasts as long as this."""

    def __init__(self, noted: Noted) -> None:
        self.noted = noted
        self.held: dict[int, tuple[Any, str]] = {}  # an object, and its place in words
        self.classes: dict[tuple[type, str], Any] = {}  # what a class had, by its name

    def watch(self, value: Any, path: str, name: str) -> None:
        """Note from now on what is read of a value, if it is an object of a class written in Python, or holds some."""
        if isinstance(value, (dict, list, tuple)) and len(value) <= MANY:
            for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
                self.watch(inner, path, f"{name}[{key!r}]")
        kind: Any = type(value)
        if id(value) in self.held or isinstance(value, (*PLAIN, *_CONTAINERS, tuple, *_NO_OBJECTS)):
            return
        if kind.__flags__ & _KIND != _WRITTEN_IN_PYTHON or kind.__module__.partition(".")[0] in _FOREIGN:
            return
        self.held[id(value)] = value, f"{path}.{name}" if path else name
        if (kind, "__getattribute__") in self.classes:
            return
        for way in ("__getattribute__", "__getattr__"):
            if hasattr(kind, way):
                own = vars(kind).get(way, MISSING)
                with suppress(TypeError, AttributeError):  # a class may take nothing
                    setattr(kind, way, self._noting(getattr(kind, way)))
                    self.classes[kind, way] = own

    def _noting(self, inherited: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
        def get(owner: Any, attribute: str) -> Any:
            found = inherited(owner, attribute)
            if id(owner) in self.held and not attribute.startswith("__"):
                self.note(owner, attribute, found)
            return found

        return get

    def note(self, owner: Any, name: str, value: Any) -> None:
        """Note an attribute that was read of an object; what a property computes is noted where that reads it."""
        place = self.held[id(owner)][1]
        if isinstance(inspect.getattr_static(type(owner), name, None), property):
            return
        if isinstance(value, MethodType):
            self.noted.method(value.__func__)
        if isinstance(value, (*PLAIN, *_CONTAINERS, tuple, Tensor, SimpleNamespace)):
            if (id(owner), name) not in self.noted.of_objects:
                look = partial(getattr, owner, name, MISSING)
                read = Read(f"'{place}.{name}'", name, as_it_is(value), look, holder=owner)
                self.noted.of_objects[id(owner), name] = read
        self.watch(value, place, name)

    def leave(self) -> None:
        """Give the classes back what they had."""
        for (kind, way), own in self.classes.items():
            if own is MISSING:
                delattr(kind, way)
            else:
                setattr(kind, way, own)


def _look(module: nn.Module, name: str) -> Callable[[], Any]:
    """Return what looks up an attribute: on the module, where it has it, else on its class."""
    own = vars(module)
    return partial(own.get, name, MISSING) if name in own else partial(_held, module, name)


def _held(module: nn.Module, name: str) -> Any:
    return vars(module)[name] if name in vars(module) else getattr(type(module), name, MISSING)


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in _OWN}


def _hooks(module: nn.Module) -> dict[str, dict[int, Any]]:
    return {name: dict(held) for name in _HOOKS if (held := vars(module).get(name)) is not None}


def _fill(value: Any, content: Any) -> None:
    """Give a list, dictionary or set what it had, in place."""
    value.clear()
    (value.extend if isinstance(value, list) else value.update)(content)


def generators() -> dict[str, Any]:
    """Return the states of the generators outside of torch: of `random`, and of NumPy where it is loaded."""
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


def set_generators(states: dict[str, Any]) -> None:
    """Give the generators outside of torch these states."""
    random.setstate(states["random"])
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and "numpy.random" in states:
        kind, key, *rest = states["numpy.random"]
        numpy.random.set_state((kind, numpy.frombuffer(key, dtype=numpy.uint32), *rest))


def _place(path: str, name: str) -> str:
    return f"'{path}.{name}'" if path else f"'{name}' of the model"


__all__ = ["Noted", "PythonState", "generators", "python_kept", "reads_noted", "set_generators"]
