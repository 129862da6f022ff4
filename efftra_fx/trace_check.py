"""A captured graph is checked against the eager model before anything is built on it.

Loss, gradients of all parameters and new buffer values are compared on a few rows. This
catches what a tracer loses without a word: the backward of a custom
`autograd.Function`, hooks, values frozen into constants.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from efftra_fx.capture_chance import seeded_from_torch
from efftra_fx.capture_checkpoints import checkpoints_inline
from efftra_fx.capture_guards import NotCapturedError
from efftra_fx.capture_norms import norms_of_one_device
from efftra_fx.captured import Captured
from efftra_fx.containers import take_apart
from efftra_fx.differences import Difference, apart, dense, equal, equal_all, equal_each, gradients_apart
from efftra_fx.errors import CaptureError, EfftraError
from efftra_fx.first_difference import EagerRecord, differs_backward, differs_forward, run_nodes
from efftra_fx.held_buffers import HeldBuffers
from efftra_fx.hooks import tensor_hooks_refused
from efftra_fx.meta import CONSTANTS, OUTPUTS, ROLE
from efftra_fx.opaque import OtherSizesError
from efftra_fx.python_state import Noted, PythonState, python_kept, reads_noted
from efftra_fx.python_use import PythonUse, same_left
from efftra_fx.signature import describe, rows_at, rows_of
from efftra_fx.step_module import LossFn, loss_of


class DoesNotRunError(CaptureError):
    """Raise where the user's own code raises; on a few rows alone that may be since rows name each other by number."""


@dataclass(frozen=True)
class _Eager:
    """The eager model with what it holds; `before` are its buffers' values."""

    model: nn.Module
    captured: Captured
    inputs: Sequence[Tensor]
    loss_fn: LossFn | None
    parameters: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    before: Mapping[str, Tensor]

    def step(self, record: EagerRecord | None = None) -> tuple[Tensor, dict[str, Tensor | None], dict[str, Tensor]]:
        """Return loss, gradients and new buffer values; leave buffers and the state of random numbers as they were."""
        call, held = self.captured.call, HeldBuffers(*self.modules)
        try:
            noting = record.on() if record else nullcontext()
            seeded = seeded_from_torch(self.model, self.captured.seeded)
            with (
                torch.random.fork_rng(),
                torch.enable_grad(),
                checkpoints_inline(),
                norms_of_one_device(),
                seeded,
                noting,
            ):
                torch.manual_seed(0)
                args, kwargs, target = call.rebuild([t.clone() for t in self.inputs])
                loss = loss_of(self.model(*args, **kwargs), self.loss_fn, target, call.has_target)
                gradients = _gradients(loss, self.parameters)
            modules = [("", self.model)] + ([("loss_fn.", self.loss_fn)] if isinstance(self.loss_fn, nn.Module) else [])
            now = {prefix + n: b.detach().clone() for prefix, m in modules for n, b in m.named_buffers()}
            return loss.detach(), gradients, now
        finally:
            held.restore()

    def output(self, record: EagerRecord | None = None) -> list[Any]:
        """Return the leaves of the output; leave buffers and the state of random numbers as they were."""
        held = HeldBuffers(*self.modules)
        try:
            noting = record.on() if record else nullcontext()
            seeded = seeded_from_torch(self.model, self.captured.seeded)
            with torch.random.fork_rng(), torch.no_grad(), norms_of_one_device(), seeded, noting:
                torch.manual_seed(0)
                args, kwargs, _ = self.captured.call.rebuild([t.clone() for t in self.inputs])
                return [leaf for _, leaf in take_apart(self.model(*args, **kwargs))[0]]
        finally:
            held.restore()

    def of_other_rows(self) -> list[_Eager]:
        """Return two with another number of rows, of which none is in both; none where there is a single row."""
        dims = self.captured.batch_leaves
        count = rows_of(self.inputs, dims)
        copies = 2 if count > 2 else 3
        chosen = ([row] * copies for row in (0, count - 1)) if count > 1 else ()
        return [replace(self, inputs=rows_at(self.inputs, dims, rows)) for rows in chosen]

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """What holds buffers: the model, and the loss function where it is a module."""
        return (self.model, self.loss_fn) if isinstance(self.loss_fn, nn.Module) else (self.model,)

    @property
    def operands(self) -> list[Any]:
        """What the graph takes, in order."""
        source = iter(self.inputs)
        operands: list[Any] = []
        for node in self.captured.gm.graph.nodes:
            if node.op != "placeholder":
                continue
            role = ROLE[node]
            if role.kind == "parameter":
                operands.append(self.parameters[role.name])
            elif role.kind == "buffer":
                operands.append(self.before[role.name].clone())
            elif role.kind == "constant":
                operands.append(CONSTANTS[self.captured.gm][role.name])
            else:
                operands.append(next(source))
        return operands

    def graph(self) -> Sequence[Any]:
        """Return the results of the captured graph; raises CaptureError where it does not run."""
        with torch.random.fork_rng(), _casts_in_graph():
            torch.manual_seed(0)
            try:
                results: Sequence[Any] = self.captured.gm.forward(*self.operands)  # a call prints where it stops
            except (RuntimeError, IndexError, ValueError) as error:
                stopped = run_nodes(self.captured.gm, self.operands)
                where = f"{stopped}" if isinstance(stopped, str) else str(error)
                raise CaptureError(f"the captured graph does not run as the eager model does: {where}") from error
        return results


@contextmanager
def _own_code(what: str) -> Iterator[None]:
    """Run the user's own code; raise CaptureError for what it raises."""
    try:
        yield
    except EfftraError:
        raise
    except Exception as error:
        raise DoesNotRunError(f"{what} not run on rows of the example: {type(error).__name__}: {error}") from error


def on_few_or_all(
    check: Callable[[Sequence[Tensor]], PythonUse], few: Sequence[Tensor], every: Sequence[Tensor]
) -> PythonUse:
    """Return what a check finds on a few rows, or on all where the user's code does not run so on the few."""
    problem: CaptureError
    for rows in (few,) if few is every else (few, every):
        try:
            return check(rows)
        except (DoesNotRunError, OtherSizesError) as error:
            problem = error
    raise CaptureError(str(problem)) from problem.__cause__


def use_found(check: Callable[[], PythonUse]) -> PythonUse | None:
    """Return what a check finds, None where it finds a difference."""
    try:
        return check()
    except CaptureError:
        return None


def first_apart(
    check: Callable[[Sequence[Tensor]], PythonUse], batches: Iterable[Sequence[Tensor]]
) -> tuple[Sequence[Tensor], CaptureError] | None:
    """Return the first batch for which a check fails, and how; one that the user's code does not take is left out."""
    for batch in batches:
        try:
            check(batch)
        except (DoesNotRunError, OtherSizesError):
            continue
        except CaptureError as error:
            return batch, error
    return None


def is_the_model(check: Callable[[], PythonUse]) -> bool:
    """Say whether a check finds nothing, or the user's own code does not run."""
    try:
        check()
    except DoesNotRunError:
        return True
    except CaptureError:
        return False
    return True


@contextmanager
def _casts_in_graph() -> Iterator[None]:
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        yield


def check_capture(model: nn.Module, captured: Captured, inputs: Sequence[Tensor], loss_fn: LossFn | None) -> PythonUse:
    """Return what the model does in Python; raise CaptureError where the graph is not the eager model.

    That is where loss, gradients or buffers differ, or where the next call would compute something else.

    The error names what differs, and the first node at which the graph leaves the model. Leaves parameters,
    gradients, buffers and the state of random numbers as they were.
    """
    eager = _eager(model, captured, inputs, loss_fn)
    state = PythonState(*eager.modules)
    with _gradients_returned(eager.parameters), tensor_hooks_refused():
        with _own_code("the model and its loss do"), reads_noted(state) as noted:
            loss, gradients, written = eager.step()
    _refuse_draws(eager, state, loss, gradients)
    use = _FirstCall(eager, state, noted, "loss", [loss], lambda one: [one.step()[0]]).used()
    with torch.enable_grad():
        results = eager.graph()
        found = _gradients(results[0], eager.parameters)
    difference = (
        apart("the loss", loss, results[0].detach(), result=0)
        or gradients_apart(gradients, found)
        or _buffers_apart(eager, written, results)
    )
    if difference is not None:
        record = EagerRecord()
        eager.step(record)
        raise _explained(eager, difference, record)
    return use.fed(captured.settings)


@contextmanager
def _gradients_returned(parameters: Mapping[str, Tensor]) -> Iterator[None]:
    """Raise CaptureError where a backward adds to gradients itself, in place of returning them.

    Leaves them as they were.
    """
    held = {name: p.grad for name, p in parameters.items()}
    for p in parameters.values():
        p.grad = None
    try:
        yield
        written = [name for name, p in parameters.items() if p.grad is not None]
    finally:
        for name, p in parameters.items():
            p.grad = held[name]
    if written:
        raise CaptureError(
            f"a custom backward writes the gradient of '{written[0]}' itself (it calls backward() inside backward), "
            "where no graph can have it; give the parameters to apply() and return their gradients "
            "(torch.autograd.grad), or use torch.utils.checkpoint"
        )


def _refuse_draws(eager: _Eager, state: PythonState, loss: Tensor, gradients: Mapping[str, Tensor | None]) -> None:
    """Raise CaptureError where Python's own random numbers decide the loss, or gradients; leave attributes as they are.

    What is drawn may change them by little (a few masked values), so that any difference counts.
    """
    drawn = state.drawn()
    if drawn is None:
        return
    with python_kept(*eager.modules):
        others = [eager.step() for _ in state.extremes()]
    if any(not equal(other[0], loss) or not equal_each(other[1], gradients) for other in others):
        raise CaptureError(
            f"what forward, or the loss, draws from Python's {drawn} decides the loss, and a captured step would "
            "not draw it again; draw from torch (torch.rand), and multiply by what is drawn in place of a branch"
        )


@dataclass(frozen=True)
class _FirstCall:
    """A first call of the model: the state before, what was read in it, its results with a name, how to repeat it."""

    eager: _Eager
    state: PythonState
    noted: Noted
    what: str
    results: Sequence[Tensor]
    run: Callable[[_Eager], Sequence[Tensor]]

    def used(self) -> PythonUse:
        """Return what it did in Python; put attributes back as they were before.

        Raises CaptureError where it leaves something with which the next call computes something else. What it leaves
        is told from what follows its batch by calls with other rows.
        """
        try:
            found = self._with_left()
        finally:
            self.state.restore()
        return found.steady()

    def _with_left(self) -> PythonUse:
        """Return what it did with what it leaves; attributes are then those after further calls."""
        use = self.state.use(self.noted, self.eager.loss_fn)
        first = self.state.changed(self.noted.assigned)
        told = same_left(first, [])
        if not (use.writes or use.hooked or told):
            return use
        with _own_code("called again, the model does"), reads_noted(self.state) as again:
            second = self.run(self.eager)
        pairs = zip(second, self.results, strict=True)
        if len(second) != len(self.results) or any(apart("", a, b) for a, b in pairs):
            written = ", ".join((*use.writes, *use.hooked))
            raise CaptureError(
                f"forward writes {written} and computes another {self.what} with it at the next call, which a captured "
                "step would not; keep it in a buffer (register_buffer) and write it there in place"
            )
        others = self.eager.of_other_rows()
        if use.hooked or not told or not others:  # a mark that is left may say that hooks are set
            return use
        after = [self.state.changed(again.assigned)]
        for other in others:
            self.state.restore()
            try:
                with reads_noted(self.state) as then:
                    self.run(other)
            except Exception:  # the model may not take these rows: then nothing is known of them
                return use
            after.append(self.state.changed(then.assigned))
        left = same_left(first, after)
        both = [self.state.use(reads, self.eager.loss_fn, left, first) for reads in (self.noted, again)]
        return replace(both[0], others=both[1:])


def check_output(
    model: nn.Module, captured: Captured, inputs: Sequence[Tensor], shapes: list[torch.Size] | None = None
) -> PythonUse:
    """Return what the model does in Python; raise CaptureError where its graph gives another output than the model.

    Into `shapes` go the shapes of the model's tensors, and the same numbers in another shape are no difference: of a
    single row a model may drop the dimension (`squeeze()`). Leaves buffers, plain attributes and the state of random
    numbers as they were.
    """
    eager = _eager(model, captured, inputs, None)
    state = PythonState(model)
    with _own_code("the model does"), reads_noted(state) as noted:
        leaves = eager.output()
    drawn = state.drawn()
    if drawn is not None:
        with python_kept(model):
            others = [_tensors(eager.output()) for _ in state.extremes()]
        if any(not equal_all(other, _tensors(leaves)) for other in others):
            raise CaptureError(
                f"what forward draws from Python's {drawn} in eval mode decides its output, and a captured evaluation "
                "would not draw it again; draw from torch (torch.rand), and multiply by what is drawn"
            )
    use = _FirstCall(eager, state, noted, "output", _tensors(leaves), lambda one: _tensors(one.output())).used()
    with torch.no_grad():
        found = eager.graph()[: OUTPUTS[captured.gm].loss]
    assert captured.out_tree is not None
    if len(leaves) != len(captured.out_tree.moving):
        raise CaptureError(
            f"the model gave {len(captured.out_tree.moving)} values while it was captured, {len(leaves)} now"
        )
    moving = [leaf for leaf, m in zip(leaves, captured.out_tree.moving, strict=True) if m]
    rest = iter(found)
    graph = [next(rest) if m else c for m, c in zip(captured.out_tree.moving, captured.out_tree.constants, strict=True)]
    for a, b in zip(leaves, graph, strict=True):
        if isinstance(a, (bool, int, float, str)) and (type(a) is not type(b) or (a != b and a == a)):
            raise CaptureError(f"the model returns {a!r} in its output, and its graph {b!r}")
    for number, (a, b) in enumerate(zip(moving, found, strict=True)):
        if isinstance(a, Tensor) is not isinstance(b, Tensor):
            raise CaptureError(f"output {number} is a {type(a).__name__} in eager, a {type(b).__name__} in the graph")
        if shapes is not None and isinstance(a, Tensor):
            shapes.append(a.shape)
            b = b.reshape(a.shape) if b.numel() == a.numel() else b
        difference = apart(f"output {number}", a, b, result=number) if isinstance(a, Tensor) else None
        if difference is not None:
            record = EagerRecord()
            eager.output(record)
            raise _explained(eager, difference, record)
    return use.fed(captured.settings)


def _tensors(leaves: Sequence[Any]) -> list[Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _eager(model: nn.Module, captured: Captured, inputs: Sequence[Tensor], loss_fn: LossFn | None) -> _Eager:
    captured.feed()
    modules = [("", model)] + ([("loss_fn.", loss_fn)] if isinstance(loss_fn, nn.Module) else [])
    parameters = {prefix + n: p for prefix, m in modules for n, p in m.named_parameters()}
    buffers = {prefix + n: b for prefix, m in modules for n, b in m.named_buffers()}
    before = {name: buffer.detach().clone() for name, buffer in buffers.items()}
    return _Eager(model, captured, inputs, loss_fn, parameters, buffers, before)


def _gradients(loss: Tensor, parameters: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
    wanted = {name: p for name, p in parameters.items() if p.requires_grad}
    result: dict[str, Tensor | None] = dict.fromkeys(parameters)
    if loss.requires_grad and wanted:
        found = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
        result.update((name, g if g is None else dense(g)) for name, g in zip(wanted, found, strict=True))
    return result


def _buffers_apart(eager: _Eager, written: Mapping[str, Tensor], results: Sequence[Any]) -> Difference | None:
    outputs = OUTPUTS[eager.captured.gm]
    for number, name in enumerate(outputs.buffers, outputs.loss):
        difference = apart(f"the new value of buffer '{name}'", written[name], results[number], result=number)
        if difference is not None:
            return difference
    for name in eager.buffers:
        now, before = written[name], eager.before[name]
        if (now.shape, now.dtype) != (before.shape, before.dtype):
            return Difference(
                f"forward puts {describe(now)} in the place of buffer '{name}', which is {describe(before)}, and no "
                "captured step can",
                buffer=name,
                remedy="give it that form in __init__, or call the model once on such a batch before compile",
            )
        if name not in outputs.buffers and not torch.equal(now.nan_to_num(), before.nan_to_num()):
            return Difference(
                f"forward writes buffer '{name}', and the captured graph does not",
                buffer=name,
                remedy="register it with register_buffer and write it with an in-place operation",
            )
    return None


def _explained(eager: _Eager, difference: Difference, record: EagerRecord) -> CaptureError:
    """Return the error that says what differs, and where the graph first leaves the model."""
    gm, kept = eager.captured.gm, [path for path, _ in eager.captured.opaque]
    if difference.absent and kept and "" not in kept:
        return NotCapturedError(
            f"the model cannot be captured as a graph: what runs as it is ({', '.join(kept)}) leaves out what others "
            f"compute, so that '{difference.gradient}' has no gradient; multiply by zero what is not to count"
        )
    with _casts_in_graph():
        if difference.result is not None:
            where = differs_forward(gm, eager.operands, record, difference.result)
        elif difference.gradient is not None:
            where = differs_backward(gm, eager.operands, record, difference.gradient)
        else:
            assert difference.buffer is not None
            where = record.writer(eager.buffers[difference.buffer])
            where = f"it is written at {where}" if where else ""
    return CaptureError("; ".join(filter(None, (difference.text, where, difference.remedy))))
