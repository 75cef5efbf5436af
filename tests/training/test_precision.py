"""``train.precision=auto``: bf16 where all devices have instructions for it, fp32 elsewhere; a run keeps what it began with."""

from __future__ import annotations

import secrets
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from pipeline.config import load_config
from pipeline.hardware import native_bf16, peak_flops
from support.launching import REPOSITORY, clean_environment, run_module
from support.precisions import BF16_BATCH, EMULATED
from support.ranks import free_port, run_forked
from support.runs import step_rows

CPU = torch.device("cpu")
NATIVE, WHY = native_bf16(CPU)
CHOICE = """
from pipeline.cluster.rendezvous import disconnect, init_world
from pipeline.step.precision import choose_precision
world = init_world()
for asked in ("auto", "bf16"):
    choice = choose_precision(asked, None, world)
    print(f"{choice}\\n{choice.warning}", flush=True)
disconnect()
"""
needs_both_kinds = pytest.mark.skipif(
    not NATIVE, reason=f"needs a CPU with bf16 instructions, which can also do without: {WHY}"
)


def choices(*environments: dict[str, str]) -> list[list[str]]:
    """What ranks that see such CPUs choose together: of each the lines of ``CHOICE``, two for auto and two for bf16."""
    size = len(environments)
    common = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    common["PERVIT_JOB_SECRET"] = secrets.token_hex(32)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", CHOICE],
            cwd=REPOSITORY,
            env=clean_environment(**common, RANK=str(rank), LOCAL_RANK=str(rank), **environment),
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, environment in enumerate(environments)
    ]
    return [rank.communicate()[0].splitlines() for rank in ranks]


def test_without_instructions_it_is_fp32() -> None:
    """Guards against the default that trains 11 to 17 times too slowly on an ordinary CPU, and against its silence when asked for."""
    ((chosen, warning, asked_for, warning_then),) = choices(EMULATED)
    assert chosen.startswith("precision fp32: train.precision=auto, this CPU ") and warning == "None"
    assert asked_for == "precision bf16: train.precision asks for it"
    assert "emulated" in warning_then and "11 to 17 times" in warning_then


@needs_both_kinds
def test_with_instructions_it_is_bf16() -> None:
    ((chosen, warning, *_),) = choices({})
    assert chosen.startswith("precision bf16: train.precision=auto, this CPU has A") and warning == "None"


@needs_both_kinds
def test_one_rank_without_instructions_decides_for_all() -> None:
    """Guards against ranks that compute in different formats."""
    first, second = (each[:2] for each in choices({}, EMULATED))
    assert first == second and first[0].startswith("precision fp32: train.precision=auto, rank 1 of 2: this CPU has ")


@pytest.mark.long
@needs_both_kinds
@pytest.mark.parametrize("began_with", ["bf16", "fp32"])
def test_a_resumed_run_keeps_its_precision(began_with: str, small_run: Path) -> None:
    """Guards against a run that goes on in another format because it went on on another kind of CPU."""
    run, kinds = small_run.parent / "run", {"bf16": {}, "fp32": EMULATED}
    other = "fp32" if began_with == "bf16" else "bf16"
    config = yaml.safe_load(small_run.read_text())
    del config["train"]["precision"]
    config["train"].update(global_batch_size=BF16_BATCH, micro_batch_size=BF16_BATCH)
    small_run.write_text(yaml.safe_dump(config))

    def train(steps: int, kind: str) -> str:
        options = [f"train.max_steps={steps}", "log.every_steps=1"]
        start = run_module if kind == "fp32" else run_forked  # a forked process has the CPU that the first one saw
        result = start("pipeline.train", "--config", small_run, *options, **kinds[kind])
        return result.stdout + result.stderr

    first = train(1, began_with)
    assert f"precision {began_with}: train.precision=auto, this CPU " in first
    assert (run / "config.yaml").read_text().startswith(f"# precision {began_with}: train.precision=auto, this CPU ")
    assert load_config(run / "config.yaml").train.precision == began_with
    second = train(2, other)
    assert f"precision {began_with}: the run was started with it; a new one would take {other} here (this CPU " in second
    assert ("11 to 17 times" in second) == (began_with == "bf16")
    rows = step_rows(run)
    assert [row["step"] for row in rows] == [1, 2]


def test_the_peak_of_emulated_bf16_is_that_of_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a utilisation of 363 %: of a peak that is measured in emulation."""
    measured: list[torch.dtype] = []
    monkeypatch.setattr("pipeline.hardware._measured_peak", lambda device, dtype: measured.append(dtype) or 1.0)
    monkeypatch.setattr("pipeline.hardware.native_bf16", lambda device: (False, "none"))
    assert peak_flops(CPU, "bf16") == (1.0, "measured")
    monkeypatch.setattr("pipeline.hardware.native_bf16", lambda device: (True, "some"))
    peak_flops(CPU, "bf16")
    assert measured == [torch.float32, torch.bfloat16]
