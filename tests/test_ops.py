"""In one process, what ranks do with each other's tensors is plain arithmetic, and autograd sees through it."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from efftra_fx import ops


def test_a_message_is_the_tensor_and_its_gradient_goes_back() -> None:
    x = torch.arange(3.0, requires_grad=True)
    got = ops.recv(ops.send(x, source=0, target=2), source=0, target=2)
    assert got is x
    (got * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [1.0, 2.0, 3.0]


@given(st.lists(st.integers(0, 4), min_size=1, max_size=4), st.integers(0, 2))
def test_rows_taken_apart_join_again(sizes: list[int], dim: int) -> None:
    shape = [2, 2, 2]
    shape[dim] = sum(sizes)
    whole = torch.arange(float(4 * sum(sizes))).reshape(shape)
    stops = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    parts = [ops.take_rows(whole, dim, stop - size, stop) for size, stop in zip(sizes, stops, strict=True)]
    assert torch.equal(ops.join_rows(parts, dim), whole)
    assert torch.equal(ops.all_gather(parts, dim, ranks=tuple(range(len(parts)))), whole)


def test_a_sum_over_ranks_adds_in_their_order_and_each_part_gets_the_gradient() -> None:
    parts = [torch.tensor([1e16], requires_grad=True), torch.tensor([-1e16], requires_grad=True), torch.ones(1)]
    total = ops.all_reduce(parts, ranks=(0, 1, 4))
    assert total.item() == 1.0 and ops.add_parts(parts[::-1]).item() == 0.0
    total.backward()
    assert parts[0].grad is not None and parts[0].grad.item() == 1.0


def test_a_replicated_parameter_gets_the_sum_of_its_copies_gradients() -> None:
    weight = torch.ones(2, requires_grad=True)
    copy = ops.replicate(weight, ranks=(0, 1))
    (3 * copy + 4 * copy).sum().backward()
    assert weight.grad is not None and weight.grad.tolist() == [7.0, 7.0]
