"""What every transport must do, written once as generators that any of them can run."""

from __future__ import annotations

import os
import random
import traceback
from collections.abc import Callable, Generator
from typing import Any

import torch
import torch.distributed as dist

from efftra_fx.errors import BatchError, InputError, TransportError
from efftra_fx.runtime import launch
from efftra_fx.runtime.gloo_transport import GlooTransport
from efftra_fx.runtime.group_transport import new_group
from efftra_fx.runtime.host_staged import HostStagedTransport
from efftra_fx.runtime.nccl_transport import NcclTransport
from efftra_fx.runtime.transport import Handle, Incoming, Outgoing, Transport, result_of

Steps = Generator[tuple[Handle[Any], str], None, Any]
RANKS = 3
CPU = torch.device("cpu")
DTYPES = ("bool", "uint8", "int16", "int64", "float16", "bfloat16", "float32", "float64", "complex64", "complex128")


def ring(transport: Transport) -> tuple[int, int]:
    """Return the previous and the next rank."""
    return (transport.rank - 1) % transport.world_size, (transport.rank + 1) % transport.world_size


def sample(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Make a tensor that the receiver can make again."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * 50).abs().to(dtype)


def every_dtype_and_shape_crosses(transport: Transport) -> Steps:
    before, after = ring(transport)
    cases = [(shape, getattr(torch, name)) for name in DTYPES for shape in ((), (0,), (3, 0, 2), (2, 3), (70_000,))]
    sends = [Outgoing(sample(*case, transport.rank).to(transport.device), after, 1) for case in cases]
    recvs = [Incoming(*case, transport.device, before, 1) for case in cases]
    sent, received = transport.exchange(sends, recvs)
    for case, handle in zip(cases, received, strict=True):
        got = yield from result_of(handle, "the case's receive")
        assert got.dtype == case[1] and tuple(got.shape) == case[0]
        assert torch.equal(got.cpu(), sample(*case, before)), case
    for handle in sent:
        yield from result_of(handle)
    transport.drain()


def odd_memory_layouts_cross(transport: Transport) -> Steps:
    before, after = ring(transport)
    base = torch.arange(24.0, device=transport.device).reshape(4, 6) + transport.rank
    expected_base = torch.arange(24.0, device=transport.device).reshape(4, 6) + before
    odd: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda tensor: tensor.t(),
        lambda tensor: tensor[:, ::2],
        lambda tensor: tensor[:1].expand(4, 6),
        lambda tensor: torch.complex(tensor, -tensor).conj(),
        lambda tensor: torch.complex(tensor, -tensor).conj().imag,
        lambda tensor: torch.nn.Parameter(tensor),
    ]
    for tag, view in enumerate(odd):
        expected = view(expected_base)
        incoming = Incoming(tuple(expected.shape), expected.dtype, transport.device, before, tag)
        _, (handle,) = transport.exchange([Outgoing(view(base), after, tag)], [incoming])
        got = yield from result_of(handle)
        assert got.is_contiguous() and not got.requires_grad and torch.equal(got, expected.detach())
    transport.drain()


def messages_with_a_tag_keep_their_order(transport: Transport) -> Steps:
    before, after = ring(transport)
    handles = [transport.recv((2,), torch.int64, transport.device, before, number % 2) for number in range(20)]
    for number in range(20):
        transport.send(torch.tensor([transport.rank, number], device=transport.device), after, number % 2)
    for number, handle in enumerate(handles):
        got = yield from result_of(handle)
        assert got.tolist() == [before, number]
    transport.drain()


def large_messages_cross_both_ways(transport: Transport) -> Steps:
    # 4 MB each, several a link, on all links at once
    others = [rank for rank in range(transport.world_size) if rank != transport.rank]
    for turn in range(2):
        sends = [
            Outgoing(torch.full((1 << 20,), float(transport.rank + turn), device=transport.device), peer, 5)
            for peer in others
        ] * 3
        recvs = [Incoming((1 << 20,), torch.float32, transport.device, peer, 5) for peer in others] * 3
        _, handles = transport.exchange(sends, recvs)
        for incoming, handle in zip(recvs, handles, strict=True):
            got = yield from result_of(handle)
            assert got[0] == got[-1] == incoming.peer + turn
    transport.drain()


def a_receiver_owns_what_it_received(transport: Transport) -> Steps:
    before, after = ring(transport)
    mine = torch.ones(5, device=transport.device)
    handle = transport.recv((5,), torch.float32, transport.device, before, 0)
    transport.send(mine, after, 0)
    got = yield from result_of(handle)
    got.fill_(7.0)
    transport.drain()
    yield from result_of(transport.agree(None, 0))
    assert (mine == 1).all()


def what_was_sent_may_be_overwritten_after_drain(transport: Transport) -> Steps:
    before, after = ring(transport)
    handle = transport.recv((300_000,), torch.float32, transport.device, before, 0)
    mine = torch.full((300_000,), float(transport.rank), device=transport.device)
    transport.send(mine, after, 0)
    transport.drain()
    mine.fill_(-1.0)
    got = yield from result_of(handle)
    assert (got == before).all()


def many_more_sends_than_are_kept_under_way_arrive(transport: Transport) -> Steps:
    before, after = ring(transport)
    handles = [transport.recv((1000,), torch.float32, transport.device, before, number) for number in range(40)]
    for number in range(40):
        transport.send(torch.full((1000,), float(number), device=transport.device), after, number)
    for number, handle in enumerate(handles):
        got = yield from result_of(handle)
        assert (got == number).all()
    transport.drain()


def sums_are_right_and_the_same_bits_everywhere(transport: Transport) -> Steps:
    everyone = tuple(range(transport.world_size))
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.complex64):
        for size in (1, 7, 40_000):
            mine = sample((size,), dtype, transport.rank).to(transport.device)
            parts = torch.stack([sample((size,), dtype, rank).to(torch.complex128) for rank in everyone])
            got = yield from result_of(transport.all_reduce(mine, everyone), "the sum")
            assert got is mine
            assert torch.allclose(got.cpu().to(torch.complex128), parts.sum(0), rtol=2e-2)
            rows = yield from result_of(transport.all_gather_data([str(number) for number in got[:50].tolist()]))
            assert all(row == rows[0] for row in rows)


def sums_over_some_ranks_leave_others_alone(transport: Transport) -> Steps:
    groups = [ranks for ranks in ((0, 1), (0, 2), (1, 2), (1,)) if transport.rank in ranks]
    handles = [
        (ranks, transport.all_reduce(torch.tensor([float(transport.rank)], device=transport.device), ranks))
        for ranks in groups
    ]
    for ranks, handle in handles:
        got = yield from result_of(handle)
        assert got.item() == sum(ranks)


def sums_of_odd_layouts_happen_in_place(transport: Transport) -> Steps:
    everyone = tuple(range(transport.world_size))
    base = torch.zeros(4, 6, device=transport.device)
    view = base.t()[::2]
    view.fill_(transport.rank + 1.0)
    got = yield from result_of(transport.all_reduce(view, everyone))
    assert got is view and (view == 6.0).all() and base.sum() == 6.0 * view.numel()
    empty = torch.zeros(0, 3, device=transport.device)
    assert (yield from result_of(transport.all_reduce(empty, everyone))) is empty


COUNTS = ((1, 1, 1), (3, 0, 2), (5, 700, 400), (9_000, 9_000, 9_000), (900_000, 200_001, 3))


def flat_sample(size: int, dtype: torch.dtype, rank: int) -> torch.Tensor:
    """Make small whole numbers, of which every dtype holds sums exactly."""
    return (torch.arange(size) % 7 + rank).to(dtype)


def sections_of_all_come_together(transport: Transport) -> Steps:
    everyone = tuple(range(transport.world_size))
    for name in DTYPES:
        for counts in COUNTS[:4] if name != "float32" else COUNTS:
            dtype = getattr(torch, name)
            mine = flat_sample(counts[transport.rank], dtype, transport.rank).to(transport.device)
            got = yield from result_of(transport.all_gather(mine, counts, everyone), "the gather")
            wanted = torch.cat([flat_sample(count, dtype, rank) for rank, count in enumerate(counts)])
            assert got.dtype == dtype and got.device.type == transport.device.type
            assert torch.equal(got.cpu(), wanted), (name, counts)
            got.zero_()
            assert torch.equal(mine.cpu(), flat_sample(counts[transport.rank], dtype, transport.rank))


def each_gets_its_section_of_the_sum(transport: Transport) -> Steps:
    everyone = tuple(range(transport.world_size))
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.complex64):
        for counts in COUNTS[:4] if dtype != torch.float32 else COUNTS:
            mine = flat_sample(sum(counts), dtype, transport.rank).to(transport.device)
            got = yield from result_of(transport.reduce_scatter(mine, counts, everyone), "the scatter")
            total = sum(flat_sample(sum(counts), dtype, rank) for rank in everyone)
            assert isinstance(total, torch.Tensor)
            start = sum(counts[: transport.rank])
            wanted = total[start : start + counts[transport.rank]]
            assert got.dtype == dtype and torch.equal(got.cpu(), wanted), (dtype, counts)


def sections_and_sums_of_several_groups_may_be_under_way_together(transport: Transport) -> Steps:
    groups = [ranks for ranks in ((0, 1), (0, 2), (1, 2), (0, 1, 2)) if transport.rank in ranks]
    started = []
    for turn in range(3):
        for ranks in groups:
            size = (10, 3000, 150_000)[turn]
            counts = tuple(size + place for place in range(len(ranks)))
            own = torch.full((counts[ranks.index(transport.rank)],), float(transport.rank), device=transport.device)
            whole = torch.ones(sum(counts), device=transport.device)
            handles = (
                transport.all_gather(own, counts, ranks),
                transport.all_reduce(whole.clone(), ranks),
                transport.reduce_scatter(whole, counts, ranks),
            )
            started.append((ranks, counts, handles))
    for ranks, counts, handles in started:
        gathered = yield from result_of(handles[0])
        summed = yield from result_of(handles[1])
        scattered = yield from result_of(handles[2])
        wanted = torch.cat([torch.full((count,), float(rank)) for rank, count in zip(ranks, counts, strict=True)])
        assert torch.equal(gathered.cpu(), wanted)
        assert (summed == len(ranks)).all() and summed.numel() == sum(counts)
        assert (scattered == len(ranks)).all() and scattered.numel() == counts[ranks.index(transport.rank)]
    transport.drain()


def sections_that_do_not_fit_are_refused(transport: Transport) -> Steps:
    everyone = tuple(range(transport.world_size))
    tensor = torch.ones(4, device=transport.device)
    for call in (transport.all_gather, transport.reduce_scatter):
        try:
            call(tensor, (1, 1, 1), everyone)
            raise AssertionError("not refused")
        except TransportError as error:
            assert "brings 4 elements" in str(error) and "expected" in str(error)
    yield from result_of(transport.agree(None, 0))


def plain_data_is_gathered_and_broadcast(transport: Transport) -> Steps:
    mine = {"rank": transport.rank, "text": "ä" * (100 * transport.rank), "numbers": [1, 2.5, None, True]}
    rows = yield from result_of(transport.all_gather_data(mine))
    assert [row["rank"] for row in rows] == list(range(transport.world_size))
    assert rows[2]["text"] == "ä" * 200 and rows[1]["numbers"] == [1, 2.5, None, True]
    for root in range(transport.world_size):
        got = yield from result_of(transport.broadcast_data([root, "x"] if transport.rank == root else None, root))
        assert got == [root, "x"]


def a_problem_of_one_is_the_error_of_all_who_stay_usable(transport: Transport) -> Steps:
    yield from result_of(transport.agree(None, 1))
    problems: list[tuple[Any, type[Exception], str]] = [
        ("x is [8, 5], expected [8, 6]", InputError, "rank 1: x is [8, 5], expected [8, 6]"),
        (BatchError("3 rows, 4 micro-batches"), BatchError, "rank 1: 3 rows, 4 micro-batches"),
    ]
    for step, (problem, kind, text) in enumerate(problems):
        handle = transport.agree(problem if transport.rank >= 1 else None, step)
        error = yield from error_of(handle)
        assert type(error) is kind and str(error) == text
        yield from result_of(transport.agree(None, step))
        total = yield from result_of(
            transport.all_reduce(torch.ones(1, device=transport.device), tuple(range(transport.world_size)))
        )
        assert total.item() == transport.world_size


def ranks_at_different_steps_are_told(transport: Transport) -> Steps:
    error = yield from error_of(transport.agree(None, 4 + transport.rank))
    assert str(error).startswith(
        f"rank {transport.rank} is at step {4 + transport.rank} but others are at steps 4 to 6"
    )
    yield from result_of(transport.agree(None, 9))


def a_rank_that_is_not_there_is_named(transport: Transport) -> Steps:
    for call in (
        lambda: transport.send(torch.ones(1, device=transport.device), 3, 0),
        lambda: transport.recv((1,), torch.float32, transport.device, -1, 0),
        lambda: transport.broadcast_data(None, 3),
    ):
        try:
            call()
            raise AssertionError("not refused")
        except TransportError as error:
            assert "there are 3 ranks" in str(error)
    yield from result_of(transport.agree(None, 0))


def a_random_program_ends_with_the_right_values(transport: Transport) -> Steps:
    # the same random list of messages on all ranks, each doing its part, receives a few places early
    draw = random.Random(7)
    messages = []
    for number in range(150):
        source, target = draw.sample(range(transport.world_size), 2)
        messages.append((source, target, draw.choice((1, 10, 3000, 100_000)), draw.randrange(3), number))
    posted: list[tuple[int, int, Handle[torch.Tensor]]] = []
    for source, target, size, tag, number in messages:
        if transport.rank == target:
            posted.append((size, number, transport.recv((size,), torch.float32, transport.device, source, tag)))
        if transport.rank == source:
            transport.send(torch.full((size,), float(number), device=transport.device), target, tag)
        if len(posted) > 4:
            size, expected, handle = posted.pop(0)
            got = yield from result_of(handle)
            assert got.numel() == size and (got == expected).all()
    for _, expected, handle in posted:
        assert ((yield from result_of(handle)) == expected).all()
    transport.drain()


CONTRACT: tuple[Callable[[Transport], Steps], ...] = (
    every_dtype_and_shape_crosses,
    odd_memory_layouts_cross,
    messages_with_a_tag_keep_their_order,
    large_messages_cross_both_ways,
    a_receiver_owns_what_it_received,
    what_was_sent_may_be_overwritten_after_drain,
    many_more_sends_than_are_kept_under_way_arrive,
    sums_are_right_and_the_same_bits_everywhere,
    sums_over_some_ranks_leave_others_alone,
    sums_of_odd_layouts_happen_in_place,
    sections_of_all_come_together,
    each_gets_its_section_of_the_sum,
    sections_and_sums_of_several_groups_may_be_under_way_together,
    sections_that_do_not_fit_are_refused,
    plain_data_is_gathered_and_broadcast,
    a_problem_of_one_is_the_error_of_all_who_stay_usable,
    ranks_at_different_steps_are_told,
    a_rank_that_is_not_there_is_named,
    a_random_program_ends_with_the_right_values,
)
GROUPS = ((0, 1, 2), (0, 1), (0, 2), (1, 2))
PAIRS = ((0, 1), (2, 0), (1, 2))


def error_of(handle: Handle[Any]) -> Generator[tuple[Handle[Any], str], None, Exception]:
    """Wait for a handle and return the error that it ends with."""
    try:
        yield from result_of(handle)
    except Exception as error:
        return error
    raise AssertionError("no error")


class PairwiseOverGloo(NcclTransport):
    """The transport for NCCL, its communicators made of Gloo, for want of GPUs."""

    backend = "gloo"

    def start(self, what: str, ranks: tuple[int, ...], call: Any, result: torch.Tensor, given: torch.Tensor) -> Any:
        handle = super().start(what, ranks, call, result, given)
        handle.work = Waited(handle.work)
        return handle


class Waited:
    """Work that knows that it is done once it was waited for, which Gloo's scatter does not."""

    def __init__(self, work: Any) -> None:
        self.work, self.done = work, False

    def wait(self) -> None:
        """Block until done."""
        self.work.wait()
        self.done = True

    def is_completed(self) -> bool:
        """Say whether it was waited for."""
        return self.done


class GlooAlone(GlooTransport):
    """As with each rank on a machine of its own."""

    def own_machine(self) -> str:
        return str(self.rank)


class TwoMachines(GlooTransport):
    """As with ranks 0 and 2 on one machine and rank 1 on another."""

    def own_machine(self) -> str:
        return str(self.rank % 2)


class InstantStaging:
    """Staging without a GPU."""

    def to_host(self, tensor: torch.Tensor) -> tuple[torch.Tensor, InstantStaging]:
        """Copy."""
        return tensor.clone(), self

    def buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Allocate."""
        return torch.empty(shape, dtype=dtype)

    def to_device(self, host: torch.Tensor, target: torch.Tensor) -> None:
        """Copy back."""
        target.copy_(host)

    def synchronize(self) -> None:
        """Return: copies are done at once."""


def connect_over(kind: str, timeout_s: float = 20.0) -> Any:
    """Connect this rank over Gloo or over something that stands in for GPUs."""
    launch.join(timeout_s)
    if kind in ("nccl", "staged on GPU"):
        transport, _ = launch.connect_ranks(timeout_s)
        assert type(transport).__name__ == {"nccl": "NcclTransport", "staged on GPU": "HostStagedTransport"}[kind]
        return transport
    control = new_group(range(dist.get_world_size()), "gloo", timeout_s)
    host = os.environ["MASTER_ADDR"]
    if kind == "staged":
        return HostStagedTransport(control, CPU, timeout_s, host, InstantStaging())
    kinds: dict[str, Any] = {
        "shared": GlooTransport,
        "gloo": GlooAlone,
        "mixed": TwoMachines,
        "pairwise": PairwiseOverGloo,
    }
    return kinds[kind](control, CPU, timeout_s, host)


def run_contract(kind: str) -> dict[str, str]:
    """Run every contract on this rank; return the traceback of those that failed."""
    transport = connect_over(kind)
    transport.prepare(GROUPS, PAIRS)
    failures = {}
    for contract in CONTRACT:
        try:
            for blocked in contract(transport):
                raise AssertionError(f"gave its turn away at {blocked}")
        except Exception:
            failures[contract.__name__] = traceback.format_exc()
            break  # the ranks are no longer in step
    transport.close()
    return failures
