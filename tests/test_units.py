"""Bytes are shown in the unit that fits them, and never as a power of ten."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from efftra_fx.units import size_text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (74_123, "74.1 kB"),
        (999_700, "1 MB"),
        (17_249_000_000, "17.2 GB"),
        (2.5e15, "2500 TB"),
        (-3_000_000, "-3 MB"),
    ],
)
def test_the_unit_fits_the_size(count: float, text: str) -> None:
    assert size_text(count) == text


@given(st.integers(0, 10**17))
def test_what_is_read_back_is_close(count: int) -> None:
    text = size_text(count)
    assert "e" not in text
    number, unit = text.split()
    scale = {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}[unit]
    assert float(number) * scale == pytest.approx(count, rel=0.005, abs=0.5)
