"""Which stage of the block chain runs on which devices, and in what order.

A plan is data: it prints as JSON, may be edited by hand, and is read back strictly.
What was predicted for it and why it was chosen travels along and plays no part in
whether two plans are equal.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, overload

from efftra_fx.errors import PlanError
from efftra_fx.json_text import read_json
from efftra_fx.units import number_text

SCHEDULES = ("1f1b", "gpipe")
MOST = 10**18  # no whole number of a plan is larger
LONGEST_S = 1e300


@dataclass(frozen=True)
class Stage:
    """A contiguous run of blocks and the devices that compute it.

    `devices` is replica-major: replica q of width `tensor` has
    `devices[q * tensor : (q + 1) * tensor]`. `names` are the blocks' names, if known.
    """

    first_block: int
    stop_block: int
    devices: tuple[int, ...]
    tensor: int = 1
    recompute: bool = False
    names: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        for name in ("first_block", "stop_block", "tensor"):
            whole(name, getattr(self, name))
        object.__setattr__(self, "devices", wholes("devices", self.devices))
        object.__setattr__(self, "names", texts("names", self.names))
        if not isinstance(self.recompute, bool):
            raise PlanError(f"recompute must be true or false, got {self.recompute!r}")
        if not 0 <= self.first_block < self.stop_block:
            raise PlanError(f"a stage needs at least one block, got blocks {self.first_block} to {self.stop_block}")
        if self.tensor < 1 or not self.devices or len(self.devices) % self.tensor:
            raise PlanError(f"{len(self.devices)} devices do not make whole replicas of width {self.tensor}")
        if len(set(self.devices)) != len(self.devices):
            raise PlanError(f"a stage lists a device twice: {list(self.devices)}")
        if min(self.devices) < 0:
            raise PlanError(f"devices are counted from 0, got {list(self.devices)}")

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
    """A hybrid plan: stages in order, micro-batches and schedule.

    `in_flight` is the multiplicity of 1F1B: stage s of S keeps at most S - s
    micro-batches between forward and backward (1), or 2(S - s) - 1 (2), so that slow
    transfers are hidden. `placement` is a label. `predicted_step_s`,
    `lower_bound_s`, `memory_bytes` (a device of each stage), `explanation` and `facts` are
    what the planner said; they play no part in equality.
    """

    stages: tuple[Stage, ...]
    micro_batches: int
    schedule: str = "1f1b"
    in_flight: int = 1
    placement: str = field(default="given", compare=False)
    predicted_step_s: float | None = field(default=None, compare=False)
    lower_bound_s: float | None = field(default=None, compare=False)
    memory_bytes: tuple[int, ...] = field(default=(), compare=False)
    explanation: str = field(default="", compare=False, repr=False)
    facts: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.stages, list | tuple) or not all(isinstance(one, Stage) for one in self.stages):
            raise PlanError(f"stages must list Stages, got {self.stages!r}")
        object.__setattr__(self, "stages", tuple(self.stages))
        object.__setattr__(self, "memory_bytes", wholes("memory_bytes", self.memory_bytes))
        whole("micro_batches", self.micro_batches)
        whole("in_flight", self.in_flight)
        for name in ("predicted_step_s", "lower_bound_s"):
            seconds(name, getattr(self, name))
        if not isinstance(self.facts, Mapping):
            raise PlanError(f"facts must be a dictionary, got {self.facts!r}")
        for name in ("schedule", "placement", "explanation"):
            if not isinstance(getattr(self, name), str):
                raise PlanError(f"{name} must be a text, got {getattr(self, name)!r}")
        if not self.stages:
            raise PlanError("a plan needs at least one stage, found 0")
        if self.micro_batches < 1:
            raise PlanError(f"micro_batches must be 1 or more, got {self.micro_batches}")
        if self.schedule not in SCHEDULES:
            raise PlanError(f"schedule must be one of {', '.join(SCHEDULES)}, got {self.schedule!r}")
        if self.in_flight not in (1, 2):
            raise PlanError(f"in_flight must be 1 or 2, got {self.in_flight}")
        expected = 0
        for index, stage in enumerate(self.stages):
            if stage.first_block != expected:
                raise PlanError(f"stage {index} starts at block {stage.first_block}, expected {expected}")
            expected = stage.stop_block
        owner: dict[int, int] = {}
        for index, stage in enumerate(self.stages):
            for device in stage.devices:
                if device in owner:
                    raise PlanError(f"device {device} is used by stage {owner[device]} and by stage {index}")
                owner[device] = index

    @property
    def blocks(self) -> int:
        """Number of blocks in the chain."""
        return self.stages[-1].stop_block

    @property
    def devices(self) -> tuple[int, ...]:
        """All devices in use, sorted."""
        return tuple(sorted(device for stage in self.stages for device in stage.devices))

    def warm_up(self, stage: int) -> int:
        """Forwards that the stage may have done before it needs its first backward; never above `micro_batches`."""
        if self.schedule == "gpipe":
            return self.micro_batches
        behind = len(self.stages) - stage
        return min(self.micro_batches, behind if self.in_flight == 1 else 2 * behind - 1)

    @overload
    def explain(self, as_dict: Literal[False] = False) -> str: ...

    @overload
    def explain(self, as_dict: Literal[True]) -> dict[str, Any]: ...

    def explain(self, as_dict: bool = False) -> str | dict[str, Any]:
        """Say what it takes, and why the planner chose it; empty for a plan that `compile` has not seen.

        With `as_dict` as plain data that JSON can hold: the same facts, seconds and bytes as numbers.
        """
        return copy.deepcopy(dict(self.facts)) if as_dict else self.explanation

    def to_json(self) -> str:
        """Print as stable text."""
        data: dict[str, Any] = {
            "schema": "plan/1",
            "stages": [stage_data(stage) for stage in self.stages],
            "micro_batches": self.micro_batches,
            "schedule": self.schedule,
            "in_flight": self.in_flight,
            "placement": self.placement,
        }
        if self.predicted_step_s is not None:
            data["predicted_step_s"] = self.predicted_step_s
        if self.lower_bound_s is not None:
            data["lower_bound_s"] = self.lower_bound_s
        if self.memory_bytes:
            data["memory_bytes"] = list(self.memory_bytes)
        if self.explanation:
            data["explanation"] = self.explanation
        if self.facts:
            data["facts"] = dict(self.facts)
        return json.dumps(data, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, name: str = "plan") -> Plan:
        """Read the text of a plan; raise PlanError that starts with `name` and names the field."""
        try:
            data = read_json(text)
        except ValueError as error:
            raise PlanError(f"{name}: not JSON: {error}") from error
        try:
            return read_plan(data)
        except PlanError as error:
            raise PlanError(f"{name}: {error}") from None

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan file; raise PlanError naming the file and the field."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, ValueError, TypeError) as error:
            raise PlanError(f"{path}: cannot read the plan: {error}") from error
        return cls.from_json(text, str(path))

    def save(self, path: str | Path) -> None:
        """Write the plan to a file that `load` reads; raise PlanError where it cannot be written."""
        try:
            Path(path).write_text(self.to_json(), encoding="utf-8")
        except (OSError, TypeError) as error:
            raise PlanError(f"{path}: cannot write the plan: {error}") from error


def stage_data(stage: Stage) -> dict[str, Any]:
    """A stage as JSON data; options at their defaults are left out."""
    data: dict[str, Any] = {"blocks": [stage.first_block, stage.stop_block], "devices": list(stage.devices)}
    if stage.tensor != 1:
        data["tensor"] = stage.tensor
    if stage.recompute:
        data["recompute"] = True
    if stage.names:
        data["names"] = list(stage.names)
    return data


def read_plan(data: object) -> Plan:
    """Turn parsed JSON into a plan."""
    table = check_table("the file", data)
    if table.get("schema") != "plan/1":
        raise PlanError(f"schema must be 'plan/1', got {table.get('schema')!r}")
    known = {"schema", "stages", "micro_batches", "schedule", "in_flight", "placement", "predicted_step_s"}
    check_known("the file", table, known | {"lower_bound_s", "memory_bytes", "explanation", "facts"})
    stages = table.get("stages")
    if not isinstance(stages, list):
        raise PlanError(f"stages must be a list, got {stages!r}")
    return Plan(
        tuple(read_stage(f"stages[{index}]", stage) for index, stage in enumerate(stages)),
        whole("micro_batches", table.get("micro_batches")),
        table.get("schedule", "1f1b"),
        whole("in_flight", table.get("in_flight", 1)),
        table.get("placement", "given"),
        seconds("predicted_step_s", table.get("predicted_step_s")),
        seconds("lower_bound_s", table.get("lower_bound_s")),
        wholes("memory_bytes", table.get("memory_bytes", [])),
        table.get("explanation", ""),
        check_table("facts", table.get("facts", {})),
    )


def read_stage(name: str, data: object) -> Stage:
    """Turn one stage's JSON into a stage."""
    table = check_table(name, data)
    check_known(name, table, {"blocks", "devices", "tensor", "recompute", "names"})
    blocks = wholes(f"{name}.blocks", table.get("blocks"))
    if len(blocks) != 2:
        raise PlanError(f"{name}.blocks must be [first, stop], got {table.get('blocks')!r}")
    names = texts(f"{name}.names", table.get("names", []))
    recompute = table.get("recompute", False)
    if not isinstance(recompute, bool):
        raise PlanError(f"{name}.recompute must be true or false, got {recompute!r}")
    devices = wholes(f"{name}.devices", table.get("devices"))
    tensor = whole(f"{name}.tensor", table.get("tensor", 1))
    try:
        return Stage(blocks[0], blocks[1], devices, tensor, recompute, names)
    except PlanError as error:
        raise PlanError(f"{name}: {error}") from None


def check_table(name: str, data: object) -> Mapping[str, Any]:
    """Give the object back, or raise PlanError when it is none."""
    if not isinstance(data, Mapping):
        raise PlanError(f"{name} must be an object, got {data!r}")
    return data


def check_known(name: str, table: Mapping[str, Any], known: set[str]) -> None:
    """Raise PlanError for a key that nobody reads."""
    for key in sorted(set(table) - known):
        raise PlanError(f"{name}: unknown key {key!r}, known are {', '.join(sorted(known))}")


def whole(name: str, value: object) -> int:
    """A whole number, or PlanError."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise PlanError(f"{name} must be a whole number, got {value!r}")
    if abs(value) > MOST:
        raise PlanError(f"{name} must be at most {MOST:g} in size, got {number_text(value)}")
    return value


def wholes(name: str, value: object) -> tuple[int, ...]:
    """A list of whole numbers, or PlanError."""
    if not isinstance(value, list | tuple):
        raise PlanError(f"{name} must be a list of whole numbers, got {value!r}")
    return tuple(whole(name, one) for one in value)


def texts(name: str, value: object) -> tuple[str, ...]:
    """A list of texts, or PlanError."""
    if not isinstance(value, list | tuple) or not all(isinstance(one, str) for one in value):
        raise PlanError(f"{name} must be a list of texts, got {value!r}")
    return tuple(value)


def seconds(name: str, value: object) -> float | None:
    """A number of seconds or nothing, or PlanError."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise PlanError(f"{name} must be a number of seconds, got {value!r}")
    if not 0 <= value <= LONGEST_S:
        raise PlanError(f"{name} must be from 0 to {LONGEST_S:g} seconds, got {number_text(value)}")
    return float(value)
