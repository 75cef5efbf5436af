"""What becomes of each kind of image on its way into a shard."""

from __future__ import annotations

import io
import random
from pathlib import Path

import numpy as np
import nvidia.dali.fn as fn
import pytest
from nvidia.dali import pipeline_def, types
from PIL import Image

from pipeline.shards.image_checks import ImageRules, Rejected, StoredImage, check_decodes, prepare_image
from support.images import encoded, picture


@pytest.mark.parametrize(
    "kind, mode, kept",
    [
        ("JPEG", "RGB", True),
        ("JPEG", "L", True),
        ("JPEG", "CMYK", False),
        ("PNG", "RGBA", False),
        ("PNG", "P", False),
        ("PNG", "I;16", False),
        ("PNG", "LA", False),
        ("GIF", "P", False),
        ("BMP", "RGB", False),
        ("WEBP", "RGB", False),
        ("TIFF", "RGB", False),
    ],
)
def test_every_kind_of_image_ends_as_a_jpeg_with_the_same_pixels(kind: str, mode: str, kept: bool) -> None:
    """Guards against a kind of file that DALI cannot decode, and against black or clipped pictures after conversion."""
    grey = np.asarray(picture().convert("L"))
    if mode == "I;16":
        image = Image.fromarray(grey.astype(np.uint16) * 257)
    else:
        image = Image.merge("RGB", [Image.fromarray(grey)] * 3).convert(mode)
    data = encoded(image, kind)
    stored = prepare_image(data, ImageRules(keep_formats=False))
    assert (stored.data == data) == kept == (stored.reencoded is None)
    decoded = Image.open(io.BytesIO(stored.data))
    assert (
        decoded.format == "JPEG"
        and decoded.mode in ("L", "RGB")
        and decoded.size == (stored.width, stored.height) == image.size
    )
    expected = (
        grey if mode == "I;16" else np.asarray(image.convert("RGB").convert("L"))
    )  # a palette is coarser than the picture
    assert np.abs(np.asarray(decoded.convert("L"), dtype=int) - expected).mean() < 5


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("kind", [np.float32, np.int32])
def test_pixels_of_unknown_range_are_rejected(kind: type, keep: bool) -> None:
    """Guards against floats in [0, 1] that are stored as a black picture, and 32-bit integers that are cut off."""
    grey = np.asarray(picture().convert("L"))
    image = Image.fromarray((grey / 255 * (1 if kind is np.float32 else 2**31 - 1)).astype(kind))
    with pytest.raises(Rejected, match="32-bit pixels .* convert it to 8 or 16 bits"):
        prepare_image(encoded(image, "TIFF"), ImageRules(keep_formats=keep))


def test_sixteen_bits_of_a_ppm_are_reduced() -> None:
    """Guards against the rejection of a format that Pillow opens as 32-bit integers although it has 16 bits."""
    grey = np.asarray(picture().convert("L"))
    stored = prepare_image(encoded(Image.fromarray(grey.astype(np.uint16) * 257), "PPM"), ImageRules(keep_formats=False))
    assert np.abs(np.asarray(Image.open(io.BytesIO(stored.data)), dtype=int) - grey).mean() < 5


def test_dali_decodes_whatever_is_stored() -> None:
    """Guards against rules that are right by Pillow and fail in training: DALI's decoders are others."""
    colours = picture()
    originals = [
        encoded(colours),
        encoded(colours, progressive=True),
        encoded(colours.convert("L")),
        encoded(colours.convert("CMYK")),
        encoded(colours.convert("RGBA"), "PNG"),
        encoded(colours, "WEBP", lossless=True),
    ]
    stored = [np.frombuffer(prepare_image(data, ImageRules(keep_formats=False)).data, dtype=np.uint8) for data in originals]

    @pipeline_def(batch_size=len(stored), num_threads=1, device_id=None)
    def graph():
        return fn.decoders.image(fn.external_source(lambda: stored, batch=True), output_type=types.RGB)

    pipeline = graph()
    pipeline.build()
    (decoded,) = pipeline.run()
    for i, data in enumerate(stored):
        expected = Image.open(io.BytesIO(data.tobytes())).convert("RGB")  # (H, W, 3)
        assert np.array_equal(decoded.at(i), np.asarray(expected))
        difference = np.abs(decoded.at(i).astype(int) - np.asarray(colours)).mean()
        assert difference < (60 if i == 2 else 5), "only gray loses its colours"


def test_progressive_jpegs_are_kept() -> None:
    """Guards against encoding anew what every decoder takes: it would cost quality for nothing."""
    data = encoded(picture(), progressive=True)
    assert prepare_image(data, ImageRules()).data == data


@pytest.mark.parametrize("garbage", [b"", b"\xff\x00"])
def test_a_jpeg_of_thousands_of_scans_is_rejected_at_once(garbage: bytes) -> None:
    """Guards against 156 KB that keep a decoder busy for 40 seconds, also behind a header that only libjpeg forgives."""
    data = encoded(picture().convert("L"), progressive=True)
    last = data[data.rindex(b"\xff\xda") : -2]

    def with_scans(count: int) -> bytes:
        return data[:2] + garbage + data[2:-2] + last * (count - data.count(b"\xff\xda")) + data[-2:]

    assert Image.open(io.BytesIO(with_scans(101))).load(), "Pillow takes it"
    with pytest.raises(Rejected, match="a progressive JPEG of more than 100 scans"):
        prepare_image(with_scans(101), ImageRules())
    if not garbage:
        assert prepare_image(with_scans(100), ImageRules()).reencoded is None
    hidden = b"\xff\xfe\x04\x00" + b"\xff\xda" * 511  # a comment: no scan in it counts
    assert prepare_image(data[:2] + hidden + data[2:], ImageRules()).reencoded is None


def test_the_quick_decode_finds_what_a_full_one_finds(imagenet_samples: Path) -> None:
    """Guards against a check that passes damaged files because it decodes at an eighth of the size."""
    rng = random.Random(0)
    found = 0
    for path in sorted(imagenet_samples.glob("*/*"))[:40]:
        data = bytearray(path.read_bytes())
        place = rng.randrange(600, len(data))
        if rng.random() < 0.5:
            del data[place:-2]  # cut off, with the end marker put back
        else:
            data[place : place + 40] = rng.randbytes(40)
        try:
            Image.open(io.BytesIO(data)).load()
            full = True
        except Exception:
            full = False
        try:
            check_decodes(bytes(data))
            quick = True
        except Rejected:
            quick = False
        assert full == quick, path
        found += not full
    assert found < 40


@pytest.mark.parametrize("name", ["bomb", "long", "junk"])
def test_images_that_ask_for_too_much_are_rejected(name: str) -> None:
    """Guards against a header of 16 bytes that makes the sharder take all memory, and against encoder tracebacks."""
    png = bytearray(encoded(Image.new("L", (4, 4)), "PNG"))
    if name == "bomb":
        png[16:24] = (60_000).to_bytes(4, "big") * 2
    elif name == "long":
        png = encoded(Image.new("L", (70_000, 1)), "PNG")
    else:
        png[40:50] = b"\xff" * 10
    with pytest.raises(Rejected):
        prepare_image(bytes(png), ImageRules())


def test_a_side_of_twenty_thousand_pixels() -> None:
    """Guards against the loss of panoramas, and against another library's words about an attack for an image that is merely too large."""
    wide = encoded(Image.new("L", (20_000, 300), 90))
    assert prepare_image(wide, ImageRules()) == StoredImage(wide, 20_000, 300)
    small = prepare_image(wide, ImageRules(resize_short_side=30))
    assert (small.width, small.height) == (2_000, 30)
    size = wide.index(b"\xff\xc0") + 5  # height and width in the frame's header
    square = wide[:size] + (20_000).to_bytes(2, "big") * 2 + wide[size + 4 :]
    with pytest.raises(Rejected, match="^has more than 178,956,970 pixels, the most that are decoded: make it smaller$"):
        prepare_image(square, ImageRules())
