"""Inspect, verify and export a run's checkpoints, also while the training is running.

    python -m pipeline.checkpoint inspect runs/pervit_t
    python -m pipeline.checkpoint verify runs/pervit_t/checkpoints/step-00001000
    python -m pipeline.checkpoint export runs/pervit_t --step best --output pervit_t.safetensors

RUN_DIR is a run's output_dir, or the folder of one of its checkpoints. COMMAND --help lists the options and shows examples.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from pipeline.checkpoint.folder import find_checkpoint, locate, parse_step, saved_steps, step_folder
from pipeline.checkpoint.manifest import CheckpointManifest, find_damage
from pipeline.command_line import command_parser, run_command
from pipeline.errors import UserError

_COMMANDS = {  # what it does, and arguments of two examples
    "inspect": ("show the checkpoints of a run", "", " --step best"),
    "verify": ("check every file against its checksum; the exit code is 1 if one is damaged", "", " --step 1000"),
    "export": (
        "write the weights to a safetensors file",
        " --output pervit_t.safetensors",
        " --step best --weights ema --output best.safetensors --force",
    ),
}


def inspect(path: Path, step: int | str | None) -> None:
    """Print a table of all checkpoints, and the contents of one: the one asked for, else the newest that is readable."""
    from pipeline.checkpoint import overview

    run_dir, chosen = find_checkpoint(path, step)
    manifests = overview.read_manifests(run_dir)
    print(overview.table(run_dir, manifests), flush=True)
    if step is None and locate(path)[1] is None:
        chosen = max((n for n, manifest in manifests.items() if isinstance(manifest, CheckpointManifest)), default=chosen)
    manifest = manifests[chosen]
    if isinstance(manifest, UserError):
        raise manifest
    print("\n" + overview.details(step_folder(run_dir, chosen), manifest))


def verify(path: Path, step: int | str | None) -> int:
    """Check the files of all checkpoints, or of one, against their checksums, and what they cover; returns the exit code."""
    run_dir, found = find_checkpoint(path, step)
    everything = step is None and locate(path)[1] is None
    damaged = []
    for number in saved_steps(run_dir) if everything else [found]:
        folder = step_folder(run_dir, number)
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
    from pipeline.checkpoint.overview import size_text
    from pipeline.checkpoint.parts import find_gaps

    print(folder)
    try:
        manifest = CheckpointManifest.read(folder)
    except UserError as error:
        return [str(error)]
    problems = []
    for record in manifest.files:
        found = find_damage(folder, [record])
        problems += found
        if not found:
            print(f"  intact  {record.name}  {size_text(record.bytes)}", flush=True)
    return problems or find_gaps(folder, manifest)  # a damaged file's header cannot be trusted


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
        add("--step", type=parse_step, metavar="N|best", help=f"which checkpoint (default: {default})")
    add("--output", type=Path, required=True, metavar="FILE", help="*.safetensors")
    weights = "default: ema if the run kept an average, else model; for --step best, those that scored best"
    add("--weights", choices=("model", "ema"), help=weights)
    names = "tensor names: this project's or the published code's"
    add("--names", choices=("ours", "authors"), default="ours", help=names)
    add("--force", action="store_true", help="replace an existing file")
    args = parser.parse_args()
    if args.command == "inspect":
        inspect(args.path, args.step)
        return None
    if args.command == "verify":
        return verify(args.path, args.step)
    from pipeline.checkpoint.weights import export

    written = export(args.path, args.output, args.step, args.weights, args.names, args.force)
    named = "the authors' names" if written.names == "authors" else "this project's names"
    print(f"{args.output}: {written.model}, {written.weights} weights of step {written.step}, {named}")
    return None


command = partial(run_command, main)

if __name__ == "__main__":
    command()
