"""Whether the files of a checkpoint are as they were written, and still are when they have been read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import xxhash

from pipeline.checkpoint.manifest import CheckpointManifest, FileRecord, RunState, open_own
from pipeline.errors import UserError

_CHUNK = 16 << 20

_Marks = tuple[int, int, int, int]  # device, inode, bytes, time of the last change: another file, or other content, has others


def checksum(path: Path) -> FileRecord:
    """Of a file as it is now.

    Raises:
        UserError: it is no regular file.
        OSError: it cannot be read.
    """
    digest, size = xxhash.xxh3_128(), 0
    with open_own(path) as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return FileRecord(path.name, size, digest.hexdigest())


def find_damage(folder: Path, files: list[FileRecord], contents: bool = True) -> list[str]:
    """Compare files with what was written.

    Args:
        folder: the checkpoint's.
        files: of its manifest, all or some.
        contents: read them; else only see that they are there and how long they are.

    Returns:
        A sentence for each that differs, naming it.

    Raises:
        OSError: a file cannot be read now, which says nothing about what is in it.
    """
    sentences = []
    for written in files:
        path = folder / written.name
        try:
            with open_own(path) as file:
                size = file.seek(0, 2)
            if size != written.bytes:
                sentences.append(f"{path} has {size} bytes, {written.bytes} were written")
            elif contents and checksum(path) != written:
                sentences.append(f"{path} was changed after it was written: its checksum does not match")
        except FileNotFoundError:
            sentences.append(f"{path} is missing")
        except UserError as error:
            sentences.append(error.problem)  # each caller has its own remedy
    return sentences


def find_all_damage(folder: Path, manifest: CheckpointManifest) -> list[str]:
    """A sentence for each file that is not as it was written, and if there is none, for each number that is in none of them.

    Raises:
        OSError: a file cannot be read now.
    """
    from pipeline.checkpoint.completeness import find_gaps  # needs PyTorch

    return find_damage(folder, manifest.files) or find_gaps(folder, manifest)


@dataclass(frozen=True)
class Seen:
    """A checkpoint's files as they lay there before they were compared with their checksums.

    They are read once for the checksums and once more for the weights, of which a process takes but some. So whoever reads them
    looks first, compares, reads, and then sees with :meth:`check` that all are the same files with the same content still. A change
    that restores the time of the last change is not noticed; nor can anyone be held up who may also write new checksums.
    """

    folder: Path
    marks: dict[str, _Marks]

    @classmethod
    def look(cls, folder: Path, files: list[FileRecord]) -> Seen:
        """At those that are there."""
        found = {file.name: _marks(folder / file.name) for file in files}
        return cls(folder, {name: marks for name, marks in found.items() if marks})

    def check(self) -> None:
        """See that nothing was changed since.

        Raises:
            UserError: a file was replaced, changed, moved or removed.
        """
        for name, marks in self.marks.items():
            if _marks(self.folder / name) != marks:
                raise UserError(
                    f"{self.folder / name} was replaced or changed while the checkpoint was read, the file that was compared with its "
                    f"checksum needed: let nothing write there and give the same command again."
                )


@dataclass(frozen=True)
class Verified:
    """A checkpoint whose every file is as it was written: what is loaded is what is in this folder, whatever its manifest says."""

    folder: Path
    manifest: CheckpointManifest
    seen: Seen

    @property
    def state(self) -> RunState:
        return self.manifest.state


def _marks(path: Path) -> _Marks | None:
    try:
        found = path.stat()
    except OSError:  # comparing it says why
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
