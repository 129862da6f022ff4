"""Read JSON that people may have written or edited: whatever is wrong with it is one kind of error."""

from __future__ import annotations

import json


def read_json(text: str) -> object:
    """Return the data of a JSON text; raise ValueError that says what is wrong, also where Python's limits are met.

    >>> read_json("[1, 2.5]")
    [1, 2.5]
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("lists and objects are nested too deeply") from None


__all__ = ["read_json"]
