"""Memory of a planned run: against real processes, and what the search for a micro-batch and the advice say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import plan_memory as benchmark
from pipeline.config import load_config
from pipeline.errors import UserError
from pipeline.hardware import GPUS, Gpu
from pipeline.models import create_model
from pipeline.models.weights.exported import Description, write_exported
from pipeline.optim.engine import deepspeed_config
from pipeline.planning import planned_machine
from pipeline.planning.memory import Memory, Subject, largest_micro_batch, plan_memory, traced_evaluation, traced_step
from pipeline.planning.page import changes
from pipeline.planning.traced_step import ACTIVATIONS, SWAPPED, TEACHER
from support.ranks import run_forked

SMALL = [
    "model.switches={widths: [32, 32, 32, 32]}",
    "model.image_size=64",
    "train.precision=fp32",
    "train.micro_batch_size=16",
    "train.global_batch_size=96",
    "eval.batch_size=16",
]


def subject(*overrides: str, gpus: int = 2, gpu: Gpu | None = GPUS["a100-80g"]) -> Subject:
    return Subject(load_config("pervit_t", [*SMALL, *overrides]), 1, gpus, gpu)


def gpu_of(memory: int) -> Gpu:
    return Gpu("small-1g", "small", memory, 1e12, 1e12, 1e12, 1e9, "a test")


def measured(cases: list[dict], world: int, out: Path) -> None:
    """As the benchmark's own."""
    run_forked("benchmarks.plan_memory", "--rank", json.dumps(cases), "--json", out, processes=world)


@pytest.mark.long
def test_the_plan_is_within_ten_percent_of_real_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against an engine, an operator or a version of DeepSpeed that allocates what the trace does not."""
    rows = tmp_path / "rows.jsonl"
    command = [
        "plan_memory",
        "--models",
        "pervit_t",
        "--worlds",
        "2",
        "--stages",
        "1",
        "3",
        "--batches",
        "96",
        "--checkpointing",
        "0",
    ]
    files = ["--image-size", "64", "--json", str(rows), "--table", str(tmp_path / "table")]
    monkeypatch.setattr("sys.argv", [*command, *files, SMALL[0]])
    # Its ranks are forked: five seconds less for each.
    monkeypatch.setattr(benchmark, "measured", measured)
    benchmark.main()
    found = [json.loads(line) for line in (tmp_path / "table").read_text().splitlines()]
    assert [row["stage"] for row in found] == [1, 3]
    for row in found:
        assert row["predicted"] == pytest.approx(row["measured"], rel=0.1)
        assert row["parts"][ACTIVATIONS] > 0.3 * row["predicted"]  # or it would not be a test of the trace


def test_activation_checkpointing_saves_activations_alone() -> None:
    """Guards against a trace that keeps what a checkpointed block recomputes."""
    off, on = (plan_memory(subject(f"train.activation_checkpointing={value}")) for value in ("false", "true"))
    assert on.parts[ACTIVATIONS] < 0.7 * off.parts[ACTIVATIONS]
    assert on.parts["parameters"] == off.parts["parameters"]


def test_each_stage_shares_out_more() -> None:
    """Guards against shards that are not of this number of processes."""
    states = [plan_memory(subject(f"train.zero_stage={stage}")).parts[planned_machine.OPTIMIZER] for stage in range(4)]
    assert states[1:] == pytest.approx([states[0] / 2] * 3, rel=0.01)


def test_one_process_runs_stage_zero() -> None:
    assert subject("train.zero_stage=3", gpus=1).stage == 0


def test_optimizers_and_the_average_take_what_they_keep() -> None:
    """LAMB has temporaries beside AdamW's moments, Muon one moment for matrices instead of two, the average one more copy."""
    plain, lamb, muon, averaged = (
        plan_memory(subject(*more, gpus=1))
        for more in ((), ("optim.name=lamb",), ("optim.name=muon",), ("train.ema_decay=0.99",))
    )
    state = planned_machine.OPTIMIZER
    assert lamb.parts[state] == plain.parts[state] > muon.parts[state] > plain.parts[state] / 2
    assert averaged.parts["weight average"] == pytest.approx(plain.parts["parameters"], rel=0.01)


def test_an_evaluation_of_the_average_holds_both_weights() -> None:
    """Guards against a run that fits until its first evaluation, and against advice that has no cure for it."""
    batches = ["train.ema_decay=0.99", "eval.batch_size=1024"]
    plan = plan_memory(subject(*batches, gpus=1))
    assert plan.in_evaluation
    assert plan.parts[SWAPPED] == plan.parts["weight average"] > 0
    assert plan.parts["gradients"] == pytest.approx(plan.parts["parameters"], rel=0.01)  # one tensor without ZeRO, which stays
    tight = subject(*batches, gpus=1, gpu=gpu_of(plan.total - 1))
    (change,) = (change for change in changes(tight, plan_memory(tight)) if change.overrides == "eval.batch_size=16")
    assert change.memory.fits and not change.memory.in_evaluation


def test_a_teacher_is_in_memory_beside_its_student(tmp_path: Path) -> None:
    """Guards against a teacher that costs nothing, and against silence about one that is not at hand."""
    file = tmp_path / "teacher.safetensors"
    names = [f"class {number}" for number in range(1000)]
    network = create_model("deit_t", 1000, 64)
    about = Description("deit_t", 1000, 64, {}, names, [0.5] * 3, [0.5] * 3, 0.875, "fp32", 1, "model", "ours")
    write_exported(file, network.state_dict(), about)
    student, taught, lost = (
        plan_memory(subject(*more, gpus=1)) for more in ((), (f"train.teacher={file}",), ("train.teacher=nowhere",))
    )
    operators = [traced_step(subject(*more, gpus=1)).teacher for more in ((), (f"train.teacher={file}",))]
    assert not operators[0] and {operator.backward for operator in operators[1]} == {False}
    weights = 4 * sum(parameter.numel() for parameter in network.parameters())
    assert weights < taught.parts[TEACHER] < 1.25 * weights
    assert taught.total - student.total >= weights
    assert lost.parts == student.parts
    assert "the teacher is not in the figures: nowhere does not exist" in "".join(lost.remarks)


def test_the_largest_micro_batch_fits_and_the_next_does_not() -> None:
    """96 images on 2 processes in groups of 8: 8, 16, 24 and 48 can be had."""
    for kept in (16, 24):
        limit = plan_memory(subject(), kept).total
        assert largest_micro_batch(subject(gpu=gpu_of(limit))) == kept
    assert largest_micro_batch(subject(gpu=gpu_of(2**20))) == 0
    assert subject("train.micro_batch_size=24").accumulation == 2


def test_a_size_that_cannot_be_had_is_refused() -> None:
    with pytest.raises(UserError, match=r"must be a multiple of train\.micro_batch_size 40 x 2 processes = 80, got"):
        plan_memory(subject(), 40)
    with pytest.raises(UserError, match=r"must be a multiple of 56 for 7 processes in groups of 8 images"):
        largest_micro_batch(subject(gpus=7))


def test_advice_is_a_plan_of_its_own() -> None:
    """Guards against savings by rule of thumb: what is said of a change is what planning with it says."""
    tight = subject(gpu=gpu_of(plan_memory(subject()).total - 1))
    plan = plan_memory(tight)
    assert not plan.fits
    found = {change.overrides: change for change in changes(tight, plan)}
    change = found["train.activation_checkpointing=true"]
    after = plan_memory(subject("train.activation_checkpointing=true"))
    assert change.saving == plan.total - after.total > 0
    assert change.memory.fits
    assert "train.micro_batch_size=8" in found


def test_its_settings_are_those_of_the_engine() -> None:
    settings = deepspeed_config(load_config("pervit_t", SMALL), 2)["zero_optimization"]
    assert settings["reduce_bucket_size"] == planned_machine.REDUCE_BUCKET
    assert settings["overlap_comm"]  # two buffers


@pytest.fixture(scope="module")
def no_fit() -> Memory:
    return plan_memory(subject(gpu=gpu_of(2**20)))


def test_what_is_missing_is_negative(no_fit: Memory) -> None:
    assert no_fit.left == 2**20 - sum(no_fit.parts.values()) < 0


def test_a_graph_keeps_its_memory_in_an_evaluation() -> None:
    """Guards against a micro-batch that fits until the first evaluation: a step that is a graph gives its activations to nobody."""
    one_pass = ("train.micro_batch_size=16", "train.global_batch_size=16")
    graphs, blocks = (subject(*one_pass, f"train.compile={kind}", gpus=1) for kind in ("graphs", "blocks"))
    evaluated = traced_evaluation(graphs).parts[ACTIVATIONS]
    plan = plan_memory(graphs)
    assert plan.in_evaluation and plan.parts[ACTIVATIONS] == plan_memory(blocks).parts[ACTIVATIONS] + evaluated
