"""Each cell gets exactly the rows that it needs, from whoever computed them."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from strategies_programs import Case, cases

from efftra_fx.passes.routes import Route, find_routes, lay_out_cells
from efftra_fx.program import Value, Wiring


def routes_of(kind: str, producers: int, consumers: int, rows: int, micro_batches: int = 1) -> list[Route]:
    value = Value("x", "float32", (1,), kind, 0, 0, (1,), (True,))
    wiring = Wiring(2, (value,), (), (True, True), False)
    devices = tuple(range(producers)), tuple(range(producers, producers + consumers))
    return find_routes(wiring, lay_out_cells(devices, rows, micro_batches))


def drawn(routes: list[Route]) -> list[str]:
    return [f"{r.source.rank}>{r.target.rank} {r.start}:{r.stop}" for r in routes]


def test_three_replicas_and_two_exchange_just_what_both_touch() -> None:
    assert drawn(routes_of("rows", 3, 2, 6)) == ["0>3 0:2", "1>3 2:3", "1>4 3:4", "2>4 4:6"]


def test_a_whole_value_comes_from_one_producer_for_each_consumer() -> None:
    assert drawn(routes_of("whole", 2, 3, 6)) == ["0>2 0:3", "0>3 0:3", "1>4 3:6"]
    assert drawn(routes_of("whole", 3, 1, 6)) == ["0>3 0:2"]


def test_a_partial_sum_goes_to_one_consumer() -> None:
    assert drawn(routes_of("sum", 3, 2, 6)) == ["0>3 0:2", "1>3 2:4", "2>4 4:6"]


def test_a_replica_without_rows_gives_and_gets_nothing() -> None:
    assert drawn(routes_of("rows", 3, 2, 1)) == ["2>4 0:1"]
    assert drawn(routes_of("whole", 3, 2, 1)) == ["2>4 0:1"]
    assert drawn(routes_of("sum", 3, 2, 1)) == ["2>4 0:1"]


@given(cases())
def test_every_consuming_cell_gets_all_its_rows_once(case: Case) -> None:
    devices = tuple(stage.devices for stage in case.plan.stages)
    cells = lay_out_cells(devices, case.rows, case.plan.micro_batches)
    got: Counter[tuple[str, int, int, int]] = Counter()
    whole: Counter[tuple[str, int, int]] = Counter()
    given_away: Counter[tuple[str, int, int, int]] = Counter()
    for route in find_routes(case.wiring, cells):
        name, k, rank = route.value.name, route.source.micro_batch, route.target.rank
        assert route.target.micro_batch == k
        got.update((name, k, rank, row) for row in range(route.start, route.stop))
        whole[name, k, rank] += 1
        given_away[name, k, route.source.rank, route.target.stage] += 1
    for value in case.wiring.values:
        for consumer in value.consumers:
            for cell in (cell for part in cells[consumer] for cell in part):
                if value.kind == "rows":
                    assert all(
                        got[value.name, cell.micro_batch, cell.rank, r] == 1 for r in range(cell.start, cell.stop)
                    )
                elif value.kind == "whole":
                    assert whole[value.name, cell.micro_batch, cell.rank] == 1
            if value.kind == "sum":
                for cell in (cell for part in cells[value.producer] for cell in part):
                    assert given_away[value.name, cell.micro_batch, cell.rank, consumer] == 1
