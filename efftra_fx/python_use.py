"""What a call of the model reads in Python, and whether what was captured of it holds for the values of now.

What forward reads of modules' attributes and of objects on them (a configuration), and what the loss function
and forward take from around them, is noted as it is: numbers and words by value, lists and dictionaries by what is
in them, tensors, functions and other objects by which they are. A captured step is for these. For
those that forward writes itself, it may be for others too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from efftra_fx.python_reads import PLAIN, Read, Which, same
from efftra_fx.settings import Setting, may_be_set

_LONG_WORDS = 80
_ENOUGH = 4  # values of an attribute that forward writes, after which its value is taken not to matter

Place = tuple[nn.Module, str]


@dataclass(frozen=True)
class PythonUse:
    """What a forward read in Python, and the attributes that it wrote and the modules that it hooked, in words.

    `left` is what it leaves on modules, the same for any rows. `others` are uses of the same computation from
    other values of what forward writes itself, and `met` the one that was met last. `settings` are read, too, and
    given to the graph.
    """

    reads: tuple[Read, ...] = ()
    writes: tuple[str, ...] = ()
    hooked: tuple[str, ...] = ()
    left: Mapping[Place, Any] = field(default_factory=dict)
    others: list[PythonUse] = field(default_factory=list)
    met: list[PythonUse] = field(default_factory=list)
    settings: tuple[Setting, ...] = ()

    @cached_property
    def _quick(self) -> tuple[tuple[Callable[[], Any], Any, Read], ...]:
        """How to look up each read, and the object that it was: most still are, and this is asked at each step."""
        return tuple(
            (read.look, read.value.held if isinstance(read.value, Which) else read.value, read) for read in self.reads
        )

    def moved(self) -> str | None:
        """Say which attribute that forward reads is another one now, or None."""
        for look, exact, read in self._quick:
            if look() is not exact and read.moved:
                break
        else:
            unfit = next((str(one.read) for one in self.settings if not one.fits), None)
            return None if unfit is None else f"{unfit} is another kind of value now than when it was captured"
        was, now = repr(read.value), repr(read.now)
        if was == now or max(len(was), len(now)) > _LONG_WORDS:
            return f"{read} is another one now than when it was captured"
        return f"{read} was {was} when it was captured and is {now} now"

    def holds(self, tried: Callable[[], PythonUse | None]) -> bool:
        """Say whether what was captured is right for the present values.

        Where only what forward writes itself has others it is `tried`, which gives their use if it is; that it
        was for several, and left the same from all, is enough.
        """
        cases = (self, *self.others)
        use = next((case for case in cases if case.moved() is None), None)
        given = all(one.fits for one in self.settings)
        if use is None and given and any(all(one.by_forward for one in case.reads if one.moved) for case in cases):
            last = cases[-_ENOUGH:]
            if len(last) == _ENOUGH and all(_alike_left(case.left, last[0].left) for case in last):
                use = last[-1]
            else:
                use = tried()
                self.others.extend([use] if use is not None else ())
        self.met[:] = [use] if use is not None else []
        return use is not None

    def steady(self) -> PythonUse:
        """Return this without what is another now, though modules are as they were: forward writes it elsewhere."""
        loose = {str(read) for read in self.reads if read.moved}
        return self._without(lambda read: str(read) in loose) if loose else self

    def fed(self, settings: tuple[Setting, ...]) -> PythonUse:
        """Return this with some of what is read given to the graph."""
        keys = {one.read.key for one in settings}
        return replace(self._without(lambda read: read.key in keys), settings=settings) if settings else self

    def settings_of_now(self) -> tuple[Read, ...]:
        """Return what a graph must be given to be right for the present values, too; none where that cannot be."""
        moved = tuple(read for read in self.reads if read.moved)
        if not all(map(may_be_set, moved)) or not all(one.fits for one in self.settings):
            return ()
        return (*(one.read for one in self.settings), *moved)

    def _without(self, left_out: Callable[[Read], bool]) -> PythonUse:
        reads = tuple(read for read in self.reads if not left_out(read))
        return replace(self, reads=reads, others=[other._without(left_out) for other in self.others])

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
        if all(place in other and same(value, other[place]) for other in others):
            left[place] = value
    return left


def _alike_left(a: Mapping[Place, Any], b: Mapping[Place, Any]) -> bool:
    return a.keys() == b.keys() and all(same(value, b[place]) for place, value in a.items())


def _is_told(value: Any) -> bool:
    """Say whether a value can be told by what it is: plain, or a tensor that autograd does not follow."""
    if isinstance(value, tuple):
        return all(map(_is_told, value))
    if isinstance(value, Tensor):
        return not value.requires_grad
    return isinstance(value, (*PLAIN, torch.dtype, torch.device, torch.Size))


__all__ = ["Place", "PythonUse", "same_left"]
