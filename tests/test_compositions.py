"""Models put together at random train as on one device, under random plans."""

from __future__ import annotations

import pytest
import torch
from against_eager import assert_matches
from habits import Habit
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from strategies_models import LAYERS, Composed, models, token_loss

SHAPES = ((1,), (2,), (3,), (1, 1), (2, 1), (1, 2), (1, 1, 1))
RELAXED = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]


def hold(habit: Habit, shapes: list[tuple[int, ...]], micro_batches: int) -> None:
    """Fail unless the model matches one device under these plans."""
    assert isinstance(habit.model, Composed)
    note(f"{[type(layer).__name__ for layer in habit.model.layers]} {habit.model.ways} {habit.model.again}")
    assert_matches(habit, [(shape, micro_batches) for shape in shapes])


@given(models(), st.lists(st.sampled_from(SHAPES), min_size=1, max_size=1), st.integers(1, 4))
@settings(max_examples=5, suppress_health_check=RELAXED, deadline=None)
def test_a_random_model_trains_as_on_one_device(
    habit: Habit, shapes: list[tuple[int, ...]], micro_batches: int
) -> None:
    hold(habit, shapes, micro_batches)


@pytest.mark.long
@given(models(), st.lists(st.sampled_from(SHAPES), min_size=2, max_size=3, unique=True), st.integers(1, 5))
@settings(max_examples=300, suppress_health_check=RELAXED, deadline=None)
def test_many_random_models_train_as_on_one_device(
    habit: Habit, shapes: list[tuple[int, ...]], micro_batches: int
) -> None:
    hold(habit, shapes, micro_batches)


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(LAYERS))
def test_every_kind_of_layer_trains_as_on_one_device(name: str) -> None:
    for way in (0, 1):
        torch.manual_seed(1)
        ids = torch.randint(0, 9, (5, 4))
        model = Composed([name, "linear"], [way, 1], [False, False]).double()
        if name.startswith("batch norm"):
            model.layers[0].eval()
        assert_matches(Habit(model, (ids,), ids.roll(1, 1), token_loss(0), tolerance=1e-8))
