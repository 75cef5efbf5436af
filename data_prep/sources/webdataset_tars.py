"""Read WebDataset tars that others wrote, local or behind URLs: ``KEY.jpg`` (jpeg, png, webp) with ``KEY.cls`` or ``KEY.json``."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from data_prep.sources.base import SPLIT_NAMES
from data_prep.sources.labels import NoClass, class_of
from data_prep.sources.staged import Part
from pipeline.errors import UserError

_END = 1024  # zero bytes at the end of a tar
_IMAGES = ("jpg", "jpeg", "png", "webp")  # the usual ones
_OTHERS = ("tif", "tiff", "bmp")
_NAMES = (
    "wnid",
    "class_name",
    "label_name",
    "class",
    "label",
    "cls",
)  # of the class in a sample's json, the most telling first


def is_remote(location: str) -> bool:
    """Whether a source is a URL or a command of webdataset's (``pipe:``)."""
    return "://" in location or location.startswith(("pipe:", "file:"))


def tar_urls(location: str) -> dict[str, list[str]]:
    """Split -> its tars, of a folder, or of a path or URL in which ``{000..123}`` stands for many.

    The split is in the tar's name or folder (train, val, validation, test); all are train where it is not.
    """
    from braceexpand import braceexpand

    folder = Path(location)
    if not is_remote(location) and folder.is_dir():
        urls = [str(path) for path in sorted(folder.rglob("*.tar")) if not path.name.startswith(".")]
    else:
        urls = list(braceexpand(location))
    found: dict[str, list[str]] = {}
    for url in urls:
        words = [word.lower() for word in url.split("/")[-2:]]
        split = next(
            (
                SPLIT_NAMES[name]
                for word in reversed(words)
                for name in SPLIT_NAMES
                if word.startswith(name) or f"-{name}" in word
            ),
            None,
        )
        if split:
            found.setdefault(split, []).append(url)
    return found or ({"train": urls} if urls else {})


def tar_parts(urls: list[str]) -> list[Part]:
    """The parts for :class:`~data_prep.sources.staged.Staged`.

    Raises:
        UserError: a local tar is missing.
    """
    missing = [url for url in urls if not is_remote(url) and not Path(url).is_file()]
    if missing:
        raise UserError(
            f"{len(missing)} of {len(urls)} tars do not exist ({missing[0]})", "correct the path, or the range in its braces"
        )
    sizes = {url: Path(url).stat().st_size for url in urls if not is_remote(url)}
    return [Part(url, f"{url.rpartition('/')[2]} {sizes.get(url, '')}", partial(_images, url)) for url in urls]


def _images(url: str) -> Iterator[tuple[str, str, bytes]]:
    import webdataset

    if not is_remote(url):
        with open(url, "rb") as file:
            file.seek(-min(_END, os.fstat(file.fileno()).st_size), os.SEEK_END)
            if file.read() != bytes(_END):  # the reader would take a cut between two members for the end
                raise UserError(
                    f"{url} is cut off: it lacks the zeros that end a tar", "download it again; parts that are copied are kept"
                )
    pieces = webdataset.DataPipeline(webdataset.SimpleShardList([url]), webdataset.tarfile_to_samples())
    for sample in pieces:
        key = sample["__key__"]
        image = next((sample[suffix] for suffix in (*_IMAGES, *_OTHERS) if suffix in sample), None)
        if image is None:
            members = ", ".join(name for name in sample if not name.startswith("__"))
            raise UserError(f"{url}: {key} must have one of {', '.join(_IMAGES)}, got {members}", "pass a data set of images")
        yield key, _class(url, key, sample), image


def _class(url: str, key: str, sample: dict) -> str:
    about: object = None
    try:
        about = json.loads(sample["json"]) if "json" in sample else None
        if isinstance(about, dict):
            for name in _NAMES:
                if isinstance(about.get(name), str | int | float):
                    return class_of(about[name])
        if "cls" in sample:
            return class_of(sample["cls"].decode())
    except ValueError as error:
        raise UserError(f"{url}: the class of {key} cannot be read ({error})", "write it as text or JSON in UTF-8") from None
    return NoClass(f"no .cls, and no .json with one of {', '.join(_NAMES)}")
