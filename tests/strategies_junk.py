"""Values that nobody can have meant: other types, numbers beyond all bounds, data that was edited blindly."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import strategies as st

HUGE = 10**400  # larger than any float
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 5),
    st.floats(),
    st.text(max_size=3),
    st.sampled_from([10**30, HUGE, -HUGE, float("nan")]),
)


def data(keys: list[str]) -> st.SearchStrategy[Any]:
    """Draw data as a file may hold them, with these keys in objects."""
    return st.recursive(
        LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(keys), inner, max_size=3),
        max_leaves=5,
    )  # fmt: skip


def arguments() -> st.SearchStrategy[Any]:
    """Draw what may be given from Python."""
    strange = st.sampled_from([b"x", 2j, print, object(), {1, 2}, (1, "a")])
    return strange | st.lists(LEAVES, max_size=2).map(tuple) | data(["a"])


@st.composite
def edited(draw: st.DrawFn, whole: Any, keys: list[str]) -> Any:
    """Draw a copy of some data with up to three places set to anything, or left out."""
    result = copy.deepcopy(whole)
    for _ in range(draw(st.integers(1, 3))):
        places = list(_places(result))
        holder, key = draw(st.sampled_from(places)) if places else (result, keys[0])
        if isinstance(holder, dict) and draw(st.integers(0, 4)) == 0:
            key = draw(st.sampled_from(keys))
        if isinstance(holder, dict) and key in holder and draw(st.integers(0, 3)) == 0:
            del holder[key]
        else:
            holder[key] = draw(data(keys))
    return result


def _places(holder: Any) -> Any:
    """Yield each container with each of its keys or indices."""
    inside = holder.items() if isinstance(holder, dict) else enumerate(holder) if isinstance(holder, list) else ()
    for key, value in list(inside):
        yield holder, key
        yield from _places(value)
