"""Plan the writing of one split, and check that the output folder is empty or belongs to the same data set."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from data_prep.output import Output
from data_prep.set_checks import classes_with_images, untaught_classes
from data_prep.shard_writer import ShardTask, record_file, shard_name
from data_prep.sources import Source
from pipeline.errors import UserError, first_few
from pipeline.files import replace_file
from pipeline.shards.image_checks import ImageRules
from pipeline.shards.manifest import MANIFEST, ShardManifest, SplitInfo, in_progress_file
from pipeline.shards.shard_set import ShardSet
from pipeline.stream.order import sample_at
from pipeline.stream.philox import Stream


@dataclass(frozen=True)
class ShardJob:
    """The writing of one split of a source into a shard set."""

    source: Source
    output: Output
    split: str
    classes: list[str]  # in index order
    samples_per_shard: int
    seed: int
    rules: ImageRules
    description: dict  # identifies the content: two jobs with the same description write the same bytes

    @property
    def shards(self) -> int:
        return -(-len(self.source) // self.samples_per_shard)

    @property
    def digest(self) -> str:
        """SHA-256 of the description."""
        return hashlib.sha256(json.dumps(self.description, sort_keys=True).encode()).hexdigest()

    @property
    def in_progress(self) -> Path:
        """Marker file with the description; exists from the first shard until the manifest lists the split."""
        return in_progress_file(self.output.folder, self.split)

    def task(self, number: int) -> ShardTask:
        """The task of writing one shard, with only its own samples, in the order of the tar: small enough to pickle."""
        first = number * self.samples_per_shard
        written = np.arange(first, min(first + self.samples_per_shard, len(self.source)))
        samples = self.source.select(sample_at(written, 0, len(self.source), self.seed, Stream.SHARD_ORDER))
        return ShardTask(samples, self.output, self.split, number, self.classes, self.rules, self.digest)


def describe_job(source: Source, output: Output, split: str, samples_per_shard: int, seed: int, rules: ImageRules) -> ShardJob:
    """Plan the writing of one split.

    Raises:
        UserError: the folder is within the source, or holds shards with other classes.
    """
    _refuse_source_folder(source, output)
    rules = replace(rules, keep_formats=rules.keep_formats and source.keep_formats)
    classes = _class_list(source, output)
    _compare_with_other_split(source, output, split)
    description = {
        "kind": source.kind,
        "fingerprint": source.fingerprint(),
        "samples": len(source),
        "subset": source.subset,
        "samples_per_shard": samples_per_shard,
        "seed": seed,
        "subset_rule": source.subset_rule,
        **rules.description(),
    }
    return ShardJob(source, output, split, classes, samples_per_shard, seed, rules, description)


def already_written(job: ShardJob) -> SplitInfo | None:
    """The manifest entry if this job has been completed before; None if the manifest does not list the split.

    Raises:
        UserError: the split in the folder is another one, or its files are damaged.
    """
    place, manifest = job.output.place, job.output.manifest()
    if manifest is None or job.split not in manifest.splits:
        return None
    found = manifest.splits[job.split]
    difference = _difference(found.source, job.description)
    if difference:
        raise UserError(
            f"{place / MANIFEST} already holds another {job.split} set (for this source {difference})",
            "pass an empty --output folder",
        )
    ShardSet(place, job.split)  # raises if a file is missing or damaged
    return found


def begin(job: ShardJob) -> None:
    """Start writing the shard set, or resume after an interruption.

    Raises:
        UserError: there are shards that this job did not write.
    """
    output, place = job.output, job.output.place
    tars = _tars(output, job.split)
    # An interrupted run without a finished shard, of any job, may be overwritten; but without locks it may be going on.
    if not tars and (output.locks or not job.in_progress.exists()):
        replace_file(job.in_progress, lambda file: file.write(json.dumps(job.description, indent=1).encode()))
        output.publish(job.in_progress.name)
        return
    if not job.in_progress.exists():
        raise UserError(
            f"{place} already holds {len(tars)} {job.split} shards of another data set ({min(tars)}, ...)",
            "pass an empty --output folder or remove them",
        )
    try:
        difference = _difference(json.loads(job.in_progress.read_text()), job.description)
    except (ValueError, AttributeError):
        difference = "its description cannot be read"
    if difference:
        remedy = "run the command that began it, or pass an empty --output folder"
        if not tars:
            remedy += f", or remove {place / job.in_progress.name} if no process is writing there"
        raise UserError(f"{place} holds an unfinished {job.split} set of another run ({difference})", remedy)
    foreign = tars - {shard_name(job.split, number, "tar") for number in range(job.shards)}
    if foreign:
        raise UserError(f"{place} holds {min(foreign)}, which is not one of this set's {job.shards} shards", "remove it")


def _tars(output: Output, split: str) -> set[str]:
    return {name for name in output.sizes() if name.startswith(f"{split}-") and name.endswith(".tar")}


def remove_traces(job: ShardJob) -> None:
    """Remove records, marker and temporary files of killed runs, once the manifest lists the split."""
    folder = job.output.folder
    for pattern in (f".{job.split}-*.tmp", f"..{job.split}-*.tmp"):  # records are hidden files already
        for temporary in folder.glob(pattern):
            temporary.unlink(missing_ok=True)
    records = [record_file(folder, job.split, number).name for number in range(job.shards)]
    job.output.withdraw([*records, job.in_progress.name])


def _difference(found: dict, wanted: dict) -> str:
    """Describe the last key that differs; empty if none does."""
    differing = [key for key, value in wanted.items() if found.get(key) != value]
    return f"{differing[-1]} must be {wanted[differing[-1]]}, got {found.get(differing[-1])}" if differing else ""


def _refuse_source_folder(source: Source, output: Output) -> None:
    """Reject an output folder within the source: the next run would list its files as part of the source."""
    images, folder = Path(source.path).resolve(), output.folder.resolve()
    if images.is_dir() and (folder == images or images in folder.parents):
        option = "--output" if output.place == output.folder else "--scratch"
        raise UserError(f"{option} must be outside of the source {source.path}, got {output.folder}", "pass another one")


def refuse_untaught_classes(where: str | Path, train: set[str], val: set[str]) -> None:
    """Check that train has images of every class of val.

    Raises:
        UserError: a class of val has no image in train.
    """
    if wrong := untaught_classes(train, val):
        raise UserError(
            f"{where}: {wrong}, so that a model cannot learn them",
            "rename or remove them, or write one split with --split into a folder of its own",
        )


def _compare_with_other_split(source: Source, output: Output, split: str) -> None:
    manifest = output.manifest() or ShardManifest([])
    present = source.classes_with_images()
    for name, info in manifest.splits.items():
        if name != split:
            written = classes_with_images(manifest.classes, info.samples_per_class)
            train, val = (present, written) if split == "train" else (written, present)
            refuse_untaught_classes(f"{source.path} and the {name} split in {output.place}", train, val)


def _class_list(source: Source, output: Output) -> list[str]:
    """The classes in index order: those of the manifest if there is one, so that both splits have the same indices."""
    if (manifest := output.manifest()) is None:
        return source.class_names
    classes = manifest.classes
    foreign = sorted(set(source.class_names) - set(classes))
    if foreign:
        raise UserError(
            f"{output.place / MANIFEST} describes another data set: its {len(classes)} classes lack {len(foreign)} of the source's "
            f"{len(source.class_names)} ({first_few(foreign)})",
            "pass an empty --output folder",
        )
    return classes
