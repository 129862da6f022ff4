"""Transports: one contract for all of them, and what each does when things go wrong."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import Outcome, outcomes_of, run_ranks
from transport_contract import CONTRACT, CPU, GROUPS, PAIRS, RANKS, Steps, connect_over, run_contract, sample

from efftra_fx.errors import RankFailed, TransportError, TransportTimeout
from efftra_fx.runtime import host_staged
from efftra_fx.runtime.host_staged import CudaStaging
from efftra_fx.runtime.local_transport import LocalTransport, local_transports, run_all, sum_in_place
from efftra_fx.runtime.transport import Incoming, Outgoing, Transport, result_of

KINDS = ("shared", "gloo", "mixed", "staged", "pairwise")


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


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["staged on GPU", "nccl"])
def test_on_gpus(kind: str) -> None:
    gpus = torch.cuda.device_count()
    if kind == "nccl" and gpus < RANKS:
        pytest.skip(f"needs {RANKS} GPUs")
    visible = ",".join(map(str, range(RANKS if kind == "nccl" else 1)))
    failed = run_ranks(run_contract, RANKS, kind, limit_s=120, environment={"CUDA_VISIBLE_DEVICES": visible})
    assert not any(failed), failed


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
    transport.agree(None, 0).wait()
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


class Recorder:
    """A stand-in for torch.cuda that writes down what is asked of it, in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def current_stream(self, device: torch.device) -> str:
        return "current"

    def Stream(self, device: torch.device) -> Recorder:
        return self

    def Event(self) -> str:
        return "event"

    def wait_stream(self, stream: str) -> None:
        self.calls.append(f"copy stream waits for {stream}")

    @contextmanager
    def stream(self, stream: Recorder) -> Iterator[None]:
        self.calls.append("begin on copy stream")
        yield
        self.calls.append("end on copy stream")

    def record_event(self, event: str) -> None:
        self.calls.append(f"record {event}")


class Watched(torch.Tensor):
    """A tensor that says when it is kept alive for a stream."""

    calls: ClassVar[list[str]] = []

    def record_stream(self, stream: Any) -> None:
        self.calls.append("keep alive for copy stream")


def test_staging_copies_after_the_computing_and_before_the_event(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    Watched.calls = recorder.calls
    monkeypatch.setattr(host_staged, "cuda", recorder)
    monkeypatch.setattr(CudaStaging, "buffer", lambda self, shape, dtype: recorded_buffer(recorder, shape, dtype))
    staging = CudaStaging(torch.device("cuda", 0))
    host, event = staging.to_host(torch.ones(3).as_subclass(Watched))
    assert (host == 1).all() and str(event) == "event"
    assert recorder.calls == [
        "buffer",
        "copy stream waits for current",
        "begin on copy stream",
        "record event",
        "end on copy stream",
        "keep alive for copy stream",
    ]


def recorded_buffer(recorder: Recorder, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Allocate, and say so."""
    recorder.calls.append("buffer")
    return torch.empty(shape, dtype=dtype)


def test_facing_messages_go_in_one_group_call_a_pair_receives_first() -> None:
    calls = run_ranks(grouped_calls, 3, limit_s=30)
    for rank, seen in enumerate(calls):
        assert seen == [
            [f"irecv 4 {peer}", f"irecv 8 {peer}", f"isend 4 {peer}", f"isend 8 {peer}"]
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


# Sums through shared memory


def sum_everything(kind: str, sizes: tuple[int, ...]) -> list[str]:
    """Sum tensors of many sizes and dtypes, all started before any is awaited; return their bits."""
    transport = connect_over(kind)
    everyone = tuple(range(transport.world_size))
    transport.prepare([everyone, everyone])
    handles = [
        transport.all_reduce(sample((size,), dtype, transport.rank + size), everyone)
        for size in sizes
        for dtype in SUMMED
    ]
    bits = [bits_of(handle.wait()) for handle in reversed(handles)]
    transport.close()
    return bits[::-1]


def sum_everything_here(world_size: int, sizes: tuple[int, ...]) -> list[str]:
    """Do the same in one process."""
    bits = []
    for size in sizes:
        for dtype in SUMMED:
            parts = [sample((size,), dtype, rank + size) for rank in range(world_size)]
            sum_in_place(parts)
            bits.append(bits_of(parts[-1]))
    return bits


def bits_of(tensor: torch.Tensor) -> str:
    """Fingerprint a tensor's bytes."""
    return hashlib.sha256(tensor.view(torch.uint8).numpy().tobytes()).hexdigest()


SUMMED = (torch.float32, torch.float64, torch.bfloat16, torch.int16, torch.complex64)
SIZES = (1, 3, 700, 5_000, 262_144, 262_145, 700_001)


@pytest.mark.parametrize("ranks", [2, 3])
def test_shared_sums_have_the_bits_of_sums_in_one_process(ranks: int) -> None:
    expected = sum_everything_here(ranks, SIZES)
    assert run_ranks(sum_everything, ranks, "shared", SIZES, limit_s=60) == [expected] * ranks


def start_many() -> tuple[bool, list[str]]:
    """Start far more small sums than sockets hold before anyone takes one, on one rank long before the other."""
    transport = connect_over("shared")
    if transport.rank == 1:
        time.sleep(0.5)
    handles = [transport.all_reduce(torch.full((900,), float(number)), (0, 1)) for number in range(600)]
    right = all((handle.wait() == 2 * number).all() for number, handle in enumerate(handles))
    transport.close()
    return right, os.listdir("/dev/shm")


def test_starting_sums_never_blocks_and_leaves_no_file() -> None:
    before = set(os.listdir("/dev/shm"))
    for right, files in run_ranks(start_many, 2, limit_s=30):
        assert right
        assert not [name for name in set(files) - before if name.startswith("efftra_fx")]


def wrong_length(order: str) -> str:
    """Receive something other than what was sent, posted before or after it came."""
    transport = connect_over("shared")
    text = ""
    if transport.rank == 0:
        transport.send(torch.ones(2), 1, 7)
        transport.agree(None, 0).wait()
    else:
        if order == "late":
            other = transport.recv((1,), torch.float32, CPU, 0, 8)
        else:
            other = transport.recv((3,), torch.float32, CPU, 0, 7)
        transport.agree(None, 0).wait()
        try:
            if order == "late":
                transport.mailboxes[0].read_one()
                other = transport.recv((3,), torch.float32, CPU, 0, 7)
            other.wait()
        except TransportError as error:
            text = str(error)
    transport.close()
    return text


@pytest.mark.parametrize("order", ["early", "late"])
def test_a_message_of_another_length_is_refused(order: str) -> None:
    text = run_ranks(wrong_length, 2, order, limit_s=30)[1]
    assert text == "rank 1 expected torch.float32 [3], 12 bytes, from rank 0 (tag 7), got 8 bytes"


def without_room() -> tuple[float, int]:
    """Connect where shared memory cannot be had."""

    def refuse(descriptor: int, offset: int, size: int) -> None:
        raise OSError("no space left on device")

    os.posix_fallocate = refuse
    transport = connect_over("shared")
    result = float(transport.all_reduce(torch.ones(5000), (0, 1)).wait()[-1])
    transport.close()
    return result, len(transport.shared)


def test_without_room_for_shared_memory_sums_go_over_gloo() -> None:
    assert run_ranks(without_room, 2, limit_s=30) == [(2.0, 0)] * 2


# The helper itself


def spawn_and_hang() -> None:
    """Start a child, say its number, and never end."""
    import subprocess

    print("child", subprocess.Popen(["sleep", "100"]).pid, flush=True)
    time.sleep(100)


def test_the_time_limit_kills_ranks_and_their_children() -> None:
    outcomes = outcomes_of(spawn_and_hang, 2, limit_s=3.0)
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
