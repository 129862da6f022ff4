"""The command line: `efftra plan | dump | check | demo` (also `python -m efftra_fx`)."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

from efftra_fx.errors import EfftraError, InputError


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status; errors of the package are one line on stderr."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if words[:1] == ["plan"] and not any(":" in word for word in words[1:]) and {"-h", "--help"}.isdisjoint(words):
            return _plan_profile(words[1:])
        if words[:1] == ["demo"]:
            return _demo(words[1:])
        return _run(_parser().parse_args(words))
    except EfftraError as error:
        print(f"efftra: {error}", file=sys.stderr)
        return 1


def _plan_profile(words: Sequence[str]) -> int:
    from efftra_fx.cli_plan import plan_command

    return plan_command(list(words))


def _demo(words: Sequence[str]) -> int:
    from efftra_fx.demo import main as train

    return train(list(words))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="efftra", description="Plan and run synchronous hybrid parallel training.")
    commands = parser.add_subparsers(dest="command", required=True)
    what = "module:function, where function() returns (model, args, kwargs, target, loss_fn)"
    for name, text in (
        ("plan", "print the plan for a model, or for a published profile (WORKLOAD.json --cluster FILE)"),
        ("dump", "write what every pass makes into a folder"),
        ("check", "compare one step as planned with one step on one device"),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("model", help=what)
        command.add_argument("--cluster", help="cluster file; default: the launched ranks, or --ranks in this process")
        command.add_argument("--ranks", type=int, help="run so many ranks inside this process")
        command.add_argument("--stages", type=int)
        command.add_argument("--replicas", help="replicas of each stage, such as 2,1,1")
        command.add_argument("--micro-batches", type=int)
        command.add_argument("--schedule", choices=("1f1b", "gpipe"))
        command.add_argument("--plan", help="plan file")
        command.add_argument("--rng", choices=("plan", "layout_free"), default="plan", help="what masks depend on")
        command.add_argument("--batch-norm", choices=("local", "synced", "exact"), default="local")
        command.add_argument("--loss-reduction", choices=("mean", "sum"), help="how losses of parts make the batch's")
        command.add_argument(
            "--compile-stages", nargs="?", const=True, default=False, metavar="BACKEND", help="use torch.compile"
        )
        if name == "plan":
            command.add_argument("--json", action="store_true", help="print the plan as JSON")
            command.add_argument("--explain", action="store_true", help="say why, and what would help")
        if name == "dump":
            command.add_argument("folder")
    commands.add_parser("demo", help="train two small models on local ranks")
    return parser


def _run(options: argparse.Namespace) -> int:
    program = _compiled(options)
    if options.command == "plan":
        print(program.plan.to_json() if options.json else _plan_text(program, options.explain), end="")
    elif options.command == "dump":
        program.dump(options.folder)
        print(f"wrote {options.folder}")
    else:
        model, args, kwargs, target, _ = load_model(options.model)
        return 0 if program.check(*args, target=target, **kwargs).matches else 1
    return 0


def _plan_text(program: Any, explain: bool) -> str:
    lines = []
    for index, stage in enumerate(program.plan.stages):
        names = f"{stage.names[0]} .. {stage.names[-1]}" if stage.names else f"blocks {list(stage.blocks)}"
        lines.append(f"stage {index}: devices {list(stage.devices)}, {len(stage.blocks)} blocks, {names}")
    lines.append(f"{program.plan.micro_batches} micro-batches, schedule {program.plan.schedule}")
    if explain and program.plan.explain():
        lines.append(program.plan.explain())
    return "\n".join(lines) + "\n"


def _compiled(options: argparse.Namespace) -> Any:
    from efftra_fx.api import compile as compile_model
    from efftra_fx.cli_plan import read_replicas
    from efftra_fx.cluster import Cluster

    model, args, kwargs, target, loss_fn = load_model(options.model)
    if options.cluster:
        cluster = Cluster.load(options.cluster)
    elif options.ranks:
        cluster = Cluster.local(options.ranks)
    else:
        cluster = Cluster.from_env()
    return compile_model(
        model,
        cluster,
        example_inputs=args,
        example_kwargs=kwargs,
        example_target=target,
        loss_fn=loss_fn,
        stages=options.stages,
        replicas=read_replicas(options.replicas),
        micro_batches=options.micro_batches,
        schedule=options.schedule,
        plan=options.plan,
        rng=options.rng,
        batch_norm=options.batch_norm,
        loss_reduction=options.loss_reduction,
        compile_stages=options.compile_stages,
    )


def load_model(where: str) -> tuple[Any, tuple[Any, ...], dict[str, Any], Any, Any]:
    """Call `module:function` and return model, args, kwargs, target and loss function; raise InputError."""
    module_name, _, function_name = where.partition(":")
    sys.path.insert(0, "")
    try:
        function: Callable[[], Any] = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise InputError(f"{where}: cannot find it ({error}); give module:function") from None
    made = function()
    if not isinstance(made, tuple) or not 2 <= len(made) <= 5:
        raise InputError(f"{where}: expected (model, args, kwargs, target, loss_fn), at least the first two")
    padded: tuple[Any, ...] = made + (None,) * (5 - len(made))
    model, args, kwargs, target, loss_fn = padded
    if not isinstance(args, tuple | list) or not isinstance(kwargs, dict | None):
        found = f"{type(args).__name__} and {type(kwargs).__name__}"
        raise InputError(f"{where}: args must be a tuple and kwargs a dictionary, got {found}")
    return model, tuple(args), dict(kwargs or {}), target, loss_fn


if __name__ == "__main__":
    sys.exit(main())
