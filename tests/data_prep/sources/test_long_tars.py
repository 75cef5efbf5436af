"""Other people's tars of many small members: memory is that of the list of images, not of the tar."""

from __future__ import annotations

import io
import tarfile
import tracemalloc
from pathlib import Path

import pytest

from data_prep.sources import Reading, open_sources
from support.images import encoded, picture

pytest.importorskip("webdataset")
SAMPLES, BYTES = 10_000, 8_000


def test_memory_does_not_grow_with_the_tar(tmp_path: Path) -> None:
    """Guards against a tar of 10^6 members that is held in memory, or whose members are kept as the reader's objects: of 80 MB in 20,000
    members no more than a few are in use at a time."""
    jpeg = encoded(picture())
    image = jpeg + bytes(BYTES - len(jpeg))  # what follows the end marker is not read
    tars = tmp_path / "tars"
    tars.mkdir()
    with tarfile.open(tars / "train.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
        for number in range(SAMPLES):
            for suffix, data in (("jpg", image), ("cls", b"%d" % (number % 2000))):
                member = tarfile.TarInfo(f"{number:07d}.{suffix}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
                tar.members.clear()
    reading = Reading(tmp_path / "stage")
    open_sources(tars, reading=Reading(tmp_path / "first"))  # imports
    tracemalloc.start()
    try:
        (source,) = open_sources(tars, reading=reading).values()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (len(source), len(source.class_names)) == (SAMPLES, 2000)
    assert source.read(SAMPLES - 1).data == image and peak < SAMPLES * 2000, peak
