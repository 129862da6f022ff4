"""The ranks that live in this process: all of them (local), or one under `torch.distributed`."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

import torch

from efftra_fx.cluster import Cluster
from efftra_fx.errors import LaunchError
from efftra_fx.runtime.executor import drive
from efftra_fx.runtime.launch import connect
from efftra_fx.runtime.local_transport import LocalTransport, forget, local_transports, run_all
from efftra_fx.runtime.transport import Handle, Transport

T = TypeVar("T")
Turns = Generator[tuple[Handle[Any], str], None, T]


class World:
    """The transports of this process's ranks, and how work is run on them."""

    def __init__(self, cluster: Cluster, timeout_s: float) -> None:
        self.cluster = cluster
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
            self.transports = (connect(cluster, timeout_s),)

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

    def broadcast(self, data: Any) -> Any:
        """Return rank 0's plain data; a collective call."""
        if len(self.transports) > 1:
            return data
        return self.transports[0].broadcast_data(data).wait("broadcasting plain data")

    def agree(self, problem: Any, step: int) -> None:
        """Raise on every rank where any rank has a problem; a collective call."""
        if len(self.transports) > 1:
            if problem is not None:
                raise problem
            return
        self.transports[0].agree(problem, step).wait("agreeing on the step")

    def prepare(self, groups: Sequence[tuple[int, ...]], pairs: Sequence[tuple[int, int]]) -> None:
        """Make groups and connections ready; a collective call."""
        for transport in self.transports:
            transport.prepare(groups, pairs)
