"""Every rank makes the same calls: where one does not, all are told at once which rank called what."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import Outcome, outcomes_of, run_ranks
from torch import Tensor, nn

from efftra_fx import Cluster, CompiledModel, EfftraError, compile
from efftra_fx.replicas import is_time
from efftra_fx.runtime.whereabouts import HERE, Call, Place, never_meet

X = torch.linspace(-1, 1, 32, dtype=torch.float64).reshape(8, 4).sin()
Y = torch.arange(8) % 3


def compiled(replicas: tuple[int, ...] = (1, 1), **options: Any) -> CompiledModel:
    """Compile a small net for the launched ranks, or two in this process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    given: dict[str, Any] = {"micro_batches": 2, "costs": "estimated", "timeout": 60.0, **options}
    cluster = given.pop("cluster", None) or Cluster.from_env()
    return compile(
        model, cluster, example_inputs=(X,), example_target=Y, loss_fn=F.cross_entropy, replicas=replicas, **given
    )


def attempts(*calls: Callable[[], Any]) -> list[str]:
    """Return what each call said."""
    said = []
    for call in calls:
        try:
            call()
            said.append("fine")
        except EfftraError as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def calls_of_one_rank() -> list[str]:
    """Make each collective call on rank 0 while rank 1 goes on to its next step."""
    program = compiled()
    first = program.rank == 0
    state, scaler = program.state_dict(), torch.amp.GradScaler("cpu", init_scale=8.0)
    other = {name: value + program.rank for name, value in state.items()}
    twin = program.with_plan(program.plan)

    def step() -> Tensor:
        return program.step(X, target=Y)

    return attempts(
        lambda: program.clip_grad_norm_(1.0) if first else step(),
        lambda: program.load_state_dict(state) if first else step(),
        lambda: program.check(X, target=Y, show=False) if first else step(),
        lambda: program.with_plan(program.plan) if first else step(),
        lambda: compiled() if first else step(),
        lambda: program.step(X, target=Y, scaler=scaler if first else None),
        lambda: program.load_state_dict(other),
        lambda: program.load_state_dict({} if first else state),
        lambda: program.clip_grad_norm_(-1.0 if first else 1.0),
        lambda: program.clip_grad_norm_(2.0 if first else 1.0),
        lambda: twin.step(X, target=Y) if first else step(),
        step,
    )


def test_a_call_that_one_rank_makes_alone_is_named_on_all_ranks() -> None:
    said, others = run_ranks(calls_of_one_rank, 2, limit_s=120.0)
    assert [one.replace("rank 0: ", "") for one in said] == [one.replace("rank 0: ", "") for one in others]
    for words, found in zip(
        (
            "make different calls: rank 0 clip_grad_norm_, its call 3, rank 1 step, its call 3; every",
            "make different calls: rank 0 load_state_dict, its call 4, rank 1 step, its call 4; every",
            "make different calls: rank 0 check, its call 5, rank 1 step, its call 5; every",
            "make different calls: rank 0 with_plan, its call 6, rank 1 step, its call 6; every",
            "make different calls: rank 0 Cluster.from_env, its call 7, rank 1 step, its call 7; every",
            "target int64 [8], scaled by 8 (way 0 through the model), rank 1 has",
            "were given different states: rank 0 has '0.weight: float64 [6, 4] [",
            "the state does not fit the model: '0.weight' is missing",
            "max_norm must be a number of 0 or more, got -1.0",
            "different arguments to clip_grad_norm_: rank 0 max_norm=2.0, norm_type=2.0, error_if_non",
            "rank 0 step of with_plan's program 1, its call 13, rank 1 step, its call 13; every",
            "fine",
        ),
        said,
        strict=True,
    ):
        assert words in found, found


def steps_of_two_programs() -> list[str]:
    """Step one program on rank 0 and another one on rank 1."""
    one, two = compiled(), compiled()
    return attempts(lambda: (one if one.rank == 0 else two).step(X, target=Y))


def test_ranks_in_calls_of_two_programs_are_told_long_before_the_time_limit() -> None:
    outcomes = outcomes_of(steps_of_two_programs, 2, limit_s=120.0)
    for outcome in outcomes:
        (said,) = outcome.value
        assert "InputError: the ranks make different calls: rank" in said, said
        assert "step (call 3 of program 1)" in said and "step (call 1 of program 2)" in said, said
        assert "at test_calls.py line" in said, said
        assert outcome.took_s < 40


def interrupt(gradient: Tensor) -> Tensor:
    """Be interrupted in a hook."""
    raise KeyboardInterrupt("enough")


def interrupted() -> None:
    """Be interrupted on rank 1 inside a call, by what is no error of this package."""
    program = compiled()
    program.step(X, target=Y)
    if program.rank == 1:
        for parameter in program.parameters():
            parameter.register_hook(interrupt)
    program.step(X, target=Y)
    program.step(X, target=Y)


def last_lines(outcomes: list[Outcome]) -> list[str]:
    """Return each rank's last line."""
    return [outcome.error.strip().splitlines()[-1] for outcome in outcomes]


def test_an_interruption_of_one_rank_ends_all() -> None:
    others, own = last_lines(outcomes_of(interrupted, 2, limit_s=120.0))
    assert "KeyboardInterrupt" in own
    assert "RankFailed: rank 1 failed: KeyboardInterrupt" in others or "rank 1" in others, others


def one_replica_alone(what: str) -> list[str]:
    """Do something on one of two replicas only."""
    program = compiled((2,))
    optimizer = torch.optim.SGD(program.parameters(), lr=0.1)
    alone = program.rank == 0

    def update() -> None:
        program.step(X, target=Y)
        if what == "step" and alone:
            optimizer.step()
        if what == "rate":
            optimizer.param_groups[0]["lr"] = 0.1 + program.rank * 1e-6
            optimizer.step()
        if what == "alike":
            optimizer.step()
        optimizer.zero_grad()

    return [*attempts(update, update, update, update), *attempts(lambda: program.state_dict())]


@pytest.mark.parametrize("what", ["step", "rate", "alike"])
def test_replicas_that_were_updated_apart_are_named(what: str) -> None:
    outcomes = outcomes_of(one_replica_alone, 2, what, limit_s=120.0)
    for outcome in outcomes:
        if what == "alike":
            assert outcome.value == ["fine"] * 5, outcome
            continue
        assert "ranks 0 and 1 both hold '0.weight', with the same gradient, but not" in outcome.value[1], outcome
        assert "both hold '0.weight'" in outcome.value[4]
    told = "rank 1 updated no parameter after the first step, but rank 0 did"
    assert (told in outcomes[0].output) == (what == "step")


def test_calls_from_two_threads_are_refused() -> None:
    program = compiled(cluster=Cluster.local(2))
    said: list[str] = []

    def inside(gradient: Tensor) -> Tensor:
        thread = threading.Thread(target=lambda: said.extend(attempts(lambda: program.evaluate(X))))
        thread.start()
        thread.join()
        return gradient

    next(program.parameters()).register_hook(inside)
    program.step(X, target=Y)
    program.step(X, target=Y)
    assert len(said) == 2
    assert "evaluate was called while another thread is in step (call 1 of program 0); ranks must" in said[0]
    assert program.evaluate(X).shape == (8, 3)


def test_a_wrong_number_of_arguments_is_the_callers_own_error() -> None:
    program = compiled(cluster=Cluster.local(2))
    with pytest.raises(TypeError, match="max_norm"):
        program.clip_grad_norm_()  # type: ignore[call-arg]
    program.step(X, target=Y)
    norm = program.clip_grad_norm_(1e9, foreach=True)
    assert torch.allclose(norm, program.clip_grad_norm_(1e9)) and norm > 0


def test_ranks_meet_in_one_call_or_in_one_that_is_behind_them() -> None:
    mine, earlier, later = Call(1, 5, "step"), Call(1, 4, "step"), Call(2, 1, "evaluate")
    HERE.begun[1] = 5
    try:
        assert never_meet(mine, {1: Place(mine, "", 9), 2: Place(earlier, "", 8), 3: Place(None, "", 7)}) is None
        assert never_meet(mine, {1: Place(mine, "", 9), 2: Place(later, "a.py line 3", 8)}) == 2
    finally:
        del HERE.begun[1]
    assert str(Place(later, "a.py line 3", 8)) == "in evaluate (call 1 of program 2), at a.py line 3"
    assert Place.from_data(Place(later, "a.py line 3", 8).to_data()) == Place(later, "a.py line 3", 8)
    assert [steps for steps in range(10) if is_time(steps)] == [1, 3, 7]
