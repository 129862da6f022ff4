"""Run the loss's tail: its value for joined parts, and its derivatives, which seed the backwards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from efftra_fx.errors import EfftraError, InputError
from efftra_fx.meta import CONSTANTS, ROLE
from efftra_fx.opaque import NOTHING

from .news import News
from .tail import Tail


class Batch(Protocol):
    """One global batch."""

    @property
    def rows(self) -> int: ...
    @property
    def tensors(self) -> Mapping[str, Tensor]: ...


class TailFunction:
    """The tail as a function of the whole batch's inputs and the joined boundary values.

    `buffers` has the model's buffers by name; those that the tail reads are not written in a step.
    """

    def __init__(self, tail: Tail, buffers: Mapping[str, Tensor], constant_stage: int, device: torch.device) -> None:
        self.tail, self.buffers, self.device = tail, buffers, device
        self.linear = tail.linear
        self.constant_stage = constant_stage
        self.roles = [ROLE[n] for n in tail.gm.graph.nodes if n.op == "placeholder"]
        self.examples = {n.name: n.meta["val"] for n in tail.gm.graph.nodes if n.op == "placeholder"}
        self.by_size: dict[int, tuple[Mapping[str, Tensor], Tensor]] = {}
        self.random = tail.random
        # some operators take no gradient for a running statistic; a linear tail asks for those of all that it adds up
        self.still = frozenset(b.name for b in tail.boundaries if b.buffer and not tail.linear)
        self.changes = self.random or _reads_values(tail)

    def seeds(self, batch: Batch) -> tuple[Mapping[str, Tensor], Tensor]:
        """Return dT/dS for each boundary, and T where every S is zero; only for a linear tail."""
        if not self.changes and batch.rows in self.by_size:
            return self.by_size[batch.rows]
        zeros = {b.name: self.zeros(b.name) for b in self.tail.boundaries}
        loss, seeds = self.join(batch, zeros)
        if not self.changes:
            self.by_size[batch.rows] = seeds, loss
        return seeds, loss

    def join(self, batch: Batch, values: Mapping[str, Tensor]) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the loss of the joined values and its derivatives with respect to each of them."""
        with torch.enable_grad():
            leaves = {
                name: value.detach().requires_grad_(name not in self.still and _has_gradients(value))
                for name, value in values.items()
            }
            loss = self.results(batch, leaves)
            wanted = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
            found = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
        seeds = {name: torch.full_like(values[name], NOTHING) for name in self.still if _has_gradients(values[name])}
        seeds |= {
            name: torch.full_like(leaf, NOTHING) if gradient is None else gradient
            for (name, leaf), gradient in zip(wanted.items(), found, strict=True)
        }
        return loss.detach(), seeds

    def results(self, batch: Batch, values: Mapping[str, Tensor]) -> Any:
        """Return what the tail computes."""
        operands = []
        for role in self.roles:
            if role.kind == "boundary":
                operands.append(values[role.name])
            elif role.kind == "input":
                operands.append(batch.tensors[role.name])
            elif role.kind == "constant":
                operands.append(CONSTANTS[self.tail.gm][role.name])
            else:
                operands.append(self.buffers[role.name])
        try:
            return self.tail.gm.forward(*operands)
        except EfftraError:
            raise
        except Exception as error:  # whatever an operator raises for sizes that it does not take
            raise InputError(
                f"the part that needs the whole batch does not take {batch.rows} row(s), as it was captured: "
                f"{str(error).strip().splitlines()[0]}; give more rows, or compile with an example of so many"
            ) from error

    def zeros(self, name: str) -> Tensor:
        """Return zeros like a boundary value that is not of rows."""
        value = self.examples[name] if name in self.examples else self.examples[_placeholder(self.tail, name)]
        return torch.zeros([int(size) for size in value.shape], dtype=value.dtype, device=self.device)


def _has_gradients(value: Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


class NewsFunction:
    """New buffer values as a function of the whole batch's inputs, joined parts and the buffers' old values.

    `beside` says that ranks of this process share the buffers.
    """

    def __init__(self, news: News, buffers: Mapping[str, Tensor], device: torch.device, beside: bool) -> None:
        self.function, self.names, self.beside = TailFunction(news.tail, buffers, 0, device), news.buffers, beside
        self.parts, self.random = news.tail.boundaries, self.function.random

    def zeros(self, name: str) -> Tensor:
        """Return zeros like a part that is not of rows."""
        return self.function.zeros(name)

    def make(self, batch: Batch, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the new values by buffer."""
        return dict(zip(self.names, self.function.results(batch, values), strict=True))


def _placeholder(tail: Tail, name: str) -> str:
    found: str = next(
        n.name
        for n in tail.gm.graph.nodes
        if n.op == "placeholder" and ROLE[n].kind == "boundary" and ROLE[n].name == name
    )
    return found


def _reads_values(tail: Tail) -> bool:
    """Say whether the tail reads more of the inputs than their sizes."""
    for node in tail.gm.graph.nodes:
        if node.op == "placeholder" and ROLE[node].kind in ("input", "buffer"):
            if any(user.target is not torch.ops.aten.sym_size.int for user in node.users):
                return True
    return False
