"""What others make of one training step: eager PyTorch, DDP, torch.distributed.pipelining; and what this runtime does.

Each function returns a `Step`: a call that clears the gradients, runs forward and backward
on the whole batch, and returns the loss where this rank knows it. No optimizer is in it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from step_models import Case
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

from efftra_fx import Cluster, compile

Step = Callable[[], float | None]


def model_of(case: Case) -> nn.Module:
    """Return the case's model, with the same weights at every call on every rank."""
    torch.manual_seed(0)
    return case.make()


def eager(case: Case, micro_batches: int = 1) -> Step:
    """One process runs the whole batch, in equal micro-batches whose gradients add up."""
    model, (x, y) = model_of(case), case.batch()
    parts = list(zip(x.chunk(micro_batches), y.chunk(micro_batches), strict=True))

    def step() -> float:
        model.zero_grad()
        total = 0.0
        for part, target in parts:
            loss = case.loss(model(part), target) / micro_batches
            loss.backward()
            total += loss.item()
        return total

    return step


def ddp(case: Case) -> Step:
    """Each rank runs an equal part of the batch; gradients are averaged in buckets during the backward."""
    model, (x, y) = DistributedDataParallel(model_of(case)), case.batch()
    part, target = x.chunk(dist.get_world_size())[dist.get_rank()], y.chunk(dist.get_world_size())[dist.get_rank()]

    def step() -> float:
        model.zero_grad()
        loss = case.loss(model(part), target)
        loss.backward()
        total = loss.detach()
        dist.all_reduce(total)
        return total.item() / dist.get_world_size()

    return step


def pipelining(case: Case, schedule: str) -> Step:
    """`torch.distributed.pipelining`, one stage a rank, cut by hand where this runtime cuts."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model, (x, y) = model_of(case), case.batch()
    bounds = [0, *(case.pieces.index(cut) for cut in case.cuts[ranks]), len(case.pieces)]
    own = nn.Sequential(*(model.get_submodule(path) for path in case.pieces[bounds[rank] : bounds[rank + 1]]))
    del model
    kinds = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
    stage = PipelineStage(own, rank, ranks, torch.device("cpu"))
    run = kinds[schedule](stage, case.micro_batches, loss_fn=case.loss)

    def step() -> float | None:
        own.zero_grad()
        if rank == 0:
            run.step(x)
        elif rank < ranks - 1:
            run.step()
        else:
            losses: list[Tensor] = []
            run.step(target=y, losses=losses)
            return torch.stack(losses).mean().item()
        return None

    return step


def compiled(case: Case, stages: int, replicas: int, micro_batches: int, schedule: str = "1f1b") -> Step:
    """This runtime, with every part of the plan fixed to what it is compared with."""
    model, (x, y) = model_of(case), case.batch()
    program = compile(
        model,
        Cluster.from_env(),
        example_inputs=(x,),
        example_target=y,
        loss_fn=case.loss,
        stages=stages,
        replicas=(replicas,) * stages,
        micro_batches=micro_batches,
        schedule=schedule,
        cuts=case.cuts.get(stages, ()),
    )
    parameters = list(program.parameters())

    def step() -> float:
        for parameter in parameters:
            parameter.grad = None
        return float(program.step(x, target=y))

    return step


def contenders(case: Case, ranks: int) -> dict[str, Callable[[], Step]]:
    """Return what runs side by side on so many ranks, under names `ours …` and its rival's."""
    m = case.micro_batches
    if ranks == 1:
        return {
            "eager": lambda: eager(case),
            "ours": lambda: compiled(case, 1, 1, 1),
            f"eager, {m} micro-batches": lambda: eager(case, m),
            f"ours, {m} micro-batches": lambda: compiled(case, 1, 1, m),
        }
    pipelines: dict[str, Callable[[], Step]] = {}
    for schedule in ("gpipe", "1f1b"):
        pipelines[f"pipelining {schedule}"] = lambda schedule=schedule: pipelining(case, schedule)  # type: ignore[misc]
        pipelines[f"ours {schedule}"] = lambda schedule=schedule: compiled(case, ranks, 1, m, schedule)  # type: ignore[misc]
    return {"ddp": lambda: ddp(case), "ours data-parallel": lambda: compiled(case, 1, ranks, 1), **pipelines}


PAIRS = (
    ("ours", "eager"),
    ("ours data-parallel", "ddp"),
    ("ours gpipe", "pipelining gpipe"),
    ("ours 1f1b", "pipelining 1f1b"),
)
