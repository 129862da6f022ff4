"""Ranks on CPUs: messages and sums of tensors in host memory."""

from __future__ import annotations

import atexit
from collections import deque
from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from efftra_fx.errors import TransportError

from .group_transport import (
    Group,
    GroupHandle,
    GroupTransport,
    Pieces,
    gather,
    gather_by_messages,
    in_place,
    plain_tensor,
    scatter_by_messages,
)
from .neighbours import Mailbox, Party, machine_name, meet_all
from .shared_sum import LargeExchange, SharedSum, SmallExchange, wanted_party
from .transport import Done, Handle, Incoming, Outgoing, check_sections, describe

UNSENT_LIMIT = 8  # messages to one peer that Gloo may have under way before the oldest is waited for
NOT_SUMMED = (torch.int16, torch.uint16, torch.uint32, torch.uint64)


class GlooTransport(GroupTransport):
    """Tensors in host memory: over Gloo between machines, over sockets and shared memory within one."""

    def __init__(self, control: Group, device: torch.device, timeout_s: float, host: str) -> None:
        self.shared: dict[tuple[int, ...], SharedSum | None] = {}
        self.mailboxes: dict[int, Mailbox] = {}
        self.unsent: dict[int, deque[GroupHandle]] = {peer: deque() for peer in range(dist.get_world_size())}
        super().__init__(control, device, timeout_s, host)
        self.messages: Group = self.control
        self.machines: list[str] = self.all_gather_data(self.own_machine()).wait()
        self.meet_neighbours()
        self.prepare([self.everyone])
        atexit.register(self.flush)

    def own_machine(self) -> str:
        """Name this rank's machine: ranks whose machines have one name talk without Gloo."""
        return machine_name()

    def meet_neighbours(self) -> None:
        """Connect to the other ranks of this machine."""
        names = dict.fromkeys(self.machines)
        sets = [tuple(rank for rank in self.everyone if self.machines[rank] == name) for name in names]
        for party in self.meet([(ranks, 1, 0) for ranks in sets if len(ranks) > 1]).values():
            if party is not None:
                peers = party.peers(0, self.timeout_s)
                self.mailboxes = {other: Mailbox(peer, self.rank, other) for other, peer in peers.items()}

    def meet(self, wanted: Sequence[tuple[tuple[int, ...], int, int]]) -> dict[tuple[int, ...], Party | None]:
        """Make parties; see `meet_all`."""
        exchange = partial(gather, self.control, finish=self.finish)
        return meet_all(wanted, self.rank, self.timeout_s, exchange) if wanted else {}

    def prepare(self, groups: Sequence[tuple[int, ...]], pairs: Sequence[tuple[int, int]] = ()) -> None:
        """Create the groups; pairs need nothing."""
        self.check()
        known = self.groups.keys() | self.shared.keys()
        fresh = [ranks for ranks in dict.fromkeys(groups) if len(ranks) > 1 and ranks not in known]
        close = [ranks for ranks in fresh if len({self.machines[rank] for rank in ranks}) == 1]
        for ranks, party in self.meet([wanted_party(ranks) for ranks in close]).items():
            self.shared[ranks] = None if party is None else SharedSum(party, self.timeout_s)
        for ranks in fresh:
            if ranks not in self.shared:
                self.groups[ranks] = self.control if ranks == self.everyone else self.new_group(ranks, "gloo")

    def sum_of_all(self, small: Tensor) -> GroupHandle:
        """Start a sum of a small tensor over all ranks."""
        return self.start_sum(small, self.everyone) if self.world_size > 1 else super().sum_of_all(small)

    def send(self, tensor: Tensor, peer: int, tag: int) -> Handle[Tensor]:
        """Start sending."""
        if self.broken is not None or self.lifeline.failure:
            self.check()
        self.check_peer(peer)
        if tensor.numel() == 0:
            return Done(tensor)
        if peer in self.mailboxes:
            return self.start_send(plain_tensor(tensor), peer, tag)
        unsent = self.unsent[peer]
        if len(unsent) >= UNSENT_LIMIT:
            unsent.popleft().wait("an earlier send")
        handle = self.start_send(plain_tensor(tensor), peer, tag)
        unsent.append(handle)
        return handle

    def start_send(self, plain: Tensor, peer: int, tag: int) -> GroupHandle:
        """Start sending contiguous host memory."""
        mailbox = self.mailboxes.get(peer)
        try:
            if mailbox is None:
                return GroupHandle(self, self.messages.send([plain], peer, tag), plain, (peer,))
            mailbox.send(plain, tag)
            return GroupHandle(self, mailbox.peer, plain, (peer,))
        except (RuntimeError, OSError) as error:
            self.explain(error, f"a send with tag {tag}", f"rank {peer}")

    def recv(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, peer: int, tag: int
    ) -> Handle[Tensor]:
        """Post a receive."""
        if self.broken is not None or self.lifeline.failure:
            self.check()
        self.check_peer(peer)
        tensor = torch.empty(shape, dtype=dtype, device=device)
        if tensor.numel() == 0:
            return Done(tensor)
        return self.start_recv(tensor, peer, tag)

    def start_recv(self, tensor: Tensor, peer: int, tag: int) -> GroupHandle:
        """Post a receive into contiguous host memory."""
        mailbox = self.mailboxes.get(peer)
        try:
            work = self.messages.recv([tensor], peer, tag) if mailbox is None else mailbox.recv(tensor, tag)
        except RuntimeError as error:
            self.explain(error, f"a receive with tag {tag}", f"rank {peer}")
        return GroupHandle(self, work, tensor, (peer,))

    def exchange(
        self, sends: Sequence[Outgoing], recvs: Sequence[Incoming]
    ) -> tuple[list[Handle[Tensor]], list[Handle[Tensor]]]:
        """Post the receives, then send."""
        received = [self.recv(*incoming) for incoming in recvs]
        return [self.send(*outgoing) for outgoing in sends], received

    def all_reduce(self, tensor: Tensor, ranks: tuple[int, ...]) -> Handle[Tensor]:
        """Start a sum."""
        self.check()
        if len(ranks) == 1 or tensor.numel() == 0:
            return Done(tensor)
        plain = plain_tensor(tensor)
        handle = self.start_sum(plain, ranks)
        return in_place(handle, tensor)

    def start_sum(self, plain: Tensor, ranks: tuple[int, ...]) -> GroupHandle:
        """Start summing contiguous host memory in place."""
        self.check_prepared(ranks)
        shared = self.shared.get(ranks)
        if shared is None and plain.dtype in NOT_SUMMED:
            raise TransportError(f"gloo cannot sum {plain.dtype}; convert to torch.int32 or a floating dtype")
        try:
            work = self.groups[ranks].allreduce([plain]) if shared is None else shared.start(plain)
        except (RuntimeError, OSError) as error:
            self.explain(error, "a sum", describe(ranks))
        return GroupHandle(self, work, plain, ranks)

    def all_gather(self, tensor: Tensor, counts: Sequence[int], ranks: tuple[int, ...]) -> Handle[Tensor]:
        """Start a gather."""
        return self.sections(tensor, counts, ranks, gather=True)

    def reduce_scatter(self, tensor: Tensor, counts: Sequence[int], ranks: tuple[int, ...]) -> Handle[Tensor]:
        """Start a sum of which each rank gets its section."""
        return self.sections(tensor, counts, ranks, gather=False)

    def sections(self, tensor: Tensor, counts: Sequence[int], ranks: tuple[int, ...], gather: bool) -> Handle[Tensor]:
        """Start a gather or a scatter of host memory."""
        self.check()
        check_sections(tensor, counts, ranks, self.rank, gather)
        plain = plain_tensor(tensor).view(-1)
        if len(ranks) == 1 or not sum(counts):
            return Done(plain.clone())
        return self.start_sections(plain, tuple(counts), ranks, gather)

    def start_sections(
        self, plain: Tensor, counts: tuple[int, ...], ranks: tuple[int, ...], gather: bool
    ) -> GroupHandle:
        """Start a gather or a scatter of flat contiguous host memory."""
        self.check_prepared(ranks)
        shared = self.shared.get(ranks)
        work: SmallExchange | LargeExchange | Pieces
        try:
            if shared is not None:
                work, result = (shared.gather if gather else shared.scatter)(plain, counts)
            else:
                start = gather_by_messages if gather else scatter_by_messages
                work, result = start(self.groups[ranks], plain, counts, ranks.index(self.rank))
        except (RuntimeError, OSError) as error:
            self.explain(error, "a gather" if gather else "a scatter", describe(ranks))
        return GroupHandle(self, work, result, ranks)

    def check_prepared(self, ranks: tuple[int, ...]) -> None:
        """Raise if the group was not prepared."""
        if self.shared.get(ranks) is None and ranks not in self.groups:
            raise TransportError(f"{describe(ranks)} cannot sum: call prepare on all ranks first")

    def break_all(self) -> None:
        """End every wait, here and at the others."""
        for mailbox in list(self.mailboxes.values()):
            mailbox.peer.end()
        for shared in list(self.shared.values()):
            if shared is not None:
                shared.end()
        super().break_all()

    def flush(self) -> None:
        """Wait until the system has taken all that was sent to ranks of this machine."""
        if self.broken is None:
            for mailbox in self.mailboxes.values():
                mailbox.peer.sent.wait(self.timeout_s)
            for shared in self.shared.values():
                if shared is not None:
                    shared.flush()

    def close(self) -> None:
        """Give back connections and shared memory, and destroy our own groups."""
        atexit.unregister(self.flush)
        self.flush()
        for mailbox in self.mailboxes.values():
            mailbox.peer.close()
        for shared in self.shared.values():
            if shared is not None:
                shared.close()
        self.mailboxes.clear()
        self.shared.clear()
        super().close()

    def drain(self, what: str = "end of step") -> None:
        """Wait for all sends."""
        for unsent in self.unsent.values():
            while unsent:
                unsent.popleft().wait(f"{what} (sending)")
        for mailbox in self.mailboxes.values():
            mailbox.peer.own()
