"""``python -m benchmarks.claims``: one variant for a few steps, and what its table says of given figures."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.claims import CLAIMS, TENTH, VARIANTS, last_evaluation, spread, table, verdict
from pipeline.checkpoint.folder import latest_step
from pipeline.errors import PREEMPTED
from pipeline.models import create_model
from support.launching import PATIENCE, REPOSITORY, clean_environment, run_module


def claims(images: Path, folder: Path, epochs: float, variant: str) -> list[object]:
    """The command for one run of one variant."""
    return ["benchmarks.claims", "--source", images, "--folder", folder, "--epochs", epochs, "--seeds", 1, "--only", variant]


def test_a_run_that_is_complete_is_not_repeated(digits_images: Path, tmp_path: Path) -> None:
    """Guards against a variant that no longer trains, and against a second start that begins again or loses what was there."""
    command = claims(digits_images, tmp_path, epochs=0.1, variant="no_phi_p")
    first = run_module(*command)
    assert "| without Φp |" in first.stdout and "a new run" in first.stderr
    metrics = (tmp_path / "no_phi_p_0" / "metrics.jsonl").read_text()
    again = run_module(*command)
    assert again.stdout == first.stdout and "a new run" not in again.stderr
    assert (tmp_path / "no_phi_p_0" / "metrics.jsonl").read_text() == metrics


def test_a_stop_reaches_the_runs(digits_images: Path, tmp_path: Path) -> None:
    """Guards against runs that go on alone, and against one that is lost: the same command resumes from a checkpoint."""
    command = claims(digits_images, tmp_path, epochs=60, variant="no_cpe")
    process = subprocess.Popen(
        [sys.executable, "-m", *map(str, command)], cwd=REPOSITORY, env=clean_environment(), stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + PATIENCE
    metrics = tmp_path / "no_cpe_0" / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_text()):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    process.terminate()
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == PREEMPTED, errors
    assert latest_step(tmp_path / "no_cpe_0") and "Traceback" not in errors


def test_a_run_without_its_last_evaluation_is_not_complete(tmp_path: Path) -> None:
    """Guards against figures from the middle of a run."""
    assert last_evaluation(tmp_path) is None
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "top1": 10.0}\n{"step": 2, "loss": 2.0}\n')
    assert last_evaluation(tmp_path) is None


def test_all_variants_are_models() -> None:
    """Guards against a switch that the model does not have, and against claims and parts that fit no variant."""
    for variant in VARIANTS.values():
        switches = dict(each.split("=") for each in variant.switches)
        given = {name: {"false": False}.get(value, value) for name, value in switches.items()}
        create_model("pervit_t", num_classes=10, image_size=64, switches={"widths": list(variant.widths), **given})
        assert variant.part in (1, TENTH)
    assert all({claim.better, claim.worse} <= VARIANTS.keys() and claim.points > 0 for claim in CLAIMS)


@pytest.mark.parametrize(
    ("better", "worse", "words"),
    [
        ([60.0, 61.0], [58.0, 58.5], "as in the paper"),
        ([58.0, 58.5], [60.0, 61.0], "the other way"),
        ([60.0, 62.0], [59.0, 60.0], "does not show: within the spread"),
        ([60.0], [50.0], "one seed: nothing can be said"),
    ],
)
def test_the_verdict(better: list[float], worse: list[float], words: str) -> None:
    """Guards against a direction that is claimed although two seeds of one variant differ as much."""
    assert verdict(better, worse) == words
    assert words in table({"pervit": better, "no_cpe": worse})


def test_the_spread_is_between_seeds() -> None:
    """Guards against a spread between variants, which would hide every difference."""
    assert spread([60.0, 61.0], [10.0, 10.5]) == 1.0
