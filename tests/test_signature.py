"""Calls are read into named leaves and put together again, and differences are said in words."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from efftra_fx.containers import take_apart
from efftra_fx.errors import InputError
from efftra_fx.signature import difference, read_call

X = torch.ones(2, 3)


@dataclasses.dataclass
class Pair:
    left: Any
    right: Any
    note: str = "n"


class Cache:
    def __init__(self) -> None:
        self.layers = [Pair(X, X + 1), Pair(X + 2, None)]
        self.kind = torch.float32


def forward(x: Tensor, mask: Tensor | None = None, *rest: Tensor, flag: bool = False, **more: Any) -> None:
    """A signature with all kinds of arguments."""


def test_position_and_keyword_are_the_same_argument() -> None:
    one, _ = read_call(forward, (X, X), {}, None)
    other, _ = read_call(forward, (), {"mask": X, "x": X}, None)
    assert one.tensor_names == other.tensor_names == ("x", "mask")


def test_leaves_are_named_by_argument_and_path() -> None:
    call, _ = read_call(forward, ({"a": [X, X]}, None, X), {"extra": Pair(X, 3)}, (X, X))
    assert call.tensor_names == ("x.a[0]", "x.a[1]", "rest[0]", "more.extra.left", "target[0]", "target[1]") or (
        call.tensor_names == ("x.a[0]", "x.a[1]", "rest[0]", "extra.left", "target[0]", "target[1]")
    )


@pytest.mark.parametrize("value", [Pair(X, X), Cache(), pack_sequence([X, X]), {"p": Pair(1, [X])}])
def test_objects_that_hold_tensors_are_opened_and_closed_again(value: Any) -> None:
    leaves, tree = take_apart(value)
    moved = [leaf + 1 if isinstance(leaf, Tensor) else leaf for _, leaf in leaves]
    again = tree.rebuild(moved)
    assert type(again) is type(value)
    fresh = [leaf for _, leaf in take_apart(again)[0]]
    assert all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in zip(fresh, moved, strict=True))


TREES = st.recursive(
    st.sampled_from([1, None, "s", 2.5]) | st.builds(lambda: torch.zeros(1)),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
        | st.builds(Pair, inner, inner)
    ),
    max_leaves=8,
)


@given(TREES)
def test_taking_apart_and_rebuilding_gives_an_equal_value(value: Any) -> None:
    leaves, tree = take_apart(value)
    again = take_apart(tree.rebuild([leaf for _, leaf in leaves]))
    assert again[1] == tree
    assert all(a is b or a == b for (_, a), (_, b) in zip(leaves, again[0], strict=True))


@pytest.mark.parametrize(
    ("args", "kwargs", "target", "words"),
    [
        ((X,), {"flag": True}, None, r"argument 'flag'"),
        ((X, X), {}, None, r"argument 'mask' was not there"),
        ((X,), {}, X, r"compiled (with no|without a) target, got one"),
        (([X],), {}, None, r"argument 'x' was a tensor when the step was compiled and is a container now"),
    ],
)
def test_a_difference_is_said_in_words(args: Any, kwargs: Any, target: Any, words: str) -> None:
    expected, _ = read_call(forward, (X,), {"flag": False}, None)
    found, _ = read_call(forward, args, {"flag": False, **kwargs}, target)
    assert re.search(words, difference(expected, found) or "")


def test_equal_calls_have_no_difference() -> None:
    one, _ = read_call(forward, (X,), {"flag": True}, X)
    other, _ = read_call(forward, (X + 1,), {"flag": True}, X)
    assert difference(one, other) is None


def test_a_call_that_forward_does_not_take_is_refused() -> None:
    with pytest.raises(InputError, match="cannot be called like this: missing a required argument: 'x'"):
        read_call(forward, (), {}, None)
