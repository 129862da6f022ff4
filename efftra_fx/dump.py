"""Graphs as stable text: one node a line, in graph order, notes behind `#`."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, fx

from efftra_fx.errors import InputError
from efftra_fx.meta import BATCH, BLOCK, FREE, PATH, PLACED, ROLE, STAGE


def print_graph(gm: fx.GraphModule, title: str) -> str:
    """Return a graph as text with a header line; the same graph always gives the same text."""
    lines = [f"# {title}: {len(gm.graph.nodes)} nodes"]
    lines += [_line(node) for node in gm.graph.nodes]
    return "\n".join(lines) + "\n"


def _line(node: fx.Node) -> str:
    if node.op == "placeholder":
        role = ROLE.get(node)
        text = f"{node.name} = {role.kind} {role.name}" if role else f"{node.name} = input"
    elif node.op == "output":
        text = f"return {_argument(node.args[0])}"
    else:
        arguments = [_argument(a) for a in node.args] + [f"{k}={_argument(v)}" for k, v in node.kwargs.items()]
        text = f"{node.name} = {_target(node)}({', '.join(arguments)})"
    notes = _notes(node)
    return f"{text}  # {notes}" if notes else text


def _target(node: fx.Node) -> str:
    if node.op == "call_module":
        return str(node.target)
    if node.target is operator.getitem:
        return "getitem"
    text = str(node.target)
    return text.removeprefix("aten.") if "." in text else getattr(node.target, "__name__", text)


def _argument(value: Any) -> str:
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_argument(v) for v in value)}]"
    return repr(value) if isinstance(value, str) else str(value)


def _notes(node: fx.Node) -> str:
    notes = []
    value = node.meta.get("val")
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        notes.append(f"{dtype}[{', '.join(str(size) for size in value.shape)}]")
    split = BATCH.get(node)
    if split is not None and node.op != "output":
        where = f" dim {split.dim}" + (f" x{split.per_row}" if split.per_row != 1 else "")
        notes.append(split.kind + (where if split.kind == "rows" else ""))
    if FREE.get(node) and node.op == "call_function":
        notes.append("free")
    if BLOCK.on(node):
        notes.append(f"block {BLOCK[node]}")
    if STAGE.on(node):
        notes.append(f"stage {STAGE[node]}")
    if PLACED.on(node):
        notes.append(PLACED[node])
    if PATH.get(node):
        notes.append(f"in {PATH[node]}")
    return ", ".join(notes)


def print_dot(gm: fx.GraphModule, title: str) -> str:
    """Return a graph in the DOT language, nodes of a stage in one box."""
    stages: dict[int | None, list[fx.Node]] = {}
    for node in gm.graph.nodes:
        stages.setdefault(STAGE.get(node), []).append(node)
    lines = [f'digraph "{title}" {{', "  node [shape=box, fontsize=10];"]
    for stage, nodes in stages.items():
        names = [f'    "{n.name}" [label="{n.name}"];' for n in nodes]
        if stage is None:
            lines += names
        else:
            lines += [f"  subgraph cluster_{stage} {{", f'    label="stage {stage}";', *names, "  }"]
    for node in gm.graph.nodes:
        lines += [f'  "{source.name}" -> "{node.name}";' for source in node.all_input_nodes]
    return "\n".join([*lines, "}"]) + "\n"


def write_dumps(directory: str | Path, texts: Sequence[tuple[str, str]]) -> None:
    """Write numbered files, one a text: `03-prove-batch.txt`."""
    try:
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        for number, (name, text) in enumerate(texts):
            (folder / f"{number:02d}-{name}").write_text(text, encoding="utf-8")
    except (OSError, TypeError, ValueError) as error:
        raise InputError(f"dump: cannot write into the folder {directory!r}: {error}; name another") from error
