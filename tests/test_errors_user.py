"""What a user may get wrong: one error that names the thing, what was expected, what was found, and what to do."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import ZOO
from ranks import Outcome, outcomes_of, run_ranks
from rig import Rig, assert_same, lay_out, rig_of
from torch import Tensor, nn

from efftra_fx import Cluster, EfftraError, compile
from efftra_fx.cluster import Device, Link, Links
from efftra_fx.compiler import Options, Report
from efftra_fx.cost import CostTable, NodeCost, Timing
from efftra_fx.errors import (
    BatchError,
    CaptureError,
    CheckpointError,
    ClusterError,
    CostError,
    CoverageError,
    DeviceError,
    InputError,
    LaunchError,
    LossError,
    MemoryPlanError,
    PlanError,
)
from efftra_fx.plan import Plan, Stage
from efftra_fx.plan_choice import choose_plan

MLP = ZOO["mlp"]
SMALL = Cluster.uniform(1, 4, memory_gb=1e-6, intra=Link(1e9))


def rig() -> Rig:
    """The captured model that most of these tests share: 4 blocks, 12 rows of 6 numbers."""
    return rig_of(MLP)


@cache
def program() -> Any:
    """Two stages, four micro-batches."""
    return rig().program(lay_out(rig().blocks, (1, 1), 4))


def rows(count: int = 12) -> tuple[Tensor, Tensor]:
    """Inputs and targets that fit."""
    batch = MLP.data(count)
    return batch.args[0], batch.target


def compiled(model: Any = None, cluster: Any = None, **options: Any) -> Any:
    """Compile with everything right but what is given."""
    x, y = rows()
    given = {"example_inputs": (x,), "example_target": y, "loss_fn": MLP.loss_fn, "costs": "estimated", **options}
    return compile(MLP.build() if model is None else model, Cluster.local(4) if cluster is None else cluster, **given)


def planned(cluster: Cluster | None = None, **fixed: Any) -> Any:
    """Search a plan for the shared model with parts of it fixed."""
    built = rig().first.built
    return choose_plan(built.front, built.chain, cluster or Cluster.local(4), Options(**fixed), Report())


def refuses(kind: type[EfftraError], words: str, action: Callable[[], Any]) -> None:
    """Hold that an action raises exactly this kind of error and that its message has these words, in order."""
    with pytest.raises(EfftraError) as caught:
        action()
    assert type(caught.value) is kind, f"{type(caught.value).__name__}: {caught.value}"
    message = str(caught.value)
    assert re.search(".*".join(map(re.escape, words.split(" ... "))), message, re.DOTALL), message
    assert message[0].islower() or message[0] in "'/<" or "=" in message.split()[0], message
    assert not message.endswith("."), message


STEPS: dict[str, tuple[type[EfftraError], str, Callable[[Tensor, Tensor], Any]]] = {
    "no target": (
        InputError,
        "target: compiled with a target, got none; give target=",
        lambda x, y: program().step(x),
    ),
    "another dtype": (
        InputError,
        "argument 'input': compiled for float64 [rows, 6], got float32 [12, 6]; convert it",
        lambda x, y: program().step(x.float(), target=y),
    ),
    "another dtype of the target": (
        InputError,
        "argument 'target': compiled for int64 [rows], got int32 [12]; convert it",
        lambda x, y: program().step(x, target=y.int()),
    ),
    "a dimension more": (
        InputError,
        "argument 'input': compiled for float64 [rows, 6], got float64 [12, 6, 1]",
        lambda x, y: program().step(x.unsqueeze(-1), target=y),
    ),
    "another size": (
        InputError,
        "argument 'input': compiled for float64 [rows, 6], got float64 [12, 5]; the step was captured again for this "
        "batch, but the model and its loss do not run on these arguments, on one device either: RuntimeError: mat1",
        lambda x, y: program().step(x[:, :5], target=y),
    ),
    "fewer rows of the target": (
        InputError,
        "argument 'target' has 5 rows but 'input' has 12; give the same batch to both",
        lambda x, y: program().step(x, target=y[:5]),
    ),
    "a target by position": (
        InputError,
        "forward(input) cannot be called like this: too many positional arguments; a target is given as target=",
        lambda x, y: program().step(x, y),
    ),
    "a list for a tensor": (
        InputError,
        "argument 'input' was a tensor when the step was compiled and is a container now",
        lambda x, y: program().step(x.tolist(), target=y),
    ),
    "a tensor that waits for a gradient": (
        InputError,
        "argument 'input' requires a gradient, which a step gives to the model's parameters only; detach it, or make",
        lambda x, y: program().step(x.clone().requires_grad_(), target=y),
    ),
    "a call as of a module": (
        InputError,
        "a compiled model is not called: step(...) computes loss and gradients, evaluate(...) outputs",
        lambda x, y: program()(x),
    ),
    "a copy": (
        InputError,
        "can be neither copied nor pickled; save state_dict() ... and compile again with plan=",
        lambda x, y: copy.deepcopy(program()),
    ),
    "a plan that cannot be written": (
        PlanError,
        "/nowhere/plan.json: cannot write the plan: ",
        lambda x, y: program().plan.save("/nowhere/plan.json"),
    ),
    "a state of a wrapped model": (
        CheckpointError,
        "the state's names begin with 'module.' ... take it off: {name.removeprefix('module.'): value",
        lambda x, y: program().load_state_dict({f"module.{n}": t for n, t in program().state_dict().items()}),
    ),
    "no rows": (
        InputError,
        "argument 'input' has 0 rows, expected at least 1",
        lambda x, y: program().step(x[:0], target=y[:0]),
    ),
    "a number for a tensor": (
        InputError,
        "argument 'input' was a tensor when the step was compiled and is not a tensor now",
        lambda x, y: program().step(3, target=y),
    ),
    "an argument too many": (
        InputError,
        "the model's forward(input) cannot be called like this: too many positional arguments",
        lambda x, y: program().step(x, x, target=y),
    ),
    "an unknown argument": (
        InputError,
        "the model's forward(input) cannot be called like this: ... 'inputs'",
        lambda x, y: program().step(x, inputs=x, target=y),
    ),
    "a sparse tensor": (
        InputError,
        "argument 'input' is a sparse_coo tensor, expected a dense one",
        lambda x, y: program().step(x.to_sparse(), target=y),
    ),
    "a tensor without values": (
        InputError,
        "argument 'input' lies on the meta device, so it has no values",
        lambda x, y: program().step(x.to("meta"), target=y),
    ),
    "nothing to evaluate": (
        InputError,
        "argument 'input' has 0 rows, expected at least 1",
        lambda x, y: program().evaluate(x[:0]),
    ),
    "another dtype to evaluate": (
        CaptureError,
        "the model does not run on rows of the example: RuntimeError: ... same dtype",
        lambda x, y: program().evaluate(x.float()),
    ),
    "no state": (
        CheckpointError,
        "the state must be a dictionary of tensors by name, got NoneType",
        lambda x, y: program().load_state_dict(None),
    ),
    "a state of no tensors": (
        CheckpointError,
        "'0.weight' is of type str, expected a tensor",
        lambda x, y: program().load_state_dict({**program().state_dict(), "0.weight": "a"}),
    ),
    "no norm": (
        InputError,
        "max_norm must be a number of 0 or more, got nan",
        lambda x, y: program().clip_grad_norm_(float("nan")),
    ),
    "a dump in a file": (
        InputError,
        "dump: cannot write into the folder ... name another",
        lambda x, y: program().dump(__file__),
    ),
    "a state without a parameter": (
        CheckpointError,
        "the state does not fit the model: '0.weight' is missing (8 missing",
        lambda x, y: program().load_state_dict({}),
    ),
    "a state of another shape": (
        CheckpointError,
        "'0.weight' has shape [1], expected [8, 6]",
        lambda x, y: program().load_state_dict({**program().state_dict(), "0.weight": torch.ones(1)}),
    ),
}


@pytest.mark.parametrize("what", STEPS)
def test_a_step_with_wrong_arguments_is_refused_and_the_next_one_runs(what: str) -> None:
    kind, words, action = STEPS[what]
    x, y = rows()
    expected = float(program().step(x, target=y))
    refuses(kind, words, lambda: action(x, y))
    assert float(program().step(x, target=y)) == expected


def test_after_an_error_inside_a_step_the_next_right_one_trains() -> None:
    x, y = rows()
    expected = float(program().step(x, target=y))
    wrong = y.clone()
    wrong[7] = 99
    for _ in range(2):
        with pytest.raises(IndexError, match="out of bounds"):
            program().step(x, target=wrong)
    assert float(program().step(x, target=y)) == expected


def test_a_model_that_was_converted_or_extended_is_refused_by_name() -> None:
    x, y = rows()
    model = MLP.build()
    converted = compiled(model)
    model.float()
    refuses(InputError, "parameter '0.weight' of the model was float64 and is float32 now", lambda: converted.step(x))
    model.double()
    assert float(converted.step(x, target=y)) > 0
    assert isinstance(model, nn.Sequential)
    model.append(nn.Linear(3, 3).double())
    refuses(
        InputError,
        "the model uses '7.weight', which it did not have when it was compiled; compile it again",
        lambda: converted.step(x, target=y),
    )


def test_attributes_of_modules_are_missing_with_a_word_on_what_to_do() -> None:
    for name, words in (
        ("train", "model.train() holds"),
        ("zero_grad", "optimizer.zero_grad()"),
        ("cuda", "model.cuda"),
    ):
        with pytest.raises(AttributeError, match=re.escape(words)):
            getattr(program(), name)
    assert repr(program()).startswith("<CompiledModel of Sequential: 4 micro-batch(es), schedule 1f1b; stages: ")


PLANS: dict[str, tuple[type[EfftraError], str, Callable[[], Any]]] = {
    "more micro-batches than rows": (
        PlanError,
        "micro_batches=20 but the batch has 12 rows; ask for 1 to 12",
        lambda: planned(micro_batches=20),
    ),
    "more stages than blocks": (
        PlanError,
        "stages=9 but ... has 4 blocks; ask for at most 4",
        lambda: planned(Cluster.local(9), stages=9),
    ),
    "more stages than devices": (
        PlanError,
        "stages=5 needs as many devices, the cluster has 4",
        lambda: planned(stages=5),
    ),
    "more replicas than devices": (
        PlanError,
        "replicas=(3, 3) need 6 devices, the cluster has 4",
        lambda: planned(replicas=(3, 3)),
    ),
    "too little memory": (
        MemoryPlanError,
        "no plan fits the memory of the devices; the closest ... needs ... but device ... are missing); add devices",
        lambda: planned(SMALL),
    ),
    "too little memory for the plan": (
        MemoryPlanError,
        "the given plan does not fit: stage 0 needs ... B but device 0 has 1 kB ( ... are missing); add devices",
        lambda: planned(SMALL, plan=lay_out(4, (1, 1), 2)),
    ),
    "a plan of fewer blocks": (
        CoverageError,
        "the plan is for a model of 3 blocks, but this one has 4; give a plan of this model",
        lambda: rig().first.with_plan(lay_out(3, (1,))),
    ),
    "a plan of more blocks": (
        CoverageError,
        "the plan is for a model of 7 blocks, but this one has 4",
        lambda: rig().first.with_plan(lay_out(7, (1, 1))),
    ),
    "a device that is not there": (
        DeviceError,
        "stage 0 uses device 7, but the cluster has 4",
        lambda: rig().first.with_plan(Plan((Stage(0, 4, (7,)),), 2)),
    ),
    "a cut in no module": (
        PlanError,
        "no block lies in 'nowhere'; modules with blocks are 0, 2, 4, 6",
        lambda: planned(cuts=("nowhere",)),
    ),
    "cuts in the wrong order": (
        PlanError,
        "a stage that starts at '4' would have no block; cuts must be in the model's order",
        lambda: planned(cuts=("4", "2")),
    ),
    "cuts for more devices": (
        PlanError,
        "need 5 devices, the cluster has 4",
        lambda: planned(cuts=("2",), replicas=(2, 3)),
    ),
}


@pytest.mark.parametrize("what", PLANS)
def test_a_plan_that_cannot_be_had_is_refused(what: str) -> None:
    refuses(*PLANS[what])


ASKED: dict[str, tuple[type[EfftraError], str, dict[str, Any]]] = {
    "stages": (PlanError, "stages must be a whole number of 1 or more, got 0", {"stages": 0}),
    "micro-batches": (PlanError, "micro_batches must be a whole number of 1 or more, got 2.5", {"micro_batches": 2.5}),
    "replicas": (PlanError, "replicas must list a number for each stage, got 3", {"replicas": 3}),
    "one of the replicas": (PlanError, "replicas[1] must be a whole number of 1 or more, got 0", {"replicas": (1, 0)}),
    "cuts": (PlanError, "cuts must list the modules at which stages begin, got 'a'; for one cut", {"cuts": "a"}),
    "schedule": (PlanError, "schedule must be one of 1f1b, gpipe, got 'zigzag'", {"schedule": "zigzag"}),
    "costs": (PlanError, "costs must be 'measured', 'estimated' or a CostTable, got 'free'", {"costs": "free"}),
    "optimizer": (PlanError, "optimizer_states must be 0 or more bytes", {"optimizer_states": -1.0}),
    "stages and replicas": (
        PlanError,
        "stages=3 makes 3 stages but replicas=(1, 1) is for 2; give one of them",
        {"stages": 3, "replicas": (1, 1)},
    ),
    "stages and cuts": (PlanError, "stages=3 makes 3 stages but cuts=('2',) is for 2", {"stages": 3, "cuts": ["2"]}),
    "plan and stages": (
        PlanError,
        "plan= fixes everything, so stages= cannot be given too",
        {"stages": 1, "plan": lay_out(4, (1,))},
    ),
    "plan": (PlanError, "plan must be a Plan or the path of its file, got int", {"plan": 3}),
    "timeout": (InputError, "timeout must be more than 0 seconds, at most 1e+07, got 0", {"timeout": 0}),
    "model": (InputError, "model must be an nn.Module, got function; wrap it", {"model": lambda x: x}),
    "cluster": (ClusterError, "cluster must be a Cluster, got int; use Cluster.from_env()", {"cluster": 4}),
    "loss": (LossError, "loss_fn must be a function of output and target, got str", {"loss_fn": "mse"}),
    "batch_dims": (BatchError, "batch_dims names 'x', but the tensors are input, target", {"batch_dims": {"x": 0}}),
    "a dimension of the batch": (
        BatchError,
        "batch_dims says dimension 7 for 'input', which has shape [12, 6]",
        {"batch_dims": {"input": 7}},
    ),
    "example inputs": (
        InputError,
        "example_inputs must be the tuple of positional arguments, got dict",
        {"example_inputs": {"input": 1}},
    ),
    "example arguments by name": (
        InputError,
        "example_kwargs must be a dictionary of arguments by name, got list",
        {"example_kwargs": [1]},
    ),
    "an empty example": (
        InputError,
        "argument 'target' has 0 rows, expected at least 1",
        {"example_inputs": (torch.ones(0, 6).double(),), "example_target": torch.ones(0).long()},
    ),
    "no function for an optimizer": (
        InputError,
        "optimizer must be a function from parameters to an optimizer, got SGD",
        {"optimizer": torch.optim.SGD([torch.ones(1)], 0.1)},
    ),
    "a function that makes no optimizer": (
        InputError,
        "optimizer= must return an optimizer, with step and zero_grad, got NoneType",
        {"optimizer": lambda parameters: None},
    ),
    "costs of another model": (
        CostError,
        "costs: the table has none of the model's ... blocks among its 1 entries",
        {"costs": CostTable("other", (NodeCost("a", Timing(), Timing()),))},
    ),
    "nothing to trace": (
        InputError,
        "needs optimizer=lambda parameters: ... or give example_inputs=",
        {"example_inputs": None},
    ),
}


@pytest.mark.parametrize("what", ASKED)
def test_what_cannot_be_meant_is_refused_before_anything_is_traced(what: str) -> None:
    kind, words, options = ASKED[what]
    refuses(kind, words, lambda: compiled(**options))


class WritesWeights(nn.Linear):
    """Keeps its weights small, as it is called."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.3, 0.3)
        return super().forward(x)


def inferred() -> nn.Module:
    """Return a model whose weights are inference tensors."""
    with torch.inference_mode():
        return nn.Linear(6, 3).double()


MODELS: dict[str, tuple[type[EfftraError], str, dict[str, Any]]] = {
    "a weight that forward writes": (
        CaptureError,
        "forward writes parameter 'weight' in place at ... test_errors_user.py ... write it between steps",
        {"model": WritesWeights(6, 3).double()},
    ),
    "a lazy module": (
        InputError,
        "'weight' of the model has no shape yet, since its module is lazy; call the model once",
        {"model": nn.LazyLinear(3).double()},
    ),
    "a model without values": (
        InputError,
        "'weight' of the model has no values (device 'meta'), so it cannot be trained; model.to_empty(device=",
        {"model": nn.Linear(6, 3, device="meta")},
    ),
    "a model made in inference mode": (
        InputError,
        "'weight' of the model was made under torch.inference_mode(), so it cannot be trained; make the model outside",
        {"model": inferred()},
    ),
    "a traced model": (
        CaptureError,
        "the model is TorchScript (torch.jit.script or torch.jit.trace), which keeps its weights and its code",
        {"model": torch.jit.trace(nn.Linear(6, 3).double(), torch.ones(12, 6, dtype=torch.float64))},
    ),
    "a loss for each row": (
        LossError,
        "returned a loss of shape [12], expected a scalar; reduce it",
        {"loss_fn": lambda output, target: F.cross_entropy(output, target, reduction="none")},
    ),
    "a loss in a dictionary": (
        LossError,
        "returned dict, expected a scalar tensor as the loss",
        {"loss_fn": lambda output, target: {"loss": output.sum()}},
    ),
    "a complex loss": (
        LossError,
        "loss_fn returned a loss of dtype complex128, expected a real floating-point number",
        {"loss_fn": lambda output, target: (output * 1j).sum()},
    ),
    "a whole loss": (
        LossError,
        "loss_fn returned a loss of dtype int64, expected a real floating-point number",
        {"loss_fn": lambda output, target: output.argmax()},
    ),
    "an example of another width": (
        CaptureError,
        "do not run on these arguments, on one device either: RuntimeError: mat1 and mat2 ... (12x5 and 6x",
        {"example_inputs": (torch.ones(12, 5, dtype=torch.float64),)},
    ),
    "an example of another dtype than the parameters": (
        CaptureError,
        "the model and its loss do not run on rows of the example: RuntimeError: ... same dtype",
        {"example_inputs": (torch.ones(12, 6),)},
    ),
    "a weight of parts that raises": (
        LossError,
        "loss_reduction raised ZeroDivisionError for a part: division by zero",
        {"loss_reduction": lambda args, kwargs, target: 1 / 0},
    ),
    "no loss": (LossError, "the model returned a loss of shape [12, 3], expected a scalar", {"loss_fn": None}),
    "a loss without the model": (
        LossError,
        "the loss depends on no parameter of the model; nothing can be trained",
        {"loss_fn": lambda output, target: target.double().mean()},
    ),
    "a frozen model": (
        LossError,
        "none of the 2 parameters is trainable, so there is nothing to train; set requires_grad",
        {"model": nn.Linear(6, 3).double().requires_grad_(False)},
    ),
    "a loss that needs all rows, in 1F1B": (
        PlanError,
        "schedule '1f1b' cannot be had: ... needs the whole batch's values ... use schedule='gpipe'",
        {"loss_fn": lambda output, target: F.cross_entropy(output, target).sqrt(), "schedule": "1f1b"},
    ),
}


@pytest.mark.parametrize("what", MODELS)
def test_a_model_or_loss_that_cannot_be_trained_is_refused(what: str) -> None:
    kind, words, options = MODELS[what]
    refuses(kind, words, lambda: compiled(**options))


def test_a_batch_smaller_than_the_micro_batches_simply_has_fewer_of_them() -> None:
    for count in (1, 2, 3):
        assert_same(rig().expected(count), rig().found(lay_out(rig().blocks, (1, 1), 4), count))


def test_before_the_first_step_there_is_nothing_to_see_or_evaluate() -> None:
    waiting = compile(MLP.build(), Cluster.local(2), loss_fn=MLP.loss_fn, optimizer=lambda p: torch.optim.SGD(p, 0.1))
    refuses(InputError, "nothing is compiled yet: call step once, or give example_inputs=", lambda: waiting.plan)
    refuses(InputError, "evaluate needs a compiled model", lambda: waiting.evaluate(rows()[0]))


def test_a_cluster_that_is_only_described_is_planned_for_but_not_run() -> None:
    described = compiled(cluster=Cluster.uniform(1, 4, intra=Link(1e9)), stages=2)
    assert len(described.plan.stages) == 2
    refuses(
        LaunchError,
        "4 devices is only described ... use Cluster.from_env() and launch by torchrun --nproc-per-node 4",
        lambda: described.step(*rows()[:1]),
    )


FILES: dict[str, tuple[type[EfftraError], str, str]] = {
    "plan.json": (PlanError, "plan.json: not JSON: ", "{"),
    "empty.json": (PlanError, "empty.json: schema must be 'plan/1', got None", "{}"),
    "key.json": (
        PlanError,
        "key.json: the file: unknown key 'microbatches', known are ... micro_batches",
        lay_out(4, (1,)).to_json().replace("micro_batches", "microbatches"),
    ),
    "twice.json": (
        PlanError,
        "twice.json: device 0 is used by stage 0 and by stage 1",
        lay_out(4, (1, 1)).to_json().replace("1\n   ]", "0\n   ]"),
    ),
    "key.toml": (
        ClusterError,
        "key.toml: machine[0]: unknown key 'memory', known are ... memory_gb",
        "[[machine]]\ndevices = 1\nmemory = 3\n",
    ),
    "number.toml": (
        ClusterError,
        "number.toml: machine[0].memory_gb must be between 1e-06 and 1e+06, got -3",
        "[[machine]]\ndevices = 1\nmemory_gb = -3\n",
    ),
    "fast.toml": (
        ClusterError,
        "fast.toml: machine[0].link.bandwidth_gb_per_s must be between 1e-06 and 1e+06, got 1e+30",
        "[[machine]]\ndevices = 4\nlink = { bandwidth_gb_per_s = 1e30 }\n",
    ),
    "broken.toml": (ClusterError, "broken.toml: not TOML: ", "[[machine"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_broken_file_is_refused_by_its_name_and_field(name: str, tmp_path: Path) -> None:
    kind, words, text = FILES[name]
    path = tmp_path / name
    path.write_text(text)
    if name.endswith("toml"):
        refuses(kind, words, lambda: Cluster.load(path))
    else:
        refuses(kind, words, lambda: compiled(plan=path))


def test_a_file_that_is_not_there_is_refused_by_its_name(tmp_path: Path) -> None:
    refuses(PlanError, "none.json: cannot read the plan", lambda: compiled(plan=tmp_path / "none.json"))
    refuses(ClusterError, "none.toml: cannot read the cluster file", lambda: Cluster.load(tmp_path / "none.toml"))


def start_here(**options: Any) -> Any:
    """Compile for the launched ranks; targets and tokens may be out of range later."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    tokens = torch.arange(12) % 5
    given = {"example_inputs": (tokens,), "example_target": tokens % 3, "costs": "estimated", **options}
    return compile(model, Cluster.from_env(), loss_fn=F.cross_entropy, timeout=60.0, **given)


def other_cluster() -> None:
    """Ask for three ranks where there are two."""
    link = Link(1e9)
    cluster = Cluster((Device(0),) * 3, Links((link,)), where="ranks")
    compiled(cluster=cluster)


def test_ranks_that_are_not_the_clusters_are_refused_on_every_rank() -> None:
    for outcome in outcomes_of(other_cluster, 2, limit_s=60.0):
        last = outcome.error.strip().splitlines()[-1]
        assert "LaunchError" in last and "3" in last and "2" in last, outcome.error


def wrong_here() -> list[str]:
    """Give wrong things on one rank, then on all, then right ones."""
    program = start_here(replicas=(1, 1), micro_batches=4)
    rank = program.world.ranks[0]
    tokens = torch.arange(12) % 5
    said = []
    attempt: Callable[[], Tensor]
    for attempt in (
        lambda: program.step(tokens.float() if rank == 1 else tokens, target=tokens % 3),
        lambda: program.step(tokens) if rank == 0 else program.step(tokens, target=tokens % 3),
        lambda: program.step(tokens[: 12 - rank], target=(tokens % 3)[: 12 - rank]),
        lambda: program.step(tokens.roll(rank), target=tokens % 3),
        lambda: program.step(tokens, target=(tokens + rank) % 3),
        lambda: program.evaluate(tokens).sum() if rank == 1 else program.step(tokens, target=tokens % 3),
        lambda: program.state_dict()["1.bias"] if rank == 0 else program.step(tokens, target=tokens % 3),
        lambda: program.step(tokens[:0], target=tokens[:0]),
        lambda: program.step(tokens[:3], target=(tokens % 3)[:3]),
    ):
        try:
            said.append(f"loss {float(attempt()):.6f}")
        except EfftraError as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def test_what_one_rank_gives_wrong_all_ranks_refuse_and_then_go_on() -> None:
    outcomes = run_ranks(wrong_here, 2, limit_s=120.0)
    for said in outcomes:
        assert "argument 'input': compiled for int64 [rows], got float32 [12]" in said[0]
        assert "target: compiled with a target, got none" in said[1]
        assert "Error" in said[2] and "11" in said[2] and "12" in said[2], said[2]
        assert "given different data: of 'input', rank 0 has 0, 1, 2, ..., and rank 1 has 1, 0, 1, ...;" in said[3]
        assert "given different data: of 'target', rank 0 has 0, 1, 2, ..." in said[4]
        assert "the ranks make different calls: rank 0 step, its call 6, rank 1 evaluate, its call 6; every" in said[5]
        assert "the ranks make different calls: rank 0 state_dict, its call 7, rank 1 step, its call 7;" in said[6]
        assert "has 0 rows, expected at least 1" in said[7]
        assert said[8].startswith("loss ")
    assert outcomes[0][8] == outcomes[1][8]


class Noisy(nn.Module):
    """Two layers and some noise; the parts may be given."""

    def __init__(self, rate: float = 0.1, act: Any = torch.tanh, width: int = 4) -> None:
        super().__init__()
        self.one, self.drop, self.two, self.act = nn.Linear(4, width), nn.Dropout(rate), nn.Linear(width, 3), act

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.two(self.drop(self.act(self.one(x))))
        return result


def compile_apart() -> list[str]:
    """Compile other models, modes and options on rank 1."""
    torch.set_num_threads(1)
    cluster, odd = Cluster.from_env(), os.environ["RANK"] == "1"
    said = []
    for model, options in (
        (Noisy(width=5 if odd else 4), {}),
        (Noisy(act=torch.relu if odd else torch.tanh), {}),
        (Noisy(rate=0.5 if odd else 0.1), {}),
        (Noisy().train(not odd), {}),
        (Noisy().requires_grad_(True), {"rng": "layout_free" if odd else "plan"}),
        (Noisy(), {"loss_fn": F.l1_loss if odd else F.mse_loss}),
        (Noisy(), {"loss_fn": lambda output, target: F.mse_loss(output, target) * (3 if odd else 2)}),
        (Noisy(), {}),
    ):
        given: dict[str, Any] = {"loss_fn": F.mse_loss, "costs": "estimated", "stages": 2, **options}
        try:
            program = compile(
                model, cluster, example_inputs=(torch.ones(8, 4),), example_target=torch.ones(8, 3), **given
            )
            said.append(f"loss {float(program.step(torch.ones(8, 4), target=torch.ones(8, 3))):.6f}")
        except EfftraError as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def test_ranks_with_other_models_modes_or_options_are_told_the_first_difference() -> None:
    mine, others = run_ranks(compile_apart, 2, limit_s=120.0)
    assert mine == others
    for words, found in zip(
        (
            "have different models: rank 0 has 'one.weight: float32 [4, 4]', rank 1 has 'one.weight: float32 [5, 4]'",
            "captured different steps: rank 0 has 'tanh = tanh.default(",
            "native_dropout.default(tanh, 0.1, True)",
            "native_dropout.default(tanh, 0.1, True)",
            "rank 0 has 'rng='plan'', rank 1 has 'rng='layout_free''; give every rank the same model",
            "mse_loss",
            "captured different steps: rank 0 has 'mul",
            "loss ",
        ),
        mine,
        strict=True,
    ):
        assert words in found, found


def step_by_lbfgs() -> list[Any]:
    """Take a step of L-BFGS with stages, and with replicas."""
    said: list[Any] = []
    for replicas in ((1, 1), (2,)):
        program = start_here(replicas=replicas, micro_batches=2)
        optimizer = torch.optim.LBFGS(list(program.parameters()), lr=0.1, max_iter=3)
        tokens = torch.arange(12) % 5

        def again(program: Any = program, optimizer: Any = optimizer, tokens: Tensor = tokens) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = program.step(tokens, target=tokens % 3)
            return loss

        try:
            optimizer.step(again)
            said.append({name: tensor.double().sum().item() for name, tensor in program.state_dict().items()})
        except EfftraError as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def test_lbfgs_is_refused_where_ranks_hold_parts_and_matches_where_they_hold_all() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    tokens = torch.arange(12) % 5

    def again() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens), tokens % 3)
        loss.backward()
        return loss

    optimizer.step(again)
    for refused, found in run_ranks(step_by_lbfgs, 2, limit_s=120.0):
        assert "InputError: LBFGS updates all parameters together, but each rank holds" in refused
        for name, tensor in model.state_dict().items():
            assert found[name] == pytest.approx(tensor.double().sum().item(), rel=1e-4, abs=1e-5), name


def fail_here(where: str) -> None:
    """Step with an index that only one stage looks up."""
    program = start_here(cuts=["1", "3"], micro_batches=4, replicas=(1, 1, 1))
    tokens = torch.arange(12) % 5
    program.step(tokens, target=tokens % 3)
    bad = tokens.clone()
    bad[7] = 99
    if where == "first":
        program.step(bad, target=tokens % 3)
    else:
        program.step(tokens, target=bad)


def crash_here() -> None:
    """One rank raises between two steps."""
    program = start_here(cuts=["1", "3"], micro_batches=4, replicas=(1, 1, 1))
    tokens = torch.arange(12) % 5
    program.step(tokens, target=tokens % 3)
    if program.world.ranks[0] == 1:
        raise KeyError("lost the data")
    program.step(tokens, target=tokens % 3)


def last_words(outcomes: list[Outcome]) -> list[str]:
    """Return each rank's last line; none was killed, none ran into its time limit."""
    assert all(outcome.status == 1 for outcome in outcomes), [outcome.status for outcome in outcomes]
    words = [outcome.error.strip().splitlines()[-1] for outcome in outcomes]
    assert not any("TransportTimeout" in line for line in words), words
    return words


@pytest.mark.parametrize(("where", "rank"), [("first", 0), ("last", 2)])
def test_when_one_rank_fails_in_a_step_all_end_with_its_error(where: str, rank: int) -> None:
    words = last_words(outcomes_of(fail_here, 3, where, limit_s=120.0))
    for one, line in enumerate(words):
        assert ("IndexError" in line) if one == rank else ("RankFailed" in line and f"rank {rank}" in line), words
        assert "out of" in line, words


def test_when_one_rank_ends_between_steps_the_others_end_too() -> None:
    words = last_words(outcomes_of(crash_here, 3, limit_s=120.0))
    assert "lost the data" in words[1]
    for line in (words[0], words[2]):
        assert "RankFailed" in line or "TransportError" in line, words
        assert "rank 1" in line, words


def test_a_step_that_fails_on_a_part_of_the_rows_says_where_rows_were_taken_to_lie() -> None:
    class TimeFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 5)

        def forward(self, x: Tensor) -> Tensor:
            if bool((x > -100).all()):  # a question, for which the step is run on the example and on fewer rows
                out: Tensor = self.inner(x).flatten(0, 1)
                return out
            rest: Tensor = self.inner(x)
            return rest

    x, words = torch.randn(3, 6, 4), torch.randint(0, 5, (3, 6))

    def loss_fn(out: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(out, target.flatten())

    fixed: Any = dict(example_inputs=(x,), example_target=words, loss_fn=loss_fn, costs="estimated")
    with pytest.raises(CaptureError, match=r"not on 5 of its 6 rows: ValueError.*'x' along dimension 1, and 'target'"):
        compile(TimeFirst(), Cluster.local(2), batch_dims={"x": 1, "target": None}, **fixed)
    program = compile(TimeFirst(), Cluster.local(2), batch_dims={"x": 1, "target": 1}, **fixed)
    assert program.check(x, target=words, show=False).matches
