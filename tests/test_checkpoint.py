"""A state goes from any plan to any other and to the plain model, under the model's own names."""

from __future__ import annotations

import copy
from collections.abc import Generator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import NORMED, ZOO
from ranks import run_ranks
from rig import lay_out, rig_of, train_eagerly
from test_ranks_equality import start
from torch import Tensor

from efftra_fx import Cluster, compile
from efftra_fx.errors import CheckpointError
from efftra_fx.runtime.checkpoint import Owned, share_tensors
from efftra_fx.runtime.local_transport import local_transports, run_all
from efftra_fx.runtime.transport import Transport

MLP = ZOO["mlp"]
SHAPES = st.lists(st.integers(0, 3), max_size=3)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool)


@given(
    st.integers(1, 4),
    st.lists(
        st.tuples(st.integers(0, 3), st.lists(st.integers(0, 3), max_size=3), st.sampled_from(DTYPES)), max_size=6
    ),
)
def test_every_rank_gets_every_tensor_from_the_rank_that_owns_it(
    ranks: int, tensors: list[tuple[int, list[int], torch.dtype]]
) -> None:
    items = [Owned(f"t{i}", owner % ranks, tuple(shape), dtype) for i, (owner, shape, dtype) in enumerate(tensors)]
    values = {item.name: torch.full(item.shape, i + 1).to(item.dtype) for i, item in enumerate(items)}

    def work(transport: Transport) -> Generator[Any, Any, dict[str, Tensor]]:
        mine = {item.name: values[item.name] for item in items if item.owner == transport.rank}
        return share_tensors(transport, items, mine)

    for found in run_all([work(transport) for transport in local_transports(ranks)]):
        assert list(found) == [item.name for item in items]
        assert all(torch.equal(found[name], value) and found[name] is not value for name, value in values.items())


@pytest.mark.parametrize("name", ["gpt2", "resnet"])
def test_a_state_has_the_names_and_the_order_of_the_plain_models(name: str) -> None:
    rig = rig_of(ZOO[name])
    state = rig.program(lay_out(rig.blocks, (2, 1), 2)).state_dict()
    plain = rig.model.state_dict()
    assert list(state) == list(plain)
    assert all(torch.equal(state[key], plain[key]) for key in plain)
    ZOO[name].build(seed=9).load_state_dict(state)  # tied parameters under both names


def test_training_goes_on_from_a_state_with_any_plan() -> None:
    rig = rig_of(MLP)
    batch, states = MLP.data(12), []
    for shape in ((2, 1), (1, 1, 1)):
        program = rig.program(lay_out(4, shape, 3))
        optimizer = torch.optim.SGD(program.parameters(), lr=0.1)
        for _ in range(2):
            program.step(*batch.args, target=batch.target)
            optimizer.step()
            optimizer.zero_grad()
        states.append(program.state_dict())
        other = rig.program(lay_out(4, (1, 3), 2))
        other.load_state_dict(states[-1])
        assert all(torch.equal(value, other.state_dict()[key]) for key, value in states[-1].items())
    for key, value in states[0].items():
        torch.testing.assert_close(value, states[1][key], rtol=1e-9, atol=1e-12)


def test_a_state_is_a_copy_that_later_steps_leave_alone() -> None:
    rig = rig_of(NORMED)
    program, batch = rig.program(lay_out(rig.blocks, (1, 1), 2)), NORMED.data(12)
    state = program.state_dict()
    before = copy.deepcopy(state)
    program.step(*batch.args, target=batch.target)
    assert all(torch.equal(state[key], before[key]) for key in before)
    assert not torch.equal(program.state_dict()["1.running_mean"], state["1.running_mean"])


def test_a_state_that_does_not_fit_is_refused_and_nothing_is_taken_over() -> None:
    rig = rig_of(MLP)
    program = rig.program(lay_out(4, (1, 1), 2))
    state = program.state_dict()
    wrong = {key: value + 1 for key, value in state.items()}
    del wrong["2.bias"]
    with pytest.raises(CheckpointError, match=r"'2.bias' is missing \(1 missing, 0 unknown\)"):
        program.load_state_dict(wrong)
    with pytest.raises(CheckpointError, match="'extra' is not in the model"):
        program.load_state_dict({**state, "extra": torch.ones(1)})
    with pytest.raises(CheckpointError, match=r"'6.bias' has shape \[4\], expected \[3\]"):
        program.load_state_dict({**wrong, "2.bias": torch.ones(8), "6.bias": torch.ones(4)})
    assert all(torch.equal(value, state[key]) for key, value in program.state_dict().items())


def states_here() -> list[dict[str, Tensor]]:
    """Train, share the state, load another one, and share again."""
    torch.set_num_threads(1)
    program = start(MLP, cuts=["2", "4"], replicas=(2, 1, 1), micro_batches=2)
    batch = MLP.data(12)
    optimizer = torch.optim.AdamW(program.parameters(), lr=0.01)
    for _ in range(3):
        program.step(*batch.args, target=batch.target)
        optimizer.step()
        optimizer.zero_grad()
    trained = program.state_dict()
    program.load_state_dict({key: value + 1 for key, value in trained.items()})
    return [trained, program.state_dict()]


def test_without_strict_what_is_missing_stays_and_what_is_unknown_is_left_out() -> None:
    model = ZOO["mlp"].build()
    batch = ZOO["mlp"].data(12)
    program = compile(
        model,
        Cluster.local(2),
        example_inputs=batch.args,
        example_target=batch.target,
        loss_fn=ZOO["mlp"].loss_fn,
        tensor=(2,),
        costs="estimated",
    )
    before = program.state_dict()
    program.load_state_dict({"0.weight": before["0.weight"] + 1, "other": torch.ones(1)}, strict=False)
    after = program.state_dict()
    assert torch.equal(after["0.weight"], before["0.weight"] + 1)
    assert all(torch.equal(after[name], before[name]) for name in before if name != "0.weight")
    with pytest.raises(CheckpointError, match="expected"):
        program.load_state_dict({"0.weight": torch.ones(1)}, strict=False)


def test_on_ranks_of_their_own_all_have_the_whole_state() -> None:
    expected = train_eagerly(MLP, MLP.build(), MLP.data(12)).parameters
    for trained, moved in run_ranks(states_here, 4, limit_s=120.0):
        assert list(trained) == list(expected)
        for key, value in expected.items():
            torch.testing.assert_close(trained[key], value, rtol=1e-8, atol=1e-10)
            assert torch.equal(moved[key], trained[key] + 1)
