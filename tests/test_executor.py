"""An executor does what its program says: parts are put together, seeds differ, ranks take turns, times are taken."""

from __future__ import annotations

import itertools
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import NORMED, ZOO
from rig import lay_out, rig_of
from torch import Tensor

from efftra_fx.program import Value, micro_batch_rows
from efftra_fx.runtime.executor import _mix, drive
from efftra_fx.runtime.local_transport import local_transports, run_all
from efftra_fx.runtime.parts import assemble, gather_parts, join_parts, rows_of
from efftra_fx.runtime.step import BoundaryPart
from efftra_fx.runtime.transport import Transport

CPU = torch.device("cpu")
MLP = ZOO["mlp"]


def value_of(kind: str, shape: tuple[int, ...], dim: int = 0) -> Value:
    """Return a contract of float64 numbers."""
    return Value("v", "float64", shape, kind, dim, 0, (1,), (True,))


@given(st.integers(1, 9), st.integers(1, 5), st.integers(0, 1), st.integers(1, 3), st.randoms(use_true_random=False))
def test_rows_from_any_ranks_in_any_order_make_the_value(
    rows: int, parts: int, dim: int, width: int, random: Any
) -> None:
    value = value_of("rows", (2, 2)[:dim] + (width,) + (2, 2)[dim + 1 :], dim)
    whole = torch.randn(value.part_shape(rows), dtype=torch.float64)
    pieces = [(a + 4, b + 4, rows_of(whole, dim, 0, rows, a, b)) for a, b in micro_batch_rows(rows, parts)]
    random.shuffle(pieces)
    assert torch.equal(assemble(pieces, value, 4, rows + 4, CPU), whole)


@given(st.integers(1, 6), st.lists(st.integers(1, 4), min_size=2, max_size=3))
def test_gradients_of_several_readers_add_up_row_by_row(rows: int, readers: list[int]) -> None:
    value = value_of("rows", (1, 3))
    gradients = [torch.randn(rows, 3, dtype=torch.float64) for _ in readers]
    pieces = [
        (a, b, g[a:b]) for g, parts in zip(gradients, readers, strict=True) for a, b in micro_batch_rows(rows, parts)
    ]
    expected = sum(gradients[1:], gradients[0])
    torch.testing.assert_close(assemble(pieces, value, 0, rows, CPU), expected, rtol=1e-14, atol=1e-14)


def test_partial_sums_add_up_and_where_none_comes_nothing_counts() -> None:
    value = value_of("sum", (2,))
    pieces = [(0, 2, torch.tensor([1.0, 2.0])), (2, 3, torch.tensor([4.0, 8.0]))]
    assert assemble(pieces, value, 0, 3, CPU).tolist() == [5.0, 10.0]
    nothing = assemble([], value, 0, 3, CPU)
    assert nothing.tolist() == [0.0, 0.0] and nothing.dtype == torch.float64


@dataclass(frozen=True)
class Case:
    """Parts of values, by rank."""

    ranks: int
    rows: int
    micro_batches: int


@given(st.builds(Case, st.integers(1, 4), st.integers(1, 7), st.integers(1, 3)))
def test_every_rank_of_a_join_gets_the_whole_batchs_values(case: Case) -> None:
    bounds = (BoundaryPart("rows", "rows", 1), BoundaryPart("total", "sum", 0), BoundaryPart("same", "whole", 0))
    rows = torch.randn(2, 3 * case.rows, dtype=torch.float64)
    total = torch.randint(0, 9, (case.rows,))
    same = torch.tensor([True, False])
    parts: list[dict[str, list[tuple[int, int, Tensor]]]] = [{} for _ in range(case.ranks)]
    turn = itertools.cycle(range(case.ranks))
    for a, b in micro_batch_rows(case.rows, case.micro_batches):
        mine = parts[next(turn)]
        mine.setdefault("rows", []).append((a, b, rows[:, 3 * a : 3 * b]))
        mine.setdefault("total", []).append((a, b, total[a:b].sum()))
        mine.setdefault("same", []).append((a, b, same))

    def work(transport: Transport) -> Generator[Any, Any, dict[str, Tensor]]:
        return gather_parts(transport, tuple(range(case.ranks)), bounds, parts[transport.rank], "join")

    for found in run_all([work(transport) for transport in local_transports(case.ranks)]):
        assert torch.equal(found["rows"], rows)
        assert found["total"].item() == total.sum().item() and found["total"].dtype == torch.int64
        assert torch.equal(found["same"], same)


def test_parts_join_in_the_order_of_rows() -> None:
    pieces = [(2, 3, torch.tensor([30])), (0, 2, torch.tensor([10, 20]))]
    assert join_parts(pieces, "rows", 0, 3).tolist() == [10, 20, 30]
    assert join_parts([(1, 2, torch.tensor(2)), (0, 1, torch.tensor(5))], "sum", 0, 2).item() == 7
    assert join_parts([(0, 1, torch.tensor(5)), (1, 2, torch.tensor(5))], "whole", 0, 2).item() == 5


def test_cells_draw_from_seeds_of_their_own() -> None:
    seeds = [_mix(seed, *cell) for seed in range(5) for cell in itertools.product(range(5), repeat=3)]
    assert len(set(seeds)) == len(seeds) and all(0 <= seed < 2**63 for seed in seeds)
    assert _mix(1, 2, 3) != _mix(1, 3, 2)
    bits = sum(f"{seed:063b}".count("1") for seed in seeds) / (63 * len(seeds))
    assert abs(bits - 0.5) < 0.02


def test_a_recorded_step_has_a_span_for_each_instruction_but_those_of_one_group_share_one() -> None:
    rig = rig_of(MLP)
    program = rig.program(lay_out(4, (1, 2), 3))
    batch = MLP.data(12)
    program.step(*batch.args, target=batch.target)
    ticks = itertools.count()
    executors = list(program._compiled.executors_of(12, 0, program.world).values())
    for executor in executors:
        executor.clock = lambda: float(next(ticks))
    _, given = program._batch(batch.args, {}, batch.target)
    with torch.no_grad():  # ranks that take turns leave one another's modes behind
        results = run_all([executor.run(given) for executor in executors])
    for executor, result in zip(executors, results, strict=True):
        instructions = executor.program.instructions
        indices = [index for index, _, _ in result.timeline]
        assert indices == sorted(set(indices)) and indices[-1] == len(instructions) - 1
        assert all(begin < end for _, begin, end in result.timeline)
        skipped = set(range(len(instructions))) - set(indices)
        assert all(type(instructions[i]).__name__ in ("Send", "Recv") for i in skipped)


def test_a_rank_alone_waits_in_its_own_process() -> None:
    class Ready:
        def __init__(self) -> None:
            self.waited = ""

        def ready(self) -> bool:
            return bool(self.waited)

        def wait(self, what: str = "") -> int:
            self.waited = what
            return 7

    handle = Ready()

    def work() -> Generator[Any, Any, int]:
        while not handle.ready():
            yield handle, "forward s1 m0"
        return handle.wait("again") + 1

    assert drive(work()) == 8 and handle.waited == "again"


def test_an_error_on_one_rank_is_raised_and_the_program_can_go_on() -> None:
    rig = rig_of(MLP)
    program, batch = rig.program(lay_out(4, (1, 1), 2)), MLP.data(12)
    expected = float(program.step(*batch.args, target=batch.target))
    bad = batch.target.clone()
    bad[-1] = 99
    with pytest.raises(IndexError, match="out of bounds"):
        program.step(*batch.args, target=bad)
    assert torch.is_grad_enabled()
    rig.model.zero_grad()
    again = rig.program(lay_out(4, (1, 1), 2))
    assert float(again.step(*batch.args, target=batch.target)) == expected
    rig.model.zero_grad()


def test_statistics_of_a_step_are_those_of_its_parts_in_order() -> None:
    rig = rig_of(NORMED)
    batch = NORMED.data(12)
    program = rig.program(lay_out(rig.blocks, (1, 1), 3))
    program.step(*batch.args, target=batch.target)
    found = {name: buffer.clone() for name, buffer in rig.model.named_buffers()}
    rig.model.load_state_dict(rig.start)
    with torch.no_grad():
        for start, stop in micro_batch_rows(12, 3):
            rig.model(batch.args[0][start:stop])
    for name, buffer in rig.model.named_buffers():
        torch.testing.assert_close(found[name], buffer, rtol=1e-12, atol=1e-12)
    rig.model.load_state_dict(rig.start)
    rig.model.zero_grad()
