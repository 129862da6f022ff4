"""Costs are data: they print, read back the same, and refuse what cannot be a cost."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies_plans import chains

from efftra_fx.cost import Chain, CostTable, Crossing, NodeCost, Option, Shared, Timing
from efftra_fx.errors import CostError

PLAIN = NodeCost("a", Timing(0.1, 0.01), Timing(0.2, 0.02), 100, 80, 4, 6)


@given(chains(recompute=True), st.text(max_size=8))
def test_a_table_reads_back_what_it_printed(chain: Chain, key: str) -> None:
    table = CostTable(key, chain.blocks)
    assert CostTable.from_json(table.to_json()) == table


def test_no_rows_take_no_time() -> None:
    assert Timing(1.0, 2.0).at(0) == 0.0
    assert Timing(1.0, 2.0).at(3) == 7.0


def test_a_table_finds_by_name() -> None:
    table = CostTable("k", (PLAIN,))
    assert table.find("a") is PLAIN and table.find("b") is None


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda data: data["costs"][0].pop("name"), r"costs\[0\].name is missing"),
        (lambda data: data["costs"][0].update(colour=1), r"costs\[0\]: unknown key 'colour'"),
        (lambda data: data["costs"][0]["forward"].update(fixed_s=-1), "fixed_s must be finite and not negative"),
        (lambda data: data["costs"][0]["forward"].update(per_row_s="1"), "per_row_s must be a number"),
        (lambda data: data["costs"][0].update(saved_bytes=-4), "saved_bytes must be finite and not negative"),
        (lambda data: data["costs"][0].update(options={"a": 1}), r"costs\[0\].options must be a list"),
        (lambda data: data.update(schema="costs/9"), "schema 'costs/1'"),
        (lambda data: data.update(extra=1), "unknown key 'extra'"),
    ],
)
def test_a_wrong_table_is_an_error_that_names_the_field(edit: object, words: str) -> None:
    data = json.loads(CostTable("k", (PLAIN,)).to_json())
    assert callable(edit)
    edit(data)
    with pytest.raises(CostError, match=words):
        CostTable.from_json(json.dumps(data))


def test_text_that_is_no_json_is_an_error() -> None:
    with pytest.raises(CostError, match="not JSON"):
        CostTable.from_json("{")


def test_an_option_for_a_kind_goes_before_all_others_and_hides_them() -> None:
    half = Option(Timing(), Timing(0, 1), tensor=2)
    own = Option(Timing(0, 3), Timing(0, 4), kind="fast")
    block = NodeCost("a", Timing(0, 1), Timing(0, 2), options=(half, own))
    assert block.option(kind="fast") is own
    assert block.option(tensor=2, kind="fast") is None
    assert block.option(tensor=2, kind="slow") is half
    assert block.option(kind="slow") == block.base
    assert block.option(recompute=True) is None


def test_recompute_keeps_nothing_and_runs_the_forward_again() -> None:
    option = PLAIN.with_recompute().option(recompute=True)
    assert option is not None
    assert (option.saved_bytes, option.working_bytes) == (0, 6)
    assert option.backward == PLAIN.forward + PLAIN.backward
    assert PLAIN.with_recompute().with_recompute() == PLAIN.with_recompute()


def test_a_chain_that_cannot_be_is_an_error() -> None:
    with pytest.raises(CostError, match="at least one block"):
        Chain(())
    with pytest.raises(CostError, match="consumers must come later"):
        Crossing(1, (1,), 4)
    with pytest.raises(CostError, match="leaves the 1 blocks"):
        Chain((PLAIN,), (Crossing(0, (1,), 4),))
    with pytest.raises(CostError, match="shared parameter names blocks"):
        Chain((PLAIN,), (), (Shared(4, (0, 3)),))
    with pytest.raises(CostError, match="tensor must be 1 or more"):
        Option(Timing(), Timing(), tensor=0)
