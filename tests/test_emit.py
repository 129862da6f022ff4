"""Generated functions compute their graph, free early, and call the operators that the graph names."""

from __future__ import annotations

import threading
import traceback
import weakref
from collections.abc import Callable
from operator import getitem
from typing import Any

import pytest
import torch
from stage_models import MODELS, export_case
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from efftra_fx import private
from efftra_fx.emit import emit
from efftra_fx.errors import EmitError
from efftra_fx.operators import Spelling, reaches, spell
from efftra_fx.passes.joint import record_joint

aten = torch.ops.aten


def graph_of(build: Callable[..., Any], *names: str) -> fx.GraphModule:
    graph = fx.Graph()
    graph.output(build(graph, *(graph.placeholder(name) for name in names)))
    return fx.GraphModule(torch.nn.Module(), graph)


def affine(graph: fx.Graph, x: fx.Node, w: fx.Node, b: fx.Node) -> Any:
    product = graph.call_function(aten.mm.default, (x, w), name="product")
    return (graph.call_function(aten.add.Tensor, (product, b), {"alpha": 2}, name="total"), 3, None)


def test_the_smallest_function_reads_like_its_graph() -> None:
    run = emit(graph_of(affine, "x", "w", "b"), name="affine")
    assert run.source == (
        "def affine(x, w, b):\n"
        "    with below_autograd():\n"
        "        product = mm(x, w)\n"
        "        del x, w\n"
        "        total = add_Tensor(product, b, alpha=2)\n"
        "        del product, b\n"
        "        return (total, 3, None)\n"
    )
    x, w, b = torch.randn(2, 3), torch.randn(3, 4), torch.randn(4)
    total, three, none = run(x, w, b)
    assert torch.equal(total, x @ w + 2 * b) and three == 3 and none is None


def test_groups_come_and_go_as_sequences() -> None:
    run = emit(
        graph_of(affine, "x", "w", "b"),
        takes=(1, 2),
        gives=(1, 2),
        consumes=(True, False),
        groups=("inputs", "weights"),
    )
    x, w, b = torch.randn(2, 3), torch.randn(3, 4), torch.randn(4)
    given, weights = [x], [w, b]
    first, rest = run(given, weights)
    assert torch.equal(first[0], x @ w + 2 * b) and rest == [3, None]
    assert given == [] and len(weights) == 2
    assert "def run(inputs, weights):" in run.source


def test_values_are_freed_at_their_last_use() -> None:
    alive: list[int] = []
    made: list[weakref.ref[Tensor]] = []

    def watch(value: Tensor) -> Tensor:
        alive.append(sum(ref() is not None for ref in made))
        result = value + 1
        made.append(weakref.ref(result))
        return result

    def chain(graph: fx.Graph, x: fx.Node) -> Any:
        for _ in range(5):
            x = graph.call_function(watch, (x,))
        return (x,)

    run = emit(graph_of(chain, "x"), takes=(1,), gives=(1,), consumes=(True,))
    run([torch.zeros(3)])
    assert alive == [0, 1, 1, 1, 1]


def test_unused_results_of_one_call_are_not_kept() -> None:
    def normal(graph: fx.Graph, x: fx.Node) -> Any:
        three = graph.call_function(aten.native_layer_norm.default, (x, [4], None, None, 1e-5), name="three")
        three.meta["val"] = (1, 2, 3)
        out = graph.call_function(getitem, (three, 0), name="out")
        deviation = graph.call_function(getitem, (three, 2), name="deviation")
        return (out, deviation)

    run = emit(graph_of(normal, "x"))
    assert "out, unused, deviation = native_layer_norm(x, [4], None, None, 1e-05); del unused" in run.source
    x = torch.randn(3, 4)
    wanted = torch.native_layer_norm(x, [4], None, None, 1e-5)
    assert torch.equal(run(x)[0], wanted[0]) and torch.equal(run(x)[1], wanted[2])


def test_constants_of_every_kind_are_written() -> None:
    constant = torch.arange(4.0)

    def build(graph: fx.Graph, x: fx.Node) -> Any:
        held = graph.get_attr("held")
        cast = graph.call_function(aten._to_copy.default, (x,), {"dtype": torch.float64, "device": torch.device("cpu")})
        total = graph.call_function(aten.add.Tensor, (cast, held))
        capped = graph.call_function(aten.clamp.default, (total, float("-inf"), 2.5))
        copied = graph.call_function(aten.clone.default, (capped,), {"memory_format": torch.contiguous_format})
        return copied

    root = torch.nn.Module()
    root.register_buffer("held", constant)
    graph = fx.Graph()
    graph.output(build(graph, graph.placeholder("x")))
    run = emit(fx.GraphModule(root, graph))
    result = run(torch.ones(4))
    assert result.dtype == torch.float64
    assert result.tolist() == [1.0, 2.0, 2.5, 2.5]


def test_names_of_nodes_do_not_hide_operators() -> None:
    def build(graph: fx.Graph, mm: fx.Node, add_Tensor: fx.Node) -> Any:
        return (graph.call_function(aten.add.Tensor, (graph.call_function(aten.mm.default, (mm, mm)), add_Tensor)),)

    one = torch.randn(3, 3)
    assert torch.equal(emit(graph_of(build, "mm", "add_Tensor"))(one, one)[0], one @ one + one)


def test_a_traceback_shows_the_generated_line() -> None:
    run = emit(graph_of(affine, "x", "w", "b"), name="shown")
    try:
        run(torch.ones(2, 3), torch.ones(2, 3), torch.ones(3))
    except RuntimeError:
        text = traceback.format_exc()
    assert "product = mm(x, w)" in text and "<efftra shown " in text


def test_nothing_is_recorded_for_autograd_and_results_are_normal_tensors() -> None:
    w = torch.nn.Parameter(torch.randn(3, 4))
    total, *_ = emit(graph_of(affine, "x", "w", "b"))(torch.randn(2, 3), w, torch.randn(4))
    assert not total.requires_grad and not total.is_inference()
    total.requires_grad_().sum().backward()
    w.grad = torch.zeros_like(w)
    assert torch.is_grad_enabled()


def test_threads_may_run_one_function_at_once() -> None:
    run = emit(graph_of(affine, "x", "w", "b"))
    w, b = torch.randn(3, 4), torch.randn(4)
    inputs = [torch.randn(2, 3) for _ in range(8)]
    results: dict[int, Tensor] = {}

    def work(index: int) -> None:
        for _ in range(20):
            results[index] = run(inputs[index], w, b)[0]

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(results[index], x @ w + 2 * b) for index, x in enumerate(inputs))


def add_into(build: Callable[..., Any], *names: str, overwrite: bool = False, **values: Tensor) -> tuple[str, Any]:
    """Add output 0 into ones; return the source and the sum."""
    gm = graph_of(build, *names)
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            node.meta["val"] = values[node.name]
        elif node.op == "call_function":
            node.meta["val"] = node.target(*tree_map(_value, node.args), **node.kwargs)
    run = emit(gm, into=[0], overwrite=overwrite)
    wanted = gm(**values)[0]
    into = torch.ones_like(wanted)
    result = run(*values.values(), [into])[0]
    assert result is into
    torch.testing.assert_close(result, wanted if overwrite else 1 + wanted)
    return run.source, result


def _value(node: Any) -> Any:
    return node.meta["val"] if isinstance(node, fx.Node) else node


@pytest.mark.parametrize("overwrite", [False, True], ids=["add", "overwrite"])
def test_a_product_is_added_by_the_product_itself(overwrite: bool) -> None:
    source, _ = add_into(
        lambda g, x, y: (g.call_function(aten.mm.default, (x, y)),),
        "x", "y", overwrite=overwrite, x=torch.randn(3, 4), y=torch.randn(4, 2),
    )  # fmt: skip
    assert ("torch_mm(x, y, out=into_0_mm_default)" if overwrite else "into_0_mm_default.addmm_(x, y)") in source


@pytest.mark.parametrize("overwrite", [False, True], ids=["add", "overwrite"])
@pytest.mark.parametrize("padding", [-1, 2])
def test_a_lookup_adds_only_the_rows_it_looked_up(padding: int, overwrite: bool) -> None:
    source, _ = add_into(
        lambda g, x, i: (g.call_function(aten.embedding_dense_backward.default, (x, i, 5, padding, False)),),
        "x", "i", overwrite=overwrite, x=torch.randn(2, 3, 4), i=torch.tensor([[0, 2, 2], [4, 0, 0]]),
    )  # fmt: skip
    assert "index_add_" in source and "= embedding_dense_backward" not in source


@pytest.mark.parametrize("overwrite", [False, True], ids=["add", "overwrite"])
def test_a_sum_is_added_term_by_term(overwrite: bool) -> None:
    def build(graph: fx.Graph, x: fx.Node, y: fx.Node) -> Any:
        one = graph.call_function(aten.mm.default, (x, y))
        other = graph.call_function(aten.mm.default, (y, x))
        last = graph.call_function(aten.sin.default, (x,))
        return (graph.call_function(aten.add.Tensor, (graph.call_function(aten.add.Tensor, (one, other)), last)), x)

    source, _ = add_into(build, "x", "y", overwrite=overwrite, x=torch.randn(3, 3), y=torch.randn(3, 3))
    assert "add_Tensor" not in source and source.count("addmm_") == 2 - overwrite


def test_a_value_with_other_uses_is_computed_once_and_added() -> None:
    def build(graph: fx.Graph, x: fx.Node, y: fx.Node) -> Any:
        one = graph.call_function(aten.mm.default, (x, y))
        return (one, graph.call_function(aten.sin.default, (one,)))

    source, _ = add_into(build, "x", "y", x=torch.randn(3, 3), y=torch.randn(3, 3))
    assert "into_0_mm_default.add_(mm_default)" in source


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(takes=(2,)), r"3 placeholders, expected 2 for groups \[2\]"),
        (dict(gives=(1, 1)), r"returns 3 values, expected 2 for \[1, 1\]"),
        (dict(into=[7]), "output 7 .* no such output"),
        (dict(into=[1]), "output 1 is 3, which cannot be added"),
    ],
)
def test_groups_that_do_not_add_up_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(EmitError, match=words):
        emit(graph_of(affine, "x", "w", "b"), **options)


def test_a_graph_of_modules_is_refused() -> None:
    with pytest.raises(EmitError, match="node _0 is a call_module, expected a graph of functions"):
        emit(fx.symbolic_trace(torch.nn.Sequential(torch.nn.Linear(2, 2))))


class _Seen(TorchDispatchMode):
    """Remember which overloads were asked for."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.overloads: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.overloads.append(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", sorted(set(MODELS) - {"lstm", "gru", "no_grad", "gpt2", "bert", "t5"}))
def test_every_operator_is_spelled_as_the_overload_that_the_graph_names(name: str) -> None:
    case = export_case(name)
    flags = [index in case.results and _floats(node) for index, node in enumerate(_outputs(case.gm))]
    joint = record_joint(case.gm, case.values, wrt=case.wrt, grad_outputs=flags)
    for node in joint.graph.nodes:
        if not isinstance(node.target, torch._ops.OpOverload):
            continue
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda value: value.meta["val"])
        spelling = spell(node.target, args, kwargs)
        real_args, real_kwargs = tree_map(_real, (tuple(args), dict(kwargs)))
        torch.manual_seed(0)
        wanted = node.target(*real_args, **real_kwargs)
        torch.manual_seed(0)
        with private.below_autograd(), _Seen() as seen:
            found = spelling(real_args, real_kwargs)
        assert seen.overloads == [node.target]
        for one, other in zip(_tensors(found), _tensors(wanted), strict=True):
            assert one.stride() == other.stride() and one.dtype == other.dtype
            if torch.Tag.nondeterministic_seeded not in node.target.tags and "empty" not in str(node.target):
                assert torch.equal(torch.nan_to_num(one), torch.nan_to_num(other)), node


def test_a_spelling_that_would_reach_another_overload_is_not_taken() -> None:
    x, number = torch.randn(3), torch.tensor(2.0)
    assert spell(aten.add.Tensor, (x, number), {}).function is torch._C._VariableFunctions.add
    assert not reaches(Spelling(torch.add), aten.add.Scalar, (x, 2), {})
    assert reaches(Spelling(torch.add), aten.add.Tensor, (x, number), {})
    assert not reaches(Spelling(torch.sum), aten.mean.default, (x,), {})
    boxed = spell(aten.add.Scalar, (x, 2), {})
    assert torch.equal(boxed((x, 2), {}), x + 2)


def test_spellings_that_torch_warns_of_are_tried_in_silence(recwarn: pytest.WarningsRecorder) -> None:
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        assert not reaches(Spelling(torch.add), aten.add.Scalar, (torch.empty(1, device="meta"), 2.0, 1), {})
    finally:
        torch.set_warn_always(always)
    assert not recwarn.list


def test_lists_of_sizes_are_written_out() -> None:
    x = torch.randn(2, 6)
    spelling = spell(aten.view.default, (x, [3, 4]), {})
    assert spelling == Spelling(None, "view", spread=True)
    assert spelling((x, [3, 4]), {}).shape == (3, 4)


def test_below_autograd_holds_for_its_thread_and_its_time() -> None:
    w = torch.nn.Parameter(torch.ones(2))
    with private.below_autograd():
        assert not (w * 2).requires_grad
    assert (w * 2).requires_grad
    with torch.autocast("cpu", torch.bfloat16), private.below_autograd():
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype == torch.float32


def test_shapes_in_python_keep_a_recurrent_nets_rows_symbolic() -> None:
    fakes = FakeTensorMode(shape_env=ShapeEnv())
    rows: Any = StatelessSymbolicContext([DimDynamic.DUCK, DimDynamic.STATIC, DimDynamic.STATIC])
    x = fakes.from_tensor(torch.randn(5, 3, 4), symbolic_context=rows)
    weights = [fakes.from_tensor(w.detach()) for w in torch.nn.LSTM(4, 4).parameters()]
    with fakes, private.shapes_in_python():
        zeros = torch.zeros(1, x.shape[0], 4)
        out = aten.lstm.input(x, [zeros, zeros], weights, True, 1, 0.0, True, False, True)[0]
    assert not out.shape[0].node.expr.is_number


def test_composite_operators_with_a_kernel_of_their_own_are_not_taken_apart() -> None:
    assert private.is_composite(aten.linear.default, "cpu")
    assert not private.is_composite(aten.silu_backward.default, "cpu")
    assert not private.is_composite(aten.mm.default, "cpu")


def test_autograd_nodes_are_numbered_in_order() -> None:
    before = private.sequence_number()
    x = torch.ones(2, requires_grad=True) * 2
    assert private.sequence_number() > before
    numbers: list[int] = []
    x.register_hook(lambda grad: numbers.append(private.running_sequence_number()))
    x.sum().backward()
    assert private.running_sequence_number() == -1
    assert before <= numbers[0] < private.sequence_number()


def _outputs(gm: fx.GraphModule) -> Any:
    return next(iter(reversed(gm.graph.nodes))).args[0]


def _floats(node: fx.Node) -> bool:
    value = node.meta["val"]
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def _real(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    generator = torch.Generator().manual_seed(value.numel())
    size = 1 + sum((length - 1) * step for length, step in zip(value.shape, value.stride(), strict=True))
    flat = torch.rand(max(size, 0), dtype=torch.float64, generator=generator)
    flat = flat.to(value.dtype) if value.is_floating_point() or value.is_complex() else flat.to(value.dtype).zero_()
    return (
        flat.as_strided(value.shape, value.stride()) if value.numel() else torch.empty(value.shape, dtype=value.dtype)
    )


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in (value if isinstance(value, (tuple, list)) else [value]) if isinstance(leaf, Tensor)]


@pytest.mark.parametrize("overwrite", [False, True], ids=["add", "overwrite"])
def test_a_sum_is_told_as_soon_as_it_is_complete(overwrite: bool) -> None:
    def build(graph: fx.Graph, x: fx.Node, y: fx.Node) -> Any:
        one = graph.call_function(aten.mm.default, (x, y))
        other = graph.call_function(aten.mm.default, (y, x))
        last = graph.call_function(aten.sin.default, (x,))
        return (graph.call_function(aten.add.Tensor, (one, last)), other)

    run = emit(graph_of(build, "x", "y"), into=[0, 1], overwrite=overwrite, tells=True)
    x, y = torch.randn(3, 3), torch.randn(3, 3)
    into = [torch.ones(3, 3), torch.ones(3, 3)]
    seen: dict[int, Tensor] = {}
    run(x, y, into, lambda position: seen.setdefault(position, into[position].clone()))
    start = 0 if overwrite else 1
    assert list(seen) == [1, 0]
    torch.testing.assert_close(seen[1], start + y @ x)
    torch.testing.assert_close(seen[0], start + (x @ y + x.sin()))


def test_one_value_may_be_added_into_two_tensors() -> None:
    def build(graph: fx.Graph, x: fx.Node, y: fx.Node) -> Any:
        one = graph.call_function(aten.mm.default, (x, y))
        return (one, one)

    x, y = torch.randn(3, 3), torch.randn(3, 3)
    into = [torch.ones(3, 3), torch.zeros(3, 3)]
    emit(graph_of(build, "x", "y"), into=[0, 1])(x, y, into)
    torch.testing.assert_close(into[0], 1 + x @ y)
    torch.testing.assert_close(into[1], x @ y)


def test_a_view_of_what_a_kernel_laid_out_otherwise_than_planned_is_copied() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(4, 6)
    graph.output((graph.call_function(aten.view.default, (x, [3, 8])),))
    run = emit(fx.GraphModule(torch.nn.Module(), graph))
    laid_out = torch.randn(6, 4).t()
    assert torch.equal(run(laid_out)[0], laid_out.reshape(3, 8))
    dense = torch.randn(4, 6)
    assert run(dense)[0].data_ptr() == dense.data_ptr(), "what can be seen without a copy is not copied"
