"""Find out how this process was started and connect it to the other ranks.

The user's own process group is used if there is one; else one is made from what a launcher such
as torchrun left in the environment.
"""

from __future__ import annotations

import atexit
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from efftra_fx.cluster import Cluster
from efftra_fx.errors import LaunchError

from .gloo_transport import GlooTransport
from .group_transport import gather, new_group
from .host_staged import HostStagedTransport
from .lifeline import own_host
from .links import Measured, describe_cluster, machines_of, measure
from .local_transport import local_transports
from .nccl_transport import NcclTransport
from .neighbours import machine_name
from .transport import Data, Transport

TIMEOUT_S = 300.0
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
WORLD_KEY = "efftra_fx/world_size"
LATEST: list[Callable[[str], AbstractContextManager[None]]] = []  # how the latest connections are asked
meetings = itertools.count()  # of this process: a process may leave its group and join again


def connect(cluster: Cluster, timeout_s: float = TIMEOUT_S) -> Transport:
    """Connect this rank to the others of the cluster; a collective call.

    Raise `LaunchError` when there are not as many ranks as the cluster has devices, or when they
    cannot meet. One device without a launcher needs nobody else.
    """
    check_world_size(cluster, world_size())
    if world_size() == 1 and not dist.is_initialized():
        return local_transports(1, [own_device(0)])[0]
    join(timeout_s)
    return connect_ranks(timeout_s)[0]


def measured_cluster(timeout_s: float = TIMEOUT_S) -> Cluster:
    """Describe the ranks that were launched, links measured with their own transport; the same on every rank.

    A collective call that takes less than a second on a local network. Without a launcher it
    describes the one device of this process.
    """
    if not launched():
        return describe_cluster([own_facts(own_device(0))], Measured({}, None))
    with meeting_again("Cluster.from_env"):
        join(timeout_s)
        transport, facts = connect_ranks(timeout_s)
        try:
            return describe_cluster(facts, measure(transport, machines_of(facts)))
        finally:
            transport.close()


@contextmanager
def meeting_again(name: str) -> Iterator[None]:
    """Make new connections meanwhile: the latest ones are asked first whether all ranks do."""
    with LATEST[0](name) if LATEST else nullcontext():
        yield


def connect_ranks(timeout_s: float) -> tuple[Transport, list[Data]]:
    """Make the transport that suits the ranks' devices, and tell what each rank is (`own_facts`)."""
    with explained_meeting(timeout_s):
        control = new_group(range(dist.get_world_size()), "gloo", timeout_s)
    host = own_host(os.environ.get("MASTER_ADDR", ""))
    names = gather(control, machine_name(), wait_plainly)
    local_rank = int(os.environ.get("LOCAL_RANK", names[: dist.get_rank()].count(machine_name())))
    device = own_device(local_rank)
    facts = gather(control, own_facts(device), wait_plainly)
    return transport_kind(facts)(control, device, timeout_s, host), facts


def transport_kind(facts: list[Data]) -> type[GlooTransport] | type[NcclTransport]:
    """Choose NCCL when each rank has a GPU of its own, host memory when they share some, Gloo without GPUs.

    Raise `LaunchError` when only some ranks have a GPU.
    """
    found = [fact["gpu"] for fact in facts if fact["gpu"]]
    if not found:
        return GlooTransport
    if len(found) < len(facts):
        without = [rank for rank, fact in enumerate(facts) if not fact["gpu"]]
        raise LaunchError(
            f"ranks {without} have no GPU but others have; start ranks on GPUs only, or hide all GPUs with "
            "CUDA_VISIBLE_DEVICES="
        )
    return NcclTransport if len(set(found)) == len(found) and dist.is_nccl_available() else HostStagedTransport


def own_facts(device: torch.device) -> Data:
    """Say what this rank is: machine, kind of device, memory in bytes, and which GPU, or cores and threads."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        identity = str(getattr(properties, "uuid", f"{machine_name()} {device.index}"))
        return {
            "machine": machine_name(),
            "kind": properties.name,
            "memory_bytes": properties.total_memory,
            "gpu": identity,
        }
    return {
        "machine": machine_name(),
        "kind": "cpu",
        "memory_bytes": machine_memory_bytes(),
        "gpu": "",
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


def own_device(local_rank: int) -> torch.device:
    """Choose the device of this rank; several ranks share a GPU when there are fewer."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def machine_memory_bytes() -> int | None:
    """Return the memory that this machine, or this container, has; None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        total = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemTotal:"))
    except (OSError, StopIteration):
        return None
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        limit = "max"
    return min(total, int(limit)) if limit.isdigit() else total


def launched() -> bool:
    """Say whether a launcher started this process as one rank of several, or the user made a process group."""
    return dist.is_initialized() or all(name in os.environ for name in LAUNCHER_VARIABLES)


def world_size() -> int:
    """Return the number of ranks; 1 without a launcher."""
    if dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ["WORLD_SIZE"]) if launched() else 1


def check_world_size(cluster: Cluster, found: int) -> None:
    """Raise `LaunchError` with the command to type if the ranks are not the cluster's."""
    needed = len(cluster.devices)
    if found == needed:
        return
    machines = len({device.machine for device in cluster.devices})
    script = Path(sys.argv[0]).name or "train.py"
    several = f"--nnodes {machines} --rdzv-backend c10d --rdzv-endpoint HOST:29500 " if machines > 1 else ""
    raise LaunchError(
        f"plan needs {needed} ranks, got {found}; "
        f"start with: torchrun {several}--nproc-per-node {needed // machines} {script}"
    )


def join(timeout_s: float) -> None:
    """Make the default process group from the launcher's environment, unless there is one.

    Raise `LaunchError` when the ranks do not meet, with the address that they tried.
    """
    if dist.is_initialized():
        return
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    limit = timedelta(seconds=timeout_s)
    with explained_meeting(timeout_s):
        store, rank, size = next(rendezvous("env://", timeout=limit))
        life = next(meetings)
        check_alone(store, rank, size, life)
        own = PrefixStore(f"efftra_fx/life {life}", store)  # a group that was left has keys in the store
        dist.init_process_group(backend, store=own, rank=rank, world_size=size, timeout=limit)
    atexit.register(leave)


def leave() -> None:
    """Destroy the default group that `join` made, at the end of the process unless an error ends it."""
    if dist.is_initialized() and getattr(sys, "last_value", None) is None:
        dist.destroy_process_group()


def check_alone(store: Any, rank: int, size: int, time: int) -> None:
    """Raise `LaunchError` if the ranks that meet here are of two jobs."""
    if rank == 0:
        store.set(f"{WORLD_KEY}/{time}", str(size))
    found = int(store.get(f"{WORLD_KEY}/{time}"))
    if store.add(f"{WORLD_KEY}/{time}/{rank}", 1) > 1 or found != size:
        raise_port("rank 0 of another job, or this rank's twin, is there already")


@contextmanager
def explained_meeting(timeout_s: float) -> Iterator[None]:
    """Turn errors of the meeting into `LaunchError`."""
    try:
        yield
    except (RuntimeError, ValueError, OSError) as error:
        if "EADDRINUSE" in str(error) or "in use" in str(error):
            raise_port("the port is in use")
        where = f"{os.environ.get('MASTER_ADDR')} port {os.environ.get('MASTER_PORT')}"
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise LaunchError(
            f"the ranks did not meet at {where} within {timeout_s:g} s: {first}; "
            "start every rank, with the same address and a port that no other job uses"
        ) from error


def raise_port(reason: str) -> NoReturn:
    """Raise because of the port."""
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    raise LaunchError(
        f"the ranks cannot meet at {host} port {port}: {reason}; end the other job or choose another port: "
        "torchrun --master-port N ..., or MASTER_PORT=N"
    ) from None


def wait_plainly(work: Any, what: str) -> None:
    """Wait for a collective before there is a transport."""
    work.wait()
