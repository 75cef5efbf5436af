"""Reads members of an untrusted ``.tar.gz`` into memory, in one pass."""

from __future__ import annotations

import tarfile
from collections.abc import Callable
from pathlib import Path

from pipeline.errors import UserError
from pipeline.files import open_regular

_LARGEST_MEMBER = 1 << 30  # bytes, against decompression bombs; the largest real one, CIFAR-100's train batch, has 155 MB


def read_tar_gz(path: Path, key: Callable[[str], str | None], what: str, remedy: str) -> dict[str, bytes]:
    """Read selected members of an archive; of several with the same key, the last.

    Args:
        path: the archive.
        key: maps a member's name to its key in the result, or to None to skip it.
        what: name of the expected archive, for the message.
        remedy: for the message.

    Returns:
        Key -> content.

    Raises:
        UserError: not a complete tar.gz, or a member is larger than 1 GiB.
        OSError: the file cannot be read.
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
    except Exception as error:  # gzip, zlib and tarfile raise various exceptions
        if isinstance(error, MemoryError) or isinstance(error, OSError) and error.errno is not None:
            raise
        raise UserError(f"{path} is not a whole tar.gz ({error}), {what} needed", remedy) from None
    return found
