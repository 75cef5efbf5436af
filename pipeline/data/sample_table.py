"""The sample table ``*-samples.npy``, one row per sample, validated on opening so that no later use of a row can fail."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np

from pipeline.data.manifest import SAMPLE_DTYPE
from pipeline.files import open_regular

_ROWS_AT_ONCE = 1 << 14  # 512 kB, so that a chunk stays in the CPU cache for all comparisons


def map_sample_table(path: Path, samples: int) -> np.ndarray:
    """Map a sample table into memory.

    Args:
        path: the .npy file.
        samples: number of rows according to the manifest.

    Returns:
        (samples,) of ``SAMPLE_DTYPE``, read-only.

    Raises:
        ValueError: not a sample table, or the wrong number of rows; the message says what was found.
        OSError: the file cannot be opened.
    """
    os.close(open_regular(path))
    try:
        rows = np.lib.format.open_memmap(path, mode="r")
    except OSError:
        raise
    except Exception as error:  # NumPy evaluates the header, and can raise nearly any exception for a malformed one
        raise ValueError(" ".join(str(error).split()) or type(error).__name__) from None
    if rows.dtype != SAMPLE_DTYPE or rows.ndim != 1:
        raise ValueError(f"it holds an array of shape {rows.shape} and {len(rows.dtype)} fields")
    if len(rows) != samples:
        raise ValueError(f"it lists {len(rows)} samples")
    return rows


def forget_pages(rows: np.ndarray) -> None:
    """Count the pages of a mapped table that were read no longer as this process's memory; they stay in the page cache.

    After a look at every row, each process of a node would otherwise be charged with all of the table that they share.
    """
    mapped = getattr(rows, "_mmap", None)
    if mapped is not None:
        mapped.madvise(mmap.MADV_DONTNEED)
        mapped.madvise(mmap.MADV_RANDOM)  # else each row that is not in the page cache would be read with 128 kB around it


def find_out_of_range(rows: np.ndarray, shard_bytes: list[int], classes: int) -> str | None:
    """Describe the first row with an out-of-range value; None if there is none.

    Args:
        rows: (n,) of ``SAMPLE_DTYPE``.
        shard_bytes: size of each tar.
        classes: number of classes.
    """
    sizes = np.array(shard_bytes, dtype=np.uint64)
    for first in range(0, len(rows), _ROWS_AT_ONCE):
        part = rows[first : first + _ROWS_AT_ONCE]
        shard, size = part["shard"], part["bytes"]
        room = sizes.take(shard, mode="clip")
        wrong = {
            "shard": (shard >= len(sizes), f"below {len(sizes)}"),
            "label": (part["label"] >= classes, f"below {classes}"),
            "width": (part["width"] == 0, "at least 1"),
            "height": (part["height"] == 0, "at least 1"),
            "bytes": ((size == 0) | (size > room), "at least 1 and within its tar"),
            "offset": (part["offset"] > room - size, "within its tar"),
        }
        for name, (rows_wrong, needed) in wrong.items():
            if rows_wrong.any():
                row = int(rows_wrong.argmax())
                return f"{name} of sample {first + row} is {part[name][row]}, {needed}"
    return None
