"""What a compiled model says in eval mode is what the plain model says."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from models import DROPOUT, NORMED, ZOO, Batch, Example
from rig import lay_out, rig_of
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from efftra_fx import Cluster, compile
from efftra_fx.errors import BatchError, CaptureError, InputError


def assert_same_output(expected: Any, found: Any) -> None:
    """Hold containers to be equal and tensors to be close."""
    ours, tree = pytree.tree_flatten(found)
    theirs, other = pytree.tree_flatten(expected)
    assert tree == other and type(expected) is type(found)
    for a, b in zip(theirs, ours, strict=True):
        assert type(a) is type(b)
        if isinstance(a, Tensor):
            assert a.dtype == b.dtype and not b.requires_grad
            torch.testing.assert_close(b, a, rtol=1e-6 if a.dtype == torch.float32 else 1e-10, atol=1e-12)
        else:
            assert a == b


@pytest.mark.parametrize(
    ("name", "shape"), [("vgg", (2, 1)), ("unet", (1, 1, 1)), ("gpt2", (1, 2, 1)), ("lstm", (1, 3))]
)
def test_it_equals_the_plain_models_output_whole_and_in_order(name: str, shape: tuple[int, ...]) -> None:
    rig = rig_of(ZOO[name])
    program = rig.program(lay_out(rig.blocks, shape, 4))
    for rows in (12, 5, 1):
        batch = ZOO[name].data(rows)
        with torch.no_grad():
            expected = rig.model(*batch.args, **batch.kwargs)
        assert_same_output(expected, program.evaluate(*batch.args, **batch.kwargs))


@pytest.mark.parametrize("example", [DROPOUT, NORMED], ids=lambda example: example.name)
def test_in_training_too_nothing_is_dropped_and_no_statistics_change(example: Example) -> None:
    rig = rig_of(example)
    program, batch = rig.program(lay_out(rig.blocks, (2, 1), 2)), example.data(7)
    before = {name: tensor.clone() for name, tensor in rig.model.state_dict().items()}
    rig.model.eval()
    with torch.no_grad():
        expected = rig.model(*batch.args)
    rig.model.train()
    assert_same_output(expected, program.evaluate(*batch.args))
    assert all(module.training for module in rig.model.modules())
    assert all(torch.equal(before[name], tensor) for name, tensor in rig.model.state_dict().items())


class Two(NamedTuple):
    """A model's outputs."""

    logits: Tensor
    extra: dict[str, Any]


class Nested(nn.Module):
    """Returns a container of containers, one value of which is for the whole batch and one no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Two:
        hidden = self.one(x)
        return Two(self.two(hidden.relu()), {"hidden": hidden, "weight": self.two.weight * 2, "kind": "nested"})


NESTED = Example("nested", Nested, ZOO["mlp"].batch, lambda output, target: F.cross_entropy(output.logits, target))


def test_containers_come_back_as_the_model_makes_them() -> None:
    example = Example(
        "nested", Nested, ZOO["mlp"].batch, lambda output, target: nn.functional.cross_entropy(output.logits, target)
    )
    rig = rig_of(example)
    program, batch = rig.program(lay_out(rig.blocks, (1, 1), 3)), NESTED.data(8)
    with torch.no_grad():
        expected = rig.model(*batch.args)
    found = program.evaluate(*batch.args)
    assert_same_output(expected, found)
    assert found.extra["kind"] == "nested"


def test_it_follows_training() -> None:
    rig = rig_of(ZOO["mlp"])
    program, batch = rig.program(lay_out(4, (1, 2), 2)), ZOO["mlp"].data(12)
    first = program.evaluate(*batch.args)
    optimizer = torch.optim.SGD(program.parameters(), lr=0.5)
    program.step(*batch.args, target=batch.target)
    optimizer.step()
    rig.model.zero_grad()
    second = program.evaluate(*batch.args)
    assert not torch.allclose(first, second)
    with torch.no_grad():
        assert_same_output(rig.model(*batch.args), second)


def test_it_takes_what_the_model_takes() -> None:
    program = rig_of(ZOO["mlp"]).program(lay_out(4, (1, 1), 2))
    batch: Batch = ZOO["mlp"].data(4)
    with torch.no_grad():
        assert_same_output(program.model(*batch.args), program.evaluate(input=batch.args[0]))
    with pytest.raises(InputError, match="cannot be called like this"):
        program.evaluate(*batch.args, batch.target)


class KeepsMask(nn.Module):
    """Makes its mask at the first call and keeps it; what it multiplies by depends on the mode."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 3)
        self.mask: Tensor | None = None
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        if self.mask is None:
            self.mask = torch.tril(torch.ones(6, 6, dtype=x.dtype))
        hidden = self.one(x) @ self.mask * torch.tensor([2.0 if self.training else 3.0], dtype=x.dtype)
        return self.two(hidden) * self.scale  # type: ignore[no-any-return]


@pytest.mark.parametrize("kept", [False, True])
def test_its_constants_are_its_own_and_what_is_set_between_steps_counts(kept: bool) -> None:
    torch.manual_seed(0)
    model, x, target = KeepsMask().double(), torch.randn(5, 6, dtype=torch.float64), torch.arange(5) % 3
    if kept:
        model(x)
    fixed: Any = dict(example_inputs=(x,), example_target=target, stages=2, micro_batches=2, costs="estimated")
    program = compile(model, Cluster.local(2), loss_fn=F.cross_entropy, **fixed)
    for scale in (1.0, 0.5, 1.0):
        model.scale = scale
        loss = program.step(x, target=target)
        found = program.evaluate(x)
        with torch.no_grad():
            torch.testing.assert_close(loss, F.cross_entropy(model(x), target), rtol=1e-12, atol=0)
            model.eval()
            assert_same_output(model(x), found)
            model.train()


def test_it_is_cast_where_it_is_called_and_nowhere_else() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3)), torch.randn(5, 6)
    fixed: Any = dict(example_inputs=(x,), example_target=torch.arange(5) % 3, stages=2, costs="estimated")
    program = compile(model, Cluster.local(2), loss_fn=F.cross_entropy, **fixed)
    for enabled in (True, False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled), torch.no_grad():
            found, expected = program.evaluate(x), model(x)
        assert found.dtype is expected.dtype
        torch.testing.assert_close(found, expected, rtol=1e-2 if enabled else 1e-6, atol=1e-2 if enabled else 1e-7)


class TimeFirst(nn.Module):
    """Rows lie in dimension 1, one among another once time and rows are one dimension, as a linear layer makes them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            flat = x.transpose(0, 1).contiguous().transpose(0, 1).reshape(-1, 4)
            x = x + layer(flat if self.training else flat * 2.0).view(x.shape)
        return x


@pytest.mark.parametrize("rows", [5, 1])
def test_what_cannot_be_sent_between_stages_is_computed_where_it_is_read(rows: int) -> None:
    torch.manual_seed(0)
    model = TimeFirst().double()
    x = torch.randn(3, 5, 4, dtype=torch.float64)
    fixed: Any = dict(stages=3, costs="estimated", batch_dims={"x": 1})
    program = compile(model, Cluster.local(3), example_inputs=(x,), loss_fn=lambda out: out.square().mean(), **fixed)
    with torch.no_grad():
        model.eval()
        expected = model(x[:, :rows])
        model.train()
    assert_same_output(expected, program.evaluate(x[:, :rows]))


class Rescaled(nn.Linear):
    """A layer that halves its weights for inference, and doubles what they give."""

    halved = False

    def forward(self, x: Tensor) -> Tensor:
        if self.training == self.halved:
            with torch.no_grad():
                self.weight.mul_(2.0 if self.training else 0.5)
            self.halved = not self.training
        out = super().forward(x)
        return out if self.training else out * 2


def test_a_model_that_writes_weights_in_eval_mode_trains_and_is_evaluated_as_a_copy() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(6, 4).double(), torch.arange(6) % 3
    model = Rescaled(4, 3, bias=False).double()
    made = compile(
        model, Cluster.local(2), example_inputs=(x,), example_target=y, loss_fn=F.cross_entropy, costs="estimated"
    )
    loss, weight = made.step(x, target=y), model.weight.detach().clone()
    with pytest.raises(CaptureError, match=r"in eval mode forward writes parameter 'weight' in place at .*; .*a copy"):
        made.evaluate(x)
    assert torch.equal(model.weight, weight) and not model.halved
    assert torch.equal(made.step(x, target=y), loss)
    copy = Rescaled(4, 3, bias=False).double()
    copy.load_state_dict(made.state_dict())
    torch.testing.assert_close(copy.eval()(x), F.linear(x, weight))


def test_a_target_of_rows_times_length_says_how_to_evaluate() -> None:
    x, y = torch.randn(6, 5, 4).double(), torch.randint(0, 3, (30,))
    model = nn.Sequential(nn.Linear(4, 3), nn.Flatten(0, 1)).double()
    fixed: dict[str, Any] = {"example_inputs": (x,), "example_target": y, "loss_fn": F.cross_entropy}
    program = compile(model, Cluster.local(2), costs="estimated", **fixed)
    with pytest.raises(
        BatchError, match=r"'input' was taken to have no rows.*batch_dims=\{'input': 0, 'target': None\}"
    ):
        program.evaluate(x)
    program = compile(
        model, Cluster.local(2), costs="estimated", batch_dims={"input": 0, "target": None}, replicas=(2,), **fixed
    )
    torch.testing.assert_close(program.step(x, target=y), F.cross_entropy(model(x), y).detach())
    torch.testing.assert_close(program.evaluate(x[:5]), model(x[:5]))
