"""Whether the files of a checkpoint are intact, and unchanged while they are read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from pipeline.checkpoint.headers import Header
from pipeline.checkpoint.manifest import CheckpointManifest, FileRecord, RunState, open_own
from pipeline.errors import UserError

_CHUNK = 16 << 20  # bytes per read

_Marks = tuple[int, int, int, int]  # device, inode, size, modification time: they differ for another file or other content


def checksum(path: Path) -> FileRecord:
    """Name, size and XXH3-128 of a file as it is now.

    Raises:
        UserError: it is not a regular file.
        OSError: it cannot be read.
    """
    digest, size = xxhash.xxh3_128(), 0
    with open_own(path) as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return FileRecord(path.name, size, digest.hexdigest())


def find_damage(folder: Path, files: list[FileRecord], contents: bool = True) -> list[str]:
    """Compare files with their records in the manifest.

    Args:
        folder: of the checkpoint.
        files: the records, all or some.
        contents: verify checksums; else only existence and size.

    Returns:
        A sentence for each file that differs.

    Raises:
        OSError: a file cannot be read now, which says nothing about its contents.
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
            sentences.append(error.problem)  # the caller adds its own remedy
    return sentences


def find_all_damage(folder: Path, manifest: CheckpointManifest) -> list[str]:
    """A sentence for each damaged file; if there is none, for each gap in what the files cover.

    Raises:
        OSError: a file cannot be read now.
    """
    from pipeline.checkpoint.completeness import find_gaps  # imports PyTorch

    return find_damage(folder, manifest.files) or find_gaps(folder, manifest)


@dataclass(frozen=True)
class Seen:
    """The state of a checkpoint's files before they were verified.

    The files are read twice: for their checksums, and then for the slices that a rank needs. So a reader calls :meth:`look`,
    verifies, reads, and calls :meth:`check` to see that nothing was replaced or changed in between. A change that restores the
    modification time goes undetected; and whoever can write the folder can also write matching checksums.

    Ranks share the verification. A file that another rank has verified has its size and modification time as seen there: the other
    marks may differ between nodes.
    """

    folder: Path
    marks: dict[str, _Marks]
    elsewhere: dict[str, list[int]] = field(default_factory=dict)

    @classmethod
    def look(cls, folder: Path, files: list[FileRecord]) -> Seen:
        """Record the files that exist."""
        found = {file.name: _marks(folder / file.name) for file in files}
        return cls(folder, {name: marks for name, marks in found.items() if marks})

    def shared(self) -> dict[str, list[int]]:
        """What other ranks need to know of the files: size and modification time."""
        return {name: list(marks[2:]) for name, marks in self.marks.items()}

    def check(self, others: Iterable[str] = ()) -> None:
        """Check that nothing has changed since.

        Args:
            others: files that were read and that another rank has verified.

        Raises:
            UserError: a file was replaced, changed, moved or removed.
        """
        for name in {**self.marks, **dict.fromkeys(others)}:
            now = _marks(self.folder / name)
            same = now == self.marks[name] if name in self.marks else now and list(now[2:]) == self.elsewhere.get(name)
            if not same:
                raise UserError(
                    f"{self.folder / name} was replaced or changed while the checkpoint was read, the file that was compared with its "
                    f"checksum needed",
                    "let nothing write there and give the same command again",
                )


@dataclass(frozen=True)
class Verified:
    """An intact checkpoint, with the state of its files when they were verified."""

    folder: Path
    manifest: CheckpointManifest
    seen: Seen
    headers: dict[str, Header] | None = None  # of all files; None: they are read when they are needed

    @property
    def state(self) -> RunState:
        return self.manifest.state


def _marks(path: Path) -> _Marks | None:
    try:
        found = path.stat()
    except OSError:  # find_damage reports why
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
