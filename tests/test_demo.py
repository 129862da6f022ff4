"""The demo's parts; that all of it runs is what `make demo` shows."""

from __future__ import annotations

import subprocess
import sys

import torch

from efftra_fx import demo


def test_batches_hold_every_digit_once_and_the_last_is_smaller() -> None:
    images, classes = demo.load_digits()
    assert images.shape == (1797, 1, 8, 8) and 0 <= images.min() and images.max() == 1
    batches = demo.shuffled(images, classes, rows=128)
    assert sum(len(x) for x, _ in batches) == 1797 and len(batches[-1][0]) == 1797 % 128
    assert torch.equal(torch.cat([y for _, y in batches]).bincount(), classes.bincount())


def test_the_text_is_bytes_of_the_standard_library() -> None:
    source = demo.load_text()
    assert len(source) == demo.TEXT_BYTES and source.dtype == torch.int64
    assert b"import" in bytes(source[:10_000].tolist())


def test_the_small_gpt_does_not_look_ahead_and_ties_its_head() -> None:
    model = demo.GPT(vocabulary=256, length=16, width=32, layers=2, heads=4)
    tokens = torch.randint(256, (2, 16))
    changed = tokens.clone()
    changed[:, 9:] = 0
    assert torch.allclose(model(tokens)[:, :9], model(changed)[:, :9], atol=1e-6)
    assert model.head.weight is model.token.weight
    assert "head.weight" not in dict(model.named_parameters())


def test_two_ranks_learn_the_digits() -> None:
    command = [sys.executable, "-m", "efftra_fx", "demo", "--ranks", "2", "--part", "digits"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr
    assert "check against one device: match" in ran.stdout
    assert "data parallelism alone" in ran.stdout and "GPipe" in ran.stdout
    assert "measured" in ran.stdout and "promised 97%" in ran.stdout
