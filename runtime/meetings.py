"""Run code that meets other ranks on its way: start each exchange when it is asked for, wait when it is needed.

Ranks meet in two directions: those of a tensor group compute one replica's rows together, those
beside each other compute the same layers on their own rows of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from efftra_fx.collectives import Exchange

from .transport import Done, Handle, Then, Transport

Meeting = Generator[tuple[Exchange | None, Any], Any, Any]


@dataclass(frozen=True)
class Company:
    """Whom a rank meets in one computation, itself included.

    `tensor` are the ranks of its tensor group, in the group's own order; `replicas` those beside it that have
    rows, as (number of the replica, rank), of `count` replicas.
    """

    tensor: tuple[int, ...] = ()
    replicas: tuple[tuple[int, int], ...] = ()
    count: int = 1


def meet(
    meeting: Meeting, transport: Transport, company: Company, what: str, seed: int | None = None
) -> Generator[tuple[Handle[Any], str], None, Any]:
    """Run a meeting to its end and return what it returns.

    It yields (exchange, tensor) to start an exchange, which may overwrite the tensor, and is sent a
    handle; it yields (None, handle) to wait, and is sent the result. With a seed, random numbers are drawn as if
    nothing else ran between: so all ranks of a tensor group draw alike.
    """
    reply: Any = None
    state = None if seed is None else _seeded(seed, transport.device)
    while True:
        before = None if state is None else _swap(state, transport.device)
        try:
            exchange, thing = meeting.send(reply)
        except StopIteration as stop:
            return stop.value
        finally:
            if before is not None:
                state = _swap(before, transport.device)
        if exchange is not None and exchange.over == "replicas":
            reply = start_beside(exchange, thing, transport, company)
        elif exchange is not None:
            reply = start(exchange, thing, transport, company.tensor)
        else:
            while not thing.ready():
                yield thing, what
            reply = thing.wait(what)


def start(exchange: Exchange, tensor: Tensor, transport: Transport, ranks: tuple[int, ...]) -> Handle[Tensor]:
    """Start an exchange; sections are in the order of `ranks`, which need not be ascending."""
    order = tuple(sorted(ranks))
    if exchange.kind == "sum":
        return transport.all_reduce(tensor, order)
    counts, flat = exchange.counts, tensor.view(-1)
    there = [ranks.index(rank) for rank in order]
    sorted_counts = [counts[place] for place in there]
    if exchange.kind == "scatter":
        return transport.reduce_scatter(_reordered(flat, counts, there), sorted_counts, order)
    back = [order.index(rank) for rank in ranks]
    return Then(transport.all_gather(flat, sorted_counts, order), lambda came: _reordered(came, sorted_counts, back))


def start_beside(exchange: Exchange, tensor: Tensor, transport: Transport, company: Company) -> Handle[Tensor]:
    """Start a sum or a gather over the replicas that have rows; one alone meets nobody."""
    places = [place for _, place in sorted((rank, place) for place, rank in company.replicas)]
    order = tuple(sorted(rank for _, rank in company.replicas))
    if exchange.kind == "sum":
        return Done(tensor) if len(order) == 1 else transport.all_reduce(tensor, order)

    def spread(came: Tensor) -> Tensor:
        rows = tensor.new_zeros(company.count, tensor.numel())
        rows[places] = came.view(len(places), -1)
        return rows

    size = tensor.numel()
    handle = Done(tensor) if len(order) == 1 else transport.all_gather(tensor.view(-1), [size] * len(order), order)
    return Then(handle, spread)


def _reordered(flat: Tensor, counts: Sequence[int], order: Sequence[int]) -> Tensor:
    """Return the sections of a flat tensor in another order."""
    if list(order) == sorted(order):
        return flat
    sections = flat.split(list(counts))
    return torch.cat([sections[place] for place in order])


State = tuple[torch.Tensor, torch.Tensor | None]


def _seeded(seed: int, device: torch.device) -> State:
    """Return the random state that a seed gives, and leave the present one alone."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        return _present(device)


def _present(device: torch.device) -> State:
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def _swap(state: State, device: torch.device) -> State:
    """Put a random state in place of the present one, which is returned."""
    before = _present(device)
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], device)
    return before


__all__ = ["Company", "meet"]
