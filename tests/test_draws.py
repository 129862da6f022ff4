"""Random numbers that are a function of seed, row, operator and position: what a part draws is what the whole draws."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from efftra_fx.draws import KEEP, ROW_KEYS, UNIFORM, WHOLE_KEYS, keys_of

WORD = 2**64


def mix(word: int, key: int = 0) -> int:
    """Mix a word as the published SplitMix64 does, a key coming in halfway."""
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % WORD) ^ key
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB % WORD
    return word ^ (word >> 31)


def reference(seed: int, row: int, number: int, position: int) -> int:
    """Return 64 random bits, computed one by one."""
    gamma = 0x9E3779B97F4A7C15
    first = mix((mix((seed + gamma) % WORD) + row * gamma) % WORD)
    second = mix((first + gamma) % WORD)
    offset = mix((number + 1) * gamma % WORD)
    return mix(((first ^ offset) + position * gamma) % WORD, second ^ mix(offset))


def test_splitmix_gives_its_published_numbers() -> None:
    assert [mix(0x9E3779B97F4A7C15 * (i + 1) % WORD) for i in range(3)] == [
        0xE220A8397B1DCDAF,
        0x6E789E6AA1B965F4,
        0x06C45D188009454F,
    ]


@given(st.integers(0, 2**63 - 1), st.integers(0, 5), st.integers(0, 9), st.integers(0, 6))
def test_numbers_are_those_of_the_definition(seed: int, row: int, number: int, position: int) -> None:
    keys = keys_of(seed, 6)
    word = reference(seed, row, number, position)
    found = UNIFORM(keys[ROW_KEYS], [7], 0, number, torch.float64).view(6, 7)[row, position]
    assert float(found) == ((word >> 12) + 0.5) * 2.0**-52
    whole = UNIFORM(keys[WHOLE_KEYS], [7], 0, number, torch.float64)[position]
    assert float(whole) == ((reference(seed, -1, number, position) >> 12) + 0.5) * 2.0**-52
    half = reference(seed, row, number, position // 2) >> 32 * (position % 2) & 0xFFFFFFFF
    signed = half - 2**32 if half >= 2**31 else half
    kept = KEEP(keys[ROW_KEYS], [7], 0, number, 0.3).view(6, 7)[row, position]
    assert bool(kept) == (signed >= round(0.3 * 2**32) - 2**31)


def take(whole: Tensor, dim: int, rows: int, first: int, stop: int) -> Tensor:
    """Return the rows [first, stop) of a value with so many rows along `dim`."""
    each = whole.shape[dim] // rows
    return whole.narrow(dim, first * each, (stop - first) * each)


@given(st.data(), st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(1, 6))
def test_a_part_draws_what_the_whole_draws_for_its_rows(data: st.DataObject, shape: list[int], rows: int) -> None:
    dim = data.draw(st.integers(0, len(shape) - 1))
    first = data.draw(st.integers(0, rows - 1))
    stop = data.draw(st.integers(first + 1, rows))
    keys = keys_of(data.draw(st.integers(0, 2**63 - 1)), rows)[ROW_KEYS]
    for draw, extra in ((KEEP, (0.4,)), (UNIFORM, (torch.float64,)), (UNIFORM, (torch.float32,))):
        whole = draw(keys, shape, dim, 3, *extra)
        assert torch.equal(draw(keys[first:stop], shape, dim, 3, *extra), take(whole, dim, rows, first, stop))
        assert list(whole.shape) == [size * rows if d == dim else size for d, size in enumerate(shape)]
        with FakeTensorMode() as mode:
            fake = draw(mode.from_tensor(keys), shape, dim, 3, *extra)
        assert (fake.shape, fake.dtype) == (whole.shape, whole.dtype) and whole.is_contiguous()


def test_more_rows_change_nothing_for_the_first() -> None:
    few, many = keys_of(7, 3), keys_of(7, 11)
    assert torch.equal(few[ROW_KEYS], many[ROW_KEYS][:3]) and torch.equal(few[WHOLE_KEYS], many[WHOLE_KEYS])


def test_nothing_and_everything_can_be_dropped() -> None:
    keys = keys_of(7, 2)[ROW_KEYS]
    assert KEEP(keys, [3], 0, 0, 0.0).all() and not KEEP(keys, [3], 0, 0, 1.0).any()
    assert KEEP(keys_of(7, 2)[WHOLE_KEYS], [], 0, 0, 0.5).shape == ()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_numbers_are_spread_evenly(dtype: torch.dtype) -> None:
    found = UNIFORM(keys_of(11, 256)[ROW_KEYS], [1024], 0, 5, dtype).double()
    count = found.numel()
    assert 0 < found.min() < 1e-4 and 1 - 1e-4 < found.max() < 1
    for bins in (16, 256):
        expected = count / bins
        squares = float(((torch.histc(found, bins, 0, 1) - expected) ** 2 / expected).sum())
        assert abs(squares - (bins - 1)) < 5 * math.sqrt(2 * (bins - 1))  # five standard deviations of chi squared


@pytest.mark.parametrize("drop", [0.1, 0.5])
def test_as_many_are_dropped_as_asked(drop: float) -> None:
    kept = KEEP(keys_of(12, 512)[ROW_KEYS], [1024], 0, 5, drop).double().view(512, 1024)
    for some in (kept, kept[:128], kept[:, :256], kept[::2], kept[:, ::2]):
        assert abs(float(some.mean()) - (1 - drop)) < 5 * math.sqrt(drop * (1 - drop) / some.numel())


def centred(seed: int, number: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return numbers of mean 0 and variance 1: 256 rows of 256."""
    found: Tensor = UNIFORM(keys_of(seed, 256)[ROW_KEYS], [256], 0, number, dtype)
    return (found.double().view(256, 256) - 0.5) * math.sqrt(12)


def test_neighbours_have_nothing_to_do_with_each_other() -> None:
    one = centred(5, 0)
    others = [centred(5, 1), centred(6, 0), centred(5 + 2**32, 0), one.roll(1, 0), one.roll(1, 1), one.roll(128, 0)]
    others += [one.t(), centred(5, 0, torch.float32), one.flip(0)]
    for other in others:
        assert abs(float((one * other).mean())) < 5 / 256  # five standard deviations
        assert abs(float(((one**2 - 1) * (other**2 - 1)).mean())) < 5 / 256
