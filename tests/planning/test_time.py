"""Time of a planned run, against a run that was trained and against arithmetic."""

from __future__ import annotations

import importlib
import json
import math
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline import plan
from pipeline.checkpoint.folder import read_manifests
from pipeline.config import Config, config_to_yaml, load_config
from pipeline.errors import UserError
from pipeline.hardware import GPUS, gpu_of_driver
from pipeline.planning import page
from pipeline.planning.length import HEADER_ENTRY, RECIPE_SECONDS, count_images, known_loader, measure_loader
from pipeline.planning.measured import Measured, difference, read_measured
from pipeline.planning.memory import Subject, plan_memory, traced_step
from pipeline.planning.rates import GpuRates
from pipeline.planning.time import LAUNCHES, NETWORKED, OPTIMIZER, RECOMPUTED, WAITING, Time
from pipeline.planning.trace import CONVOLUTION, KINDS, NARROW
from support.ranks import run_forked
from support.runs import step_rows, write_small_config

GPU = GPUS["a100-80g"]
STEPS = 12


def subject(*overrides: str, nodes: int = 1, gpus: int = 2) -> Subject:
    small = ["model.name=deit_t", "model.image_size=64", "train.micro_batch_size=128", "train.global_batch_size=1024"]
    return Subject(load_config("configs/pervit_t.yaml", [*small, *overrides]), nodes, gpus, GPU)


def planned(run: Subject, **more: Any) -> Time:
    return Time(run, GpuRates(GPU), count_images(run.config, None), **more)


def earlier(run: Subject, step_seconds: float, **facts: object) -> Measured:
    layout = {"world_size": run.world_size, "nodes": run.nodes, "stage": run.stage, "device": "NVIDIA A100-SXM4-80GB"}
    return Measured(
        **{
            "source": "runs/x",
            "config": run.config,
            "step_seconds": step_seconds,
            "steps": 100,
            "data_wait": 0.0,
            **layout,
            **facts,
        }
    )  # type: ignore[arg-type]


def test_a_step_has_its_parts() -> None:
    """Guards against a step without recomputation, accumulation, or optimizer."""
    one, four, again = (
        planned(subject(*overrides))
        for overrides in (["train.global_batch_size=256"], [], ["train.activation_checkpointing=true"])
    )
    for kind in {*KINDS} - {CONVOLUTION, NARROW}:
        assert four.parts[kind] == pytest.approx(4 * one.parts[kind])
    assert four.parts[OPTIMIZER] == one.parts[OPTIMIZER]
    assert (
        RECOMPUTED not in four.parts
        and again.parts[RECOMPUTED] > 0.2 * sum(again.parts[kind] for kind in KINDS if kind in again.parts) / 2
    )
    assert again.step.flops == four.step.flops, "model FLOPs have no recomputation"
    assert four.images_per_second == pytest.approx(1024 / sum(four.parts.values()))
    assert NETWORKED not in planned(subject(gpus=1)).parts


def test_stage_3_has_all_parameters() -> None:
    """Guards against a traceback, or a step without traffic and optimizer, where ZeRO leaves none of the parameters in place."""
    one, three = (planned(subject(f"train.zero_stage={stage}", "train.compile=off")) for stage in (1, 3))
    assert three.step.traffic.bytes > one.step.traffic.bytes and three.parts[OPTIMIZER] == one.parts[OPTIMIZER]
    assert three.run and one.run and three.run.checkpoints == one.run.checkpoints


def test_only_zero_has_deepspeeds_engine() -> None:
    """Guards against a plan without ZeRO whose CPU waits for DeepSpeed, and against one with ZeRO whose CPU does not."""
    without, one = (planned(subject(f"train.zero_stage={stage}", "train.micro_batch_size=8")) for stage in (0, 1))
    engine = one.subject.accumulation * traced_step(one.subject).tensors * 40e-6
    assert one.parts[LAUNCHES] - without.parts.get(LAUNCHES, 0.0) == pytest.approx(engine, rel=0.2)


def test_hours_and_what_they_cost() -> None:
    """Guards against hours without evaluations or starts, and against a price for each node."""
    time = planned(subject("train.epochs=30"), time_limit=3600.0, price=2.0)
    whole = time.run
    assert whole and whole.jobs
    training = whole.length.steps * time.step_seconds + 30 * whole.evaluation_seconds
    assert 3600 * whole.hours - whole.jobs * time.start_seconds == pytest.approx(training, rel=1e-3)
    assert whole.gpu_hours == 2 * whole.hours and whole.cost == 2.0 * whole.gpu_hours
    twice = planned(subject("train.epochs=30", "train.ema_decay=0.999")).run
    assert twice and twice.evaluation_seconds == 2 * whole.evaluation_seconds
    assert "at 2 per GPU hour" in words(time) and "ImageNet-1k" in words(time)
    unknown = Time(subject("model.num_classes=17"), GpuRates(GPU), None)
    assert unknown.run is None and unknown.step_seconds > 0


def test_the_slower_of_computing_and_loading_counts() -> None:
    """Guards against hours that leave out the CPU, and against a loader with the cores of all nodes or of each process."""
    run = subject("train.epochs=30", nodes=2, gpus=4)
    free = planned(run)
    assert free.run and free.cores is None and page.figures(run, plan_memory(run), free)["bound_by"] == "compute"
    need = known_loader(run.config)
    assert need and need.cpu_seconds == RECIPE_SECONDS and known_loader(subject("model.num_classes=10").config) is None
    unknown = planned(run, loader=need)
    assert unknown.run and unknown.run.hours == free.run.hours and unknown.cores
    assert unknown.cores == pytest.approx(4 + free.images_per_second / 2 * need.cpu_seconds)
    assert f"which needs {math.ceil(unknown.cores):,} CPU cores per node: --cpus N says" in words(unknown)
    enough = planned(run, loader=need, cpus=math.ceil(unknown.cores))
    assert enough.step_seconds == free.step_seconds and WAITING not in enough.parts and "are enough" in words(enough)
    few = planned(run, loader=need, cpus=12, price=1.0)
    assert few.loader_rate == pytest.approx(2 * 8 / need.cpu_seconds) == few.images_per_second
    assert few.run and few.run.evaluation_seconds == pytest.approx(50_000 / few.loader_rate)
    assert few.step_seconds == pytest.approx(1024 / few.loader_rate) and few.parts[WAITING] > 0
    assert few.run.cost == few.run.gpu_hours > 8 * free.run.hours and "the loader: 12 CPU cores per node load" in words(few)
    figures = page.figures(run, plan_memory(run), few)
    assert figures["bound_by"] == "loader" and figures["images_per_second"] == few.loader_rate
    assert figures["loader"] == {"images_per_second": few.loader_rate, "cpu_cores": 12, "cpu_cores_needed": unknown.cores}
    on_gpu = planned(subject("data.decode=gpu", nodes=2, gpus=4), loader=need, cpus=12)
    assert on_gpu.step_seconds == free.step_seconds and "fewer as the GPU decodes" in words(on_gpu)


def words(time: Time) -> str:
    return "\n".join(value for rows in page.time_sections(time).values() for _, value in rows)


def test_a_measured_run_replaces_the_model() -> None:
    """Guards against an earlier run that is ignored, or that counts for another number of processes as it is."""
    run = subject()
    model = planned(run)
    same = planned(run, measured=earlier(run, 3 * model.step_seconds, evaluation_seconds=7.0, start_seconds=11.0))
    assert same.step_seconds == pytest.approx(3 * model.step_seconds)
    assert same.run and same.run.evaluation_seconds == 7.0 and same.start_seconds == 11.0
    assert "3.00 times what the rates give" in words(same)
    wider = subject(gpus=8)
    assert planned(wider, measured=earlier(run, 3 * model.step_seconds)).step_seconds == pytest.approx(
        3 * planned(wider).step_seconds
    )


def test_a_run_of_something_else_measures_nothing() -> None:
    """Guards against the pace of another model, precision or GPU."""
    run = subject()
    good = earlier(run, 1.0)
    assert difference(good, run) is None
    other = replace(good, config=subject("model.image_size=32").config)
    assert difference(other, run) == "its model.image_size is 32, not 64"
    single = replace(good, config=subject("train.precision=fp32").config)
    assert difference(single, run) == "its train.precision is fp32, not bf16"
    assert difference(replace(good, device="cpu"), run) == "it ran on cpu, and the plan is for a100-80g"
    assert difference(good, replace(run, gpu=None)) == "it ran on NVIDIA A100-SXM4-80GB, and the plan is for CPUs"
    names = {
        "NVIDIA H100 80GB HBM3": "h100",
        "NVIDIA H100 PCIe": "h100pcie",
        "NVIDIA A100-SXM4-80GB": "a100",
        "Tesla V100-SXM2-32GB": "v100",
        "NVIDIA GeForce RTX 4090": "rtx4090",
        "NVIDIA GeForce RTX 4090 Laptop GPU": None,
        "x86_64": None,
    }
    assert {name: gpu.chip if (gpu := gpu_of_driver(name)) else None for name in names} == names


def test_optimizers_differ() -> None:
    """Guards against one formula for all: Muon multiplies matrices and keeps one moment of each."""
    adamw, lamb, muon = (subject(f"optim.name={name}") for name in ("adamw", "lamb", "muon"))
    seconds = [planned(each).parts[OPTIMIZER] for each in (adamw, lamb, muon)]
    assert seconds[0] < seconds[1] < seconds[2]
    step = traced_step(adamw)
    sizes = [whole.checkpoints.size for run in (adamw, muon) if (whole := planned(run).run)]
    assert sizes[1] < sizes[0] == pytest.approx(12 * step.elements + 3 * HEADER_ENTRY * step.tensors, rel=1e-3)


def test_the_loader_is_measured_on_the_shards(digits_shards: Path, tmp_path: Path) -> None:
    """Guards against a loader's need that is not of these images."""
    config = load_config(write_small_config(digits_shards, tmp_path), [])
    need = measure_loader(config, digits_shards, threads=1, seconds=0.0)
    assert need.source.startswith("measured here on ") and 0 < need.cpu_seconds < 1
    manifest = json.loads((digits_shards / "manifest.json").read_text())
    stored = sum(shard["bytes"] for shard in manifest["splits"]["train"]["shards"]) / manifest["splits"]["train"]["samples"]
    assert 0 < need.bytes < stored, "a tar has more than the images"
    with pytest.raises(UserError, match="does not exist"):
        measure_loader(config, tmp_path / "none")


def trained(digits_shards: Path, tmp_path: Path) -> tuple[Config, Path]:
    """A run of a few steps with a checkpoint."""
    small = ["model.switches.widths=[16, 16, 16, 16]", f"train.max_steps={STEPS}", "log.every_steps=2", "train.ema_decay=0.99"]
    config = load_config(write_small_config(digits_shards, tmp_path), small)
    path = tmp_path / "all.yaml"
    path.write_text(config_to_yaml(config))
    run_forked("pipeline.train", "--config", path)
    return config, Path(config.output_dir)


def test_against_a_run_that_was_trained(digits_shards: Path, tmp_path: Path) -> None:
    """Guards against a plan that real files contradict: the size of a checkpoint, the steps, and the pace that the log shows."""
    config, folder = trained(digits_shards, tmp_path)
    measured = read_measured(folder)
    rates = [row["images_per_second"] for row in step_rows(folder) if row["step"] > 2]
    assert measured.step_seconds == pytest.approx(16 / statistics.median(rates))
    assert (measured.world_size, measured.stage, measured.steps) == (1, 0, STEPS - 2) and gpu_of_driver(measured.device) is None
    assert measured.start_seconds and measured.start_seconds > 0
    run = Subject(config, 1, 1, None)
    time = planned(run, measured=measured)  # whose ratio makes up for any rates
    assert time.step_seconds == pytest.approx(
        measured.step_seconds, rel=0.01
    )  # a model's tables are computed in its first pass alone
    assert time.run and time.run.length.steps == STEPS and time.run.length.evaluations == 1
    (manifest,) = read_manifests(folder).values()
    assert not isinstance(manifest, UserError)
    assert time.run.checkpoints.size == pytest.approx(sum(file.bytes for file in manifest.files), rel=0.05)

    said, passed_over = plan.earlier_run(None, run)
    assert said and said.source == str(folder) and passed_over is None
    on_gpu = replace(run, gpu=GPU)
    assert plan.earlier_run(None, on_gpu)[0] is None
    with pytest.raises(
        UserError, match=f"--measured must be a run like this plan, got {folder}: it ran on .*, and the plan is for a100-80g"
    ):
        plan.earlier_run(folder, on_gpu)
    with pytest.raises(UserError, match="does not exist"):
        plan.earlier_run(tmp_path / "none", run)
    (folder / "metrics.jsonl").write_text("")
    with pytest.raises(UserError, match="must have at least 5 training steps, got 0"):
        plan.earlier_run(folder, run)
    assert "5 training steps, got 0" in (plan.earlier_run(None, run)[1] or "")


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["--time-limit", "soon"], "--time-limit must be a time in Slurm's form, got 'soon': write it as sbatch takes it"),
        (["--price", "-1"], "--price must be at least 0, got -1"),
        (["--network", "0"], "--network must be positive, in GB/s, got 0"),
        (["--measured", "nowhere"], "nowhere does not exist"),
        (["--cpus", "0"], "--cpus must be at least 1, got 0"),
        (["--gpu-record", "nowhere"], "--gpu-record must be a record of make gpu-check, got nowhere (FileNotFoundError"),
        (["--gpu-record", "a", "--measured", "b"], "--gpu-record cannot stand beside --measured b, got a: remove one of them"),
        (["--data", "nowhere"], "--data must be a shard set, got nowhere, which is not a directory: pass"),
    ],
)
def test_bad_arguments_are_one_sentence(arguments: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against tracebacks, and against seconds of planning before the sentence."""
    monkeypatch.setattr("sys.argv", ["pipeline.plan", "--config", "deit_t", "--gpus-per-node", "8", *arguments])
    importlib.import_module("pipeline.planning.page")  # imported later, it would keep what is put in place here
    monkeypatch.setattr("pipeline.planning.memory.plan_memory", lambda *given: pytest.fail("planned before it looked"))
    with pytest.raises(UserError) as error:
        plan.main()
    assert str(error.value).startswith(sentence) and str(error.value).count("\n") == 0
