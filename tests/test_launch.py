"""Launching: ranks that do not fit the cluster, busy ports, the user's own group, measured clusters."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import free_port, outcomes_of, run_ranks
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from efftra_fx.cluster import Cluster, Device, Link, Links
from efftra_fx.errors import LaunchError
from efftra_fx.runtime import launch
from efftra_fx.runtime.links import Measured, describe_cluster, machines_of
from efftra_fx.runtime.local_transport import LocalTransport
from efftra_fx.runtime.transport import Transport

ROOT = Path(__file__).resolve().parent.parent
LINK = Link(1e9, 1e-5)


def cluster_of(ranks: int) -> Cluster:
    """Describe one machine with so many devices."""
    return Cluster((Device(0),) * ranks, Links((LINK,)), where="ranks")


def torchrun(tmp_path: Path, ranks: int, script: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run a script on so many ranks as a user would."""
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(script))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), *options, str(path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=90)


def total(transport: Transport) -> float:
    """Sum the ranks' numbers over all ranks."""
    everyone = tuple(range(transport.world_size))
    transport.prepare([everyone])
    return float(transport.all_reduce(torch.tensor([float(transport.rank)]), everyone).wait())


def connected_total(ranks: int) -> float:
    """Connect, sum, close."""
    transport = launch.connect(cluster_of(ranks), 20.0)
    result = total(transport)
    transport.close()
    return result


def launch_error(function: Any, *args: Any) -> str:
    """Return the text of the `LaunchError` that a call ends with."""
    with pytest.raises(LaunchError) as caught:
        function(*args)
    return str(caught.value)


def test_without_a_launcher_one_device_needs_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in launch.LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    transport = launch.connect(cluster_of(1))
    assert isinstance(transport, LocalTransport) and total(transport) == 0.0
    cluster = launch.measured_cluster()
    assert len(cluster.devices) == 1 and cluster.links == Links((None,)) and not dist.is_initialized()


def test_without_a_launcher_several_devices_end_with_the_command_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["some/where/train.py"])
    for name in launch.LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(
        LaunchError, match=r"^plan needs 4 ranks, got 1; start with: torchrun --nproc-per-node 4 train\.py$"
    ):
        launch.connect(cluster_of(4))
    two_machines = Cluster((Device(0), Device(0), Device(1), Device(1)), Links((LINK, LINK), LINK))
    with pytest.raises(LaunchError, match=r"torchrun --nnodes 2 .*--nproc-per-node 2 train\.py$"):
        launch.connect(two_machines)


@pytest.mark.parametrize("ranks", [2, 3])
def test_as_many_ranks_as_devices_connect(ranks: int) -> None:
    assert run_ranks(connected_total, ranks, ranks, limit_s=30) == [sum(range(ranks))] * ranks


def wrong_world_size() -> str:
    """Connect two ranks to a cluster of four."""
    return launch_error(launch.connect, cluster_of(4))


def test_too_few_ranks_end_everywhere_before_they_meet() -> None:
    texts = run_ranks(wrong_world_size, 2, limit_s=20)
    assert all(text.startswith("plan needs 4 ranks, got 2; start with: torchrun --nproc-per-node 4 ") for text in texts)


def with_own_group() -> tuple[float, str, bool]:
    """Make a process group first, as a user might."""
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    cluster = launch.measured_cluster(20.0)
    transport = launch.connect(cluster, 20.0)
    result = total(transport)
    transport.close()
    after = torch.ones(1)
    dist.all_reduce(after)
    return result, dist.get_backend(), dist.group.WORLD is group and after.item() == 2.0


def test_the_users_own_group_is_used_and_left_alone() -> None:
    assert run_ranks(with_own_group, 2, limit_s=30) == [(1.0, "gloo", True)] * 2


def join_at(port: int) -> str:
    """Join where somebody listens already."""
    os.environ["MASTER_PORT"] = str(port)
    return launch_error(launch.join, 2.0)


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        (text,) = run_ranks(join_at, 1, port, limit_s=20)
    assert f"the ranks cannot meet at 127.0.0.1 port {port}: the port is in use" in text
    assert "torchrun --master-port N" in text


def join_twice() -> list[str]:
    """Let rank 1 of a second job come to the first job's port."""
    launch.join(20.0)
    transport = launch.connect(cluster_of(2), 20.0)
    texts = []
    if transport.rank == 1:
        for rank, size in (("1", "2"), ("2", "3")):
            other = subprocess.run(
                [sys.executable, "-c", "from efftra_fx.runtime import launch; launch.join(20.0)"],
                env={**os.environ, "RANK": rank, "WORLD_SIZE": size, "PYTHONPATH": str(ROOT)},
                capture_output=True,
                text=True,
                timeout=30,
            )
            texts.append(other.stderr.strip().splitlines()[-1])
    transport.agree(None, 0).wait()
    transport.close()
    return texts


def test_a_rank_of_a_second_job_is_told_about_the_port() -> None:
    texts = run_ranks(join_twice, 2, limit_s=60)[1]
    assert len(texts) == 2
    assert all("rank 0 of another job, or this rank's twin, is there already" in text for text in texts), texts


def alone_of_two() -> str:
    """Come to a meeting where the others never come."""
    os.environ["WORLD_SIZE"] = "2"
    return launch_error(launch.join, 1.0)


def test_ranks_that_never_come_are_a_message_with_the_address() -> None:
    (text,) = run_ranks(alone_of_two, 1, limit_s=30)
    assert re.match(r"the ranks did not meet at 127\.0\.0\.1 port \d+ within 1 s: ", text), text


def leave_and_join() -> float:
    """Make a group, destroy it, and make another."""
    launch.join(20.0)
    dist.destroy_process_group()
    os.environ["MASTER_PORT"] = os.environ["SECOND_PORT"]
    return connected_total(2)


def test_a_process_may_leave_its_group_and_join_again() -> None:
    assert run_ranks(leave_and_join, 2, limit_s=30, environment={"SECOND_PORT": str(free_port())}) == [1.0, 1.0]


def measured(machine_count: int) -> Cluster:
    """Measure as if rank r were on machine r % machine_count."""
    name = f"machine {int(os.environ['RANK']) % machine_count}"
    module: Any = launch
    module.machine_name = lambda: name
    return launch.measured_cluster(20.0)


@pytest.mark.parametrize("ranks, machines", [(2, 1), (4, 2), (3, 3)])
def test_every_rank_measures_the_same_cluster(ranks: int, machines: int) -> None:
    clusters = run_ranks(measured, ranks, machines, limit_s=30)
    first = clusters[0]
    assert isinstance(first, Cluster) and all(cluster == first for cluster in clusters)
    assert [device.machine for device in first.devices] == [rank % machines for rank in range(ranks)]
    assert len(first.devices) == ranks and first.where == "ranks"
    assert (first.links.inter is None) == (machines == 1)
    links = [link for link in (*first.links.intra, first.links.inter) if link is not None]
    assert all(link.bandwidth_bytes_per_s > 1e6 and 0 < link.latency_s < 1 for link in links)
    assert len(links) == {(2, 1): 1, (4, 2): 3, (3, 3): 1}[ranks, machines]


def facts(machine: str, gpu: str = "", memory_bytes: int | None = 1000) -> dict[str, Any]:
    """Describe a rank."""
    return {"machine": machine, "kind": "H200" if gpu else "cpu", "memory_bytes": memory_bytes, "gpu": gpu}


def test_ranks_of_a_machine_share_its_memory_and_sharers_of_a_gpu_share_that() -> None:
    cpus = describe_cluster([facts("a"), facts("b"), facts("a")], Measured({0: LINK}, LINK))
    assert [device.memory_bytes for device in cpus.devices] == [500, 1000, 500]
    assert cpus.links == Links((LINK, None), LINK)
    gpus = describe_cluster([facts("a", "g0"), facts("a", "g0"), facts("a", "g1")], Measured({0: LINK}, None))
    assert [device.memory_bytes for device in gpus.devices] == [500, 500, 1000]
    assert describe_cluster([facts("a", memory_bytes=None)], Measured({}, None)).devices[0].memory_bytes is None
    assert machines_of([facts("b"), facts("a"), facts("b")]) == [0, 1, 0]


def test_ranks_with_more_threads_than_their_machine_has_cores_share_slots() -> None:
    busy = facts("a") | {"cores": 2, "threads": 1}
    four = describe_cluster([busy] * 4, Measured({0: LINK}, None))
    assert four.slots == (2.0,) and four.crowded and {device.speed for device in four.devices} == {1.0}
    two = describe_cluster([busy] * 2, Measured({0: LINK}, None))
    assert two.slots == () and not two.crowded
    threaded = facts("a") | {"cores": 2, "threads": 4}
    assert describe_cluster([threaded], Measured({}, None)).devices[0].speed == 0.5
    pair = describe_cluster([threaded] * 2, Measured({0: LINK}, None))
    assert pair.slots == (1.0,) and {device.speed for device in pair.devices} == {0.5}
    shared = describe_cluster([facts("a", "g0")] * 2, Measured({0: LINK}, None))
    assert shared.slots == (1.0,) and shared.devices[0].speed == 1
    assert describe_cluster([facts("a", "g0"), facts("a", "g1")], Measured({0: LINK}, None)).slots == ()
    mixed = describe_cluster([busy, busy, facts("b"), busy], Measured({0: LINK}, LINK))
    assert mixed.slots == (2.0, None) and mixed.crowded


def test_the_transport_suits_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    kinds = [
        launch.transport_kind([facts("a", gpu) for gpu in gpus]).__name__
        for gpus in (("", ""), ("g0", "g1"), ("g0", "g0"), ("g0", "g0", "g1"))
    ]
    assert kinds == ["GlooTransport", "NcclTransport", "HostStagedTransport", "HostStagedTransport"]
    with pytest.raises(LaunchError, match=r"ranks \[1\] have no GPU but others have; start ranks on GPUs only"):
        launch.transport_kind([facts("a", "g0"), facts("a")])


def test_torchrun_with_too_few_ranks_prints_the_command_on_every_rank(tmp_path: Path) -> None:
    script = """
        from efftra_fx.cluster import Cluster, Device, Link, Links
        from efftra_fx.runtime import launch
        launch.connect(Cluster((Device(0),) * 4, Links((Link(1e9),)), where="ranks"))
    """
    done = torchrun(tmp_path, 2, script)
    assert done.returncode != 0
    text = "plan needs 4 ranks, got 2; start with: torchrun --nproc-per-node 4 train.py"
    assert done.stderr.count(f"efftra_fx.errors.LaunchError: {text}") == 2, done.stderr


def test_an_error_outside_any_step_ends_the_other_ranks_with_its_words(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        textwrap.dedent("""
            import torch
            from efftra_fx.runtime import launch
            transport = launch.connect(launch.measured_cluster(), 60.0)
            if transport.rank == 1:
                raise ZeroDivisionError("in the user's own loop")
            transport.recv((1,), torch.float32, torch.device("cpu"), 1, 0).wait("Recv(a)")
        """)
    )
    meeting = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "PYTHONPATH": str(ROOT)}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(path)],
            env={**os.environ, **meeting, "RANK": rank, "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in ("0", "1")
    ]
    seen = ranks[0].communicate(timeout=60)[1]
    ranks[1].communicate(timeout=60)
    expected = "efftra_fx.errors.RankFailed: rank 1 failed: ZeroDivisionError: in the user's own loop"
    assert expected in seen.strip().splitlines()[-1], seen
    assert [rank.returncode for rank in ranks] == [1, 1]


def test_outcomes_carry_what_a_launch_error_says() -> None:
    outcomes = outcomes_of(connected_total, 2, 3, limit_s=20)
    assert all("plan needs 3 ranks, got 2" in outcome.error and outcome.status == 1 for outcome in outcomes)


def live_three_times() -> list[float]:
    """Join, sum and leave, three times in one process."""
    found = []
    for _ in range(3):
        found.append(connected_total(2))
        dist.destroy_process_group()
    return found


def test_a_process_may_join_again_over_the_same_store() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": str(store.port)}
    for found in run_ranks(live_three_times, 2, limit_s=60.0, environment=environment):
        assert found == [1.0, 1.0, 1.0]
