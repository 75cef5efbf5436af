"""Writing shards: every image is checked, interruptions cost nothing, nothing of others is touched."""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import numpy as np
import nvidia.dali.fn as fn
import pytest
from conftest import REPOSITORY, clean_environment, run_script
from nvidia.dali import pipeline_def, types
from PIL import Image

from data_prep.checks import ImageRules, Rejected, check_decodes, prepare_image
from data_prep.sources import ImageFolder
from data_prep.tar_writer import TarWriter
from data_prep.writer import Share, write_shards
from pipeline.data.shards import Manifest, ShardSet, file_sha256
from pipeline.errors import UserError

SHARDER = "data_prep/shard_imagenet.py"


def picture(side: int = 48, seed: int = 0) -> Image.Image:
    """A smooth RGB picture, (side + 16) x side pixels."""
    rough = np.random.default_rng(seed).integers(0, 256, size=(6, 8, 3), dtype=np.uint8)
    return Image.fromarray(rough).resize((side + 16, side), Image.Resampling.BICUBIC)


def encoded(image: Image.Image, kind: str = "JPEG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def digests(folder: Path) -> dict[str, str]:
    return {file.name: file_sha256(file) for file in sorted(folder.iterdir())}


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """60 images of 3 classes; two of them are no plain JPEG, three are damaged, one has broken EXIF."""
    root = tmp_path / "images"
    for label, class_name in enumerate(("n01", "n02", "n03")):
        (root / class_name).mkdir(parents=True)
        for number in range(20):
            (root / class_name / f"{number:02d}.JPEG").write_bytes(encoded(picture(seed=100 * label + number)))
    whole = encoded(picture(200))
    (root / "n01" / "03.JPEG").write_bytes(encoded(picture(), "PNG"))
    (root / "n01" / "04.JPEG").write_bytes(encoded(picture().convert("CMYK")))
    (root / "n02" / "05.JPEG").write_bytes(whole[: len(whole) // 2])
    (root / "n02" / "06.JPEG").write_bytes(b"")
    (root / "n03" / "07.JPEG").write_bytes(b"<html>404 not found</html>")
    (root / "n03" / "08.JPEG").write_bytes(encoded(picture(), exif=b"Exif\0\0MM\0*\xff\xff\xff\xffbroken"))
    return root


def test_what_dali_cannot_take_is_encoded_anew_and_what_nothing_can_decode_is_left_out(planted: Path, tmp_path: Path) -> None:
    """Guards against a training run that dies days later of one bad file, and against images that vanish silently."""
    output = tmp_path / "shards"
    arguments = ["--source", planted, "--output", output, "--samples-per-shard", 16]
    run_script(SHARDER, *arguments, "--max-rejected", 0.05, "--workers", 2)

    shards = ShardSet(output, "train")
    assert (len(shards), shards.info.rejected, shards.info.reencoded) == (57, 3, 2)
    assert {line["file"]: line["reason"] for line in lines(output / "rejected.jsonl")} == {
        "n02/05.JPEG": "a JPEG that is cut off",
        "n02/06.JPEG": "an empty file",
        "n03/07.JPEG": "not an image that can be decoded",
    }
    reencoded = {line["file"]: line for line in lines(output / "reencoded.jsonl")}
    assert reencoded.keys() == {"n01/03.JPEG", "n01/04.JPEG"}
    assert "PNG" in reencoded["n01/03.JPEG"]["reason"] and "CMYK" in reencoded["n01/04.JPEG"]["reason"]

    stored = {}
    for index in range(len(shards)):
        info = shards.info.shards[shards.samples["shard"][index]]
        with tarfile.open(output / info.file) as tar:
            about = json.load(tar.extractfile(f"{shards.key(index)}.json"))
            jpeg = tar.extractfile(f"{shards.key(index)}.jpg").read()
        assert jpeg == shards.read_jpegs([index])[0].tobytes()
        assert about["wnid"] == shards.classes[shards.samples["label"][index]]
        stored[about["file"]] = shards.key(index), jpeg
    for name, (key, jpeg) in stored.items():
        original = (planted / name).read_bytes()
        if name in reencoded:
            image = Image.open(io.BytesIO(jpeg))
            assert (image.format, image.mode, key) == ("JPEG", "RGB", reencoded[name]["key"])
            expected = Image.open(planted / name).convert("RGB")
            assert np.abs(np.asarray(image, dtype=int) - np.asarray(expected, dtype=int)).mean() < 3
        else:
            assert jpeg == original, name


def test_too_many_bad_images_stop_the_run_with_the_list(planted: Path, tmp_path: Path) -> None:
    """Guards against a set that is half missing because a disk or a download is broken."""
    output = tmp_path / "shards"
    arguments = ["--source", planted, "--output", output, "--samples-per-shard", 16, "--workers", 1]
    result = run_script(SHARDER, *arguments, check=False)
    assert result.returncode == 2 and result.stderr.count("\n") == 1, result.stderr
    assert "at most 0 allowed by --max-rejected 0.001" in result.stderr
    assert not (output / "manifest.json").exists()
    listed = lines(output / "rejected.jsonl")
    assert listed and all(line["file"] in ("n02/05.JPEG", "n02/06.JPEG", "n03/07.JPEG") for line in listed)

    run_script(SHARDER, *arguments, "--max-rejected", 0.05)  # what was written before is of use
    write_shards(ImageFolder(planted, "train"), tmp_path / "at_once", "train", 16, 2, max_rejected=0.05)
    assert digests(output) == digests(tmp_path / "at_once")


def test_without_decoding_only_headers_are_looked_at(planted: Path, tmp_path: Path) -> None:
    """Guards against --no-check storing what the loader would crash on."""
    flipped = bytearray(encoded(picture(200)))
    del flipped[len(flipped) // 2 : len(flipped) // 2 + 2000]  # a hole in the compressed data; the end is there
    assert prepare_image(bytes(flipped), ImageRules(decode=False)).reencoded is None
    write_shards(ImageFolder(planted, "train"), tmp_path / "shards", "train", max_rejected=0.05, rules=ImageRules(decode=False))
    assert len(lines(tmp_path / "shards" / "rejected.jsonl")) == 3
    assert len(lines(tmp_path / "shards" / "reencoded.jsonl")) == 2


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
    stored = prepare_image(data, ImageRules())
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
    stored = [np.frombuffer(prepare_image(data, ImageRules()).data, dtype=np.uint8) for data in originals]

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


def test_resizing_stores_the_short_side_and_never_enlarges(tmp_path: Path) -> None:
    """Guards against distorted, enlarged or mislabelled pictures, and against a width in the index that is the source's."""
    root = tmp_path / "images" / "n01"
    root.mkdir(parents=True)
    for number, size in enumerate(((300, 200), (200, 301), (90, 100), (100, 500))):
        picture(300, seed=number).resize(size).save(root / f"{number}.JPEG", quality=95)
    arguments = ["--source", root.parent, "--output", tmp_path / "shards", "--workers", 1]
    run_script(SHARDER, *arguments, "--resize-short-side", 100, "--quality", 80)
    shards = ShardSet(tmp_path / "shards", "train")
    sizes = {}
    for index, jpeg in enumerate(shards.read_jpegs(np.arange(4))):
        image = Image.open(io.BytesIO(jpeg.tobytes()))
        assert image.size == (shards.samples["width"][index], shards.samples["height"][index])
        sizes[image.size] = jpeg.tobytes()
    assert sizes.keys() == {(150, 100), (100, 150), (90, 100), (100, 500)}
    assert sizes[90, 100] == (root / "2.JPEG").read_bytes() and sizes[100, 500] == (root / "3.JPEG").read_bytes()
    expected = Image.open(root / "0.JPEG").resize((150, 100), Image.Resampling.BICUBIC)
    assert np.abs(np.asarray(Image.open(io.BytesIO(sizes[150, 100])), dtype=int) - np.asarray(expected, dtype=int)).mean() < 4

    result = run_script(SHARDER, *arguments, "--resize-short-side", 100, "--quality", 81, check=False)
    assert "quality is 80, 81 needed" in result.stderr
    assert "--quality is 80 without --resize-short-side" in run_script(SHARDER, *arguments, "--quality", 80, check=False).stderr


def test_tars_are_byte_for_byte_those_of_tarfile() -> None:
    """Guards against headers that some tar reader does not take."""
    members = [(f"000007-{i:06d}.jpg", b"x" * size) for i, size in enumerate((0, 1, 511, 512, 513, 100_000))]
    ours, theirs = io.BytesIO(), io.BytesIO()
    writer = TarWriter(ours)
    places = writer.add(members[:2]) + writer.add(members[2:])
    writer.close()
    with tarfile.open(fileobj=theirs, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    assert ours.getvalue() == theirs.getvalue()
    assert [ours.getvalue()[place : place + len(data)] for place, (_, data) in zip(places, members)] == [d for _, d in members]


def test_a_killed_run_is_finished_without_writing_a_shard_twice(digits_images: Path, tmp_path: Path) -> None:
    """Guards against days of sharding lost to one kill, and against workers that outlive their parent."""
    output, whole = tmp_path / "shards", tmp_path / "whole"
    arguments = [SHARDER, "--source", digits_images, "--output", output, "--split", "train", "--samples-per-shard", 40]
    process = subprocess.Popen(
        [sys.executable, *map(str, arguments), "--workers", "2"],
        cwd=REPOSITORY,
        env=clean_environment(),
        start_new_session=True,
    )
    deadline = time.monotonic() + 60
    while len(list(output.glob(".*.finished.npz"))) < 5:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)  # the parent alone: its workers must notice
    process.wait()
    while _session_members(process.pid):
        assert time.monotonic() < deadline, "workers outlive their parent"
        time.sleep(0.01)
    assert not (output / "manifest.json").exists()
    finished = {path.name[1:13] for path in output.glob(".*.finished.npz")}
    assert 4 <= len(finished) < 36
    times = {path.name: path.stat().st_mtime_ns for name in finished for path in output.glob(f"{name}.*")}

    other = run_script(*arguments, "--seed", 7, check=False)
    assert "holds an unfinished train set of another run (seed is 0, 7 needed)" in other.stderr
    run_script(*arguments)
    assert times == {name: (output / name).stat().st_mtime_ns for name in times}
    write_shards(ImageFolder(digits_images, "train"), whole, "train", 40, workers=1)
    assert digests(output) == digests(whole)


def test_ctrl_c_is_one_line_and_keeps_what_is_finished(digits_images: Path, tmp_path: Path) -> None:
    """Guards against a screen full of the workers' tracebacks, and against half-written files that stay."""
    output = tmp_path / "shards"
    arguments = [SHARDER, "--source", digits_images, "--output", output, "--split", "train", "--samples-per-shard", 20]
    process = _started(arguments, output, finished=1)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    _, stderr = process.communicate(timeout=60)
    assert (process.returncode, stderr) == (130, "stopped; the same command goes on from what is saved\n")
    assert list(output.glob(".*.finished.npz")) and not list(output.glob(".*.tmp"))


def test_a_killed_worker_is_one_line(digits_images: Path, tmp_path: Path) -> None:
    """Guards against a run that waits for ever for a worker that the system killed for its memory, and against a traceback."""
    output = tmp_path / "shards"
    arguments = [SHARDER, "--source", digits_images, "--output", output, "--split", "train", "--samples-per-shard", 20]
    process = _started(arguments, output, finished=1)
    workers = [pid for pid in _session_members(process.pid) if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(workers[0], signal.SIGKILL)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 2 and stderr.count("\n") == 1, stderr
    assert "a worker process was killed or ran out of memory, all 2 needed" in stderr


def _started(arguments: list, output: Path, finished: int) -> subprocess.Popen:
    """The sharder in a session of its own, once it has finished that many shards."""
    process = subprocess.Popen(
        [sys.executable, *map(str, arguments), "--workers", "2"],
        cwd=REPOSITORY,
        env=clean_environment(),
        start_new_session=True,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while len(list(output.glob(".*.finished.npz"))) < finished:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.002)
    return process


def _session_members(session: int) -> list[int]:
    """Processes of a session that live."""
    members = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, found = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
        except OSError:  # it ended meanwhile
            continue
        if int(found) == session and state != "Z":
            members.append(int(entry.name))
    return members


def test_a_finished_shard_that_was_changed_is_written_again(digits_images: Path, tmp_path: Path) -> None:
    """Guards against a manifest over a tar that somebody cut off between two runs."""
    source, output = ImageFolder(digits_images, "val"), tmp_path / "shards"
    assert write_shards(source, output, "val", 100, share=Share(0, 2)) is None
    whole = (output / "val-000000.tar").read_bytes()
    (output / "val-000000.tar").write_bytes(whole[:1000])
    (output / ".val-000002.tar.123.tmp").write_bytes(b"left by a killed run")
    write_shards(source, output, "val", 100)
    assert (output / "val-000000.tar").read_bytes() == whole
    assert not list(output.glob(".val*"))


def test_tasks_write_their_own_shards_and_the_last_one_the_manifest(digits_images: Path, tmp_path: Path) -> None:
    """Guards against a job array whose shards nobody joins, or whose result depends on the number of tasks."""
    source = ImageFolder(digits_images, "val")
    for task in (2, 0):
        assert write_shards(source, tmp_path / "array", "val", 50, share=Share(task, 3)) is None
        assert not (tmp_path / "array" / "manifest.json").exists()
    assert write_shards(source, tmp_path / "array", "val", 50, share=Share(1, 3)).samples == 359
    write_shards(source, tmp_path / "alone", "val", 50, workers=2)
    assert digests(tmp_path / "array") == digests(tmp_path / "alone")
    assert write_shards(source, tmp_path / "array", "val", 50, share=Share(1, 3)).samples == 359
    error = run_script(SHARDER, "--source", digits_images, "--output", tmp_path, "--task", 3, "--tasks", 3, check=False)
    assert "a task from 0 to 2 needed" in error.stderr


def test_two_runs_do_not_write_the_same_shard(digits_images: Path, tmp_path: Path) -> None:
    """Guards against a requeued job that meets its former self."""
    holder = (
        "import sys, time\nfrom pathlib import Path\nfrom data_prep.files import FolderLock\n"
        "with FolderLock(Path(sys.argv[1])) as lock:\n    lock.take_shards('val', [1])\n    print('held', flush=True)\n    sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", holder, str(tmp_path)]
    environment = clean_environment(PYTHONPATH=str(REPOSITORY))
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        source = ImageFolder(digits_images, "val")
        with pytest.raises(UserError, match="val shard 1 is being written by another process"):
            write_shards(source, tmp_path, "val", 100)
        assert write_shards(source, tmp_path, "val", 100, share=Share(0, 2)) is None
        process.stdin.close()
    assert write_shards(source, tmp_path, "val", 100, share=Share(1, 2)).samples == 359


def test_refuses_a_disk_that_is_too_small_and_a_folder_in_the_source(digits_images: Path, tmp_path: Path) -> None:
    """Guards against a full disk after hours, and against shards that the next run takes for images."""
    root = tmp_path / "images" / "n01"
    root.mkdir(parents=True)
    picture().save(root / "a.JPEG")
    free = shutil.disk_usage(tmp_path).free
    with open(root / "b.JPEG", "wb") as file:
        file.truncate(free + 10**9)  # takes no space itself
    result = run_script(SHARDER, "--source", root.parent, "--output", tmp_path / "shards", check=False)
    assert result.returncode == 2 and "GB needed for the shards: free some space" in result.stderr
    assert not list((tmp_path / "shards").glob("*.tar"))

    for output in (digits_images / "val", digits_images / "val" / "shards"):
        with pytest.raises(UserError, match="lies in the source"):
            write_shards(ImageFolder(digits_images, "val"), output, "val")
    assert not (digits_images / "val" / "shards").exists()


def test_the_manifest_holds_both_splits_and_their_lists(planted: Path, tmp_path: Path) -> None:
    """Guards against a list that the other split's run overwrites."""
    (tmp_path / "tree").mkdir()
    for split in ("train", "val"):
        shutil.copytree(planted, tmp_path / "tree" / split)
    for split in ("val", "train"):
        write_shards(ImageFolder(tmp_path / "tree", split), tmp_path / "shards", split, max_rejected=0.05)
    assert [line["split"] for line in lines(tmp_path / "shards" / "rejected.jsonl")] == ["train"] * 3 + ["val"] * 3
    assert list(Manifest.read(tmp_path / "shards").splits) == ["train", "val"]
