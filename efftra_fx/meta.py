"""Every metadata key that passes read and write, typed.

Node keys live in `fx.Node.meta`, graph keys in `GraphModule.meta`. Nothing else in
the package touches those dictionaries by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

from torch import fx

T = TypeVar("T")


@dataclass(frozen=True)
class Key(Generic[T]):
    """A named slot of metadata whose values have type T."""

    name: str

    def get(self, holder: fx.Node | fx.GraphModule) -> T | None:
        """Return the value, or None where none was written."""
        return cast("T | None", holder.meta.get(f"efftra.{self.name}"))

    def __getitem__(self, holder: fx.Node | fx.GraphModule) -> T:
        return cast(T, holder.meta[f"efftra.{self.name}"])

    def __setitem__(self, holder: fx.Node | fx.GraphModule, value: T) -> None:
        holder.meta[f"efftra.{self.name}"] = value

    def on(self, holder: fx.Node | fx.GraphModule) -> bool:
        """Say whether a value was written."""
        return f"efftra.{self.name}" in holder.meta


@dataclass(frozen=True)
class Role:
    """What a placeholder stands for.

    `kind` is "parameter", "buffer", "constant" or "input"; `name` is the model's own
    name of it (for an input: the argument's name in `forward`, with a path into
    containers).
    """

    kind: str
    name: str
    trainable: bool = False


@dataclass(frozen=True)
class Split:
    """How a node's value follows the batch.

    `kind` is
      "rows":  along `dim`, each sample owns `per_row` consecutive elements;
      "whole": the same for every part of the batch;
      "sum":   parts of the batch give partial sums that add up;
      "mixed": none of these (it depends on samples together);
      "local": numbers the rows of a part from zero, so only its own part can use it.
    """

    kind: str
    dim: int = 0
    per_row: int = 1


@dataclass(frozen=True)
class Outputs:
    """What the graph's outputs are, in order: loss parts, new buffer values, and `parts` of what buffers become.

    The latter, named by their nodes, are joined over the batch, and new values of further buffers made of them.
    """

    loss: int
    buffers: tuple[str, ...]
    parts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Spec:
    """Type of a value: dtype and shape, each dimension a sympy expression or an int."""

    dtype: str
    shape: tuple[Any, ...]
    operations: Any = 0
    bytes: Any = 0


ROLE: Key[Role] = Key("role")  # trace: on every placeholder
OUTPUTS: Key[Outputs] = Key("outputs")  # trace: on the graph
SPEC: Key[Spec] = Key("spec")  # annotate-shapes: on every tensor node
BATCH: Key[Split] = Key("batch")  # prove-batch: on every node
FREE: Key[bool] = Key("free")  # prove-batch: needs no parameter, so any stage can compute it from the inputs
BLOCK: Key[int] = Key("block")  # blocks: on every node that belongs to a block
STAGE: Key[int] = Key("stage")  # split-stages: on every node with a block
REDUCED: Key[str] = Key("reduced")  # declare-reduction: which part of the declared loss this is
PATH: Key[str] = Key("path")  # trace: module path that a node came from
SOURCE: Key[str] = Key("source")  # trace: the user's source line
CONSTANTS: Key[Mapping[str, Any]] = Key("constants")  # trace: on the graph, constant tensors by name
PLACED: Key[str] = Key("placed")  # shard: how the value lies on the ranks of a tensor group
