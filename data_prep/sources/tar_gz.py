"""Files of a ``.tar.gz`` that is read from beginning to end, into memory, and may come from anywhere."""

from __future__ import annotations

import tarfile
from collections.abc import Callable
from pathlib import Path

from pipeline.errors import UserError
from pipeline.files import open_regular

_LARGEST_MEMBER = 1 << 30  # bytes; CIFAR-100's train batch, the largest that is needed, has 155 MB


def read_tar_gz(path: Path, key: Callable[[str], str | None], what: str, remedy: str) -> dict[str, bytes]:
    """Some of an archive's files; the last of those that share a key.

    Args:
        path: the archive.
        key: of a member's name, or None for a member that is not needed.
        what: the archive that is needed, in words.
        remedy: what to do about another one.

    Raises:
        UserError: not a whole tar.gz, or one with a member of gigabytes, which a few megabytes of zeros may unpack to.
        OSError: the file system refuses.
    """
    found: dict[str, bytes] = {}
    try:
        with open(open_regular(path), "rb") as file, tarfile.open(fileobj=file, mode="r:gz") as archive:
            for member in archive:
                if not 0 <= member.size <= _LARGEST_MEMBER:
                    raise tarfile.ReadError(f"{member.name} has {member.size} bytes, {_LARGEST_MEMBER} at most")
                name = key(member.name)
                if name is not None and member.isfile() and not member.issparse():
                    content = archive.extractfile(member)
                    assert content  # a file has some
                    found[name] = content.read()
    except Exception as error:  # of gzip, zlib and tarfile
        if isinstance(error, MemoryError) or isinstance(error, OSError) and error.errno is not None:
            raise
        raise UserError(f"{path} is not a whole tar.gz ({error}), {what} needed: {remedy}.") from None
    return found
