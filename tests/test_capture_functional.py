"""Writes are taken out of an exported graph as the exporter's own pass takes them out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.utils import _pytree as pytree

from efftra_fx import capture_functional, private
from efftra_fx.capture_functional import Functional, functional
from efftra_fx.capture_normal import make_normal

aten = torch.ops.aten


class Norms(nn.Module):
    """Batch norms that write their buffers, and activations in place."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.3)
        self.last = nn.Linear(4 * 4 * 4, 2)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(1)
        h = torch.relu_(self.norm(self.conv(x)))
        h = self.drop(h).flatten(1).to(torch.float64).contiguous()
        result: Tensor = self.last(h.float()).reshape(-1, 1) * self.seen
        return result


class Mean(nn.Module):
    """A buffer that is written from what it was, twice."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        before = x - self.mean
        self.mean.div_(2)
        return before * self.mean


class Slices(nn.Module):
    """Parts of a tensor are written, and the tensor is read."""

    def forward(self, x: Tensor) -> Tensor:
        shifted = x.new_zeros(x.shape)
        shifted[:, 1:] = x[:, :-1]
        shifted[:, 0] = 3
        return shifted * 2


class ViewsRead(nn.Module):
    """A view is read after what it views was written."""

    def forward(self, x: Tensor) -> Tensor:
        doubled = x * 2
        view = doubled.view(-1)
        doubled.add_(1)
        return view * 3


class PartOfBuffer(nn.Module):
    """A part of a buffer is written."""

    queue: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(4, 5))

    def forward(self, x: Tensor) -> Tensor:
        self.queue[0].copy_(x.mean(0))
        return x @ self.queue.T


class Casts(nn.Module):
    """Some of it is computed in another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            h = self.linear(x)
            h = self.linear(h).relu_()
        result: Tensor = h.float() + 1
        return result


class Many(nn.Module):
    """Views, choices and constants of many kinds."""

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, 0)[0], x.T.mT.movedim(0, 1).swapaxes(0, 1)
        first, *_ = torch.unbind(b.unflatten(1, (1, -1)), 1)
        weights = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
        first = torch.nn.functional.dropout(first.clone().masked_fill_(x > 1, 0.5), 0.1, False)
        return torch.einsum("ij,j->i", first, weights).sum() + a.expand(3, *a.shape).matmul(weights).sum().to(x)


MODELS = [Norms, Mean, Slices, ViewsRead, PartOfBuffer, Casts, Many]
WHOLE = [Slices, ViewsRead, PartOfBuffer]  # written through one view and read through another


def exported(model: nn.Module) -> ExportedProgram:
    """Export with any number of rows."""
    x = torch.randn(6, 3, 6, 6) if isinstance(model, Norms) else torch.randn(6, 5)
    rows: Any = Dim.AUTO
    return torch.export.export(model, (x,), dynamic_shapes=({0: rows},), strict=False)


def lines(graph: torch.fx.Graph) -> list[str]:
    """Return what a graph computes of tensors, without checks and what nobody reads."""
    make_normal(graph)
    found = []
    for node in graph.nodes:
        tensors = [v for v in pytree.tree_leaves(node.meta.get("val")) if isinstance(v, Tensor)]
        if node.op == "call_function" and tensors:
            found.append(f"{node.target} {[(t.ndim, t.dtype) for t in tensors]}")
    return found


def traced_sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the list to which every trace from now on adds how many nodes it traces."""
    sizes: list[int] = []
    plain = capture_functional.traced

    def traced(gm: torch.fx.GraphModule) -> Functional:
        sizes.append(sum(n.op == "call_function" for n in gm.graph.nodes))
        return plain(gm)

    monkeypatch.setattr(capture_functional, "traced", traced)
    return sizes


@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.__name__)
def test_a_graph_without_writes_is_the_exporters(model: type[nn.Module]) -> None:
    torch.manual_seed(0)
    program = exported(model())
    names = [str(spec.target) for spec in program.graph_signature.input_specs]
    found = functional(program.graph_module)
    expected = exported(model()).run_decompositions({})
    assert lines(found.gm.graph) == lines(expected.graph_module.graph)
    assert not any(n.target._schema.is_mutable for n in found.gm.graph.nodes if hasattr(n.target, "_schema"))
    assert {names[i] for i in found.written} == set(expected.graph_signature.buffers_to_mutate.values())


@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.__name__)
def test_it_computes_what_the_model_computes(model: type[nn.Module]) -> None:
    torch.manual_seed(0)
    one = model()
    program = exported(one)
    found = functional(program.graph_module)
    x = torch.randn(4, 3, 6, 6) if model is Norms else torch.randn(4, 5)
    own = {**dict(one.named_parameters()), **dict(one.named_buffers()), **program.constants}
    given = [own[str(s.target)].clone() if str(s.target) in own else x for s in program.graph_signature.input_specs]
    torch.manual_seed(1)
    results = found.gm(*given)
    torch.manual_seed(1)
    torch.testing.assert_close(results[-1], one(x))
    names = [str(s.target) for s in program.graph_signature.input_specs]
    for number, value in zip(found.written, results, strict=False):
        torch.testing.assert_close(value, own[names[number]])


@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.__name__)
def test_only_a_write_through_another_view_has_the_whole_graph_traced(
    model: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = traced_sizes(monkeypatch)
    functional(exported(model()).graph_module)
    assert (max(sizes) > 1) == (model in WHOLE)


def test_operators_of_few_parts_need_no_rules() -> None:
    x = torch.randn(6, 4)
    uses = {
        aten.add_: lambda x: x.clone().add_(1),
        aten.batch_norm: lambda x: nn.functional.batch_norm(x, x[0], x[1] ** 2, training=True),
        aten.contiguous: lambda x: x.T.contiguous(),
        aten.detach_: lambda x: x.clone().detach_(),
        aten.div_: lambda x: x.clone().div_(2),
        aten.dropout: lambda x: nn.functional.dropout(x),
        aten.flatten: lambda x: x.flatten(),
        aten.lift_fresh_copy: lambda x: x + torch.tensor([1.0, 2.0, 3.0, 4.0]),
        aten.masked_fill_: lambda x: x.clone().masked_fill_(x > 0, 1.0),
        aten.mul_: lambda x: x.clone().mul_(2),
        aten.relu_: lambda x: x.clone().relu_(),
        aten.reshape: lambda x: x.T.reshape(-1),
        aten.sub_: lambda x: x.clone().sub_(1),
        aten.to: lambda x: x.to(torch.float64),
    }
    assert set(uses) == set(capture_functional._OF_FEW_PARTS)
    for operator, use in uses.items():

        class One(nn.Module):
            def __init__(self, use: Any) -> None:
                super().__init__()
                self.use = use

            def forward(self, x: Tensor) -> Tensor:
                result: Tensor = self.use(x)
                return result

        gm = torch.export.export(One(use), (x,), strict=False).graph_module
        assert any(getattr(n.target, "overloadpacket", None) is operator for n in gm.graph.nodes)
        alone = lines(capture_functional.traced(gm).gm.graph)
        with private.functional_rules(set()):
            assert alone == lines(capture_functional.traced(gm).gm.graph)


def test_a_piece_is_traced_once_for_all_nodes_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    class Again(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(5):
                x = x.reshape(6, 6).tanh()
            return x.to(torch.float64)

    sizes = traced_sizes(monkeypatch)
    functional(torch.export.export(Again(), (torch.randn(6, 6),), strict=False).graph_module)
    assert sizes == [1, 1]
