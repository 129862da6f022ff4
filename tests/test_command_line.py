"""The command line compiles as its options say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from efftra_fx import api
from efftra_fx.__main__ import main

WORDS = ["check", "test_command_line:with_norm", "--ranks", "2", "--stages", "1", "--replicas", "2"]


def with_norm() -> Any:
    """Return a model that draws and normalises, with what it is called with."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 3)).double()
    return model, (torch.randn(8, 4).double(),), {}, torch.arange(8) % 3, nn.functional.cross_entropy


def test_a_step_with_masks_and_statistics_of_the_whole_batch_matches_with_its_options(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*WORDS, "--rng", "layout_free", "--batch-norm", "exact", "--micro-batches", "1"]) == 0
    assert "match" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        ((), "rng", "plan"),
        (("--rng", "layout_free"), "rng", "layout_free"),
        (("--batch-norm", "synced"), "batch_norm", "synced"),
        (("--loss-reduction", "mean"), "loss_reduction", "mean"),
        (("--compile-stages",), "compile_stages", True),
        (("--compile-stages", "aot_eager"), "compile_stages", "aot_eager"),
    ],
)
def test_options_reach_the_compiler(
    words: tuple[str, ...], name: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class ReachedError(Exception):
        pass

    def compile(*_: Any, **options: Any) -> None:
        raise ReachedError(options[name])

    monkeypatch.setattr(api, "compile", compile)
    with pytest.raises(ReachedError) as reached:
        main([*WORDS, *words])
    assert reached.value.args == (value,)


def test_an_unknown_choice_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*WORDS, "--rng", "other"])
    assert "layout_free" in capsys.readouterr().err
