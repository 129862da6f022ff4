"""A plan prints, is edited by hand, and is read back strictly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies_plans import plans

from efftra_fx.errors import PlanError
from efftra_fx.plan import Plan, Stage

TWO = Plan(
    (Stage(0, 3, (0, 1, 2), names=("a", "b", "c")), Stage(3, 5, (4,))), 4, "1f1b", 2, "contiguous", 0.5, 0.4, (9, 8)
)


@given(st.data(), st.integers(1, 7), st.integers(1, 6), st.integers(1, 9))
def test_any_plan_reads_back_from_its_text(data: st.DataObject, blocks: int, devices: int, rows: int) -> None:
    plan = data.draw(plans(blocks, devices, rows))
    assert Plan.from_json(plan.to_json()) == plan


def test_what_was_predicted_travels_along_and_plays_no_part_in_equality(tmp_path: Path) -> None:
    TWO.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again == TWO
    assert (again.predicted_step_s, again.memory_bytes, again.stages[0].names) == (0.5, (9, 8), ("a", "b", "c"))
    assert Plan(TWO.stages, 4, "1f1b", 2) == TWO


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda d: d.update(micro_batches=0), "micro_batches must be 1 or more"),
        (lambda d: d.update(micro_batches="4"), "micro_batches must be a whole number"),
        (lambda d: d.pop("micro_batches"), "micro_batches must be a whole number, got None"),
        (lambda d: d.update(schedule="2f2b"), "schedule must be one of 1f1b, gpipe"),
        (lambda d: d.update(in_flight=5), "in_flight must be 1 or 2"),
        (lambda d: d.update(stagse=1), "unknown key 'stagse'"),
        (lambda d: d.update(stages=[]), "at least one stage"),
        (lambda d: d.update(schema="plan/2"), "schema must be 'plan/1'"),
        (lambda d: d["stages"][1].update(blocks=[4, 5]), "stage 1 starts at block 4, expected 3"),
        (lambda d: d["stages"][1].update(blocks=[3, 3]), r"stages\[1\]: a stage needs at least one block"),
        (lambda d: d["stages"][1].update(blocks=[3]), r"stages\[1\].blocks must be \[first, stop\]"),
        (lambda d: d["stages"][1].update(devices=[1]), "device 1 is used by stage 0 and by stage 1"),
        (lambda d: d["stages"][1].update(devices=[4, 4]), "lists a device twice"),
        (lambda d: d["stages"][1].update(devices=[-1]), "devices are counted from 0"),
        (lambda d: d["stages"][1].update(devices=[]), "0 devices do not make whole replicas"),
        (lambda d: d["stages"][0].update(tensor=2), "3 devices do not make whole replicas of width 2"),
        (lambda d: d["stages"][0].update(recompute=1), r"stages\[0\].recompute must be true or false"),
        (lambda d: d["stages"][0].update(names="abc"), r"stages\[0\].names must be a list"),
        (lambda d: d.update(predicted_step_s="soon"), "predicted_step_s must be a number of seconds"),
    ],
)
def test_a_wrong_edit_is_an_error_that_names_the_place(edit: object, words: str) -> None:
    data = json.loads(TWO.to_json())
    assert callable(edit)
    edit(data)
    with pytest.raises(PlanError, match=words) as caught:
        Plan.from_json(json.dumps(data), "mine.json")
    assert str(caught.value).startswith("mine.json: ")


def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot read the plan"):
        Plan.load(tmp_path / "none.json")
    with pytest.raises(PlanError, match="not JSON"):
        Plan.from_json("stage 1")
    with pytest.raises(PlanError, match="the file must be an object"):
        Plan.from_json("[]")


def test_late_stages_hold_fewer_micro_batches() -> None:
    stages = tuple(Stage(index, index + 1, (index,)) for index in range(4))
    assert [Plan(stages, 8).warm_up(stage) for stage in range(4)] == [4, 3, 2, 1]
    assert [Plan(stages, 8, in_flight=2).warm_up(stage) for stage in range(4)] == [7, 5, 3, 1]
    assert [Plan(stages, 3, in_flight=2).warm_up(stage) for stage in range(4)] == [3, 3, 3, 1]
    assert [Plan(stages, 8, "gpipe").warm_up(stage) for stage in range(4)] == [8, 8, 8, 8]
