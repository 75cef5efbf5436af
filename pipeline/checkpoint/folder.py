"""Where checkpoints lie, what says that one is whole, and which of them stay.

::

    RUN/checkpoints/step-00000040/checkpoint.json            the state of the run, and a checksum of every file beside it
    RUN/checkpoints/step-00000040/part-00000.safetensors     what process 0 saved; and so on

A folder appears under its name by a rename, when all of its files are on the disk; it disappears by one before the first of
them is removed. So what is called ``step-...`` is complete, unless a file was damaged later: the checksums tell.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from pipeline.errors import UserError
from pipeline.files import sync_folder

FOLDER, MANIFEST = "checkpoints", "checkpoint.json"
FORMAT = 3
_CHUNK = 16 << 20
_FORMER = ".former-"  # before the name of a checkpoint that is being replaced


@dataclass(frozen=True)
class RunState:
    """All of a run that is not a tensor. Random generators are not in it: every draw is a function of seed and place."""

    step: int  # optimizer steps done
    samples: int  # images seen
    optimizer_step: int  # AdamW's count: steps without the skipped ones
    skipped_steps: int
    config: dict[str, Any]
    config_hash: str  # of the keys that decide the weights
    classes: list[str]
    data: dict[str, Any]  # identity of the training set
    world_size: int
    zero_stage: int
    bad_samples: dict[str, str] = field(default_factory=dict)  # number -> sentence
    best: dict[str, Any] | None = None  # {"top1": 71.2, "step": 40, "weights": "ema"}
    evaluation_due: bool = False  # the run was stopped within this step's evaluation


@dataclass(frozen=True)
class FileRecord:
    """A file of a checkpoint as it was written."""

    name: str
    bytes: int
    xxh3: str  # 128 bits, hexadecimal


@dataclass(frozen=True)
class Manifest:
    """What ``checkpoint.json`` says."""

    state: RunState
    shapes: dict[str, list[int]]  # of every parameter
    files: list[FileRecord]

    def to_text(self) -> str:
        """As JSON, with a checksum of itself."""
        content = json.dumps({"format": FORMAT, **asdict(self)}, sort_keys=True)
        return (
            json.dumps({"xxh3": xxhash.xxh3_128_hexdigest(content.encode()), "content": json.loads(content)}, indent=1) + "\n"
        )

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Of a checkpoint.

        Raises:
            UserError: it is missing, damaged or of another format.
        """
        path = folder / MANIFEST
        try:
            saved = json.loads(path.read_text())
            content = json.dumps(saved["content"], sort_keys=True)
            whole = saved["xxh3"] == xxhash.xxh3_128_hexdigest(content.encode())
        except OSError as error:
            raise UserError(f"{path} cannot be read ({error.strerror}): take another checkpoint.") from None
        except (ValueError, KeyError, TypeError):
            whole = False
        if not whole:
            raise UserError(f"{path} is damaged, its checksum does not match: take another checkpoint.")
        values = saved["content"]
        if values.pop("format") != FORMAT:
            raise UserError(f"{path} has another format than {FORMAT}: use the version of the pipeline that wrote it.")
        files = [FileRecord(**record) for record in values["files"]]
        return cls(RunState(**values["state"]), values["shapes"], files)


def step_folder(run_dir: Path, step: int) -> Path:
    return run_dir / FOLDER / f"step-{step:08d}"


def saved_steps(run_dir: Path) -> list[int]:
    """Steps of the run's checkpoints, ascending."""
    names = (path.name for path in (run_dir / FOLDER).glob("step-*") if path.is_dir())
    return sorted(int(name.removeprefix("step-")) for name in names if re.fullmatch(r"step-\d{8,}", name))


def latest_step(run_dir: Path) -> int | None:
    """Step of the newest checkpoint, or None when the run has none yet."""
    return max(saved_steps(run_dir), default=None)


def checksum(path: Path) -> FileRecord:
    """Of a file as it is now."""
    digest, size = xxhash.xxh3_128(), 0
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return FileRecord(path.name, size, digest.hexdigest())


def find_damage(folder: Path, files: list[FileRecord]) -> list[str]:
    """Compare files with what was written.

    Args:
        folder: the checkpoint's.
        files: of its manifest, all or some.

    Returns:
        A sentence for each that differs, naming it.
    """
    sentences = []
    for written in files:
        path = folder / written.name
        try:
            size = path.stat().st_size
            if size != written.bytes:
                sentences.append(f"{path} has {size} bytes, {written.bytes} were written")
            elif checksum(path) != written:
                sentences.append(f"{path} was changed after it was written: its checksum does not match")
        except OSError as error:
            sentences.append(f"{path} cannot be read ({error.strerror})")
    return sentences


def publish(written: Path, target: Path) -> None:
    """Give a complete folder its name. One that has the name already makes room; it is kept if it is damaged.

    A kill between the two renames leaves a whole former checkpoint under a hidden name; :func:`sweep` gives it back.
    """
    former = None
    if target.exists():
        if _is_whole(target):
            former = target.rename(target.with_name(_FORMER + target.name))
        else:
            _set_aside(target)
    os.rename(written, target)
    sync_folder(target.parent)
    if former:
        shutil.rmtree(former)


def _is_whole(folder: Path) -> bool:
    try:
        return not find_damage(folder, Manifest.read(folder).files)
    except UserError:
        return False


def _hide(folder: Path) -> Path:
    return folder.rename(folder.with_name(f".removing-{folder.name.removeprefix('step-')}"))


def _set_aside(folder: Path) -> Path:
    number = next(n for n in range(1, 10**6) if not folder.with_name(f"damaged-{folder.name}.{n}").exists())
    return folder.rename(folder.with_name(f"damaged-{folder.name}.{number}"))


def remove_old(run_dir: Path, now: int, keep_last: int, best: int | None, keep_every_steps: int | None) -> None:
    """Retention: the last ``keep_last`` up to step ``now`` stay, the best one, and multiples of ``keep_every_steps``.

    Later ones are not this run's to judge: the user went back.
    """
    steps = [step for step in saved_steps(run_dir) if step <= now]
    for step in steps[: max(0, len(steps) - keep_last)]:
        if step == best or (keep_every_steps and step % keep_every_steps == 0):
            continue
        shutil.rmtree(_hide(step_folder(run_dir, step)))


def sweep(run_dir: Path) -> None:
    """Remove what a process that died left half written or half removed; only for who holds the run's lock."""
    for former in (run_dir / FOLDER).glob(f"{_FORMER}*"):
        target = former.with_name(former.name.removeprefix(_FORMER))
        if not target.exists():
            former.rename(target)
    for pattern in (".saving-*", ".removing-*", f"{_FORMER}*"):
        for leftover in (run_dir / FOLDER).glob(pattern):
            shutil.rmtree(leftover, ignore_errors=True)
