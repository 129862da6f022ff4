"""Which stage of the block chain runs on which devices, and in what order."""

from __future__ import annotations

from dataclasses import dataclass

from efftra_fx.errors import PlanError

SCHEDULES = ("1f1b", "gpipe")


@dataclass(frozen=True)
class Stage:
    """A contiguous run of blocks and the devices that compute it.

    `devices` is replica-major: replica q of width `tensor` has
    `devices[q * tensor : (q + 1) * tensor]`.
    """

    first_block: int
    stop_block: int
    devices: tuple[int, ...]
    tensor: int = 1
    recompute: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.first_block < self.stop_block:
            raise PlanError(f"a stage needs at least one block, got blocks {self.first_block} to {self.stop_block}")
        if self.tensor < 1 or not self.devices or len(self.devices) % self.tensor:
            raise PlanError(f"{len(self.devices)} devices do not make whole replicas of width {self.tensor}")
        if len(set(self.devices)) != len(self.devices):
            raise PlanError(f"a stage lists a device twice: {list(self.devices)}")

    @property
    def replicas(self) -> int:
        """Number of data-parallel replicas."""
        return len(self.devices) // self.tensor

    @property
    def blocks(self) -> range:
        """The blocks, by index in the chain."""
        return range(self.first_block, self.stop_block)


@dataclass(frozen=True)
class Plan:
    """A hybrid plan: stages in order, micro-batches and schedule."""

    stages: tuple[Stage, ...]
    micro_batches: int
    schedule: str = "1f1b"
