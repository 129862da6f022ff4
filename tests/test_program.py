"""Programs and their wiring are data that cannot be impossible."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies_programs import Case, cases

from efftra_fx.errors import ProgramError
from efftra_fx.program import (
    AllReduce,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Join,
    Load,
    Parameter,
    RankProgram,
    Recv,
    ReduceLoss,
    Send,
    Value,
    Wiring,
    awaited_receives,
    dtype_bytes,
    match_messages,
    micro_batch_rows,
    replica_rows,
)


@given(st.integers(1, 200), st.integers(1, 40))
def test_micro_batches_cover_the_batch_in_order_and_differ_by_at_most_one_row(rows: int, micro_batches: int) -> None:
    parts = micro_batch_rows(rows, micro_batches)
    sizes = [hi - lo for lo, hi in parts]
    assert [row for lo, hi in parts for row in range(lo, hi)] == list(range(rows))
    assert len(parts) == min(rows, micro_batches)
    assert sizes == sorted(sizes, reverse=True) and max(sizes) - min(sizes) <= 1


@given(st.integers(0, 50), st.integers(1, 50), st.integers(1, 9))
def test_replicas_cover_a_micro_batch_in_order(lo: int, size: int, replicas: int) -> None:
    parts = [replica_rows(lo, lo + size, q, replicas) for q in range(replicas)]
    assert [row for start, stop in parts for row in range(start, stop)] == list(range(lo, lo + size))
    assert max(stop - start for start, stop in parts) - min(stop - start for start, stop in parts) <= 1


def test_a_part_scales_along_its_own_dimension_only() -> None:
    rows = Value("x", "float32", (3, 2, 4), "rows", 1, 0, (1,), (True,))
    assert rows.part_shape(5) == (3, 10, 4)
    assert Value("w", "float32", (3, 2), "whole", 0, 0, (1,), (True,)).part_shape(5) == (3, 2)
    assert Value("s", "float32", (), "sum", 0, 0, (1,), (True,)).part_shape(5) == ()


def test_bytes_count_elements_times_their_size() -> None:
    assert Send("x", 0, 0, 2, 1, "bfloat16", (2, 3), False).size_bytes == 12
    assert Parameter("w", "float64", (2, 3), (0,), True).size_bytes == 48
    assert Recv("x", 0, 0, 2, 1, "bool", (), True).size_bytes == 1


def test_a_gradient_comes_back_only_where_both_ends_go_backward() -> None:
    value = Value("x", "float32", (1,), "rows", 0, 0, (1, 2), (True, False))
    assert Wiring(3, (value,), (), (True, True, True), False).returns_gradient(value, 1)
    assert not Wiring(3, (value,), (), (True, True, True), False).returns_gradient(value, 2)
    assert not Wiring(3, (value,), (), (False, True, True), False).returns_gradient(value, 1)
    assert not Wiring(3, (value,), (), (True, False, True), False).returns_gradient(value, 1)


def test_an_evaluation_goes_forward_only() -> None:
    wiring = Wiring(2, (), (Parameter("w", "float32", (1,), (0,), True),), (True, True), True)
    assert wiring.has_weights(0) and not wiring.has_weights(1)
    assert wiring.forward_only() == Wiring(2, (), wiring.parameters, (False, False), False, False)
    assert wiring.forward_only(loss=True).loss and not wiring.forward_only().has_weights(0)


IMPOSSIBLE: list[tuple[Callable[[], object], str]] = [
    (lambda: Load(0, 0, 2, 2), r"rows \[2:2\] hold nothing"),
    (lambda: Load(-1, 0, 0, 2), "counts from 0, got -1"),
    (lambda: Forward(0, -2), "counts from 0, got -2"),
    (lambda: Backward(-1, 0), "counts from 0"),
    (lambda: BackwardInput(0, -1), "counts from 0"),
    (lambda: BackwardWeight(0, ()), "at least one micro-batch"),
    (lambda: BackwardWeight(0, (1, -1)), "counts from 0"),
    (lambda: Send("x", 0, 3, 2, 1, "float32", (), False), "hold nothing"),
    (lambda: Recv("x", 0, 0, 2, -1, "float32", (), False), "counts from 0"),
    (lambda: Recv("x", 0, 0, 2, 1, "float32", (2, -1), False), "counts from 0"),
    (lambda: AllReduce((), (0, 1)), "at least one parameter"),
    (lambda: AllReduce(("w",), (1, 0)), "rising order"),
    (lambda: Join(0, ()), "rising order"),
    (lambda: ReduceLoss((0, 0)), "rising order"),
    (lambda: RankProgram(-1, 1, 1, 0, 0, ()), "must not be negative"),
    (lambda: RankProgram(0, 0, 1, 0, 0, ()), "at least 1 row"),
    (lambda: RankProgram(0, 1, 0, 0, 0, ()), "1 micro-batch"),
    (lambda: Value("x", "float32", (1,), "parts", 0, 0, (1,), (True,)), "expected one of rows, whole, sum"),
    (lambda: Value("x", "float32", (1,), "rows", 1, 0, (1,), (True,)), "splits along dimension 1"),
    (lambda: Value("x", "float32", (1,), "rows", 0, 0, (1, 2), (True,)), "2 consumers but 1 gradient flags"),
    (lambda: Wiring(2, (), (), (True,), False), "one backward flag each"),
    (lambda: dtype_bytes("float31"), "dtype 'float31' is not known"),
]


@pytest.mark.parametrize(("make", "words"), IMPOSSIBLE)
def test_what_cannot_be_meant_is_refused(make: Callable[[], object], words: str) -> None:
    with pytest.raises(ProgramError, match=words):
        make()


def test_a_computation_waits_for_what_was_received_for_it_before() -> None:
    value, gradient = Recv("x", 0, 0, 1, 1, "float32", (1,), False), Recv("x", 0, 0, 1, 1, "float32", (1,), True)
    line = (value, Load(0, 0, 0, 1), Forward(0, 0), gradient, value, Backward(0, 0), Forward(0, 1))
    assert awaited_receives(RankProgram(0, 1, 1, 0, 0, line)) == {2: (0,), 5: (3,), 6: ()}


@given(cases())
def test_every_message_meets_its_own_other_end(case: Case) -> None:
    programs = case.lower()
    ends = match_messages(programs)
    messages = [
        (rank, index)
        for rank, program in programs.items()
        for index, one in enumerate(program.instructions)
        if isinstance(one, Send | Recv)
    ]
    assert sorted(ends) == sorted(messages)
    for here, there in ends.items():
        assert ends[there] == here
        mine, theirs = (programs[rank].instructions[index] for rank, index in (here, there))
        assert isinstance(mine, Send | Recv) and isinstance(theirs, Send | Recv) and type(mine) is not type(theirs)
        assert (mine.peer, theirs.peer) == (there[0], here[0])
        same = ("value", "micro_batch", "start", "stop", "dtype", "shape", "gradient")
        assert [getattr(mine, name) for name in same] == [getattr(theirs, name) for name in same]
