"""Architectures of transformers match one device; the whole table is `benchmarks/coverage.py`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import architectures
import coverage


def holds(name: str) -> None:
    """Fail unless loss, gradients and output are one device's, under every plan of the table."""
    torch.set_num_threads(1)
    row = coverage.hold(name)
    assert row.verdict in ("match, same output", "match to float32, same output"), row.text


@pytest.mark.parametrize("name", ["vit", "resnet"])
def test_an_architecture_trains_as_on_one_device(name: str) -> None:
    holds(name)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", sorted(set(architectures.ARCHITECTURES) - {"vit", "resnet"}))
def test_every_architecture_trains_as_on_one_device(name: str) -> None:
    holds(name)
