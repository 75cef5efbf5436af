"""Look at a run's checkpoints from outside; a training may go on meanwhile.

    python -m pipeline.checkpoint inspect RUN_DIR [--step N]
    python -m pipeline.checkpoint verify RUN_DIR [--step N]
    python -m pipeline.checkpoint export RUN_DIR --output FILE.safetensors [--weights ema] [--names authors] [--step N] [--force]

``verify`` ends with exit code 1 if anything is damaged.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from pipeline.checkpoint import overview
from pipeline.checkpoint.coverage import find_gaps
from pipeline.checkpoint.export import export
from pipeline.checkpoint.folder import Manifest, find_damage, find_step, saved_steps, step_folder
from pipeline.errors import UserError, run_command


def inspect(run_dir: Path, step: int | None) -> None:
    """Print a line for every checkpoint, and what one of them holds: that of ``step``, else the newest that can be read.

    Raises:
        UserError: there is none.
    """
    find_step(run_dir, step)
    manifests = overview.read_manifests(run_dir)
    print(overview.table(run_dir, manifests), flush=True)
    readable = [number for number, manifest in manifests.items() if isinstance(manifest, Manifest)]
    chosen = step if step is not None else max(readable, default=max(manifests))
    manifest = manifests[chosen]
    if isinstance(manifest, UserError):
        raise manifest
    print("\n" + overview.details(step_folder(run_dir, chosen), manifest))


def verify(run_dir: Path, step: int | None) -> int:
    """Compare every file of every checkpoint, or of one, with its checksum, and see that nothing is missing in them.

    Returns:
        The exit code: 1 if anything is damaged.

    Raises:
        UserError: there is no checkpoint.
    """
    newest = find_step(run_dir, step)
    damaged = []
    for number in saved_steps(run_dir) if step is None else [newest]:
        folder = step_folder(run_dir, number)
        problems = verify_one(folder)
        if problems and not folder.exists():
            print(f"{folder} was removed meanwhile: the run goes on")
        elif problems:
            damaged.append(folder)
            print("\n".join(f"  DAMAGED {sentence}" for sentence in problems), flush=True)
    if damaged:
        print(f"damaged: {', '.join(map(str, damaged))}")
        return 1
    print("whole")
    return 0


def verify_one(folder: Path) -> list[str]:
    """Print a line for each whole file of a checkpoint.

    Returns:
        A sentence for each thing that is damaged.
    """
    print(folder)
    try:
        manifest = Manifest.read(folder)
    except UserError as error:
        return [str(error)]
    problems = []
    for record in manifest.files:
        found = find_damage(folder, [record])
        problems += found
        if not found:
            print(f"  whole   {record.name}  {overview.size_text(record.bytes)}", flush=True)
    return problems or find_gaps(folder, manifest)  # the headers of damaged files say nothing


def main() -> int | None:
    parser = argparse.ArgumentParser(
        prog="python -m pipeline.checkpoint", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, what in (
        ("inspect", "show what is there"),
        ("verify", "compare every file with its checksum"),
        ("export", "write plain weights to a file"),
    ):
        command = commands.add_parser(name, help=what)
        command.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="a run's output_dir")
        default = "all" if name == "verify" else "the newest"
        command.add_argument("--step", type=int, help=f"of the checkpoint (default: {default})")
    command.add_argument("--output", type=Path, required=True, metavar="FILE", help="*.safetensors")
    command.add_argument("--weights", choices=("model", "ema"), default="model", help="default: model")
    command.add_argument(
        "--names", choices=("ours", "authors"), default="ours", help="of the tensors: this project's or the published code's"
    )
    command.add_argument("--force", action="store_true", help="replace a file that is there already")
    args = parser.parse_args()
    if args.command == "inspect":
        return inspect(args.run_dir, args.step)
    if args.command == "verify":
        return verify(args.run_dir, args.step)
    written = export(args.run_dir, args.output, args.step, args.weights, args.names, args.force)
    print(
        f"{args.output}: {written.model}, {written.weights} weights of step {written.step}, named as {'the authors do' if written.names == 'authors' else 'here'}"
    )
    return None


def command() -> None:
    """``python -m pipeline.checkpoint``."""
    run_command(main)


if __name__ == "__main__":
    command()
