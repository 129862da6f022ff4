"""A declared reduction: how the losses of parts make the loss of the whole batch, where the graph does not show it.

    part i:   L_i · w_i  and  w_i      whole batch, once:   L = Σ L_i w_i / Σ w_i

`w_i` is the part's number of rows ("mean"), what the user's function says of the part's inputs, or there is
none and the losses add up ("sum"). The claim is proven like everything else, on the example: whole against
parts, at two points of the parameters.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from efftra_fx.errors import LossError
from efftra_fx.meta import BATCH, OUTPUTS, REDUCED, ROLE
from efftra_fx.opaque import make_operator
from efftra_fx.signature import Call, rows_of, take_rows

from .batch_evaluate import evaluate_some
from .insert import batch_symbols, call, size_node
from .tail import is_separable

aten = torch.ops.aten
Weight = Callable[[Sequence[Any], Mapping[str, Any], Any], Any]  # of args, kwargs and target
_TOLERANCE = 1e-8


@dataclass(frozen=True)
class DeclareReduction:
    """Add the loss's numerator and the loss that parts make by it to the graph; `settle` chooses.

    `weight` is "mean", "sum" or a function of the part's args, kwargs and target.
    """

    weight: str | Weight
    given: Call
    batch_leaves: tuple[int | None, ...]
    name: ClassVar[str] = "declare-reduction"
    needs: ClassVar[tuple[str, ...]] = ("role", "outputs")
    gives: ClassVar[tuple[str, ...]] = ()

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        output = next(n for n in reversed(gm.graph.nodes) if n.op == "output")
        loss = output.args[0][0]
        with gm.graph.inserting_before(output):
            numerator, joined = self._parts(gm, loss)
        REDUCED[numerator], REDUCED[joined] = "numerator", "loss"
        gm.recompile()
        return gm

    def _parts(self, gm: fx.GraphModule, loss: fx.Node) -> tuple[fx.Node, fx.Node]:
        graph = gm.graph
        if self.weight == "sum":
            one = call(graph, aten.alias.default, loss, like=loss)
            return one, call(graph, aten.alias.default, one, like=loss)
        if self.weight == "mean":
            symbols = batch_symbols(gm, self.batch_leaves)
            symbol = next(iter(symbols))
            rows = size_node(graph, symbol, symbols)
            numerator = call(graph, aten.mul.Tensor, loss, rows, like=loss)
            return numerator, call(graph, aten.div.Tensor, numerator, rows, like=loss)
        weight = self._weight(gm, loss)
        REDUCED[weight] = "weight"
        zero = call(graph, aten.zeros_like.default, loss, like=loss)
        some = call(graph, aten.ne.Scalar, weight, 0, like=loss)
        kept = call(graph, aten.where.self, some, loss, zero, like=loss)  # of a part that weighs nothing, nothing
        numerator = call(graph, aten.mul.Tensor, kept, weight, like=loss)
        return numerator, call(graph, aten.div.Tensor, numerator, weight, like=loss)

    def _weight(self, gm: fx.GraphModule, loss: fx.Node) -> fx.Node:
        function, given, dtype = self.weight, self.given, loss.meta["val"].dtype
        assert callable(function)

        def run(operands: Sequence[Tensor]) -> list[Tensor]:
            try:
                found = function(*given.rebuild(list(operands)))
            except Exception as error:
                raise LossError(f"loss_reduction raised {type(error).__name__} for a part: {error}") from error
            if not isinstance(found, int | float) and not (isinstance(found, Tensor) and found.numel() == 1):
                kind = f"shape {list(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
                raise LossError(f"loss_reduction returned {kind}, expected a number: the weight of the part")
            return [torch.as_tensor(found, device=operands[0].device).reshape(()).to(dtype)]

        made = make_operator("weight", run, lambda operands: [operands[0].new_empty((), dtype=dtype)])
        names = given.tensor_names
        inputs = {ROLE[n].name: n for n in gm.graph.nodes if n.op == "placeholder" and ROLE[n].kind == "input"}
        result = call(gm.graph, made, [inputs[name] for name in names], like=loss)
        return call(gm.graph, operator.getitem, result, 0, like=loss)


@dataclass(frozen=True)
class SettleReduction:
    """Check the claim on the whole example; let the loss be what parts make by it, where the graph needs that.

    `values` and `inputs` are those of `ProveBatch`, but with all rows. Raises LossError for a wrong claim.
    """

    claim: str
    values: Mapping[tuple[str, str], Tensor] = field(repr=False)
    inputs: Sequence[Tensor] = field(repr=False)
    batch_leaves: tuple[int | None, ...]
    name: ClassVar[str] = "settle-reduction"
    needs: ClassVar[tuple[str, ...]] = ("role", "outputs")
    gives: ClassVar[tuple[str, ...]] = ("batch", "free")

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        found = {REDUCED[n]: n for n in gm.graph.nodes if REDUCED.on(n)}
        weight = found.get("weight")
        if weight is not None:
            self._check(gm, weight, "the parts' weights do not add up to the weight of the whole batch")
        numerator = found["numerator"]
        self._check(gm, numerator, "the parts' losses do not make the loss of the whole batch by it")
        if not is_separable(gm):
            output = next(n for n in reversed(gm.graph.nodes) if n.op == "output")
            output.args = ((found["loss"], *output.args[0][1:]),)
        assert OUTPUTS.on(gm)
        gm.recompile()
        return gm

    def _check(self, gm: fx.GraphModule, node: fx.Node, problem: str) -> None:
        """Raise LossError unless a value of the whole example is the sum of its parts', wherever the parameters are."""
        rows = rows_of(self.inputs, self.batch_leaves)
        gaps = []
        for values in (self.values, _elsewhere(self.values)):
            whole = evaluate_some(gm, values, self.inputs, node)
            for middle in sorted({1, rows // 2, rows - 1} - {0}):
                cut = (slice(0, middle), slice(middle, rows))
                one, two = (evaluate_some(gm, values, take_rows(self.inputs, self.batch_leaves, p), node) for p in cut)
                gaps.append((abs(whole - one - two), whole, one + two))
        if not any(whole or parts for _, whole, parts in gaps):
            raise LossError(
                f"loss_reduction={self.claim} cannot be checked: the loss of the example is 0; give another"
            )
        gap, whole, parts = max(gaps, key=lambda one: one[0] if one[0] == one[0] else float("inf"))
        if BATCH[node].kind != "sum" or not gap <= _TOLERANCE * max(abs(whole), abs(parts)):
            raise LossError(
                f"loss_reduction={self.claim} is wrong for this loss: {problem} (together {parts:.9g}, the whole "
                f"{whole:.9g}, on the example); leave it out, so that the loss is computed once on the whole batch"
            )


def _elsewhere(values: Mapping[tuple[str, str], Tensor]) -> dict[tuple[str, str], Tensor]:
    """Return other values of all parameters: what holds at two points by chance holds nowhere."""
    generator = torch.Generator().manual_seed(1)

    def moved(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        noise = torch.rand(tensor.shape, generator=generator, dtype=torch.float64).to(tensor.device)
        return (tensor.detach().double() * (0.7 + 0.6 * noise) + 0.1 * (noise - 0.5)).to(tensor.dtype)

    return {key: moved(tensor) if key[0] == "parameter" else tensor for key, tensor in values.items()}


__all__ = ["DeclareReduction", "SettleReduction", "Weight"]
