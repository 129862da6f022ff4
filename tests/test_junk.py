"""Whatever stands in a file or is given as an argument: it is taken, or one error of the package names it."""

from __future__ import annotations

import gzip
import json
import math
import random
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies_junk import HUGE, arguments, edited
from strategies_programs import cases

from efftra_fx import Cluster, Device, EfftraError, Link, Plan, compile, verify
from efftra_fx.cluster import Links
from efftra_fx.cost import CostTable, NodeCost, Option, Timing
from efftra_fx.errors import ClusterError, CostError, PlanError, ProgramError
from efftra_fx.plan import Stage
from efftra_fx.program_text import parse_programs, print_programs
from efftra_fx.workload import load_workload

PLAN = Plan((Stage(0, 3, (0, 1, 2), names=("a", "b")), Stage(3, 5, (4, 5), 2)), 4, "1f1b", 2, "here", 0.5, 0.4, (9, 8))
TABLE = CostTable("k", (NodeCost("a", Timing(1, 2), Timing(1, 2), 3, options=(Option(Timing(), Timing(), tensor=2),)),))
CLUSTER = {
    "inter": {"bandwidth_gb_per_s": 25, "latency_us": 15},
    "machine": [
        {"count": 2, "devices": 2, "kind": "V", "memory_gb": 16, "speed": 1.0, "link": {"bandwidth_gb_per_s": 1}},
        {"link": {"bandwidth_gb_per_s": 1}, "device": [{"count": 2, "kind": "A", "memory_gb": 4}]},
    ],
}


def keys_of(data: Any) -> list[str]:
    """Return all keys in some data, and one that nobody knows."""
    if isinstance(data, dict):
        return sorted({"other", *data, *(key for value in data.values() for key in keys_of(value))})
    return sorted(
        {"other", *(key for value in data for key in keys_of(value))} if isinstance(data, list) else {"other"}
    )


def toml(value: Any) -> str:
    """Return data as TOML would hold them, without line breaks."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else "nan" if math.isnan(value) else "inf"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)} = {toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return json.dumps(value) if value is not None else '""'


def taken_or_named(read: Callable[[], Any], name: str = "") -> None:
    """Hold that reading gives something that can be shown, or an error of the package that begins with the name."""
    try:
        repr(read())
    except EfftraError as error:
        assert str(error).startswith(name) and len(str(error)) > len(name)


PLAN_DATA, TABLE_DATA = json.loads(PLAN.to_json()), json.loads(TABLE.to_json())


@settings(max_examples=100)
@given(edited(PLAN_DATA, keys_of(PLAN_DATA)))
def test_a_plan_edited_blindly_is_read_or_named(data: Any) -> None:
    taken_or_named(lambda: Plan.from_json(Plan.from_json(json.dumps(data), "mine").to_json()), "mine: ")


@settings(max_examples=80)
@given(edited(TABLE_DATA, keys_of(TABLE_DATA)))
def test_a_cost_table_edited_blindly_is_read_or_named(data: Any) -> None:
    taken_or_named(lambda: CostTable.from_json(json.dumps(data)))


@settings(max_examples=100)
@given(edited(CLUSTER, keys_of(CLUSTER)))
def test_a_cluster_edited_blindly_is_read_or_named(data: Any) -> None:
    text = "\n".join(f"{json.dumps(key)} = {toml(value)}" for key, value in data.items())
    taken_or_named(lambda: Cluster.parse(text, "mine").homogeneous, "mine: ")


WORDS = ("-2", "7", "9" * 30, "9" * 5000, "yes", "float32", "rows", "s7", "m99", "[]", "", "whole", "none", '"\\ud800"')


@settings(max_examples=40)
@given(cases(3, 6), st.integers(0, 10**9))
def test_programs_edited_blindly_are_sound_or_named(case: Any, seed: int) -> None:
    draws = random.Random(seed)
    whole = print_programs(case.lower(), case.wiring).splitlines()
    for _ in range(10):
        lines = list(whole)
        at = draws.randrange(len(lines))
        match draws.randrange(4):
            case 0:
                del lines[at]
            case 1:
                lines.insert(at, draws.choice(lines))
            case _:
                words = re.split(r"(\W)", lines[at])
                words[draws.randrange(len(words))] = draws.choice(WORDS)
                lines[at] = "".join(words)

        def read(text: str = "\n".join(lines)) -> None:
            programs, wiring = parse_programs(text)
            verify(programs, wiring=wiring)

        taken_or_named(read)


MAKERS: dict[str, tuple[Callable[..., Any], Mapping[str, Any]]] = {
    "Stage": (
        Stage,
        {"first_block": 0, "stop_block": 2, "devices": (0, 1), "tensor": 1, "recompute": False, "names": ()},
    ),
    "Plan": (
        Plan,
        {"stages": PLAN.stages, "micro_batches": 2, "schedule": "1f1b", "in_flight": 1, "placement": "x",
         "predicted_step_s": 1.0, "memory_bytes": ()},
    ),
    "Link": (Link, {"bandwidth_bytes_per_s": 1e9, "latency_s": 0.0}),
    "Device": (Device, {"machine": 0, "kind": "cpu", "memory_bytes": None, "speed": 1.0}),
    "Links": (Links, {"intra": (Link(1e9),), "inter": None}),
    "Cluster": (Cluster, {"devices": (Device(0),) * 2, "links": Links((Link(1e9),)), "where": "local"}),
    "uniform": (
        Cluster.uniform,
        {"machines": 1, "devices_per_machine": 2, "memory_gb": 1, "intra": Link(1e9), "inter": None, "kind": "cpu",
         "speed": 1.0},
    ),
    "local": (Cluster.local, {"ranks": 2}),
    "a plan's file": (Plan.load, {"path": "none.json"}),
    "a cluster's file": (Cluster.load, {"path": "none.toml"}),
}  # fmt: skip


@pytest.mark.parametrize("what", MAKERS)
def test_any_argument_is_taken_or_named(what: str) -> None:
    make, right = MAKERS[what]

    @settings(max_examples=40)
    @given(st.sampled_from(sorted(right)), arguments())
    def hold(name: str, value: Any) -> None:
        taken_or_named(lambda: hash(make(**{**right, name: value})))

    hold()


OPTIONS = ("loss_fn", "stages", "replicas", "micro_batches", "schedule", "plan", "cuts", "tensor", "batch_dims",
           "costs", "optimizer_states", "batch_norm", "loss_reduction", "rng", "compile_stages", "timeout")  # fmt: skip


@settings(max_examples=80)
@given(st.dictionaries(st.sampled_from(OPTIONS), arguments(), min_size=1, max_size=2))
def test_any_option_of_a_compilation_is_taken_or_named(options: dict[str, Any]) -> None:
    model, cluster = torch.nn.Linear(2, 2), Cluster.local(2)
    taken_or_named(lambda: compile(model, cluster, optimizer=lambda p: torch.optim.SGD(p, 0.1), **options))


LONG = "9" * 5000  # more digits than Python reads
BEYOND: tuple[tuple[type[EfftraError], str, Callable[[], Any]], ...] = (
    (PlanError, "p: predicted_step_s must be from 0 to", lambda: read_plan({**PLAN_DATA, "predicted_step_s": HUGE})),
    (PlanError, "p: not JSON: Exceeds the limit", lambda: Plan.from_json(f'{{"micro_batches": {LONG}}}', "p")),
    (PlanError, "p: not JSON: lists and objects are nested too deeply", lambda: Plan.from_json("[" * 200_000, "p")),
    (PlanError, "stop_block must be at most 1e.18 in size, got a number of 401", lambda: Stage(0, HUGE, (0,))),
    (ClusterError, "memory_gb must be between .* got a number of 401 digits", lambda: Cluster.uniform(memory_gb=HUGE)),
    (ClusterError, "ranks must be a whole number from 1 to 100000, got a number", lambda: Cluster.local(HUGE)),
    (ClusterError, "a cluster of more than 100000 devices", lambda: Cluster.uniform(1000, 1000, intra=Link(1e9))),
    (ClusterError, "c: not TOML: Exceeds the limit", lambda: Cluster.parse(f"machine = {LONG}", "c")),
    (ClusterError, "c: not TOML: lists and tables are nested too", lambda: Cluster.parse("a = " + "[" * 9999, "c")),
    (CostError, "fixed_s must be finite and not negative, got a number of 401", lambda: Timing(HUGE)),
    (ProgramError, "line 1: a number of 5000 digits", lambda: parse_programs(f"wiring stages={LONG}")),
)


def read_plan(data: Any) -> Plan:
    """Read data as the text of a plan called p."""
    return Plan.from_json(json.dumps(data), "p")


@pytest.mark.parametrize(("kind", "words", "read"), BEYOND, ids=[words for _, words, _ in BEYOND])
def test_a_number_beyond_all_bounds_is_named(kind: type[EfftraError], words: str, read: Callable[[], Any]) -> None:
    with pytest.raises(kind, match=words):
        read()


def test_a_damaged_archive_is_named(tmp_path: Path) -> None:
    broken = bytearray(gzip.compress(b'{"schema": "workload/1"}' * 50))
    broken[20:30] = b"\xff" * 10
    (tmp_path / "broken.json.gz").write_bytes(broken)
    with pytest.raises(CostError, match="broken.json.gz: cannot read the profile"):
        load_workload(tmp_path / "broken.json.gz")
