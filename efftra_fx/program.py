"""Rank programs: what each rank does in one training step, as plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Value:
    """A value that crosses a cut: a typed contract between stages.

    `shape` is the shape for one row of the batch; along `dim` a part with b rows
    has `shape[dim] * b` elements (`kind == "rows"`). A `"whole"` value is the same
    for every row and has exactly `shape`; a `"sum"` value is a partial sum over the
    rows of a part, has exactly `shape`, and parts add up.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    kind: str  # "rows" | "whole" | "sum"
    dim: int
    producer: int
    consumers: tuple[int, ...]
    gradients: tuple[bool, ...]  # for each consumer: does a gradient come back


@dataclass(frozen=True)
class Parameter:
    """A parameter under the model's own name and the stages that read it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    stages: tuple[int, ...]
    trainable: bool


@dataclass(frozen=True)
class Wiring:
    """The distributed graph as plain data: all that lowering needs to know."""

    stages: int
    values: tuple[Value, ...]
    parameters: tuple[Parameter, ...]
    backward: tuple[bool, ...]  # for each stage: has it anything to differentiate
    joined: bool  # the loss needs all forwards before any backward
