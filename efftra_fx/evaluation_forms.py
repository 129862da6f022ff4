"""The evaluations of a program, one for each form of batch that was met: other lengths, flags, ways through a branch.

As in training: a form that differs from a known one in sizes alone comes from one trace for all sizes, and is checked
against eager like any other.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from efftra_fx.alike import same_evaluation
from efftra_fx.build import Built
from efftra_fx.captured import surroundings_of
from efftra_fx.compiler import Options
from efftra_fx.errors import EfftraError
from efftra_fx.evaluation import Evaluation, compile_evaluation, is_output, python_holds, rows_of_batch
from efftra_fx.meta import OUTPUTS
from efftra_fx.signature import Call
from efftra_fx.step_forms import tell
from efftra_fx.variants import MANY_VARIANTS, MOST_DESCRIBED, MOST_VARIANTS, note_of_many
from efftra_fx.varying import Traces
from efftra_fx.world import World


@dataclass
class EvaluationForms:
    """What was compiled, the oldest first, and the traces for all sizes; `met` is the form that a batch had last."""

    kept: list[Evaluation] = field(default_factory=list)
    traces: Traces = field(default_factory=lambda: Traces("evaluation"))
    met: dict[str, Evaluation] = field(default_factory=dict)
    seconds: float = 0.0
    count: int = 0
    left: set[str] = field(default_factory=set)  # buffers of which it was said that no evaluation writes them

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

    def add(
        self,
        call: Call,
        tensors: Sequence[Tensor],
        described: str,
        model: nn.Module,
        built: Built,
        options: Options,
        world: World,
    ) -> Evaluation:
        """Compile the evaluation of a new form of batch and keep it; a collective call.

        With more than are kept, all others are let go.
        """
        problem: EfftraError | None = None
        evaluation: Evaluation | None = None
        begin = time.perf_counter()
        try:
            owners = {p.name: p.stages for p in built.back.wiring.parameters}
            sharded, device, plan = built.back.sharded, world.device.type, built.back.plan
            dims, alike = {**built.front.dims, **options.batch_dims}, options.rng == "layout_free"
            evaluation = compile_evaluation(
                model, call, tensors, plan, owners, sharded, device, dims, alike, self.traces, self.kept
            )
            rows_of_batch(call, tensors, evaluation.dims)
        except EfftraError as error:
            problem = error
        world.agree(problem, world.calls)
        assert evaluation is not None
        same_evaluation(evaluation, world)
        self.seconds += time.perf_counter() - begin
        if self.count == MANY_VARIANTS:
            self.traces.notes.append(note_of_many(MANY_VARIANTS, self.seconds))
        self._note_writes(evaluation)
        tell(self.traces.notes, world)
        if len(self.kept) >= MOST_VARIANTS:
            self.kept.clear()
            self.met.clear()
        self.count += 1
        self.kept.append(evaluation)
        self.met[described] = evaluation
        return evaluation

    def _note_writes(self, evaluation: Evaluation) -> None:
        """Say once which buffers the model writes in eval mode, and an evaluation does not."""
        written = [name for name in OUTPUTS[evaluation.captured.gm].buffers if name not in self.left]
        if written:
            self.left.update(written)
            names = ", ".join(f"'{name}'" for name in written)
            self.traces.notes.append(
                f"in eval mode forward writes {names}, which evaluate leaves as it is, so that it does not disturb "
                "training; where that is not meant, let forward ask self.training"
            )


def _answers(form: Evaluation, named: Mapping[str, Any], buffers: Mapping[str, Tensor]) -> bool:
    guards = form.captured.guards
    return guards is None or guards.broken(dict(named), buffers) is None


def _is_the_models(form: Evaluation, model: nn.Module, tensors: Sequence[Tensor]) -> bool:
    return python_holds(model, form.captured, tensors) and is_output(model, form.captured, tensors)
