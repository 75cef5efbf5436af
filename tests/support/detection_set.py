"""A small set for detection: scikit-learn's handwritten digits pasted on backgrounds, boxes and masks known, as COCO files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

SIDES = (28, 48)  # pixels of a pasted digit
TRAIN_SHARE = 0.8  # of each class's handwritten digits: the others are pasted in validation images only


def write_digit_set(folder: Path, train: int, val: int, side: int = 96, digits: tuple[int, ...] = (0, 1, 4)) -> Path:
    """Write ``train/``, ``val/``, ``train.json`` and ``val.json``.

    Args:
        folder: created.
        train, val: numbers of images.
        side: of an image, in pixels; the width is a quarter more, so that the two are not confused.
        digits: the categories; their ids are not contiguous.
    """
    from sklearn.datasets import load_digits

    source = load_digits()
    glyphs = {digit: source.images[source.target == digit] / 16 for digit in digits}  # (n, 8, 8) in [0, 1]
    for split, count, seed in (("train", train, 1), ("val", val, 2)):
        (folder / split).mkdir(parents=True)
        draw = np.random.default_rng(seed)
        parts = {
            digit: each[: round(TRAIN_SHARE * len(each))] if split == "train" else each[round(TRAIN_SHARE * len(each)) :]
            for digit, each in glyphs.items()
        }
        tree: dict[str, Any] = {
            "images": [],
            "annotations": [],
            "categories": [{"id": category_id(digit), "name": str(digit)} for digit in digits],
        }
        for number in range(1, count + 1):
            pixels, found = _scene(draw, parts, side)
            name = f"{number:06d}.jpg"
            Image.fromarray(pixels).save(folder / split / name, quality=95)
            height, width = pixels.shape[:2]
            tree["images"].append({"id": number, "file_name": name, "width": width, "height": height})
            for digit, mask in found:
                tree["annotations"].append(_annotation(len(tree["annotations"]) + 1, number, digit, mask))
        (folder / f"{split}.json").write_text(json.dumps(tree))
    return folder


def category_id(digit: int) -> int:
    """The COCO id of a digit's category."""
    return 3 * digit + 2


def overrides(folder: Path) -> list[str]:
    """The config keys of a set that :func:`write_digit_set` has written."""
    return [
        f"data.{split}_{what}={folder / name}"
        for split in ("train", "val")
        for what, name in (("images", split), ("annotations", f"{split}.json"))
    ]


def _scene(draw: np.random.Generator, glyphs: dict[int, np.ndarray], side: int) -> tuple[np.ndarray, list]:
    """(side, 5/4 side, 3) uint8, and for each digit in it its number and mask (side, 5/4 side) bool."""
    shape = (side, side * 5 // 4)
    ramps = draw.uniform(-0.25, 0.25, (2, 3))
    y, x = np.mgrid[0 : 1 : shape[0] * 1j, 0 : 1 : shape[1] * 1j][..., None]
    pixels = draw.uniform(0.2, 0.5, 3) + ramps[0] * y + ramps[1] * x + draw.normal(0, 0.03, (*shape, 3))
    found: list[tuple[int, np.ndarray]] = []
    taken = np.zeros(shape, bool)
    for _ in range(draw.integers(1, 4)):
        digit = int(draw.choice(list(glyphs)))
        size = int(draw.integers(*SIDES))
        glyph = Image.fromarray(glyphs[digit][draw.integers(len(glyphs[digit]))].astype(np.float32))
        ink = np.clip(np.array(glyph.resize((size, size), Image.Resampling.BICUBIC)), 0, 1)[..., None]
        top, left = (int(draw.integers(0, length - size)) for length in shape)
        place = np.s_[top : top + size, left : left + size]
        if taken[place].any():
            continue
        taken[place] = True
        pixels[place] = (1 - ink) * pixels[place] + ink * draw.uniform(0.75, 1, 3)
        mask = np.zeros(shape, bool)
        mask[place] = ink[..., 0] > 0.3
        found.append((digit, mask))
    return (np.clip(pixels, 0, 1) * 255).astype(np.uint8), found


def _annotation(number: int, image: int, digit: int, mask: np.ndarray) -> dict[str, Any]:
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    box = [columns[0], rows[0], columns[-1] - columns[0] + 1, rows[-1] - rows[0] + 1]
    return {
        "id": number,
        "image_id": image,
        "category_id": category_id(digit),
        "bbox": [float(value) for value in box],
        "area": float(mask.sum()),
        "iscrowd": 0,
        "segmentation": {"size": list(mask.shape), "counts": _run_lengths(mask)},
    }


def _run_lengths(mask: np.ndarray) -> list[int]:
    """COCO's uncompressed run lengths: column by column, beginning with the zeros."""
    flat = np.concatenate([[False], mask.flatten(order="F")])
    changes = np.flatnonzero(flat[1:] != flat[:-1])
    return np.diff(np.concatenate([[0], changes, [mask.size]])).tolist()
