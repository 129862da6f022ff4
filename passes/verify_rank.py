"""One rank's program does each of its works once, each behind what it needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import assert_never

from efftra_fx.errors import (
    CellError,
    DeviceError,
    JoinError,
    LoadError,
    LossReductionError,
    OrderError,
    ReduceError,
    UpdateError,
)
from efftra_fx.program import (
    AllReduce,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Instruction,
    Join,
    Load,
    RankProgram,
    Recv,
    ReduceLoss,
    Send,
    Update,
    Wiring,
)
from efftra_fx.program_text import print_instruction

from .expected import Expected, place
from .routes import Cell


def verify_rank(
    program: RankProgram, wiring: Wiring, expected: Expected, reductions: Mapping[str, tuple[int, ...]]
) -> None:
    """Walk through the program; raise the VerifyError that fits the first instruction which is wrong or missing.

    `reductions` gives the group of each parameter that this rank must reduce.
    """
    walk = _Walk(program, wiring, expected, reductions)
    for index, instruction in enumerate(program.instructions):
        walk.index = index
        walk.step(instruction)
    walk.end()


@dataclass
class _Walk:
    program: RankProgram
    wiring: Wiring
    expected: Expected
    reductions: Mapping[str, tuple[int, ...]]
    index: int = 0
    cells: Mapping[int, Cell] = field(init=False)
    loaded: set[int] = field(default_factory=set)
    forwarded: set[int] = field(default_factory=set)
    backwarded: set[int] = field(default_factory=set)
    weighted: set[int] = field(default_factory=set)
    missing: dict[tuple[int, bool], set[Recv]] = field(default_factory=dict)
    reduced: set[str] = field(default_factory=set)
    joined: bool = False
    loss_reduced: bool = False
    updated: bool = False

    def __post_init__(self) -> None:
        self.cells = self.expected.cells[self.program.rank]
        for receive in self.expected.receives[self.program.rank]:
            self.missing.setdefault((receive.micro_batch, receive.gradient), set()).add(receive)

    @property
    def where(self) -> str:
        return place(self.program.rank, self.index, self.program.instructions[self.index])

    @property
    def has_backward(self) -> bool:
        return self.program.stage is not None and self.wiring.backward[self.program.stage]

    @property
    def has_weights(self) -> bool:
        return self.program.stage is not None and self.wiring.has_weights(self.program.stage)

    @property
    def is_last(self) -> bool:
        return self.program.stage == self.wiring.stages - 1

    def step(self, instruction: Instruction) -> None:
        if self.updated:
            raise UpdateError(f"{self.where} stands behind update, which must be the last instruction")
        self.check_stage(instruction)
        match instruction:
            case Load():
                self.load(instruction)
            case Forward(micro_batch=k):
                self.forward(k)
            case Backward(micro_batch=k):
                self.backward(k)
                self.weighted.add(k)
            case BackwardInput(micro_batch=k):
                self.backward(k)
            case BackwardWeight(micro_batches=micro_batches):
                for k in micro_batches:
                    self.backward_weight(k)
            case Send(micro_batch=k, gradient=gradient):
                if k not in (self.backwarded if gradient else self.forwarded):
                    work = "backward" if gradient else "forward"
                    raise OrderError(f"{self.where} stands before the {work} of micro-batch {k}, which computes it")
            case Recv(micro_batch=k, gradient=gradient):
                self.missing[k, gradient].discard(instruction)
            case AllReduce():
                self.all_reduce(instruction)
            case Join():
                self.join(instruction)
            case ReduceLoss():
                self.reduce_loss(instruction)
            case Update():
                self.updated = True
            case _:
                assert_never(instruction)

    def check_stage(self, instruction: Instruction) -> None:
        match instruction:
            case (
                Load(stage=s) | Forward(stage=s) | Backward(stage=s) | BackwardInput(stage=s) | BackwardWeight(stage=s)
            ):
                if s != self.program.stage:
                    own = "is idle" if self.program.stage is None else f"serves stage {self.program.stage}"
                    raise DeviceError(f"{self.where} is of stage {s}, but the rank {own}; a device serves one stage")
            case _:
                pass

    def load(self, load: Load) -> None:
        cell = self.cells.get(load.micro_batch)
        if cell is None:
            raise LoadError(f"{self.where} loads micro-batch {load.micro_batch}, in which this replica has no rows")
        if (load.start, load.stop) != (cell.start, cell.stop):
            raise LoadError(
                f"{self.where} loads rows [{load.start}:{load.stop}], expected [{cell.start}:{cell.stop}]: "
                f"each stage must compute each row once"
            )
        if load.micro_batch in self.loaded:
            raise LoadError(f"{self.where} loads micro-batch {load.micro_batch} for the second time")
        self.loaded.add(load.micro_batch)

    def forward(self, k: int) -> None:
        if k not in self.cells:
            raise CellError(f"{self.where} computes micro-batch {k}, in which this replica has no rows")
        if k in self.forwarded:
            raise CellError(f"{self.where} computes micro-batch {k} for the second time")
        if k not in self.loaded:
            raise OrderError(f"{self.where} stands before the load of micro-batch {k}")
        self.check_received(k, False)
        self.forwarded.add(k)

    def backward(self, k: int) -> None:
        if not self.has_backward:
            raise CellError(f"{self.where} goes backward, but stage {self.program.stage} has nothing to differentiate")
        if k in self.backwarded:
            raise CellError(f"{self.where} goes backward through micro-batch {k} for the second time")
        if k not in self.forwarded:
            raise OrderError(f"{self.where} stands before the forward of micro-batch {k}")
        if self.wiring.joined and self.is_last and not self.joined:
            raise JoinError(f"{self.where} stands before join, which computes where the backward starts from")
        self.check_received(k, True)
        self.backwarded.add(k)

    def backward_weight(self, k: int) -> None:
        if not self.has_weights:
            raise CellError(f"{self.where}: stage {self.program.stage} has no trainable parameters")
        if k in self.weighted:
            raise CellError(f"{self.where} adds up the gradients of micro-batch {k} for the second time")
        if k not in self.backwarded:
            raise OrderError(f"{self.where} stands before the backward_input of micro-batch {k}")
        self.weighted.add(k)

    def check_received(self, k: int, gradient: bool) -> None:
        missing = self.missing.get((k, gradient))
        if missing:
            first = min(print_instruction(receive) for receive in missing)
            raise OrderError(f"{self.where} stands before a receive that it needs ({first})")

    def all_reduce(self, bucket: AllReduce) -> None:
        for name in bucket.parameters:
            group = self.reductions.get(name)
            if group is None:
                raise ReduceError(f"{self.where} reduces {name!r}, whose gradient this rank must not reduce; drop it")
            if name in self.reduced:
                raise ReduceError(f"{self.where} reduces {name!r} for the second time; it must be reduced once")
            if bucket.ranks != group:
                raise ReduceError(
                    f"{self.where} reduces {name!r} over ranks {list(bucket.ranks)}, expected {list(group)}"
                )
            self.reduced.add(name)
        left = sorted(set(self.cells) - self.weighted) if self.has_backward else []
        if left and self.has_weights:
            raise ReduceError(f"{self.where} stands before the backward of micro-batch {left[0]}, which adds to it")

    def join(self, join: Join) -> None:
        last = self.wiring.stages - 1
        ranks = tuple(sorted(self.expected.devices[last]))
        if not self.wiring.joined:
            raise JoinError(f"{self.where}: the loss of this wiring needs no join; drop it")
        if not self.is_last or join.stage != last or join.ranks != ranks:
            raise JoinError(
                f"{self.where} joins stage {join.stage} over ranks {list(join.ranks)}, "
                f"expected stage {last} over its ranks {list(ranks)}"
            )
        if self.joined:
            raise JoinError(f"{self.where} joins the loss for the second time")
        left = sorted(set(self.cells) - self.forwarded)
        if left:
            raise JoinError(f"{self.where} stands before the forward of micro-batch {left[0]}")
        self.joined = True

    def reduce_loss(self, reduction: ReduceLoss) -> None:
        if not self.wiring.loss:
            raise LossReductionError(f"{self.where}: no loss was asked for; drop it")
        if self.loss_reduced:
            raise LossReductionError(f"{self.where} reduces the loss for the second time")
        if reduction.ranks != self.expected.ranks:
            raise LossReductionError(
                f"{self.where} reduces over ranks {list(reduction.ranks)}, expected all: {list(self.expected.ranks)}"
            )
        left = sorted(set(self.cells) - self.forwarded)
        if left:
            raise LossReductionError(f"{self.where} stands before the forward of micro-batch {left[0]}")
        if self.is_last and self.wiring.joined and not self.joined:
            raise LossReductionError(f"{self.where} stands before join, which computes the loss")
        self.loss_reduced = True

    def end(self) -> None:
        rank, stage = self.program.rank, self.program.stage
        for k in sorted(set(self.cells) - self.loaded):
            cell = self.cells[k]
            raise LoadError(f"rank {rank} never loads rows [{cell.start}:{cell.stop}] of micro-batch {k}")
        for k in sorted(set(self.cells) - self.forwarded):
            raise CellError(f"rank {rank} lacks forward s{stage} m{k}")
        if self.has_backward:
            for k in sorted(set(self.cells) - self.backwarded):
                raise CellError(f"rank {rank} lacks backward s{stage} m{k}")
        if self.has_weights:
            for k in sorted(set(self.cells) - self.weighted):
                raise CellError(f"rank {rank} lacks backward_weight s{stage} m{k}")
        if self.wiring.joined and self.is_last and not self.joined:
            raise JoinError(f"rank {rank} lacks join s{stage}")
        for name in sorted(set(self.reductions) - self.reduced):
            raise ReduceError(f"rank {rank} never reduces {name!r} over ranks {list(self.reductions[name])}")
        if self.wiring.loss and not self.loss_reduced:
            raise LossReductionError(f"rank {rank} lacks reduce_loss {list(self.expected.ranks)}")
        if not self.updated:
            raise UpdateError(f"rank {rank} lacks update at its end")
