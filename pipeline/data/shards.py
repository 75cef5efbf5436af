"""The shard set on disk: what is in a folder that ``data_prep/shard_imagenet.py`` wrote, and how to read it.

::

    DIR/manifest.json          classes in index order; per split: counts, sizes, checksums, seed, source
    DIR/train-000000.tar       WebDataset members KEY.jpg, KEY.cls, KEY.json
    DIR/train-000000.idx       the tar's index, as DALI's readers.webdataset and wds2idx have it
    DIR/train-samples.npy      32 bytes a sample: where its JPEG lies, its checksum, label, width and height
    DIR/rejected.jsonl         images of the source that nothing can decode, with reasons; not there when there are none
    DIR/reencoded.jsonl        images that were encoded anew, with reasons; not there when there are none

Ranks of a node share ``*-samples.npy`` and the tars through the page cache: the first is memory-mapped, the
others are read with ``pread``. (Not mapped: a tar that is truncated under a running job would then end it
with SIGBUS instead of an error that names the file.)
"""

from __future__ import annotations

import errno
import json
import os
import resource
import stat
import threading
from itertools import accumulate
from pathlib import Path

import numpy as np
from xxhash import xxh3_64_intdigest

from pipeline.data.manifest import MANIFEST, SHARDER, Manifest, file_sha256, in_progress_file, sample_key
from pipeline.data.sample_table import find_out_of_range, map_sample_table
from pipeline.errors import UserError
from pipeline.files import open_regular

_BLOCK = 512  # bytes: headers and data of a tar begin at multiples of it


class DamagedSample(Exception):
    """A sample that cannot be had; the message names the tar, the key and what was found."""

    def __init__(self, index: int, message: str) -> None:
        super().__init__(message)
        self.index = index


class ShardSet:
    """One split of a shard set, opened for reading.

    Args:
        folder: the folder that holds ``manifest.json``, or one that holds a folder named ``split`` that does.
        split: ``train`` or ``val``.

    Attributes:
        samples: (n,) memory-mapped array of ``SAMPLE_DTYPE``.
        classes: class names in index order.

    Raises:
        UserError: folder, manifest, split, tar or index missing, sizes that disagree with the manifest, or rows of the sample
            table that point at nothing.
    """

    def __init__(self, folder: str | Path, split: str) -> None:
        self.folder = _find(Path(folder), split)
        self.split = split
        manifest = Manifest.read(self.folder)
        if split not in manifest.splits:
            raise UserError(
                f"{self.folder / MANIFEST} has the splits {sorted(manifest.splits)}, {split!r} needed: {_advice(self.folder, split)}."
            )
        self.classes = manifest.classes
        self.info = manifest.splits[split]
        for shard in self.info.shards:
            self._check_size(shard.file, shard.bytes, "shard again into an empty folder, or copy the file again")
            self._check_size(shard.idx_file, shard.idx_bytes, f"rebuild it with wds2idx {shard.file} {shard.idx_file}")
        self.samples = self._map_samples()
        self._first_of_shard = [0, *accumulate(shard.samples for shard in self.info.shards)]  # sample numbers
        self._descriptors: dict[int, int] = {}
        self._opening = threading.Lock()
        _allow_open_files(len(self.info.shards))

    def __len__(self) -> int:
        return len(self.samples)

    def identity(self) -> dict:
        """Plain values that tell this split's content and order from any other's, wherever the files lie."""
        source = self.info.source
        stored = {key: source.get(key) for key in ("resize_short_side", "quality")}
        return {"fingerprint": source["fingerprint"], "samples": len(self), "shard_seed": self.info.seed, **stored}

    @property
    def subset(self) -> float:
        """Which share of the source's images was written (``--subset``)."""
        return self.info.source.get("subset", 1.0)

    def key(self, index: int) -> str:
        """The WebDataset key of sample ``index``."""
        shard = int(self.samples["shard"][index])
        return sample_key(shard, int(index) - self._first_of_shard[shard])

    def read_jpegs(self, indices: np.ndarray) -> list[np.ndarray]:
        """The encoded images of some samples: :meth:`read` for each."""
        return [self.read(int(index)) for index in indices]

    def read(self, index: int) -> np.ndarray:
        """The encoded image of one sample, exactly as it was written; threads may call this at the same time.

        A failed read is tried once more; where the file was replaced meanwhile, from the new one.

        Returns:
            (bytes,) uint8.

        Raises:
            DamagedSample: the tar is gone, ends early, cannot be read or holds other bytes there.
            UserError: the system lets this process open no more files.
        """
        try:
            return self._read(index)
        except DamagedSample:
            self._forget_if_replaced(int(self.samples["shard"][index]))
            return self._read(index)

    def will_need(self, runs: list[tuple[int, int]]) -> None:
        """Ask the system to fetch runs of neighbouring samples into the page cache; returns at once.

        Args:
            runs: (first sample, number of samples) of each; a run that reaches past the end of the set ends there.
        """
        for first, count in runs:
            samples = self.samples[first : first + count]
            for shard in np.unique(samples["shard"]):
                inside = samples[samples["shard"] == shard]
                begin, end = int(inside["offset"][0]), int(inside["offset"][-1]) + int(inside["bytes"][-1])
                try:
                    os.posix_fadvise(self._descriptor(int(shard)), begin, end - begin, os.POSIX_FADV_WILLNEED)
                except OSError:
                    pass  # advice only: the read itself will say what is wrong

    def damaged(self, index: int, reason: str) -> DamagedSample:
        """The error that says what is wrong with a sample."""
        path = self.folder / self.info.shards[int(self.samples["shard"][index])].file
        original = self._original(index)
        name = f" (it was {original} in the source)" if original else ""
        return DamagedSample(int(index), f"{path}: sample {self.key(index)} {reason}{name}")

    def _original(self, index: int) -> str:
        """The name that an image had in the source, if the tar still has it beside the image: after the label, as JSON."""
        sample = self.samples[index]
        end = int(sample["offset"]) + -(-int(sample["bytes"]) // _BLOCK) * _BLOCK
        try:
            after = os.pread(self._descriptor(int(sample["shard"])), 16 * _BLOCK, end)  # header and data of .cls, then of .json
            header, data = after[2 * _BLOCK : 3 * _BLOCK], after[3 * _BLOCK :]
            if not header.startswith(f"{self.key(index)}.json\0".encode()):
                return ""
            original = json.loads(data[: int(header[124:135], 8)])["file"]
        except (OSError, ValueError, KeyError, TypeError):
            return ""
        return original if isinstance(original, str) and original.isprintable() else ""

    def _read(self, index: int) -> np.ndarray:
        sample = self.samples[index]
        size, offset, shard = int(sample["bytes"]), int(sample["offset"]), int(sample["shard"])
        try:
            data = os.pread(self._descriptor(shard), size, offset)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):  # says nothing about the sample
                raise UserError(f"{self.folder}: {error.strerror}: raise `ulimit -n`, or use larger shards.") from None
            raise self.damaged(index, f"cannot be read ({error.strerror})") from None
        if len(data) != size:
            raise self.damaged(index, f"is cut off: {len(data)} of its {size} bytes are there, at offset {offset}")
        checksum = xxh3_64_intdigest(data)
        if checksum != sample["checksum"]:
            raise self.damaged(
                index, f"was changed after it was written: checksum {checksum:016x}, {int(sample['checksum']):016x} needed"
            )
        return np.frombuffer(data, dtype=np.uint8)

    def _descriptor(self, shard: int) -> int:
        with self._opening:
            if shard not in self._descriptors:
                self._descriptors[shard] = open_regular(self.folder / self.info.shards[shard].file)
            return self._descriptors[shard]

    def _forget_if_replaced(self, shard: int) -> None:
        """Let the next read open the file anew if its name has gone to another one."""
        with self._opening:
            descriptor = self._descriptors.get(shard)
            if descriptor is None:
                return
            try:
                same = os.path.samestat(os.fstat(descriptor), os.stat(self.folder / self.info.shards[shard].file))
            except OSError:
                same = False
            if not same:
                del self._descriptors[shard]  # not closed: another thread may be reading from it

    def _check_size(self, name: str, expected: int, remedy: str) -> None:
        path = self.folder / name
        try:
            found = path.stat()
        except FileNotFoundError:
            raise UserError(f"{path} is missing, {expected} bytes needed by {MANIFEST}: {remedy}.") from None
        if not stat.S_ISREG(found.st_mode):
            raise UserError(f"{path} is not a regular file, one of {expected} bytes needed by {MANIFEST}: {remedy}.")
        if found.st_size != expected:
            raise UserError(f"{path} has {found.st_size} bytes, {expected} needed by {MANIFEST}: {remedy}.")

    def _map_samples(self) -> np.ndarray:
        path, needed = self.folder / self.info.samples_file, f"{self.info.samples} samples needed by {MANIFEST}"
        remedy = "restore it, or shard again into an empty folder"
        try:
            if file_sha256(path) != self.info.samples_sha256:  # 41 MB for ImageNet, and every label and crop depends on it
                raise ValueError("its checksum is not the one in the manifest")
            samples = map_sample_table(path, self.info.samples)
            wrong = find_out_of_range(samples, [shard.bytes for shard in self.info.shards], len(self.classes))
        except FileNotFoundError:
            raise UserError(f"{path} is missing, {needed}: {remedy}.") from None
        except ValueError as error:
            raise UserError(f"{path} is damaged ({error}), {needed}: {remedy}.") from None
        if wrong:
            raise UserError(f"{path} does not fit {MANIFEST}: {wrong} needed: {remedy}.")
        return samples


def _advice(folder: Path, split: str) -> str:
    """How a split that the manifest does not list can be had."""
    if split not in ("train", "val"):
        return f"take one of these; other images with labels are sharded into a folder of their own, {SHARDER} --split val"
    if in_progress_file(folder, split).exists():
        return "its sharding was not finished, give the same sharding command again"
    if split == "val":
        return f"shard again into an empty folder with --val-share 0.1, or other images than train's with {SHARDER} --split val"
    return f"run {SHARDER} --split {split}"


def _find(folder: Path, split: str) -> Path:
    """``folder`` itself, or ``folder/split`` when the manifest is there."""
    if not folder.is_dir():
        raise UserError(f"shard folder {folder} does not exist: set data.path to the folder that {SHARDER} wrote.")
    nested = folder / split
    return nested if (nested / MANIFEST).is_file() and not (folder / MANIFEST).is_file() else folder


def _allow_open_files(shards: int) -> None:
    """Every tar stays open, so raise the soft limit by their number as far as the system lets us."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = shards + 256
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise UserError(
            f"{shards} shards need {needed} open files, the system allows {hard}: raise `ulimit -Hn` or use larger shards."
        )
    wanted = soft + shards
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))
