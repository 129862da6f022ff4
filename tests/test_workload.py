"""Published profiles: read strictly, their traps put right, their graphs folded into chains."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from efftra_fx.errors import CostError
from efftra_fx.workload import load_workload, read_workload


def node(identity: int, name: str = "Conv", forward: float = 1.0, size: float = 800, **more: Any) -> dict[str, Any]:
    """A node of a small profile."""
    common = {"backward_ms": 2 * forward, "activation_bytes": size, "parameter_bytes": 40}
    return {"id": identity, "name": name, "forward_ms": forward, **common, **more}


def profile(nodes: list[dict[str, Any]], edges: list[list[Any]], **more: Any) -> dict[str, Any]:
    """A profile at batch 8."""
    return {"schema": "workload/1", "name": "small", "profile_batch": 8, "nodes": nodes, "edges": edges, **more}


COLUMNS = ["device", "tp", "microbatch", "forward_ms", "backward_ms"]
LINE = profile([node(7), node(3, "ReLU(inplace)"), node(5, size=160)], [[7, 3], [3, 5]])


def test_times_become_seconds_a_row_and_bytes_bytes_a_row() -> None:
    chain, ids = read_workload(LINE).chain()
    assert ids == ((7,), (3,), (5,))
    first = chain.blocks[0]
    assert (first.forward.per_row_s, first.backward.per_row_s) == pytest.approx((1e-3 / 8, 2e-3 / 8))
    assert (first.output_bytes, first.parameter_bytes, first.gradient_bytes) == (100, 40, 40)


def test_input_nodes_cost_nothing_whatever_was_measured() -> None:
    chain, _ = read_workload(profile([node(1, "Input0", 636.0, is_input=True), node(2)], [[1, 2]])).chain()
    assert chain.blocks[0].forward.at(8) == chain.blocks[0].backward.at(8) == 0.0
    assert chain.blocks[0].saved_bytes == 0


@pytest.mark.parametrize("name", ["ReLU(inplace)", "__getitem__(0)", "Add", "View(-1)"])
def test_layers_that_work_in_place_keep_no_second_copy(name: str) -> None:
    chain, _ = read_workload(profile([node(1), node(2, name)], [[1, 2]])).chain()
    assert [block.saved_bytes for block in chain.blocks] == [100, 0]


def test_a_value_with_several_readers_crosses_a_cut_once() -> None:
    """1 feeds 2, 3 and 4: over the cut behind 1 pass 100 bytes a row, not 300."""
    graph = profile([node(1), node(2), node(3), node(4)], [[1, 2], [1, 3], [1, 4], [2, 4], [3, 4]])
    chain, _ = read_workload(graph).chain()
    over = [
        sum(c.bytes_per_row for c in chain.crossings if c.producer_block < cut <= max(c.consumer_blocks))
        for cut in range(1, 4)
    ]
    assert over == [100, 200, 300]


def test_edges_with_sizes_of_their_own_carry_these() -> None:
    chain, _ = read_workload(profile([node(1), node(2)], [[1, 2, 16]])).chain()
    assert chain.crossings[0].bytes_per_row == 2


def test_without_a_profile_batch_a_row_is_one_profiled_micro_batch() -> None:
    workload = read_workload({**LINE, "profile_batch": None, "microbatches_per_batch": 32})
    assert (workload.rows_per_profile, workload.micro_batches) == (1, 32)
    assert workload.chain()[0].blocks[0].forward.per_row_s == pytest.approx(1e-3)


def test_nodes_of_one_color_and_what_a_cycle_between_groups_ties_together_are_one_block() -> None:
    nodes = [node(1, color=5), node(2), node(3, color=5), node(4)]
    chain, ids = read_workload(profile(nodes, [[1, 2], [2, 3], [3, 4]])).chain()
    assert [sorted(one) for one in ids] == [[1, 2, 3], [4]]
    assert chain.blocks[0].forward.at(8) == pytest.approx(3e-3)


def test_backward_nodes_join_their_forward_nodes() -> None:
    nodes = [
        node(1, color=1) | {"pass": "forward"},
        node(2, color=2) | {"pass": "forward"},
        node(3, color=2) | {"pass": "backward"},
        node(4, color=1) | {"pass": "backward"},
    ]
    _, ids = read_workload(profile(nodes, [[1, 2], [2, 3], [3, 4], [1, 4]])).chain()
    assert [sorted(one) for one in ids] == [[1, 4], [2, 3]]


def test_tensor_widths_and_recompute_become_options() -> None:
    option = {
        "tp": 2,
        "kind": "recompute",
        "fwbw_ms": 3.0,
        "parameter_bytes": 20,
        "memory_per_inflight_bytes": 80,
        "memory_fixed_bytes": 56,
        "sync_forward_bytes": 160,
        "sync_backward_bytes": 160,
    }
    chain, _ = read_workload(profile([node(1, options=[option])], [])).chain()
    found = chain.blocks[0].option(tensor=2, recompute=True)
    assert found is not None
    assert (found.forward.at(8), found.backward.at(8)) == pytest.approx((1e-3, 2e-3))
    assert (found.saved_bytes, found.working_bytes, found.reduce_bytes) == (10, 2, 20)


def test_measurements_of_several_micro_batches_become_a_straight_line() -> None:
    table = [["A", 1, 1, 3.0, 5.0], ["A", 1, 2, 5.0, 9.0], ["B", 2, 1, 1.0, 1.0]]
    graph = profile(
        [node(1, options_table=table)],
        [],
        options_table_columns=["device", "tp", "microbatch", "forward_ms", "backward_ms"],
    )
    block = read_workload({**graph, "profile_batch": 1}).chain()[0].blocks[0]
    fast = block.option(kind="A")
    assert fast is not None
    assert (fast.forward.fixed_s, fast.forward.per_row_s) == pytest.approx((1e-3, 2e-3))
    assert block.option(kind="B") is None and block.option(tensor=2, kind="B") is not None


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda d: d["edges"].append([5, 7]), "cycle through or before node 3|cycle through or before node"),
        (lambda d: d["edges"].append([7, 7]), "node 7 is its own input"),
        (lambda d: d["edges"].append([7, 99]), r"edges\[2\] names node 99"),
        (lambda d: d["edges"].append([7]), r"edges\[2\] must be"),
        (lambda d: d["nodes"][0].update(forward_ms=-1), "node 7.forward_ms must not be negative"),
        (
            lambda d: d["nodes"][0].update(options=[{"tp": 1e17, "fwbw_ms": 1, "parameter_bytes": 1}]),
            r"node 7.options\[0\].tp must be a whole number from 1 to 100000, got 1e\+17",
        ),
        (lambda d: d["nodes"][0].update(options_table=5), "node 7.options_table must be a list, got 5"),
        (
            lambda d: (
                d["nodes"][0].update(options_table=[["A", 1.5, 1, 1, 1]]) or d.update(options_table_columns=COLUMNS)
            ),
            r"node 7.options_table\[0\]: tp must be a whole number from 1",
        ),
        (
            lambda d: (
                d["nodes"][0].update(options_table=[["A", 1, 1, 1, 1]], tp_info={"0": {}})
                or d.update(options_table_columns=COLUMNS)
            ),
            "node 7.tp_info must be an object with tensor widths as keys",
        ),
        (lambda d: d["nodes"][0].pop("backward_ms"), "node 7.backward_ms is missing"),
        (lambda d: d["nodes"][0].update(backward_ms="2"), "node 7.backward_ms must be a number"),
        (lambda d: d["nodes"][0].update(activation_bytes=float("nan")), "node 7.activation_bytes must be a number"),
        (lambda d: d["nodes"][0].update(id="seven"), r"nodes\[0\].id must be a whole number"),
        (lambda d: d["nodes"].append(dict(d["nodes"][0])), "node 7 is listed twice"),
        (lambda d: d.update(nodes=[]), "at least one node"),
        (lambda d: d.update(edges=None), "edges must be a list"),
        (lambda d: d.update(profile_batch=0), "profile_batch must be a whole number"),
        (lambda d: d.update(schema="workload/2"), "schema must be 'workload/1'"),
        (lambda d: d["nodes"][0].update(forward_ms=1e30), "node 7.forward_ms must be at most 1e.18"),
        (lambda d: d["nodes"][0].update(parameter_bytes=10**400), "node 7.parameter_bytes must be at most 1e.18"),
        (lambda d: d.update(microbatches_per_batch=-1), "microbatches_per_batch must be a whole number"),
    ],
)
def test_a_wrong_profile_is_an_error_that_names_the_node_or_field(tmp_path: Path, edit: object, words: str) -> None:
    data = json.loads(json.dumps(LINE))
    assert callable(edit)
    edit(data)
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps(data))
    with pytest.raises(CostError, match=words) as caught:
        load_workload(path)
    assert str(caught.value).startswith(str(path))


def test_gzipped_files_are_read_and_broken_ones_refused(tmp_path: Path) -> None:
    path = tmp_path / "small.json.gz"
    path.write_bytes(gzip.compress(json.dumps(LINE).encode()))
    assert load_workload(path).name == "small"
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(CostError, match="cannot read the profile"):
        load_workload(path)
    with pytest.raises(CostError, match="cannot read the profile"):
        load_workload(tmp_path / "none.json")
