"""Programs with stages several ranks wide: all ranks in this process, against one device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from efftra_fx import Cluster, compile
from efftra_fx.api import CompiledModel
from efftra_fx.errors import PlanError
from efftra_fx.passes import shard
from efftra_fx.passes.shard_choice import Prices
from efftra_fx.passes.shard_parts import attention_part
from efftra_fx.plan import Plan, Stage
from efftra_fx.program_text import parse_program, print_program

RANKS = 6


class Attention(nn.Module):
    """Grouped heads with a fused qkv weight, and a residual MLP with dropout."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(24, (6 + 2 * 2) * 4), nn.Linear(24, 24)
        self.norm, self.up, self.down = nn.LayerNorm(24), nn.Linear(24, 95), nn.Linear(95, 24)
        self.drop, self.head = nn.Dropout(dropout), nn.Linear(24, 37)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        query, key, value = self.qkv(x).split([24, 8, 8], -1)
        query = query.view(rows, length, 6, 4).transpose(1, 2)
        key, value = (p.view(rows, length, 2, 4).transpose(1, 2).repeat_interleave(3, 1) for p in (key, value))
        dropped = self.drop.p if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropped, is_causal=True).transpose(1, 2)
        x = x + self.out(mixed.reshape(rows, length, width))
        return self.head(x + self.drop(self.down(self.drop(F.gelu(self.up(self.norm(x)))))))  # type: ignore[no-any-return]


class Experts(nn.Module):
    """A mixture of four experts, all computed, weighted by a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.out = nn.Linear(24, 4), nn.Linear(24, 37)
        self.rise, self.fall = nn.Parameter(torch.randn(4, 24, 30) * 0.3), nn.Parameter(torch.randn(4, 30, 24) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        made = torch.einsum("bsef,efd->bsed", torch.einsum("bsd,edf->bsef", x, self.rise).relu(), self.fall)
        return self.out(x + (made * self.gate(x).softmax(-1).unsqueeze(-1)).sum(2))  # type: ignore[no-any-return]


class Net(nn.Module):
    """A residual convolutional network with batch and group norms."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 12, 3, padding=1), nn.BatchNorm2d(12)
        self.second, self.group = nn.Conv2d(12, 12, 3, padding=1, bias=False), nn.GroupNorm(3, 12)
        self.third, self.head = nn.Conv2d(12, 9, 1, stride=2), nn.Linear(9 * 16, 37)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(x)))
        x = F.max_pool2d(x + self.group(self.second(x)).relu(), 2)
        return self.head(F.avg_pool2d(self.third(x).relu(), 1).flatten(1).repeat(1, 4))  # type: ignore[no-any-return]


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend, self.out = nn.MultiheadAttention(24, 6, batch_first=True), nn.Linear(24, 37)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.attend(x, x, x, need_weights=False)[0] + x)  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.out = nn.LSTM(24, 10, batch_first=True), nn.Linear(10, 37)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.net(x)[0])  # type: ignore[no-any-return]


def per_token(out: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, -2), target.flatten(), ignore_index=5)


def sequences(make: Callable[[], nn.Module]) -> Callable[[], tuple[nn.Module, Tensor, Tensor]]:
    return lambda: (make().double(), torch.randn(7, 5, 24, dtype=torch.float64), torch.randint(37, (7, 5)))


def images() -> tuple[nn.Module, Tensor, Tensor]:
    model = Net().double().eval()
    return model, torch.randn(7, 3, 8, 8, dtype=torch.float64), torch.randint(37, (7,))


CASES: dict[str, Callable[[], tuple[nn.Module, Tensor, Tensor]]] = {
    "grouped heads": sequences(Attention),
    "experts": sequences(Experts),
    "convolutions": images,
    "multi-head": sequences(Heads),
    "recurrent": sequences(Recurrent),
}


def program(case: str, **options: Any) -> tuple[CompiledModel, nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model, x, y = CASES[case]()
    made = compile(
        model,
        Cluster.local(RANKS),
        example_inputs=(x,),
        example_target=y,
        loss_fn=per_token,
        costs="estimated",
        **options,
    )
    return made, model, x, y


def wide(blocks: int, *stages: tuple[int, int], micro_batches: int = 3) -> Plan:
    """Return a plan with (replicas, width) a stage, cut into equal runs of blocks."""
    made, device = [], 0
    for index, (replicas, width) in enumerate(stages):
        first, stop = blocks * index // len(stages), blocks * (index + 1) // len(stages)
        made.append(Stage(first, stop, tuple(range(device, device + replicas * width)), width))
        device += replicas * width
    return Plan(tuple(made), micro_batches)


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_one_device_whatever_the_widths(case: str) -> None:
    made, _, x, y = program(case, tensor=(2,), replicas=(2,), micro_batches=2)
    assert made.check(x, target=y, repeats=1, show=False).matches
    for plan in (
        wide(made.plan.blocks, (1, 3)),
        wide(made.plan.blocks, (1, 2), (1, 3)),
        wide(made.plan.blocks, (2, 2), (1, 1)),
    ):
        other = made.with_plan(plan)
        report = other.check(x, target=y, repeats=1, show=False)
        assert report.matches, str(report)


def test_steps_of_an_optimizer_and_evaluation_are_those_of_one_device() -> None:
    made, model, x, y = program("grouped heads", tensor=(2, 3), micro_batches=3)
    torch.manual_seed(0)
    twin, _, _ = CASES["grouped heads"]()
    for program_like in (made, twin):
        optimizer = torch.optim.AdamW(program_like.parameters(), lr=1e-3)
        for _ in range(3):
            if program_like is made:
                made.step(x, target=y)
            else:
                per_token(twin(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    for name, value in twin.state_dict().items():
        torch.testing.assert_close(made.state_dict()[name], value, rtol=0, atol=1e-9)
    torch.testing.assert_close(made.evaluate(x), twin.eval()(x), rtol=0, atol=1e-8)


def test_a_state_from_one_width_loads_into_another() -> None:
    first, _, x, y = program("experts", tensor=(3,))
    state = {name: torch.randn_like(value) for name, value in first.state_dict().items()}
    first.load_state_dict(state)
    second, *_ = program("experts", tensor=(2,))
    second.load_state_dict(first.state_dict())
    assert float(first.step(x, target=y)) == pytest.approx(float(second.step(x, target=y)), rel=1e-12)


def test_ranks_of_a_wide_stage_hold_shares() -> None:
    made, model, *_ = program("grouped heads", tensor=(2,))
    whole = model.get_parameter("up.weight").numel()
    held = [tensors.parameters["up.weight"].numel() for rank, tensors in made.built.tensors.items() if rank < 2]
    assert held == [48 * 24, 47 * 24] and sum(held) == whole


def test_dropout_draws_alike_on_all_ranks_and_alike_again_for_the_same_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard, "Prices", partial(Prices, sum_s=0.0, summed_byte_s=1e-13))  # tiny layers are cut too
    torch.manual_seed(0)
    model, x, y = Attention(0.5).double(), torch.randn(6, 5, 24, dtype=torch.float64), torch.randint(37, (6, 5))
    options: dict[str, Any] = {"example_inputs": (x,), "example_target": y, "loss_fn": per_token, "costs": "estimated"}
    losses = []
    for width in (1, 2, 2, 3):
        made = compile(model, Cluster.local(3), tensor=(width,), micro_batches=2, **options)
        torch.manual_seed(7)
        losses.append(float(made.step(x, target=y)))
        graphs = [one.stages[0].gm.graph for one in made.built.back.sharded if one is not None]
        assert all(any(node.target is attention_part for node in graph.nodes) for graph in graphs)
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-12)


def test_programs_tell_the_tensor_group_and_parse_back() -> None:
    made, *_ = program("experts", tensor=(2,))
    text = print_program(made.programs[1])
    assert "tensor=1 width=2" in text
    assert parse_program(text) == made.programs[1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tensor": (2, 2), "stages": 1}, "tensor="),
        ({"tensor": (4,), "replicas": (2,)}, "needs 8 devices, the cluster has 6"),
        ({"tensor": (2,), "replicas": (1, 1)}, r"replicas=\(1, 1\) makes 2 stages but tensor=\(2,\) is for 1"),
        ({"tensor": (0,)}, "must be a whole number of 1 or more, got 0"),
    ],
)
def test_widths_that_cannot_be_had_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        program("experts", **options)
