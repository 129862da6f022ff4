"""Stages differentiated ahead of time give what autograd gives."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from stage_models import MODELS, Case, export_case, has_gradient
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

from efftra_fx.errors import DifferentiateError
from efftra_fx.passes.deferred import finish
from efftra_fx.passes.differentiate import Differentiated, differentiate

aten = torch.ops.aten

# Autograd takes other formulas for these on real tensors than on fake ones; they differ by rounding.
ROUNDED = {"gru", "norms"}


def differentiate_case(case: Case, **options: Any) -> Differentiated:
    output = next(iter(reversed(case.gm.graph.nodes))).args[0]
    grad_outputs = [index in case.results and has_gradient(node.meta["val"]) for index, node in enumerate(output)]
    return differentiate(
        case.gm, case.values, wrt=case.wrt, grad_outputs=grad_outputs, weight_inputs=case.weights, **options
    )


def eager(case: Case) -> tuple[list[Tensor], list[Tensor], list[Tensor | None], list[Tensor | None]]:
    """Return outputs, gradients handed in, input gradients and weight gradients of plain autograd."""
    torch.manual_seed(1)
    inputs = [value.clone().requires_grad_(has_gradient(value)) for value in case.inputs]
    outputs = tree_leaves(case.model(*inputs))
    random = torch.Generator().manual_seed(2)
    grads = [torch.randn(out.shape, dtype=out.dtype, generator=random) for out in outputs if has_gradient(out)]
    named = dict(case.model.named_parameters(remove_duplicate=False))
    sources = [value for value in inputs if has_gradient(value)]
    weights = [named[name] for name in case.parameters]
    roots = [(out, grad) for out, grad in zip(filter(has_gradient, outputs), grads, strict=True) if out.requires_grad]
    found = torch.autograd.grad(
        [out for out, _ in roots], [*sources, *weights], [grad for _, grad in roots], allow_unused=True
    )
    return [out.detach() for out in outputs], grads, list(found[: len(sources)]), list(found[len(sources) :])


def assert_equal(found: Sequence[Tensor | None], wanted: Sequence[Tensor | None], exact: bool = True) -> None:
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert one.dtype == other.dtype and one.shape == other.shape
            scale = float(other.abs().max()) if other.numel() and has_gradient(other) else 0.0
            torch.testing.assert_close(one, other, rtol=0, atol=0 if exact else 1e-12 * scale)


def weights_of(case: Case, gradients: Sequence[Tensor | None]) -> list[Tensor]:
    """Return something to add gradients into, for each weight that has one."""
    random = torch.Generator().manual_seed(3)
    return [torch.randn(g.shape, dtype=g.dtype, generator=random) for g in gradients if g is not None]


@pytest.mark.parametrize("recompute", [False, True], ids=["saved", "recomputed"])
@pytest.mark.parametrize("name", [name for name in MODELS if name not in {"no_grad", "gpt2", "bert", "t5"}])
def test_every_form_gives_what_autograd_gives(name: str, recompute: bool) -> None:
    case = export_case(name)
    exact = name not in ROUNDED
    outputs, grads, input_gradients, weight_gradients = eager(case)
    found = differentiate_case(case, recompute=recompute)
    torch.manual_seed(1)
    made, stash = found.forward.function(case.values)
    assert_equal([made[index] for index in case.results], outputs, exact)
    kept = tuple(stash)

    inputs, weights = found.backward.function(stash, list(grads))
    assert stash == []
    assert_equal(inputs, input_gradients, exact)
    assert_equal(weights, weight_gradients, exact)
    assert [one is not None for one in weights] == list(found.weight_gradients)

    again, weight_stash = found.backward_input.function(list(kept), list(grads))
    assert_equal(again, inputs)
    assert_equal(found.backward_weight.function(weight_stash), weights)

    real = [one for one in weights if one is not None]
    before = weights_of(case, weights)
    into = [one.clone() for one in before]
    _, sums = found.backward.accumulate(list(kept), list(grads), into)
    assert all(one is buffer for one, buffer in zip((s for s in sums if s is not None), into, strict=True))
    tolerance = dict(rtol=1e-2, atol=1e-2) if name == "autocast" else dict(rtol=1e-11, atol=1e-12)
    for one, start, gradient in zip(into, before, real, strict=True):
        torch.testing.assert_close(one, start + gradient, **tolerance)  # type: ignore[arg-type]
    _, over = found.backward.overwrite(list(kept), list(grads), into)
    assert_equal(over, weights, exact=False)


def test_no_gradient_flows_out_of_a_region_without_gradients() -> None:
    case = export_case("no_grad", decompose=False)
    assert any("set_grad_enabled" in str(node.target) for node in case.gm.graph.nodes)
    outputs, grads, input_gradients, weight_gradients = eager(case)
    found = differentiate_case(case)
    made, stash = found.forward.function(case.values)
    inputs, weights = found.backward.function(stash, list(grads))
    assert_equal(made, outputs)
    assert_equal(inputs, input_gradients)
    assert_equal(weights, weight_gradients)
    assert found.weight_gradients == (False, False, True, True)


def test_a_region_under_autocast_may_stay_a_region() -> None:
    case = export_case("autocast", decompose=False)
    assert any("autocast" in str(node.target) for node in case.gm.graph.nodes)
    outputs, grads, input_gradients, weight_gradients = eager(case)
    found = differentiate_case(case)
    made, stash = found.forward.function(case.values)
    inputs, weights = found.backward.function(stash, list(grads))
    assert_equal(made, outputs)
    assert_equal([*inputs, *weights], [*input_gradients, *weight_gradients])


def test_autocast_around_a_step_changes_nothing() -> None:
    case = export_case("mlp")
    found = differentiate_case(case)
    outputs, grads, _, weight_gradients = eager(case)
    with torch.autocast("cpu", torch.bfloat16):
        made, stash = found.forward.function(case.values)
        _, weights = found.backward.function(stash, list(grads))
    assert_equal(made, outputs)
    assert_equal(weights, weight_gradients)


@pytest.mark.parametrize("name", ["gpt2", pytest.param("bert", marks=pytest.mark.long), "t5"])
def test_hugging_face_models_with_tied_weights_give_what_autograd_gives(name: str) -> None:
    case = export_case(name)
    named = dict(case.model.named_parameters(remove_duplicate=False))
    tensors = {id(named[parameter]): named[parameter] for parameter in case.parameters}
    torch.manual_seed(1)
    loss = case.model(*case.inputs)
    wanted = dict(zip(tensors, torch.autograd.grad(loss, list(tensors.values())), strict=True))
    for recompute in (False, True):
        found = differentiate_case(case, recompute=recompute)
        torch.manual_seed(1)
        made, stash = found.forward.function(case.values)
        assert torch.equal(made[case.results[0]], loss)
        _, weights = found.backward.function(stash, [torch.ones_like(loss)])
        sums: dict[int, Tensor] = {}
        for parameter, gradient in zip(case.parameters, weights, strict=True):
            if gradient is not None:
                key = id(named[parameter])
                sums[key] = sums[key] + gradient if key in sums else gradient
        assert sums.keys() == wanted.keys()
        assert_equal(list(sums.values()), [wanted[key] for key in sums], exact=False)


def linear() -> fx.GraphModule:
    """y = x wᵀ, z = 2 y, and one input that only z needs."""
    graph = fx.Graph()
    w, x, unused, count = (graph.placeholder(name) for name in ("w", "x", "unused", "count"))
    y = graph.call_function(aten.linear.default, (x, w))
    z = graph.call_function(aten.mul.Tensor, (y, 2))
    graph.output((y, z, count, None))
    return fx.GraphModule(torch.nn.Module(), graph)


def test_a_linear_layer_reads_as_expected(golden: Callable[[str, str], None]) -> None:
    shapes = [torch.empty(shape, device="meta") for shape in ((3, 2), (4, 2), (5,))]
    found = differentiate(
        linear(),
        [*shapes, 7],
        wrt=(True, True, True, False),
        grad_outputs=(True, True, False, False),
        weight_inputs=(True, False, True, False),
    )
    parts = [found.forward.function, found.backward.function, found.backward.accumulate]
    parts += [found.backward_input.function, found.backward_weight.function]
    golden("differentiated_linear.txt", "\n".join(part.source for part in parts))
    assert found.input_gradients == (True,)
    assert found.weight_gradients == (True, False)
    assert found.kept_inputs == (0, 1)
    assert found.saved_bytes == 0


def test_plain_numbers_are_built_in() -> None:
    w, x = torch.randn(3, 2), torch.randn(4, 2)
    found = differentiate(
        linear(),
        [w, x, torch.empty(5), 7],
        wrt=(True, False, False, False),
        grad_outputs=(True, False, False, False),
        weight_inputs=(True, False, False, False),
    )
    made, _ = found.forward.function([w, x, None, 7])
    assert made[2:] == [7, None]


def test_outputs_without_incoming_gradient_need_none() -> None:
    x, w = torch.randn(4, 2), torch.randn(3, 2)
    flags: dict[str, Any] = dict(wrt=(True, True, False, False), weight_inputs=(True, False, False, False))
    found = differentiate(linear(), [w, x, torch.empty(5), 0], grad_outputs=(False, True, False, False), **flags)
    _, stash = found.forward.function([w, x, None, 0])
    inputs, weights = found.backward.function(stash, [torch.ones(4, 3)])
    torch.testing.assert_close(inputs[0], 2 * torch.ones(4, 3) @ w)
    none = differentiate(linear(), [w, x, torch.empty(5), 0], grad_outputs=(False,) * 4, **flags)
    _, stash = none.forward.function([w, x, None, 0])
    assert none.backward.function(stash, []) == ([None], [None])


def test_a_saved_value_and_its_views_are_counted_once() -> None:
    graph = fx.Graph()
    w, x = graph.placeholder("w"), graph.placeholder("x")
    hidden = graph.call_function(aten.mul.Tensor, (w, x))
    flat = graph.call_function(aten.view.default, (hidden, [32]))
    graph.output(
        (graph.call_function(aten.mul.Tensor, (hidden, hidden)), graph.call_function(aten.sin.default, (flat,)))
    )
    found = differentiate(
        fx.GraphModule(torch.nn.Module(), graph),
        [torch.empty(4, 8), torch.empty(4, 8)],
        wrt=(True, True),
        grad_outputs=(True, True),
        weight_inputs=(True, False),
    )
    assert found.saved_bytes == 4 * 32


def test_recomputing_keeps_only_inputs_and_masks() -> None:
    kept = differentiate_case(export_case("dropout"))
    again = differentiate_case(export_case("dropout"), recompute=True)
    plain = differentiate_case(export_case("blocks"), recompute=True)
    assert plain.saved_bytes == 0
    assert 0 < again.saved_bytes < kept.saved_bytes


def test_weight_gradients_have_memory_and_strides_of_their_own() -> None:
    graph = fx.Graph()
    a, b, c, x = (graph.placeholder(name) for name in ("a", "b", "c", "x"))
    total = graph.call_function(aten.add.Tensor, (a, b))
    wide = graph.call_function(aten.expand.default, (c, [4, 8]))
    total = graph.call_function(aten.add.Tensor, (total, graph.call_function(aten.add.Tensor, (wide, x))))
    graph.output((total,))
    one, row = torch.randn(4, 8), torch.randn(1, 8)
    found = differentiate(
        fx.GraphModule(torch.nn.Module(), graph),
        [one, one.t().contiguous().t(), row, one],
        wrt=(True,) * 4,
        grad_outputs=(True,),
        weight_inputs=(True, True, True, False),
    )
    _, stash = found.forward.function([one, one, row, one])
    handed = torch.randn(4, 8)
    _, weights = found.backward.function(stash, [handed])
    places = {weight.untyped_storage().data_ptr() for weight in weights}
    assert len(places) == 3 and handed.untyped_storage().data_ptr() not in places
    assert [weight.stride() for weight in weights] == [(8, 1), (1, 4), (8, 1)]


def test_weights_may_be_trained_with_what_comes_out() -> None:
    case = export_case("mlp")
    found = differentiate_case(case)
    _, grads, _, _ = eager(case)
    values = [value.clone().requires_grad_(flag) for value, flag in zip(case.values, case.weights, strict=True)]
    made, stash = found.forward.function(values)
    _, weights = found.backward.function(stash, list(grads))
    for value, gradient in zip((v for v, flag in zip(values, case.weights, strict=True) if flag), weights, strict=True):
        value.grad = gradient
    torch.optim.AdamW(value for value in values if value.requires_grad).step()
    assert not made[0].is_inference() and not made[0].requires_grad


def test_large_weight_gradients_can_wait_for_all_micro_batches() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 64), torch.nn.Linear(64, 3)
    )
    parameters = [p.detach() for p in model.parameters()]
    terms, totals, seen = [], None, []
    for rows in (2, 3):
        x = torch.randn(rows, 64)
        gm = torch.export.export(model, (x,), strict=False).run_decompositions({}).graph_module
        found = differentiate(
            gm, [*parameters, x], wrt=(True,) * 7, grad_outputs=(True,), weight_inputs=(*(True,) * 6, False)
        )
        assert [product.weight for product in found.products] == [0, 2]
        for _ in range(2):
            made, stash = found.forward.function([*parameters, x])
            grad = torch.randn_like(made[0])
            kept = list(stash)
            _, weight_stash = found.backward_input.function(list(stash), [grad])
            _, weights, kept_terms = found.backward_deferring.function(stash, [grad])
            assert [weight is None for weight in weights] == [True, False, True, False, False, False]
            later, same_terms = found.weight_deferring.function(weight_stash)
            assert_equal(later, weights)
            assert_equal(same_terms, kept_terms)
            assert found.terms_bytes > 0
            terms.append(kept_terms)
            _, whole = found.backward.function(kept, [grad])
            totals = whole if totals is None else [a + b for a, b in zip(totals, whole, strict=True)]
            seen.append(len(kept_terms))
    assert totals is not None and seen == [4] * 4
    for one, index in zip(finish(found.products, terms), (0, 2), strict=True):
        torch.testing.assert_close(one, totals[index])
    into = [torch.ones_like(totals[0]), None]
    first, second = finish(found.products, terms, into)
    assert first is into[0]
    torch.testing.assert_close(first, 1 + totals[0])
    torch.testing.assert_close(second, totals[2])


def test_a_convolution_leaves_its_weight_for_later() -> None:
    found = differentiate_case(export_case("conv"))
    masks = [
        [node.args[-1] for node in part.graph.graph.nodes if node.target is aten.convolution_backward.default]
        for part in (found.backward_input, found.backward_weight)
    ]
    assert masks == [[[True, False, False]] * 2, [[False, True, True]] * 2]


def test_random_numbers_are_drawn_as_eager_draws_them_and_tracing_draws_none() -> None:
    case = export_case("dropout")
    torch.manual_seed(5)
    before = torch.get_rng_state()
    found = differentiate_case(case)
    assert torch.equal(before, torch.get_rng_state())
    case.model(*case.inputs)
    after = torch.get_rng_state()
    torch.set_rng_state(before)
    found.forward.function(case.values)
    assert torch.equal(after, torch.get_rng_state())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(wrt=(True, True, False)), "wrt has 3 flags and weight_inputs 4"),
        (dict(weight_inputs=(True, False, False, True)), "input 3 is flagged as a weight but not in wrt"),
        (dict(grad_outputs=(True,)), "4 outputs, but grad_outputs has 1 flags"),
        (dict(grad_outputs=(True, True, True, False)), "output 2 is int, which has no gradient"),
        (dict(wrt=(True, True, True, True)), "input count is int, which has no gradient"),
        (dict(example_inputs=[torch.empty(3, 2)]), "the graph has 4 inputs, but 1 examples"),
    ],
)
def test_flags_that_do_not_fit_are_refused(change: dict[str, Any], words: str) -> None:
    options: dict[str, Any] = dict(
        example_inputs=[torch.empty(3, 2), torch.empty(4, 2), torch.empty(5), 7],
        wrt=(True, True, False, False),
        grad_outputs=(True, True, False, False),
        weight_inputs=(True, False, False, False),
    )
    options.update(change)
    with pytest.raises(DifferentiateError, match=words):
        differentiate(linear(), **options)


def test_shapes_that_depend_on_values_are_refused() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    found = graph.call_function(aten.nonzero.default, (x,))
    graph.output((found,))
    with pytest.raises(DifferentiateError, match="node nonzero_default .* depends on values"):
        differentiate(
            fx.GraphModule(torch.nn.Module(), graph),
            [torch.empty(3)],
            wrt=(False,),
            grad_outputs=(False,),
            weight_inputs=(False,),
        )


# Random graphs over 4 × 4 values: views, products, reductions, values used twice, several outputs.
UNARY: list[Callable[[fx.Graph, fx.Node], fx.Node]] = [
    lambda g, a: g.call_function(aten.t.default, (a,)),
    lambda g, a: g.call_function(aten.relu.default, (a,)),
    lambda g, a: g.call_function(aten.tanh.default, (a,)),
    lambda g, a: g.call_function(aten.silu.default, (a,)),
    lambda g, a: g.call_function(aten.softmax.int, (a, 0)),
    lambda g, a: g.call_function(aten.reshape.default, (g.call_function(aten.reshape.default, (a, [2, 8])), [4, 4])),
    lambda g, a: g.call_function(aten.expand.default, (g.call_function(aten.sum.dim_IntList, (a, [0], True)), [4, 4])),
    lambda g, a: g.call_function(aten.cat.default, ([_slice(g, a, 2, 4), _slice(g, a, 0, 2)], 0)),
    lambda g, a: g.call_function(operator.getitem, (g.call_function(aten.split.Tensor, (_twice(g, a), 4, 1)), 1)),
    lambda g, a: g.call_function(aten.detach.default, (a,)),
    lambda g, a: g.call_function(aten.clone.default, (a,)),
    lambda g, a: g.call_function(aten.dropout.default, (a, 0.5, True)),
    lambda g, a: g.call_function(aten.layer_norm.default, (a, [4])),
    lambda g, a: g.call_function(aten.cumsum.default, (a, 1)),
]
BINARY: list[Any] = [
    lambda g, a, b: g.call_function(aten.add.Tensor, (a, b)),
    lambda g, a, b: g.call_function(aten.sub.Tensor, (a, b), {"alpha": 2}),
    lambda g, a, b: g.call_function(aten.mul.Tensor, (a, b)),
    lambda g, a, b: g.call_function(aten.matmul.default, (a, b)),
    lambda g, a, b: g.call_function(aten.linear.default, (a, b)),
    lambda g, a, b: g.call_function(aten.where.self, (g.call_function(aten.gt.Tensor, (a, b)), a, b)),
]


def _slice(graph: fx.Graph, value: fx.Node, start: int, end: int) -> fx.Node:
    return graph.call_function(aten.slice.Tensor, (value, 0, start, end))


def _twice(graph: fx.Graph, value: fx.Node) -> fx.Node:
    return graph.call_function(aten.cat.default, ([value, value], 1))


def random_graph(draw: random.Random) -> fx.GraphModule:
    graph = fx.Graph()
    values = [graph.placeholder(f"in_{index}") for index in range(5)]
    for _ in range(draw.randint(1, 12)):
        if draw.random() < 0.5:
            values.append(draw.choice(UNARY)(graph, draw.choice(values)))
        else:
            values.append(draw.choice(BINARY)(graph, draw.choice(values), draw.choice(values[-4:])))
    graph.output(tuple(draw.choice(values[-6:]) for _ in range(3)))
    return fx.GraphModule(torch.nn.Module(), graph)


def check_random_graph(seed: int) -> None:
    draw = random.Random(seed)
    gm = random_graph(draw)
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randn(4, 4, dtype=torch.float64, generator=generator) for _ in range(5)]
    wrt = [draw.random() < 0.7 for _ in values]
    weights = [flag and draw.random() < 0.6 for flag in wrt]
    grad_outputs = [draw.random() < 0.8 for _ in range(3)]
    recompute = draw.random() < 0.3
    handed = [torch.randn(4, 4, dtype=torch.float64, generator=generator) for flag in grad_outputs if flag]

    leaves = [value.clone().requires_grad_(flag) for value, flag in zip(values, wrt, strict=True)]
    torch.manual_seed(seed)
    outputs = gm(*leaves)
    roots = [out for out, flag in zip(outputs, grad_outputs, strict=True) if flag]
    pairs = [(out, grad) for out, grad in zip(roots, handed, strict=True) if out.requires_grad]
    sources = [leaf for leaf in leaves if leaf.requires_grad]
    gradients: Any = [None] * len(sources)
    if pairs and sources:
        gradients = torch.autograd.grad([p[0] for p in pairs], sources, [p[1] for p in pairs], allow_unused=True)
    flags = [weight for weight, flag in zip(weights, wrt, strict=True) if flag]
    wanted_inputs = [grad for grad, weight in zip(gradients, flags, strict=True) if not weight]
    wanted_weights = [grad for grad, weight in zip(gradients, flags, strict=True) if weight]

    found = differentiate(gm, values, wrt=wrt, grad_outputs=grad_outputs, weight_inputs=weights, recompute=recompute)
    torch.manual_seed(seed)
    made, stash = found.forward.function(values)
    assert_equal(made, outputs)
    kept = tuple(stash)
    inputs, weight_gradients = found.backward.function(list(kept), list(handed))
    assert_equal(inputs, wanted_inputs, exact=False)
    assert_equal(weight_gradients, wanted_weights, exact=False)
    inputs, weight_stash = found.backward_input.function(list(kept), list(handed))
    assert_equal(inputs, wanted_inputs, exact=False)
    assert_equal(found.backward_weight.function(list(weight_stash)), wanted_weights, exact=False)
    real = [grad for grad in wanted_weights if grad is not None]
    into = [torch.ones_like(grad) for grad in real]
    found.backward.accumulate(list(kept), list(handed), into)
    found.backward_weight.accumulate(list(weight_stash), into)
    for one, grad in zip(into, real, strict=True):
        torch.testing.assert_close(one, 1 + 2 * grad, rtol=1e-9, atol=1e-9)
    found.backward.overwrite(list(kept), list(handed), into)
    assert_equal(into, real, exact=False)
    assert all(torch.equal(value, leaf.detach()) for value, leaf in zip(values, leaves, strict=True))


@settings(max_examples=60)
@example(0)
@given(st.integers(0, 2**31))
def test_random_graphs_are_differentiated_as_autograd_does(seed: int) -> None:
    check_random_graph(seed)


@pytest.mark.long
@settings(max_examples=5000)
@given(st.integers(0, 2**31))
def test_many_random_graphs_are_differentiated_as_autograd_does(seed: int) -> None:
    check_random_graph(seed)


def test_a_tensor_that_the_graph_holds_keeps_its_values() -> None:
    held = torch.randn(3, dtype=torch.float64)

    def scaled(x: Tensor) -> tuple[Tensor]:
        return ((x * held).sin(),)

    x = torch.randn(2, 3, dtype=torch.float64)
    parts = differentiate(make_fx(scaled)(x), [x.to("meta")], wrt=(True,), grad_outputs=(True,), weight_inputs=(False,))
    (found,), stash = parts.forward.function([x])
    (gradient,), _ = parts.backward.function(stash, [torch.ones(2, 3, dtype=torch.float64)])
    assert torch.equal(found, scaled(x)[0])
    assert torch.allclose(gradient, held * (x * held).cos(), rtol=1e-14)
