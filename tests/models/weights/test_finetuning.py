"""Fine-tuning begins with trained weights, whatever the number of classes and the image size."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from pipeline.checkpoint.weights import read_weights
from pipeline.errors import UserError
from pipeline.models import create_model, load_pretrained
from pipeline.models.weights.transfer import resample_positions
from support.launching import run_script
from support.ranks import run_forked
from support.runs import step_rows


@pytest.mark.long
def test_other_classes_and_another_size_take_over_everything_but_the_head(
    small_run: Path, digits_images: Path, tmp_path: Path
) -> None:
    """Guards against a fine-tuning that silently starts from fresh weights, or that cannot change classes and size."""
    base = tmp_path / "run"
    run_forked("pipeline.train", "--config", small_run, "train.max_steps=2")
    three = tmp_path / "three"
    for split in ("train", "val"):
        for digit in "147":
            shutil.copytree(digits_images / split / digit, three / split / digit)
    run_script("data_prep/shard_imagenet.py", "--source", three, "--output", tmp_path / "shards3")

    tuned = tmp_path / "tuned"
    arguments = ["--config", small_run, f"train.init_from={base}", f"output_dir={tuned}", f"data.path={tmp_path / 'shards3'}"]
    fine = [
        *arguments,
        "model.num_classes=3",
        "model.image_size=48",
        "train.max_steps=1",
        "optim.warmup_lr=1e-12",
        "optim.lr=1e-9",
    ]
    result = run_forked("pipeline.train", *fine)
    assert "head.weight is initialized from scratch: (10, 280) there, (3, 280) here" in result.stdout
    before, after = read_weights(base).model, read_weights(tuned).model
    assert after["head.weight"].shape == (3, 280)
    for name, value in before.items():  # with a learning rate of nothing the rest is what was loaded
        if not name.startswith("head.") and "running" not in name and "num_batches" not in name:
            torch.testing.assert_close(after[name], value, atol=1e-6, rtol=0)
    assert len(step_rows(tuned)) == 1

    for wrong, sentence in (
        (f"train.init_from={tmp_path / 'nowhere'}", "does not exist: pass a run folder or a file"),
        (f"train.init_from={small_run}", "cannot be read"),
        ("model.name=pervit_s", "of another shape"),
    ):
        result = run_forked("pipeline.train", *fine, wrong, f"output_dir={tmp_path / 'refused'}", check=False)
        assert result.returncode == 2 and sentence in result.stderr and "Traceback" not in result.stderr


def test_weights_of_another_model_are_refused_with_both_sides_differences() -> None:
    """Guards against half-loaded weights: what is missing, what is unknown and what has another shape are all named."""
    model = create_model("pervit_t", num_classes=3, image_size=32)
    weights = model.state_dict()
    weights["blocks.0.norm1.wait"] = weights.pop("blocks.0.norm1.weight")
    weights["blocks.0.norm2.weight"] = torch.zeros(7)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(UserError) as error:
        load_pretrained(model, weights, source="x.pt")
    for part in (
        "1 missing (blocks.0.norm1.weight)",
        "1 unknown (blocks.0.norm1.wait)",
        "1 of another shape (blocks.0.norm2.weight (7,)",
    ):
        assert part in str(error.value)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_resampled_positions_keep_their_place() -> None:
    """Guards against a grid that is transposed or flattened the wrong way, and against a class token that is blended in."""
    rows, columns = torch.meshgrid(torch.linspace(-1, 1, 14), torch.linspace(-1, 1, 14), indexing="ij")
    grid = torch.stack([rows, columns], dim=-1).reshape(1, 196, 2)
    value = torch.cat([torch.full((1, 1, 2), 9.0), grid], dim=1)  # (1, 1 + 196, 2)
    same = resample_positions(value, value.shape, leading_tokens=1)
    torch.testing.assert_close(same, value)
    larger = resample_positions(value, torch.Size((1, 1 + 24 * 24, 2)), leading_tokens=1)
    assert (larger[0, 0] == 9).all()
    maps = larger[0, 1:].reshape(24, 24, 2)
    inner = maps[3:-3, 3:-3]
    assert (inner[..., 0].diff(dim=0) > 0).all() and (inner[..., 0].diff(dim=1).abs() < 1e-5).all()
    assert (inner[..., 1].diff(dim=1) > 0).all() and (inner[..., 1].diff(dim=0).abs() < 1e-5).all()


def test_a_student_learns_a_teachers_decisions(small_run: Path, tmp_path: Path) -> None:
    """Guards against a teacher that changes nothing, and against one of other classes that ends in a traceback."""
    teacher = tmp_path / "run"
    run_forked("pipeline.train", "--config", small_run, "train.max_steps=1")
    arguments = ["--config", small_run, "train.max_steps=2", "model.name=deit_t"]
    run_forked("pipeline.train", *arguments, f"output_dir={tmp_path / 'alone'}")
    run_forked(
        "pipeline.train", *arguments, f"output_dir={tmp_path / 'taught'}", f"train.teacher={teacher}", "train.zero_stage=3"
    )
    alone, taught = (step_rows(tmp_path / run) for run in ("alone", "taught"))
    assert [a["loss"] != t["loss"] for a, t in zip(alone, taught)] == [True, True]
    result = run_forked(
        "pipeline.train",
        *arguments,
        f"output_dir={tmp_path / 'x'}",
        f"train.teacher={teacher}",
        "model.image_size=48",
        check=False,
    )
    assert result.returncode == 2 and "must have model.image_size 48, got 32: choose another teacher" in result.stderr


def test_evaluation_with_another_switch(small_run: Path, digits_shards: Path, tmp_path: Path) -> None:
    """Guards against test-time masks (ConViT's Tables 5 and 6) that need a new training, or that change nothing."""
    run_forked("pipeline.train", "--config", small_run, "train.max_steps=1", "model.name=deit_t")
    arguments = ["--checkpoint", tmp_path / "run", "--data", digits_shards]
    plain = run_forked("pipeline.evaluate", *arguments).stdout
    masked = run_forked("pipeline.evaluate", *arguments, "--switch", "mask_position_embedding=true").stdout
    figures = [next(line for line in text.splitlines() if " % " in line) for text in (plain, masked)]
    assert figures[0] != figures[1]
    for wrong, sentence in (
        ("mask_positions=true", "unknown switch 'mask_positions': did you mean"),
        ("mask", "of the form name=value"),
    ):
        result = run_forked("pipeline.evaluate", *arguments, "--switch", wrong, check=False)
        assert result.returncode == 2 and sentence in result.stderr and "Traceback" not in result.stderr


def test_another_image_size_resamples_the_positions() -> None:
    """Guards against a DeiT that cannot be fine-tuned at another size, or whose class token is blended in."""
    small, large = (create_model("deit_t", 2, size) for size in (32, 64))
    said = load_pretrained(large, small.state_dict(), "x.pt", ["a", "b"], ["a", "b"])
    resampled, kept = said
    assert resampled == "position_embedding.weight is resampled from (1, 5, 192) to (1, 17, 192)" and "head is kept" in kept
    before, after = (model.state_dict()["position_embedding.weight"] for model in (small, large))
    assert torch.equal(after[:, :1], before[:, :1]) and torch.equal(large.class_token, small.class_token)
