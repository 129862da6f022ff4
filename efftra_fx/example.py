"""Where the rows of an example are, and the few of them that proofs take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from efftra_fx.errors import BatchError, InputError
from efftra_fx.meta import CONSTANTS, ROLE
from efftra_fx.signature import Call, rows_of, rows_round

_PROOF_ROWS = 3


def find_batch(
    call: Call, tensors: Sequence[Tensor], given: Mapping[str, int | None]
) -> tuple[int, tuple[int | None, ...]]:
    """Return the number of rows, and for each tensor the dimension of its rows (None: it has none).

    Rows are dimension 0 of the target, or of the first argument with a dimension; other tensors carry
    the batch where their dimension 0 has as many. `given` overrides that by name.
    Raises BatchError where no argument has rows or a given dimension does not fit.
    """
    names = call.tensor_names
    unknown = sorted(set(given) - set(names))
    if unknown:
        raise BatchError(f"batch_dims names '{unknown[0]}', but the tensors are {', '.join(names)}")
    sized = [(n, t) for n, t in zip(names, tensors, strict=True) if given.get(n, 0) is not None and t.ndim > 0]
    if not sized:
        apart = next((n for n, t in zip(names, tensors, strict=True) if t.ndim > 0), None)
        if apart is not None:  # as where a target of rows times length was taken for what has the rows
            raise BatchError(
                f"no argument carries a batch: '{apart}' was taken to have no rows, since the target has others or "
                f"batch_dims says so; say where they are when you compile, as in batch_dims={{'{apart}': 0, "
                "'target': None}"
            )
        raise BatchError("no argument carries a batch: at least one tensor must have rows along dimension 0")
    first = next((p for p in sized if p[0] in given), next((p for p in sized if p[0] == "target"), sized[0]))
    name, tensor = first
    dim = given.get(name) or 0
    if dim >= tensor.ndim:
        raise BatchError(f"batch_dims says dimension {dim} for '{name}', which has shape {list(tensor.shape)}")
    rows = tensor.shape[dim]
    if not rows:
        raise InputError(f"argument '{name}' has 0 rows, expected at least 1")
    dims: list[int | None] = []
    for leaf, value in zip(names, tensors, strict=True):
        if leaf in given:
            chosen = given[leaf]
            if chosen is not None and (chosen >= value.ndim or value.shape[chosen] != rows):
                raise BatchError(
                    f"batch_dims says dimension {chosen} for '{leaf}' of shape {list(value.shape)}, "
                    f"but the batch has {rows} rows"
                )
            dims.append(chosen)
        else:
            dims.append(0 if value.ndim and value.shape[0] == rows else None)
    return rows, tuple(dims)


def other_batches(tensors: Sequence[Tensor], dims: Sequence[int | None]) -> Iterator[list[Tensor]]:
    """Yield batches of other numbers of rows than the example: its rows, from the first on and round again."""
    rows = rows_of(tensors, dims)
    for count in dict.fromkeys((1, 2, rows // 2, rows - 1, 2 * rows)):
        if count not in (0, rows):
            yield rows_round(tensors, dims, count)


def model_tensors(model: nn.Module, loss_fn: Any, gm: fx.GraphModule) -> dict[tuple[str, str], Tensor]:
    """Return every parameter, buffer and constant that a graph may read, by (kind, name)."""
    found: dict[tuple[str, str], Tensor] = {}
    modules = [("", model)] + ([("loss_fn.", loss_fn)] if isinstance(loss_fn, nn.Module) else [])
    for prefix, module in modules:
        found.update({("parameter", prefix + n): p for n, p in module.named_parameters()})
        found.update({("buffer", prefix + n): b for n, b in module.named_buffers()})
    found.update({("constant", n): c for n, c in CONSTANTS[gm].items()})
    return found


def operands_of(gm: fx.GraphModule, held: Mapping[tuple[str, str], Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return what a graph takes, in order: inputs, and the tensors that the model holds."""
    source = iter(inputs)
    roles = [ROLE[n] for n in gm.graph.nodes if n.op == "placeholder"]
    return [next(source) if role.kind == "input" else held[role.kind, role.name].detach() for role in roles]


def proof_inputs(tensors: Sequence[Tensor], dims: Sequence[int | None], rows: int) -> list[Tensor]:
    """Return a few rows of the example that differ, spread over the batch; a batch of one row is made into several.

    Rows that are alike in something, say their class, would hide that a sum over the batch has mixed them up.
    """
    if rows == 1:
        return [t if d is None else _grown(t, d) for t, d in zip(tensors, dims, strict=True)]
    count = min(rows, _PROOF_ROWS)
    picked = _differing(tensors, dims, rows, torch.linspace(0, rows - 1, count).round().tolist())
    return [
        t.detach() if d is None else t.detach().index_select(d, picked.to(t.device))
        for t, d in zip(tensors, dims, strict=True)
    ]


def _differing(tensors: Sequence[Tensor], dims: Sequence[int | None], rows: int, wanted: Sequence[float]) -> Tensor:
    """Return as many rows as wanted, which differ in as many inputs as can be, and then near to the wanted ones."""
    inputs = [t.detach().movedim(d, 0).reshape(rows, -1) for t, d in zip(tensors, dims, strict=True) if d is not None]
    numbers = torch.arange(rows)
    picked = [0]
    for place in wanted[1:]:
        near = 1 - (numbers - place).abs() / rows
        differing = torch.stack([(t != t[row]).any(1).cpu() for t in inputs for row in picked]).sum(0)
        score = differing + 0.5 * near
        score[picked] = -1.0
        picked.append(int(score.argmax()))
    return torch.tensor(sorted(picked))


def _grown(tensor: Tensor, dim: int) -> Tensor:
    pieces = [tensor.detach()] * 3
    if tensor.is_floating_point():
        pieces = [piece + 0.1 * i * torch.ones_like(piece) for i, piece in enumerate(pieces)]
    elif tensor.ndim > 1:
        pieces = [piece.roll(i, -1 if dim != tensor.ndim - 1 else 0) for i, piece in enumerate(pieces)]
    return torch.cat(pieces, dim)
