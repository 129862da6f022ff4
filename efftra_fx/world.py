"""The ranks that live in this process: all of them (local), or one under `torch.distributed`."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from efftra_fx.cluster import Cluster
from efftra_fx.errors import EfftraError, InputError, LaunchError, TransportError
from efftra_fx.runtime.executor import drive
from efftra_fx.runtime.group_transport import GroupTransport
from efftra_fx.runtime.launch import LATEST, connect, meeting_again
from efftra_fx.runtime.local_transport import LocalTransport, forget, local_transports, run_all
from efftra_fx.runtime.transport import Handle, Transport
from efftra_fx.runtime.whereabouts import HERE, Call

T = TypeVar("T")
Turns = Generator[tuple[Handle[Any], str], None, T]


class World:
    """The transports of this process's ranks, and how work is run on them."""

    def __init__(self, cluster: Cluster, timeout_s: float) -> None:
        self.cluster = cluster
        self.number, self.calls, self.programs = 0, 0, 0  # of calls that every rank makes, and of programs, so far
        if cluster.where == "described":
            count = len(cluster.devices)
            raise LaunchError(
                f"this cluster of {count} devices is only described, so its plan can be read but not run; use "
                f"Cluster.from_env() and launch by torchrun --nproc-per-node {count} SCRIPT, or Cluster.local({count}) "
                "for ranks inside this process"
            )
        self.transports: tuple[Transport, ...]
        if cluster.where == "local":
            count = len(cluster.devices)
            gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
            devices = [torch.device("cuda", r) for r in range(count)] if gpus >= count else []
            self.transports = local_transports(count, devices)
        else:
            with meeting_again("compile"):
                self.transports = (connect(cluster, timeout_s),)
            self.number = next(_NUMBERS)
            self.home = dist.group.WORLD if dist.is_initialized() else None
            LATEST[:] = [self.leaving]

    @property
    def size(self) -> int:
        """Number of ranks altogether."""
        return len(self.cluster.devices)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of this process."""
        return tuple(t.rank for t in self.transports)

    @property
    def first(self) -> bool:
        """Say whether rank 0 is here."""
        return self.ranks[0] == 0

    @property
    def device(self) -> torch.device:
        """Where this process's first rank computes."""
        return self.transports[0].device

    def run(self, work: Callable[[Transport], Turns[T]]) -> list[T]:
        """Run the same work on every rank of this process and return what each returns.

        An error on one rank is told to all others before it is raised here. Gradient recording and autocast are
        off meanwhile, and afterwards as they were (ranks that take turns cannot each restore them).
        """
        with torch.no_grad(), torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            if len(self.transports) > 1:
                try:
                    return run_all([work(t) for t in self.transports])
                except BaseException:
                    forget([t for t in self.transports if isinstance(t, LocalTransport)])
                    raise
            transport = self.transports[0]
            try:
                return [drive(work(transport))]
            except Exception as error:
                transport.fail(error)
                raise

    def gather(self, data: Any) -> list[Any]:
        """Return every process's plain data, in rank order; a collective call."""
        if len(self.transports) > 1:
            return [data]
        return self.transports[0].all_gather_data(data).wait("exchanging plain data")

    def gather_number(self, number: float) -> list[float]:
        """Return every process's number, in rank order, in one exchange; a collective call."""
        transport = self.transports[0]
        if len(self.transports) > 1 or not isinstance(transport, GroupTransport):
            return [number]
        row = torch.zeros(self.size, dtype=torch.float64)  # the sum is all numbers
        row[transport.rank] = number
        found: list[float] = transport.sum_of_all(row).wait("exchanging numbers").tolist()
        return found

    def broadcast(self, data: Any) -> Any:
        """Return rank 0's plain data; a collective call."""
        if len(self.transports) > 1:
            return data
        return self.transports[0].broadcast_data(data).wait("broadcasting plain data")

    @contextmanager
    def leaving(self, name: str) -> Iterator[None]:
        """Agree over these connections that all ranks make others now, if they can still be used."""
        home = dist.group.WORLD if dist.is_initialized() else None
        if self.size == 1 or self.home is not home:
            yield
            return
        with self.calling(name):
            try:
                self.agree_on_call(None)
            except TransportError:
                pass  # its ranks have failed, which ends their program and not the next one
            yield

    @contextmanager
    def calling(self, name: str, number: int | None = None) -> Iterator[None]:
        """Be in a call that every rank makes; an error that is not of this package is told to all others.

        Raise InputError where another thread of this process is in a call. Calls within the call are part of it.
        """
        number = self.calls + 1 if number is None else number
        with HERE.calling(Call(self.number, number, name)) as outermost:
            if outermost:
                self.calls = number
            try:
                yield
            except EfftraError:
                raise
            except BaseException as error:
                if len(self.transports) == 1:
                    self.transports[0].fail(error)
                raise

    def agree(self, problem: Any, step: int) -> None:
        """Raise on every rank where any rank has a problem; a collective call."""
        if len(self.transports) > 1:
            if problem is not None:
                raise problem
            return
        self.transports[0].agree(problem, step).wait(str(HERE.call or "agreeing on the step"))

    def agree_on_call(self, problem: EfftraError | None, given: str = "") -> bool:
        """Raise on every rank where any rank has a problem or makes another call; a collective call.

        Returns whether all ranks were given the same. All calls begin with it, so that ranks in different ones see it.
        """
        call = HERE.call.name if HERE.call is not None else "compile"
        mark = int.from_bytes(hashlib.sha256(f"{call} {given}".encode()).digest()[:4], "big")
        try:
            self.agree(problem, (self.calls << 32) + mark if problem is None else 0)
        except InputError as error:
            if problem is not None or "is at step" not in str(error):
                raise
        else:
            if problem is not None:
                raise problem
            return True
        calls = self.gather(f"{call}, its call {self.calls}")
        other = next((rank for rank, one in enumerate(calls) if one != calls[0]), None)
        if other is None:
            return False
        self.calls = max(int(one.rpartition(" ")[2]) for one in calls)  # from where all go on alike
        raise InputError(
            f"the ranks make different calls: rank 0 {calls[0]}, rank {other} {calls[other]}; every rank must make the "
            "same calls in the same order (also state_dict, of which one rank then saves the result)"
        )

    def agree_on_arguments(self, problem: EfftraError | None, given: str) -> None:
        """Raise on every rank where one has a problem, makes another call, or gives other arguments to it."""
        if self.agree_on_call(problem, given):
            return
        everyone = self.gather(given)
        other = next(rank for rank, one in enumerate(everyone) if one != everyone[0])
        name = HERE.call.name if HERE.call is not None else "a call"
        raise InputError(
            f"the ranks give different arguments to {name}: rank 0 {everyone[0]}, rank {other} {everyone[other]}; give "
            "the same on every rank"
        )

    def prepare(self, groups: Sequence[tuple[int, ...]], pairs: Sequence[tuple[int, int]]) -> None:
        """Make groups and connections ready; a collective call."""
        for transport in self.transports:
            transport.prepare(groups, pairs)


_NUMBERS = itertools.count(1)
