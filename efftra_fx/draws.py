"""Random numbers that are a function of where they are used, and of nothing that a plan decides.

Each number is computed from a counter, with no state between numbers (Salmon, Moraes, Dror, Shaw,
"Parallel random numbers: as easy as 1, 2, 3", SC 2011, 10.1145/2063384.2063405). Here the counter is
(seed of the step, row of the whole batch, operator, position in the row):

    seed, row        -> two keys of 64 bits, once a step         `keys_of`
    keys, operator   -> two keys of 64 bits, once a call
    keys, position   -> 64 random bits                           `_words`

A part of the batch takes its rows' keys, as it takes its rows of any input; so it draws what the
whole batch draws for these rows. The mixing function is that of SplitMix64 (Steele, Lea, Flood, "Fast
splittable pseudorandom number generators", OOPSLA 2014, 10.1145/2660193.2660195), into which the
second key enters halfway, so that no two streams are each other's continuation. It takes a tenth of
Philox's operations, which matters where each is a call of torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

ROW_KEYS, WHOLE_KEYS = "random:rows", "random:whole"  # inputs of a graph that draws; no argument has such names
KEY_DIMS: dict[str, int | None] = {ROW_KEYS: 0, WHOLE_KEYS: None}  # along which dimension they have rows

_GAMMA, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_WORD = 1 << 64

_LIBRARY = torch.library.Library("efftra_draw", "DEF")
_LIBRARY.define("keep(Tensor keys, SymInt[] shape, int dim, int number, float drop) -> Tensor")
_LIBRARY.define("uniform(Tensor keys, SymInt[] shape, int dim, int number, ScalarType dtype) -> Tensor")


def keys_of(seed: int, rows: int, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """Return the keys of a step's rows (int64, one line of two keys a row), and those of what has no rows.

    >>> first, both = keys_of(3, 1), keys_of(3, 2)
    >>> bool((first["random:rows"] == both["random:rows"][:1]).all())
    True
    """
    start = _mixed((seed + _GAMMA) % _WORD)
    numbers = torch.arange(-1, rows, dtype=torch.int64)  # row -1 stands for what belongs to no row
    first = _mix_(numbers.mul_(_signed(_GAMMA)).add_(_signed(start)))
    keys = torch.stack([first, _mix_(first + _signed(_GAMMA))], 1).to(device)
    return {ROW_KEYS: keys[1:].contiguous(), WHOLE_KEYS: keys[:1].contiguous()}


def _keep(keys: Tensor, shape: Sequence[int], dim: int, number: int, drop: float) -> Tensor:
    """Return a bool tensor, each element False with probability `drop` (to a multiple of 2^-32)."""
    limit = round(drop * 2**32)
    if not 0 < limit < 2**32:
        return torch.full(_shape(keys, shape, dim), limit <= 0, dtype=torch.bool, device=keys.device)
    count = math.prod(shape)
    halves = _words(keys, (count + 1) // 2, number).view(torch.int32)[:, :count]
    return _laid_out(halves >= limit - 2**31, shape, dim)


def _uniform(keys: Tensor, shape: Sequence[int], dim: int, number: int, dtype: torch.dtype) -> Tensor:
    """Return numbers between 0 and 1, never these themselves: the middles of 2^52 (float32: 2^23) equal intervals."""
    count = math.prod(shape)
    if dtype is torch.float64:
        bits = _words(keys, count, number).bitwise_right_shift_(12).bitwise_and_(2**52 - 1)
        return _laid_out(bits.to(dtype).add_(0.5).mul_(2.0**-52), shape, dim)
    halves = _words(keys, (count + 1) // 2, number).view(torch.int32)[:, :count]
    bits = halves.bitwise_right_shift(9).bitwise_and_(2**23 - 1)
    return _laid_out(bits.to(torch.float32).add_(0.5).mul_(2.0**-23), shape, dim).to(dtype)


def _words(keys: Tensor, count: int, number: int) -> Tensor:
    """Return 64 random bits for each of `count` positions of each row, as int64 [rows, count]."""
    offset = _mixed((number + 1) * _GAMMA % _WORD)
    first, second = keys[:, :1] ^ _signed(offset), keys[:, 1:] ^ _signed(_mixed(offset))
    words = first + torch.arange(count, dtype=torch.int64, device=keys.device).mul_(_signed(_GAMMA))
    return _mix_(words, second)


def _mix_(words: Tensor, key: Tensor | None = None) -> Tensor:
    """Mix int64 words in place, so that each bit decides over all; a key enters halfway."""
    moved = torch.bitwise_right_shift(words, 30).bitwise_and_((1 << 34) - 1)  # a shift keeps the sign
    words.bitwise_xor_(moved).mul_(_signed(_FIRST))
    if key is not None:
        words.bitwise_xor_(key)
    torch.bitwise_right_shift(words, 27, out=moved).bitwise_and_((1 << 37) - 1)
    words.bitwise_xor_(moved).mul_(_signed(_SECOND))
    torch.bitwise_right_shift(words, 31, out=moved).bitwise_and_((1 << 33) - 1)
    return words.bitwise_xor_(moved)


def _mixed(word: int) -> int:
    """Mix one word as `_mix_` does."""
    word = (word ^ (word >> 30)) * _FIRST % _WORD
    word = (word ^ (word >> 27)) * _SECOND % _WORD
    return word ^ (word >> 31)


def _signed(word: int) -> int:
    return word - _WORD if word >= _WORD // 2 else word


def _shape(keys: Tensor, shape: Sequence[int], dim: int) -> list[int]:
    """Return the shape of so many rows, of one row's shape, behind each other along `dim`."""
    return [size * keys.shape[0] if d == dim else size for d, size in enumerate(shape)]


def _laid_out(values: Tensor, shape: Sequence[int], dim: int) -> Tensor:
    """Return values [rows, elements of a row] in the shape of all rows, contiguous."""
    rows, before = values.shape[0], math.prod(shape[:dim])
    if before != 1:
        values = values.reshape(rows, before, -1).transpose(0, 1)
    return values.reshape([size * rows if d == dim else size for d, size in enumerate(shape)]).contiguous()


def _fake_keep(keys: Tensor, shape: Sequence[int], dim: int, number: int, drop: float) -> Tensor:
    return keys.new_empty(_shape(keys, shape, dim), dtype=torch.bool)


def _fake_uniform(keys: Tensor, shape: Sequence[int], dim: int, number: int, dtype: torch.dtype) -> Tensor:
    return keys.new_empty(_shape(keys, shape, dim), dtype=dtype)


for _name, _function, _fake in (("keep", _keep, _fake_keep), ("uniform", _uniform, _fake_uniform)):
    _LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"efftra_draw::{_name}", _fake, lib=_LIBRARY)

KEEP, UNIFORM = torch.ops.efftra_draw.keep.default, torch.ops.efftra_draw.uniform.default

__all__ = ["KEEP", "KEY_DIMS", "ROW_KEYS", "UNIFORM", "WHOLE_KEYS", "keys_of"]
