"""Everything prints as stable text that shows what each pass did."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from models import TWO_LAYERS, ZOO
from rig import lay_out, rig_of

from efftra_fx import Cluster, CompiledModel, Plan, compile, verify
from efftra_fx.dump import print_dot, print_graph, write_dumps


def compiled(**options: Any) -> CompiledModel:
    """Compile the two layers for two ranks of this process."""
    batch = TWO_LAYERS.data(12)
    return compile(
        TWO_LAYERS.build(),
        Cluster.local(2),
        example_inputs=batch.args,
        example_target=batch.target,
        loss_fn=TWO_LAYERS.loss_fn,
        costs="estimated",
        stages=2,
        micro_batches=2,
        **options,
    )


def symbols(text: str) -> str:
    """Return the text with the tracer's own name for the number of rows replaced."""
    return re.sub(r"\bs\d+\b", "rows", text)


def test_the_graph_of_two_layers_reads_after_each_pass(golden: Callable[[str, str], None]) -> None:
    program = rig_of(TWO_LAYERS).program(lay_out(2, (1, 1), 2))
    texts = dict(rig_of(TWO_LAYERS).first.report.texts) | dict(program.report.texts)
    wanted = ["trace", "separate-means", "prove-batch", "tail", "blocks", "split-stages", "stage-0", "stage-1"]
    golden("two-layers.txt", symbols("\n".join(texts[f"{name}.txt"] for name in wanted)))


def test_a_dump_is_numbered_in_the_order_of_the_passes(tmp_path: Path) -> None:
    compiled(dump=tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    order = [re.sub(r"^\d+-|\.txt$", "", name) for name in names if name.endswith(".txt")]
    line = [
        "trace",
        "separate-means",
        "prove-batch",
        "tail",
        "blocks",
        "split-stages",
        "stage-0",
        "insert-comm",
        "programs",
    ]
    assert [name for name in order if name in line] == line and order[-1] == "programs"
    assert sum(name.endswith(".dot") for name in names) >= 8


def test_what_was_dumped_is_read_back_and_proven(tmp_path: Path) -> None:
    program = compiled(dump=tmp_path)
    verify(next(tmp_path.glob("*-programs.txt")))
    assert Plan.load(next(tmp_path.glob("*-plan.json"))) == program.plan


def test_the_folder_may_come_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EFFTRA_FX_DUMP", str(tmp_path / "dumps"))
    compiled()
    assert list((tmp_path / "dumps").glob("*-trace.txt"))


def test_the_same_model_gives_the_same_text(tmp_path: Path) -> None:
    for name in ("one", "two"):
        compiled(dump=tmp_path / name)
    for path in sorted((tmp_path / "one").iterdir()):
        if "compile.txt" not in path.name:  # times
            assert path.read_text() == (tmp_path / "two" / path.name).read_text(), path.name
        assert not re.search(r"0x[0-9a-f]{6}|/tmp/", path.read_text()), path.name


def test_every_node_and_every_edge_is_drawn_and_printed_once() -> None:
    for gm in (rig_of(ZOO["unet"]).first.built.front.gm, rig_of(ZOO["unet"]).program(lay_out(8, (2, 1), 2)).graph):
        text, dot = print_graph(gm, "it"), print_dot(gm, "it")
        nodes = list(gm.graph.nodes)
        assert text.startswith(f"# it: {len(nodes)} nodes\n") and len(text.splitlines()) == len(nodes) + 1
        for node in nodes:
            assert dot.count(f'"{node.name}" [label') == 1
        assert dot.count(" -> ") == sum(len(node.all_input_nodes) for node in nodes)
        assert dot.startswith('digraph "it" {') and dot.endswith("}\n")


def test_numbers_keep_the_order(tmp_path: Path) -> None:
    write_dumps(tmp_path / "deep" / "er", [("b.txt", "1"), ("a.txt", "2")])
    assert sorted(path.name for path in (tmp_path / "deep" / "er").iterdir()) == ["00-b.txt", "01-a.txt"]
