"""A small folder of images of every form."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image


def write_photos(folder: Path) -> Path:
    """A folder of three of the digits' classes with images of every form, one of them no image, one cut off."""
    rng = np.random.default_rng(0)
    forms = {"a.jpg": {}, "b.JPEG": {"progressive": True}, "c.png": {}, "gray.jpg": {"mode": "L"}, "cmyk.jpg": {"mode": "CMYK"}}
    for digit in "258":
        (folder / digit).mkdir(parents=True)
        for number, (name, options) in enumerate(forms.items()):
            size = (40 + 9 * number, 77 - 5 * int(digit))
            noise = Image.fromarray(rng.integers(0, 256, (6, 7, 3), dtype=np.uint8)).resize(size, Image.Resampling.BICUBIC)
            noise.convert(options.get("mode", "RGB")).save(folder / digit / name, progressive=options.get("progressive", False))
    (folder / "2" / "broken.jpg").write_bytes(b"no image")
    (folder / "5" / "cut.jpg").write_bytes((folder / "5" / "a.jpg").read_bytes()[:-400])
    (folder / "8" / "notes.txt").write_text("no image either")
    return folder
