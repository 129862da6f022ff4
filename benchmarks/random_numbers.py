"""Compare a dropout whose mask any plan draws alike with torch's own, in CPU time of one thread (or GPU time)."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from efftra_fx.draws import KEEP, ROW_KEYS, keys_of

SHAPES = ((4, 16), (2, 128, 64), (2, 128, 256), (8, 128, 1024), (64, 1024))


def torchs(x: Tensor) -> Tensor:
    """Drop with a mask from the device's generator."""
    out: Tensor = torch.native_dropout(x, 0.1, True)[0]
    return out


def ours(x: Tensor, keys: Tensor) -> Tensor:
    """Drop with a mask that is a function of the rows' keys."""
    mask = KEEP(keys, list(x.shape[1:]), 0, 3, 0.1).view(x.shape)
    kept: Tensor = x * mask
    return kept.mul_(1 / 0.9)


def seconds(function: Callable[[], object], device: str, repeats: int) -> float:
    """Return the median time of a call."""
    times = []
    for _ in range(repeats + 3):
        if device == "cpu":
            begin = time.process_time()
            function()
            times.append(time.process_time() - begin)
        else:
            torch.cuda.synchronize()
            begin = time.perf_counter()
            function()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
    return statistics.median(times[3:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print("| shape | torch's dropout, µs | ours, µs | ratio |\n|---|---|---|---|")
    for shape in SHAPES:
        x = torch.randn(shape, device=arguments.device)
        keys = keys_of(0, shape[0], arguments.device)[ROW_KEYS]
        theirs = seconds(lambda: torchs(x), arguments.device, arguments.repeats)  # noqa: B023
        mine = seconds(lambda: ours(x, keys), arguments.device, arguments.repeats)  # noqa: B023
        name = " × ".join(map(str, shape))
        print(f"| {name} | {theirs * 1e6:.0f} | {mine * 1e6:.0f} | {mine / theirs:.2f} |")


if __name__ == "__main__":
    main()
