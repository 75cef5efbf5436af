"""Read the original archives of CIFAR-10 and CIFAR-100 (Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009).

``cifar-10-python.tar.gz`` and ``cifar-100-python.tar.gz`` hold Python pickles of pixel arrays. Images are passed on as PNG,
which is lossless; the only lossy step is the writer's JPEG encoder.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy._core import multiarray  # its old name, numpy.core, is what the pickles say
from PIL import Image

from data_prep.sources.base import Entry, Source, read_tar_gz
from pipeline.errors import UserError

SIDE = 32  # pixels
_PIXELS = 3 * SIDE * SIDE  # values per image
_ARCHIVE, _DOWNLOAD = "CIFAR's archive", "download it again"


@dataclass(frozen=True)
class _Layout:
    """The layout of an archive. Member names are the last part of the path."""

    batches: dict[str, tuple[str, ...]]  # split -> members
    meta: str  # member with the class names
    labels_key: bytes
    names_key: bytes


_CIFAR10 = _Layout(
    {"train": tuple(f"data_batch_{number}" for number in range(1, 6)), "val": ("test_batch",)},
    "batches.meta",
    b"labels",
    b"label_names",
)
_CIFAR100 = _Layout({"train": ("train",), "val": ("test",)}, "meta", b"fine_labels", b"fine_label_names")


class Cifar(Source):
    """CIFAR-10, or CIFAR-100 with its 100 fine classes; the test batch is the val split.

    All pixels of the split are in memory (150 MB for train); a selection carries its pixels to the worker. ``total_bytes``
    counts raw pixels, because encoded sizes are known only after encoding.

    Args:
        path: the archive.
        split: ``train`` or ``val``.

    Raises:
        UserError: damaged, or not one of the two archives.
    """

    kind = "cifar"
    keep_formats = False  # the archive holds pixels, and PNG only carries them to the writer

    def __init__(self, path: str | Path, split: str) -> None:
        meta, batches, layout = _load(Path(path), split)
        try:
            class_names = [name.decode() for name in meta[layout.names_key]]
            labels = [label for batch in batches for label in batch[layout.labels_key]]
            if labels and min(labels) < 0:
                raise ValueError(f"a label of {min(labels)}")
            file_names = [name.decode() for batch in batches for name in batch[b"filenames"]]
            self._pixels = np.concatenate(
                [batch[b"data"] for batch in batches]
            )  # (n, 3072): red, green and blue planes of 32 x 32
            entries = [
                Entry(class_names[label], f"{class_names[label]}/{name}", _PIXELS, row)
                for row, (label, name) in enumerate(zip(labels, file_names, strict=True))
            ]
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise UserError(f"{path} does not have the content of a CIFAR archive ({error!r})", _DOWNLOAD) from None
        if self._pixels.shape != (len(entries), _PIXELS) or self._pixels.dtype != np.uint8:
            raise UserError(
                f"{path} must have pixels of shape ({len(entries)}, {_PIXELS}) and type uint8 for its {len(entries)} labels, got "
                f"{self._pixels.shape} and {self._pixels.dtype}",
                _DOWNLOAD,
            )
        super().__init__(path, class_names, entries)

    def _bytes(self, sample: int) -> bytes:
        pixels = self._pixels[self._places[sample]].reshape(3, SIDE, SIDE).transpose(1, 2, 0)  # (H, W, 3)
        file = io.BytesIO()
        Image.fromarray(np.ascontiguousarray(pixels)).save(file, "PNG")
        return file.getvalue()

    def select(self, samples: Sequence[int] | np.ndarray) -> Cifar:
        selection = super().select(samples)
        selection._pixels = self._pixels[selection._places]  # (m, 3072)
        selection._places = np.arange(len(selection))
        return selection


def _load(path: Path, split: str) -> tuple[dict, list[dict], _Layout]:
    """The dictionary with the class names, the split's batches, and the layout of the archive."""
    known = {name for one in (_CIFAR10, _CIFAR100) for name in (one.meta, *one.batches["train"], *one.batches["val"])}
    members = read_tar_gz(path, lambda name: _last_part(name) if _last_part(name) in known else None, _ARCHIVE, _DOWNLOAD)
    layout = _CIFAR10 if _CIFAR10.meta in members else _CIFAR100
    names = (layout.meta, *layout.batches[split])
    missing = [name for name in names if name not in members]
    if missing:
        raise UserError(
            f"{path} must have the member {missing[0]}, as CIFAR's archives of Python pickles do",
            "pass cifar-10-python.tar.gz or cifar-100-python.tar.gz",
        )
    meta, *batches = (_unpickle(members[name], f"{path}: {name}") for name in names)
    return meta, batches, layout


def _last_part(name: str) -> str:
    return name.rpartition("/")[2]


class _ArraysOnly(pickle._Unpickler):  # pure Python: a memo index in a crafted pickle makes the C version allocate any amount
    """Unpickles plain values and NumPy arrays only. A pickle may call any importable function; CIFAR needs these."""

    _ALLOWED = {
        ("numpy.core.multiarray", "_reconstruct"): multiarray._reconstruct,
        ("numpy._core.multiarray", "_reconstruct"): multiarray._reconstruct,
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._ALLOWED:
            raise pickle.UnpicklingError(f"it refers to {module}.{name}, which is not a plain value or array")
        return self._ALLOWED[module, name]


def _unpickle(data: bytes, name: str) -> dict:
    try:
        batch = _ArraysOnly(io.BytesIO(data), encoding="bytes").load()
    except Exception as error:  # a damaged pickle can raise nearly any exception
        reason = str(error) or type(error).__name__
        raise UserError(f"{name} is not a pickle of plain values and arrays ({reason})", _DOWNLOAD) from None
    if not isinstance(batch, dict):
        raise UserError(f"{name} must hold a dict, got {type(batch).__name__}", _DOWNLOAD)
    return batch
