"""Write a source as a shard set (layout: :mod:`pipeline.shards.shard_set`).

Samples are shuffled across the whole set, so that each shard is a random sample of all classes. The order depends on the seed
only, each shard is written by one worker, and no time stamps are stored: the same source and seed give the same bytes for any
number of workers, machines and interruptions.

Shards are finished one by one (:mod:`data_prep.shard_writer`). The process that finds all of them finished writes the manifest,
which completes the set; an interrupted run, started again, writes only the missing shards.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from tqdm import tqdm

from data_prep import FEW_REJECTED, MAX_REJECTED
from data_prep.job import ShardJob, already_written, begin, describe_job, remove_traces
from data_prep.output import FolderLock, Output, needed_bytes
from data_prep.shard_writer import FinishedShard, read_record, record_file, shard_name, write_shard
from data_prep.sources import Source
from data_prep.workers import run_tasks
from pipeline.errors import UserError, counted
from pipeline.files import file_sha256, remove_leftovers, replace_file, replace_text
from pipeline.shards.image_checks import ImageRules
from pipeline.shards.manifest import MANIFEST, REENCODED, REJECTED, ShardManifest, SplitInfo

_HOPELESS = 1000  # rejected images of a source that is damaged as a whole: there is no use in a list of all


@dataclass(frozen=True)
class Share:
    """The shards of one task of a job array: ``task``, ``task + of``, ``task + 2 * of``, ..."""

    task: int = 0
    of: int = 1


def write_shards(
    source: Source,
    folder: str | Path | Output,
    split: str,
    samples_per_shard: int = 2000,
    workers: int = 1,
    seed: int = 0,
    rules: ImageRules = ImageRules(),  # noqa: B008 (frozen)
    max_rejected: float = MAX_REJECTED,
    share: Share = Share(),  # noqa: B008 (frozen)
    say: Callable[[str], object] = lambda text: None,
) -> SplitInfo | None:
    """Write one split. Idempotent: a second call with the same arguments writes nothing.

    Args:
        source: the images.
        folder: the shard set, a folder or another output; may already hold another split of the same data set.
        split: ``train`` or ``val``.
        samples_per_shard: images of the source per shard; the last shard, and shards with rejected images, hold fewer.
        workers: number of worker processes.
        seed: determines the order of the samples.
        rules: how images are checked and stored.
        max_rejected: fraction of the images that may be rejected; above 0, FEW_REJECTED may be in any set.
        share: the shards that this call writes.
        say: called with a message about shards that an earlier run finished.

    Returns:
        The split's manifest entry; None while shards of other tasks are missing.

    Raises:
        UserError: the output holds another data set, the disk is too small, or too many images were rejected.
    """
    output = folder if isinstance(folder, Output) else Output(folder)
    job = describe_job(source, output, split, samples_per_shard, seed, rules)
    output.folder.mkdir(parents=True, exist_ok=True)
    numbers = range(share.task, job.shards, share.of)
    with FolderLock(output.folder) as lock:
        lock.take_shards(split, numbers)

        def begun() -> SplitInfo | None:
            done = already_written(job)
            if done is None:
                begin(job)
            return done

        done = output.update(lock, begun)
        if done is None:
            _write_missing(job, lock, numbers, workers, max_rejected, say)
            done = output.update(lock, lambda: already_written(job) or _enter_into_manifest(job, max_rejected))
        if done is not None:
            remove_traces(job)
    return done


def _write_missing(
    job: ShardJob, lock: FolderLock, numbers: range, workers: int, max_rejected: float, say: Callable[[str], object]
) -> None:
    """Write the shards that are not finished yet, with a progress bar on a terminal."""
    output, there = job.output, job.output.sizes()
    finished = {number: read_record(output, there, job.split, number, job.digest) for number in range(job.shards)}
    written = sum(shard.info.bytes for shard in finished.values() if shard)
    rejected = [line for number in numbers if (shard := finished[number]) for line in shard.rejected]
    missing = [number for number in numbers if not finished[number]]
    at_once = min(workers, len(missing)) / max(job.shards, 1)
    output.check_space(needed_bytes(job.source, job.rules), written, at_once, estimate=job.rules.resize_short_side is not None)
    if len(missing) < len(numbers):
        kept = counted(len(numbers) - len(missing), f"finished {job.split} shard")
        say(f"{output.place}: {kept} of {len(numbers)} kept from an earlier run, {len(missing)} to write")
    for number in missing:
        _remove_leftovers(job, number)
    sizes = {number: min(job.samples_per_shard, len(job.source) - number * job.samples_per_shard) for number in numbers}
    done = sum(sizes[number] for number in numbers if finished[number])
    bar = tqdm(total=sum(sizes.values()), initial=done, desc=f"sharding {job.split}", unit=" images", disable=None)
    try:
        _stop_at_too_many(job, rejected, max_rejected, _HOPELESS)
        with bar, closing(run_tasks(write_shard, map(job.task, missing), min(workers, len(missing) or 1), bar)) as results:
            for rejected_of_shard in results:
                rejected += rejected_of_shard
                _stop_at_too_many(job, rejected, max_rejected, _HOPELESS)
        _stop_at_too_many(job, rejected, max_rejected)
    except TooManyRejected:
        # The images rejected so far, for the user to inspect.
        output.update(lock, lambda: _write_lists(job, _finished_shards(job)))
        raise


class TooManyRejected(UserError):
    """More images are rejected than ``--max-rejected`` allows."""


def _stop_at_too_many(job: ShardJob, rejected: list[dict], max_rejected: float, looked_for: int = 0) -> None:
    """Raise TooManyRejected unless so many may be rejected; up to ``looked_for`` the rest is looked at first, to name all at once."""
    count, images = len(rejected), len(job.source)
    share = int(max_rejected * images + 1e-9)  # 1e-9: 0.29 * 100 is 28.999999999999996
    allowed = max(FEW_REJECTED if max_rejected else 0, share)
    if count > max(allowed, looked_for):
        first = "; ".join([f"{line['file']}: {line['reason']}" for line in rejected[:5]] + ["..."] * (count > 5))
        raise TooManyRejected(
            f"{count:,} of the {images:,} {job.split} images of {job.source.path} cannot be stored, at most {allowed:,} allowed by "
            f"--max-rejected {max_rejected:g} ({first})",
            f"repair or remove those listed in {job.output.place / REJECTED} and start with an empty --output, or leave them out with "
            f"--max-rejected {math.ceil(1000 * count / images) / 1000:g}",
        )


def _remove_leftovers(job: ShardJob, number: int) -> None:
    """Remove temporary files of killed runs, and a record whose tar was changed."""
    record = record_file(job.output.folder, job.split, number)
    job.output.withdraw([record.name])
    for name in (shard_name(job.split, number, "tar"), shard_name(job.split, number, "idx"), record.name):
        remove_leftovers(job.output.folder / name)


def _finished_shards(job: ShardJob) -> list[FinishedShard]:
    sizes = job.output.sizes()
    shards = (read_record(job.output, sizes, job.split, number, job.digest) for number in range(job.shards))
    return [shard for shard in shards if shard]


def _enter_into_manifest(job: ShardJob, max_rejected: float) -> SplitInfo | None:
    """Add the split to the manifest if all its shards are finished. The caller holds the manifest lock."""
    shards = _finished_shards(job)
    if len(shards) < job.shards:
        return None
    _write_lists(job, shards)
    _stop_at_too_many(job, [line for shard in shards for line in shard.rejected], max_rejected)
    rows = np.concatenate([shard.rows for shard in shards])  # (samples,) of SAMPLE_DTYPE
    if not len(rows):
        raise UserError(
            f"none of the {len(job.source)} {job.split} images of {job.source.path} can be stored",
            "repair them",
        )
    output, folder = job.output, job.output.folder
    samples_file = folder / f"{job.split}-samples.npy"
    for path in (samples_file, *(folder / name for name in (MANIFEST, REJECTED, REENCODED))):
        remove_leftovers(path)
    replace_file(samples_file, lambda file: np.save(file, rows))
    samples_sha256 = file_sha256(samples_file)
    output.publish(samples_file.name, samples_sha256)
    info = SplitInfo(
        samples=len(rows),
        bytes=sum(shard.info.bytes for shard in shards),
        seed=job.seed,
        samples_per_shard=job.samples_per_shard,
        source={"path": job.source.path, **job.description},
        samples_per_class=np.bincount(rows["label"], minlength=len(job.classes)).tolist(),
        samples_file=samples_file.name,
        samples_sha256=samples_sha256,
        shards=[shard.info for shard in shards],
        rejected=sum(len(shard.rejected) for shard in shards),
        reencoded=sum(len(shard.reencoded) for shard in shards),
        formats=dict(sorted(sum((Counter(shard.formats) for shard in shards), Counter()).items())),
    )
    manifest = output.manifest() or ShardManifest(job.classes)
    if manifest.classes != job.classes:
        raise UserError(
            f"{output.place / MANIFEST} was written in the meantime with {len(manifest.classes)} classes that are not this split's "
            f"{len(job.classes)}",
            f"shard {job.split} again, which then uses the manifest's classes",
        )
    splits = {**manifest.splits, job.split: info}
    replace(manifest, splits=dict(sorted(splits.items()))).write(folder)
    output.publish(MANIFEST)
    return info


def _write_lists(job: ShardJob, shards: list[FinishedShard]) -> None:
    """Rewrite ``rejected.jsonl`` and ``reencoded.jsonl``: replace this split's lines and keep the other split's."""
    lines = {
        REJECTED: [line for shard in shards for line in shard.rejected],
        REENCODED: [line for shard in shards for line in shard.reencoded],
    }
    for name, new in lines.items():
        path = job.output.folder / name
        try:
            old = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
            kept = [line for line in old if line["split"] != job.split]
        except (ValueError, KeyError, TypeError):
            raise UserError(
                f"{job.output.place / name} is damaged: each line must be a JSON object with a split",
                "remove it and run the same command again",
            ) from None
        both = sorted(kept + new, key=lambda line: line["split"])  # stable: keeps the order of the shards within a split
        content = "".join(json.dumps(line) + "\n" for line in both)
        if content:
            replace_text(path, content)
            job.output.publish(name)
        else:
            job.output.withdraw([name])
