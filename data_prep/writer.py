"""Writes a source into a shard set (its layout: ``pipeline/data/shards.py``).

Samples are shuffled across the whole set, so each shard is a fair sample of all classes. The order comes from the
seed alone, each shard is written by one worker from beginning to end, and no time stamp goes in: the same source and
seed give the same bytes with any number of workers.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import multiprocessing
import os
import tarfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from tqdm import tqdm
from xxhash import xxh3_64_intdigest

from data_prep.sources import Source, SourceImage
from pipeline.data.jpeg import image_size
from pipeline.data.order import sample_at
from pipeline.data.shards import (
    MANIFEST,
    SAMPLE_DTYPE,
    Manifest,
    ShardInfo,
    ShardSet,
    SplitInfo,
    file_sha256,
    sample_key,
    shard_name,
)
from pipeline.errors import UserError
from pipeline.philox import Stream

TAR_BLOCK = 512


@dataclass(frozen=True)
class ShardJob:
    """Everything that decides the content of the shards."""

    source: Source
    folder: Path
    split: str
    classes: list[str]
    samples_per_shard: int
    seed: int

    @property
    def shards(self) -> int:
        return -(-len(self.source) // self.samples_per_shard)

    def description(self) -> dict:
        """Identifies the content: two jobs with the same description write the same bytes."""
        return {
            "kind": self.source.kind,
            "fingerprint": self.source.fingerprint(),
            "samples": len(self.source),
            "subset": self.source.subset,
            "samples_per_shard": self.samples_per_shard,
            "seed": self.seed,
        }


def write_shards(
    source: Source, folder: str | Path, split: str, samples_per_shard: int = 2000, workers: int = 1, seed: int = 0
) -> SplitInfo:
    """Write one split; a second call with the same arguments finds it done and writes nothing.

    Args:
        source: where the images come from.
        folder: the shard set; may hold another split of the same data set already.
        split: ``train`` or ``val``.
        samples_per_shard: the last shard may hold fewer.
        workers: processes.
        seed: of the order in which samples are written.

    Returns:
        The split's entry in the manifest.

    Raises:
        UserError: the folder holds another data set, or an image cannot be read.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    job = ShardJob(source, folder, split, _class_list(source, folder), samples_per_shard, seed)
    done = _already_written(job)
    if done is not None:
        return done
    in_progress = folder / f".{split}-in-progress"
    _refuse_foreign_files(job, in_progress)
    in_progress.write_text("this split is being written, or its writing was interrupted; its shards are not whole\n")

    parts, infos = _write_all(job, workers)
    rows = np.concatenate(parts)  # (samples,) of SAMPLE_DTYPE
    samples_file = folder / f"{split}-samples.npy"
    _replace(samples_file, lambda file: np.save(file, rows))
    info = SplitInfo(
        samples=len(source),
        bytes=sum(shard.bytes for shard in infos),
        seed=seed,
        samples_per_shard=samples_per_shard,
        source={"path": source.path, **job.description()},
        samples_per_class=np.bincount(rows["label"], minlength=len(job.classes)).tolist(),
        samples_file=samples_file.name,
        samples_sha256=file_sha256(samples_file),
        shards=infos,
    )
    _enter_into_manifest(job, info)
    in_progress.unlink()
    return info


def _enter_into_manifest(job: ShardJob, info: SplitInfo) -> None:
    """Add the split; another process may be adding the other split at the same time."""
    folder = os.open(job.folder, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        manifest = Manifest.read(job.folder) if (job.folder / MANIFEST).exists() else Manifest(job.classes)
        if manifest.classes != job.classes:
            raise UserError(
                f"{job.folder / MANIFEST} was written meanwhile with {len(manifest.classes)} classes that are not this split's "
                f"{len(job.classes)}: shard {job.split} again, now that the class list stands."
            )
        Manifest(manifest.classes, {**manifest.splits, job.split: info}).write(job.folder)
    finally:
        os.close(folder)  # and with it the lock


def _write_all(job: ShardJob, workers: int) -> tuple[list[np.ndarray], list[ShardInfo]]:
    """All shards, in order, with a progress bar when a terminal is attached."""
    rows, infos = [], []
    bar = tqdm(total=len(job.source), desc=f"sharding {job.split}", unit="images", disable=None)
    # Not fork: a caller may hold a DALI pipeline, whose threads do not exist in a forked child.
    context = multiprocessing.get_context("spawn")
    with bar, ProcessPoolExecutor(workers, mp_context=context) as pool:
        futures = [pool.submit(write_shard, shard_job(job, number), number) for number in range(job.shards)]
        try:
            for future in futures:
                shard_rows, info = future.result()
                rows.append(shard_rows)
                infos.append(info)
                bar.update(info.samples)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return rows, infos


def shard_job(job: ShardJob, number: int) -> ShardJob:
    """The job with only the samples of one shard, in the order of the tar: small enough to send to a worker."""
    first = number * job.samples_per_shard
    written = np.arange(first, min(first + job.samples_per_shard, len(job.source)))
    return replace(job, source=job.source.select(sample_at(written, 0, len(job.source), job.seed, Stream.SHARD_ORDER)))


def write_shard(job: ShardJob, number: int) -> tuple[np.ndarray, ShardInfo]:
    """Write one tar and its index under temporary names, then rename them.

    Args:
        job: from :func:`shard_job`.
        number: of the shard.

    Returns:
        (samples,) rows of ``SAMPLE_DTYPE``, and the manifest's entry.
    """
    label_of = {name: label for label, name in enumerate(job.classes)}
    rows = np.zeros(len(job.source), dtype=SAMPLE_DTYPE)
    index_lines: list[str] = []
    path = job.folder / shard_name(job.split, number, "tar")
    digest = hashlib.sha256()

    def write_tar(file: io.BufferedWriter) -> None:
        with tarfile.open(fileobj=_Hashing(file, digest), mode="w|", format=tarfile.USTAR_FORMAT) as tar:
            for i, row in enumerate(rows):
                image = job.source.read(i)
                label = label_of[image.class_name]
                width, height = _image_size(image, job.source.path)
                entries = _add_sample(tar, sample_key(number * job.samples_per_shard + i), image, label, width, height)
                row["offset"], row["bytes"] = entries[0][1], entries[0][2]
                row["checksum"] = xxh3_64_intdigest(image.data)
                row["shard"], row["label"], row["width"], row["height"] = number, label, width, height
                index_lines.append(" ".join(f"{suffix} {offset} {size} {name}" for suffix, offset, size, name in entries))

    _replace(path, write_tar)
    index_path = job.folder / shard_name(job.split, number, "idx")
    index = "\n".join([f"v1.2 {len(rows)}", *index_lines, ""]).encode()
    _replace(index_path, lambda file: file.write(index))
    return rows, ShardInfo(
        file=path.name,
        samples=len(rows),
        bytes=path.stat().st_size,
        sha256=digest.hexdigest(),
        idx_file=index_path.name,
        idx_bytes=len(index),
        idx_sha256=hashlib.sha256(index).hexdigest(),
    )


def _add_sample(
    tar: tarfile.TarFile, key: str, image: SourceImage, label: int, width: int, height: int
) -> list[tuple[str, int, int, str]]:
    """Append the sample's members.

    Returns:
        (suffix, offset of the data, bytes, member name) for each.
    """
    about = {"file": image.name, "wnid": image.class_name, "width": width, "height": height}
    members = {"jpg": image.data, "cls": str(label).encode(), "json": json.dumps(about).encode()}
    entries = []
    for suffix, data in members.items():
        member = tarfile.TarInfo(f"{key}.{suffix}")  # its time is 0 and its owner root: nothing of this run goes in
        member.size = len(data)
        entries.append((suffix, tar.offset + TAR_BLOCK, len(data), member.name))
        tar.addfile(member, io.BytesIO(data))
    return entries


def _image_size(image: SourceImage, source: str) -> tuple[int, int]:
    """(width, height) from the header.

    Raises:
        UserError: not a whole image; the loader would refuse it later.
    """
    try:
        return image_size(image.data)
    except ValueError as error:
        raise UserError(
            f"{source}: {image.name} ({len(image.data)} bytes) is {error}, a whole JPEG needed: replace or remove it."
        ) from None


def _class_list(source: Source, folder: Path) -> list[str]:
    """The classes in index order: those of the shard set if it exists, so that its splits agree."""
    if not (folder / MANIFEST).exists():
        return source.class_names
    classes = Manifest.read(folder).classes
    foreign = sorted(set(source.class_names) - set(classes))
    if foreign:
        raise UserError(
            f"{folder / MANIFEST} holds another data set: its {len(classes)} classes lack {len(foreign)} of the source's "
            f"{len(source.class_names)} ({', '.join(foreign[:3])}, ...): pass an empty --output folder."
        )
    return classes


def _already_written(job: ShardJob) -> SplitInfo | None:
    """The manifest's entry, if the split is there and is the one this job would write."""
    manifest = Manifest.read(job.folder) if (job.folder / MANIFEST).exists() else None
    if manifest is None or job.split not in manifest.splits:
        return None
    found, wanted = manifest.splits[job.split], job.description()
    differing = [key for key, value in wanted.items() if found.source.get(key) != value]
    if differing:
        key = differing[-1]
        raise UserError(
            f"{job.folder / MANIFEST} already holds another {job.split} set ({key} is {found.source.get(key)}, {wanted[key]} needed "
            f"for this source): pass an empty --output folder."
        )
    ShardSet(job.folder, job.split)  # all files there, or an error that says which is not
    return found


def _refuse_foreign_files(job: ShardJob, in_progress: Path) -> None:
    """Shards without a manifest are an unfinished set, to be begun anew, or somebody else's: those are not overwritten."""
    shards = list(job.folder.glob(f"{job.split}-*.tar"))
    if in_progress.exists():
        for leftover in shards:
            leftover.unlink()
            leftover.with_suffix(".idx").unlink(missing_ok=True)
    elif shards:
        raise UserError(
            f"{job.folder} already holds {len(shards)} {job.split} shards of another data set ({shards[0].name}, ...), "
            f"0 needed: pass an empty --output folder or remove them."
        )


def _replace(path: Path, write) -> None:
    """Write a file under a temporary name, flush it to disk, rename it: it is whole or not there."""
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


class _Hashing:
    """A file that updates a hash with all that is written to it."""

    def __init__(self, file, digest) -> None:
        self._file, self._digest = file, digest

    def write(self, data: bytes) -> int:
        self._digest.update(data)
        return self._file.write(data)
