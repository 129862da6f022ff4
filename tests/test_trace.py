"""What capture makes of a model, and what it refuses, each time by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from against_eager import assert_same, compiled, one_device, step
from habits import Branches, Habit, Net, WithExperts, classes, cross_entropy, features, plain, triple
from torch import Tensor, nn

from efftra_fx.captured import Captured
from efftra_fx.errors import CaptureError
from efftra_fx.meta import OUTPUTS, PATH, ROLE, SOURCE
from efftra_fx.opaque import is_opaque
from efftra_fx.signature import read_call
from efftra_fx.trace import capture
from efftra_fx.trace_check import check_capture


def captured(habit: Habit) -> Captured:
    """Capture a habit's step with the batch in dimension 0 of everything."""
    call, tensors = read_call(habit.model.forward, habit.args, habit.kwargs, habit.target)
    rows = tensors[-1].shape[0]
    dims = tuple(0 if t.ndim and t.shape[0] == rows else None for t in tensors)
    return capture(habit.model, call, tensors, dims, habit.loss_fn)


def test_placeholders_carry_the_models_own_names() -> None:
    gm = captured(plain()).gm
    roles = [ROLE[n] for n in gm.graph.nodes if n.op == "placeholder"]
    assert [r.name for r in roles if r.kind == "parameter"] == [n for n, _ in Net().named_parameters()]
    assert [r.name for r in roles if r.kind == "input"] == ["x", "target"]
    assert OUTPUTS[gm].loss == 1


def test_nodes_know_their_module_and_the_users_line() -> None:
    gm = captured(plain()).gm
    linear = next(n for n in gm.graph.nodes if n.target is torch.ops.aten.linear.default)
    assert PATH[linear] == "a"
    assert "habits.py" in SOURCE[linear]
    assert "cross_entropy" in SOURCE[list(gm.graph.nodes)[-2]]


def test_the_number_of_rows_is_a_symbol_even_where_python_took_it_as_a_number() -> None:
    found = captured(plain(lambda m, h: h * len(h) + float(h.shape[0])))
    assert found.symbolic
    assert any(n.target is torch.ops.aten.sym_size.int for n in found.gm.graph.nodes)


def test_a_custom_function_becomes_one_opaque_node() -> None:
    found = captured(plain(lambda m, h: triple(h, 2.0)))
    assert sum(is_opaque(n.target) for n in found.gm.graph.nodes) == 1
    assert found.opaque == ()


def test_modules_that_ask_for_values_of_activations_stay_whole_and_are_named() -> None:
    found = captured(Habit(WithExperts().double(), (features(),), classes(), cross_entropy))
    assert [path for path, _ in found.opaque] == ["first", "second"]
    assert "habits.py" in found.opaque[0][1]


def test_a_branch_on_an_input_becomes_a_guard() -> None:
    mask = torch.arange(7) > 2
    x = features()
    found = captured(Habit(Branches().double(), (x, mask), classes(), cross_entropy))
    guards = found.guards
    assert guards is not None and guards.expected == (False, 4)
    assert guards.broken({"x": x, "mask": mask}, {}) is None
    assert "the answer was False and is True" in str(
        guards.broken({"x": x, "mask": torch.ones(7, dtype=torch.bool)}, {})
    )
    assert "the answer was 4 and is 3" in str(guards.broken({"x": x, "mask": torch.arange(7) > 3}, {}))


def test_a_branch_of_the_whole_model_on_its_activations_is_refused_with_its_line() -> None:
    class Decides(Net):
        def forward(self, x: Tensor, *more: Any) -> Tensor:
            out = super().forward(x)
            return out * 2 if out.sum() > 0 else out

    with pytest.raises(
        CaptureError, match=r"depends on parameters at .*test_trace.py:\d+; replace the branch by torch"
    ):
        captured(Habit(Decides().double(), (features(),), classes(), cross_entropy))


def test_writing_into_an_input_is_refused() -> None:
    with pytest.raises(CaptureError, match="writes into its input .* in place at .*; clone it"):
        captured(plain(lambda m, h, mask: h * mask.mul_(2), features(1)))


def test_a_norm_of_one_row_has_its_gradient_however_that_is_laid_out() -> None:
    class Patches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cut, self.norm, self.out = nn.Conv2d(1, 4, 2, 2), nn.BatchNorm2d(4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            patches = self.norm(self.cut(x.reshape(-1, 1, 6, 6))).flatten(2).transpose(1, 2)
            out: Tensor = (self.out(patches) ** 2 * patches.new_tensor(range(1, 10))[:, None]).sum(1)
            return out

    torch.manual_seed(0)
    model = Patches().double()
    model.norm.eval()
    habit = Habit(model, (features(36),), classes(), cross_entropy)
    assert_same(step(compiled(habit, stages=2, micro_batches=7), habit), one_device(habit), 1e-9)


@pytest.mark.parametrize("squeezed", [lambda h: h.squeeze(), lambda h: h.squeeze(0).squeeze(1), torch.squeeze])
def test_a_squeeze_leaves_the_rows_of_a_part_of_one_row(squeezed: Any) -> None:
    habit = plain(lambda m, h: squeezed(h.unsqueeze(1)))
    assert_same(step(compiled(habit, stages=2, micro_batches=7), habit), one_device(habit), 1e-9)


def test_a_view_of_memory_reads_memory_as_it_was_laid_out() -> None:
    def windows(m: nn.Module, h: Tensor) -> Tensor:
        turned = h.reshape(-1, 2, 3).transpose(0, 1)
        return turned.as_strided((h.shape[0], 5, 2), (6, 1, 1)).sum(-1) @ h.new_ones(5, 6)

    habit = plain(windows)
    found = captured(habit)
    node = next(n for n in found.gm.graph.nodes if n.target is torch.ops.aten.as_strided.default)
    assert node.all_input_nodes[0].target is torch.ops.aten.clone.default
    assert_same(step(compiled(habit, stages=2, micro_batches=3), habit), one_device(habit), 1e-9)


def test_a_view_of_memory_around_its_operand_is_refused_with_its_line() -> None:
    with pytest.raises(CaptureError, match=r"as_strided reads memory around its operand .*habits.py.*contiguous"):
        captured(plain(lambda m, h: h[:, :3].as_strided((h.shape[0], 6), (6, 1))))


def test_python_state_that_changes_from_call_to_call_is_found() -> None:
    class Drifts(Net):
        calls = 0

        def forward(self, x: Tensor, *more: Any) -> Tensor:
            type(self).calls += 1
            return super().forward(x) * type(self).calls

    with pytest.raises(CaptureError, match="is not the eager model's"):
        compiled(Habit(Drifts().double(), (features(),), classes(), cross_entropy))


def test_a_gradient_that_a_graph_lost_is_found() -> None:
    habit = plain()
    found = captured(habit)
    graph = found.gm.graph
    linear = next(n for n in graph.nodes if n.target is torch.ops.aten.linear.default)
    with graph.inserting_after(linear):
        cut = graph.call_function(torch.ops.aten.detach.default, (linear,))
    linear.replace_all_uses_with(cut, delete_user_cb=lambda n: n is not cut)
    found.gm.recompile()
    with pytest.raises(
        CaptureError, match=r"gradient of 'a.(weight|bias)' exists in eager and not in the captured graph"
    ):
        check_capture(habit.model, found, [*habit.args, habit.target], habit.loss_fn)


def test_capture_leaves_modes_buffers_gradients_and_random_state() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 3)).double()
    model[1].eval()
    habit = Habit(model, (features(),), classes(), cross_entropy)
    before = {name: b.clone() for name, b in model.named_buffers()}
    state = torch.get_rng_state()
    compiled(habit)
    assert [m.training for m in model] == [True, False, True, True]
    assert all(torch.equal(b, before[name]) for name, b in model.named_buffers())
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(state, torch.get_rng_state())


def _flat(m: Any, h: Tensor) -> Tensor:
    h = h.unflatten(1, (3, 2))
    with torch.no_grad():
        rows, means = h.shape[0] * h.shape[1], h.mean(2).flatten()
    out: Tensor = (h.reshape(rows, 2) * means[:, None]).view(h.shape[0], -1)
    return out


def test_a_size_that_is_computed_without_gradients_is_a_size() -> None:
    torch.manual_seed(0)
    habit = plain(_flat)
    assert_same(step(compiled(habit), habit), one_device(habit), 1e-9)
