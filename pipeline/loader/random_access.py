"""Give the samples of a set one by one, as PyTorch's map-style data sets do."""

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from pipeline.errors import UserError
from pipeline.stream.samples import DamagedSample, Samples


class RandomAccess(Dataset):
    """``(image, label)`` of each sample: the whole image, (3, H, W) uint8 on the CPU, not augmented, and an integer, or what ``labels`` has.

    Args:
        opened: opens the set: in workers of a DataLoader that are started anew, which cannot get open files.
        labels: (samples,) or (samples, k); None: the classes.
        samples: the set, if it is open.
    """

    def __init__(self, opened: Callable[[], Samples], labels: np.ndarray | None, samples: Samples | None = None) -> None:
        self._opened, self._labels, self._samples = opened, labels, samples or opened()

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        """Raises IndexError: there is no such sample; UserError: it cannot be read or decoded."""
        at = range(len(self))[index]
        label = self._samples.samples[np.array([at])]["label"].astype(np.int64) if self._labels is None else self._labels[[at]]
        try:
            encoded = io.BytesIO(self._samples.read(at).tobytes())
            pixels = np.array(Image.open(encoded).convert("RGB"))  # (H, W, 3); EXIF's orientation is ignored, as in training
        except (DamagedSample, OSError) as error:
            damage = error if isinstance(error, DamagedSample) else self._samples.damaged(at, f"cannot be decoded ({error})")
            raise UserError(str(damage), "restore the file") from None
        return torch.from_numpy(pixels).permute(2, 0, 1), label[0].item() if label.ndim == 1 else torch.from_numpy(label[0])

    def __reduce__(self) -> tuple:
        return type(self), (self._opened, self._labels)
