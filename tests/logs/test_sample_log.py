"""The record of consumed samples: complete, the same on any number of processes, and sensitive to all that is drawn."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.augment import BatchRequest
from pipeline.augment.mixing import MixupCutmix
from pipeline.cluster.world import World
from pipeline.config import AugmentConfig
from pipeline.errors import UserError
from pipeline.loader.batches import TrainBatches
from pipeline.logs.run_files import SampleLog, augmentation_digests
from pipeline.shards.shard_set import ShardSet
from support.batches import train_batches
from support.launching import REPOSITORY, clean_environment

EVERYTHING = AugmentConfig(rand_augment_ops=2, erasing=0.5, mixup=0.8, cutmix=1.0, mix_group=4)

# Writes lines until it is killed.
WRITER = """
import sys
from pathlib import Path
import numpy as np, torch
from pipeline.augment.crop import Geometry
from pipeline.augment import BatchRequest
from pipeline.cluster.world import World
from pipeline.logs.run_files import SampleLog
count = 3000
ints = np.arange(count)
pairs = np.zeros((count, 2), dtype=np.int32)
request = BatchRequest(ints, ints, ints, ints, ints > 0, Geometry(pairs, pairs, pairs, pairs, pairs[:, 0]))
log = SampleLog(Path(sys.argv[1]), World(0, 1, torch.device("cpu"), 1), 1)
step = 0
while True:
    step += 1
    log.add(request)
    log.write(step)
    print(step, flush=True)
"""


def batches(
    shards: Path, rank: int = 0, size: int = 1, micro_batch_size: int = 16, augment: AugmentConfig = EVERYTHING
) -> TrainBatches:
    split = {"rank": rank, "world_size": size, "micro_batch": micro_batch_size}
    return train_batches(ShardSet(shards, "train"), global_batch=32, augment=augment, **split)


def record(run_dir: Path, shards: Path, size: int, micro_batch_size: int, steps: range) -> None:
    """Write the record of steps, numbered from 1, as ``size`` processes would."""
    for rank in range(size):
        own = batches(shards, rank, size, micro_batch_size)
        log = SampleLog(run_dir, World(rank, size, torch.device("cpu"), 1), steps[0])
        for step in steps:
            for part in range(own.batches_per_step):
                log.add(own.request((step - 1) * own.batches_per_step + part))
            log.write(step)
        log.close()


def read(run_dir: Path) -> dict[tuple[int, int], tuple[int, int, str]]:
    """(epoch, position) -> (step, sample, augmentation)."""
    lines = [json.loads(line) for path in sorted((run_dir / "samples").iterdir()) for line in path.read_text().splitlines()]
    images = [
        ((epoch, position), (line["step"], sample, digest))
        for line in lines
        for epoch, position, sample, digest in zip(line["epoch"], line["position"], line["sample"], line["augmentation"])
    ]
    assert len(dict(images)) == len(images), "one image twice"
    return dict(images)


def test_the_record_does_not_depend_on_the_processes(digits_shards: Path, tmp_path: Path) -> None:
    """Guards against a record, or a stream, that changes with the number of processes or the micro-batch, over an epoch's end too."""
    steps = range(44, 47)  # 1438 images: the epoch ends in step 45
    for name, size, micro_batch_size in (("one", 1, 16), ("two", 2, 16), ("four", 4, 4)):
        record(tmp_path / name, digits_shards, size, micro_batch_size, steps)
    one = read(tmp_path / "one")
    assert len(one) == 96 and {epoch for epoch, _ in one} == {0, 1}
    assert read(tmp_path / "two") == one and read(tmp_path / "four") == one
    first = json.loads((tmp_path / "two" / "samples" / "rank-00001.jsonl").read_text().splitlines()[0])
    assert (first["start"], first["step"]) == (44, 44) and first["position"] == list(range(43 * 32 + 16, 44 * 32))
    assert all(len(digest) == 16 and int(digest, 16) >= 0 for digest in first["augmentation"])


def change(request: BatchRequest, part: str, name: str, image: int) -> BatchRequest:
    """The same request, one number of one image (or of its group) changed by the least amount."""
    augmentation = next((each for each in request.draws if type(each).__name__ == part), None)
    owner = request.geometry if augmentation is None else request.draws[augmentation]
    values = getattr(owner, name).copy()
    row = image // owner.group if part == "MixupCutmix" else image
    flat = values.reshape(len(values), -1)
    last = flat[row, -1]
    flat[row, -1] = ~last if values.dtype == bool else np.nextafter(last, np.inf) if values.dtype.kind == "f" else last + 1
    changed = dataclasses.replace(owner, **{name: values})
    if augmentation is None:
        return dataclasses.replace(request, geometry=changed)
    return dataclasses.replace(request, draws={**request.draws, augmentation: changed})


@pytest.mark.parametrize(
    ("part", "name"),
    [("geometry", name) for name in ("start", "shape", "resize", "crop", "flip")]
    + [("RandAugment", name) for name in ("op", "amount")]
    + [("RandomErasing", name) for name in ("box", "noise_seed")]
    + [("MixupCutmix", name) for name in ("distance", "weight", "box", "blend")],
)
def test_every_number_that_was_drawn_is_in_the_digest(part: str, name: str, digits_shards: Path) -> None:
    """Guards against two runs that are called equal although a crop, an operation, a noise seed or a mixing partner differs."""
    request = batches(digits_shards).request(3)
    before, after = augmentation_digests(request), augmentation_digests(change(request, part, name, image=5))
    differ = [i for i in range(16) if before[i] != after[i]]
    assert differ == ([4, 5, 6, 7] if part == "MixupCutmix" else [5])


def test_a_partner_that_is_another_sample_is_in_the_digest(digits_shards: Path) -> None:
    """Guards against a mixture with the replacement of a bad sample that is taken for the one with the sample itself."""
    request = batches(digits_shards).request(3)
    other = dataclasses.replace(request, index=np.where(np.arange(16) == 5, 0, request.index))
    before, after = augmentation_digests(request), augmentation_digests(other)
    partner_of = (5 - int(request.drawn(MixupCutmix).distance[1]) - 4) % 4 + 4  # whose partner image 5 is
    assert [i for i in range(16) if before[i] != after[i]] == [partner_of]
    plain = batches(digits_shards, augment=AugmentConfig()).request(3)  # nothing but crop and flip
    assert len(set(augmentation_digests(plain))) == 16


def test_a_kill_loses_no_line_and_spoils_none(tmp_path: Path) -> None:
    """Guards against lines that wait in a buffer when the process is killed, and against half a line before the next start's."""
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)],
        env=clean_environment(PYTHONPATH=str(REPOSITORY)),
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        for _ in range(20):
            written = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
        written = max([written, *map(int, process.stdout.read().split())])
    path = tmp_path / "samples" / "rank-00000.jsonl"
    with open(path, "ab") as file:
        file.write(b'{"start": 1, "step": 99, "sam' + bytes(100_000))  # what a kill in the middle of a write leaves
    log = SampleLog(tmp_path, World(0, 1, torch.device("cpu"), 1), start=7)
    log.write(7)
    log.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    steps = [line["step"] for line in lines[:-1]]
    assert steps == list(range(1, len(steps) + 1)) and written <= len(steps) <= written + 1
    assert (lines[-1]["start"], lines[-1]["step"]) == (7, 7) and lines[-1]["time"] >= lines[-2]["time"] > lines[0]["time"]
    assert all(len(line["sample"]) == len(line["augmentation"]) == 3000 for line in lines[:-1])

    log = SampleLog(tmp_path, World(0, 1, torch.device("cpu"), 1), start=8)
    os.unlink(path)
    with pytest.raises(UserError, match="rank-00000.jsonl cannot be written: it, or its folder, was removed"):
        log.write(8)
