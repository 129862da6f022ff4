"""Random recipes of models, and random plans and batches to train them by."""

from __future__ import annotations

from drawn import GIVES, LOSSES, Part, Recipe, Run
from drawn_layers import DRAWN
from hypothesis import strategies as st

SHAPES = ((1,), (2,), (3,), (1, 1), (2, 1), (1, 2), (2, 2), (1, 1, 1), (1, 2, 1), (1, 1, 1, 1))


@st.composite
def recipes(draw: st.DrawFn, longest: int = 8) -> Recipe:
    """Draw a model of some layers, one of which may be used again."""
    parts: list[Part] = []
    for index in range(draw(st.integers(2, longest))):
        again = draw(st.integers(-6, index - 1))
        name = parts[again].name if again >= 0 else draw(st.sampled_from(sorted(DRAWN)))
        parts.append(Part(name, draw(st.integers(2, 4)), max(again, -1), draw(st.sampled_from((1, 0, 2)))))
    seldom = st.sampled_from((False, False, False, False, True))
    return Recipe(
        tuple(parts),
        draw(st.sampled_from(sorted(LOSSES))),
        draw(st.sampled_from(GIVES)),
        tied=draw(seldom),
        decides=draw(seldom) and draw(seldom),
        steps_first=draw(seldom),
        masked=draw(st.booleans()),
        frozen=draw(seldom),
        seed=draw(st.integers(0, 99)),
    )


@st.composite
def runs(draw: st.DrawFn) -> Run:
    """Draw a plan and a few batches: fewer rows than micro-batches, more than twice the example's, other lengths."""
    rows, length = draw(st.integers(3, 9)), draw(st.integers(3, 6))
    sizes = st.sampled_from((rows, 1, 2, 3, rows + 1, 2 * rows + 1))
    lengths = st.sampled_from((length, length, length, 3, 5, 6))
    others = draw(st.lists(st.tuples(sizes, lengths), min_size=1, max_size=3))
    return Run(
        draw(st.sampled_from(SHAPES)),
        draw(st.integers(1, 5)),
        ((rows, length), *others),
        recompute=draw(st.booleans()),
        late=draw(st.booleans()),
        gpipe=draw(st.booleans()),
        optimizer=draw(st.sampled_from(("sgd", "adamw"))),
    )
