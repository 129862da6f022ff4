"""Weight gradients are summed where they will be all-reduced, and buckets start in the program's order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from against_eager import compiled
from habits import plain
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx

from efftra_fx.emit import emit
from efftra_fx.program import AllReduce
from efftra_fx.runtime.local_transport import local_transports
from efftra_fx.runtime.weights import Gradients, make_bucket


class Recorder:
    """A transport that only writes down what it is asked to sum."""

    def __init__(self) -> None:
        self.inner = local_transports(1)[0]
        self.started: list[tuple[Tensor, tuple[int, ...]]] = []

    def all_reduce(self, tensor: Tensor, ranks: tuple[int, ...]) -> Any:
        self.started.append((tensor, ranks))
        return self.inner.all_reduce(tensor, (0,))


class Maker:
    """A stage's code without gradients that wait."""

    patience = 2

    def finish(self, terms: Any, sums: Any) -> None:
        raise AssertionError("nothing waits")


NAMES = ("a", "b", "c", "d")
SHAPES = {name: ((index + 1, 2), torch.float64) for index, name in enumerate(NAMES)}


def layout(*buckets: tuple[str, ...]) -> tuple[Gradients, list[AllReduce]]:
    reduces = [AllReduce(bucket, (0, 1)) for bucket in buckets]
    return Gradients(NAMES, reduces, SHAPES, {}, torch.device("cpu")), reduces


def test_gradients_lie_in_their_bucket_from_the_start() -> None:
    gradients, _ = layout(("b", "d"))
    step = gradients.start()
    sums = step.open(Maker())
    b, d = sums.at(1), sums.at(3)
    assert b is not None and d is not None
    assert b.untyped_storage().data_ptr() == d.untyped_storage().data_ptr()
    assert sums.at(0) is None, "a gradient that nobody reduces needs no place"
    assert sums.held([1, 3]) is not None and sums.held([0, 1]) is None


def test_a_bucket_is_made_at_its_first_gradient_and_no_sooner() -> None:
    gradients, _ = layout(("d",), ("b", "a"))
    step = gradients.start()
    sums = step.open(Maker())
    held = sums.held([3, 1, 0])
    assert held is not None and not step.flats, "asking whether there will be tensors makes none"
    held[0].fill_(4)
    assert [flat.numel() for flat in step.flats.values()] == [8]
    held[2].fill_(1)
    assert [flat.numel() for flat in step.flats.values()] == [8, 6]
    assert held[1].untyped_storage().data_ptr() == held[2].untyped_storage().data_ptr()


def test_generated_code_asks_for_each_tensor_when_it_writes_there() -> None:
    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return torch.ops.aten.mm.default(x, y), torch.ops.aten.mul.Tensor(x, 2)

    class Asked(list[Tensor]):
        def __getitem__(self, index: Any) -> Any:
            for before in range(index):
                assert float(super().__getitem__(before).sum()), "all before it are written"
            return super().__getitem__(index)

    x, y = torch.ones(2, 2), torch.ones(2, 2)
    tracer = fx.symbolic_trace(step)
    run = emit(tracer, into=[0, 1], overwrite=True)
    found = run(x, y, Asked([torch.zeros(2, 2), torch.zeros(2, 2)]))
    assert torch.equal(found[0], x @ y) and torch.equal(found[1], 2 * x)


def test_what_has_no_gradient_counts_as_zeros() -> None:
    gradients, (reduce,) = layout(("a", "b"))
    step = gradients.start()
    sums = step.open(Maker())
    sums.put(0, torch.ones(1, 2, dtype=torch.float64))
    transport: Any = Recorder()
    step.reduce(reduce, transport)
    assert transport.started[0][0].tolist() == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]


def test_a_rank_without_rows_reduces_zeros() -> None:
    gradients, (reduce,) = layout(("a", "b"))
    transport: Any = Recorder()
    gradients.start().reduce(reduce, transport)
    assert not transport.started[0][0].any()


@given(st.permutations(range(4)), st.integers(0, 4))
def test_buckets_start_in_the_programs_order_whatever_completes_first(order: list[int], told: int) -> None:
    gradients, reduces = layout(("d",), ("c", "a"), ("b",))
    step = gradients.start()
    transport: Any = Recorder()
    sums = step.open(Maker(), transport)
    for place in order[:told]:
        tensor = sums.at(place)
        assert tensor is not None and sums.complete is not None
        tensor.fill_(place)
        sums.complete(place)
    for reduce in reduces:
        step.reduce(reduce, transport)
    sizes = [tensor.numel() for tensor, _ in transport.started]
    assert sizes == [gradients.buckets[reduce].size for reduce in reduces], "each bucket once, in the program's order"


def test_a_bucket_starts_as_soon_as_all_of_it_is_complete() -> None:
    gradients, _ = layout(("d",), ("c", "a"))
    step = gradients.start()
    transport: Any = Recorder()
    sums = step.open(Maker(), transport)
    assert sums.complete is not None
    sums.complete(2)
    assert transport.started == [], "its bucket lacks 'a', and 'd' comes before it"
    sums.complete(3)
    assert len(transport.started) == 1
    sums.complete(0)
    assert len(transport.started) == 2


@pytest.mark.parametrize("stride", [(1, 3), (4, 1)])
def test_a_dense_weight_keeps_its_strides(stride: tuple[int, int]) -> None:
    bucket = make_bucket(["w"], {"w": ((3, 4), torch.float32)}, {"w": stride})
    view = bucket.slots[0].view(bucket.allocate(torch.device("cpu")))
    assert view.shape == (3, 4) and view.stride() == stride


def test_a_weight_with_gaps_lies_contiguous() -> None:
    bucket = make_bucket(["w"], {"w": ((3, 4), torch.float32)}, {"w": (8, 2)})
    assert bucket.slots[0].stride == (4, 1) and bucket.size == 12


def test_generated_code_tells_each_sum_once_when_its_last_term_is_there() -> None:
    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        first = torch.ops.aten.mul.Tensor(x, y)
        second = torch.ops.aten.mm.default(first, y)
        return first, second

    gm = fx.symbolic_trace(step)
    x, y = torch.rand(3, 3), torch.rand(3, 3)
    for node in gm.graph.nodes:
        if node.op != "output":
            node.meta["val"] = x
    function = emit(gm, gives=(2,), into=(0, 1), tells=True)
    into = [torch.zeros(3, 3), torch.zeros(3, 3)]
    told: list[tuple[int, Tensor]] = []
    function(x, y, into, lambda index: told.append((index, into[index].clone())))
    assert [index for index, _ in told] == [0, 1]
    for index, value in told:
        assert torch.equal(value, step(x, y)[index])


def test_gradients_of_replicas_may_be_detached_and_cleared_in_place() -> None:
    habit = plain()
    program = compiled(habit, stages=2, replicas=(2, 1), micro_batches=2)
    found = []
    for _ in range(2):
        for parameter in program.parameters():
            if parameter.grad is not None:
                parameter.grad.detach_().zero_()
        program.step(*habit.args, target=habit.target)
        found.append([p.grad.clone() for p in program.parameters() if p.grad is not None])
    assert len(found[0]) == len(list(program.parameters()))
    for first, second in zip(*found, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-12, atol=0)
