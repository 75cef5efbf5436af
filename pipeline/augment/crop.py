"""Draw crop, resize and flip as arrays over a batch; choose the resize's filter, and correct DALI's resize at the borders.

Numbers only; the pixels follow in :mod:`pipeline.loader.dali_graph` and :mod:`pipeline.loader.cpu_transform`.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

CROP_ATTEMPTS = 10  # as in torchvision
MAX_RATIO = 16  # images with a larger ratio of their sides are cropped before they are resized as a whole: bounds memory
CROP_PAD = 4  # pixels at each border
PAD_MODES = {"simple": "reflect", "padded": "constant"}  # data.train_crop -> how its borders are filled, a mode of np.pad
UNIFORMS_PER_SAMPLE = 2 * CROP_ATTEMPTS + 3  # area and ratio per attempt; top, left, flip
# Probability of the bilinear filter, by data.train_interpolation. timm's "random" chooses for each crop, and once more for each
# geometric operation of an image (RandomResizedCropAndInterpolation and AugmentOp of timm 0.4.12, which PosMLP uses).
BILINEAR_SHARE = {"bicubic": 0.0, "bilinear": 1.0, "random": 0.5}
_SUPPORT = {False: 2.0, True: 1.0}  # of the cubic and the linear filter, in pixels of the smaller image


@dataclass(frozen=True)
class Geometry:
    """Geometry of B images; pairs are (rows, columns), in pixels unless noted."""

    start: np.ndarray  # (B, 2) int32: upper left corner of the window to decode
    shape: np.ndarray  # (B, 2) int32: size of the window
    resize: np.ndarray  # (B, 2) float32: size that the window is resized to
    crop: np.ndarray  # (B, 2) float32: position of the output in the resized window; 0 upper left, 1 lower right
    flip: np.ndarray  # (B,) int32: 1 flips horizontally
    pad_mode: str | None = None  # of PAD_MODES: how the resized window gets CROP_PAD pixels on each side; None: it gets none


def train_geometry(
    height: np.ndarray,
    width: np.ndarray,
    uniforms: np.ndarray,
    image_size: int,
    scale: tuple[float, float],
    ratio: tuple[float, float],
    flip: float,
) -> Geometry:
    """Random resized crop (Szegedy et al., CVPR 2015; with torchvision's ten attempts and fallback) and flip.

    Args:
        height, width: (B,) of the stored images, in pixels.
        uniforms: (B, UNIFORMS_PER_SAMPLE) in [0, 1).
        scale, ratio: ranges of the crop's fraction of the area, and of width / height, sampled log-uniformly.
        flip: probability of a flip.
    """
    height, width = (np.asarray(side, dtype=np.int64) for side in (height, width))
    top_draw, left_draw, flip_draw = uniforms[:, 2 * CROP_ATTEMPTS :].T
    crop_w, crop_h = random_sides((height * width)[:, None], scale, ratio, uniforms[:, : 2 * CROP_ATTEMPTS])
    fits = (crop_w > 0) & (crop_w <= width[:, None]) & (crop_h > 0) & (crop_h <= height[:, None])
    first = np.arange(len(height)), fits.argmax(axis=1)  # the first attempt that fits
    crop_h, crop_w = crop_h[first], crop_w[first]
    top = (top_draw * (height - crop_h + 1)).astype(np.int64)
    left = (left_draw * (width - crop_w + 1)).astype(np.int64)

    # Fallback where no attempt fits (extreme aspect ratios): the largest centred window with an allowed ratio.
    whole = ~fits.any(axis=1)
    fallback_w = np.where(width > ratio[1] * height, np.rint(height * ratio[1]), width).astype(np.int64)
    fallback_h = np.where(width < ratio[0] * height, np.rint(width / ratio[0]), height).astype(np.int64)
    crop_w = np.where(whole, np.clip(fallback_w, 1, width), crop_w)
    crop_h = np.where(whole, np.clip(fallback_h, 1, height), crop_h)
    top, left = np.where(whole, (height - crop_h) // 2, top), np.where(whole, (width - crop_w) // 2, left)

    resize, crop = np.full((len(height), 2), image_size, dtype=np.float32), np.zeros((len(height), 2), dtype=np.float32)
    flips = (flip_draw < flip).astype(np.int32)
    return Geometry(_pairs(top, left, np.int32), _pairs(crop_h, crop_w, np.int32), resize, crop, flips)


def random_sides(
    area: np.ndarray | int, shares: tuple[float, float], ratios: tuple[float, float], uniforms: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Sides of random rectangles, (B, attempts) int64 each, of a uniform share of ``area`` and a log-uniform ratio, first / second.

    ``uniforms`` (B, 2 * attempts) has the numbers for the areas, then those for the ratios.
    """
    share_draw, ratio_draw = np.split(uniforms, 2, axis=1)
    part = area * (shares[0] + share_draw * (shares[1] - shares[0]))
    ratio = np.exp(np.log(ratios[0]) + ratio_draw * (np.log(ratios[1]) - np.log(ratios[0])))
    return np.rint(np.sqrt(part * ratio)).astype(np.int64), np.rint(np.sqrt(part / ratio)).astype(np.int64)


def padded_geometry(
    height: np.ndarray, width: np.ndarray, uniforms: np.ndarray, image_size: int, flip: float, pad_mode: str
) -> Geometry:
    """Random crop of a padded image, and flip: DeiT III's simple crop (ECCV 2022, Sec. 3; "reflect"), or that of CIFAR ("constant").

    The short side is resized to the output's side, 4 pixels are added at each border, mirrored or zero, and a square cropped anywhere:
    torchvision's ``Resize`` and ``RandomCrop(padding=4, padding_mode=...)``. Of an image with sides in a ratio above ``MAX_RATIO``,
    the middle is taken. Arguments as of :func:`train_geometry`; to mirror, the output's side is more than 4.
    """
    start, shape, resize = _whole(height, width, image_size)
    top_draw, left_draw, flip_draw = uniforms[:, 2 * CROP_ATTEMPTS :].T
    room = resize + 2 * CROP_PAD - image_size  # (B, 2), at least 2 * CROP_PAD
    corner = (np.stack([top_draw, left_draw], axis=1) * (room + 1)).astype(np.int64)
    flips = (flip_draw < flip).astype(np.int32)
    return Geometry(start, shape, resize.astype(np.float32), (corner / room).astype(np.float32), flips, pad_mode)


def eval_geometry(height: np.ndarray, width: np.ndarray, image_size: int, eval_crop: float) -> Geometry:
    """Evaluation geometry: resize the short side to :func:`eval_short_side` (224 / 0.875 = 256), crop the centre.

    Rounds like timm and torchvision, so that the pixels are those that published accuracies were measured on: both sides, (B,) of the
    stored images in pixels, down, and the corner of the centre crop to nearest (half to even).
    """
    start, shape, resize = _whole(height, width, eval_short_side(image_size, eval_crop))
    margin = resize - image_size
    crop = (np.rint(margin / 2) / np.maximum(margin, 1)).astype(np.float32)
    return Geometry(start, shape, resize.astype(np.float32), crop, flip=np.zeros(len(height), dtype=np.int32))


def eval_short_side(image_size: int, eval_crop: float) -> int:
    """The short side, in pixels, that evaluation resizes an image to: ``image_size / eval_crop`` rounded down, 248 for 224 / 0.9.

    The quotient is that of double precision, as in the references: 124 for 101 / 0.808, which is 125 in decimals.
    """
    return math.floor(image_size / eval_crop)


@lru_cache(maxsize=4096)  # a training set has a few hundred window sides; 2 KB each
def border_weights(before: int, after: int, bilinear: bool = False) -> np.ndarray:
    """What DALI's resize lacks at the borders of an axis, by an antialiased filter, to give Pillow's pixels.

    A pixel near the border depends on source pixels beyond it. Pillow and PyTorch leave these out and divide by the sum of the
    weights that remain; DALI repeats the border's pixel. With ``out`` the weight of what lies beyond the border, DALI's value ``d``
    and the border's pixel ``e``, Pillow's value is ``(d - out * e) / (1 - out) = d + out / (1 - out) * (d - e)``. Returns the
    factors ``out / (1 - out)``, (2, after) float32: for the border at the start and for that at the end; 0 away from it.

    Args:
        before, after: pixels along the axis.
        bilinear: the triangle filter instead of the cubic one (Keys, 1981, a = -1/2).
    """
    step = before / after
    stretch = max(step, 1.0)  # antialiasing widens the filter
    support = stretch * _SUPPORT[bilinear]
    centre = step * (np.arange(min(after, int(support / step) + 1)) + 0.5)  # of the (k,) pixels near the start
    taps = np.arange(-int(support + 0.5), int(centre[-1] + support) + 1) + 0.5  # pixel centres
    distance = np.abs((taps - centre[:, None]) / stretch)
    weight = np.maximum(1 - distance, 0.0) if bilinear else _cubic(distance)  # (k, taps)
    beyond_start, beyond_end = weight[:, taps < 0].sum(axis=1), weight[:, taps > before].sum(axis=1)
    factor = beyond_start / (weight.sum(axis=1) - beyond_start - beyond_end)
    factors = np.zeros((2, after), dtype=np.float32)
    factors[0, : len(centre)], factors[1, after - len(centre) :] = factor, factor[::-1]
    factors.flags.writeable = False  # shared by all who ask
    return factors


def resize_borders(geometry: Geometry, bilinear: np.ndarray | None = None) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """:func:`border_weights` of B images: of their rows, B of (2, height), and of their columns, B of (2, width)."""
    filters = [False] * len(geometry.shape) if bilinear is None else bilinear.tolist()
    rows, columns = (
        [border_weights(*sides) for sides in zip(shape.tolist(), size.astype(int).tolist(), filters)]
        for shape, size in zip(geometry.shape.T, geometry.resize.T)
    )
    return rows, columns


def _cubic(x: np.ndarray) -> np.ndarray:
    """Keys' kernel with a = -1/2, at distances."""
    near = (1.5 * x - 2.5) * x * x + 1
    far = ((-0.5 * x + 2.5) * x - 4) * x + 2
    return np.where(x < 1, near, np.where(x < 2, far, 0.0))


def _whole(height: np.ndarray, width: np.ndarray, short: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Start and shape, (B, 2) int32, of the whole image, or of a strip's middle, and its size, (B, 2) int64, with a short side ``short``."""
    stored = [np.asarray(side, dtype=np.int64) for side in (height, width)]
    smaller = np.minimum(*stored)
    # A strip of 65,000 x 1 pixels would take gigabytes when resized, but the crop needs only its middle.
    height, width = (np.minimum(side, MAX_RATIO * smaller) for side in stored)
    start = _pairs((stored[0] - height) // 2, (stored[1] - width) // 2, np.int32)
    return start, _pairs(height, width, np.int32), _pairs(height * short // smaller, width * short // smaller, np.int64)


def _pairs(rows: np.ndarray, columns: np.ndarray, dtype: type) -> np.ndarray:
    return np.stack([rows, columns], axis=1).astype(dtype)
