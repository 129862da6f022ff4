"""The evaluations of a program, one for each form of batch that was met: other lengths, flags, ways through a branch.

As in training: a form that differs from a known one in sizes alone comes from one trace for all sizes, and is checked
against eager like any other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from efftra_fx.captured import surroundings_of
from efftra_fx.evaluation import Evaluation, is_output, python_holds
from efftra_fx.signature import Call
from efftra_fx.variants import MOST_DESCRIBED
from efftra_fx.varying import Traces


@dataclass
class EvaluationForms:
    """What was compiled, the oldest first, and the traces for all sizes; `met` is the form that a batch had last."""

    kept: list[Evaluation] = field(default_factory=list)
    traces: Traces = field(default_factory=lambda: Traces("evaluation"))
    met: dict[str, Evaluation] = field(default_factory=dict)
    seconds: float = 0.0
    count: int = 0

    def find(
        self, model: nn.Module, call: Call, tensors: Sequence[Tensor], buffers: Mapping[str, Tensor], described: str
    ) -> Evaluation | None:
        """Return the evaluation that a batch of this description is for, None where it is of a new form."""
        around, named = surroundings_of(model), dict(zip(call.tensor_names, tensors, strict=True))
        likely = self.met.get(described)
        order = self.kept if likely is None else [likely, *self.kept]
        for form in order:
            fits = form.around == around and form.fits(call, tensors) and form.captured.allows(tensors)
            if fits and _answers(form, named, buffers) and _is_the_models(form, model, tensors):
                if len(self.met) >= MOST_DESCRIBED:
                    self.met.clear()
                self.met[described] = form
                return form
        return None

    def keep(self, form: Evaluation, described: str, most: int) -> None:
        """Keep one more evaluation; with more than `most` all others are let go."""
        if len(self.kept) >= most:
            self.kept.clear()
            self.met.clear()
        self.count += 1
        self.kept.append(form)
        self.met[described] = form


def _answers(form: Evaluation, named: Mapping[str, Any], buffers: Mapping[str, Tensor]) -> bool:
    guards = form.captured.guards
    return guards is None or guards.broken(dict(named), buffers) is None


def _is_the_models(form: Evaluation, model: nn.Module, tensors: Sequence[Tensor]) -> bool:
    return python_holds(model, form.captured, tensors) and is_output(model, form.captured, tensors)
