"""The official tars with what the real ones hold besides plain JPEGs, and more: nothing good is lost, whatever happens."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from pipeline.shards.shard_set import ShardSet
from support.images import encoded, picture
from support.launching import PATIENCE, REPOSITORY, clean_environment, run_script
from support.official_files import DEVKIT, TRAIN_TAR, VAL_TAR, jpeg, write_devkit, write_train_tar, write_val_tar
from support.sharding import digests, lines

SHARDER = "data_prep/shard_imagenet.py"
WNIDS = ["n02119789", "n01440764", "n15075141", "n03888257"]  # by the devkit's id, 1 to 4
RANK = {wnid: rank for rank, wnid in enumerate(sorted(WNIDS))}
PER_CLASS, VAL = 100, 40


def write_planted(folder: Path) -> dict[str, int]:
    """The three official files, with a PNG, a CMYK, a truncated and an empty image in each tar.

    Returns:
        The class index of every image, by its name in the shards.
    """
    folder.mkdir()
    odd = {2: encoded(picture(), "PNG"), 3: encoded(picture().convert("CMYK")), 4: encoded(picture(200))[:3000], 5: b""}
    train = {
        wnid: {f"{wnid}_{n}.JPEG": odd[n] if n in odd and id_ == n - 2 else jpeg(PER_CLASS * id_ + n) for n in range(PER_CLASS)}
        for id_, wnid in enumerate(WNIDS)  # one odd image in each class
    }
    truth = [(3 * number) % 4 + 1 for number in range(VAL)]
    val = {f"ILSVRC2012_val_{n + 1:08d}.JPEG": odd.get(n) if n in odd else jpeg(1000 + n) for n in range(VAL)}
    write_train_tar(folder / TRAIN_TAR, train)
    write_val_tar(folder / VAL_TAR, val)
    write_devkit(folder / DEVKIT, WNIDS, truth)
    labels = {f"{wnid}/{name}": RANK[wnid] for wnid, images in train.items() for name in images}
    return labels | {f"{WNIDS[id_ - 1]}/{name}": RANK[WNIDS[id_ - 1]] for id_, name in zip(truth, val)}


def labels_in(folder: Path) -> dict[str, int]:
    """Name and label of every image in the shards."""
    found = {}
    for split in ("train", "val"):
        shards = ShardSet(folder, split)
        for index, sample in enumerate(shards.samples):
            tar = (folder / shards.info.shards[sample["shard"]].file).read_bytes()
            key = shards.key(index)
            about = tar.index(f"{key}.json".encode()) + 512
            found[json.loads(tar[about : tar.index(b"}", about) + 1])["file"]] = int(sample["label"])
    return found


def test_planted_faults_in_the_official_tars(tmp_path: Path) -> None:
    """Guards against ImageNet's odd files: lost neighbours, wrong labels, bytes that depend on the workers or on a kill."""
    official = tmp_path / "official"
    expected = write_planted(official)
    arguments = ["--source", official, "--samples-per-shard", 8, "--max-rejected", 0.06]
    for workers in (1, 2):
        run_script(SHARDER, *arguments, "--output", tmp_path / f"by_{workers}", "--workers", workers)
    whole = digests(tmp_path / "by_1")
    assert whole == digests(tmp_path / "by_2")

    rejected = {line["file"]: line["reason"] for line in lines(tmp_path / "by_1" / "rejected.jsonl")}
    reencoded = {line["file"] for line in lines(tmp_path / "by_1" / "reencoded.jsonl")}
    assert sorted(rejected.values()) == ["a JPEG that is cut off"] * 2 + ["an empty file"] * 2
    assert {name.rpartition("/")[2] for name in rejected} == {
        f"{WNIDS[2]}_4.JPEG",
        f"{WNIDS[3]}_5.JPEG",
        "ILSVRC2012_val_00000005.JPEG",
        "ILSVRC2012_val_00000006.JPEG",
    }
    assert len(reencoded) == 4
    assert labels_in(tmp_path / "by_1") == {name: label for name, label in expected.items() if name not in rejected}

    killed = tmp_path / "killed"
    command = [sys.executable, SHARDER, *map(str, arguments), "--output", str(killed), "--workers", "2"]
    process = subprocess.Popen(command, cwd=REPOSITORY, env=clean_environment(), start_new_session=True)
    deadline = time.monotonic() + PATIENCE
    while len(list(killed.glob(".train-*.finished.npz"))) < 5:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.002)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    finished = [path.name[1:13] for path in killed.glob(".train-*.finished.npz")]
    assert not (killed / "manifest.json").exists() and len(finished) < len(RANK) * PER_CLASS / 8
    times = {name: (killed / f"{name}.tar").stat().st_mtime_ns for name in finished}
    run_script(SHARDER, *arguments, "--output", killed, "--workers", 2)
    assert digests(killed) == whole
    assert times == {name: (killed / f"{name}.tar").stat().st_mtime_ns for name in finished}
    assert run_script("data_prep/verify_shards.py", killed, "--decode").returncode == 0
