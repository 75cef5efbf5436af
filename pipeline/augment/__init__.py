"""Augment images: draw numbers for the images of a batch, and change their pixels accordingly.

Draws are NumPy arrays, pure functions of a sample's place in the stream (:mod:`pipeline.stream.philox`), so that a sample is augmented
identically on any world size and after any restart. An augmentation is a frozen dataclass with its settings; ``@register`` adds it,
and nothing else has to name it: :func:`active` finds the modules of this package. Crop and flip (``crop``) are part of every batch.
"""

from __future__ import annotations

import importlib
import pkgutil
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np

from pipeline.augment.crop import Geometry
from pipeline.config import AugmentConfig, DataConfig
from pipeline.errors import UserError, first_line
from pipeline.lazy import import_named
from pipeline.stream.philox import Stream, uniforms

if TYPE_CHECKING:
    from nvidia.dali.data_node import DataNode
    from PIL import Image
    from torch import Tensor
    from typing_extensions import Self

_FIRST_NAMED = 256  # smaller numbers are those of Stream
_STREAMS = 1 << 16
_registered: list[type[Augmentation]] = []
Kind = TypeVar("Kind", bound="Augmentation")


@dataclass(frozen=True)
class Places:
    """The places in the stream for which numbers are drawn: those of B images."""

    seed: int  # of the run
    epoch: np.ndarray  # (B,) int64
    position: np.ndarray  # (B,) int64: position in the epoch
    number: np.ndarray  # (B,) int64: number in the run of the global batches' slot
    different: int  # images this far apart in a mixing group are different ones, also around its end

    def uniforms(self, stream: Stream | str, count: int) -> np.ndarray:
        """(B, count) random numbers in [0, 1), multiples of 2**-32."""
        return uniforms(stream_number(stream), self.seed, self.epoch, self.position, count)


@dataclass(frozen=True)
class BatchRequest:
    """Samples and augmentation of one batch of one rank."""

    index: np.ndarray  # (B,) int64: sample numbers of the split
    label: np.ndarray  # (B,) int64
    epoch: np.ndarray  # (B,) int64
    position: np.ndarray  # (B,) int64: position in the epoch
    valid: np.ndarray  # (B,) bool: False marks padding
    geometry: Geometry
    # (B, 1 + operations) bool, the filters of the crop's resize and of geometric operations; None: all bicubic
    bilinear: np.ndarray | None = None
    draws: dict[Augmentation, Any] = field(default_factory=dict)  # what each active augmentation drew, in order of application

    def drawn(self, kind: type[Augmentation]) -> Any:
        """What an augmentation of this kind drew; None if none is active."""
        return next((draw for augmentation, draw in self.draws.items() if isinstance(augmentation, kind)), None)

    @property
    def of_pixels(self) -> list[PixelAugmentation]:
        """The active augmentations before normalization, in order of application."""
        return [augmentation for augmentation in self.draws if isinstance(augmentation, PixelAugmentation)]

    @property
    def of_batches(self) -> list[BatchAugmentation]:
        """Those after normalization, in order of application."""
        return [augmentation for augmentation in self.draws if isinstance(augmentation, BatchAugmentation)]

    def digested(self) -> list[np.ndarray]:
        """All that was drawn for the images, (B, ...) each, in the order that the sample log's digests have."""
        geometry = self.geometry
        crop = [geometry.start, geometry.shape, geometry.resize, geometry.crop, geometry.flip]
        pixels = [array for augmentation in self.of_pixels for array in augmentation.digested(self)]
        batches = [array for augmentation in self.of_batches for array in augmentation.digested(self)]
        return [*crop, *pixels, *([] if self.bilinear is None else [self.bilinear]), *batches]


class Augmentation(ABC):
    """An augmentation with its settings: a frozen dataclass."""

    stream: ClassVar[Stream | str]  # of its random numbers; a new one takes its own name, which must never be changed or reused
    place: ClassVar[int]  # of its application among those before, or those after normalization; the lowest first

    @property
    def filters(self) -> int:
        """Geometric operations of an image whose filter is drawn (``data.train_interpolation``)."""
        return 0

    @classmethod
    def from_config(cls, augment: AugmentConfig, data: DataConfig, image_size: int) -> Self | None:
        """The augmentation as a config asks for it; None: it is off. ``augment.imported`` sets the fields of somebody else's."""
        return None

    @abstractmethod
    def draw(self, places: Places) -> Any:
        """What is done to B images: a dataclass of arrays (B, ...), drawn with ``places.uniforms(self.stream, count)``."""

    def digested(self, request: BatchRequest) -> list[np.ndarray]:
        """The draw as arrays (B, ...) for the sample log: equal arrays for equal samples mean equal pixels."""
        return list(_arrays(request.draws[self]))


class PixelAugmentation(Augmentation):
    """An augmentation of 8-bit pixels, before normalization: image by image on a CPU, in a DALI graph on a GPU."""

    @property
    @abstractmethod
    def graph_types(self) -> tuple[tuple[type, int], ...]:
        """NumPy type (bool_, uint8, int32, float32) and dimensions, without the batch's, of each of :meth:`graph_inputs`."""

    @abstractmethod
    def applies(self, request: BatchRequest, i: int) -> bool:
        """Whether image i of a batch is changed."""

    @abstractmethod
    def on_picture(self, picture: Image.Image, request: BatchRequest, i: int) -> Image.Image:
        """Image i of a batch, augmented, where it :meth:`applies`. Runs in several threads; Pillow releases the GIL."""

    def graph_inputs(self, request: BatchRequest) -> tuple[np.ndarray, ...]:
        """The inputs of :meth:`in_graph`, (B, ...) each."""
        return tuple(_arrays(request.draws[self]))

    @abstractmethod
    def in_graph(self, images: DataNode, *inputs: DataNode) -> DataNode:
        """Augment images, (S, S, 3) uint8 with layout HWC on the CPU or the GPU, in a DALI graph with conditionals and CPU inputs."""


class BatchAugmentation(Augmentation):
    """An augmentation of normalized batches, on the device."""

    @abstractmethod
    def apply_(self, images: Tensor, request: BatchRequest) -> None:
        """Augment a batch, (B, 3, H, W) float32, in place on a CPU: image by image or group by group, as suits its caches."""

    def device_arrays(self, request: BatchRequest, shape: tuple[int, ...]) -> tuple[np.ndarray, ...]:
        """What :meth:`apply_batch_` needs on the device for images of a shape (B, 3, H, W); copied there with the labels at once."""
        return ()

    def apply_batch_(self, images: Tensor, request: BatchRequest, *arrays: Tensor) -> None:
        """:meth:`apply_` in a few operations on the whole batch, contiguous, with :meth:`device_arrays`, as a GPU needs it: same pixels."""
        self.apply_(images, request)

    def mixed_labels(self, request: BatchRequest) -> tuple[np.ndarray, np.ndarray] | None:
        """The second label of each image, (B,) int64, and the weight of its own, (B,) float32; None: labels stay as they are."""
        return None


def register(kind: type[Kind]) -> type[Kind]:
    """Add an augmentation, as a decorator of its class."""
    for other in _registered:
        if stream_number(other.stream) == stream_number(kind.stream):
            raise ValueError(f"the stream of {kind.__name__} must differ from that of {other.__name__}")
    _registered.append(kind)
    return kind


def active(augment: AugmentConfig, data: DataConfig, image_size: int) -> tuple[Augmentation, ...]:
    """What a config asks for, in order of application. Raises UserError: an imported augmentation is none, or depends on other images."""
    asked_for = [kind.from_config(augment, data, image_size) for kind in _all()]
    asked_for += [_imported(path, settings, image_size) for path, settings in augment.imported.items()]
    found = [augmentation for augmentation in asked_for if augmentation]
    return tuple(sorted(found, key=lambda each: (isinstance(each, BatchAugmentation), each.place)))


def stream_number(stream: Stream | str) -> int:
    """The number of a stream; that of a name is its checksum."""
    if isinstance(stream, Stream):
        return int(stream)
    return _FIRST_NAMED + zlib.crc32(stream.encode()) % (_STREAMS - _FIRST_NAMED)


@lru_cache(maxsize=1)
def _all() -> list[type[Augmentation]]:
    for module in pkgutil.iter_modules(__path__, f"{__name__}."):
        importlib.import_module(module.name)
    return list(_registered)


def _imported(path: str, settings: dict[str, Any], image_size: int) -> Augmentation:
    """An augmentation of ``augment.imported``, constructed with its settings and tried on four places of the stream."""
    kind = import_named("augment.imported", path, "a class that can be imported, as module:Class")
    try:
        if not issubclass(kind, Augmentation):
            raise TypeError("it is no subclass of pipeline.augment.PixelAugmentation or BatchAugmentation")
        if kind not in _registered:
            register(kind)
        given = {name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()}
        sized = {"image_size": image_size} if "image_size" in kind.__dataclass_fields__ else {}
        augmentation: Augmentation = kind(**{**sized, **given})
        hash(augmentation)  # which only a frozen dataclass has
        number = np.arange(4)
        places = Places(0, np.zeros_like(number), number, number, 1), Places(0, np.zeros(2, int), number[2:], number[2:], 1)
        whole, part = (list(_arrays(augmentation.draw(each))) for each in places)
        if not all(np.array_equal(some[2:], few) for some, few in zip(whole, part)):
            raise ValueError("what it draws for an image depends on other images, or on a generator of its own")
    except Exception as error:  # of somebody else's code
        problem = f"augment.imported: {path} with {settings} is no augmentation ({type(error).__name__}: {first_line(error)})"
        raise UserError(problem, "correct it, or remove it from augment.imported") from None
    return augmentation


def _arrays(draw: Any) -> Iterator[np.ndarray]:
    """The arrays of a dataclass, and of those in it, in the order of the fields."""
    for value in (getattr(draw, each.name) for each in fields(draw)):
        yield from _arrays(value) if is_dataclass(value) else (value,)
