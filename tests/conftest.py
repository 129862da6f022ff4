"""What every test stands on: golden texts, hypothesis profiles, one thread, and no process left behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

GOLDEN = Path(__file__).parent / "golden"
LEAVE_S = 10.0  # how long a child may take to end after the test that started it
HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", "compile_worker", "tests/ranks.py")

torch.set_num_threads(1)

Check = hypothesis.HealthCheck
QUIET = (Check.too_slow, Check.data_too_large, Check.function_scoped_fixture)
hypothesis.settings.register_profile("ci", derandomize=True, deadline=None, suppress_health_check=QUIET)
hypothesis.settings.register_profile("dev", deadline=None, suppress_health_check=QUIET)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev"))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--update-golden`, which rewrites expected texts instead of comparing."""
    parser.addoption(
        "--update-golden", action="store_true", help="rewrite tests/golden; read the diff before committing"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out GPU tests where there is no GPU; each has a CPU twin."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Return `check(file_name, text)`: the text equals tests/golden/FILE_NAME."""

    def check(file_name: str, text: str) -> None:
        path = GOLDEN / file_name
        if request.config.getoption("--update-golden"):
            GOLDEN.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
            return
        assert path.exists(), f"{path} is missing; run pytest --update-golden and read what it wrote"
        assert text == path.read_text(encoding="utf-8"), f"{path} differs; if it is meant, run pytest --update-golden"

    return check


@pytest.fixture(autouse=True, scope="session")
def costs_of_these_tests_only(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep measured costs apart from those of the user, and leave none behind."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EFFTRA_FX_CACHE", str(tmp_path_factory.mktemp("costs")))
        yield


@pytest.fixture(autouse=True)
def no_process_left_behind() -> Iterator[None]:
    """Fail a test whose child processes outlive it, and end them."""
    before = children()
    yield
    left = children() - before
    end = time.monotonic() + LEAVE_S
    while left and time.monotonic() < end:
        time.sleep(0.05)
        left = children() - before
    if left:
        commands = [f"{pid}: {command_of(pid)}" for pid in sorted(left)]
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        pytest.fail(f"the test left {len(commands)} child processes behind: {commands}")


def children() -> set[int]:
    """Return the ids of this process's living children, without Python's own helpers.

    Empty where the system does not list them.
    """
    found = set()
    for listed in Path("/proc/self/task").glob("*/children"):
        try:
            found |= {int(word) for word in listed.read_text().split()}
        except OSError:  # a thread that ended while we looked
            continue
    return {pid for pid in found if lives(pid) and not any(word in command_of(pid) for word in HELPERS)}


def lives(pid: int) -> bool:
    """Say whether a process runs: it is there, and has not ended without being waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def command_of(pid: int) -> str:
    """Return a process's command line, empty when it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""
