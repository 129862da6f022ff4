"""Any model to a functional graph of the whole training step.

The graph computes `loss = loss_fn(model(*args, **kwargs), target)`. Its placeholders
are the parameters, buffers, constants and inputs, each with a `ROLE`; its outputs are
the loss and then the new values of the buffers that the forward writes.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export.graph_signature import InputKind
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from efftra_fx import private
from efftra_fx.capture_align import OtherOperatorsError, align, keep_places
from efftra_fx.capture_checkpoints import checkpoints_inline
from efftra_fx.capture_encoders import padding_zeroed
from efftra_fx.capture_export import Exported, export_step
from efftra_fx.capture_guards import (
    Answers,
    Asked,
    AsksValuesError,
    Guards,
    depends_on_chance,
    no_questions,
    split_guards,
)
from efftra_fx.capture_loss import WholeLoss, dtype_of_loss
from efftra_fx.capture_normal import make_normal
from efftra_fx.capture_norms import averages_of_all_batches, norms_of_one_device
from efftra_fx.capture_opaque import Watch, alignments_kept_whole, functions_kept_whole, modules_kept_whole
from efftra_fx.capture_packed import sequences_kept_padded
from efftra_fx.capture_refused import own_chance_refused
from efftra_fx.containers import Tree, take_apart
from efftra_fx.errors import CaptureError, EfftraError, LossError
from efftra_fx.held_buffers import HeldBuffers, assignments_written_back
from efftra_fx.meta import CONSTANTS, OUTPUTS, PATH, ROLE, SOURCE, Outputs, Role
from efftra_fx.places import is_user_file, line_of_error
from efftra_fx.python_state import PythonUse
from efftra_fx.signature import Call, distinct
from efftra_fx.walks import ancestors

LossFn = Callable[..., Any]


class WritesParametersError(CaptureError):
    """Raise where forward writes parameters, which no other way of capturing it would mend."""


@dataclass(frozen=True)
class Captured:
    """A captured computation.

    `gm` has placeholders with roles; `batch_leaves` says for each tensor leaf of the
    call along which dimension it splits by sample (None: it does not); `symbolic`
    says whether the number of rows is a symbol in the graph; `out_tree` is the
    structure of a captured model output (evaluation graphs). `guards` say for which
    inputs the graph is the model; `opaque` are the modules that it calls as they are,
    each with the reason; `flags` is how the model was switched (see `flags_of`).
    """

    gm: fx.GraphModule
    call: Call
    batch_leaves: tuple[int | None, ...]
    symbolic: bool
    out_tree: OutputTree | None = None
    guards: Guards | None = None
    opaque: tuple[tuple[str, str], ...] = ()
    flags: tuple[Any, ...] = ()
    python: PythonUse = PythonUse()  # what forward reads and writes in Python
    whole_loss: str = ""  # why the loss runs as it is, on the whole batch; empty where it is in the graph


@dataclass(frozen=True)
class OutputTree:
    """How a model's output is put together: the leaves that the graph computes, and those that are constants."""

    tree: Tree
    moving: tuple[bool, ...]
    constants: tuple[Any, ...]

    def rebuild(self, values: Sequence[Any]) -> Any:
        """Return the output with these values at the leaves that the graph computes."""
        source = iter(values)
        flat = [next(source) if m else constant for m, constant in zip(self.moving, self.constants, strict=True)]
        return self.tree.rebuild(flat)


class _Step(nn.Module):
    def __init__(
        self, model: nn.Module, loss_fn: LossFn | None, call: Call, want: str, note_tree: Callable[[OutputTree], None]
    ) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn
        self.call_structure = call
        self.want = want
        self.note_tree = note_tree  # a tracer takes back what forward writes on modules, so it is told outside
        self.answers: Answers | None = None
        self.note_guards: Callable[[list[Asked]], None] = lambda guards: None
        self.call_loss: LossFn | None = None  # in place of the loss function itself

    def forward(self, tensors: list[Tensor]) -> Any:
        if self.answers is None:
            with no_questions(), assignments_written_back():
                return self.result(tensors)
        guards: list[Asked] = []
        with self.answers.replaying(guards), assignments_written_back():
            result = self.result(tensors)
        self.note_guards(guards)
        return (*(result if isinstance(result, tuple) else (result,)), *(one.value for one in guards))

    def result(self, tensors: Sequence[Tensor]) -> Any:
        """Return the loss, or the leaves of the output."""
        args, kwargs, target = self.call_structure.rebuild(tensors)
        output = self.model(*args, **kwargs)
        if self.want == "loss":
            return loss_of(output, self.call_loss or self.loss_fn, target, self.call_structure.has_target)
        leaves, tree = take_apart(output)
        flat = [leaf for _, leaf in leaves]
        moving = tuple(isinstance(leaf, (Tensor, torch.SymInt)) for leaf in flat)
        constants = tuple(None if m else leaf for leaf, m in zip(flat, moving, strict=True))
        self.note_tree(OutputTree(tree, moving, constants))
        return tuple(leaf for leaf, m in zip(flat, moving, strict=True) if m)


def _needs_target(loss_fn: LossFn) -> bool:
    """Say whether a loss function has a second argument without a default."""
    try:
        parameters = inspect.signature(loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn).parameters
    except (TypeError, ValueError):  # a function written in C may tell nothing
        return False
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [p for p in parameters.values() if p.kind in kinds and p.default is inspect.Parameter.empty]
    return len(needed) > 1


def loss_of(output: Any, loss_fn: LossFn | None, target: Any, has_target: bool) -> Tensor:
    """Return the scalar loss of a model output, in the ways in which a user may give it.

    Raises LossError where there is none or it is not a scalar tensor.
    """
    if loss_fn is not None:
        name = getattr(loss_fn, "__name__", type(loss_fn).__name__).replace("<lambda>", "loss_fn")
        if not has_target and _needs_target(loss_fn):
            raise LossError(
                f"{name} takes a target, but none was given; give example_target= to compile and target= to each step"
            )
        loss = loss_fn(output, target) if has_target else loss_fn(output)
    else:
        loss, name = _own_loss(output), "the model"
    if not isinstance(loss, Tensor):
        raise LossError(f"{name} returned {type(loss).__name__}, expected a scalar tensor as the loss")
    if loss.numel() != 1:
        raise LossError(
            f"{name} returned a loss of shape {_sizes(loss)}, expected a scalar; reduce it, for instance by .mean()"
        )
    if not loss.is_floating_point():
        kind = str(loss.dtype).removeprefix("torch.")
        raise LossError(f"{name} returned a loss of dtype {kind}, expected a real floating-point number")
    return loss.reshape(())


def _sizes(tensor: Tensor) -> list[int]:
    """Return a tensor's sizes as those of the example, also while sizes are symbols."""
    return [size if isinstance(size, int) else int(size.node.hint) for size in tensor.shape]


def _own_loss(output: Any) -> Any:
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping) and output.get("loss") is not None:
        return output["loss"]
    loss = getattr(output, "loss", None)
    if loss is None:
        raise LossError(
            f"the model returned {type(output).__name__} without a loss; "
            "give loss_fn=, or the labels with which the model computes its own loss"
        )
    return loss


def capture(
    model: nn.Module,
    call: Call,
    tensors: Sequence[Tensor],
    batch_leaves: Sequence[int | None],
    loss_fn: LossFn | None = None,
    want: str = "loss",
    whole_loss: str = "",
    divided: bool = False,
    moving: Sequence[Sequence[int]] = (),
) -> Captured:
    """Capture the step (`want="loss"`) or the model's output (`want="output"`) as a graph.

    Leaves with a batch dimension get a symbolic size there; where the model fixes that
    size, the graph is captured at the size of the example and `symbolic` is False. So do each leaf's
    `moving` dimensions where the model allows it.
    With `whole_loss`, a reason, the loss function is one node that sees the whole batch; or, if it may be
    `divided`, the part at hand.
    Raises CaptureError where the model cannot be captured.
    """
    dims = tuple(batch_leaves)
    attempt = _Attempt(model, call, distinct(tensors), dims, loss_fn, want, flags=flags_of(model), moving=moving)
    if whole_loss:
        assert loss_fn is not None
        attempt.whole_loss = WholeLoss(loss_fn, whole_loss, _dtype_of_loss(attempt), divided)
    try:
        return attempt.capture()
    except AsksValuesError as first:
        return _with_answers(attempt, first)
    except WritesParametersError:
        raise
    except CaptureError:
        with _state_kept(attempt), torch.enable_grad(), _own_code(attempt):  # where the model itself fails, say that
            _eager(attempt).result([t.clone() for t in attempt.tensors])
        raise


def flags_of(model: nn.Module) -> tuple[Any, ...]:
    """Return how a model is switched: which modules train, which parameters want gradients, autocast, and hooks."""
    switches = (*(m.training for m in model.modules()), *(p.requires_grad for p in model.parameters()))
    return (*switches, *surroundings_of(model))


def surroundings_of(model: nn.Module) -> tuple[Any, ...]:
    """Return what holds around a model in either mode: autocast, and hooks."""
    casts = [(kind, torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    return (*casts, *private.hook_numbers(model))


@dataclass
class _Attempt:
    """One way to capture a step: with answers for what it asks, and with some modules kept whole."""

    model: nn.Module
    call: Call
    tensors: tuple[Tensor, ...]
    batch_leaves: tuple[int | None, ...]
    loss_fn: LossFn | None
    want: str
    answers: Answers | None = None
    flags: tuple[Any, ...] = ()
    opaque: dict[str, str] = field(default_factory=dict)
    watches: tuple[Watch, Watch] | None = None
    whole_loss: WholeLoss | None = None
    moving: Sequence[Sequence[int]] = ()

    def capture(self) -> Captured:
        """Export the step; raises AsksValuesError where it asks for values that nobody wrote down."""
        trees: list[OutputTree] = []
        guards: list[list[Asked]] = []
        step = _Step(self.model, self.loss_fn, self.call, self.want, trees.append)
        step.training = self.model.training
        step.answers, step.note_guards, step.call_loss = self.answers, guards.append, self.whole_loss
        exported = self.exported(step, self.tensors, self.batch_leaves, self.moving)
        asked = guards[-1] if guards else []
        gm, found = _plain_graph(exported, step, asked)
        if self.want == "loss":
            _refuse_least_rows(gm, self.batch_leaves)
        tree = trees[-1] if trees else None
        symbolic = _is_symbolic(gm, self.batch_leaves)
        if not symbolic and not self.moving:
            gm, found = self.aligned(step, gm, found, guards)
            symbolic = _is_symbolic(gm, self.batch_leaves)
        reason = self.whole_loss.reason if self.whole_loss is not None else ""
        opaque = tuple(self.opaque.items())
        return Captured(gm, self.call, self.batch_leaves, symbolic, tree, found, opaque, self.flags, whole_loss=reason)

    def exported(
        self,
        step: _Step,
        tensors: tuple[Tensor, ...],
        batch_leaves: Sequence[int | None],
        moving: Sequence[Sequence[int]] = (),
    ) -> Exported:
        """Export the step of these tensors, with all in it that is put otherwise while a graph is captured."""
        kept = {path: self.model.get_submodule(path) for path in self.opaque}
        with ExitStack() as stack:
            stack.enter_context(functions_kept_whole())
            stack.enter_context(alignments_kept_whole())
            stack.enter_context(averages_of_all_batches())
            stack.enter_context(norms_of_one_device())
            stack.enter_context(own_chance_refused())
            stack.enter_context(checkpoints_inline())
            stack.enter_context(sequences_kept_padded())
            stack.enter_context(padding_zeroed(self.want == "loss"))
            if self.watches is not None:
                stack.enter_context(modules_kept_whole(kept, *self.watches))
            return export_step(step, tensors, batch_leaves, moving)

    def aligned(
        self, step: _Step, gm: fx.GraphModule, found: Guards | None, asked: list[list[Asked]]
    ) -> tuple[fx.GraphModule, Guards | None]:
        """Return graph and guards for any number of rows where the exporter gave them for the example's alone."""
        place = next((i, d) for i, d in enumerate(self.batch_leaves) if d is not None)
        rows = self.tensors[place[0]].shape[place[1]]
        if rows < 3:
            return gm, found
        graphs, guards = [], []
        for count in (rows, rows - 1):
            part = [
                t if d is None else t.narrow(d, 0, count) for t, d in zip(self.tensors, self.batch_leaves, strict=True)
            ]
            exported = self.exported(step, tuple(part), [None] * len(part))
            graph, guard = _plain_graph(exported, step, asked[-1] if asked else [])
            graphs.append(graph)
            guards.append(guard)
        name = self.call.tensor_names[place[0]]
        try:
            one = align(graphs[0], graphs[1], (rows, rows - 1), (name, place[1]))
            if guards[0] is not None and guards[1] is not None:
                dims = dict(zip(self.call.tensor_names, self.batch_leaves, strict=True))
                read = [(role.name, d) for role in guards[0].roles if (d := dims.get(role.name)) is not None]
                both = align(guards[0].gm, guards[1].gm, (rows, rows - 1), next(iter(read), (name, place[1])))
                found = replace(guards[0], gm=both)
        except OtherOperatorsError as error:
            if not error.path:
                raise CaptureError(str(error)) from error
            asks = AsksValuesError(str(error))
            parts = error.path.split(".")
            asks.paths = tuple(".".join(parts[:count]) for count in range(len(parts), 0, -1))
            asks.reason = "it computes other operators for other numbers of rows"
            raise asks from error
        again = _Replay(step, one)
        again.training = step.training
        exported = export_step(again, self.tensors, self.batch_leaves)
        whole, _ = _plain_graph(exported, again, [])
        keep_places(one, whole)
        return whole, found


class _Replay(_Step):
    """The step as its graph says, on the model's own tensors."""

    def __init__(self, step: _Step, gm: fx.GraphModule) -> None:
        super().__init__(step.model, step.loss_fn, step.call_structure, step.want, step.note_tree)
        self.call_loss = step.call_loss
        self.roles = [ROLE[n] for n in gm.graph.nodes if n.op == "placeholder"]
        self.outputs = OUTPUTS[gm]
        self.held = dict(CONSTANTS[gm])
        self.run = fx.Interpreter(gm).run

    def forward(self, tensors: list[Tensor]) -> Any:
        source = iter(tensors)
        own = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        if isinstance(self.loss_fn, nn.Module):
            for name, tensor in (*self.loss_fn.named_parameters(), *self.loss_fn.named_buffers()):
                own[f"loss_fn.{name}"] = tensor
        operands = []
        for role in self.roles:
            held = self.held if role.kind == "constant" else own
            operands.append(next(source) if role.kind == "input" else held[role.name])
        results = self.run(*operands)
        for name, value in zip(self.outputs.buffers, results[self.outputs.loss :], strict=True):
            own[name].copy_(value)
        return results[0] if self.want == "loss" else tuple(results[: self.outputs.loss])


def _refuse_least_rows(gm: fx.GraphModule, batch_leaves: Sequence[int | None]) -> None:
    """Raise CaptureError where the graph holds only from a number of rows on which a part may not have."""
    for node, dim in zip(_inputs(gm), batch_leaves, strict=True):
        size = node.meta["val"].shape[dim] if dim is not None else None
        least = private.least_size(size) if isinstance(size, torch.SymInt) and not size.node.expr.is_number else 0
        if least > 2:
            raise CaptureError(
                f"the model cannot be captured as a graph: it takes at least {least} rows, and a part of the batch may "
                "have fewer; select by a mask in place of a number of rows"
            )


def _is_symbolic(gm: fx.GraphModule, batch_leaves: Sequence[int | None]) -> bool:
    """Say whether every input's number of rows is a symbol."""
    for node, dim in zip(_inputs(gm), batch_leaves, strict=True):
        size = node.meta["val"].shape[dim] if dim is not None else None
        if isinstance(size, int) or (size is not None and size.node.expr.is_number):
            return False
    return True


def _with_answers(attempt: _Attempt, first: AsksValuesError) -> Captured:
    """Capture again with the answers of a real run; modules whose questions depend on parameters stay whole."""
    modules = {path: m for path, m in attempt.model.named_modules() if path}
    while True:
        try:
            attempt.answers, attempt.watches = _run_for_real(attempt, {path: modules[path] for path in attempt.opaque})
        except CaptureError as error:
            if first.reason == AsksValuesError.reason or isinstance(error, WritesParametersError):
                raise
            raise CaptureError(f"{first}; nor can parts of it run as they are: {error}") from error
        try:
            return attempt.capture()
        except AsksValuesError as again:
            # What an opaque module holds is asked again only where that could not be opaque itself.
            known = tuple(f"{q}." for q in attempt.opaque)
            left = (p for p in again.paths if p in modules and p not in attempt.opaque and not p.startswith(known))
            path = next(left, None)
            if path is None:
                raise CaptureError(str(again)) from (again.__cause__ or first)
            place = re.search(r' at (File "[^"]+", line \d+|[^ ;]+:\d+)', str(again))
            line = place[1] if place else ""
            kind = type(modules[path])
            alike = [
                p
                for p, m in modules.items()
                if type(m) is kind and not any(p.startswith(f"{q}.") for q in attempt.opaque)
            ]
            for inner in [q for q in attempt.opaque if any(q.startswith(f"{p}.") for p in alike)]:
                del attempt.opaque[inner]
            attempt.opaque.update({p: f"{again.reason} at {line}" if line else again.reason for p in alike})


def _run_for_real(attempt: _Attempt, kept: Mapping[str, nn.Module]) -> tuple[Answers, tuple[Watch, Watch]]:
    """Run the eager model on the example, and on a smaller batch; leave buffers and random state as they were."""
    sizes = {t.shape[d] for t, d in zip(attempt.tensors, attempt.batch_leaves, strict=True) if d is not None}
    rows = min(sizes, default=1)
    smaller = [
        t if d is None else t.narrow(d, 0, max(1, rows - 1))
        for t, d in zip(attempt.tensors, attempt.batch_leaves, strict=True)
    ]
    step = _eager(attempt)
    watches = Watch(kept), Watch(kept)
    answers = Answers()
    with _state_kept(attempt):
        with watches[0].on(), answers.recording(), _own_code(attempt):
            step.result([t.clone() for t in attempt.tensors])
        with watches[1].on(), _own_code(attempt, f"{max(1, rows - 1)} of its {rows} rows"):
            step.result([t.clone() for t in smaller])
    return answers, watches


def _eager(attempt: _Attempt) -> _Step:
    return _Step(attempt.model, attempt.loss_fn, attempt.call, attempt.want, lambda tree: None)


@contextmanager
def _state_kept(attempt: _Attempt) -> Iterator[None]:
    """Run the model as a step or an evaluation does; parameters, buffers and random state are afterwards as they were.

    Raises CaptureError where it writes parameters, also where autograd does not see it (through `.data`).
    """
    held = HeldBuffers(attempt.model)
    parameters = [(name, p, p.detach().clone()) for name, p in attempt.model.named_parameters()]
    try:
        with ExitStack() as stack:
            differentiated = attempt.want == "loss"
            for one in (
                torch.random.fork_rng(),
                torch.set_grad_enabled(differentiated),
                padding_zeroed(differentiated),
            ):
                stack.enter_context(one)
            stack.enter_context(sequences_kept_padded())
            stack.enter_context(norms_of_one_device())
            yield
    finally:
        held.restore()
        written = [name for name, p, value in parameters if not _same_bits(p, value)]
        with torch.no_grad():
            for _, p, value in parameters if written else ():
                p.copy_(value)
    if written:
        raise WritesParametersError(_writes_parameter(written[0]))


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Say whether two tensors are equal, NaN where the other is one too."""
    return torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all())


@contextmanager
def _own_code(attempt: _Attempt, part: str = "") -> Iterator[None]:
    """Run the user's own code on the example, or a part of it; raise CaptureError for what it raises."""
    try:
        yield
    except AsksValuesError as error:
        raise CaptureError(str(error)) from error
    except EfftraError:
        raise
    except Exception as error:
        place = line_of_error(error.__traceback__)
        what = f"{type(error).__name__}: {error}" + (f" at {place}" if place else "")
        if not part:
            who = "the model and its loss do" if attempt.want == "loss" else "the model does"
            raise CaptureError(f"{who} not run on these arguments, on one device either: {what}") from error
        placed = list(zip(attempt.call.tensor_names, attempt.batch_leaves, strict=True))
        rows = ", ".join(f"'{name}' along dimension {dim}" for name, dim in placed if dim is not None)
        whole = ", ".join(f"'{name}'" for name, dim in placed if dim is None)
        raise CaptureError(
            f"the step runs on the example, but not on {part}: {what}; rows were taken to lie in {rows}"
            + (f", and {whole} to have none" if whole else "")
            + "; where that is not so, say it, as in batch_dims={name: 1}"
        ) from error


def _dtype_of_loss(attempt: _Attempt) -> torch.dtype:
    """Run the eager step on the example and return the loss's dtype; leave the model and random state as they were."""
    function = attempt.loss_fn
    assert function is not None
    with _state_kept(attempt), _own_code(attempt):
        args, kwargs, target = attempt.call.rebuild([t.clone() for t in attempt.tensors])
        output, has_target = attempt.model(*args, **kwargs), attempt.call.has_target
        return dtype_of_loss(function, lambda: loss_of(output, function, target, has_target))


def _plain_graph(exported: Exported, step: _Step, asked: Sequence[Asked]) -> tuple[fx.GraphModule, Guards | None]:
    """Return the exported graph with roles on placeholders, tied parameters merged and checks dropped.

    The last results are those that were `asked`; they become the guards.
    """
    gm = exported.gm
    names = _canonical_names(step)
    constants: dict[str, Tensor] = {}
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    first: dict[tuple[str, str], fx.Node] = {}
    leaf_names = iter(step.call_structure.tensor_names)
    for node, (kind, target) in zip(placeholders, exported.placeholders, strict=True):
        role = _role(kind, target, names, leaf_names, exported, constants)
        if role.kind != "input" and (role.kind, role.name) in first:
            node.replace_all_uses_with(first[role.kind, role.name])
            gm.graph.erase_node(node)
            continue
        first[role.kind, role.name] = node
        ROLE[node] = role
    output = next(n for n in reversed(gm.graph.nodes) if n.op == "output")
    mutated = [(placeholders[number], *exported.placeholders[number]) for number in exported.written]
    for (node, kind, target), value in zip(mutated, list(output.args[0]), strict=False):
        if kind is InputKind.USER_INPUT:
            raise CaptureError(
                f"the model writes into its input '{ROLE[node].name}' in place; clone it in forward first"
            )
        if kind is InputKind.PARAMETER:
            raise WritesParametersError(_writes_parameter(names.get(target, _bare(target)), value))
    _lift(gm, constants)
    make_normal(gm.graph)
    values = list(output.args[0])
    news, results = values[: len(mutated)], values[len(mutated) :]
    _note_places(gm.graph, step)
    written = tuple(names.get(target, _bare(target)) for _, _, target in mutated)
    results, guards = _split_guards(gm, results, asked, written, constants)
    output.args = ((*results, *news),)
    gm.graph.eliminate_dead_code()
    _refuse_dynamic(gm)
    clean = fx.GraphModule(gm, gm.graph)
    clean.meta.clear()
    OUTPUTS[clean] = Outputs(len(results), written)
    CONSTANTS[clean] = constants
    clean.recompile()
    return clean, guards


def _writes_parameter(name: str, value: fx.Node | None = None) -> str:
    trace = "" if value is None else value.meta.get("stack_trace") or ""
    lines = [line.strip() for line in trace.splitlines()]
    users = [line for line in lines if line.startswith("File") and is_user_file(line.split('"')[1])]
    place = f" at {users[-1]}" if users else ""
    return (
        f"forward writes parameter '{name}' in place{place}, which every part of the batch would do; write it between "
        "steps (under torch.no_grad(), into program.parameters()), or make it a buffer if nothing trains it"
    )


def _lift(gm: fx.GraphModule, constants: dict[str, Tensor]) -> None:
    """Make placeholders of the constants that a graph holds."""
    for node in list(gm.graph.nodes):
        value = getattr(gm, str(node.target)) if node.op == "get_attr" else None
        if not isinstance(value, Tensor):
            continue
        with gm.graph.inserting_before(next(iter(gm.graph.nodes))):
            placeholder = gm.graph.placeholder(f"c_{node.target}")
        placeholder.meta = dict(node.meta)
        ROLE[placeholder] = Role("constant", placeholder.name)
        constants[placeholder.name] = value
        node.replace_all_uses_with(placeholder)
        gm.graph.erase_node(node)


def _split_guards(
    gm: fx.GraphModule,
    results: list[Any],
    asked: Sequence[Asked],
    written: Sequence[str],
    constants: Mapping[str, Tensor],
) -> tuple[list[Any], Guards | None]:
    """Take the guards out of the results; raises AsksValuesError for questions that inputs alone do not answer."""
    if not asked:
        return results, None
    count = len(results) - len(asked)
    CONSTANTS[gm] = constants
    guards, bound = split_guards(gm, results[count:], asked, written)
    if bound:
        line = next(one.line for node, one in zip(results[count:], asked, strict=True) if node is bound[0])
        error = AsksValuesError(
            "the model cannot be captured as a graph: it branches on, or takes a size from, a value that depends on "
            f"{_origin(bound[0])} at {line}; replace the branch by torch.where (the number by the tensor), or put that "
            "part into a module of its own"
        )
        error.paths = _paths(bound[0])
        raise error
    return results[:count], guards


def _origin(node: fx.Node) -> str:
    """Say what makes a value another one at each step."""
    if depends_on_chance(node):
        return "random numbers"
    roles = [ROLE[n] for n in ancestors([node]) if n.op == "placeholder"]
    buffers = [f"'{role.name}'" for role in roles if role.kind == "buffer"]
    if buffers and not any(role.kind == "parameter" for role in roles):
        return f"buffer {', '.join(buffers)}, which the step itself writes,"
    return "parameters"


def _refuse_dynamic(gm: fx.GraphModule) -> None:
    """Raise AsksValuesError where a shape depends on values."""
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        for one in value if isinstance(value, (tuple, list)) else (value,):
            sizes = one.shape if isinstance(one, Tensor) else (one,)
            if any(isinstance(s, torch.SymInt) and free_unbacked_symbols(s) for s in sizes):
                line = SOURCE.get(node) or "a line that is not known"
                error = AsksValuesError(
                    f"the model cannot be captured as a graph: the shape of {node.name} depends on values at {line}; "
                    "use a mask (torch.where, multiplication) in place of a selection, or move it into loss_fn"
                )
                error.paths = _paths(node)
                raise error


def _paths(node: fx.Node) -> tuple[str, ...]:
    """Return the modules that a node was computed in, the innermost first."""
    stack = node.meta.get("nn_module_stack") or {}
    return tuple(_bare(path) for path, _ in reversed(list(stack.values())) if path and path != "model")


def _canonical_names(step: _Step) -> dict[str, str]:
    """Map every name in the traced module to the model's own first name of the same tensor."""
    first: dict[int, str] = {}
    names: dict[str, str] = {}
    for items in (step.named_parameters(remove_duplicate=False), step.named_buffers(remove_duplicate=False)):
        for name, tensor in items:
            names[name] = first.setdefault(id(tensor), _bare(name))
    return names


def _bare(name: str) -> str:
    return name.removeprefix("model.")


def _role(
    kind: InputKind,
    target: str,
    names: Mapping[str, str],
    leaf_names: Iterator[str],
    exported: Exported,
    constants: dict[str, Tensor],
) -> Role:
    if kind is InputKind.PARAMETER:
        return Role("parameter", names[target], target in exported.trained)
    if kind is InputKind.BUFFER:
        return Role("buffer", names[target])
    if kind is InputKind.USER_INPUT:
        return Role("input", next(leaf_names))
    if kind is InputKind.CONSTANT_TENSOR:
        constants[target] = exported.constants[target]
        return Role("constant", target)
    raise CaptureError(f"the model holds a {kind.name.lower()} '{target}', which has no place in a graph of tensors")


def _note_places(graph: fx.Graph, step: _Step) -> None:
    """Write module path and user's source line on every node under this package's own keys.

    Outside of modules the exporter keeps no lines; what is computed there belongs to the loss function.
    """
    code = getattr(step.loss_fn, "__code__", None)
    loss = f'File "{code.co_filename}", line {code.co_firstlineno}, in {code.co_name}' if code is not None else ""
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        stack = node.meta.get("nn_module_stack") or {}
        path = next((_bare(p) for p, _ in reversed(list(stack.values())) if p), "")
        PATH[node] = "" if path == "model" else path
        lines = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines()]
        users = [line for line in lines if line.startswith("File") and is_user_file(line.split('"')[1])]
        if users or loss:
            SOURCE[node] = users[-1] if users else loss


def _inputs(gm: fx.GraphModule) -> list[fx.Node]:
    return [n for n in gm.graph.nodes if n.op == "placeholder" and ROLE[n].kind == "input"]
