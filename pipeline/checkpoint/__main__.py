"""Inspect and verify a run's checkpoints: also while the training is running.

    pervit checkpoint inspect runs/pervit_t
    pervit checkpoint verify runs/pervit_t/checkpoints/step-00001000

RUN_DIR is a run's output_dir, or the folder of one of its checkpoints. COMMAND --help lists the options and shows examples. `pervit export`
writes a checkpoint's weights to a file.
"""

import math
import sys
import time
from contextlib import suppress
from pathlib import Path

from pipeline.checkpoint import folder as folders
from pipeline.checkpoint.manifest import MANIFEST, CheckpointManifest, find_damage
from pipeline.command_line import command_parser, run_command
from pipeline.errors import UserError, printable, size_text
from pipeline.terminal import Stage, fitted

_NAMED = 5  # bad samples that are listed
_LONGEST = 4000  # characters of a line
_HASH_DIGITS = 12  # of a SHA-256, enough to tell two runs apart
_COLUMNS = ("step", "epochs", "samples", "written", "size", "processes", "ZeRO", "kept as")
_COMMANDS = {  # what it does, and arguments of two examples
    "inspect": ("show the checkpoints of a run", "", " --step best"),
    "verify": ("check every file against its checksum; the exit code is 1 if one is damaged", "", " --step 1000"),
}


def inspect(path: Path, step: int | str | None) -> None:
    """Print a table of all checkpoints, and the contents of one: the one asked for, else the newest that is readable."""
    run_dir, chosen = folders.find_checkpoint(path, step)
    manifests = folders.read_manifests(run_dir)
    print(fitted(table(run_dir, manifests), sys.stdout), flush=True)
    if step is None and folders.locate(path)[1] is None:
        newest = folders.newest_readable(manifests)
        chosen = newest.state.step if newest else chosen
    manifest = manifests[chosen]
    if isinstance(manifest, UserError):
        raise manifest
    print(fitted("\n" + details(folders.step_folder(run_dir, chosen), manifest), sys.stdout))


def table(run_dir: Path, manifests: folders.Manifests) -> str:
    """One line per checkpoint, then the other folders beside them."""
    reasons = folders.reasons_to_keep(manifests)
    rows: list[tuple[str, ...]] = [_COLUMNS]
    damaged = []
    for step, manifest in manifests.items():
        if isinstance(manifest, UserError):
            rows.append((str(step), *["?"] * (len(_COLUMNS) - 2), "damaged"))
            damaged.append(str(manifest))
        else:
            rows.append(_row(folders.step_folder(run_dir, step), manifest, reasons[step]))
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row[:-1], widths)) + "  " + row[-1] for row in rows]
    return "\n".join(lines + damaged + _others(run_dir))


def _row(folder: Path, manifest: CheckpointManifest, reason: str) -> tuple[str, ...]:
    state, written = manifest.state, "?"
    with suppress(OSError, OverflowError, ValueError):  # removed meanwhile, or a time beyond the calendar
        written = time.strftime("%Y-%m-%d %H:%M", time.localtime((folder / MANIFEST).stat().st_mtime))
    epochs, size = f"{state.samples / state.data['samples']:.2f}", size_text(sum(file.bytes for file in manifest.files))
    return (str(state.step), epochs, f"{state.samples:,}", written, size, str(state.world_size), str(state.zero_stage), reason)


def _others(run_dir: Path) -> list[str]:
    """Folders beside the checkpoints that are not checkpoints."""
    meanings = {
        ".saving-*": "is being saved, or was when the run ended",
        ".removing-*": "is being removed, or was when the run ended",
        ".replaced-*": "makes room for a newer one of its step, or did when the run ended",
        "damaged-*": "was found damaged and replaced",
    }
    folder = run_dir / folders.FOLDER
    return [f"{path.name} {meaning}" for pattern, meaning in meanings.items() for path in sorted(folder.glob(pattern))]


def details(folder: Path, manifest: CheckpointManifest) -> str:
    """The state of a checkpoint, one value per line."""
    state, data = manifest.state, manifest.state.data
    model = state.config["model"]
    switches = ", ".join(f"{name}={value}" for name, value in {**model["switches"], **model.get("options", {})}.items())
    parameters = sum(math.prod(shape) for shape in manifest.shapes.values())
    rest = [f", {key} {value}" for key, value in data.items() if key not in ("samples", "fingerprint") and value is not None]
    shape = f"{model['num_classes']} classes, {model['image_size']} pixels"
    lines = [
        ("checkpoint", str(folder)),
        ("model", f"{model['name']}, {shape}" + (switches and f", {switches}")),
        ("parameters", f"{parameters:,} in {len(manifest.shapes)} tensors"),
        ("step", f"{state.step} ({state.step - state.skipped_steps} taken by the optimizer, {state.skipped_steps} skipped)"),
        ("samples seen", f"{state.samples:,}"),
        ("processes", f"{state.world_size}, ZeRO {state.zero_stage}"),
        ("config", state.config_hash[:_HASH_DIGITS]),
        ("data set", f"{data['samples']:,} samples, fingerprint {data['fingerprint'][:_HASH_DIGITS]}{''.join(rest)}"),
        ("best", folders.best_text(state) or "not evaluated yet"),
        ("bad samples", str(len(state.bad_samples))),
        *[("", f"{number}: {sentence}") for number, sentence in list(state.bad_samples.items())[:_NAMED]],
    ]
    if state.evaluation_due:
        lines.append(("evaluation", "of this step is due: the run was stopped before its end"))
    lines += [("files" if i == 0 else "", f"{file.name}  {size_text(file.bytes)}") for i, file in enumerate(manifest.files)]
    return "\n".join(f"{name:<14}{printable(text, _LONGEST)}" for name, text in lines)


def verify(path: Path, step: int | str | None) -> int:
    """Check the files of all checkpoints, or of one, against their checksums, and what they cover; returns the exit code."""
    run_dir, found = folders.find_checkpoint(path, step)
    everything = step is None and folders.locate(path)[1] is None
    damaged = []
    for number in folders.saved_steps(run_dir) if everything else [found]:
        folder = folders.step_folder(run_dir, number)
        problems = verify_one(folder)
        if problems and not folder.exists():
            print(f"{folder} was removed meanwhile: the run continues")
        elif problems:
            damaged.append(folder)
            print("\n".join(f"  DAMAGED {sentence}" for sentence in problems), flush=True)
    if damaged:
        print(f"damaged: {', '.join(map(str, damaged))}")
        return 1
    print("intact")
    return 0


def verify_one(folder: Path) -> list[str]:
    """Print a line for each intact file of a checkpoint; returns a sentence for each defect."""
    from pipeline.checkpoint.parts import find_gaps, find_not_finite

    print(folder)
    try:
        manifest = CheckpointManifest.read(folder)
    except UserError as error:
        return [str(error)]
    problems = []
    for record in manifest.files:
        with Stage(f"reading {record.name}, {size_text(record.bytes)}"):
            found = find_damage(folder, [record])
        problems += found
        if not found:
            print(f"  intact  {record.name}  {size_text(record.bytes)}", flush=True)
    # A damaged file's header cannot be trusted.
    return problems or find_gaps(folder, manifest) or find_not_finite(folder, manifest.files)


def main() -> int | None:
    parser = command_parser("pipeline.checkpoint", __doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (what, *arguments) in _COMMANDS.items():
        examples = "".join(f"\n  {parser.prog} {name} runs/pervit_t{words}" for words in arguments)
        description, form = f"{what[0].upper()}{what[1:]}.", parser.formatter_class
        add = commands.add_parser(
            name, help=what, description=description, epilog=f"examples:{examples}", formatter_class=form
        ).add_argument
        add("path", type=Path, metavar="RUN_DIR", help="a run's output_dir, or the folder of one of its checkpoints")
        default = "all" if name == "verify" else "the newest"
        add("--step", type=folders.parse_step, metavar="N|best", help=f"which checkpoint (default: {default})")
    args = parser.parse_args()
    if args.command == "inspect":
        inspect(args.path, args.step)
        return None
    return verify(args.path, args.step)


if __name__ == "__main__":
    run_command(main)
