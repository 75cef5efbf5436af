"""Find the images that a user names, in files, folders, patterns, tars, zips, shard sets or a list, as samples for ``pipeline.predict``."""

import glob
import io
import os
import stat
import tarfile
import zipfile
from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image

from pipeline.errors import UserError, first_few
from pipeline.shards.image_checks import ImageRules, Rejected, StoredImage, prepare_image
from pipeline.shards.image_folder import CheckedImages
from pipeline.shards.manifest import MANIFEST
from pipeline.stores.place import is_remote, parse_place
from pipeline.stream.samples import DamagedSample

NO_LABEL = 0  # the label of an image whose class is not known: a loader's batch needs one
SUFFIXES = (".jpeg", ".jpg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif", ".ppm")
STDIN, LIST = "-", "@"
_IN_FILE = -1  # place of an image that is a file of its own


Found = tuple[str, str, int, int]
"""Name as it is reported; the tar or zip that holds it, "" for a file; offset in the tar or number in the zip; bytes."""


class PackedNames(Sequence[str]):
    """A list of strings, also of file names that are not UTF-8, in one block of bytes: ten million take their length and 8 bytes each."""

    def __init__(self, names: Iterable[str]) -> None:
        self._block, ends = bytearray(), array("q", [0])
        for name in names:
            self._block += os.fsencode(name)
            ends.append(len(self._block))
        self._ends = np.frombuffer(ends, dtype=np.int64)  # (n + 1,)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: int) -> str:  # type: ignore[override]
        return os.fsdecode(bytes(self._block[self._ends[index] : self._ends[index + 1]]))


def find_images(arguments: Sequence[str], lines: Iterable[str] = ()) -> Iterator[Found]:
    """All images that the arguments name, in their order: files, folders (searched at any depth, sorted by path; a shard set's tars are
    read in place), patterns with ``*``, ``?`` or ``[``, ``.tar`` and ``.zip`` files; ``-`` takes the names from ``lines``, ``@FILE`` from
    a file with a name a line. A file may have any ending, and need not exist: it becomes an error of its own row. Raises UserError: a
    folder, archive or list without an image, a pattern without a match, or a damaged archive."""
    for argument in arguments:
        if is_remote(argument):
            remedy = "copy them here; `pervit evaluate --data URL --predictions FILE` reads a shard set in a store"
            raise UserError(f"images must be on this machine, got the URL {parse_place(argument)}", remedy)
        images = iter(_files(lines) if argument == STDIN else _images_of(Path(argument), argument))
        first = next(images, None)
        if first is None and argument == STDIN:
            remedy = "pass a name a line; several processes have no input: pass them @FILE, or the images themselves"
            raise UserError("standard input must name at least one image, got none", remedy)
        if first is None:
            problem = f"{argument} must hold at least one image, got none"
            raise UserError(problem, f"pass images ({', '.join(SUFFIXES)}), or folders or archives of them")
        yield first
        yield from images


def check_arguments(arguments: Sequence[str]) -> None:
    """Check, before PyTorch is loaded, that something of what a command line names is there. Raises UserError: none of it is."""
    # A list, a pattern or a URL is looked at by find_images, which has a sentence for each.
    named = (name for name in arguments if name != STDIN and not name.startswith(LIST) and not glob.has_magic(name))
    missing = [name for name in named if not is_remote(name) and not os.path.lexists(name)]
    if len(missing) == len(arguments):
        problem = f"no image is there: {first_few(missing)} {'does' if len(missing) == 1 else 'do'} not exist"
        raise UserError(problem, f"pass images ({', '.join(SUFFIXES)}), or folders or archives of them")


def read_list(stream: BinaryIO) -> Iterator[str]:
    """The names of a list, one a line, whatever encoding they are in: for a file system a name is bytes. One line is held at a time."""
    for line in stream:
        if name := line.rstrip(b"\r\n"):
            yield os.fsdecode(name)


def _files(names: Iterable[str]) -> Iterator[Found]:
    return ((name, "", _IN_FILE, 0) for name in names)


def _images_of(path: Path, argument: str) -> Iterator[Found]:
    if path.is_dir():
        if (path / MANIFEST).exists():
            for tar in sorted(path.glob("*.tar")):
                yield from _members_of_tar(tar)
            return
        for folder, folders, files in os.walk(path):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            yield from ((os.path.join(folder, name), "", _IN_FILE, 0) for name in sorted(files) if _is_image(name))
    elif path.suffix == ".zip" and path.is_file():
        for place, member in enumerate(_opened_zip(str(path)).infolist()):
            if not member.is_dir() and _is_image(member.filename):
                yield f"{path}/{member.filename}", str(path), place, member.file_size
    elif path.suffix == ".tar" and path.is_file():
        yield from _members_of_tar(path)
    elif argument.startswith(LIST) and not path.exists():
        try:
            with open(argument[len(LIST) :], "rb") as file:
                yield from _files(read_list(file))
        except OSError as error:
            problem = f"{argument}: the list {argument[len(LIST) :]} cannot be read ({error.strerror})"
            raise UserError(problem, "pass a file with a name a line") from None
    elif not path.exists() and glob.has_magic(argument):
        for match in sorted(glob.glob(argument, recursive=True)):
            yield from _images_of(Path(match), match)
    else:
        yield argument, "", _IN_FILE, 0


def _members_of_tar(path: Path) -> Iterator[Found]:
    try:
        with tarfile.open(path, "r:") as archive:
            for member in archive:
                if member.isfile() and _is_image(member.name):
                    yield f"{path}/{member.name}", str(path), member.offset_data, member.size
    except tarfile.TarError as error:
        problem = f"{path} is not a complete tar ({error})"
        raise UserError(problem, "a compressed one must be unpacked first; else copy it again") from None


def _is_image(name: str) -> bool:
    name = name.rpartition("/")[2]
    return name.lower().endswith(SUFFIXES) and not name.startswith(".")


@lru_cache(maxsize=64)
def _opened_tar(path: str) -> io.FileIO:  # closed when the last reader has let go of it
    return open(path, "rb", buffering=0)


@lru_cache(maxsize=16)
def _opened_zip(path: str) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(path)
    except zipfile.BadZipFile as error:
        raise UserError(f"{path} is not a complete zip ({error})", "copy it again") from None


class ImageList(CheckedImages):
    """:class:`~pipeline.stream.samples.Samples` of images that a user names. What cannot be used does not end the pass: a grey image takes
    its place, and :attr:`errors` has the reason by its number. ``classes``: the model's, in index order. ``by_folder``: an
    image's label is the class that its folder is named after; an image in another folder is an error."""

    def __init__(self, found: Iterable[Found], classes: Sequence[str], by_folder: bool = False) -> None:
        super().__init__()
        self.folder, self.classes, self.errors = Path(), list(classes), dict[int, str]()
        self._by_folder, self._label_of = by_folder, {name: label for label, name in enumerate(classes)}
        numbers: dict[str, int] = {}  # of tars and zips
        packed = array("q")  # only of images in these: number of the image, of its container, place, size

        def remembered() -> Iterator[str]:
            for image, (name, container, place, size) in enumerate(found):
                if container:
                    packed.extend((image, numbers.setdefault(container, len(numbers)), place, size))
                yield name

        self._names = PackedNames(remembered())
        self._containers = list(numbers)
        self._packed = np.frombuffer(packed, dtype=np.int64).reshape(-1, 4) if packed else np.empty((0, 4), np.int64)

    def __len__(self) -> int:
        return len(self._names)

    def key(self, index: int) -> str:
        """The name of an image, as the user would give it: a path, or a member as ``ARCHIVE/member``."""
        return self._names[index]

    def _data(self, index: int) -> bytes:
        row = int(np.searchsorted(self._packed[:, 0], index))
        if row == len(self._packed) or self._packed[row, 0] != index:
            path = self._names[index]
            if not stat.S_ISREG(os.stat(path).st_mode):
                raise OSError(0, "not a regular file")
            return Path(path).read_bytes()
        _, number, place, size = self._packed[row].tolist()
        container = self._containers[number]
        if container.endswith(".zip"):
            archive = _opened_zip(container)
            return archive.read(archive.infolist()[place])
        tar = _opened_tar(container)  # held while it is read: another thread may push it out of the cache
        data = os.pread(tar.fileno(), size, place)
        if len(data) != size:
            raise OSError(0, f"{container} is cut off")
        return data

    def damaged(self, index: int, reason: str) -> DamagedSample:
        """An image that passed the checks but not the decoder: noted, and raised by the caller to have it replaced."""
        self.errors[int(index)] = reason
        return DamagedSample(int(index), f"{self.key(index)} {reason}")

    def label(self, index: int) -> int:
        if not self._by_folder:
            return NO_LABEL
        folder = Path(self.key(index)).parent.name
        if folder not in self._label_of:
            self.errors.setdefault(index, f"its folder {folder!r} is not one of the model's {len(self.classes)} classes")
        return self._label_of.get(folder, NO_LABEL)

    def look(self, index: int) -> StoredImage:
        try:
            return prepare_image(self._data(index), ImageRules(), self.key(index))
        except Rejected as error:
            self.errors[index] = f"cannot be used: {error}"
        except OSError as error:
            self.errors[index] = f"cannot be read: {error.strerror or error}"
        except (zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:  # damaged, unknown compression, encrypted
            self.errors[index] = f"cannot be read: {error}"
        return _GREY


_encoded = io.BytesIO()
Image.new("RGB", (16, 16), (128, 128, 128)).save(_encoded, "JPEG")
_GREY = StoredImage(_encoded.getvalue(), 16, 16)
