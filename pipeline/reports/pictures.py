"""Images of a data set by their keys, small, inside of the page."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import numpy as np

from pipeline.data.image_folder import ImageFolder, open_split
from pipeline.data.manifest import sample_key
from pipeline.data.samples import DamagedSample
from pipeline.data.shards import ShardSet
from pipeline.page import Html, html
from pipeline.stores.place import Place

_SIDE = 160  # pixels of the longer side of a picture in the page
_QUALITY = 82


class Pictures:
    """Reads images of a data set.

    Args:
        folder: with shards or with images.
        classes: class names in index order, for a folder of images.

    Raises:
        UserError: there is no data set.
    """

    def __init__(self, folder: Place, classes: list[str], split: str = "val") -> None:
        self._set = open_split(folder, split, classes)
        self._names = {self._set.key(i): i for i in range(len(self._set))} if isinstance(self._set, ImageFolder) else {}
        self._first: dict[int, int] = {}
        if isinstance(self._set, ShardSet):
            shards, first = np.unique(self._set.samples["shard"], return_index=True)
            self._first = dict(zip(shards.tolist(), first.tolist()))

    @property
    def classes(self) -> list[str]:
        return list(self._set.class_names)

    def tag(self, key: str, label: int) -> Html | None:
        """The image of a key as an ``img`` element; None if it is not there, is of another label, or cannot be decoded."""
        index = self._index(key)
        if index is None:
            return None
        if int(self._set.samples[np.array([index])]["label"][0]) != label:
            return None  # another data set: a wrong picture would be worse than none
        try:
            return html('<img alt="{}" src="{}">', key, data_uri(self._set.read(index).tobytes()))
        except (DamagedSample, OSError, ValueError):
            return None

    def _index(self, key: str) -> int | None:
        if isinstance(self._set, ImageFolder):
            return self._names.get(key)
        shard, _, place = key.partition("-")
        if not (shard.isascii() and shard.isdigit() and place.isascii() and place.isdigit()) or len(key) > 30:
            return None
        index = self._first.get(int(shard), len(self._set)) + int(place)
        return index if index < len(self._set) and sample_key(int(shard), int(place)) == self._set.key(index) else None


def data_uri(encoded: bytes, side: int = _SIDE) -> str:
    """An image, made smaller, as the address of itself.

    Raises:
        OSError, ValueError: it cannot be decoded.
    """
    from PIL import Image

    with Image.open(io.BytesIO(encoded)) as image:
        small = image.convert("RGB")
    small.thumbnail((side, side))
    file = io.BytesIO()
    small.save(file, "JPEG", quality=_QUALITY)
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()


def file_uri(path: Path, longest: int = 1400) -> str:
    """A PNG file as an address of itself, made smaller where a side is longer than ``longest`` pixels.

    Raises:
        OSError, ValueError: it cannot be decoded.
    """
    from PIL import Image

    with Image.open(path) as image:
        image.load()
        shown = image if image.mode in ("RGB", "RGBA", "L", "P") else image.convert("RGB")
    if max(shown.size) > longest:
        shown = shown.convert("RGB")
        shown.thumbnail((longest, longest))
    file = io.BytesIO()
    shown.save(file, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
