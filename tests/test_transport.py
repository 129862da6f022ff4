"""Transports: one contract for all of them, and what each does when things go wrong."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import Outcome, outcomes_of, run_ranks
from transport_contract import CONTRACT, CPU, GROUPS, PAIRS, RANKS, Steps, connect_over, run_contract

from efftra_fx.errors import RankFailed, TransportError, TransportTimeout
from efftra_fx.runtime.local_transport import LocalTransport, local_transports, run_all
from efftra_fx.runtime.transport import Incoming, Outgoing, Transport, result_of

KINDS = ("shared", "gloo", "staged", "pairwise")


@pytest.fixture(scope="module")
def failures() -> Callable[[str], list[dict[str, str]]]:
    """Return what failed on each rank of a kind of transport; each kind runs once."""
    known: dict[str, list[dict[str, str]]] = {}

    def of(kind: str) -> list[dict[str, str]]:
        if kind not in known:
            known[kind] = run_ranks(run_contract, RANKS, kind, limit_s=60)
        return known[kind]

    return of


@pytest.mark.parametrize("contract", CONTRACT, ids=lambda contract: contract.__name__)
@pytest.mark.parametrize("kind", KINDS)
def test_between_processes(kind: str, contract: Callable[[Transport], Steps], failures: Any) -> None:
    for rank, failed in enumerate(failures(kind)):
        assert contract.__name__ not in failed, f"rank {rank}\n{failed[contract.__name__]}"


@pytest.mark.parametrize("contract", CONTRACT, ids=lambda contract: contract.__name__)
def test_in_one_process(contract: Callable[[Transport], Steps]) -> None:
    transports = local_transports(RANKS)
    for transport in transports:
        transport.prepare(GROUPS, PAIRS)
    run_all([contract(transport) for transport in transports])


# One process


def test_a_deadlock_names_every_rank_and_what_it_waits_for() -> None:
    def program(transport: LocalTransport) -> Steps:
        peer = 1 - transport.rank
        handle = transport.recv((2,), torch.float32, CPU, peer, 3)
        yield from result_of(handle, f"Recv(a{transport.rank})")
        transport.send(torch.ones(2), peer, 3)

    with pytest.raises(TransportTimeout) as caught:
        run_all([program(transport) for transport in local_transports(2)])
    assert str(caught.value) == (
        "no rank can go on: rank 0 waits in Recv(a0) for rank 1 (tag 3); rank 1 waits in Recv(a1) for rank 0 (tag 3)"
    )


def test_a_sum_that_one_member_never_joins_names_the_member() -> None:
    def program(transport: LocalTransport) -> Steps:
        if transport.rank < 2:
            yield from result_of(transport.all_reduce(torch.ones(1), (0, 1, 2)), "AllReduce(w)")

    with pytest.raises(TransportTimeout, match=r"rank 0 waits in AllReduce\(w\) for rank 2; rank 1 waits"):
        run_all([program(transport) for transport in local_transports(3)])


def test_waiting_out_of_turn_is_refused_at_once() -> None:
    first, _ = local_transports(2)
    handle = first.recv((2,), torch.float32, CPU, 1, 3)
    assert not handle.ready()
    with pytest.raises(TransportTimeout, match=r"rank 0 waited in Recv\(a\) for rank 1 \(tag 3\), which has not acted"):
        handle.wait("Recv(a)")


def test_an_error_ends_the_other_ranks_and_comes_out_with_its_rank() -> None:
    ended = []

    def program(transport: LocalTransport) -> Steps:
        try:
            yield from result_of(transport.all_reduce(torch.ones(1), (0, 1, 2)))
            if transport.rank == 1:
                raise ValueError("boom")
            yield from result_of(transport.recv((1,), torch.float32, CPU, 1, 0))
        finally:
            ended.append(transport.rank)

    with pytest.raises(ValueError, match="boom") as caught:
        run_all([program(transport) for transport in local_transports(3)])
    assert caught.value.__notes__ == ["on rank 1 of 3"] and sorted(ended) == [0, 1, 2]


def test_a_failure_is_the_error_of_every_other_rank_in_one_process() -> None:
    first, second = local_transports(2)
    handle = first.recv((1,), torch.float32, CPU, 1, 0)
    second.fail(ValueError("boom"))
    assert handle.ready()
    for call in (lambda: handle.wait("Recv(a)"), lambda: first.agree(None, 0), lambda: first.send(torch.ones(1), 1, 0)):
        with pytest.raises(RankFailed, match="rank 1 failed: ValueError: boom"):
            call()


def test_a_message_of_another_shape_or_dtype_is_refused() -> None:
    first, second = local_transports(2)
    first.send(torch.ones(2), 1, 0)
    with pytest.raises(
        TransportError, match=r"rank 1 expected torch.float32 \[3\] from rank 0 .*got torch.float32 \[2\]"
    ):
        second.recv((3,), torch.float32, CPU, 0, 0)


def test_sums_of_unlike_tensors_are_refused() -> None:
    first, second = local_transports(2)
    first.all_reduce(torch.ones(2), (0, 1))
    with pytest.raises(
        TransportError, match=r"a sum needs like tensors, got torch.float32 \[2\] and torch.float32 \[3\]"
    ):
        second.all_reduce(torch.ones(3), (0, 1))


def test_a_sum_does_not_depend_on_who_comes_last() -> None:
    parts = [torch.tensor([1e16, 1.0]), torch.tensor([-1e16, 1.0]), torch.tensor([1.0, 1e-9])]
    results = []
    for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
        transports = local_transports(3)
        tensors = [part.clone() for part in parts]
        for rank in order:
            transports[rank].all_reduce(tensors[rank], (0, 1, 2))
        results += tensors
    assert all(torch.equal(result, results[0]) for result in results)


MESSAGES = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 2)).filter(lambda message: message[0] != message[1]),
    max_size=30,
)


def message_program(transport: LocalTransport, messages: list[tuple[int, int, int]], skipped: int, ahead: int) -> Steps:
    """Do one rank's part of a list of (from, to, tag), receives posted some places early."""
    rank = transport.rank
    handles = {}
    for number in range(len(messages) + ahead):
        if number < len(messages) and messages[number][1] == rank:
            source, _, tag = messages[number]
            handles[number] = transport.recv((1,), torch.float32, CPU, source, tag)
        now = number - ahead
        if now >= 0 and messages[now][0] == rank and now != skipped:
            transport.send(torch.tensor([float(now)]), *messages[now][1:])
        if now in handles:
            got = yield from result_of(handles[now], f"message {now}")
            assert got.item() == now


@given(messages=MESSAGES, ahead=st.integers(0, 5))
def test_every_message_arrives_whatever_the_order(messages: list[tuple[int, int, int]], ahead: int) -> None:
    transports = local_transports(4)
    run_all([message_program(transport, messages, -1, ahead) for transport in transports])
    assert not any(transports[0].hub.sent.values()) and not any(transports[0].hub.posted.values())


@given(messages=MESSAGES.filter(bool), data=st.data())
def test_a_send_left_out_never_passes_unnoticed(messages: list[tuple[int, int, int]], data: st.DataObject) -> None:
    skipped = data.draw(st.integers(0, len(messages) - 1))
    programs = [message_program(transport, messages, skipped, 2) for transport in local_transports(4)]
    # a later message of the same kind may take its place: then its number is wrong
    with pytest.raises((TransportTimeout, AssertionError)):
        run_all(programs)


# Between processes: failures


def fail_somehow(how: str, kind: str = "gloo") -> tuple[str, str, str]:
    """Chain the waits 0 → 1 → 2 and a sum on 3 → all; rank 2 fails in the given way; return what each sees."""
    transport = connect_over(kind, 1.0 if how == "stuck" else 30.0)
    transport.prepare([(0, 1, 2, 3)])
    try:
        match transport.rank:
            case 0 | 1:
                transport.recv((3,), torch.float32, CPU, transport.rank + 1, 1).wait(f"Recv(a{transport.rank})")
            case 3:
                transport.all_reduce(torch.ones(3), (0, 1, 2, 3)).wait("AllReduce(w)")
            case _:
                time.sleep(0.3)
                end_somehow(how)
                if how == "leave":
                    transport.close()
                    return "left", "", ""
        return "nothing", "", ""
    except Exception as error:
        transport.fail(error)
        return type(error).__name__, str(error), again(transport)


def end_somehow(how: str) -> None:
    """Fail."""
    if how == "raise":
        raise ValueError("boom")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "stuck":
        time.sleep(3)


def again(transport: Transport) -> str:
    """Return the error of using a transport that has failed."""
    try:
        transport.agree(None, 1)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("kind", ["shared", "gloo", "staged"])
def test_an_error_of_one_rank_ends_all_with_that_error(kind: str) -> None:
    outcomes = outcomes_of(fail_somehow, 4, "raise", kind, limit_s=20)
    assert outcomes[2].value[:2] == ("ValueError", "boom")
    for rank, place in ((0, r"Recv(a0) for rank 1"), (1, "Recv(a1) for rank 2"), (3, "AllReduce(w) for ranks 0, 1, 2")):
        name, text, later = outcomes[rank].value
        assert name == "RankFailed"
        assert text == f"rank 2 failed: ValueError: boom (rank {rank} waited in {place})"
        assert later.startswith("RankFailed: rank 2 failed: ValueError: boom")


@pytest.mark.parametrize("kind", ["shared", "gloo"])
def test_a_killed_rank_ends_all_with_its_number(kind: str) -> None:
    outcomes = outcomes_of(fail_somehow, 4, "kill", kind, limit_s=20)
    assert outcomes[2].status == -signal.SIGKILL
    for rank in (0, 1, 3):
        name, text, _ = outcomes[rank].value
        assert name == "RankFailed" and text.startswith("rank 2 was lost: its process ended without a word")


@pytest.mark.parametrize("kind", ["shared", "gloo"])
def test_a_stuck_rank_ends_the_others_at_the_time_limit(kind: str) -> None:
    outcomes = outcomes_of(fail_somehow, 4, "stuck", kind, limit_s=30)
    seen = [outcomes[rank].value for rank in (0, 1, 3)]
    assert any(name == "TransportTimeout" for name, _, _ in seen)
    assert all("but nothing came within 1 s; see what those ranks do, or raise timeout=" in text for _, text, _ in seen)
    assert all(text.startswith(("rank ", "rank")) and "waited in" in text for _, text, _ in seen)


def test_a_rank_that_leaves_too_early_is_named() -> None:
    outcomes = outcomes_of(fail_somehow, 4, "leave", limit_s=20)
    assert outcomes[2].value[0] == "left"
    assert all("rank 2 ended before" in outcomes[rank].value[1] for rank in (0, 1, 3))


def busy_while_another_fails() -> str:
    """Rank 1 fails while rank 0 computes and waits for nobody."""
    transport = connect_over("gloo")
    if transport.rank == 1:
        transport.fail(ValueError("boom"))
        return ""
    for _ in range(400):
        time.sleep(0.01)
        if transport.lifeline.failure:
            break
    return again(transport)


def test_a_rank_that_computes_learns_of_a_failure_at_its_next_call() -> None:
    assert run_ranks(busy_while_another_fails, 2, limit_s=20)[0] == "RankFailed: rank 1 failed: ValueError: boom"


def close_one_after_the_other() -> str:
    """Close at different times; nobody may take the silence for a loss."""
    transport = connect_over("gloo")
    transport.agree(None, 0).wait()
    time.sleep(0.1 * ((transport.rank * 2) % 3))
    failure = transport.lifeline.failure
    transport.close()
    return str(failure)


def test_closing_at_different_times_raises_no_alarm() -> None:
    assert run_ranks(close_one_after_the_other, 4, limit_s=20) == [""] * 4


def many_transports() -> int:
    """Make and close transports many times, and count the threads and open files that stay."""
    counts = []
    for _ in range(4):
        transport = connect_over("staged")
        transport.prepare([(0, 1)])
        transport.all_reduce(torch.ones(1), (0, 1)).wait()
        transport.close()
        counts.append(threading.active_count())
    return counts[-1] - counts[0]


def test_closing_leaves_no_thread_behind() -> None:
    assert run_ranks(many_transports, 2, limit_s=30) == [0, 0]


def grouped_calls() -> list[list[str]]:
    """Record the group calls of one exchange of the transport for NCCL."""
    import torch.distributed as dist

    transport = connect_over("pairwise")
    transport.prepare([], PAIRS)
    calls: list[list[str]] = []
    original = dist.batch_isend_irecv

    def record(operations: list[Any]) -> list[Any]:
        calls.append([f"{one.op.__name__} {one.tensor.numel()} {one.peer}" for one in operations])
        return original(operations)

    module: Any = dist
    module.batch_isend_irecv = record
    peers = [rank for rank in range(3) if rank != transport.rank][::-1]
    sends = [Outgoing(torch.ones(size), peer, 0) for size in (1, 0, 2) for peer in peers]
    recvs = [Incoming((size,), torch.float32, CPU, peer, 0) for size in (1, 0, 2) for peer in peers]
    _, handles = transport.exchange(sends, recvs)
    assert [handle.wait().numel() for handle in handles] == [1, 1, 0, 0, 2, 2]
    transport.drain()
    transport.close()
    return calls


def test_facing_messages_go_in_one_group_call_a_pair_receives_first() -> None:
    calls = run_ranks(grouped_calls, 3, limit_s=30)
    for rank, seen in enumerate(calls):
        assert seen == [
            [f"irecv 1 {peer}", f"irecv 2 {peer}", f"isend 1 {peer}", f"isend 2 {peer}"]
            for peer in range(3)
            if peer != rank
        ]


def unprepared(kind: str) -> list[str]:
    """Use what was not prepared."""
    transport = connect_over(kind)
    texts = []
    peer = (transport.rank + 1) % 3
    calls: list[Callable[[], Any]] = [lambda: transport.all_reduce(torch.ones(1), (0, 1))]
    if kind == "pairwise":
        calls.append(lambda: transport.send(torch.ones(1), peer, 0))
    for call in calls:
        try:
            call()
        except TransportError as error:
            texts.append(str(error))
    transport.agree(None, 0).wait()
    transport.close()
    return texts


def test_what_was_not_prepared_is_refused() -> None:
    for kind in ("shared", "gloo"):
        assert run_ranks(unprepared, 3, kind)[0] == ["ranks 0, 1 cannot sum: call prepare on all ranks first"]
    assert run_ranks(unprepared, 3, "pairwise")[1] == [
        "ranks 0, 1 cannot sum: call prepare on all ranks first",
        "rank 1 cannot reach rank 2: call prepare with their pair first",
    ]


# The helper itself


def spawn_and_hang() -> None:
    """Start a child, say its number, and never end."""
    import subprocess

    print("child", subprocess.Popen(["sleep", "100"]).pid, flush=True)
    time.sleep(100)


def test_the_time_limit_kills_ranks_and_their_children() -> None:
    outcomes = outcomes_of(spawn_and_hang, 2, limit_s=5.0)
    assert [outcome.status for outcome in outcomes] == [-signal.SIGKILL] * 2
    for outcome in outcomes:
        assert ended(int(outcome.output.split()[1])), outcome


def ended(pid: int) -> bool:
    """Say whether a process has ended, or does within moments."""
    for _ in range(100):
        try:
            with open(f"/proc/{pid}/stat") as stat:
                if stat.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


def print_and_raise() -> None:
    """Fail with output."""
    print("before")
    raise ValueError("boom")


def test_a_failing_rank_brings_its_traceback_and_output() -> None:
    outcomes: list[Outcome] = outcomes_of(print_and_raise, 2)
    assert all("ValueError: boom" in one.error and one.output == "before\n" for one in outcomes)
    with pytest.raises(AssertionError, match="2 of 2 ranks failed"):
        run_ranks(print_and_raise, 2)
