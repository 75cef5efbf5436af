"""Lay out, choose, publish and remove a run's checkpoint folders.

::

    RUN/checkpoints/step-00000040/checkpoint.json            the run's state, and the checksums of the other files
    RUN/checkpoints/step-00000040/part-00000.safetensors     the part of rank 0; and so on

A folder gets its name by a rename after all of its files are on disk, and loses it by a rename before the first of them is
removed. So a folder named ``step-...`` is complete; the checksums detect later damage.
"""

import argparse
import os
import re
import shutil
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from pathlib import Path

from pipeline.checkpoint.manifest import CheckpointManifest, RunState, find_damage, folder_name
from pipeline.errors import UserError
from pipeline.files import sync_folder
from pipeline.models.registry import list_models
from pipeline.models.timm.names import is_timm_folder

FOLDER = "checkpoints"
LOCK = ".lock"  # locked while a process trains; its text names that process
FETCHED = ".fetched.json"  # in a copy of a run that is in a store, whose checkpoints may lack parts: what was copied
SAVING, _REMOVING, _REPLACED = ".saving-", ".removing-", ".replaced-"  # prefixes of folders in transition
BEST = "best"  # as a value of --step
Manifests = dict[int, CheckpointManifest | UserError]  # by step, ascending; the error keeps one from being read


def step_folder(run_dir: Path, step: int) -> Path:
    return run_dir / FOLDER / folder_name(step)


def saved_steps(run_dir: Path) -> list[int]:
    """Steps of the run's checkpoints, ascending."""
    # scandir knows what is a folder without looking again: none is missed because another process replaces it meanwhile.
    with suppress(OSError), os.scandir(run_dir / FOLDER) as entries:
        return sorted(step for entry in entries if entry.is_dir() and (step := step_of(entry.name)) is not None)
    return []


def step_of(name: str) -> int | None:
    """The step in a checkpoint folder's name; None for any other name."""
    match = re.fullmatch(r"step-(0[0-9]{7}|[1-9][0-9]{7,})", name)  # exactly what folder_name writes
    return int(match[1]) if match else None


def latest_step(run_dir: Path) -> int | None:
    """Step of the newest checkpoint; None if there is none yet."""
    return max(saved_steps(run_dir), default=None)


def parse_step(text: str) -> int | str:
    """Parse ``--step``, a number or ``best``; a ``type`` for argparse."""
    if text == BEST:
        return BEST
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a step: write a number, or `{BEST}`") from None


def locate(path: Path) -> tuple[Path, int | None]:
    """Resolve a path, which need not exist, to a run folder and a step, if it names one: ``RUN/checkpoints/step-00000040`` does,
    ``RUN/checkpoints`` and ``RUN`` do not."""
    absolute = path.absolute()
    step = step_of(absolute.name)
    levels = 1 if step is None else 2  # between the path and the run folder
    if (path / FOLDER).is_dir() or (absolute if step is None else absolute.parent).name != FOLDER:
        return path, None
    return (path if len(path.parts) >= levels else absolute).parents[levels - 1], step


def find_step(run_dir: Path, step: int | str | None = None) -> int:
    """The step of an existing checkpoint, else a ``UserError``. ``step`` None: the newest; ``best``: the one with the best
    top-1, as the newest readable one records; else this one."""
    steps = saved_steps(run_dir)
    if not steps:
        got = f"no {FOLDER}/step-*" if run_dir.is_dir() else "no such folder"
        raise UserError(f"{run_dir} must have a checkpoint, got {got}", "pass the output_dir of a run that has saved one")
    if step == BEST:
        return _best_step(run_dir, steps)
    if step is not None and step not in steps:
        raise UserError(f"{run_dir} has no checkpoint of step {step}, but of {steps}", "choose one of them")
    return steps[-1] if step is None else step


def find_checkpoint(path: Path, step: int | str | None = None) -> tuple[Path, int]:
    """The run folder and step that a command's path and ``--step`` select: :func:`locate` and :func:`find_step`, which must agree."""
    run_dir, named = locate(path)
    found = find_step(run_dir, named if step is None else step)
    if named is not None and found != named:
        raise UserError(f"{path} is of step {named}, but --step is {step}", "leave one of them out")
    return run_dir, found


def is_path(source: str) -> bool:
    """Whether a command's argument is a path, if it may also be the name of a model."""
    return Path(source).exists() or "/" in source or Path(source).suffix != ""


def check_source(source: Path, step: int | str | None = None, key: str = "", otherwise: str = "") -> None:
    """Check, before PyTorch is loaded, that a trained model can be at a path: a run with the checkpoint ``step`` (:func:`find_step`),
    one of its checkpoints, a file or timm's folder. ``key`` names the path in messages and ends with a space, ``otherwise`` is a
    further remedy for a path that does not exist. Raises UserError: there is nothing, or a folder that is none of these."""
    if source.is_file() or is_timm_folder(source):
        return
    if not locate(source)[0].exists():
        if str(source) in list_models():
            remedy = "pass a run's output_dir, one of its checkpoints, or an exported file"
            raise UserError(f"{key}{source} is the name of a model, not of a trained one: it has no weights", remedy)
        raise UserError(f"{key}{source} does not exist", f"pass a run folder or a file with weights{otherwise}")
    find_checkpoint(source, step)


def _best_step(run_dir: Path, steps: list[int]) -> int:
    manifest = newest_readable(read_manifests(run_dir))
    if manifest is None:
        problem = f"has no checkpoint that says which is the best, of {steps} none can be read"
        raise UserError(f"{run_dir} {problem}", "choose one of them")
    best = manifest.state.best
    if best is None:
        raise UserError(f"{run_dir} has no best checkpoint, it was not evaluated yet", f"choose a step of {steps}")
    if best["step"] not in steps:
        problem = f"no longer has its best checkpoint, that of step {best['step']}, but those of {steps}"
        raise UserError(f"{run_dir} {problem}", "choose one of them")
    return best["step"]


def read_manifests(run_dir: Path) -> Manifests:
    manifests: Manifests = {}
    for step in saved_steps(run_dir):
        try:
            manifests[step] = CheckpointManifest.read(step_folder(run_dir, step))
        except UserError as error:
            manifests[step] = error
    return manifests


def newest_readable(manifests: Mapping[int, CheckpointManifest | UserError]) -> CheckpointManifest | None:
    return next((found for found in reversed([*manifests.values()]) if isinstance(found, CheckpointManifest)), None)


def publish(written: Path, target: Path) -> None:
    """Rename a complete folder to its final name, replacing a checkpoint of that step; a damaged one is set aside.

    Between the two renames no folder has the name: if the process dies there, :func:`sweep` restores it.
    """
    replaced = None
    if os.path.lexists(target):
        if is_intact(target):
            replaced = _rename(target, _REPLACED)
        else:
            set_aside(target)
    os.rename(written, target)
    sync_folder(target.parent)
    if replaced:
        remove(replaced, quietly=True)  # the next start removes what is left


def is_intact(folder: Path) -> bool:
    """Whether a checkpoint is as it was written."""
    with suppress(UserError):
        return not find_damage(folder, CheckpointManifest.read(folder).files)
    return False


def _rename(folder: Path, prefix: str) -> Path:
    """Rename ``step-00000040`` to ``<prefix>00000040``."""
    target = folder.with_name(prefix + folder.name.removeprefix("step-"))
    if os.path.lexists(target):  # left by a process that died
        remove(target)
    return folder.rename(target)


def remove(folder: Path, quietly: bool = False) -> None:
    """Remove a folder and its contents; of a symbolic link only the link, its target does not belong to the run."""
    if folder.is_symlink():
        with suppress(OSError) if quietly else nullcontext():
            folder.unlink()
    else:
        shutil.rmtree(folder, ignore_errors=quietly)


def set_aside(folder: Path) -> Path:
    """Rename a damaged checkpoint to ``damaged-...``; nothing is removed."""
    number = next(n for n in range(1, 10**6) if not os.path.lexists(folder.with_name(f"damaged-{folder.name}.{n}")))
    return folder.rename(folder.with_name(f"damaged-{folder.name}.{number}"))


def remove_old(run_dir: Path, newest: RunState) -> None:
    """Remove the checkpoints up to the newest one that retention has no reason to keep. Later ones, if the user went back, stay."""
    steps = [step for step in saved_steps(run_dir) if step <= newest.step]
    for step in sorted({*steps} - {*kept(steps, newest)}):
        remove(_rename(step_folder(run_dir, step), _REMOVING))


def kept(steps: list[int], state: RunState, keep_last: int | None = None) -> list[int]:
    """Those steps that retention keeps by a checkpoint's config; ``keep_last``: instead of its own."""
    return [step for step, reason in _reasons(steps, state, keep_last=keep_last).items() if reason]


def _reasons(steps: list[int], state: RunState, best_name: str = "best", keep_last: int | None = None) -> dict[int, str]:
    """Retention: keep the last checkpoints, the best, and multiples of a number; step -> why it stays, empty if it goes."""
    config, reasons = state.config["checkpoint"], {}
    last, every = keep_last or config["keep_last"], config["keep_every_steps"]
    best = state.best["step"] if state.best and config["keep_best"] else None
    for step in steps:
        rules = {
            f"one of the last {last}": step in steps[-last:],
            best_name: step == best,
            f"multiple of {every}": every and not step % every,
        }
        reasons[step] = ", ".join(reason for reason, applies in rules.items() if applies)
    return reasons


def reasons_to_keep(manifests: Mapping[int, CheckpointManifest | UserError]) -> dict[int, str]:
    """Step -> why retention keeps it, by the config of the newest readable checkpoint."""
    newest = newest_readable(manifests)
    if newest is None:
        return {}
    reasons = _reasons(list(manifests), newest.state, f"best ({best_text(newest.state)})")
    return {step: reason or "goes with the next one" for step, reason in reasons.items()}


def best_text(state: RunState) -> str:
    best = state.best
    return f"{best['top1']:.2f} % top-1 of the {best['weights']} weights at step {best['step']}" if best else ""


def sweep(run_dir: Path) -> None:
    """Clean up at the start of a run: remove folders left half written or half removed by a killed process, and restore a
    checkpoint whose replacement was never renamed. The caller must hold the run's lock."""
    for former in (run_dir / FOLDER).glob(f"{_REPLACED}*"):
        target = former.with_name(f"step-{former.name.removeprefix(_REPLACED)}")
        if not os.path.lexists(target):
            former.rename(target)
    for prefix in (SAVING, _REMOVING, _REPLACED):
        for leftover in (run_dir / FOLDER).glob(f"{prefix}*"):
            remove(leftover, quietly=True)
