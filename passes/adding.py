"""Whether a value that parts were seen to add up to adds up by its operator, and not by coincidence.

|S| is the sum of |S_1| and |S_2| while both have one sign, and the largest of some rows is
their sum while the others are zero. So a sum comes from rows by an operator that may add
them, from other sums by one that does not bend them, and never from what mixes rows or from
a count that begins somewhere (and may be at zero now).
"""

from __future__ import annotations

import operator
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import fx

from efftra_fx.meta import BATCH, ROLE
from efftra_fx.walks import ancestors

aten = torch.ops.aten
_PICKS = frozenset(
    {
        "amax", "amin", "aminmax", "max", "min", "argmax", "argmin", "median", "nanmedian", "mode", "kthvalue", "topk",
        "sort", "argsort", "cummax", "cummin", "prod", "linalg_vector_norm", "linalg_norm", "norm", "any", "all",
        "logsumexp", "var", "std", "var_mean", "std_mean",
    }
)  # fmt: skip
_BENDS = frozenset(
    {
        "abs", "relu", "clamp", "clamp_min", "clamp_max", "maximum", "minimum", "fmax", "fmin", "leaky_relu", "prelu",
        "elu", "celu", "selu", "softplus", "hardtanh", "hardswish", "hardshrink", "softshrink", "threshold", "hypot",
        "smooth_l1_loss", "huber_loss", "gelu", "silu", "sqrt", "pow", "where", "floor", "ceil", "round", "trunc",
        "logaddexp", "rrelu_with_noise_functional", "frac", "fmod", "remainder",
    }
)  # fmt: skip

_TIMES = frozenset({"mul", "div", "mm", "bmm", "matmul", "dot", "mv", "index", "index_select", "gather", "embedding"})


def adds_up(node: fx.Node, reading: AbstractSet[fx.Node]) -> bool:
    """Say whether a node may be the sum of what parts give; needs `BATCH` of its operands.

    One that is not `reading` rows may be made of how many there are.
    """
    if node.op != "call_function":
        return True
    made = node
    while made.target is operator.getitem and isinstance(made.args[0], fx.Node):
        made = made.args[0]
    name = _name(made.target)
    operands = [n for n in made.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    kinds = {BATCH[n].kind for n in operands}
    if (name in _PICKS and node in reading) or "mixed" in kinds:
        return False
    if name not in _TIMES and any(map(_is_count, operands)):
        return False
    return not (name in _BENDS and "sum" in kinds)


def _is_count(node: fx.Node) -> bool:
    """Say whether a value that all parts have alike is made of whole numbers that the model keeps."""
    if BATCH[node].kind != "whole":
        return False
    kept = [n for n in ancestors([node]) if n.op == "placeholder" and ROLE[n].kind == "buffer"]
    return any(not n.meta["val"].is_floating_point() for n in kept)


def _name(target: Any) -> str:
    packet = getattr(target, "overloadpacket", None)
    return "" if packet is None else str(packet).rpartition(".")[2]


__all__ = ["adds_up"]
