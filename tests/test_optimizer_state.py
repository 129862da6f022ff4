"""An optimizer's state is whole: saved under one plan, it goes on under any other and in plain PyTorch, and back."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import outcomes_of, run_ranks
from torch import Tensor, nn

from efftra_fx import Cluster, CompiledModel, compile
from efftra_fx.errors import CheckpointError
from efftra_fx.passes import shard
from efftra_fx.passes.shard_choice import Prices

X = torch.linspace(-1, 1, 48, dtype=torch.float64).reshape(8, 6).sin()
Y = torch.arange(8) % 4
STEPS = 3
Named = Iterable[tuple[str, nn.Parameter]]


class Net(nn.Module):
    """Layers, a norm, a tied weight, a frozen one and one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.middle = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 8, bias=False)
        self.again, self.frozen, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.again.weight = self.middle.weight
        self.frozen.requires_grad_(False)
        self.idle = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.middle(self.norm(torch.tanh(self.first(x)))))
        out: Tensor = self.head(torch.tanh(self.frozen(torch.tanh(self.again(h)))))
        return out


class Sign(torch.optim.Optimizer):
    """Lion: an optimizer that nobody here has heard of."""

    def __init__(self, parameters: Any, lr: float = 0.01) -> None:
        super().__init__(parameters, {"lr": lr, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                p -= group["lr"] * (mean * group["betas"][0] + p.grad * (1 - group["betas"][0])).sign()
                mean.lerp_(p.grad, 1 - group["betas"][1])


def by_name(named: Named) -> list[dict[str, Any]]:
    """No decay on vectors, another rate for the head."""
    listed = [(name, p) for name, p in named if p.requires_grad]
    return [
        {"params": [p for n, p in listed if n.startswith("head")], "lr": 1e-3},
        {"params": [p for n, p in listed if not n.startswith("head") and p.ndim < 2], "weight_decay": 0.0},
        {"params": [p for n, p in listed if not n.startswith("head") and p.ndim > 1]},
    ]


def each(named: Named) -> list[dict[str, Any]]:
    """A group for each parameter."""
    return [{"params": [p], "lr": 0.01 / (1 + len(name))} for name, p in named]


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda named: torch.optim.SGD([p for _, p in named], lr=0.05, momentum=0.9, nesterov=True),
    "adamw": lambda named: torch.optim.AdamW(by_name(named), lr=0.01, amsgrad=True),
    "fused": lambda named: torch.optim.AdamW([p for _, p in named], lr=0.01, fused=True),
    "rate is a tensor": lambda named: torch.optim.Adam([p for _, p in named], lr=torch.tensor(0.01)),
    "named": lambda named: torch.optim.NAdam(list(named), lr=0.01),
    "each": lambda named: torch.optim.RMSprop(each(named), lr=0.01, momentum=0.5, centered=True),
    "adagrad": lambda named: torch.optim.Adagrad([p for _, p in named], lr=0.05),
    "adadelta": lambda named: torch.optim.Adadelta([p for _, p in named], lr=1.0),
    "radam": lambda named: torch.optim.RAdam([p for _, p in named], lr=0.01),
    "rprop": lambda named: torch.optim.Rprop([p for _, p in named], lr=0.01),
    "asgd": lambda named: torch.optim.ASGD([p for _, p in named], lr=0.05),
    "own": lambda named: Sign([p for _, p in named]),
    "factored": lambda named: torch.optim.Adafactor([p for _, p in named], lr=0.05),
}
WHOLE = [name for name in OPTIMIZERS if name != "factored"]  # those that may see a part of a parameter
PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "stages": (2, {"replicas": (1, 1), "micro_batches": 2}),
    "replicas": (2, {"replicas": (2,), "micro_batches": 1}),
    "width": (2, {"replicas": (1,), "tensor": (2,), "micro_batches": 1}),
    "three": (3, {"replicas": (2, 1), "micro_batches": 2}),
}
State = tuple[Mapping[str, Tensor], Mapping[str, Any]]


def net() -> Net:
    """Return the net at its first weights."""
    torch.manual_seed(0)
    return Net().double()


def saved(thing: Any) -> bytes:
    """Return what a file of it holds."""
    file = io.BytesIO()
    torch.save(thing, file)
    return file.getvalue()


def loaded(content: bytes) -> Any:
    """Read data, and no code."""
    return torch.load(io.BytesIO(content), weights_only=True)


def train_plainly(name: str, start: State | None) -> State:
    """Take steps on one device."""
    model = net()
    optimizer = OPTIMIZERS[name](list(model.named_parameters()))
    if start is not None:
        model.load_state_dict(start[0])
        optimizer.load_state_dict(dict(start[1]))
    for _ in range(STEPS):
        optimizer.zero_grad()
        F.cross_entropy(model(X), Y).backward()
        optimizer.step()
    return model.state_dict(), optimizer.state_dict()


def compiled(cluster: Cluster, **options: Any) -> CompiledModel:
    """Compile the net."""
    return compile(
        net(), cluster, example_inputs=(X,), example_target=Y, loss_fn=F.cross_entropy, costs="estimated", **options
    )


def train(program: CompiledModel, name: str, start: State | None) -> State:
    """Take steps with a program."""
    optimizer = OPTIMIZERS[name](list(program.named_parameters()))
    program.load_state_dict(net().state_dict() if start is None else start[0])
    if start is not None:
        program.load_optimizer_state_dict(optimizer, start[1])
    for _ in range(STEPS):
        optimizer.zero_grad()
        program.step(X, target=Y)
        optimizer.step()
    optimizer.zero_grad()
    return program.state_dict(), program.optimizer_state_dict(optimizer)


def train_on_ranks(options: dict[str, Any], starts: dict[str, bytes | None]) -> dict[str, bytes]:
    """Train with each optimizer on the launched ranks."""
    torch.set_num_threads(1)
    if "tensor" in options:  # tiny layers are cut too
        shard.Prices = partial(Prices, sum_s=0.0, summed_byte_s=1e-13)  # type: ignore[attr-defined, assignment]
    program = compiled(Cluster.from_env(), **options)
    assert bool(program.built.shares(program.rank)) == ("tensor" in options)
    return {
        name: saved(train(program, name, None if start is None else loaded(start))) for name, start in starts.items()
    }


def assert_same(found: State, expected: State, what: str) -> None:
    """Hold weights, and what the optimizer keeps, to rounding."""
    for name, tensor in expected[0].items():
        assert torch.allclose(found[0][name], tensor, rtol=1e-9, atol=1e-12), f"{what}: {name}"
    assert [g["params"] for g in found[1]["param_groups"]] == [g["params"] for g in expected[1]["param_groups"]], what
    for key, kept in expected[1]["state"].items():
        for part, value in kept.items():
            mine = found[1]["state"][key][part]
            if isinstance(value, Tensor):
                assert mine.shape == value.shape and mine.dtype == value.dtype, f"{what}: {key}.{part}"
                assert torch.allclose(mine, value, rtol=1e-8, atol=1e-12), f"{what}: {key}.{part}"
            else:
                assert mine == value, f"{what}: {key}.{part}"
    assert set(found[1]["state"]) == set(expected[1]["state"]), what


def expected_of(names: Iterable[str]) -> dict[str, tuple[State, State]]:
    """Return what one device has after the first steps, and after as many again."""
    first = {name: train_plainly(name, None) for name in names}
    first = {name: loaded(saved(state)) for name, state in first.items()}
    return {name: (state, train_plainly(name, loaded(saved(state)))) for name, state in first.items()}


@pytest.mark.parametrize("plan", PLANS)
def test_a_state_goes_from_any_plan_to_plain_pytorch_and_back(plan: str) -> None:
    ranks, options = PLANS[plan]
    names = WHOLE if plan == "width" else list(OPTIMIZERS)
    expected = expected_of(names)
    for content in run_ranks(train_on_ranks, ranks, options, dict.fromkeys(names), limit_s=200.0):
        found = {name: loaded(state) for name, state in content.items()}
        for name in names:
            assert_same(found[name], expected[name][0], f"{name}, from the start")

            assert_same(train_plainly(name, found[name]), expected[name][1], f"{name}, on one device")
    starts: dict[str, bytes | None] = {name: saved(expected[name][0]) for name in names}
    for content in run_ranks(train_on_ranks, ranks, options, starts, limit_s=200.0):
        for name in names:
            assert_same(loaded(content[name]), expected[name][1], f"{name}, from one device")


def test_a_state_goes_from_plan_to_plan() -> None:
    expected = expected_of(WHOLE)
    starts: dict[str, bytes | None] = dict.fromkeys(WHOLE)
    first = run_ranks(train_on_ranks, 3, PLANS["three"][1], starts, limit_s=200.0)[2]
    for plan in ("width", "stages"):
        for content in run_ranks(train_on_ranks, PLANS[plan][0], PLANS[plan][1], dict(first), limit_s=200.0):
            for name in WHOLE:
                assert_same(loaded(content[name]), expected[name][1], f"{name}, {plan}")
    here = compiled(Cluster.local(3), **PLANS["three"][1])
    for name in WHOLE:
        assert_same(train(here, name, loaded(first[name])), expected[name][1], f"{name}, in one process")


def save_with_groups(whole: bool) -> dict[str, Any]:
    """Make a group for each parameter: of the model, or of those that this rank holds."""
    torch.set_num_threads(1)
    program = compiled(Cluster.from_env(), replicas=(1, 1), micro_batches=1)
    held = dict(program.named_parameters())
    names = [name for name, _ in program.model.named_parameters()] if whole else list(held)
    optimizer = torch.optim.Adam(
        [{"params": [held[name]] if name in held else [], "lr": 0.01 / (1 + len(name))} for name in names]
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    program.step(X, target=Y)
    optimizer.step()
    scheduler.step()
    return {"optimizer": program.optimizer_state_dict(optimizer)["param_groups"], "scheduler": scheduler.state_dict()}


def test_groups_that_differ_from_rank_to_rank_are_said() -> None:
    told = "ranks have different groups of parameters, and so different states of schedulers"
    model = net()
    plain = torch.optim.Adam([{"params": [p], "lr": 0.01 / (1 + len(name))} for name, p in model.named_parameters()])
    scheduler = torch.optim.lr_scheduler.StepLR(plain, 1)
    plain.step()
    scheduler.step()
    same, other = outcomes_of(save_with_groups, 2, True, limit_s=120.0)
    assert not same.error and told not in same.output
    for outcome in (same, other):
        assert outcome.value == {
            "optimizer": plain.state_dict()["param_groups"],
            "scheduler": scheduler.state_dict(),
        }
    first, _ = outcomes_of(save_with_groups, 2, False, limit_s=120.0)
    assert not first.error and told in first.output


def test_states_by_names_are_taken_and_what_does_not_fit_is_named() -> None:
    program = compiled(Cluster.local(2), replicas=(1, 1), micro_batches=1)
    optimizer = torch.optim.AdamW(program.parameters(), lr=0.01)
    program.step(X, target=Y)
    optimizer.step()
    state = program.optimizer_state_dict(optimizer)
    names = state["names"][0]
    keyed = {
        "state": {names[number]: kept for number, kept in state["state"].items()},
        "param_groups": [{**state["param_groups"][0], "params": names, "lr": 0.5}],
    }
    other = torch.optim.AdamW(reversed(list(program.parameters())), lr=0.01)
    program.load_optimizer_state_dict(other, keyed)
    assert other.param_groups[0]["lr"] == 0.5
    for parameter in optimizer.state:
        assert torch.equal(other.state[parameter]["exp_avg_sq"], optimizer.state[parameter]["exp_avg_sq"])
        assert other.state[parameter]["exp_avg_sq"] is not optimizer.state[parameter]["exp_avg_sq"]
    bare = {key: value for key, value in state.items() if key != "names"}
    two = torch.optim.AdamW([{"params": [p]} for p in program.parameters()])
    for wrong, given, words in (
        (other, {"state": {}}, "must be a dictionary with 'state' and 'param_groups'"),
        (two, bare, "groups of [11] parameters and no names, but the optimizer has groups of [1, 1"),
        (
            torch.optim.SGD([program.model.get_parameter("idle")]),
            state,
            "'again.bias' is not in the optimizer (10 like",
        ),
        (torch.optim.SGD([torch.ones(2, 5, requires_grad=True)]), state, "a parameter of shape [2, 5] that is none of"),
    ):
        with pytest.raises(CheckpointError, match=words.replace("[", r"\[").replace("(", r"\(")):
            program.load_optimizer_state_dict(wrong, given)
    optimizer.state[next(program.parameters())]["keeps"] = object()
    with pytest.raises(CheckpointError, match="state of 'idle' of the optimizer holds a object, which is no data"):
        program.optimizer_state_dict(optimizer)
