"""Freed memory is kept, so that taking it again costs no page faults."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys, torch
from efftra_fx.heap import keep_freed_memory

if sys.argv[1] == "keep":
    assert keep_freed_memory()

def faults(run):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    run()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def step():
    for _ in range(4):
        torch.zeros(8 << 20)  # 32 MiB

for _ in range(10):
    step()
print(faults(step))
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"), reason="needs glibc")
def test_kept_memory_is_taken_again_without_page_faults() -> None:
    def faults(how: str) -> int:
        result = subprocess.run(
            [sys.executable, "-c", SCRIPT, how], capture_output=True, text=True, timeout=120, check=True
        )
        return int(result.stdout)

    assert faults("keep") < 1000 < 10_000 < faults("leave")
