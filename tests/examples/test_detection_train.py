"""Detectors that are trained, killed, resumed and evaluated. Needs torchvision beside the PyTorch build it was made for."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
import torch

from pipeline.checkpoint.folder import latest_step, step_folder
from pipeline.checkpoint.manifest import CheckpointManifest
from support.detection import needs_torchvision, write_config
from support.detection_set import overrides, write_digit_set
from support.launching import REPOSITORY
from support.ranks import Job, run_forked

PROGRAM = "support.narrow_detector"
CLOCK = {"time", "images_per_second", "data_wait", "data_wait_rank", "data_wait_host", "memory_gib", "peak_memory_gib", "mfu"}


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """12 images to train on, 4 to evaluate."""
    needs_torchvision()
    return write_digit_set(tmp_path_factory.mktemp("digits") / "set", train=12, val=4, side=64)


def train(config: Path, data: Path, *more: str, processes: int = 1, check: bool = True) -> subprocess.CompletedProcess:
    return run_forked(PROGRAM, "--config", config, *overrides(data), *more, processes=processes, check=check)


def start(config: Path, data: Path, *more: str) -> Job:
    return Job(1, "--config", config, *overrides(data), *more, module=PROGRAM)


def rows(run: Path) -> list[dict]:
    """The rows of metrics.jsonl, without what a clock or the memory says."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    return [{key: row[key] for key in row if key not in CLOCK and not key.startswith("slowest_")} for row in found]


@pytest.mark.parametrize("detector", ["retinanet", "mask_rcnn"])
def test_a_killed_run_goes_on_exactly(few: Path, tmp_path: Path, detector: str) -> None:
    """Guards against a resumed run with other images, flips, anchors, moments or statistics than one that was not killed."""
    sizes = {"global_batch_size": 2, "micro_batch_size": 1} if detector == "mask_rcnn" else {}  # whose heads take seconds
    config = write_config(tmp_path, model={"detector": detector}, train=sizes)
    train(config, few, f"output_dir={tmp_path / 'whole'}")
    killed = tmp_path / "killed"
    job = start(config, few, f"output_dir={killed}")
    assert job.until((killed / "checkpoints" / "step-00000002").exists), job.outputs()
    job.kill()
    assert job.wait() == [-signal.SIGKILL]
    resumed_from = latest_step(killed)
    said = train(config, few, f"output_dir={killed}").stdout
    assert f"steps {resumed_from} to 6" in said
    assert rows(killed) == rows(tmp_path / "whole")
    manifests = [CheckpointManifest.read(step_folder(run, 6)) for run in (killed, tmp_path / "whole")]
    assert manifests[0].files == manifests[1].files  # their checksums
    evaluation = rows(killed)[-1]
    assert {"AP", "AP50"} <= evaluation.keys() and ("mask_AP50" in evaluation) == (detector == "mask_rcnn")
    if detector == "retinanet":
        assert "is complete at step 6: nothing to train" in train(config, few, f"output_dir={killed}").stdout


def test_two_processes_train_as_one(few: Path, tmp_path: Path) -> None:
    """Guards against gradients that are not averaged, and draws that depend on the rank. Micro-batches are the same two images."""
    config = write_config(tmp_path, train={"max_steps": 2})
    for processes in (1, 2):
        train(config, few, f"output_dir={tmp_path / str(processes)}", processes=processes)
    one, two = (rows(tmp_path / name) for name in "12")
    assert len(one) == len(two) == 3
    for mine, theirs in zip(one[:2], two[:2]):
        assert mine == pytest.approx(theirs, rel=1e-4)


def test_a_signal_saves_and_the_command_goes_on(few: Path, tmp_path: Path) -> None:
    """Guards against a job at its time limit that loses the steps since its last checkpoint."""
    config = write_config(tmp_path, train={"max_steps": 400}, checkpoint={"every_steps": None})
    job, metrics = start(config, few), tmp_path / "run" / "metrics.jsonl"
    assert job.until(lambda: metrics.exists() and metrics.read_text()), job.outputs()
    job.signal(signal.SIGUSR1)
    assert job.wait() == [75] and "stopped by a signal at step" in job.stdout()
    stopped = rows(tmp_path / "run")[-1]["step"]
    assert latest_step(tmp_path / "run") == stopped
    said = train(config, few, f"train.max_steps={stopped + 1}").stdout
    assert f"steps {stopped} to {stopped + 1}" in said


def test_an_image_that_cannot_be_read_ends_the_run_with_its_name(few: Path, tmp_path: Path) -> None:
    """Guards against a traceback of a decoder's thread."""
    data = Path(shutil.copytree(few, tmp_path / "set"))
    (data / "train" / "000005.jpg").write_bytes(b"nothing")
    failed = train(write_config(tmp_path), data, check=False)
    assert failed.returncode == 2
    assert "000005.jpg cannot be decoded" in failed.stderr and "Traceback" not in failed.stderr


def test_the_parameters_of_table_8() -> None:
    """PosMLP's Table 8. Guards against a pyramid or heads of another size; the differences are named in the example's README."""
    needs_torchvision()
    from examples.detection.config import DetectionConfig
    from examples.detection.model import build_detector
    from pipeline.config import load_config_as

    counted = {}
    for path in sorted((REPOSITORY / "examples" / "detection" / "configs").glob("*_posmlp_?.yaml")):
        with torch.device("meta"):
            detector, _ = build_detector(load_config_as(DetectionConfig, path), categories=80, fresh=False)
        counted[path.stem] = sum(parameter.numel() for parameter in detector.parameters())
    paper = {"retinanet_posmlp_t": 31.1, "retinanet_posmlp_s": 47.3, "mask_rcnn_posmlp_t": 40.5, "mask_rcnn_posmlp_s": 56.1}
    for name, millions in paper.items():
        assert counted[name] / 1e6 == pytest.approx(millions, abs=0.14), name
        assert (
            f"| {counted[name] / 1e6:.2f} | {millions} |" in (REPOSITORY / "examples" / "detection" / "README.md").read_text()
        )


def test_average_precision_of_known_detections(few: Path) -> None:
    """Guards against boxes as corners where COCO's have a width, category ids that are labels, and masks with rows for columns."""
    from examples.detection.loop import score

    truth = json.loads((few / "val.json").read_text())
    found = [{**each, "score": 0.9} for each in truth["annotations"]]
    for kind in ("bbox", "segm"):
        copies = [{key: each[key] for key in ("image_id", "category_id", "bbox", "score")} for each in found]
        if kind == "segm":
            from pycocotools import mask

            for copy, each in zip(copies, found):
                height, width = each["segmentation"]["size"]
                encoded = mask.frPyObjects(each["segmentation"], height, width)
                copy["segmentation"] = {"size": encoded["size"], "counts": encoded["counts"].decode()}
        assert score(few / "val.json", copies, kind)["AP"] == pytest.approx(100)
    elsewhere = [{**each, "bbox": [each["bbox"][0] + 1000.0, *each["bbox"][1:]]} for each in copies]
    assert score(few / "val.json", elsewhere, "bbox")["AP"] == 0
    assert score(few / "val.json", [], "bbox")["AP50"] == 0


NARROW_MASKS = {"detector": "mask_rcnn", "pyramid_width": 32, "box_samples": 32}


@pytest.mark.detection
@pytest.mark.skipif(not os.environ.get("PERVIT_DETECTION"), reason="takes minutes: set PERVIT_DETECTION=1")
@pytest.mark.parametrize(
    ("model", "epochs", "batch", "decay_epochs", "scores"),
    [({"pyramid_width": 64}, 10, 8, [7, 9], ["AP50"]), (NARROW_MASKS, 6, 4, [5], ["AP50", "mask_AP50"])],
    ids=["retinanet", "mask_rcnn"],
)
def test_it_learns(tmp_path: Path, model: dict, epochs: int, batch: int, decay_epochs: list[int], scores: list[str]) -> None:
    """To detect digits, and to outline them, on a narrow PosMLP, from scratch: 400 and 480 steps. Guards against all that a loss
    which falls does not show, and masks that are flipped, shifted or swapped."""
    needs_torchvision()
    data = write_digit_set(tmp_path / "set", train=320, val=48, side=64, digits=(0, 1))
    config = write_config(
        tmp_path,
        model={"drop_path": 0.0, **model},
        data={"flip": 0.0},
        train={"epochs": epochs, "global_batch_size": batch, "micro_batch_size": batch, "max_steps": None},
        optim={"warmup_steps": 20, "decay_epochs": decay_epochs},
        eval={"every_epochs": 2, "batch_size": 24},
        checkpoint={"every_steps": None},
    )
    train(config, data)
    evaluations = [row for row in rows(tmp_path / "run") if "AP" in row]
    print(*evaluations, sep="\n")
    assert all(evaluations[-1][name] > 50 for name in scores)
