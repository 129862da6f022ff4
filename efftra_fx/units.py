"""Numbers for people to read; files and JSON keep plain ones."""

from __future__ import annotations

import math

SCALES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def size_text(count: float) -> str:
    """Bytes in the largest unit of which there is at least one, three figures.

    >>> size_text(17_200_000_000), size_text(999_600), size_text(74.1), size_text(0)
    ('17.2 GB', '1 MB', '74 B', '0 B')
    """
    for scale, unit in SCALES:
        if abs(count) >= 0.9995 * scale:
            return f"{count / scale:.3g} {unit}" if abs(count) < 999.5 * scale else f"{count / scale:.0f} {unit}"
    return f"{count:.0f} B"


def number_text(value: float) -> str:
    """A number in a few figures, also one that no float can hold.

    >>> number_text(2_500_000), number_text(10**400)
    ('2.5e+06', 'a number of 401 digits')
    """
    try:
        return f"{value:g}"
    except OverflowError:
        return f"a number of {math.floor(math.log10(abs(value))) + 1} digits"
