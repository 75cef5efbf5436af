"""Writes a source into a shard set (its layout: ``pipeline/data/shards.py``).

Samples are shuffled across the whole set, so each shard is a fair sample of all classes. The order comes from the
seed alone, each shard is written by one worker from beginning to end, and no time stamp goes in: the same source and
seed give the same bytes with any number of workers, machines and interruptions.

Shards are finished one by one (``data_prep/shard_writer.py``). Whichever process finds all of them finished writes the
manifest, which is what makes them a shard set; one that was cut off writes only what is missing when it is run again.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from data_prep import MAX_REJECTED, counted
from data_prep.folder_lock import FolderLock
from data_prep.job import ShardJob, already_written, begin, describe_job, remove_traces
from data_prep.shard_writer import FinishedShard, read_record, record_file, write_shard
from data_prep.sources import Source
from data_prep.space import check_space_for_shards, needed_bytes
from data_prep.workers import run_tasks
from pipeline.data.image_checks import ImageRules
from pipeline.data.manifest import MANIFEST, REENCODED, REJECTED, ShardManifest, SplitInfo, file_sha256, shard_name
from pipeline.errors import UserError
from pipeline.files import remove_leftovers, replace_file, replace_text


@dataclass(frozen=True)
class Share:
    """The shards of one task of a job array: every ``of``-th, beginning with number ``task``."""

    task: int = 0
    of: int = 1


def write_shards(
    source: Source,
    folder: str | Path,
    split: str,
    samples_per_shard: int = 2000,
    workers: int = 1,
    seed: int = 0,
    rules: ImageRules = ImageRules(),  # noqa: B008 (frozen)
    max_rejected: float = MAX_REJECTED,
    share: Share = Share(),  # noqa: B008 (frozen)
    say: Callable[[str], object] = lambda text: None,
) -> SplitInfo | None:
    """Write one split; a second call with the same arguments finds it done and writes nothing.

    Args:
        source: where the images come from.
        folder: the shard set; may hold another split of the same data set already.
        split: ``train`` or ``val``.
        samples_per_shard: images of the source per shard; the last shard may hold fewer, as do those with rejected images.
        workers: processes.
        seed: of the order in which samples are written.
        rules: how images are checked and stored.
        max_rejected: share of the images that may be undecodable.
        share: which shards this call writes.
        say: gets a sentence about the shards that an earlier run finished.

    Returns:
        The split's entry in the manifest; None while shards of other tasks are missing.

    Raises:
        UserError: the folder holds another data set, the disk is too small, or too many images were rejected.
    """
    folder = Path(folder)
    job = describe_job(source, folder, split, samples_per_shard, seed, rules)
    folder.mkdir(parents=True, exist_ok=True)
    numbers = range(share.task, job.shards, share.of)
    with FolderLock(folder) as lock:
        lock.take_shards(split, numbers)
        with lock.manifest():
            done = already_written(job)
            if done is None:
                begin(job)
        if done is None:
            _write_missing(job, lock, numbers, workers, max_rejected, say)
            with lock.manifest():
                done = already_written(job) or _enter_into_manifest(job, max_rejected)
        if done is not None:
            remove_traces(job)
    return done


def _write_missing(
    job: ShardJob, lock: FolderLock, numbers: range, workers: int, max_rejected: float, say: Callable[[str], object]
) -> None:
    """Write those of the shards that are not finished yet, with a progress bar when a terminal is attached."""
    finished = {number: read_record(job.folder, job.split, number, job.digest) for number in range(job.shards)}
    written = sum(shard.info.bytes for shard in finished.values() if shard)
    check_space_for_shards(
        job.folder, needed_bytes(job.source, job.rules), written, estimate=job.rules.resize_short_side is not None
    )
    rejected = [line for number in numbers if (shard := finished[number]) for line in shard.rejected]
    missing = [number for number in numbers if not finished[number]]
    if len(missing) < len(numbers):
        kept = counted(len(numbers) - len(missing), f"finished {job.split} shard")
        say(f"{job.folder}: {kept} of {len(numbers)} kept from an earlier run, {len(missing)} to write")
    for number in missing:
        _remove_leftovers(job, number)
    sizes = {number: min(job.samples_per_shard, len(job.source) - number * job.samples_per_shard) for number in numbers}
    done = sum(sizes[number] for number in numbers if finished[number])
    bar = tqdm(total=sum(sizes.values()), initial=done, desc=f"sharding {job.split}", unit=" images", disable=None)
    try:
        _stop_at_too_many(job, rejected, max_rejected)
        with bar, closing(run_tasks(write_shard, map(job.task, missing), min(workers, len(missing) or 1), bar)) as results:
            for rejected_of_shard in results:
                rejected += rejected_of_shard
                _stop_at_too_many(job, rejected, max_rejected)
    except TooManyRejected:
        with lock.manifest():
            _write_lists(job, _finished_shards(job))  # what was found up to here, for the user to look at
        raise


class TooManyRejected(UserError):
    """More images than ``--max-rejected`` allows cannot be decoded."""


def _stop_at_too_many(job: ShardJob, rejected: list[dict], max_rejected: float) -> None:
    allowed = int(max_rejected * len(job.source) + 1e-9)  # 0.29 x 100 is 28.999999999999996
    if len(rejected) > allowed:
        first = "; ".join(f"{line['file']}: {line['reason']}" for line in rejected[:3])
        raise TooManyRejected(
            f"{len(rejected)} of the {len(job.source)} {job.split} images of {job.source.path} cannot be stored, at most {allowed} "
            f"allowed by --max-rejected {max_rejected:g} ({first}): allow more, or mend those listed in {job.folder / REJECTED} and begin in an empty folder."
        )


def _remove_leftovers(job: ShardJob, number: int) -> None:
    """Temporary files of killed runs, and a record whose tar was changed."""
    record = record_file(job.folder, job.split, number)
    record.unlink(missing_ok=True)
    for name in (shard_name(job.split, number, "tar"), shard_name(job.split, number, "idx"), record.name):
        remove_leftovers(job.folder / name)


def _finished_shards(job: ShardJob) -> list[FinishedShard]:
    shards = (read_record(job.folder, job.split, number, job.digest) for number in range(job.shards))
    return [shard for shard in shards if shard]


def _enter_into_manifest(job: ShardJob, max_rejected: float) -> SplitInfo | None:
    """Add the split once all its shards are finished; another process may be adding the other split at the same time."""
    shards = _finished_shards(job)
    if len(shards) < job.shards:
        return None
    _write_lists(job, shards)
    _stop_at_too_many(job, [line for shard in shards for line in shard.rejected], max_rejected)
    rows = np.concatenate([shard.rows for shard in shards])  # (samples,) of SAMPLE_DTYPE
    if not len(rows):
        raise UserError(
            f"none of the {len(job.source)} {job.split} images of {job.source.path} can be stored, 1 needed: mend them."
        )
    samples_file = job.folder / f"{job.split}-samples.npy"
    for path in (samples_file, *(job.folder / name for name in (MANIFEST, REJECTED, REENCODED))):
        remove_leftovers(path)
    replace_file(samples_file, lambda file: np.save(file, rows))
    info = SplitInfo(
        samples=len(rows),
        bytes=sum(shard.info.bytes for shard in shards),
        seed=job.seed,
        samples_per_shard=job.samples_per_shard,
        source={"path": job.source.path, **job.description},
        samples_per_class=np.bincount(rows["label"], minlength=len(job.classes)).tolist(),
        samples_file=samples_file.name,
        samples_sha256=file_sha256(samples_file),
        shards=[shard.info for shard in shards],
        rejected=sum(len(shard.rejected) for shard in shards),
        reencoded=sum(len(shard.reencoded) for shard in shards),
    )
    manifest = ShardManifest.read(job.folder) if (job.folder / MANIFEST).exists() else ShardManifest(job.classes)
    if manifest.classes != job.classes:
        raise UserError(
            f"{job.folder / MANIFEST} was written meanwhile with {len(manifest.classes)} classes that are not this split's "
            f"{len(job.classes)}: shard {job.split} again, now that the class list stands."
        )
    splits = {**manifest.splits, job.split: info}
    ShardManifest(manifest.classes, dict(sorted(splits.items()))).write(job.folder)
    return info


def _write_lists(job: ShardJob, shards: list[FinishedShard]) -> None:
    """Bring ``rejected.jsonl`` and ``reencoded.jsonl`` up to date: the other split's lines stay, those of this one are new."""
    lines = {
        REJECTED: [line for shard in shards for line in shard.rejected],
        REENCODED: [line for shard in shards for line in shard.reencoded],
    }
    for name, new in lines.items():
        path = job.folder / name
        try:
            old = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
            kept = [line for line in old if line["split"] != job.split]
        except (ValueError, KeyError, TypeError):
            raise UserError(
                f"{path} is damaged, a JSON object with a split on each line needed: remove it and run again."
            ) from None
        both = sorted(kept + new, key=lambda line: line["split"])  # stable: within a split in the order of the shards
        content = "".join(json.dumps(line) + "\n" for line in both)
        if content:
            replace_text(path, content)
        else:
            path.unlink(missing_ok=True)
