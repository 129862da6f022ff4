"""`efftra plan WORKLOAD --cluster FILE` prints the plan as a table or as JSON, and errors as one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from efftra_fx.cli_plan import plan_command, shortened

CLUSTER = Path(__file__).parent.parent / "examples" / "clusters" / "2x8_nvl_10g.toml"


@pytest.fixture
def workload(tmp_path: Path) -> str:
    """Eight layers, the last ones heavy."""
    nodes = [
        {
            "id": 10 * index,
            "name": f"layer{index}",
            "forward_ms": 4.0,
            "backward_ms": 8.0,
            "activation_bytes": 800_000,
            "parameter_bytes": 1_000_000 * (1 + 60 * (index > 6)),
        }
        for index in range(8)
    ]
    edges = [[10 * index, 10 * index + 10] for index in range(7)]
    path = tmp_path / "small.json"
    data = {"schema": "workload/1", "name": "small", "profile_batch": 8, "nodes": nodes, "edges": edges}
    path.write_text(json.dumps(data))
    return str(path)


def test_json_holds_the_whole_plan(workload: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan_command([workload, "--cluster", str(CLUSTER), "--micro-batches", "16", "--no-overlap", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [node for stage in data["stages"] for node in stage["nodes"]] == [0, 10, 20, 30, 40, 50, 60, 70]
    devices = [device for stage in data["stages"] for device in stage["devices"]]
    assert sorted(devices) == sorted(set(devices)) and data["devices_used"] == len(devices)
    for stage in data["stages"]:
        assert stage["replicas"] * stage["tensor"] == len(stage["devices"])
        assert 0 < stage["memory_bytes"] <= 16e9
    assert data["lower_bound_s"] <= data["step_s"] and data["planning_s"] > 0
    assert data["schedule"] in ("1f1b", "gpipe") and data["placement"] in ("contiguous", "spread", "repeated")
    assert data["batch"] == 128 and data["micro_batches"] in (1, 16)
    labels = [other["label"] for other in data["alternatives"]]
    assert "data parallelism alone" in labels and "one device" in labels
    assert all(other["slower"] >= -1e-9 for other in data["alternatives"] if other["fits"])


def test_the_table_says_the_same(workload: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan_command([workload, "--cluster", str(CLUSTER), "--explain"]) == 0
    text = capsys.readouterr().out
    for words in (
        "predicted step",
        "no plan can be below",
        "layer0",
        "alternatives (predicted)",
        "planned again with:",
    ):
        assert words in text


def test_parts_can_be_fixed(workload: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [workload, "--cluster", str(CLUSTER), "--replicas", "7,1", "--schedule", "gpipe", "--json"]
    assert plan_command([*words, "--micro-batches", "8", "--batch", "64"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [stage["replicas"] for stage in data["stages"]] == [7, 1]
    assert (data["schedule"], data["micro_batches"], data["batch"]) == ("gpipe", 8, 64)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--replicas", "7;1"], "--replicas must be numbers"),
        (["--replicas", "17,1"], "need 18 devices"),
        (["--stages", "9"], "has 8 blocks"),
        (["--tensor", "2"], "costs for tensor width 1 only"),
        (["--micro-batches", "0"], "micro_batches=0"),
        (["--batch", "0"], "rows must be 1 or more, got 0"),
        (["--stages", "0"], "stages must be 1 or more, got 0"),
        (["--limit-s", "nan"], "--limit-s must be 0 or more"),
    ],
)
def test_what_cannot_be_had_is_one_line(
    workload: str, more: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan_command([workload, "--cluster", str(CLUSTER), *more]) == 1
    error = capsys.readouterr().err
    assert words in error and error.startswith("efftra: ") and error.count("\n") == 1


def test_missing_files_are_one_line(workload: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan_command([str(tmp_path / "none.json"), "--cluster", str(CLUSTER)]) == 1
    assert plan_command([workload, "--cluster", str(tmp_path / "none.toml")]) == 1
    assert capsys.readouterr().err.count("\n") == 2


def test_runs_of_numbers_are_shortened() -> None:
    assert shortened([0, 1, 2, 3, 8]) == "0-3, 8"


def test_a_model_that_takes_no_time_is_planned_and_explained(workload: str, capsys: pytest.CaptureFixture[str]) -> None:
    data = json.loads(Path(workload).read_text())
    for node in data["nodes"]:
        node.update(forward_ms=0, backward_ms=0, activation_bytes=0, parameter_bytes=0)
    Path(workload).write_text(json.dumps(data))
    assert plan_command([workload, "--cluster", str(CLUSTER), "--explain"]) == 0
    assert "predicted step 0.00 ms" in capsys.readouterr().out
