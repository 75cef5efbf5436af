"""A ``checkpoint.json`` that was edited together with its checksum, and a folder under another name: one sentence each, and no hang."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import xxhash

from pipeline.checkpoint import __main__ as command
from pipeline.checkpoint.folder import find_checkpoint, find_step, read_manifests, remove_old, saved_steps, step_folder, sweep
from pipeline.checkpoint.loading import newest_intact
from pipeline.checkpoint.manifest import MANIFEST, CheckpointManifest
from pipeline.checkpoint.parts import write_part
from pipeline.checkpoint.weights import read_weights
from pipeline.cluster.world import World
from pipeline.errors import UserError
from support.checkpoints import retaining, save_small

BIG = 10**30
LONG = "x" * 100_000
DELETED = object()

# (where, what is put there): every place where a value is used, with a value that is of another type, out of range or leads elsewhere.
EDITS: list[tuple[str, Any]] = [
    *((f"state.{key}", value) for key in ("step", "samples", "skipped_steps") for value in (-1, BIG, "4", 4.0, None)),
    ("state.skipped_steps", 5),  # of 4 steps
    ("state.best", {"top1": 1.0, "step": 5, "weights": "ema"}),
    *((f"state.{key}", DELETED) for key in ("step", "config", "classes", "data", "world_size")),
    *(("state.world_size", value) for value in (0, -1, BIG, True)),
    *(("state.zero_stage", value) for value in (4, -1, "1")),
    *(("state.config", value) for value in (None, [], 5, {}, {"model": 1}, {"model": {"name": "pervit_t"}})),
    *((f"state.config.model.{key}", value) for key in ("name", "num_classes", "image_size", "switches") for value in (DELETED, [1], None)),
    *((f"state.config.checkpoint.{key}", value) for key, value in (("keep_last", 0), ("keep_last", "2"), ("keep_every_steps", 0), ("keep_best", 1))),
    ("state.config.train.micro_batch_size", 0),
    *(("state.config_hash", value) for value in ("", "0" * 63, "0" * 65, "G" * 64, 7, "0" * 64 + "\n")),
    *(("state.classes", value) for value in (5, "ab", [1, 2], {"a": 0})),
    *(("state.data", value) for value in ([], {}, {"samples": 0, "fingerprint": "f"}, {"samples": "9", "fingerprint": "f"}, {"samples": 9})),
    *(("state.bad_samples", value) for value in ([], {"x": "gone"}, {"-1": "gone"}, {"1": 2}, {"²": "gone"}, {"9" * 400: "gone"})),
    *(("state.best", value) for value in (5, {}, {"top1": "1", "step": 1, "weights": "ema"}, {"top1": 1e400, "step": 1, "weights": "ema"})),
    *(("state.best", {"top1": 1.0, "step": step, "weights": "ema"}) for step in ("1", -1, BIG, None)),
    ("state.best", {"top1": 1.0, "step": 4, "weights": "../x"}),
    *(("state.evaluation_due", value) for value in (1, "yes", None)),
    ("state.more", 1),
    ("more", 1),
    *(("shapes", value) for value in (5, [], {"w": 3}, {"w": [-3]}, {"w": ["3"]}, {"w": [2**40, 2**40]}, {"w": [1] * 17}, {"w": [BIG]}, {"w": None})),
    *(("optimizer_state", value) for value in (5, None, [5], [{}], [{"parameters": ["w"], "tensors": [1], "scalars": []}], DELETED)),
    *(("files", value) for value in (5, {}, None, [5], [[]], [{}])),
    *(
        ("files.0.name", value)
        for value in ("../part-00000.safetensors", "/etc/passwd", "", ".", "..", "a/b", "part-00000.safetensors\n", "\x1b[2J", MANIFEST, LONG, 5)
    ),
    *(("files.0.bytes", value) for value in (-1, BIG, "60", None, 1.5, True)),
    *(("files.0.xxh3", value) for value in ("", "0" * 31, "Z" * 32, 5, None)),
    *(("format", value) for value in (DELETED, "1", None, [1], 1.0)),
]  # fmt: skip


def edit(folder: Path, change: Callable[[dict], object]) -> None:
    """Change the content of a manifest, and its checksum with it."""
    path = folder / MANIFEST
    content = json.loads(path.read_text())["content"]
    change(content)
    digest = xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())
    path.write_text(json.dumps({"xxh3": digest, "content": content}))


def put(content: dict, place: str, value: Any) -> None:
    *outer, last = (int(part) if part.isdigit() else part for part in place.split("."))
    for part in outer:
        content = content[part]
    if value is DELETED:
        del content[last]
    else:
        content[last] = value


def test_every_consistent_edit_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against a value that is used as it was found: a traceback, a file outside of the folder, a run that is "complete"."""
    folder = save_small(tmp_path, 4)
    text = (folder / MANIFEST).read_text()
    assert len(EDITS) > 100
    for place, value in EDITS:
        (folder / MANIFEST).write_text(text)
        edit(folder, partial(put, place=place, value=value))
        with pytest.raises(UserError) as error:
            CheckpointManifest.read(folder)
        sentence = str(error.value)
        field = place.rpartition(".")[2] if not place.split(".")[-1].isdigit() else "files"
        assert sentence.startswith(str(folder / MANIFEST)) and field in sentence, (place, value, sentence)
        assert sentence.isprintable() and len(sentence) < 400, (place, value, sentence)
        assert command.verify(tmp_path, None) == 1, (place, value)
        assert "damaged" in command.table(tmp_path, read_manifests(tmp_path)), (place, value)
    assert capsys.readouterr().out.count("DAMAGED") == len(EDITS)
    (folder / MANIFEST).write_text(text)
    edit(folder, lambda content: None)
    assert command.verify(tmp_path, None) == 0


def test_what_is_no_manifest_at_all_is_damage(tmp_path: Path) -> None:
    """Guards against JSON that is not an object, or so deep that reading it ends in a RecursionError."""
    folder = save_small(tmp_path, 4)
    for text in (
        "[" * 100_000,
        '{"a":' * 100_000,
        "9" * 10_000,
        '{"xxh3": 1, "content": [1]}',
        '{"xxh3": "", "content": 5}',
        "\xff" * 9,
    ):
        (folder / MANIFEST).write_bytes(text.encode("latin-1"))
        with pytest.raises(UserError, match=f"{MANIFEST} is damaged"):
            CheckpointManifest.read(folder)


@pytest.mark.parametrize("name", [MANIFEST, "part-00000.safetensors"])
@pytest.mark.parametrize("kind", ["a named pipe", "a symbolic link", "a folder"])
def test_what_is_no_regular_file_is_damage(kind: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against a command that waits for a pipe for ever, and against bytes from outside of the checkpoint."""
    path = save_small(tmp_path, 4) / name
    path.rename(tmp_path / "elsewhere")
    {"a named pipe": os.mkfifo, "a symbolic link": lambda p: p.symlink_to(tmp_path / "elsewhere"), "a folder": Path.mkdir}[
        kind
    ](path)
    expected = f"{name} is {kind}" if kind == "a symbolic link" else f"{name} is not a regular file"
    assert command.verify(tmp_path, None) == 1
    assert "DAMAGED" in (out := capsys.readouterr().out) and expected in out
    with pytest.raises(UserError, match=expected):
        read_weights(tmp_path)


def test_a_checkpoint_under_another_name_is_damage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against weights of one step that count as those of another: two folders exchanged, one renamed."""
    four, five = save_small(tmp_path, 4, value=4), save_small(tmp_path, 5, value=5)
    four.rename(tmp_path / "x")
    five.rename(four)
    (tmp_path / "x").rename(five)
    assert command.verify(tmp_path, None) == 1
    out = capsys.readouterr().out
    assert f"{four / MANIFEST} is of step 5" in out and f"{five / MANIFEST} is of step 4" in out
    for step in (4, 5):
        with pytest.raises(UserError, match="give it that name again"):
            read_weights(tmp_path, step)
    shown = command.table(tmp_path, read_manifests(tmp_path))
    assert shown.count("damaged") == 2 and "is of step 4" in shown

    four.rename(step_folder(tmp_path, 5_000_000_000))  # more digits are a name as well
    assert saved_steps(tmp_path) == [5, 5_000_000_000] and command.verify(tmp_path, 5_000_000_000) == 1
    step_folder(tmp_path, 5_000_000_000).rename(tmp_path / "checkpoints" / "step-000000004")  # a zero too many is none
    assert saved_steps(tmp_path) == [5]


def test_a_part_of_another_checkpoint_is_damage(tmp_path: Path) -> None:
    """Guards against weights of another step, or another run, where a file of the same name and length lies in their place."""
    four, five = save_small(tmp_path, 4, value=4), save_small(tmp_path, 5, value=5)
    shutil.copyfile(five / "part-00000.safetensors", four / "part-00000.safetensors")
    with pytest.raises(UserError, match="changed after it was written: its checksum does not match"):
        read_weights(tmp_path, 4)
    assert read_weights(tmp_path, 5).model["w"].tolist() == [5, 5, 5]


def test_weights_do_not_follow_their_file(tmp_path: Path) -> None:
    """Guards against weights in memory that change with the file they were read from, which is mapped."""
    part = save_small(tmp_path, 4, value=4) / "part-00000.safetensors"
    weights = read_weights(tmp_path, 4).model["w"]
    with open(part, "r+b") as file:
        file.seek(-12, os.SEEK_END)
        file.write(bytes(12))
    assert weights.tolist() == [4, 4, 4]


def test_headers_that_no_checkpoint_has_are_damage(tmp_path: Path) -> None:
    """Guards against a traceback over a part that was written again, with its checksum, and is none."""
    folder = save_small(tmp_path, 4)
    for key, tensor in (
        ("w", torch.zeros(3)),
        ("weight/w/x", torch.zeros(3)),
        ("weight/w/0", torch.zeros(3, 1)),
        ("a/b/c/d", torch.zeros(1)),
    ):
        record = write_part(folder / "part-00000.safetensors", {key: tensor})
        edit(folder, partial(put, place="files.0", value=asdict(record)))
        assert command.verify(tmp_path, None) == 1, key
        with pytest.raises(UserError, match="step-00000004"):
            read_weights(tmp_path)


def test_numbers_that_are_not_finite_are_damage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against a run that resumes from NaN, skips every step, and is told to lower its learning rate."""
    save_small(tmp_path, 3, value=3)
    folder = save_small(tmp_path, 4, value=float("nan"))
    sentence = f"{folder / 'part-00000.safetensors'} has numbers that are not finite in weight/w/0"
    assert command.verify(tmp_path, None) == 1 and f"DAMAGED {sentence}" in capsys.readouterr().out
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        found = newest_intact(tmp_path, World(0, 1, torch.device("cpu"), 1))
    finally:
        dist.destroy_process_group()
    assert found and found.state.step == 3 and saved_steps(tmp_path) == [3]
    record = write_part(
        step_folder(tmp_path, 3) / "part-00000.safetensors",
        {"weight/w/0": torch.ones(3), "buffer/b/0": torch.tensor([torch.inf])},
    )
    edit(step_folder(tmp_path, 3), partial(put, place="files.0", value=asdict(record)))
    assert command.verify(tmp_path, None) == 0  # statistics are of the data


def test_what_was_found_is_shown_as_json_has_it(tmp_path: Path) -> None:
    """Guards against words of Python, such as None, about a file that has none of them."""
    folder = save_small(tmp_path, 4)
    edit(folder, partial(put, place="state.evaluation_due", value=None))
    with pytest.raises(UserError, match="state.evaluation_due must be a valid boolean, got null: take another checkpoint"):
        CheckpointManifest.read(folder)


def test_a_checkpoint_that_was_moved_and_linked_is_read_and_retired(tmp_path: Path) -> None:
    """Guards against a run whose saves fail because an old checkpoint lies on another disk, and against the loss of what lies there."""
    moved = tmp_path / "archive"
    for step in (2, 3, 4):
        folder = save_small(tmp_path, step, value=step)
        folder.rename(moved / folder.name if moved.exists() else (moved.mkdir(), moved / folder.name)[1])
        folder.symlink_to(moved / folder.name)
    assert read_weights(tmp_path, 3).model["w"].tolist() == [3, 3, 3]
    (tmp_path / "checkpoints" / ".removing-00000002").symlink_to(moved)  # what an older version left behind
    remove_old(tmp_path, retaining(4, keep_last=1))
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000004"]
    (tmp_path / "checkpoints" / ".removing-00000001").symlink_to(moved / "step-00000002")
    sweep(tmp_path)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000004"]
    assert len(list(moved.glob("step-*/part-*"))) == 3


def test_a_path_and_a_word_name_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a path that ``inspect`` prints and no command takes, and against another checkpoint than the best."""
    run = tmp_path / "run"
    for step in (4, 5, 6):
        save_small(run, step)
    for path, expected in (
        ("run", 6),
        ("run/checkpoints", 6),
        ("run/checkpoints/step-00000005", 5),
        ("run/checkpoints/step-00000004/", 4),
    ):
        assert find_checkpoint(tmp_path / path) == (run, expected)
    monkeypatch.chdir(run / "checkpoints")
    assert find_checkpoint(Path("step-00000005")) == (run, 5) and find_checkpoint(Path(".")) == (run, 6)
    monkeypatch.chdir(run)
    assert find_checkpoint(Path("checkpoints/step-00000004")) == (Path("."), 4) and find_checkpoint(Path("."), 5) == (
        Path("."),
        5,
    )
    with pytest.raises(UserError, match="is of step 5, but --step is 4: leave one of them out"):
        find_checkpoint(run / "checkpoints" / "step-00000005", 4)
    with pytest.raises(UserError, match=r"no checkpoint of step 7, but of \[4, 5, 6\]"):
        find_checkpoint(run / "checkpoints" / "step-00000007")

    with pytest.raises(UserError, match="was not evaluated yet"):
        find_step(run, "best")
    edit(step_folder(run, 6), lambda content: put(content, "state.best", {"top1": 9.0, "step": 5, "weights": "model"}))
    assert find_step(run, "best") == 5 and find_checkpoint(run / "checkpoints" / "step-00000005", "best") == (run, 5)
    edit(step_folder(run, 6), lambda content: put(content, "state.best", {"top1": 9.0, "step": 3, "weights": "model"}))
    with pytest.raises(UserError, match=r"no longer has its best checkpoint, that of step 3, but those of \[4, 5, 6\]"):
        find_step(run, "best")
