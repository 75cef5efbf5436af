"""PNG, WebP, TIFF and BMP in shards: as they are where DALI gives Pillow's pixels, else as JPEG."""

from __future__ import annotations

import io
import random
import shutil
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import nvidia.dali.fn as fn
import pytest
import torch
from nvidia.dali import pipeline_def, types
from PIL import Image

from pipeline.config import AugmentConfig, DataConfig
from pipeline.loader.dali_graph import full_graph, full_inputs
from pipeline.loader.loader import Loader
from pipeline.shards.image_checks import ImageRules, Rejected, prepare_image
from pipeline.shards.manifest import ShardManifest
from pipeline.shards.shard_set import ShardSet
from support.batches import train_batches
from support.images import encoded, picture
from support.launching import run_script
from support.sharding import SHARDER, lines

COLOURS = picture(96)
GREY = COLOURS.convert("L")
RAMP = Image.fromarray(np.tile(np.arange(0, 224, 2, dtype=np.uint8), (96, 1)))
MODES = {"RGB": COLOURS, "L": GREY, "P": COLOURS.quantize(64), "1": GREY.convert("1"), "CMYK": COLOURS.convert("CMYK")}
for _name, _image in (("RGBA", COLOURS.copy()), ("LA", GREY.copy())):
    _image.putalpha(RAMP)
    MODES[_name] = _image
MODES["I;16"] = Image.fromarray(np.asarray(GREY).astype(np.uint16) * 257)
TURNED = Image.Exif()
TURNED[0x112] = 6  # by 90 degrees


def png_of_16_bits() -> bytes:
    """Pillow writes none of three channels."""
    pixels = np.random.default_rng(0).integers(0, 65536, (96, 112, 3), dtype=np.uint16)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in pixels)
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 112, 96, 16, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def forms() -> dict[str, tuple[bytes, bool]]:
    """Name -> an image and whether it is kept."""
    found = {f"{mode}.png": (encoded(MODES[mode], "PNG"), True) for mode in ("RGB", "L", "P", "1", "RGBA", "LA")}
    found |= {f"{mode}.bmp": (encoded(MODES[mode], "BMP"), True) for mode in ("RGB", "L", "P")}
    for name, options in (("lossy", {"quality": 80}), ("lossless", {"lossless": True})):
        found |= {f"{mode} {name}.webp": (encoded(MODES[mode], "WEBP", **options), True) for mode in ("RGB", "L", "RGBA")}
    for mode in ("RGB", "L"):
        for how in (None, "tiff_lzw", "tiff_deflate", "tiff_adobe_deflate"):
            found[f"{mode} {how}.tif"] = (encoded(MODES[mode], "TIFF", compression=how), True)
    return found | {
        "transparent.png": (encoded(COLOURS, "PNG", transparency=(10, 20, 30)), True),
        "turned.png": (encoded(COLOURS, "PNG", exif=TURNED), True),
        "predictor.tif": (encoded(COLOURS, "TIFF", compression="tiff_lzw", tiffinfo={317: 2}), True),
        "odd.bmp": (encoded(COLOURS.crop((0, 0, 51, 33)), "BMP"), True),
        "16 bits.png": (encoded(MODES["I;16"], "PNG"), False),
        "16 bits in colour.png": (png_of_16_bits(), False),
        "moving.png": (encoded(COLOURS, "PNG", save_all=True, append_images=[GREY.convert("RGB")]), False),
        "moving.webp": (encoded(COLOURS, "WEBP", save_all=True, append_images=[GREY.convert("RGB")]), False),
        "turned.webp": (encoded(COLOURS, "WEBP", exif=TURNED), False),
        "turned.tif": (encoded(COLOURS, "TIFF", exif=TURNED), False),
        "two pages.tif": (encoded(COLOURS, "TIFF", save_all=True, append_images=[GREY]), False),
        "packbits.tif": (encoded(COLOURS, "TIFF", compression="packbits"), False),
        "jpeg inside.tif": (encoded(COLOURS, "TIFF", compression="jpeg"), False),
        **{f"{mode}.tif": (encoded(MODES[mode], "TIFF"), False) for mode in ("RGBA", "LA", "P", "1", "CMYK", "I;16")},
        "1.bmp": (encoded(MODES["1"], "BMP"), False),
        "RGBA.bmp": (encoded(MODES["RGBA"], "BMP"), False),
        "a PNG.jpg": (encoded(COLOURS, "PNG"), False),
        "an image.gif": (encoded(MODES["P"], "GIF"), False),
        "CMYK.jpg": (encoded(MODES["CMYK"]), False),
    }


def decoded_by_dali(images: list[bytes]) -> list[np.ndarray]:
    arrays = [np.frombuffer(data, dtype=np.uint8) for data in images]

    @pipeline_def(batch_size=len(arrays), num_threads=1, device_id=None)
    def graph():
        encoded_images = fn.external_source(lambda: arrays, batch=True)
        return fn.decoders.image(encoded_images, output_type=types.RGB, adjust_orientation=False)

    pipeline = graph()
    pipeline.build()
    (output,) = pipeline.run()
    return [np.array(output.at(i)) for i in range(len(arrays))]


def test_each_form_is_kept_or_a_jpeg_and_dali_gives_pillows_pixels(capfd: pytest.CaptureFixture[str]) -> None:
    """Guards against an image that DALI shows in other colours, turned or not at all, or reports on stderr for every batch."""
    named = forms()
    stored = {name: prepare_image(data, ImageRules(), name) for name, (data, _) in named.items()}
    for name, (data, kept) in named.items():
        assert (stored[name].data == data) == kept == (stored[name].reencoded is None), name
        assert stored[name].suffix == (name.rpartition(".")[2] if kept else "jpg")
    for name, pixels in zip(stored, decoded_by_dali([image.data for image in stored.values()])):
        image = stored[name]
        assert pixels.shape == (image.height, image.width, 3), name
        assert np.array_equal(pixels, np.asarray(Image.open(io.BytesIO(image.data)).convert("RGB"))), name
    turned = prepare_image(named["turned.tif"][0], ImageRules())
    assert (turned.width, turned.height) == (96, 112), "as Pillow shows it"
    assert "[ERROR]" not in capfd.readouterr().err


@pytest.mark.parametrize("suffix", ["png", "webp", "tif", "bmp"])
def test_headers_that_are_damaged_never_reach_dali(suffix: str) -> None:
    """Guards against a header that our parser and Pillow forgive and DALI does not, which can end the process."""
    rng, passed = random.Random(suffix), []
    whole = encoded(COLOURS, {"tif": "TIFF"}.get(suffix, suffix.upper()))
    for _ in range(250):
        data = bytearray(whole)
        places = {"png": 33, "webp": 300}.get(suffix, 60)
        start = len(data) - 300 if suffix == "tif" and whole[4:8] != b"\x08\0\0\0" else 0
        for _ in range(rng.randint(1, 3)):
            data[start + rng.randrange(places)] = rng.choice((0, 1, 255, rng.randrange(256)))
        if suffix == "png":
            data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))  # else nothing passes
        if rng.random() < 0.2:
            del data[rng.randrange(len(data)) :]
        try:
            image = prepare_image(bytes(data), ImageRules())
        except Rejected:
            continue
        passed.append(image.data)
    assert len(passed) > 3
    for data, pixels in zip(passed, decoded_by_dali(passed)):
        assert np.array_equal(pixels, np.asarray(Image.open(io.BytesIO(data)).convert("RGB")))


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ShardSet]:
    """The same pixels as JPEG and in each lossless format, each as a shard set of the command."""
    root = tmp_path_factory.mktemp("twins")
    formats = {"jpg": "JPEG", "png": "PNG", "webp": "WEBP", "tiff": "TIFF", "bmp": "BMP"}
    for number in range(12):
        data = encoded(picture(60 + 7 * number, seed=number), quality=92)
        for suffix, kind in formats.items():
            file = root / suffix / "abc"[number % 3] / f"{number:02d}.{suffix}"
            file.parent.mkdir(parents=True, exist_ok=True)
            options = {"lossless": True} if suffix == "webp" else {}
            file.write_bytes(data if suffix == "jpg" else encoded(Image.open(io.BytesIO(data)), kind, **options))
    for suffix in formats:
        arguments = ("--source", root / suffix, "--output", root / f"{suffix}-shards", "--split", "train", "--workers", 1)
        run_script(SHARDER, *arguments)
    return {suffix: ShardSet(root / f"{suffix}-shards", "train") for suffix in formats}


def given(inputs: tuple) -> Callable[[], tuple]:
    return lambda: inputs


@pytest.mark.parametrize("suffix", ["png", "webp", "tiff", "bmp"])
def test_a_batch_is_that_of_the_jpegs_bit_for_bit(suffix: str, twins: dict[str, ShardSet]) -> None:
    """Guards against crops, colours or sizes that depend on the format, on the CPU path and in the graph that GPUs run."""
    config, seen = DataConfig(num_threads=1), {}
    for name in ("jpg", suffix):
        batches = train_batches(
            twins[name], global_batch=12, micro_batch=12, data=config, augment=AugmentConfig(rand_augment_ops=2)
        )
        with torch.no_grad():
            loader = Loader(batches, config, torch.device("cpu"))
            batch = next(loader)
            loader.close()
        request = batches.request(0)
        inputs = full_inputs(list(map(twins[name].read, request.index)), request)
        (whole,) = full_graph(given(inputs), batches, None, 1, 1).run()
        seen[name] = batch.images.numpy(), batch.labels.numpy(), np.array(whole.as_tensor())
    for ours, theirs in zip(seen[suffix], seen["jpg"]):
        assert np.array_equal(ours, theirs)


def test_the_set_says_what_it_holds(twins: dict[str, ShardSet]) -> None:
    """Guards against members, indexes, counts or an identity that are those of JPEGs, and sets of JPEGs that change."""
    for suffix, member in (("png", "png"), ("tiff", "tif")):
        shards = twins[suffix]
        manifest = ShardManifest.read(shards.folder)
        assert manifest.splits["train"].formats == {member: 12} and manifest.version == 1
        assert (
            f"KEY {member}".replace("KEY", "v1.2 12\n" + member).split("\n")[0]
            in (shards.folder / "train-000000.idx").read_text()
        )
        assert (shards.folder / "train-000000.idx").read_text().count(f".{member}") == 12
        assert shards.identity()["formats"] == {member: 12} != twins["jpg"].identity().get("formats")
        assert "all is well" in run_script("data_prep/verify_shards.py", shards.folder, "--decode", "--workers", 1).stdout
    assert ShardManifest.read(twins["jpg"].folder).splits["train"].formats == {}
    tar = twins["png"].folder / "train-000000.tar"
    copy = twins["png"].folder.parent / "damaged"
    shutil.copytree(twins["png"].folder, copy)
    data = bytearray(tar.read_bytes())
    data[512 + 1] = 0  # the signature of the first PNG
    (copy / tar.name).write_bytes(data)
    table = run_script("data_prep/verify_shards.py", copy, "--workers", 1, check=False).stdout
    assert "not a png that shards keep" in table and "an intact png" in table


def test_images_that_are_kept_are_counted(tmp_path: Path) -> None:
    """Guards against a set of which nobody knows that it is not all JPEGs."""
    for number in range(4):
        file = tmp_path / "images" / "ab"[number % 2] / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(encoded(picture(40, seed=number), "PNG"))
    said = run_script(SHARDER, "--source", tmp_path / "images", "--output", tmp_path / "shards", "--workers", 1).stdout
    assert "0 re-encoded" in said and "keeps 4 non-JPEG images unchanged: 4 png" in said


def test_what_is_not_kept_is_counted_and_listed(tmp_path: Path) -> None:
    """Guards against images that become JPEGs, or are left out, without a word."""
    folder = tmp_path / "images" / "a"
    folder.mkdir(parents=True)
    for name, (data, _) in forms().items():
        if not name.endswith("gif"):
            (folder / name).write_bytes(data)
    (folder / "cut off.png").write_bytes(encoded(COLOURS, "PNG")[:-20])
    (folder / "no image.bmp").write_bytes(b"BM no image")
    arguments = ("--source", folder.parent, "--output", tmp_path / "shards", "--workers", 1, "--max-rejected", 1)
    said = run_script(SHARDER, *arguments).stdout
    listed = {line["file"]: line["reason"] for line in lines(tmp_path / "shards" / "reencoded.jsonl")}
    assert listed.keys() == {f"a/{name}" for name, (_, kept) in forms().items() if not kept and not name.endswith("gif")}
    assert "TIFF, not a JPEG" in listed["a/two pages.tif"] and f"{len(listed)} re-encoded, 2 rejected" in said
    rejected = {line["file"]: line["reason"] for line in lines(tmp_path / "shards" / "rejected.jsonl")}
    assert rejected["a/cut off.png"] == "a PNG that is cut off" and "a/no image.bmp" in rejected
