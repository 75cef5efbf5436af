"""Read a shard set, as written by ``data_prep/shard_imagenet.py``.

::

    DIR/manifest.json          classes in index order; per split: counts, sizes, checksums, seed, source
    DIR/train-000000.tar       WebDataset members KEY.jpg (or png, webp, tif, bmp), KEY.cls, KEY.json
    DIR/train-000000.idx       the tar's index in the format of wds2idx and DALI's readers.webdataset
    DIR/train-samples.npy      32 bytes per sample: position of its image, checksum, label, width and height
    DIR/rejected.jsonl         rejected images of the source with reasons; absent if there are none
    DIR/reencoded.jsonl        re-encoded images with reasons; absent if there are none

The ranks of a node share ``*-samples.npy``, which is memory-mapped, and the tars through the page cache. Only
:mod:`pipeline.shards.files.local` knows where the files are read from.
"""

import errno
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path

import numpy as np

from pipeline.errors import UserError
from pipeline.files import file_sha256
from pipeline.shards.files.cache import ShardCache
from pipeline.shards.files.cached import CachedFiles
from pipeline.shards.files.local import LocalFiles, Range, ShardFiles, SourceFiles
from pipeline.shards.manifest import (
    MANIFEST,
    SHARDER,
    find_manifest,
    find_misfit,
    forget_pages,
    in_progress_file,
    map_sample_table,
    sample_damage,
    sample_key,
)
from pipeline.stores.place import Place, RemotePath, parse_place
from pipeline.stream.samples import DamagedSample, Samples

_BLOCK = 512  # bytes: headers and data in a tar are aligned to it


class ShardSet(Samples):
    """One split of a shard set, opened for reading; ``samples`` is a memory-mapped array (n,) of ``SAMPLE_DTYPE``. Raises
    UserError: folder, manifest, split, tar or index missing, file sizes other than in the manifest, or a damaged sample table.
    Arguments as of :func:`open_files`; ``cache`` is the node's, if it has one.
    """

    def __init__(self, folder: str | os.PathLike[str], split: str, readers: int = 1, cache: ShardCache | None = None) -> None:
        source = open_files(folder, split, readers)
        self.folder, self.split = source.folder, split
        manifest = source.manifest
        if split not in manifest.splits:
            listed = f"{MANIFEST} lists only {', '.join(sorted(manifest.splits))}"
            raise UserError(f"{self.folder} must have the split {split!r}, but {listed}", _advice(self.folder, split))
        self.classes, self.named = manifest.classes, manifest.class_names
        self.class_names = manifest.class_names or manifest.classes
        self.info = manifest.splits[split]
        self.subset: float = self.info.source.get("subset", 1.0)  # fraction of the source's images that was written (--subset)
        for shard in self.info.shards:
            source.expect(shard.file, shard.bytes, "shard again into an empty folder, or copy the file again")
            source.expect(shard.idx_file, shard.idx_bytes, f"rebuild it with wds2idx {shard.file} {shard.idx_file}")
        self.samples = self._map_samples(source)
        self.labels: np.ndarray = self.samples["label"]  # (n,) of each image, by class of the set
        self._first_of_shard = [0, *accumulate(shard.samples for shard in self.info.shards)]  # sample numbers
        source.will_open(len(self.info.shards))
        self.files: ShardFiles = source if cache is None else CachedFiles(source, cache, self.info.shards, self.samples)

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def sets(self) -> "list[ShardSet]":
        return [self]

    def identity(self) -> dict:
        """Plain values that identify the split's content and order, independent of its location."""
        source = self.info.source
        stored = {key: source.get(key) for key in ("resize_short_side", "quality")}
        kept = {"formats": self.info.formats} if self.info.formats else {}  # other pixels than those of the same images as JPEG
        return {"fingerprint": source["fingerprint"], "samples": len(self), "shard_seed": self.info.seed, **stored, **kept}

    def key(self, index: int) -> str:
        """The WebDataset key."""
        shard = int(self.samples["shard"][index])
        return sample_key(shard, int(index) - self._first_of_shard[shard])

    def read_batch(self, indices: list[int]) -> list[np.ndarray | DamagedSample]:
        """Each image is verified by its checksum. A failed read is retried once, from the new file if the tar was replaced
        meanwhile. Raises UserError: the store is away, or the limit on open files is reached."""
        ranges = [self._range(index) for index in indices]
        images = []
        for index, wanted, data in zip(indices, ranges, self.files.read_many(ranges)):
            image = self._verified(index, data)
            final = self.files.repeats and isinstance(data, OSError) and data.errno != errno.ESTALE  # ESTALE: replaced
            if isinstance(image, DamagedSample) and not final:
                self.files.forget_if_replaced(wanted[0])
                (data,) = self.files.read_many([wanted])
                image = self._verified(index, data)
            images.append(image)
        return images

    def will_need(self, runs: list[tuple[int, int]]) -> None:
        """Runs are clipped to the end of the set."""
        ranges = []
        for first, count in runs:
            samples = self.samples[first : first + count]
            for shard in np.unique(samples["shard"]):
                inside = samples[samples["shard"] == shard]
                begin, end = int(inside["offset"][0]), int(inside["offset"][-1]) + int(inside["bytes"][-1])
                ranges.append((self.info.shards[int(shard)].file, begin, end - begin))
        if ranges:
            self.files.will_need(ranges)

    def take_counts(self) -> dict[str, int] | None:
        return self.files.take_counts()

    def damaged(self, index: int, reason: str, original: str | None = None) -> DamagedSample:
        path = self.folder / self._tar(self.samples[index])
        original = next(self.source_names([index])) if original is None else original
        name = f" (it was {original} in the source)" if original else ""
        return DamagedSample(int(index), f"{path}: sample {self.key(index)} {reason}{name}")

    def source_names(self, indices: Sequence[int]) -> Iterator[str]:
        """The file names that images had in the source, from their JSON members in the tar; "" where that cannot be read."""
        ends = ((name, begin + -(-size // _BLOCK) * _BLOCK) for name, begin, size in map(self._range, indices))
        for index, found in zip(indices, self.files.read_many([(name, end, 16 * _BLOCK) for name, end in ends])):
            original = ""
            with suppress(ValueError, KeyError, TypeError):  # an OSError has no bytes: a TypeError
                after = bytes(found)  # type: ignore[arg-type]  # header and data of .cls, then of .json
                header, data = after[2 * _BLOCK : 3 * _BLOCK], after[3 * _BLOCK :]
                if header.startswith(f"{self.key(index)}.json\0".encode()):
                    original = json.loads(data[: int(header[124:135], 8)])["file"]
            yield original if isinstance(original, str) and original.isprintable() else ""

    def _verified(self, index: int, data: bytes | memoryview | OSError) -> np.ndarray | DamagedSample:
        from pipeline.shards.image_headers import size_damage  # Pillow, which plans do without

        if isinstance(data, OSError):
            original = "" if self.files.repeats else None  # reading that would take as long
            return self.damaged(index, f"cannot be read ({data.strerror})", original)
        row = self.samples[index]
        if damage := sample_damage(data, row) or size_damage(bytes(data), (row["width"], row["height"])):
            return self.damaged(index, damage)
        return np.frombuffer(data, dtype=np.uint8)

    def _range(self, index: int) -> Range:
        sample = self.samples[index]
        return self._tar(sample), int(sample["offset"]), int(sample["bytes"])

    def _tar(self, sample: np.void) -> str:
        """Name of the tar with a row of the sample table."""
        return self.info.shards[int(sample["shard"])].file

    def _map_samples(self, source: SourceFiles) -> np.ndarray:
        path = self.folder / self.info.samples_file
        remedy = "restore it, or shard again into an empty folder"
        try:
            local = source.whole(self.info.samples_file)
            if file_sha256(local) != self.info.samples_sha256:  # 41 MB for ImageNet, and every label and crop depends on it
                raise ValueError("its checksum is not the one in the manifest")
            samples = map_sample_table(local, self.info.samples)
            wrong = find_misfit(samples, self.info.shards, self.info.samples_per_class)
            forget_pages(samples)
        except OSError as error:
            problem = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror}"
            raise UserError(f"{path} {problem} ({self.info.samples} samples by {MANIFEST})", remedy) from None
        except ValueError as error:
            raise UserError(f"{path} is damaged ({error}; {self.info.samples} samples by {MANIFEST})", remedy) from None
        if wrong:
            raise UserError(f"{path} does not fit {MANIFEST}: {wrong}", remedy)
        return samples


def open_files(path: str | os.PathLike[str], split: str, readers: int = 1) -> SourceFiles:
    """The files of the shard set at ``data.path``, a folder or a URL; ``readers`` processes divide the samples among them.

    The place holds ``manifest.json``, directly or in a subfolder named ``split``. Raises UserError: there is no such place, or no
    intact manifest.
    """
    place = parse_place(path)
    if isinstance(place, RemotePath):
        from pipeline.shards.files.remote import RemoteFiles  # imported late: a local set needs no client

        return RemoteFiles.find(place, split, readers)
    return LocalFiles(_find(place, split))


def check_shards(place: Place) -> None:
    """Check that a folder holds a set to train on; what is in a store is left to :func:`open_files`. Raises UserError."""
    if isinstance(place, Path):
        find_manifest(_find(place, "train"))


def _find(folder: Path, split: str) -> Path:
    """``folder``, or ``folder/split`` if the manifest is there."""
    if not folder.is_dir():
        found = "is a file" if folder.exists() else "does not exist"
        raise UserError(f"shard folder {folder} {found}", f"set data.path to the folder that {SHARDER} wrote")
    nested = folder / split
    return nested if (nested / MANIFEST).is_file() and not (folder / MANIFEST).is_file() else folder


def _advice(folder: Place, split: str) -> str:
    """The remedy for a split that the manifest does not list."""
    if split not in ("train", "val"):
        return f"pass one of these; shard other labelled images into a folder of their own, {SHARDER} --split val"
    if isinstance(folder, Path) and in_progress_file(folder, split).exists():
        return "its sharding was not finished, run the same sharding command again"
    if split == "val":
        return f"shard again into an empty folder with --val-share 0.1, or other images than train's with {SHARDER} --split val"
    return f"run {SHARDER} --split {split}"
