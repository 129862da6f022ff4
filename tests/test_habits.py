"""Each habit of users either matches one device under every plan, or is refused by name."""

from __future__ import annotations

import pytest
import torch
from against_eager import assert_matches
from habits import HABITS


@pytest.mark.parametrize("name", sorted(HABITS))
def test_a_habit_trains_as_on_one_device(name: str) -> None:
    torch.manual_seed(3)
    assert_matches(HABITS[name]())
