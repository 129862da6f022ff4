"""Ranks with a GPU each, over NCCL.

NCCL carries out what is started on one communicator in order, each call waiting for its peer, so
a receive posted early would hold up every later message of the same communicator, to whomever.
Hence one communicator a pair of ranks: then only the order on each pair matters, which is what
the verifier proves. What faces each other in one `exchange` goes into one group call.

All communicators are made, and used once, by `prepare`, in the same order on all ranks: made on
first use, in program order, two ranks could wait for each other's making for ever.

A wait makes the current stream wait, not the host; `drain` waits on the host, with the time
limit, so that nothing is left under way when a step has ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from efftra_fx.errors import TransportError, TransportTimeout

from .group_transport import Group, GroupHandle, GroupTransport, break_group, in_place, plain_tensor
from .transport import Done, Handle, Incoming, Outgoing, Then, check_sections, describe

POLL_S = 20e-6


class StreamHandle(GroupHandle):
    """Work on a stream of NCCL's; `what` is the instruction that waited for it, once one has."""

    __slots__ = ("what",)

    def __init__(self, transport: GroupTransport, work: Any, result: Tensor, peers: tuple[int, ...]) -> None:
        super().__init__(transport, work, result, peers)
        self.what: str | None = None

    def wait(self, what: str = "") -> Tensor:
        """Make the current stream wait."""
        if self.what is None:
            self.what = what
            try:
                self.work.wait()
            except RuntimeError as error:
                self.transport.explain(error, what, self.waits_for)
        return self.result


class NcclTransport(GroupTransport):
    """Messages and sums of tensors in GPU memory."""

    backend: ClassVar[str] = "nccl"

    def __init__(self, control: Group, device: torch.device, timeout_s: float, host: str) -> None:
        self.pairs: dict[tuple[int, int], Group] = {}
        self.under_way: list[StreamHandle] = []
        super().__init__(control, device, timeout_s, host)

    def prepare(self, groups: Sequence[tuple[int, ...]], pairs: Sequence[tuple[int, int]] = ()) -> None:
        """Make and use every communicator once, in the order given."""
        self.check()
        for ranks in groups:
            if len(ranks) > 1 and ranks not in self.groups:
                self.groups[ranks] = self.communicator(ranks)
        for first, second in pairs:
            pair = (min(first, second), max(first, second))
            if pair not in self.pairs:
                self.pairs[pair] = self.communicator(pair)

    def communicator(self, ranks: tuple[int, ...]) -> Group:
        """Make a communicator and sum one number over it, on its members, so that it is connected."""
        group = self.new_group(ranks, self.backend)
        if self.rank in ranks:
            first = StreamHandle(self, group.allreduce([torch.zeros(1, device=self.device)]), torch.empty(0), ranks)
            self.await_on_host(first, "connecting")
        return group

    def send(self, tensor: Tensor, peer: int, tag: int) -> Handle[Tensor]:
        """Start sending."""
        return self.exchange([Outgoing(tensor, peer, tag)], [])[0][0]

    def recv(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, peer: int, tag: int
    ) -> Handle[Tensor]:
        """Post a receive."""
        return self.exchange([], [Incoming(shape, dtype, device, peer, tag)])[1][0]

    def exchange(
        self, sends: Sequence[Outgoing], recvs: Sequence[Incoming]
    ) -> tuple[list[Handle[Tensor]], list[Handle[Tensor]]]:
        """Start one group call a peer, lower ranks first; in each the receives come first."""
        self.check()
        outgoing = [plain_tensor(one.tensor) for one in sends]
        incoming = [torch.empty(one.shape, dtype=one.dtype, device=one.device) for one in recvs]
        calls: dict[int, list[tuple[bool, int]]] = {}  # peer: (is it a send, which)
        for number, tensor in enumerate(incoming):
            if tensor.numel():
                calls.setdefault(recvs[number].peer, []).append((False, number))
        for number, tensor in enumerate(outgoing):
            if tensor.numel():
                calls.setdefault(sends[number].peer, []).append((True, number))
        sent: list[Handle[Tensor]] = [Done(tensor) for tensor in outgoing]
        received: list[Handle[Tensor]] = [Done(tensor) for tensor in incoming]
        for peer in sorted(calls):
            tensors = [(is_send, (outgoing if is_send else incoming)[number]) for is_send, number in calls[peer]]
            for (is_send, number), handle in zip(calls[peer], self.group_call(peer, tensors), strict=True):
                (sent if is_send else received)[number] = handle
        return sent, received

    def group_call(self, peer: int, tensors: list[tuple[bool, Tensor]]) -> list[StreamHandle]:
        """Start all messages from and to one peer at once."""
        self.check_peer(peer)
        group = self.pairs.get((min(self.rank, peer), max(self.rank, peer)))
        if group is None:
            raise TransportError(f"rank {self.rank} cannot reach rank {peer}: call prepare with their pair first")
        operations = [
            # as bytes, for NCCL does not know all dtypes
            dist.P2POp(dist.isend if is_send else dist.irecv, tensor.view(-1).view(torch.uint8), peer, group)
            for is_send, tensor in tensors
        ]
        try:
            works: list[Any] = list(dist.batch_isend_irecv(operations))
        except RuntimeError as error:
            self.explain(error, "a group of messages", f"rank {peer}")
        if len(works) == 1:  # NCCL: one piece of work for the whole call
            works = works * len(tensors)
        handles = [StreamHandle(self, work, tensor, (peer,)) for work, (_, tensor) in zip(works, tensors, strict=True)]
        self.under_way.extend(handles)
        return handles

    def all_reduce(self, tensor: Tensor, ranks: tuple[int, ...]) -> Handle[Tensor]:
        """Start a sum."""
        self.check()
        if len(ranks) == 1 or tensor.numel() == 0:
            return Done(tensor)
        group = self.group_of(ranks)
        plain = plain_tensor(tensor)
        try:
            work = group.allreduce([torch.view_as_real(plain) if plain.is_complex() else plain])
            handle = StreamHandle(self, work, plain, ranks)
        except RuntimeError as error:
            self.explain(error, "a sum", describe(ranks))
        self.under_way.append(handle)
        return in_place(handle, tensor)

    def all_gather(self, tensor: Tensor, counts: Sequence[int], ranks: tuple[int, ...]) -> Handle[Tensor]:
        """Start a gather, as bytes; uneven sections travel padded to the longest."""
        self.check()
        check_sections(tensor, counts, ranks, self.rank, gather=True)
        plain = plain_tensor(tensor).view(-1)
        if len(ranks) == 1 or not sum(counts):
            return Done(plain.clone())
        sizes = [count * plain.element_size() for count in counts]
        whole = torch.empty(len(ranks) * max(sizes), dtype=torch.uint8, device=tensor.device)
        mine = padded(plain.view(torch.uint8), max(sizes))
        handle = self.start("a gather", ranks, dist.all_gather_into_tensor, whole, mine)
        dtype = tensor.dtype
        return Then(handle, lambda came: without_padding(came, sizes).view(dtype))

    def reduce_scatter(self, tensor: Tensor, counts: Sequence[int], ranks: tuple[int, ...]) -> Handle[Tensor]:
        """Start a sum of which each rank gets its section; uneven sections travel padded to the longest."""
        self.check()
        check_sections(tensor, counts, ranks, self.rank, gather=False)
        plain = plain_tensor(tensor).view(-1)
        if len(ranks) == 1 or not sum(counts):
            return Done(plain.clone())
        pairs = plain.is_complex()
        numbers = torch.view_as_real(plain).view(-1) if pairs else plain
        sizes = [count * (1 + pairs) for count in counts]
        longest = max(sizes)
        if min(sizes) < longest:
            numbers = torch.cat([padded(part, longest) for part in numbers.split(sizes)])
        own = numbers.new_empty(longest)
        handle = self.start("a scatter", ranks, dist.reduce_scatter_tensor, own, numbers)
        size = sizes[ranks.index(self.rank)]

        def finish(came: Tensor) -> Tensor:
            return torch.view_as_complex(came[:size].view(-1, 2)) if pairs else came[:size]

        return Then(handle, finish)

    def start(
        self, what: str, ranks: tuple[int, ...], call: Callable[..., Any], result: Tensor, given: Tensor
    ) -> StreamHandle:
        """Start a collective that fills `result`; what it is given is kept until it is done."""
        group = self.group_of(ranks)
        try:
            handle = StreamHandle(self, call(result, given, group=group, async_op=True), result, ranks)
        except RuntimeError as error:
            self.explain(error, what, describe(ranks))
        self.under_way.append(handle)
        return handle

    def group_of(self, ranks: tuple[int, ...]) -> Group:
        """Return a prepared group."""
        group = self.groups.get(ranks)
        if group is None:
            raise TransportError(f"{describe(ranks)} cannot sum: call prepare on all ranks first")
        return group

    def drain(self, what: str = "end of step") -> None:
        """Wait on the host for all that is under way; the current stream waits for it too."""
        under_way, self.under_way = self.under_way, []
        for handle in under_way:
            self.await_on_host(handle, handle.what or what)

    def await_on_host(self, handle: StreamHandle, what: str) -> None:
        """Wait on the host, with the time limit, alert to failures elsewhere."""
        handle.wait(what)
        end = time.monotonic() + self.timeout_s
        while not handle.work.is_completed():
            self.check()
            if time.monotonic() > end:
                error = TransportTimeout(
                    f"rank {self.rank} waited in {what} for {handle.waits_for}, but nothing came within "
                    f"{self.timeout_s:g} s; see what those ranks do, or raise timeout="
                )
                self.fail(error)
                raise error
            time.sleep(POLL_S)

    def break_all(self) -> None:
        """Abort the communicators, so that kernels that wait for a peer end."""
        for group in list(self.own_groups):
            if group is self.control:
                break_group(group)
            else:
                group.abort()


def padded(flat: Tensor, size: int) -> Tensor:
    """Return a flat tensor made longer; itself where it is as long."""
    return flat if flat.numel() == size else torch.nn.functional.pad(flat, (0, size - flat.numel()))


def without_padding(whole: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return the sections of a flat tensor without what they were padded with."""
    if min(sizes) == max(sizes):
        return whole
    return torch.cat([part[:size] for part, size in zip(whole.split(max(sizes)), sizes, strict=True)])
