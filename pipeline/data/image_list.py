"""Images of any place as the samples of an evaluation's plan, for ``pipeline.predict``."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from pipeline.data.image_checks import ImageRules, Rejected, StoredImage, prepare_image
from pipeline.data.image_folder import CheckedImages
from pipeline.data.image_names import NamedImages
from pipeline.data.shards import DamagedSample

NO_LABEL = 0  # the label of an image whose class is not known: a loader's batch needs one


class ImageList(CheckedImages):
    """:class:`~pipeline.data.samples.Samples` of images that a user names. What cannot be used does not end the pass: a grey image takes
    its place, and :attr:`errors` has the reason.

    Args:
        images: where they are.
        classes: the model's, in index order.
        by_folder: an image's label is the class that its folder is named after; an image in another folder is an error.

    Attributes:
        errors: sample number -> why it cannot be used, of those that were read.
    """

    def __init__(self, images: NamedImages, classes: Sequence[str], by_folder: bool = False) -> None:
        super().__init__()
        self.folder, self.classes, self.errors = Path(), list(classes), dict[int, str]()
        self._images, self._by_folder = images, by_folder
        self._label_of = {name: label for label, name in enumerate(classes)}

    def __len__(self) -> int:
        return len(self._images)

    def key(self, index: int) -> str:
        """The name of an image, as the user would give it."""
        return self._images.name(index)

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
            return prepare_image(self._images.data(index), ImageRules(), self._images.name(index))
        except Rejected as error:
            self.errors[index] = f"cannot be used: {error}"
        except OSError as error:
            self.errors[index] = f"cannot be read: {error.strerror or error}"
        except (zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:  # damaged, unknown compression, encrypted
            self.errors[index] = f"cannot be read: {error}"
        return _GREY


def _grey() -> StoredImage:
    file = io.BytesIO()
    Image.new("RGB", (16, 16), (128, 128, 128)).save(file, "JPEG")
    return StoredImage(file.getvalue(), 16, 16)


_GREY = _grey()
