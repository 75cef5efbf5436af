"""Export a trained model for other programs: with a model card and a checksum.

    pervit export runs/pervit_t --output pervit_t.onnx
    pervit export pervit_t.safetensors --output pervit_t.pt2
    pervit export runs/pervit_t --format timm --output pervit_t_timm --push-to-hub pervit_t
    pervit export --verify pervit_t.onnx

An export is read back and its scores are compared with the model's before it appears under its name. If --output has the format's
ending, it is a file, with FILE.md, the model card, and FILE.sha256 beside it; otherwise it is a folder with all of it. If the run
kept an average of its weights (train.ema_decay), the average is exported unless --weights says otherwise.
"""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.checkpoint.bucket import find_source
from pipeline.checkpoint.folder import find_checkpoint, parse_step, step_folder
from pipeline.checkpoint.manifest import CheckpointManifest
from pipeline.command_line import begins_anew, command_parser, run_command
from pipeline.errors import UserError
from pipeline.exporting import FORMATS, Format, Subject, Training, find_format, training_from_json
from pipeline.stores.place import place_argument
from pipeline.terminal import fitted

if TYPE_CHECKING:
    from pipeline.exporting.placing import Place
    from pipeline.inference.trained import Trained
    from pipeline.models.weights.exported import Kind
    from pipeline.models.weights.reference_names import Names

DAMAGED = 1  # exit code of --verify


@begins_anew
def main() -> int:
    parser = command_parser("pipeline.export", __doc__)
    add = parser.add_argument
    sources = "a run folder, one of its checkpoints, or an exported file"
    add("checkpoint", nargs="?", type=place_argument, metavar="CHECKPOINT", help=sources)
    formats = "; ".join(f"{each.name}: {each.what}" for each in FORMATS.values())
    add("--format", metavar="FORMAT", help=f"{formats} (default: by the ending of --output)")
    add("--output", type=Path, metavar="PATH", help="the file or folder to write")
    add("--step", type=parse_step, metavar="N|best", help="which checkpoint (default: the newest)")
    add("--weights", choices=("model", "ema"), help="default: ema if the run kept an average, else model")
    add("--precision", metavar="fp32|fp16", help="precision of the exported numbers; fp16 only for onnx (default: fp32)")
    add("--names", choices=("ours", "authors"), default="ours", help="tensor names in a safetensors file (default: ours)")
    add("--force", action="store_true", help="replace an existing export")
    hub = "upload the export to this repository of the Hugging Face hub (NAME or OWNER/NAME)"
    add("--push-to-hub", metavar="REPO", help=hub)
    add("--private", action="store_true", help="make the repository private if --push-to-hub creates it")
    add("--verify", type=Path, metavar="PATH", help="only compare an export with its checksums")
    return run(parser.parse_args())


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code: 1 if ``--verify`` found damage."""
    from pipeline.exporting.placing import check_hub, find_place, push, verify
    from pipeline.logs.console import stage

    if args.verify:
        with stage(f"reading {args.verify}"):
            problems = verify(args.verify)
        print("\n".join(f"DAMAGED {sentence}" for sentence in problems) if problems else "whole")
        return DAMAGED if problems else 0
    if args.output and args.format is None:
        args.format = next((form.name for form in FORMATS.values() if form.ending == args.output.suffix), None)
    for name in ("checkpoint", "format", "output"):
        if getattr(args, name) is None:
            given = name.upper() if name == "checkpoint" else f"--{name}"
            raise UserError(f"{given} is required", "see --help for examples")
    form = find_format(args.format)
    precision = check_options(args, form)
    if args.push_to_hub:
        check_hub(args.push_to_hub)
    args.checkpoint = find_source(args.checkpoint, args.step)
    place = find_place(args.output, form, args.force)
    with stage(f"loading PyTorch and {args.checkpoint}"):
        subject = read_subject(args.checkpoint, args.step, args.weights, args.names)
    with stage(f"exporting to {form.name}, reading it back and comparing scores"):
        size, line = export(subject, form, place, precision)
    its = subject.description
    made = f"{args.output}: {form.name} of {its.model}, {its.weights} weights of step {its.step}, {size / 1e6:.1f} MB"
    print(fitted(f"{made}\n{line}", sys.stdout))
    if args.push_to_hub:
        message = f"{its.model}, {form.name}, step {its.step}"
        with stage(f"uploading to {args.push_to_hub}"):
            pushed = push(place.files(), args.push_to_hub, message, args.private)
        print(f"pushed: {pushed}")
    return 0


def check_options(args: argparse.Namespace, form: Format) -> str:
    """The precision, checked with what else only some formats have."""
    precision = args.precision or form.precisions[0]
    if precision not in form.precisions:
        having = [each.name for each in FORMATS.values() if precision in each.precisions]
        remedy = f"leave it out, or pass --format {' or '.join(having)}" if having else "leave it out"
        problem = f"--precision is {precision}, but --format {form.name} has {' and '.join(form.precisions)} alone"
        raise UserError(problem, remedy)
    if args.private and not args.push_to_hub:
        raise UserError("--private requires --push-to-hub", "add --push-to-hub REPO, or leave it out")
    if args.names != "ours" and form.name != "safetensors":
        raise UserError(f"--names authors is for --format safetensors, not {form.name}", "leave it out")
    return precision


def read_subject(source: Path, step: int | str | None, weights: "Kind | None", names: "Names") -> Subject:
    """Read a trained model and what is known of its training; PyTorch, which takes seconds, is imported only now."""
    from pipeline.checkpoint.weights import describe
    from pipeline.inference.trained import read_trained

    trained = read_trained(source, step, weights)
    if trained.graph is not None:
        problem = f"{source} is a graph, whose weights are not those of a model"
        raise UserError(problem, "export the run, or its safetensors file")
    description = describe(trained.config, trained.classes, trained.step, trained.kind, names, trained.class_names)
    return Subject(trained.build_model(), description, training_of(source, step, trained))


def training_of(source: Path, step: int | str | None, trained: "Trained") -> Training:
    """What a run's folder, or an exported file, tells of the training of these weights."""
    from pipeline.exporting.card import without_folders
    from pipeline.models.timm.names import WEIGHTS, is_timm_folder
    from pipeline.models.weights.exported import SUFFIX, TRAINING, read_metadata
    from pipeline.runs.folder import read_run

    file = source / WEIGHTS if is_timm_folder(source) else source
    if file.suffix == SUFFIX and file.is_file():
        text = read_metadata(file).get(TRAINING)
        return training_from_json(text, str(source)) if text else Training()
    if is_timm_folder(source) or not source.is_dir():
        return Training()
    run_dir, found = find_checkpoint(source, step)
    state = CheckpointManifest.read(step_folder(run_dir, found)).state
    folder = read_run(run_dir)
    results = [row for row in folder.metrics.evaluations if row["step"] == found and row["weights"] == trained.kind]
    packages = folder.starts[-1].get("packages", {}) if folder.starts else {}
    return Training(
        run=folder.name,
        samples=state.samples,
        data={"name": Path(state.config["data"]["path"]).name, **state.data},
        world_size=state.world_size,
        zero_stage=state.zero_stage,
        results=results[-1:],
        versions={str(name): str(version) for name, version in packages.items()} if isinstance(packages, dict) else {},
        config=without_folders(trained.config.model_dump(mode="json")),
    )


def export(subject: Subject, form: Format, place: "Place", precision: str) -> tuple[int, str]:
    """Export to a hidden folder, compare, write card and checksums, and publish; the size in bytes, and what was compared."""
    from pipeline.exporting.card import write_card

    parameters = sum(tensor.numel() * tensor.element_size() for tensor in subject.model.state_dict().values())
    with place.staged(needed=2 * parameters) as (hidden, path):
        facts = form.function("export")(subject, path, precision)
        size = sum(file.stat().st_size for file in hidden.rglob("*") if file.is_file())
        snippet = "\n".join(form.function("loading")(subject, place.loaded))
        place.publish(hidden, write_card(subject, facts, snippet, size, form.library if place.folder else None))
    return size, facts.get("Checked", "")


if __name__ == "__main__":
    run_command(main)
