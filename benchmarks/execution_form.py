"""Compare the forms in which a stage's forward and backward may run, against eager autograd, in CPU time of one thread.

All forms run side by side in alternating rounds, and ratios are taken within a round, so
that a busy machine slows all of them alike. The micro-batch is not the step's first: its
weight gradients are added to those of an earlier one, as in all micro-batches but one.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, fx, nn

from efftra_fx.emit import Emitted, emit
from efftra_fx.passes.deferred import finish
from efftra_fx.passes.differentiate import Differentiated, Part, differentiate
from efftra_fx.passes.stage_compile import compile_parts

sys.path.insert(0, str(Path(__file__).parent))
from step_models import Block


@dataclass(frozen=True)
class Case:
    """A stage to time: its model and the shape of its input."""

    name: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]


def gpt(width: int) -> nn.Module:
    """Return four blocks of a small GPT."""
    return nn.Sequential(*(Block(width, 4) for _ in range(4)))


def vgg() -> nn.Module:
    """Return a small VGG-like net with large fully connected layers."""

    def conv(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(inplace=True)]

    features = [*conv(3, 32), nn.MaxPool2d(2), *conv(32, 64), nn.MaxPool2d(2), *conv(64, 128), *conv(128, 128)]
    head = [nn.Linear(128 * 64, 1024), nn.ReLU(inplace=True), nn.Linear(1024, 1024), nn.ReLU(inplace=True)]
    return nn.Sequential(*features, nn.MaxPool2d(2), nn.Flatten(), *head, nn.Linear(1024, 10))


def mlp() -> nn.Module:
    """Return a perceptron whose weights are much larger than its activations."""
    widths = (1024, 2048, 2048, 1024)
    layers = [layer for pair in zip(widths, widths[1:], strict=False) for layer in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*layers)


CASES = (
    Case("gpt-64, 2 x 128 tokens", lambda: gpt(64), (2, 128, 64)),
    Case("gpt-64, 1 x 16 tokens", lambda: gpt(64), (1, 16, 64)),
    Case("gpt-256, 2 x 128 tokens", lambda: gpt(256), (2, 128, 256)),
    Case("vgg, 2 images of 64 x 64", vgg, (2, 3, 64, 64)),
    Case("mlp, 8 rows", mlp, (8, 1024)),
)


def forms_of(case: Case, micro_batches: int, backend: str = "") -> dict[str, Callable[[], object]]:
    """Return the forms by name; each runs forward and backward of one micro-batch, or of several where it says so."""
    torch.manual_seed(0)
    model, x = case.make(), torch.randn(case.shape)
    program = torch.export.export(model, (x,), strict=False).run_decompositions({})
    gm = program.graph_module
    named = dict(model.named_parameters())
    weights = [named[str(spec.target)] for spec in program.graph_signature.input_specs if "PARAMETER" in str(spec.kind)]
    values = [*weights, x]
    stage = differentiated(gm, values)
    again = differentiated(gm, values, recompute=True)
    leaf = x.clone().requires_grad_()
    grad = torch.randn_like(model(x))
    sums = [torch.zeros_like(weight) for weight in weights]
    boxed = {part.name: emit_boxed(part) for part in (stage.forward, stage.backward)}

    def eager() -> None:
        leaf.grad = None
        model(leaf).backward(grad)

    def exported() -> None:
        leaf.grad = None
        gm(*weights, leaf)[0].backward(grad)

    def plain() -> None:
        _, stash = boxed["forward"](values)
        for total, gradient in zip(sums, boxed["backward"](stash, [grad])[1], strict=True):
            total.add_(gradient)

    def fresh() -> None:
        _, stash = stage.forward.function(values)
        for total, gradient in zip(sums, stage.backward.function(stash, [grad])[1], strict=True):
            total.add_(gradient)

    def into(parts: Differentiated = stage) -> None:
        _, stash = parts.forward.function(values)
        parts.backward.accumulate(stash, [grad], sums)

    def apart() -> None:
        _, stash = stage.forward.function(values)
        _, weight_stash = stage.backward_input.function(stash, [grad])
        stage.backward_weight.accumulate(weight_stash, sums)

    waited = [sums[product.weight] for product in stage.products]
    now = [sums[index - stage.backward_deferring.gives[0]] for index in stage.backward_deferring.weights]

    def step(deferring: bool) -> None:
        terms = []
        for _ in range(micro_batches):
            if not deferring:
                into()
                continue
            _, stash = stage.forward.function(values)
            terms.append(stage.backward_deferring.accumulate(stash, [grad], now)[2])
        if terms:
            finish(stage.products, terms, waited)

    forms: dict[str, Callable[[], object]] = {
        "eager": eager,
        "exported graph under autograd": exported,
        "explicit, boxed operators": plain,
        "explicit": fresh,
        "explicit, adding in place": into,
        "weights apart": apart,
        "recompute": lambda: into(again),
    }
    if backend:
        compiled = compile_parts(stage, backend)
        forms[f"compiled by {backend}, adding in place"] = lambda: into(compiled)
    if stage.products:
        forms[f"{micro_batches} micro-batches"] = lambda: step(False)
        forms[f"{micro_batches} micro-batches, large weights once"] = lambda: step(True)
    return forms


def differentiated(gm: fx.GraphModule, values: Sequence[Tensor], recompute: bool = False) -> Differentiated:
    """Differentiate a stage whose last value is its input and all others weights."""
    count = len(values)
    return differentiate(
        gm,
        values,
        wrt=(True,) * count,
        grad_outputs=(True,),
        weight_inputs=(*(True,) * (count - 1), False),
        recompute=recompute,
    )


def emit_boxed(part: Part) -> Emitted:
    """Generate a part's code with every operator called through its boxed overload."""
    return emit(part.graph, name=part.name, takes=part.takes, gives=part.gives, consumes=part.consumes, boxed=True)


def measure(forms: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Return CPU seconds of each form in each round."""
    for run in forms.values():
        run()
        run()
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    for _ in range(rounds):
        for name, run in forms.items():
            begin = time.thread_time()
            run()
            seconds[name].append(time.thread_time() - begin)
    return seconds


def report(name: str, seconds: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Print medians and ratios; forms of several micro-batches are compared with the first of them."""
    print(f"\n{name}")
    figures = {}
    several = next((form for form in seconds if "micro-batches" in form), "")
    for form, found in seconds.items():
        base = seconds[several if "micro-batches" in form else "eager"]
        ratio = statistics.median(one / other for one, other in zip(found, base, strict=True))
        median_s = statistics.median(found)
        print(f"  {form:44} {1e3 * median_s:9.3f} ms  {ratio:6.3f}")
        figures[form] = {"cpu_s": median_s, "ratio": ratio}
    return figures


def main() -> None:
    """Time all cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30, help="rounds a case (default 30)")
    parser.add_argument("--micro-batches", type=int, default=8, help="micro-batches of the deferred form (default 8)")
    parser.add_argument("--compiled", default="", help="also through torch.compile with this backend, such as inductor")
    parser.add_argument("--only", default="", help="only cases whose name contains this")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print(
        f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}"
    )
    figures = {}
    for case in CASES:
        if options.only in case.name:
            forms = forms_of(case, options.micro_batches, options.compiled)
            figures[case.name] = report(case.name, measure(forms, options.rounds))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
