"""Time messages, sums and agreements between local ranks, beside what torch.distributed takes for the same.

    python benchmarks/transport.py --ranks 2 4

All times are measured; each line is the median over repeats, on the slowest rank. The two sides of
a comparison alternate within one run.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from efftra_fx.runtime import launch
from efftra_fx.runtime.transport import Handle, Incoming, Outgoing, Transport

SIZES_BYTES = (4, 1 << 10, 1 << 16, 1 << 20, 1 << 22, 1 << 24)


def main() -> None:
    """Start the ranks, or be one of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[2, 4], help="numbers of ranks to try, one after another"
    )
    parser.add_argument("--repeats", type=int, default=50, help="repeats of each small measurement")
    options = parser.parse_args()
    if "RANK" in os.environ:
        measure(options.repeats)
        return
    for ranks in options.ranks:
        start(ranks, options.repeats)


def start(ranks: int, repeats: int) -> None:
    """Run this file on so many ranks of one thread each."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    meeting = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--repeats", str(repeats)]
    processes = [subprocess.Popen(command, env={**os.environ, **meeting, "RANK": str(rank)}) for rank in range(ranks)]
    try:
        codes = [process.wait(600) for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(codes):
        sys.exit(f"ranks ended with {codes}")


def measure(repeats: int) -> None:
    """Measure everything on this rank; rank 0 prints."""
    torch.set_num_threads(1)
    launch.join(120.0)
    transport, _ = launch.connect_ranks(120.0)
    everyone = tuple(range(transport.world_size))
    transport.prepare([everyone], [(0, 1)])
    say(transport, f"{transport.world_size} ranks, {type(transport).__name__}, {repeats} repeats")
    for size in SIZES_BYTES:
        few = repeats if size <= 1 << 20 else max(repeats // 5, 3)
        payload = torch.ones(size // 4)
        compare(transport, f"message and answer, {size} B", few, ours_there(transport, payload), theirs_there(payload))
    for size in SIZES_BYTES:
        few = repeats if size <= 1 << 20 else max(repeats // 5, 3)
        payload = torch.ones(size // 4)
        compare(
            transport,
            f"sum over all, {size} B",
            few,
            lambda payload=payload: transport.all_reduce(payload, everyone).wait(),  # type: ignore[misc]
            lambda payload=payload: dist.all_reduce(payload),  # type: ignore[misc]
        )
    flag = torch.zeros(1)
    compare(
        transport,
        "agreement, against a sum of one number",
        repeats,
        lambda: transport.agree(None, 0).wait(),
        lambda: dist.all_reduce(flag),
    )
    own_time(transport, repeats)
    transport.close()


def ours_there(transport: Transport, payload: torch.Tensor) -> Callable[[], Any]:
    """Send from rank 0 to rank 1 and back over our transport."""
    shape, rank = tuple(payload.shape), transport.rank

    def call() -> None:
        if rank == 0:
            handle = transport.recv(shape, payload.dtype, transport.device, 1, 0)
            transport.send(payload, 1, 0)
            handle.wait()
        elif rank == 1:
            transport.send(transport.recv(shape, payload.dtype, transport.device, 0, 0).wait(), 0, 0)
        transport.drain()

    return call


def theirs_there(payload: torch.Tensor) -> Callable[[], Any]:
    """Send from rank 0 to rank 1 and back with isend and irecv."""
    rank = dist.get_rank()

    def call() -> None:
        if rank > 1:
            return
        got = torch.empty_like(payload)
        peer = 1 - rank
        receive = dist.irecv(got, peer)
        if rank == 1:
            wait(receive)
        send = dist.isend(payload, peer)
        if rank == 0:
            wait(receive)
        wait(send)

    return call


def wait(work: Any) -> None:
    """Wait for a piece of torch.distributed's work."""
    work.wait()


def compare(transport: Transport, name: str, repeats: int, ours: Callable[[], Any], theirs: Callable[[], Any]) -> None:
    """Time two calls in turns and print both."""
    taken_s: tuple[list[float], list[float]] = ([], [])
    for number in range(repeats + 3):
        for which, call in enumerate((ours, theirs)):
            dist.barrier()
            began_s = time.perf_counter()
            call()
            if number >= 3:  # the first ones warm up
                taken_s[which].append(time.perf_counter() - began_s)
    rows = transport.all_gather_data([median(times_s) for times_s in taken_s]).wait()
    ours_s, theirs_s = (max(row[which] for row in rows) for which in (0, 1))
    say(transport, f"  {name:42} {ours_s * 1e6:9.0f} us   torch.distributed {theirs_s * 1e6:9.0f} us")


def own_time(transport: Transport, repeats: int) -> None:
    """Print how long starting and taking a message keeps the rank's own thread."""
    shape = (16,)
    payload = torch.ones(shape)
    started_s: list[float] = []
    taken_s: list[float] = []
    for _ in range(repeats):
        dist.barrier()
        handles: list[Handle[torch.Tensor]] = []
        began_s = time.perf_counter()
        if transport.rank == 1:
            _, handles = transport.exchange([], [Incoming(shape, payload.dtype, transport.device, 0, 0)] * 8)
        elif transport.rank == 0:
            handles, _ = transport.exchange([Outgoing(payload, 1, 0)] * 8, [])
        started_s.append((time.perf_counter() - began_s) / 8)
        dist.barrier()  # by now they have arrived
        began_s = time.perf_counter()
        for handle in handles:
            handle.wait()
        taken_s.append((time.perf_counter() - began_s) / 8)
        transport.drain()
    rows = transport.all_gather_data([median(started_s) * 1e6, median(taken_s) * 1e6]).wait()
    for name, row in zip(("send", "receive"), rows, strict=False):
        say(transport, f"  {name:8} start {row[0]:5.1f} us, wait when it is there {row[1]:5.1f} us")


def say(transport: Transport, text: str) -> None:
    """Print on rank 0."""
    if transport.rank == 0:
        print(text, flush=True)


if __name__ == "__main__":
    main()
