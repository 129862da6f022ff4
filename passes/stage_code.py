"""A stage's generated functions for one number of rows, as the executor calls them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor

from efftra_fx.emit import Emitted, emit
from efftra_fx.meta import ROLE, Role
from efftra_fx.program import Value

from .differentiate import Differentiated, Part, differentiate
from .split import StageGraph
from .stage_compile import compile_parts

Example = Callable[[Role, int], Any]  # a meta tensor for what a placeholder gets at this number of rows


MOST_SIZES = 64  # numbers of rows for which a stage's functions are kept


class TrainingCode:
    """Forward and backward of a stage; see `StageCode` in the runtime for what the calls mean."""

    def __init__(
        self,
        stage: StageGraph,
        flags: Flags,
        example: Example,
        rows: int,
        recompute: bool,
        device: str,
        backend: str | None = None,
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
        if backend is not None:
            self.parts = compile_parts(self.parts, backend)
        self.values = [i for i, role in enumerate(r for r in roles if r.kind == "value") if flags.values[i]]
        self.count = sum(role.kind == "value" for role in roles)
        self.places = [i for i, flag in enumerate(flags.parameters) if flag]
        shapes = [example(r, rows) for r in roles if r.kind == "parameter"]
        large = sum(
            shapes[self.places[p.weight]].numel() * shapes[self.places[p.weight]].element_size()
            for p in self.parts.products
        )
        self.patience = max(2, large // max(self.parts.terms_bytes, 1))

    @property
    def saved_bytes(self) -> int:
        return self.parts.saved_bytes

    def forward(self, operands: list[Any]) -> tuple[Sequence[Any], Any]:
        outputs, stash = self.parts.forward.function(operands)
        return outputs, stash

    def backward(self, saved: Any, gradients: list[Tensor | None], sums: Sums, defer: bool) -> Sequence[Tensor | None]:
        part = self.parts.backward_deferring if defer and self.parts.products else self.parts.backward
        results = self._weights(part, (saved, self._incoming(gradients)), 1, sums)
        return self._spread(results[0])

    def backward_input(self, saved: Any, gradients: list[Tensor | None]) -> tuple[Sequence[Tensor | None], Any]:
        values, kept = self.parts.backward_input.function(saved, self._incoming(gradients))
        return self._spread(values), kept

    def backward_weight(self, kept: Any, sums: Sums, defer: bool) -> None:
        part = self.parts.weight_deferring if defer and self.parts.products else self.parts.backward_weight
        self._weights(part, (kept,), 0, sums)

    def finish(self, terms: Sequence[Any], sums: Sums) -> None:
        """Compute the gradients that waited for these micro-batches."""
        for index, product in enumerate(self.parts.products):
            place = self.places[product.weight]
            lefts, rights = [one[2 * index] for one in terms], [one[2 * index + 1] for one in terms]
            held = sums.at(place)
            overwrite = held is not None and not sums.filled[place]
            sums.tensors[place] = product.join(lefts, rights, held, overwrite)
            sums.filled[place] = True

    def _weights(self, part: Part, operands: tuple[Any, ...], group: int, sums: Sums) -> Sequence[Any]:
        """Run a part whose outputs `group` are weight gradients, and see them added to the sums."""
        offset = sum(part.gives[:group])
        places = [self.places[index - offset] for index in part.weights]
        held = sums.held(places)
        ready = [sums.filled[place] for place in places]
        if places and held is not None and (all(ready) or not any(ready)):
            results = self._added(part, operands, held, ready[0], places, sums.complete)
        else:
            results = part.function(*operands)
            weights = results[group] if len(part.gives) > 1 else results
            put_apart(sums, places, [weights[index - offset] for index in part.weights])
        for place in places:
            sums.filled[place] = True
        if len(part.gives) > group + 1:
            sums.terms.setdefault(id(self), []).append(results[-1])
        return results if len(part.gives) > 1 else (results,)

    @staticmethod
    def _added(
        part: Part,
        operands: tuple[Any, ...],
        held: Held,
        filled: bool,
        places: list[int],
        complete: Callable[[int], None] | None,
    ) -> Any:
        if complete is None:
            return (part.accumulate if filled else part.overwrite)(*operands, held)
        function = part.accumulate_telling if filled else part.overwrite_telling
        return function(*operands, held, lambda index: complete(places[index]))

    def _incoming(self, gradients: list[Tensor | None]) -> list[Tensor]:
        return [g for g, flag in zip(gradients, self.flags.outputs, strict=True) if flag and g is not None]

    def _spread(self, found: Sequence[Tensor | None]) -> list[Tensor | None]:
        result: list[Tensor | None] = [None] * self.count
        for place, tensor in zip(self.values, found, strict=True):
            result[place] = tensor
        return result


def put_apart(sums: Sums, places: Sequence[int], gradients: Sequence[Tensor]) -> None:
    """Add gradients to the sums, each as memory of its own.

    Weights with equal gradients (two heads that are averaged, the two biases of a recurrent cell) may be given one
    tensor for all, into which every one of them would be added.
    """
    seen: set[int] = set()
    for place, gradient in zip(places, gradients, strict=True):
        memory = gradient.untyped_storage().data_ptr()
        sums.put(place, gradient.clone() if memory in seen else gradient)
        seen.add(memory)


class Held(Protocol):
    """Tensors that gradients are written or added into, each asked for when it is used."""

    def __getitem__(self, index: int, /) -> Tensor: ...


class Sums(Protocol):
    """The sums of a step's weight gradients, by place; see the runtime's `weights`."""

    tensors: list[Tensor | None]
    filled: list[bool]
    terms: dict[int, list[Any]]
    complete: Callable[[int], None] | None  # told, in the last micro-batch, which places have their last term

    def put(self, place: int, gradient: Tensor) -> None: ...

    def at(self, place: int) -> Tensor | None: ...

    def held(self, places: Sequence[int]) -> Held | None: ...


class Fresh:
    """Sums of one micro-batch alone, kept just long enough to be timed."""

    def __init__(self, width: int) -> None:
        self.tensors: list[Tensor | None] = [None] * width
        self.filled = [False] * width
        self.terms: dict[int, list[Any]] = {}
        self.complete: Callable[[int], None] | None = None

    def put(self, place: int, gradient: Tensor) -> None:
        self.tensors[place] = gradient

    def at(self, place: int) -> Tensor | None:
        return self.tensors[place]

    def held(self, places: Sequence[int]) -> Held | None:
        return None


class ForwardCode:
    """A stage that only runs forward: evaluation, and stages with nothing to train."""

    patience, saved_bytes = 1, 0

    def __init__(self, stage: StageGraph) -> None:
        self.stage = stage

    @cached_property
    def function(self) -> Emitted:
        """The generated function, for any number of rows; compiled at first use."""
        outputs = len(self.stage.outputs)
        return emit(self.stage.gm, name="forward", takes=(len(self.stage.roles),), gives=(outputs,))

    def forward(self, operands: list[Any]) -> tuple[Sequence[Any], Any]:
        return self.function(operands), None

    def backward(self, saved: Any, gradients: list[Tensor | None], sums: Sums, defer: bool) -> Any:
        raise AssertionError("a stage without gradients has no backward")

    def backward_input(self, saved: Any, gradients: list[Tensor | None]) -> Any:
        raise AssertionError("a stage without gradients has no backward")

    def backward_weight(self, kept: Any, sums: Sums, defer: bool) -> None:
        raise AssertionError("a stage without gradients has no backward")

    def finish(self, terms: Sequence[Any], sums: Sums) -> None:
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
        flags += [False] * (len(stage.buffers) + len(stage.parts))
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
    stage: StageGraph,
    flags: Flags,
    example: Example,
    recompute: bool = False,
    device: str = "cpu",
    backend: str | None = None,
) -> Callable[[int], TrainingCode | ForwardCode]:
    """Return what makes the stage's functions by number of rows and keeps the latest; a `backend` compiles them."""

    forward = None if flags.any else ForwardCode(stage)

    @lru_cache(maxsize=MOST_SIZES)
    def code(rows: int) -> TrainingCode | ForwardCode:
        return forward or TrainingCode(stage, flags, example, rows, recompute, device, backend)

    return code


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


__all__ = ["MOST_SIZES", "ROLE", "Flags", "ForwardCode", "TrainingCode", "example_of", "put_apart", "stage_code"]
