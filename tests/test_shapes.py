"""Shapes, bytes and operations are expressions in the number of rows."""

from __future__ import annotations

from typing import Any

import pytest
import sympy
import torch
from models import ZOO
from rig import rig_of
from torch import fx
from torch.utils.flop_counter import FlopCounterMode

from efftra_fx.meta import SPEC
from efftra_fx.passes.shapes import elements, is_heavy, operations, spec_of

aten = torch.ops.aten


def nodes_of(name: str) -> dict[str, fx.Node]:
    """Return the nodes of a captured model by name."""
    return {n.name: n for n in rig_of(ZOO[name]).first.built.front.gm.graph.nodes}


def at(expression: Any, rows: int) -> int:
    """Return what an expression is for so many rows."""
    return int(sympy.sympify(expression).subs({s: rows for s in sympy.sympify(expression).free_symbols}))


def test_a_linear_layer_has_its_rows_as_a_symbol() -> None:
    spec = SPEC[nodes_of("mlp")["linear"]]
    assert spec.dtype == "float64" and len(spec.shape) == 2 and spec.shape[1] == 8
    (symbol,) = spec.shape[0].free_symbols
    assert spec.shape[0] == symbol
    assert spec.bytes == 8 * 8 * symbol
    assert spec.operations == 2 * 6 * 8 * symbol


def test_every_tensor_has_the_size_that_it_has_when_run() -> None:
    rig = rig_of(ZOO["unet"])
    front, batch = rig.first.built.front, rig.example.data(3)
    inputs = {"images": batch.args[0], "target": batch.target}
    seen = {}

    class Watch(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            seen[n] = super().run_node(n)
            return seen[n]

    from efftra_fx.passes.comm import operands_of

    Watch(front.gm).run(*operands_of(front.gm, front.tensors, inputs))
    for node, value in seen.items():
        if SPEC.on(node) and isinstance(value, torch.Tensor):
            spec = SPEC[node]
            assert tuple(at(size, 3) for size in spec.shape) == tuple(value.shape)
            assert at(spec.bytes, 3) == value.numel() * value.element_size()
            assert spec.dtype == str(value.dtype).removeprefix("torch.")


@pytest.mark.parametrize("name", ["mlp", "vgg", "resnet"])
def test_operations_of_matrix_products_are_those_that_torch_counts(name: str) -> None:
    rig = rig_of(ZOO[name])
    heavy = [n for n in nodes_of(name).values() if is_heavy(n)]
    batch = rig.example.data(5)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        rig.model(*batch.args)
    assert sum(at(operations(n), 5) for n in heavy) == counter.get_total_flops()


def test_views_are_free_and_everything_else_costs_its_elements() -> None:
    for name in ("unet", "mlp"):
        for node in nodes_of(name).values():
            value = node.meta.get("val")
            if node.target in (aten.view.default, aten.reshape.default, aten.permute.default, aten.detach.default):
                assert operations(node) == 0
            elif node.target in (aten.silu.default, aten.relu.default, aten.tanh.default):
                assert isinstance(value, torch.Tensor) and operations(node) == elements(value)
            elif node.op != "call_function":
                assert operations(node) == 0 and not is_heavy(node)


def test_a_concrete_tensor_has_numbers() -> None:
    spec = spec_of(torch.empty(3, 4, dtype=torch.bfloat16))
    assert spec.dtype == "bfloat16" and spec.shape == (3, 4) and spec.bytes == 24 and spec.operations == 0
