"""Where a value's elements lie on the ranks of a tensor group.

A cut deals the indices of one dimension out to the ranks. A rank's share is a list of ranges,
not just one, so that a fused weight can be cut by heads:

    rows of a fused qkv weight, 2 ranks    | q q q q | k k k k | v v v v |
    rank 0                                   q q       k k       v v
    rank 1                                       q q       k k       v v

Shares are disjoint, cover the dimension, may differ in size, and none is empty. A rank holds its
share's elements in rising order. Where a dimension is a multiple of the batch's rows, the cut
describes one period of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

Range: TypeAlias = tuple[int, int]
Ranges: TypeAlias = tuple[Range, ...]


@dataclass(frozen=True)
class Cut:
    """Shares of the indices 0 … size - 1, one for each rank.

    >>> Cut.even(7, 3).parts
    (((0, 3),), ((3, 5),), ((5, 7),))
    """

    size: int
    parts: tuple[Ranges, ...]

    @classmethod
    def even(cls, size: int, width: int) -> Cut | None:
        """Return runs of neighbours whose lengths differ by at most one, longer ones first; None if one is empty."""
        if size < width:
            return None
        small, longer = divmod(size, width)
        stops = [small * i + min(i, longer) for i in range(width + 1)]
        return cls(size, tuple(((a, b),) for a, b in zip(stops, stops[1:], strict=False)))

    @property
    def width(self) -> int:
        """Number of ranks."""
        return len(self.parts)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Number of indices of each rank."""
        return tuple(sum(b - a for a, b in part) for part in self.parts)

    @property
    def share(self) -> float:
        """The largest rank's part of the whole."""
        return max(self.lengths) / self.size

    @property
    def runs(self) -> bool:
        """Say whether every rank has one run of neighbours."""
        return all(len(part) == 1 for part in self.parts)

    def times(self, inner: int) -> Cut:
        """Return the cut of this dimension merged with an inner one that is not cut.

        >>> Cut.even(2, 2).times(4).parts
        (((0, 4),), ((4, 8),))
        """
        return Cut(self.size * inner, tuple(tuple((a * inner, b * inner) for a, b in part) for part in self.parts))

    def repeat(self, outer: int) -> Cut:
        """Return the cut of this dimension merged with an outer one that is not cut.

        >>> Cut.even(2, 2).repeat(2).parts
        (((0, 1), (2, 3)), ((1, 2), (3, 4)))
        """
        parts = [
            _joined((a + i * self.size, b + i * self.size) for i in range(outer) for a, b in part)
            for part in self.parts
        ]
        return Cut(self.size * outer, tuple(parts))

    def divide(self, inner: int) -> Cut | None:
        """Return the cut whose `times(inner)` this is, None where shares do not consist of whole pieces."""
        if self.size % inner or any(a % inner or b % inner for part in self.parts for a, b in part):
            return None
        parts = tuple(tuple((a // inner, b // inner) for a, b in part) for part in self.parts)
        return Cut(self.size // inner, parts)

    def period(self, size: int) -> Cut | None:
        """Return the cut of `size` indices whose repetition this is, None if it is none."""
        if self.size % size:
            return None
        first = self.segment(0, size)
        return first if first is not None and first.repeat(self.size // size) == self else None

    def around(self, start: int, size: int) -> Cut | None:
        """Return a cut of `size` indices whose segment from `start` on this is; None if a rank would get no more.

        Where the size is a multiple, pieces like this one are cut alike (so thirds of a fused weight by heads).

        >>> Cut.even(4, 2).around(4, 8).parts
        (((0, 2), (4, 6)), ((2, 4), (6, 8)))
        """
        if size % self.size == 0 and start % self.size == 0:
            return self.repeat(size // self.size)
        ends = start, size - start - self.size
        before, after = (Cut.even(rest, self.width) if rest else None for rest in ends)
        if any(rest and cut is None for rest, cut in zip(ends, (before, after), strict=True)):
            return None
        return chain_cuts([cut for cut in (before, self, after) if cut is not None])

    def segment(self, start: int, stop: int) -> Cut | None:
        """Return the cut of the indices [start, stop), counted from 0; None if a rank has none of them."""
        parts = [
            tuple((max(a, start) - start, min(b, stop) - start) for a, b in part if a < stop and b > start)
            for part in self.parts
        ]
        return Cut(stop - start, tuple(parts)) if all(parts) else None

    def __str__(self) -> str:
        return "|".join(",".join(f"{a}:{b}" for a, b in part) for part in self.parts)


def chain_cuts(cuts: Sequence[Cut]) -> Cut:
    """Return the cut of dimensions laid one behind the other."""
    parts: list[list[Range]] = [[] for _ in cuts[0].parts]
    start = 0
    for cut in cuts:
        for part, more in zip(parts, cut.parts, strict=True):
            part.extend((a + start, b + start) for a, b in more)
        start += cut.size
    return Cut(start, tuple(_joined(part) for part in parts))


def _joined(ranges: Iterable[Range]) -> Ranges:
    result: list[Range] = []
    for a, b in ranges:
        if result and result[-1][1] == a:
            result[-1] = (result[-1][0], b)
        else:
            result.append((a, b))
    return tuple(result)


@dataclass(frozen=True)
class Placement:
    """How a value, and its gradient, lie on the ranks of a tensor group.

    kind       value                        gradient
    "whole"    the same on every rank       the same on every rank
    "copied"   the same on every rank       partial sums
    "cut"      each rank has its share      each rank has its share
    "partial"  partial sums                 the same on every rank
    """

    kind: Literal["whole", "copied", "cut", "partial"]
    dim: int = 0
    cut: Cut | None = None

    def __str__(self) -> str:
        return self.kind if self.cut is None else f"cut dim {self.dim} at {self.cut}"

    @property
    def share(self) -> float:
        """The largest rank's part of the value's elements."""
        return 1.0 if self.cut is None else self.cut.share


WHOLE = Placement("whole")
COPIED = Placement("copied")
PARTIAL = Placement("partial")


def cut_along(dim: int, cut: Cut) -> Placement:
    """Return the placement that cuts a dimension."""
    return Placement("cut", dim, cut)


__all__ = ["COPIED", "PARTIAL", "WHOLE", "Cut", "Placement", "Range", "Ranges", "chain_cuts", "cut_along"]
