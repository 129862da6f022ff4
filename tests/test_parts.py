"""A program says when its model is made of other tensors than those that it computes with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from against_eager import compiled
from habits import Habit, Net, classes, cross_entropy, features
from torch import nn

from efftra_fx.errors import InputError
from efftra_fx.parts import Parts


def _module(model: Any) -> None:
    model.b = nn.Linear(6, 6).double()


def _parameter(model: Any) -> None:
    model.b.weight = nn.Parameter(model.b.weight.detach() * 2)


def _assigned(model: Any) -> None:
    model.a.load_state_dict({name: tensor * 2 for name, tensor in model.a.state_dict().items()}, assign=True)


def _buffer(model: Any) -> None:
    model.seen = model.seen + 1


REPLACED: dict[str, Callable[[Any], None]] = {
    "module 'b'": _module,
    "parameter 'b.weight'": _parameter,
    "parameter 'a.weight'": _assigned,
    "buffer 'seen'": _buffer,
}


@pytest.mark.parametrize("what", REPLACED)
def test_what_was_replaced_after_compiling_is_refused_by_name(what: str) -> None:
    torch.manual_seed(3)
    model = Net(lambda m, h: h + m.seen)
    model.register_buffer("seen", torch.ones(6))
    habit = Habit(model.double(), (features(),), classes(), cross_entropy)
    program = compiled(habit, stages=2, micro_batches=2)
    program.step(*habit.args, target=habit.target)
    REPLACED[what](model)
    words = f"^{what} of the model was replaced since the step was captured, .* compile the model again$"
    with pytest.raises(InputError, match=words):
        program.step(*habit.args, target=habit.target)
    with pytest.raises(InputError, match=words):
        program.evaluate(*habit.args)


def test_values_written_in_place_and_new_parts_are_no_replacement() -> None:
    model = Net()
    parts = Parts(model)
    model.load_state_dict({name: tensor * 2 for name, tensor in model.state_dict().items()})
    model.register_buffer("late", torch.ones(1))
    model.float()
    assert parts.replaced() is None
    model.c = nn.Linear(6, 3)
    assert parts.replaced() == "module 'c'"
