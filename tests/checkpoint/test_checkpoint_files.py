"""The files of a checkpoint and the folder they lie in: stretches, checksums, names that appear and disappear at once."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from pipeline.checkpoint.folder import FOLDER, publish, remove_old, saved_steps, sweep
from pipeline.checkpoint.manifest import MANIFEST, CheckpointManifest, OptimizerState, checksum, find_damage
from pipeline.checkpoint.parts import SliceReader, find_gaps, read_headers, slice_key, write_part
from pipeline.checkpoint.weights import read_weights
from pipeline.errors import UserError
from support.checkpoints import STATE, retaining, save, save_small


def cut(rng: random.Random, count: int, pieces: int) -> list[tuple[int, int]]:
    """``count`` numbers in ``pieces`` stretches of random lengths, some perhaps of one number: (start, end)."""
    inner = rng.sample(range(1, count), min(pieces, count) - 1)
    return list(pairwise([0, *sorted(inner), count]))


@pytest.mark.parametrize(
    "tensors",
    [
        {},
        {"zero_d": torch.tensor(7), "none": torch.zeros(0), "none_of_three": torch.zeros(0, 3)},
        {"odd name / 0": torch.tensor([True, False, True]), "b": torch.arange(5, dtype=torch.uint8)},
        {str(t): torch.arange(6).reshape(2, 3).to(t) for t in (torch.float32, torch.float64, torch.float16, torch.bfloat16)},
        {str(t): torch.arange(-3, 4).to(t) for t in (torch.int64, torch.int32, torch.int16, torch.int8)},
        {"large": torch.randn(5_000_003)},  # more than one chunk, and no multiple of anything
    ],
    ids=["nothing", "empty", "bytes", "floats", "integers", "large"],
)
def test_the_library_reads_what_was_written(tensors: dict[str, Tensor], tmp_path: Path) -> None:
    """Guards against files that only this code can read, and against a checksum of something else than the file."""
    path = tmp_path / "part-00000.safetensors"
    record = write_part(path, tensors)
    assert record == checksum(path) and record.bytes == path.stat().st_size and not find_damage(tmp_path, [record])
    found = load_file(path)
    assert found.keys() == tensors.keys()
    for name, value in tensors.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name


def test_any_stretch_is_read_from_any_split(tmp_path: Path) -> None:
    """Guards against numbers from another place when a run goes on with another number of processes or ZeRO stage."""
    rng = random.Random(5)
    for case in range(25):
        tensors = {(q, n): torch.randn(rng.randint(1, 60)) for q in ("weight", "optimizer.exp_avg") for n in ("a.b", "c")}
        parts: list[dict[str, Tensor]] = [{} for _ in range(rng.randint(1, 4))]
        for (quantity, name), values in tensors.items():
            for start, end in cut(rng, len(values), rng.randint(1, 5)):
                rng.choice(parts)[slice_key(quantity, name, start)] = values[start:end].clone()
        folder = tmp_path / str(case)
        manifest = save(folder, parts, {name: [len(tensors["weight", name])] for name in ("a.b", "c")})
        reader = SliceReader(folder, read_headers(folder, manifest.files))
        for (quantity, name), values in tensors.items():
            for start, end in [(0, len(values)), *(stretch for n in (2, 3) for stretch in cut(rng, len(values), n))]:
                assert torch.equal(reader.read(quantity, name, start, end - start), values[start:end])


@pytest.mark.parametrize(
    ("quantity", "name", "start", "count"),
    [("weight", "w", 4, 3), ("weight", "w", 5, 1), ("weight", "w", 8, 3), ("weight", "v", 0, 1), ("ema", "w", 0, 1)],
)
def test_numbers_that_nobody_saved_are_missed(quantity: str, name: str, start: int, count: int, tmp_path: Path) -> None:
    """Guards against a gap that is closed with the numbers beside it."""
    stretches = {slice_key("weight", "w", 0): torch.ones(5), slice_key("weight", "w", 6): torch.ones(4)}  # 5 is missing
    manifest = save(tmp_path / "c", [stretches], {"w": [10]})
    reader = SliceReader(tmp_path / "c", read_headers(tmp_path / "c", manifest.files))
    assert reader.read("weight", "w", 6, 4).sum() == 4
    with pytest.raises(KeyError, match=f"{quantity} of {name}"):
        reader.read(quantity, name, start, count)


KEPT = {"optimizer.exp_avg/w/0": 10, "optimizer.exp_avg_sq/w/0": 10, "optimizer.step/w/0": 1}


@pytest.mark.parametrize(
    ("stretches", "expected"),
    [
        ({"weight/w/0": 4, "weight/w/4": 6, "weight/v/0": 2, **KEPT}, None),  # v is frozen
        ({"weight/w/0": 10}, "weight of v must end at 2, got 0"),
        ({"weight/w/0": 4, "weight/w/5": 5, "weight/v/0": 2}, "weight of w is missing from 4 to 5"),
        ({"weight/w/0": 4, "weight/w/3": 7, "weight/v/0": 2}, "weight of w is there twice from 3 to 4"),
        ({"weight/w/0": 9, "weight/v/0": 2}, "weight of w must end at 10, got 9"),
        ({"weight/w/0": 10, "weight/v/0": 2, "weight/x/0": 2}, "weight of x is not what this model and optimizer have"),
        ({"weight/w/0": 10, "weight/v/0": 2, "ema/w/0": 10}, "ema of v must end at 2, got 0"),
        (
            {"weight/w/0": 10, "weight/v/0": 2, "optimizer.exp_avg/w/0": 10, "optimizer.step/w/0": 1},
            "optimizer.exp_avg_sq of w must end at 10, got 0",
        ),
        (
            {"weight/w/0": 10, "weight/v/0": 2, "optimizer.exp_avg/w/0": 10, "optimizer.exp_avg_sq/w/0": 10},
            "optimizer.step of w must end at 1, got 0",
        ),
        (
            {"weight/w/0": 10, "weight/v/0": 2, **KEPT, "optimizer.exp_avg/v/0": 2},
            "optimizer.exp_avg of v is not what this model and optimizer have",
        ),
        (
            {
                "weight/w/0": 10,
                "weight/v/0": 2,
                "optimizer.exp_avg/w/2": 8,
                "optimizer.exp_avg_sq/w/0": 10,
                "optimizer.step/w/0": 1,
            },
            "optimizer.exp_avg of w is missing from 0 to 2",
        ),
        ({"weight/w/0": 10, "weight/v/0": 2, "buffer/m/0": 3, "ema_buffer/m/0": 3}, None),
        ({"weight/w/0": 10, "weight/v/0": 2, "buffer/m/0": 3, "ema_buffer/m/0": 2}, "average of buffer m must end at 3, got 2"),
        (
            {"weight/w/0": 10, "weight/v/0": 2, "buffer/m/0": 3, "buffer/n/0": 1, "ema_buffer/m/0": 3},
            "buffer n has no average, others have",
        ),
        ({"weight/w/0": 10, "weight/v/0": 2, "ema_buffer/m/0": 3}, "buffer m has an average, but is not there"),
    ],
)
def test_gaps_are_found_by_the_headers(stretches: dict[str, int], expected: str | None, tmp_path: Path) -> None:
    """Guards against a checkpoint whose checksums are right and which lacks what a process should have saved."""
    tensors = {key: torch.zeros(count) for key, count in stretches.items()}
    parts = [dict(list(tensors.items())[::2]), dict(list(tensors.items())[1::2])]
    kept = [OptimizerState(["w"], ["exp_avg", "exp_avg_sq"], ["step"])] if any("optimizer." in key for key in stretches) else []
    manifest = save(tmp_path / "c", parts, {"w": [2, 5], "v": [2]}, optimizer_state=kept)
    problems = find_gaps(tmp_path / "c", manifest)
    assert problems == [] if expected is None else len(problems) == 1 and expected in problems[0]


def test_the_manifest_notices_a_changed_character(tmp_path: Path) -> None:
    """Guards against a run that goes on from a step, or with counters, that a bad disk made up."""
    folder = save_small(tmp_path, 4)
    text = (folder / MANIFEST).read_text()
    assert CheckpointManifest.read(folder).state == STATE
    rng = random.Random(0)
    digits = [i for i, character in enumerate(text) if character.isdigit()]
    for at in rng.sample(digits, 40):
        changed = text[:at] + str((int(text[at]) + 1) % 10) + text[at + 1 :]
        (folder / MANIFEST).write_text(changed)
        with pytest.raises(UserError, match=f"{MANIFEST} is damaged"):
            CheckpointManifest.read(folder)
    for damaged in (text[:-20], "", "[]", "null", "{}", text.encode("utf-16").decode("latin-1")):
        (folder / MANIFEST).write_text(damaged)
        with pytest.raises(UserError, match=f"{MANIFEST} is damaged"):
            CheckpointManifest.read(folder)
    (folder / MANIFEST).unlink()
    with pytest.raises(UserError, match="is missing"):
        CheckpointManifest.read(folder)


def test_every_damage_to_a_file_is_named(tmp_path: Path) -> None:
    """Guards against a flipped bit that only makes the loss a little worse."""
    folder = save_small(tmp_path, 4)
    path, record = folder / "part-00000.safetensors", CheckpointManifest.read(folder).files[0]
    data = path.read_bytes()
    flipped = data[:-1] + bytes([data[-1] ^ 1])
    for content, expected in [(flipped, "does not match"), (data[:-1], f"has {len(data) - 1} bytes"), (b"", "has 0 bytes")]:
        path.write_bytes(content)
        (sentence,) = find_damage(folder, [record])
        assert str(path) in sentence and expected in sentence
    path.unlink()
    assert "is missing" in find_damage(folder, [record])[0]


@pytest.mark.parametrize(
    ("now", "keep_last", "best", "every", "kept"),
    [
        (60, 2, None, None, [50, 60]),
        (60, 1, None, None, [60]),
        (60, 9, None, None, [10, 20, 30, 40, 50, 60]),
        (60, 1, 20, None, [20, 60]),
        (60, 1, 60, None, [60]),
        (60, 1, 10, 20, [10, 20, 40, 60]),
        (40, 1, None, None, [40, 50, 60]),  # the user went back to 30: what came later is not this run's
        (40, 2, 50, 30, [30, 40, 50, 60]),
    ],
)
def test_retention(now: int, keep_last: int, best: int | None, every: int | None, kept: list[int], tmp_path: Path) -> None:
    """Guards against the removal of the best checkpoint, and against a disk that fills up."""
    for step in (10, 20, 30, 40, 50, 60):
        save_small(tmp_path, step)
    remove_old(tmp_path, retaining(now, keep_last, best, every))
    assert saved_steps(tmp_path) == kept
    assert len(list((tmp_path / FOLDER).iterdir())) == len(kept)


def test_publishing_over_an_older_one(tmp_path: Path) -> None:
    """Guards against the loss of the only intact checkpoint of a step, and of a damaged one that could still be mended."""
    target = save_small(tmp_path, 4, value=1)
    for number in (1, 2):
        (target / "part-00000.safetensors").write_bytes(b"damaged")
        publish(save_small(tmp_path / "elsewhere", 4, value=number + 1), target)
        assert read_weights(tmp_path, 4).model["w"].tolist() == [number + 1] * 3
        assert (tmp_path / FOLDER / f"damaged-step-00000004.{number}" / "part-00000.safetensors").read_bytes() == b"damaged"
    publish(save_small(tmp_path / "elsewhere", 4, value=9), target)
    assert read_weights(tmp_path, 4).model["w"].tolist() == [9] * 3
    assert saved_steps(tmp_path) == [4] and len(list((tmp_path / FOLDER).iterdir())) == 3  # a whole one is replaced


def test_what_ends_between_two_renames_loses_nothing(tmp_path: Path) -> None:
    """Guards against a run without any checkpoint: the old one of this step has given up its name, the new one never gets it."""
    target = save_small(tmp_path, 4)
    with pytest.raises(FileNotFoundError):
        publish(tmp_path / "gone", target)
    assert saved_steps(tmp_path) == []
    sweep(tmp_path)
    assert saved_steps(tmp_path) == [4] and not find_damage(target, CheckpointManifest.read(target).files)


def test_sweeping_touches_no_checkpoint(tmp_path: Path) -> None:
    """Guards against leftovers of killed processes that fill the disk, and against a broom that is too wide."""
    save_small(tmp_path, 4)
    for name in (".saving-00000008", ".removing-00000002", ".replaced-00000004", "damaged-step-00000002.1", "mine"):
        (tmp_path / FOLDER / name).mkdir()
        (tmp_path / FOLDER / name / "part-00000.safetensors").write_bytes(b"x")
    sweep(tmp_path)
    assert sorted(path.name for path in (tmp_path / FOLDER).iterdir()) == ["damaged-step-00000002.1", "mine", "step-00000004"]
    (tmp_path / FOLDER / "step-00000009.txt").touch()
    (tmp_path / FOLDER / "step-00000009x").mkdir()
    assert saved_steps(tmp_path) == [4]
