"""Where checkpoints lie, what says that one is whole, and which of them stay.

::

    RUN/checkpoints/step-00000040/checkpoint.json            the state of the run, and a checksum of every file beside it
    RUN/checkpoints/step-00000040/part-00000.safetensors     what process 0 saved; and so on

A folder appears under its name by a rename, when all of its files are on the disk; it disappears by one before the first of
them is removed. So what is called ``step-...`` is complete, unless a file was damaged later: the checksums tell.
"""

from __future__ import annotations

import argparse
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
SAVING, _REMOVING, _REPLACED = ".saving-", ".removing-", ".replaced-"  # names of folders that are no checkpoints
FORMAT = 3
BEST = "best"  # as a value of --step
_CHUNK = 16 << 20


class OtherFormat(UserError):
    """A checkpoint that another version of the pipeline wrote. It may well be whole, so it is never passed over."""


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
            UserError: it is missing or damaged.
            OtherFormat: another version wrote it.
            OSError: it cannot be read now.
        """
        path = folder / MANIFEST
        try:
            saved = json.loads(path.read_text())
            content = json.dumps(saved["content"], sort_keys=True)
            whole = saved["xxh3"] == xxhash.xxh3_128_hexdigest(content.encode())
        except FileNotFoundError:
            raise UserError(f"{path} is missing: take another checkpoint.") from None
        except (ValueError, KeyError, TypeError):
            whole = False
        if not whole:
            raise UserError(f"{path} is damaged, its checksum does not match: take another checkpoint.")
        values = saved["content"]
        found = values.pop("format")
        if found != FORMAT:
            raise OtherFormat(
                f"{path} has format {found}, {FORMAT} needed: use the version of the pipeline that wrote it, or another output_dir."
            )
        files = [FileRecord(**record) for record in values["files"]]
        return cls(RunState(**values["state"]), values["shapes"], files)


def step_folder(run_dir: Path, step: int) -> Path:
    return run_dir / FOLDER / f"step-{step:08d}"


def saved_steps(run_dir: Path) -> list[int]:
    """Steps of the run's checkpoints, ascending."""
    names = [path.name for path in (run_dir / FOLDER).glob("step-*") if path.is_dir()]
    return sorted(step for step in map(_step_of, names) if step is not None)


def _step_of(name: str) -> int | None:
    """The step that a checkpoint's folder of this name has, or None if that is no checkpoint's name."""
    match = re.fullmatch(r"step-(0[0-9]{7}|[1-9][0-9]{7,})", name)  # no other name is ever given
    return int(match[1]) if match else None


def latest_step(run_dir: Path) -> int | None:
    """Step of the newest checkpoint, or None when the run has none yet."""
    return max(saved_steps(run_dir), default=None)


def parse_step(text: str) -> int | str:
    """The value of ``--step``: a number or ``best``; a ``type`` for argparse.

    Raises:
        argparse.ArgumentTypeError: it is neither.
    """
    if text == BEST:
        return BEST
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no step: write a number, or `{BEST}`") from None


def locate(path: Path) -> tuple[Path, int | None]:
    """What a path means that a command was given: a run folder, or one of its checkpoints as ``inspect`` shows them.

    Args:
        path: ``RUN``, ``RUN/checkpoints`` or ``RUN/checkpoints/step-00000040``; it need not exist.

    Returns:
        The run folder, and the step if the path names one.
    """
    whole = path.absolute()
    step = _step_of(whole.name)
    levels = 1 if step is None else 2  # from the path up to the run folder
    if (path / FOLDER).is_dir() or (whole if step is None else whole.parent).name != FOLDER:
        return path, None
    return (path if len(path.parts) >= levels else whole).parents[levels - 1], step


def find_step(run_dir: Path, step: int | str | None = None) -> int:
    """The step of a checkpoint that is there.

    Args:
        run_dir: a run folder.
        step: None: the newest; ``best``: the one with the best top-1 so far, as the newest readable one says; else this one.

    Raises:
        UserError: there is none.
    """
    steps = saved_steps(run_dir)
    if not steps:
        raise UserError(
            f"{run_dir} holds 0 checkpoints, 1 needed (no {FOLDER}/step-*): pass the output_dir of a run that has saved one."
        )
    if step == BEST:
        return _best_step(run_dir, steps)
    if step is not None and step not in steps:
        raise UserError(f"{run_dir} has no checkpoint of step {step}, but of {steps}: choose one of them.")
    return steps[-1] if step is None else step


def find_checkpoint(path: Path, step: int | str | None = None) -> tuple[Path, int]:
    """The checkpoint that a command was asked for: :func:`locate` and :func:`find_step` together.

    Args:
        path: a run folder, or one of its checkpoints.
        step: as in :func:`find_step`.

    Returns:
        The run folder and the step.

    Raises:
        UserError: there is none, or path and step name two.
    """
    run_dir, named = locate(path)
    found = find_step(run_dir, named if step is None else step)
    if named is not None and found != named:
        raise UserError(f"{path} is of step {named}, but --step is {step}: leave one of them out.")
    return run_dir, found


def _best_step(run_dir: Path, steps: list[int]) -> int:
    for step in reversed(steps):
        try:
            best = Manifest.read(step_folder(run_dir, step)).state.best
        except UserError:
            continue  # a damaged one
        if best is None:
            raise UserError(f"{run_dir} has no best checkpoint, it was not evaluated yet: choose a step of {steps}.")
        if best["step"] not in steps:
            raise UserError(
                f"{run_dir} no longer has its best checkpoint, that of step {best['step']}, but those of {steps}: choose one of them."
            )
        return best["step"]
    raise UserError(f"{run_dir} has no checkpoint that says which is the best, of {steps} none can be read: choose one of them.")


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

    Raises:
        OSError: a file cannot be read now, which says nothing about what is in it.
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
        except FileNotFoundError:
            sentences.append(f"{path} is missing")
    return sentences


def publish(written: Path, target: Path) -> None:
    """Give a complete folder its name. One that has the name already makes room; it is kept if it is damaged.

    Between the two renames neither has the name: :func:`sweep` gives it back if the process dies there.
    """
    replaced = None
    if target.exists():
        if _is_whole(target):
            replaced = _rename(target, _REPLACED)
        else:
            set_aside(target)
    os.rename(written, target)
    sync_folder(target.parent)
    if replaced:
        shutil.rmtree(replaced, ignore_errors=True)  # the next start sweeps what resists


def _is_whole(folder: Path) -> bool:
    try:
        return not find_damage(folder, Manifest.read(folder).files)
    except UserError:
        return False


def _rename(folder: Path, prefix: str) -> Path:
    """Call ``step-00000040`` ``<prefix>00000040``."""
    target = folder.with_name(prefix + folder.name.removeprefix("step-"))
    if target.exists():  # left by a process that died
        shutil.rmtree(target)
    return folder.rename(target)


def set_aside(folder: Path) -> Path:
    """Rename a damaged checkpoint, so that it no longer counts as one; nothing is removed."""
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
        shutil.rmtree(_rename(step_folder(run_dir, step), _REMOVING))


def sweep(run_dir: Path) -> None:
    """At the start of a run: remove what a process that died left half written or half removed, and give a checkpoint its name back
    whose successor never got it; only for who holds the run's lock."""
    for former in (run_dir / FOLDER).glob(f"{_REPLACED}*"):
        target = former.with_name(f"step-{former.name.removeprefix(_REPLACED)}")
        if not target.exists():
            former.rename(target)
    for prefix in (SAVING, _REMOVING, _REPLACED):
        for leftover in (run_dir / FOLDER).glob(f"{prefix}*"):
            shutil.rmtree(leftover, ignore_errors=True)
