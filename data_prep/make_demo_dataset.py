"""Write a small real data set without a download: scikit-learn's handwritten digits as JPEG files.

    python -m data_prep.make_demo_dataset --output DIR

1,797 digits of 43 writers (UCI, "Optical Recognition of Handwritten Digits"), 10 classes, 8x8 grey levels enlarged to
64x64, split 80/20 within each class: DIR/train/<digit>/*.JPEG and DIR/val/<digit>/*.JPEG.

Examples:
    python -m data_prep.make_demo_dataset --output demo/images
    python -m data_prep.make_demo_dataset --output /tmp/digits
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from pipeline.command_line import command_parser, run_command
from pipeline.errors import UserError, missing_extra

SIDE = 64  # pixels
TRAIN_SHARE = 0.8
MAX_GREY = 16  # the data set's grey levels go from 0 to 16


def main() -> None:
    parser = command_parser("data_prep.make_demo_dataset", __doc__)
    parser.add_argument("--output", required=True, help="folder for the images; kept if it exists")
    output = Path(parser.parse_args().output)
    if output.exists():
        if not (output / "train" / "0").is_dir():
            raise UserError(
                f"--output must be new or hold the digits, got {output} without a folder train/0", "pass another --output"
            )
        print(f"{output}: the digits are already there")
        return
    temporary = output.with_name(f".{output.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    counts = write_digits(temporary)
    os.replace(temporary, output)
    print(f"{output}: wrote {counts['train']} train and {counts['val']} val images of 10 classes")


def write_digits(folder: Path) -> dict[str, int]:
    """Write the tree of JPEGs; the first 80 % of each class, in the order of the data set, are the train split.

    Returns:
        Images per split.
    """
    import numpy as np
    from PIL import Image

    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise missing_extra("the demo", "scikit-learn", "demo") from None

    digits = load_digits()
    counts = {"train": 0, "val": 0}
    for digit in range(10):
        images = digits.images[digits.target == digit]  # (n, 8, 8), 0 to 16
        first_val = round(TRAIN_SHARE * len(images))
        for number, pixels in enumerate(images):
            split = "train" if number < first_val else "val"
            path = folder / split / str(digit) / f"{number:04d}.JPEG"
            path.parent.mkdir(parents=True, exist_ok=True)
            grey = (pixels * (255 / MAX_GREY)).round().astype(np.uint8)
            Image.fromarray(grey).resize((SIDE, SIDE), Image.Resampling.BICUBIC).convert("RGB").save(path, "JPEG", quality=90)
            counts[split] += 1
    return counts


if __name__ == "__main__":
    run_command(main)
