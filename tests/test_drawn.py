"""Whatever model is drawn: it trains, evaluates and is saved as on one device, or is refused by name."""

from __future__ import annotations

from collections import Counter

import pytest
from drawn import CannotTrainError, Part, Recipe, Run, hold
from drawn_layers import DRAWN
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from strategies_drawn import recipes, runs

from efftra_fx.errors import EfftraError

QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]
LOTS = 10
FEW = 0.1  # the share of models that may be refused

pytestmark = [
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad"),
    pytest.mark.filterwarnings("ignore:Converting a tensor"),
]


def outcome(recipe: Recipe, run: Run) -> str:
    """Fail where a model trains otherwise than on one device; say whether it trains at all, and whether so here."""
    try:
        hold(recipe, run)
    except CannotTrainError:
        return "cannot be trained"
    except EfftraError as error:
        event(f"refused: {type(error).__name__}")
        return "refused"
    return "trained"


FOUND = {
    "bins of what mixes rows": (
        Recipe(
            (
                Part("counts of words", 3),
                Part("solved", 4),
                Part("experts by words", 4),
                Part("spectral norm", 4),
                Part("solved", 4),
                Part("in bins", 4, way=0),
                Part("bags of words", way=2),
            ),
            loss="rows in a loop",
            seed=322,
        ),
        Run((1, 1), 5, ((6, 3), (13, 3)), late=True, optimizer="adamw"),
    ),
    "roundings of what mixes rows, straight through": (
        Recipe(
            (
                Part("divided by the norm", way=0),
                Part("numpy", way=0),
                Part("a derivative", way=0),
                Part("experts by words"),
                Part("solved", way=0),
                Part("rows shifted", way=2),
                Part("rounded", 4),
            ),
            masked=False,
            seed=551,
        ),
        Run((2,), 1, ((4, 3), (3, 3))),
    ),
    "half of the rows beside lengths": (
        Recipe((Part("packed"), Part("linear")), loss="hardest", masked=False, seed=619),
        Run((2,), 3, ((6, 5), (3, 5))),
    ),
    "a block of two names in a model that runs as it is": (
        Recipe((Part("a router with balance", 3), Part("cut off"), Part("cut off", again=1)), decides=True),
        Run((2,), 2, ((7, 5), (3, 5))),
    ),
}


@pytest.mark.parametrize("what", FOUND)
def test_what_was_drawn_and_found_once_trains_as_on_one_device(what: str) -> None:
    assert outcome(*FOUND[what]) == "trained"


@settings(max_examples=3, deadline=None, suppress_health_check=QUIET)
@given(recipes(4), runs())
def test_a_drawn_model_trains_as_on_one_device(recipe: Recipe, run: Run) -> None:
    outcome(recipe, run)


@pytest.mark.long
@pytest.mark.timeout(0)
@pytest.mark.parametrize("lot", range(LOTS))
def test_many_drawn_models_train_as_on_one_device_and_few_are_refused(lot: int) -> None:
    tally: Counter[str] = Counter()

    @settings(max_examples=60, deadline=None, suppress_health_check=QUIET)
    @given(st.just(lot), recipes(), runs())
    def draw(lot: int, recipe: Recipe, run: Run) -> None:
        tally[outcome(recipe, run)] += 1

    draw()
    assert tally["refused"] <= FEW * (tally["refused"] + tally["trained"])


@pytest.mark.long
@pytest.mark.parametrize("name", DRAWN)
def test_every_layer_trains_as_on_one_device(name: str) -> None:
    batches = ((6, 4), (6, 4), (3, 4), (1, 4), (13, 4), (5, 3))
    for size, replicas in ((2, (2, 1)), (4, (1, 2))):
        recipe = Recipe((Part(name, size), Part("linear")))
        assert outcome(recipe, Run(replicas, 3, batches)) == "trained"
