"""Hold every architecture against one device, by several plans, and write the table to docs/coverage.md.

    python benchmarks/coverage.py                         all of them
    python benchmarks/coverage.py gpt2 t5                 some, printed alone
    python benchmarks/coverage.py --keep ROWS --shard 0/2 every second one, its rows kept in a file
    python benchmarks/coverage.py --keep ROWS             those that have no row yet, and then the document
    python benchmarks/coverage.py --keep ROWS --shard 0/0 the document alone, with what has no row named there

For each architecture the loss and every gradient of one step are compared with the same model
on one device, in float64, and the output in eval mode with the model's own.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import architectures
import architectures_more
import torch
import transformers
from torch import Tensor, nn

from efftra_fx import Cluster, CompiledModel, compile
from efftra_fx.check import compare_gradients
from efftra_fx.containers import take_apart
from efftra_fx.errors import EfftraError
from efftra_fx.plan import Plan, Stage

PLANS: tuple[tuple[str, tuple[int, ...], int], ...] = (
    ("2 stages", (1, 1), 2),
    ("3 stages", (1, 1, 1), 4),
    ("2+1 replicas", (2, 1), 3),
)
ARCHITECTURES = {**architectures.ARCHITECTURES, **architectures_more.ARCHITECTURES}
NARROW = 2e-6  # where a model computes in float32 whatever its own dtype
EXACT = 1e-9


@dataclass(frozen=True)
class Row:
    """What came out for one architecture; `worst` is the largest relative difference of loss and gradients."""

    name: str
    verdict: str
    worst: float
    blocks: int
    remarks: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The row of the table."""
        shown = f"{self.worst:.1e}" if self.worst == self.worst else ""
        verdict = re.sub(r"[^\s\"']*/site-packages/", "", self.verdict)  # where packages lie is nobody's concern
        return f"| {self.name} | {verdict} | {shown} | {self.blocks or ''} | {'; '.join(self.remarks)} |"


def one_device(model: nn.Module, inputs: dict[str, Any]) -> tuple[float, dict[str, Tensor]]:
    """Return loss and gradients of the whole batch on one device."""
    loss = model(**inputs)["loss"]
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return float(loss), {n: g for n, g in zip(named, found, strict=True) if g is not None}


def difference(program: CompiledModel, inputs: dict[str, Any], loss: float, gradients: dict[str, Tensor]) -> float:
    """Return the largest relative difference of a step's loss and gradients from these."""
    found = float(program.step(**inputs))
    mine = {name: p.grad for name, p in program.named_parameters() if p.grad is not None}
    for parameter in program.parameters():
        parameter.grad = None
    return max(abs(found - loss) / abs(loss), compare_gradients(gradients, mine)[0])


def lay_out(blocks: int, replicas: Sequence[int], micro_batches: int, schedule: str) -> Plan:
    """Return a plan with so many replicas a stage and the blocks shared out evenly."""
    stages, device, count = [], 0, len(replicas)
    for index, number in enumerate(replicas):
        devices = tuple(range(device, device + number))
        stages.append(Stage(blocks * index // count, blocks * (index + 1) // count, devices))
        device += number
    return Plan(tuple(stages), micro_batches, schedule)


def hold(name: str) -> Row:
    """Compile one architecture and hold it against one device."""
    model, inputs = architectures.made(ARCHITECTURES[name])
    loss, gradients = one_device(model, inputs)
    try:
        program = compile(model, Cluster.local(3), example_inputs=(), example_kwargs=inputs, costs="estimated")
    except EfftraError as error:
        return Row(name, f"refused: {error}", float("nan"), 0)
    front, blocks = program.built.front, program.plan.blocks
    remarks = [f"`{path}` in one piece" for path, _ in front.captured.opaque]
    if front.captured.guards is not None and front.captured.guards.lines:
        remarks.append(f"{len(front.captured.guards.lines)} branches on inputs, checked at each step")
    if not front.tail.linear:
        remarks.append("the loss compares rows: joined before all backwards")
    worst = 0.0
    for _, every, micro_batches in PLANS:
        replicas = every[:blocks]  # what is computed on the whole batch leaves few blocks
        plan = lay_out(blocks, replicas, micro_batches, "1f1b" if front.tail.linear else "gpipe")
        worst = max(worst, difference(program.with_plan(plan), inputs, loss, gradients))
    verdict = "match" if worst <= EXACT else "match to float32" if worst <= NARROW else "DIFFERS"
    if worst > EXACT and verdict != "DIFFERS":
        remarks.append("computes its loss or a part of it in float32")
    return Row(
        name,
        f"{verdict}, {'same' if evaluates_alike(program, inputs) else 'other'} output",
        worst,
        blocks,
        tuple(remarks),
    )


def evaluates_alike(program: CompiledModel, inputs: dict[str, Any]) -> bool:
    """Say whether the output in eval mode is the model's own."""
    model = program.model
    modes = {name: module.training for name, module in model.named_modules()}
    model.eval()
    with torch.no_grad():
        expected = [leaf for _, leaf in take_apart(model(**inputs))[0] if isinstance(leaf, Tensor)]
    for name, module in model.named_modules():
        module.training = modes[name]
    found = [leaf for _, leaf in take_apart(program.evaluate(**inputs))[0] if isinstance(leaf, Tensor)]
    return len(found) == len(expected) and all(
        torch.allclose(a.double(), b.double(), rtol=1e-6, atol=1e-9, equal_nan=True)
        for a, b in zip(found, expected, strict=True)
    )


def document(rows: Sequence[Row], left: Sequence[str] = ()) -> str:
    """Return the text of docs/coverage.md; `left` are architectures that were not run."""
    good = sum(row.verdict.startswith("match") for row in rows)
    plans = ", ".join(f"{name} ({micro_batches} micro-batches)" for name, _, micro_batches in PLANS)
    head = [
        "# Coverage",
        "",
        "Generated by `python benchmarks/coverage.py`; do not edit.",
        "",
        f"Architectures of transformers {transformers.__version__} under torch {torch.__version__}, Python "
        f"{platform.python_version()}: tiny models from their configurations, dropout 0, in float64, batch norms with "
        f"fixed statistics, {architectures.ROWS} rows a batch, by these plans: {plans}. Loss and every gradient are "
        "compared with one device on the whole batch; the last column but two is the largest relative difference.",
        "",
        f"{good} of {len(rows)} match." + (f" Not run for this table: {', '.join(left)}." if left else ""),
        "",
        "| architecture | one step, and the output in eval mode | worst | blocks | remarks |",
        "|---|---|---|---|---|",
    ]
    return "\n".join([*head, *(row.text for row in rows)]) + "\n"


def kept(path: Path | None) -> dict[str, Row]:
    """Return the rows that runs before have kept in a file, one a line."""
    if path is None or not path.exists():
        return {}
    read = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {one["name"]: Row(**{**one, "remarks": tuple(one["remarks"])}) for one in read}


def main() -> None:
    """Run what is asked for; write the document where that is everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="architectures; all of them without")
    parser.add_argument("--write", type=Path, default=Path(__file__).parents[1] / "docs" / "coverage.md")
    parser.add_argument("--keep", type=Path, help="a file for rows; what has one there is not run again")
    parser.add_argument("--shard", default="0/1", help="which part of how many, as in 0/2")
    chosen = parser.parse_args()
    part, parts = (int(number) for number in chosen.shard.split("/"))
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows = kept(chosen.keep)
    for name in (chosen.names or list(ARCHITECTURES))[part::parts] if parts else ():
        if name in rows:
            continue
        begin = time.perf_counter()
        rows[name] = hold(name)
        print(f"{rows[name].text}  {time.perf_counter() - begin:.0f} s", flush=True)
        if chosen.keep is not None:
            with chosen.keep.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(rows[name])) + "\n")
    left = [name for name in ARCHITECTURES if name not in rows]
    if not chosen.names and not (parts and left):
        found = [rows[name] for name in ARCHITECTURES if name in rows]
        chosen.write.write_text(document(found, left), encoding="utf-8")


if __name__ == "__main__":
    main()
