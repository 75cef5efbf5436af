"""The engine: what a step waits for, which stage runs, clipping, the groups' timeouts, and weights that are cast once."""

from __future__ import annotations

import functools
import json
import tempfile
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from optim.engine_program import STEPS, Small
from pipeline.checkpoint.weights import read_weights
from pipeline.config import config_from_dict
from pipeline.optim.build import build_optimizer
from pipeline.optim.engine import micro_batches, wait_for_the_reduction_only, zero_stage
from support.launching import REPOSITORY, run_module
from support.ranks import run_forked
from support.small_run import SMALL_MODEL


@functools.cache
def results(processes: int) -> dict[str, dict]:
    """What ``engine_program`` saw at every stage."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "results.json"
        run_forked("optim.engine_program", file, *"0123", processes=processes)
        return json.loads(file.read_text())


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.multiprocess)])
def test_no_step_waits_for_the_device(processes: int) -> None:
    """Guards against DeepSpeed's throughput timer, which waits in every forward pass and step for all streams, the loader's too."""
    found = results(processes)
    assert all(found[stage]["waits"] == [] for stage in "0123")
    assert processes == 1 or found["with the timer"]["waits"].count("deepspeed") > STEPS  # else this test counts nothing


@pytest.mark.multiprocess
def test_groups_of_the_engine_have_the_runs_timeout() -> None:
    """Guards against a clone of the world's group with the backend's default: 10 minutes with NCCL, and then SIGABRT."""
    for stage in "0123":
        found = results(2)[stage]
        assert found["all groups"] == found["groups with our timeout"] > 0, found
    assert sum(found["own groups"] for found in results(2).values()) >= 1  # DeepSpeed made one


def test_one_process_shards_nothing() -> None:
    """Guards against buckets, flat shards and a second copy of the weights where there is nobody to share with."""
    assert [results(1)[stage]["stage"] for stage in "0123"] == [0, 0, 0, 0]
    for stage in "123":
        config = config_from_dict({"train": {"zero_stage": int(stage)}}, source="x")
        assert (zero_stage(config, 1), zero_stage(config, 2)) == (0, int(stage))


def test_one_process_says_which_stage_it_takes(small_run: Path, tmp_path: Path) -> None:
    """Guards against a config that says one stage, a run that takes another, and a log and checkpoint that hide it."""
    options = (f"output_dir={tmp_path / 'run'}", SMALL_MODEL[0], "train.zero_stage=2", "train.max_steps=1")
    said = run_forked("pipeline.train", "--config", small_run, *options).stdout
    assert "engine, ZeRO stage 0 (train.zero_stage 2 has nothing to share out on one process)" in said
    state = read_weights(tmp_path / "run").state
    assert (state.zero_stage, state.config["train"]["zero_stage"]) == (0, 2)


@pytest.mark.multiprocess
def test_every_stage_clips_and_decays_like_pytorch() -> None:
    """Guards against clipping twice or not at all, a norm after it instead of before, and weights that stop decaying because a
    step does not use them."""
    model = Small()
    config = config_from_dict({"optim": {"weight_decay": 0.1}}, source="x")
    optimizer = build_optimizer(model, config.optim)
    generator, norms = torch.Generator().manual_seed(1), []
    for _ in range(STEPS):
        for _ in range(2):
            (model(torch.randn(4, 8, generator=generator)).square().mean() / 2).backward()
        model.unused.grad = torch.zeros_like(model.unused)
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
        for group in optimizer.param_groups:
            group["lr"] = 0.01
        optimizer.step()
        optimizer.zero_grad()
    assert min(norms) > 0.1  # it clips
    for processes in (1, 2):
        for stage in "0123":
            found = results(processes)[stage]
            assert found["norms"] == pytest.approx(norms, rel=1e-5), (processes, stage)
            for name, parameter in model.named_parameters():
                if weights := found["weights"][name]:
                    assert weights == pytest.approx(parameter.flatten().tolist(), rel=1e-4, abs=1e-6), (processes, stage, name)
            assert found["stage"] == 3 or found["weights"]["unused"][0] == pytest.approx((1 - 0.01 * 0.1) ** STEPS)


def test_after_the_last_bucket_the_current_stream_waits_and_not_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against the wait for the whole device that ``overlap_comm`` brings back."""
    from deepspeed.accelerator import get_accelerator

    accelerator, calls = get_accelerator(), []

    class Stream:
        def wait_stream(self, other: str) -> None:
            calls.append(f"waits for {other}")

    class Optimizer:
        reduction_stream = "the reduction"

        def independent_gradient_partition_epilogue(self) -> None:
            get_accelerator().synchronize()
            calls.append("goes on")

    monkeypatch.setattr(type(accelerator), "synchronize", lambda self, device_index=None: calls.append("waits for the device"))
    monkeypatch.setattr(type(accelerator), "current_stream", lambda self, device_index=None: Stream())
    optimizer = Optimizer()
    wait_for_the_reduction_only(optimizer)
    optimizer.independent_gradient_partition_epilogue()
    assert calls == ["waits for the reduction", "goes on"]
    accelerator.synchronize()
    assert calls[-1] == "waits for the device"  # elsewhere as before


@pytest.mark.gpu
@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.multiprocess)])
def test_on_gpus_no_step_waits_for_the_device_and_stages_agree(processes: int, tmp_path: Path) -> None:
    """Guards against gradients that are read before their reduction is complete, since only streams wait for each other."""
    if torch.cuda.device_count() < processes:
        pytest.skip(f"needs {processes} CUDA GPUs")
    gpus = {"CUDA_VISIBLE_DEVICES": "0,1"[: 2 * processes - 1], "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'tests'}"}
    run_module("optim.engine_program", tmp_path / "results.json", *"0123", processes=processes, **gpus)
    found = json.loads((tmp_path / "results.json").read_text())
    for stage in "0123":
        assert found[stage]["waits"] == []
        assert found[stage]["norms"] == pytest.approx(found["0"]["norms"], rel=1e-4)
        assert found[stage]["all groups"] == found[stage]["groups with our timeout"]
    assert processes == 1 or found["with the timer"]["waits"].count("deepspeed") > STEPS


class CountCasts(TorchDispatchMode):
    """Counts the tensors of two dimensions that are cast to bf16: weights, and activations of which there is one a pass."""

    def __init__(self) -> None:
        super().__init__()
        self.casts: Counter[tuple[int, ...]] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if function is torch.ops.aten._to_copy.default and (kwargs or {}).get("dtype") is torch.bfloat16:
            self.casts[tuple(args[0].shape)] += 1
        return function(*args, **(kwargs or {}))


class Accumulating:
    """The part of an engine that :func:`micro_batches` asks."""

    def __init__(self, stage: int) -> None:
        self.stage = stage

    def gradient_accumulation_steps(self) -> int:
        return 3

    def zero_optimization_stage(self) -> int:
        return self.stage


def accumulated(stage: int) -> tuple[Counter, list[torch.Tensor]]:
    """Casts and gradients of a step of three micro-batches, with checkpointing in one layer."""
    model = Small()
    images = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(1))
    with CountCasts() as count:
        for number in micro_batches(Accumulating(stage)):  # type: ignore[arg-type]
            with torch.autocast("cpu", torch.bfloat16):
                scores = torch.utils.checkpoint.checkpoint(model.layers[0], images[number], use_reentrant=False)
                loss = model.layers[2](model.layers[1](scores)).float().square().mean()
            loss.backward()
    return count.casts, [p.grad for p in model.parameters() if p.grad is not None]


def test_weights_are_cast_once_a_step_and_the_gradients_are_the_same() -> None:
    """Guards against a cast of every weight in every micro-batch, and against a cached copy that loses gradients."""
    (casts, gradients), (plain_casts, plain_gradients) = accumulated(0), accumulated(3)
    first, second = (16, 8), (4, 16)  # weights
    assert casts[first] == casts[second] == 1
    assert plain_casts[second] == 3 and plain_casts[first] == 6  # and as often again in the recomputation
    assert len(gradients) == 4 and all(map(torch.equal, gradients, plain_gradients))


def test_the_next_step_casts_the_new_weights() -> None:
    """Guards against a second step that computes with the weights of the first."""
    layer = nn.Linear(2, 2, bias=False)
    outputs = []
    for _ in range(2):
        for _ in micro_batches(Accumulating(1)):  # type: ignore[arg-type]
            with torch.autocast("cpu", torch.bfloat16):
                outputs.append(layer(torch.ones(1, 2)).sum().item())
        with torch.no_grad():
            layer.weight.mul_(2)
    assert outputs[3:] == [2 * value for value in outputs[:3]]
