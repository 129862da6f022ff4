"""What a block costs: seconds as a function of rows, and bytes; and the chain of blocks that the planner reads.

A row is one sample of the batch. Times of one micro-batch part with x rows are
`fixed_s + per_row_s * x`; bytes "per row" grow with x likewise.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from efftra_fx.errors import CostError
from efftra_fx.json_text import read_json
from efftra_fx.units import number_text

LARGEST = 1e300  # sums and products of a few such numbers are no numbers any more


@dataclass(frozen=True)
class Timing:
    """Seconds as a straight line in rows; `at(0)` is 0, since nothing is launched for no rows."""

    fixed_s: float = 0.0
    per_row_s: float = 0.0

    def __post_init__(self) -> None:
        check_amount("fixed_s", self.fixed_s)
        check_amount("per_row_s", self.per_row_s)

    def at(self, rows: float) -> float:
        """Seconds for so many rows.

        >>> Timing(1.0, 0.5).at(4)
        3.0
        """
        return self.fixed_s + self.per_row_s * rows if rows > 0 else 0.0

    def __add__(self, other: Timing) -> Timing:
        return Timing(self.fixed_s + other.fixed_s, self.per_row_s + other.per_row_s)


@dataclass(frozen=True)
class Option:
    """One way to compute a block: a tensor-parallel width, recompute or not, a kind of device.

    `kind=""` serves any device and its times are divided by the device's speed; the
    times under a kind of its own are taken as they are. All numbers are those of one
    of the `tensor` devices. `working_bytes` (per row) are needed only while one
    micro-batch is computed, `saved_bytes` (per row) from its forward to its backward.
    `reduces` sums over the `tensor` devices each way carry together `reduce_bytes` per
    row; a gather or a scatter is half a sum.
    """

    forward: Timing
    backward: Timing
    parameter_bytes: float = 0
    gradient_bytes: float = 0
    saved_bytes: float = 0
    working_bytes: float = 0
    tensor: int = 1
    recompute: bool = False
    kind: str = ""
    reduces: float = 0
    reduce_bytes: float = 0

    def __post_init__(self) -> None:
        for name in ("parameter_bytes", "gradient_bytes", "saved_bytes", "working_bytes", "reduces", "reduce_bytes"):
            check_amount(name, getattr(self, name))
        if self.tensor < 1:
            raise CostError(f"tensor must be 1 or more, got {self.tensor}")


EXCHANGES = ("sum", "gather", "scatter")


@dataclass(frozen=True)
class Exchanged:
    """What the ranks of a tensor group exchange once `at` (0 to 1) of a computation is done.

    `size_bytes` are those of the whole value; a gather or a scatter moves half as much as a sum.
    """

    at: float
    kind: str
    size_bytes: float

    def __post_init__(self) -> None:
        check_amount("at", self.at)
        check_amount("size_bytes", self.size_bytes)
        if self.at > 1:
            raise CostError(f"at must be from 0 to 1, got {self.at}")
        if self.kind not in EXCHANGES:
            raise CostError(f"kind must be one of {', '.join(EXCHANGES)}, got {self.kind!r}")


@dataclass(frozen=True)
class NodeCost:
    """Cost of a block (or node) on one device; `options` are further ways to compute it.

    `gradient_bytes` counts trainable parameters only. `output_bytes` (all that it
    makes) and `saved_bytes` (kept from forward to backward) are per row. In each
    direction of each micro-batch, replicas exchange something `exchanges` times
    (batch statistics over all of them), together `exchange_bytes` of each.
    """

    name: str
    forward: Timing
    backward: Timing
    parameter_bytes: float = 0
    gradient_bytes: float = 0
    output_bytes: float = 0
    saved_bytes: float = 0
    options: tuple[Option, ...] = ()
    exchanges: int = 0
    exchange_bytes: float = 0

    def __post_init__(self) -> None:
        for name in ("parameter_bytes", "gradient_bytes", "output_bytes", "saved_bytes", "exchanges", "exchange_bytes"):
            check_amount(f"{self.name}: {name}", getattr(self, name))

    @cached_property
    def base(self) -> Option:
        """The plain way: one device of any kind, nothing recomputed."""
        return Option(self.forward, self.backward, self.parameter_bytes, self.gradient_bytes, self.saved_bytes)

    def option(self, tensor: int = 1, recompute: bool = False, kind: str = "") -> Option | None:
        """The way to compute it with this width on this kind of device; `None` when there is none.

        A kind with options of its own is served by those alone; any other by the options
        for any kind, and at last by the base.
        """
        own = any(option.kind == kind for option in self.options)
        wanted = (tensor, recompute, kind if own else "")
        for option in self.options:
            if (option.tensor, option.recompute, option.kind) == wanted:
                return option
        return self.base if tensor == 1 and not recompute and (not own or not kind) else None

    def with_recompute(self) -> NodeCost:
        """Add, beside each option that lacks it, the same with the forward computed again in the backward."""
        present = {(option.tensor, option.recompute, option.kind) for option in self.options}
        added = []
        for option in (self.base, *self.options):
            key = (option.tensor, True, option.kind)
            if option.recompute or key in present:
                continue
            present.add(key)
            working = option.working_bytes + option.saved_bytes
            again = option.forward + option.backward
            added.append(replace(option, backward=again, saved_bytes=0, working_bytes=working, recompute=True))
        return replace(self, options=(*self.options, *added))


@dataclass(frozen=True)
class Crossing:
    """A value that is made in one block and read in later ones.

    `bytes_per_row` is for one row; `whole_bytes` for each micro-batch, whatever its
    rows. `gradient` says that as many bytes come back.
    """

    producer_block: int
    consumer_blocks: tuple[int, ...]
    bytes_per_row: float
    gradient: bool = True
    whole_bytes: float = 0

    def __post_init__(self) -> None:
        check_amount("bytes_per_row", self.bytes_per_row)
        check_amount("whole_bytes", self.whole_bytes)
        if not self.consumer_blocks or min(self.consumer_blocks) <= self.producer_block:
            raise CostError(
                f"crossing from block {self.producer_block}: consumers must come later, got {self.consumer_blocks}"
            )


@dataclass(frozen=True)
class Shared:
    """A trainable parameter that several blocks read: its bytes and the blocks; each block's cost includes it."""

    parameter_bytes: float
    blocks: tuple[int, ...]


@dataclass(frozen=True)
class Chain:
    """The planner's input: blocks in order and the values that cross between them."""

    blocks: tuple[NodeCost, ...]
    crossings: tuple[Crossing, ...] = ()
    shared: tuple[Shared, ...] = ()
    name: str = "model"

    def __post_init__(self) -> None:
        if not self.blocks:
            raise CostError(f"{self.name}: a chain needs at least one block, found 0")
        for crossing in self.crossings:
            if not 0 <= crossing.producer_block < max(crossing.consumer_blocks) < len(self.blocks):
                raise CostError(
                    f"{self.name}: crossing {crossing.producer_block} -> {crossing.consumer_blocks} leaves the"
                    f" {len(self.blocks)} blocks"
                )
        for shared in self.shared:
            if any(not 0 <= block < len(self.blocks) for block in shared.blocks):
                raise CostError(f"{self.name}: shared parameter names blocks {shared.blocks} of {len(self.blocks)}")

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of device with an option of their own, sorted."""
        return tuple(sorted({option.kind for block in self.blocks for option in block.options if option.kind}))


@dataclass(frozen=True)
class CostTable:
    """Costs by name, with the key of what they were measured for; reads and writes as JSON data."""

    key: str
    costs: tuple[NodeCost, ...]

    def to_json(self) -> str:
        """Print as stable text."""
        return json.dumps({"schema": "costs/1", **asdict(self)}, indent=1, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str) -> CostTable:
        """Read what `to_json` printed; raise CostError naming the field."""
        data = load_object(text, "cost table", "costs/1", {"key", "costs"})
        if not isinstance(data["key"], str) or not isinstance(data["costs"], list):
            raise CostError("cost table: key must be a text and costs a list")
        return cls(data["key"], tuple(read_node(f"costs[{index}]", one) for index, one in enumerate(data["costs"])))

    def find(self, name: str) -> NodeCost | None:
        """The cost of that name, or `None`."""
        return next((cost for cost in self.costs if cost.name == name), None)


def check_amount(name: str, value: object) -> None:
    """Raise CostError unless the value is a finite number of 0 or more."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise CostError(f"{name} must be a number, got {value!r}")
    if not 0 <= value <= LARGEST:
        raise CostError(f"{name} must be finite and not negative, got {number_text(value)}")


def load_object(text: str, what: str, schema: str, keys: set[str]) -> dict[str, Any]:
    """Parse a JSON object that has exactly these keys and this schema; raise CostError."""
    try:
        data = read_json(text)
    except ValueError as error:
        raise CostError(f"{what}: not JSON: {error}") from error
    if not isinstance(data, dict) or data.pop("schema", None) != schema:
        raise CostError(f"{what}: expected an object with schema {schema!r}")
    check_fields(what, data, keys, set())
    return data


def check_fields(what: str, data: object, needed: set[str], allowed: set[str]) -> Mapping[str, Any]:
    """Give the object back when it has the needed keys and no others than allowed; raise CostError."""
    if not isinstance(data, Mapping):
        raise CostError(f"{what} must be an object, got {data!r}")
    for key in sorted(needed - set(data)):
        raise CostError(f"{what}.{key} is missing")
    for key in sorted(set(data) - needed - allowed):
        raise CostError(f"{what}: unknown key {key!r}")
    return data


def read_timing(what: str, data: object) -> Timing:
    """A Timing from its JSON object."""
    return Timing(**check_fields(what, data, set(), {"fixed_s", "per_row_s"}))


def read_node(what: str, data: object) -> NodeCost:
    """A NodeCost from its JSON object."""
    amounts = {"parameter_bytes", "gradient_bytes", "output_bytes", "saved_bytes", "exchanges", "exchange_bytes"}
    found = dict(check_fields(what, data, {"name", "forward", "backward"}, amounts | {"options"}))
    if not isinstance(found["name"], str):
        raise CostError(f"{what}.name must be a text, got {found['name']!r}")
    for key in ("forward", "backward"):
        found[key] = read_timing(f"{what}.{key}", found[key])
    options = found.get("options", ())
    if not isinstance(options, list | tuple):
        raise CostError(f"{what}.options must be a list, got {options!r}")
    found["options"] = tuple(read_option(f"{what}.options[{index}]", one) for index, one in enumerate(options))
    return NodeCost(**found)


def read_option(what: str, data: object) -> Option:
    """An Option from its JSON object."""
    amounts = {"parameter_bytes", "gradient_bytes", "saved_bytes", "working_bytes", "reduces", "reduce_bytes"}
    found = dict(check_fields(what, data, {"forward", "backward"}, amounts | {"tensor", "recompute", "kind"}))
    for key in ("forward", "backward"):
        found[key] = read_timing(f"{what}.{key}", found[key])
    for key, kind in (("tensor", int), ("recompute", bool), ("kind", str)):
        if key in found and type(found[key]) is not kind:
            raise CostError(f"{what}.{key} must be of type {kind.__name__}, got {found[key]!r}")
    return Option(**found)
