"""A stage's generated functions for one number of rows, as the executor calls them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from efftra_fx.emit import Emitted, emit
from efftra_fx.meta import ROLE, Role
from efftra_fx.program import Value

from .differentiate import Differentiated, differentiate
from .split import StageGraph

Example = Callable[[Role, int], Any]  # a meta tensor for what a placeholder gets at this number of rows


class TrainingCode:
    """Forward and backward of a stage; see `StageCode` in the runtime for what the calls mean."""

    def __init__(
        self, stage: StageGraph, flags: Flags, example: Example, rows: int, recompute: bool, device: str
    ) -> None:
        roles = stage.roles
        self.flags = flags
        self.parts: Differentiated = differentiate(
            stage.gm,
            [example(role, rows) for role in roles],
            wrt=flags.wrt,
            grad_outputs=flags.outputs,
            weight_inputs=flags.weights,
            recompute=recompute,
            device=device,
        )
        self.values = [i for i, role in enumerate(r for r in roles if r.kind == "value") if flags.values[i]]
        self.count = sum(role.kind == "value" for role in roles)
        self.places = [i for i, flag in enumerate(flags.parameters) if flag]

    def forward(self, operands: list[Any]) -> tuple[Sequence[Any], Any]:
        outputs, stash = self.parts.forward.function(operands)
        return outputs, stash

    def backward(
        self, saved: Any, gradients: list[Tensor | None]
    ) -> tuple[Sequence[Tensor | None], Sequence[Tensor | None]]:
        values, weights = self.parts.backward.function(saved, self._incoming(gradients))
        return self._spread(values, self.values, self.count), self._spread(weights, self.places, self.flags.width)

    def backward_input(self, saved: Any, gradients: list[Tensor | None]) -> tuple[Sequence[Tensor | None], Any]:
        values, kept = self.parts.backward_input.function(saved, self._incoming(gradients))
        return self._spread(values, self.values, self.count), kept

    def backward_weight(self, kept: Sequence[Any]) -> Sequence[Tensor | None]:
        total: list[Tensor | None] = []
        for one in kept:
            weights = self._spread(self.parts.backward_weight.function(one), self.places, self.flags.width)
            total = list(weights) if not total else [_add(a, b) for a, b in zip(total, weights, strict=True)]
        return total

    def _incoming(self, gradients: list[Tensor | None]) -> list[Tensor]:
        return [g for g, flag in zip(gradients, self.flags.outputs, strict=True) if flag and g is not None]

    @staticmethod
    def _spread(found: Sequence[Tensor | None], places: Sequence[int], width: int) -> list[Tensor | None]:
        result: list[Tensor | None] = [None] * width
        for place, tensor in zip(places, found, strict=True):
            result[place] = tensor
        return result


def _add(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return a.add_(b)


class ForwardCode:
    """A stage that only runs forward: evaluation, and stages with nothing to train."""

    def __init__(self, function: Emitted) -> None:
        self.function = function

    def forward(self, operands: list[Any]) -> tuple[Sequence[Any], Any]:
        return self.function(operands), None

    def backward(self, saved: Any, gradients: list[Tensor | None]) -> Any:
        raise AssertionError("a stage without gradients has no backward")

    backward_input = backward

    def backward_weight(self, kept: Sequence[Any]) -> Any:
        raise AssertionError("a stage without gradients has no backward")


class Flags:
    """Which inputs of a stage get gradients, and for which outputs gradients come in."""

    def __init__(self, stage: StageGraph, values: Mapping[str, Value], trainable: set[str], index: int) -> None:
        self.parameters: list[bool] = []
        self.values: list[bool] = []
        wrt, weights = [], []
        for role in stage.roles:
            weight = role.kind == "parameter" and role.name in trainable
            value = role.kind == "value" and _returns(values[role.name], index)
            wrt.append(weight or value)
            weights.append(weight)
            if role.kind == "parameter":
                self.parameters.append(weight)
            elif role.kind == "value":
                self.values.append(value)
        self.width = len(self.parameters)
        self.wrt, self.weights = tuple(wrt), tuple(weights)
        output = next(n for n in reversed(stage.gm.graph.nodes) if n.op == "output")
        results = output.args[0]
        sends = len(stage.sends)
        bounds = len(stage.boundaries)
        flags = [any(values[name].gradients) for name in stage.sends]
        flags += [_moves(node) for node in results[sends : sends + bounds]]
        flags += [False] * len(stage.buffers)
        self.outputs = tuple(flags)

    @property
    def any(self) -> bool:
        """Say whether there is anything to differentiate."""
        return any(self.wrt)


def _returns(value: Value, stage: int) -> bool:
    return value.gradients[value.consumers.index(stage)]


def _moves(node: Any) -> bool:
    value = node.meta["val"]
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def stage_code(
    stage: StageGraph, flags: Flags, example: Example, recompute: bool = False, device: str = "cpu"
) -> Callable[[int], TrainingCode | ForwardCode]:
    """Return what makes (and keeps) the stage's functions by number of rows."""

    @cache
    def code(rows: int) -> TrainingCode | ForwardCode:
        if flags.any:
            return TrainingCode(stage, flags, example, rows, recompute, device)
        return forward_code(stage)

    return code


@cache
def forward_code(stage: StageGraph) -> ForwardCode:
    """Return the forward function of a stage for any number of rows."""
    count = len(stage.roles)
    outputs = len(stage.sends) + len(stage.boundaries) + len(stage.buffers)
    return ForwardCode(emit(stage.gm, name="forward", takes=(count,), gives=(outputs,)))


def example_of(
    values: Mapping[str, Value],
    tensors: Mapping[tuple[str, str], Tensor],
    inputs: Mapping[str, tuple[Tensor, int | None]],
) -> Example:
    """Return a maker of meta tensors: shapes and strides of what each placeholder gets at a number of rows."""

    def example(role: Role, rows: int) -> Tensor:
        if role.kind == "input":
            tensor, dim = inputs[role.name]
            shape = [rows if d == dim else size for d, size in enumerate(tensor.shape)]
            return torch.empty(shape, dtype=tensor.dtype, device="meta")
        if role.kind == "value":
            value = values[role.name]
            return torch.empty(value.part_shape(rows), dtype=getattr(torch, value.dtype), device="meta")
        tensor = tensors[role.kind, role.name]
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

    return example


__all__ = ["ROLE", "Flags", "ForwardCode", "TrainingCode", "example_of", "forward_code", "stage_code"]
