"""Print what checkpoints a run has and what is in one: the text of ``python -m pipeline.checkpoint inspect``."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path

from pipeline.checkpoint.folder import FOLDER, saved_steps, step_folder
from pipeline.checkpoint.manifest import MANIFEST, CheckpointManifest, RunState
from pipeline.errors import UserError, printable

_NAMED = 5  # bad samples that are listed
_LONGEST = 4000  # characters of a line
_HASH_DIGITS = 12  # of a SHA-256, enough to tell two runs apart
_COLUMNS = ("step", "epochs", "samples", "written", "size", "processes", "ZeRO", "kept as")
Manifests = dict[int, CheckpointManifest | UserError]  # by step, ascending; the error keeps one from being read


def read_manifests(run_dir: Path) -> Manifests:
    """Read the manifests of all checkpoints."""
    manifests: Manifests = {}
    for step in saved_steps(run_dir):
        try:
            manifests[step] = CheckpointManifest.read(step_folder(run_dir, step))
        except UserError as error:
            manifests[step] = error
    return manifests


def table(run_dir: Path, manifests: Manifests) -> str:
    """One line per checkpoint, then the other folders beside them."""
    reasons = reasons_to_keep(manifests)
    rows: list[tuple[str, ...]] = [_COLUMNS]
    damaged = []
    for step, manifest in manifests.items():
        if isinstance(manifest, UserError):
            rows.append((str(step), *["?"] * (len(_COLUMNS) - 2), "damaged"))
            damaged.append(str(manifest))
        else:
            rows.append(_row(step_folder(run_dir, step), manifest, reasons[step]))
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row[:-1], widths)) + "  " + row[-1] for row in rows]
    return "\n".join(lines + damaged + _others(run_dir))


def details(folder: Path, manifest: CheckpointManifest) -> str:
    """The state of a checkpoint, one value per line."""
    state, data = manifest.state, manifest.state.data
    model = state.config["model"]
    switches = ", ".join(f"{name}={value}" for name, value in model["switches"].items())
    parameters = sum(math.prod(shape) for shape in manifest.shapes.values())
    others = {key: value for key, value in data.items() if key not in ("samples", "fingerprint") and value is not None}
    rest = "".join(f", {key} {value}" for key, value in others.items())
    shape = f"{model['num_classes']} classes, {model['image_size']} pixels"
    lines = [
        ("checkpoint", str(folder)),
        ("model", f"{model['name']}, {shape}" + (switches and f", {switches}")),
        ("parameters", f"{parameters:,} in {len(manifest.shapes)} tensors"),
        ("step", f"{state.step} ({state.step - state.skipped_steps} taken by the optimizer, {state.skipped_steps} skipped)"),
        ("samples seen", f"{state.samples:,}"),
        ("processes", f"{state.world_size}, ZeRO {state.zero_stage}"),
        ("config", state.config_hash[:_HASH_DIGITS]),
        ("data set", f"{data['samples']:,} samples, fingerprint {str(data['fingerprint'])[:_HASH_DIGITS]}{rest}"),
        ("best", _best_text(state) or "not evaluated yet"),
        ("bad samples", str(len(state.bad_samples))),
        *[("", f"{number}: {sentence}") for number, sentence in list(state.bad_samples.items())[:_NAMED]],
    ]
    if state.evaluation_due:
        lines.append(("evaluation", "of this step is due: the run was stopped before its end"))
    lines += [("files" if i == 0 else "", f"{file.name}  {size_text(file.bytes)}") for i, file in enumerate(manifest.files)]
    return "\n".join(f"{name:<14}{printable(text, _LONGEST)}" for name, text in lines)


def size_text(count: int) -> str:
    """A number of bytes in a readable unit."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


def _row(folder: Path, manifest: CheckpointManifest, reason: str) -> tuple[str, ...]:
    state = manifest.state
    try:
        written = time.strftime("%Y-%m-%d %H:%M", time.localtime((folder / MANIFEST).stat().st_mtime))
    except (OSError, OverflowError, ValueError):  # removed meanwhile, or a time beyond the calendar
        written = "?"
    epochs, size = f"{state.samples / state.data['samples']:.2f}", size_text(sum(file.bytes for file in manifest.files))
    return (str(state.step), epochs, f"{state.samples:,}", written, size, str(state.world_size), str(state.zero_stage), reason)


def reasons_to_keep(manifests: Mapping[int, CheckpointManifest | UserError]) -> dict[int, str]:
    """Step -> why retention keeps it, by the config of the newest readable checkpoint."""
    readable = [manifest for manifest in manifests.values() if isinstance(manifest, CheckpointManifest)]
    if not readable:
        return {}
    state = readable[-1].state
    rules, every = state.config["checkpoint"], state.config["checkpoint"]["keep_every_steps"]
    newest = list(manifests)[-rules["keep_last"] :]
    reasons = {}
    for step in manifests:
        found = [f"one of the last {rules['keep_last']}"] if step in newest else []
        if state.best and step == state.best["step"] and rules["keep_best"]:
            found.append(f"best ({_best_text(state)})")
        if every and step % every == 0:
            found.append(f"multiple of {every}")
        reasons[step] = ", ".join(found) or "goes with the next one"
    return reasons


def _best_text(state: RunState) -> str:
    best = state.best
    return f"{best['top1']:.2f} % top-1 of the {best['weights']} weights at step {best['step']}" if best else ""


def _others(run_dir: Path) -> list[str]:
    """Folders beside the checkpoints that are not checkpoints."""
    meanings = {
        ".saving-*": "is being saved, or was when the run ended",
        ".removing-*": "is being removed, or was when the run ended",
        ".replaced-*": "makes room for a newer one of its step, or did when the run ended",
        "damaged-*": "was found damaged and replaced",
    }
    found = ((path, meaning) for pattern, meaning in meanings.items() for path in sorted((run_dir / FOLDER).glob(pattern)))
    return [f"{path.name} {meaning}" for path, meaning in found]
