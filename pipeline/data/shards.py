"""A shard set on disk, as written by ``data_prep/shard_imagenet.py``, and its reader.

::

    DIR/manifest.json          classes in index order; per split: counts, sizes, checksums, seed, source
    DIR/train-000000.tar       WebDataset members KEY.jpg (or png, webp, tif, bmp), KEY.cls, KEY.json
    DIR/train-000000.idx       the tar's index in the format of wds2idx and DALI's readers.webdataset
    DIR/train-samples.npy      32 bytes per sample: position of its image, checksum, label, width and height
    DIR/rejected.jsonl         rejected images of the source with reasons; absent if there are none
    DIR/reencoded.jsonl        re-encoded images with reasons; absent if there are none

The ranks of a node share ``*-samples.npy`` and the tars through the page cache. The table is memory-mapped; the tars are read
with ``pread``, so that truncation of a tar under a running job is an error that names the file, not a SIGBUS.
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

from pipeline.data.manifest import MANIFEST, SHARDER, ShardManifest, file_sha256, in_progress_file, sample_key
from pipeline.data.sample_table import find_out_of_range, map_sample_table
from pipeline.errors import UserError
from pipeline.files import open_regular

_BLOCK = 512  # bytes: headers and data in a tar are aligned to it


class DamagedSample(Exception):
    """A sample that cannot be read or decoded; the message names the file, the key and the problem."""

    def __init__(self, index: int, message: str) -> None:
        super().__init__(message)
        self.index = index


class ShardSet:
    """One split of a shard set, opened for reading.

    Args:
        folder: holds ``manifest.json``, directly or in a subfolder named ``split``.
        split: ``train`` or ``val``.

    Attributes:
        samples: (n,) memory-mapped array of ``SAMPLE_DTYPE``.
        classes: class names in index order, which identify the classes.
        class_names: what to call them; the same where the set has no other names.

    Raises:
        UserError: folder, manifest, split, tar or index missing, file sizes other than in the manifest, or a damaged sample
            table.
    """

    mixture: None = None  # one set: see pipeline.data.samples

    def __init__(self, folder: str | Path, split: str) -> None:
        self.folder = _find(Path(folder), split)
        self.split = split
        manifest = ShardManifest.read(self.folder)
        if split not in manifest.splits:
            raise UserError(
                f"{self.folder / MANIFEST} has the splits {sorted(manifest.splits)}, {split!r} needed",
                _advice(self.folder, split),
            )
        self.classes, self.named = manifest.classes, manifest.class_names
        self.class_names = manifest.class_names or manifest.classes
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
        """Plain values that identify the split's content and order, independent of its location."""
        source = self.info.source
        stored = {key: source.get(key) for key in ("resize_short_side", "quality")}
        kept = {"formats": self.info.formats} if self.info.formats else {}  # other pixels than those of the same images as JPEG
        return {"fingerprint": source["fingerprint"], "samples": len(self), "shard_seed": self.info.seed, **stored, **kept}

    @property
    def subset(self) -> float:
        """Fraction of the source's images that was written (``--subset``)."""
        return self.info.source.get("subset", 1.0)

    def key(self, index: int) -> str:
        """The WebDataset key of sample ``index``."""
        shard = int(self.samples["shard"][index])
        return sample_key(shard, int(index) - self._first_of_shard[shard])

    def read_jpegs(self, indices: np.ndarray) -> list[np.ndarray]:
        """:meth:`read` for each of several samples."""
        return [self.read(int(index)) for index in indices]

    def read(self, index: int) -> np.ndarray:
        """The encoded image of one sample, verified by its checksum. Thread-safe.

        A failed read is retried once, from the new file if the tar was replaced in the meantime.

        Returns:
            (bytes,) uint8.

        Raises:
            DamagedSample: the tar is missing, truncated, unreadable or does not match the checksum.
            UserError: the limit on open files is reached.
        """
        try:
            return self._read(index)
        except DamagedSample:
            self._forget_if_replaced(int(self.samples["shard"][index]))
            return self._read(index)

    def will_need(self, runs: list[tuple[int, int]]) -> None:
        """Ask the kernel to read runs of adjacent samples into the page cache. Returns immediately.

        Args:
            runs: (first sample, number of samples) each; clipped to the end of the set.
        """
        for first, count in runs:
            samples = self.samples[first : first + count]
            for shard in np.unique(samples["shard"]):
                inside = samples[samples["shard"] == shard]
                begin, end = int(inside["offset"][0]), int(inside["offset"][-1]) + int(inside["bytes"][-1])
                try:
                    os.posix_fadvise(self._descriptor(int(shard)), begin, end - begin, os.POSIX_FADV_WILLNEED)
                except OSError:
                    pass  # only a hint: read() reports errors

    def damaged(self, index: int, reason: str) -> DamagedSample:
        """An error about a sample, to be raised by the caller."""
        path = self.folder / self.info.shards[int(self.samples["shard"][index])].file
        original = self._original(index)
        name = f" (it was {original} in the source)" if original else ""
        return DamagedSample(int(index), f"{path}: sample {self.key(index)} {reason}{name}")

    def _original(self, index: int) -> str:
        """The image's file name in the source, from its JSON member in the tar; empty if that cannot be read."""
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
            if error.errno in (errno.EMFILE, errno.ENFILE):  # too many open files: not the sample's fault
                raise UserError(f"{self.folder}: {error.strerror}", "raise `ulimit -n`, or use larger shards") from None
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
        """Drop a tar's descriptor if the file at its path is a different one, so that the next read opens that."""
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
            raise UserError(f"{path} is missing, {expected} bytes needed by {MANIFEST}", remedy) from None
        if not stat.S_ISREG(found.st_mode):
            raise UserError(f"{path} is not a regular file, one of {expected} bytes needed by {MANIFEST}", remedy)
        if found.st_size != expected:
            raise UserError(f"{path} has {found.st_size} bytes, {expected} needed by {MANIFEST}", remedy)

    def _map_samples(self) -> np.ndarray:
        path, needed = self.folder / self.info.samples_file, f"{self.info.samples} samples needed by {MANIFEST}"
        remedy = "restore it, or shard again into an empty folder"
        try:
            if file_sha256(path) != self.info.samples_sha256:  # 41 MB for ImageNet, and every label and crop depends on it
                raise ValueError("its checksum is not the one in the manifest")
            samples = map_sample_table(path, self.info.samples)
            wrong = find_out_of_range(samples, [shard.bytes for shard in self.info.shards], len(self.classes))
        except FileNotFoundError:
            raise UserError(f"{path} is missing, {needed}", remedy) from None
        except ValueError as error:
            raise UserError(f"{path} is damaged ({error}), {needed}", remedy) from None
        if wrong:
            raise UserError(f"{path} does not fit {MANIFEST}: {wrong} needed", remedy)
        return samples


def _advice(folder: Path, split: str) -> str:
    """The remedy for a split that the manifest does not list."""
    if split not in ("train", "val"):
        return f"take one of these; other images with labels are sharded into a folder of their own, {SHARDER} --split val"
    if in_progress_file(folder, split).exists():
        return "its sharding was not finished, run the same sharding command again"
    if split == "val":
        return f"shard again into an empty folder with --val-share 0.1, or other images than train's with {SHARDER} --split val"
    return f"run {SHARDER} --split {split}"


def _find(folder: Path, split: str) -> Path:
    """``folder``, or ``folder/split`` if the manifest is there."""
    if not folder.is_dir():
        raise UserError(f"shard folder {folder} does not exist", f"set data.path to the folder that {SHARDER} wrote")
    nested = folder / split
    return nested if (nested / MANIFEST).is_file() and not (folder / MANIFEST).is_file() else folder


def _allow_open_files(shards: int) -> None:
    """Raise the soft limit on open files, up to the hard limit: every tar stays open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = shards + 256  # for everything else: libraries, sockets, logs, checkpoints
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise UserError(
            f"{shards} shards need {needed} open files, the system allows {hard}", "raise `ulimit -Hn` or use larger shards"
        )
    wanted = soft + shards
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))
