"""Bad samples at training time: named once, replaced by a neighbour, counted, limited; the run goes on."""

from __future__ import annotations

import gc
import logging
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from nvidia.dali import Pipeline
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from data_prep.sources import ImageFolder
from data_prep.writer import write_shards
from pipeline.config import AugmentConfig, DataConfig
from pipeline.errors import UserError
from pipeline.loader.batches import EvalBatches, TrainBatches
from pipeline.loader.dali_graph import REGIONS, Source
from pipeline.loader.decoder import Decoder
from pipeline.loader.device_stream import DeviceStream
from pipeline.loader.loader import Loader
from pipeline.loader.reader import BadSamples, Reader, cause, is_of_decoder
from pipeline.shards.image_checks import ImageRules
from pipeline.shards.shard_set import ShardSet
from pipeline.stream.samples import DamagedSample
from support.ranks import run_forked
from support.runs import evaluation_rows, step_rows
from support.small_run import SMALL_MODEL

CPU = torch.device("cpu")


def loader_of(folder: Path, max_bad_samples: int = 5, read_ahead: int = 1) -> Loader:
    """Batches of 48 in one process."""
    config = DataConfig(num_threads=1, max_bad_samples=max_bad_samples, read_ahead=read_ahead)
    source = TrainBatches(
        shards=ShardSet(folder, "train"),
        seed=7,
        image_size=64,
        global_batch_size=48,
        batch_size=48,
        data=config,
        augment=AugmentConfig(),
    )
    return Loader(source, config, CPU)


@pytest.fixture
def shards(digits_shards: Path, tmp_path: Path) -> Path:
    """A shard set that a test may damage."""
    return Path(shutil.copytree(digits_shards, tmp_path / "shards"))


def overwrite(folder: Path, victim: int, damage: Callable[[bytes], bytes]) -> None:
    """Change a training sample's bytes in place, as a failing disk does."""
    opened = ShardSet(folder, "train")
    sample = opened.samples[victim]
    damaged = damage(opened.read(victim).tobytes())
    with open(folder / opened.info.shards[sample["shard"]].file, "r+b") as tar:
        tar.seek(int(sample["offset"]))
        assert tar.write(damaged) == sample["bytes"]


def break_scan(jpeg: bytes) -> bytes:
    """A JPEG that can be parsed but not decoded; what cannot be parsed may end the process in DALI."""
    return jpeg.replace(b"\xff\xda\x00\x0c\x03", b"\xff\xda\x00\x0c\x09")


@pytest.mark.parametrize(
    "damage",
    [
        lambda jpeg: b"\xff" * len(jpeg),
        lambda jpeg: jpeg[: len(jpeg) // 2].ljust(len(jpeg), b"\0"),
        lambda jpeg: jpeg[:-100] + bytes(40) + jpeg[-60:],  # decodes without any error, to wrong pixels
        break_scan,
    ],
    ids=["junk", "cut off", "40 bytes", "damaged scan header"],
)
def test_changed_bytes_are_found_and_the_neighbour_takes_the_place(damage, digits_shards: Path, shards: Path) -> None:
    """Guards against a run that ends, or learns from wrong pixels, because a disk flipped some bytes; and against the segmentation
    fault that an unparsable image gives DALI."""
    sound = loader_of(digits_shards)
    expected = [next(sound) for _ in range(4)]
    place = 5
    victim = int(expected[1].request.index[place])
    overwrite(shards, victim, damage)

    loader = loader_of(shards)
    for number, reference in enumerate(expected):
        batch = next(loader)
        replaced = batch.request.index != reference.request.index
        assert np.flatnonzero(replaced).tolist() == ([place] if number == 1 else [])
        assert batch.replaced == replaced.sum()
        kept = torch.from_numpy(~replaced)
        assert torch.equal(batch.images[kept], reference.images[kept]) and torch.equal(
            batch.labels[kept], reference.labels[kept]
        )
        if number == 1:
            assert batch.request.index[place] == victim + 1
            assert batch.labels[place] == loader.batches.shards.samples["label"][victim + 1]
    assert list(loader.bad.replacement) == [victim]
    ((met, sentence),) = loader.bad.take_unreported().items()
    tar = f"train-{loader.batches.shards.samples['shard'][victim]:06d}.tar"
    assert met == victim and tar in sentence and loader.batches.shards.key(victim) in sentence
    assert "was changed after it was written" in sentence and loader.bad.take_unreported() == {}


def test_an_image_that_dali_cannot_decode_is_replaced(digits_images: Path, tmp_path: Path) -> None:
    """Guards against a run that ends on an image that was sharded unchecked, and against losing what DALI had in flight."""
    images = tmp_path / "images"
    for number, path in enumerate(sorted((digits_images / "train" / "3").iterdir())[:96]):
        (images / "train" / "3").mkdir(parents=True, exist_ok=True)
        jpeg = path.read_bytes()
        (images / "train" / "3" / path.name).write_bytes(break_scan(jpeg) if number in (7, 40) else jpeg)
    write_shards(ImageFolder(images, "train"), tmp_path / "shards", "train", rules=ImageRules(decode=False))
    loader = loader_of(tmp_path / "shards", read_ahead=4)
    batches = [next(loader) for _ in range(6)]
    assert len(loader.bad) == 2 and sum(batch.replaced for batch in batches) == 6  # both, in each of three epochs
    for number, batch in enumerate(batches):
        asked_for = loader.batches.request(number).index
        assert (asked_for != batch.request.index).sum() == batch.replaced
        assert not np.isin(batch.request.index, list(loader.bad.replacement)).any()
    assert all("cannot be decoded" in sentence for sentence in loader.bad.take_unreported().values())


class Particular(Decoder):
    """As on a GPU that does not decode all that the CPU does: its graph, here on the CPU, gets a refused sample with a broken scan."""

    def __init__(self, reader: Reader, refuses: Callable[[int], bool]) -> None:
        self._refuses = refuses
        super().__init__(reader, REGIONS, DeviceStream(torch.device("cpu", 0)), 1, 2)

    def _graph(self, source: Source, device_id: int | None, prefetch: int) -> Pipeline:
        def particular() -> tuple:
            images, *rest = source()
            samples = self._in_dali[-1].request.index.tolist()
            broken = [np.frombuffer(break_scan(image.tobytes()), dtype=np.uint8) for image in images]
            return [bad if self._refuses(n) else image for bad, image, n in zip(broken, images, samples)], *rest

        return super()._graph(source if device_id is None else particular, None, prefetch)


def test_what_only_the_gpu_does_not_decode_is_a_good_sample(digits_shards: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Guards against good images that are replaced, up to data.max_bad_samples, because a GPU's decoder fails."""
    caplog.set_level(logging.WARNING, "pipeline.loader")
    sound = loader_of(digits_shards)
    batches, expected = sound.batches, [next(sound) for _ in range(5)]
    refused = {int(expected[1].request.index[3]), int(expected[3].request.index[0]), int(expected[3].request.index[9])}
    bad = BadSamples(batches.shards, 0)
    decoder = Particular(Reader(batches, bad, 0, 2), refused.__contains__)
    for number, reference in enumerate(expected):
        encoded, pixels = decoder.pixels()
        assert encoded.number == number and encoded.replaced == 0
        assert np.array_equal(encoded.request.index, reference.request.index)
        levels = (sound._normalization(pixels) - reference.images).abs() * 255 * 0.23
        assert levels.max() < 3, "the graph for GPUs is within two levels"
    assert len(bad) == 0
    said = [record.getMessage() for record in caplog.records]
    assert [text.partition(" (")[0] for text in said] == [f"the GPU does not decode batch {number}" for number in (1, 3)]
    places = [int(np.flatnonzero(np.isin(expected[n].request.index, list(refused)))[0]) for n in (1, 3)]
    for text, place in zip(said, places):
        assert text.endswith(f" (Failed to decode sample #{place}): the CPU decodes it, and no image counts as bad")


def test_a_gpu_that_decodes_nothing_is_given_up(digits_shards: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Guards against a run that builds a graph anew for each batch for ever, and against one that ends."""
    caplog.set_level(logging.WARNING, "pipeline.loader")
    batches = loader_of(digits_shards).batches
    bad = BadSamples(batches.shards, 0)
    decoder = Particular(Reader(batches, bad, 0, 2), lambda sample: True)
    for number in range(12):
        encoded, pixels = decoder.pixels()
        assert encoded.number == number and encoded.replaced == 0 and pixels.shape == (48, 3, 64, 64)
    assert len(bad) == 0 and len(caplog.records) == 9
    assert caplog.records[-1].getMessage().endswith("the CPU decodes this and all that follow, and no image counts as bad")


def test_what_the_cpu_does_not_decode_either_is_bad(digits_images: Path, tmp_path: Path) -> None:
    """Guards against a broken image that ends a run on a GPU, or is asked for again and again."""
    for number, path in enumerate(sorted((digits_images / "train" / "3").iterdir())[:60]):
        (tmp_path / "images" / "train" / "3").mkdir(parents=True, exist_ok=True)
        jpeg = path.read_bytes()
        (tmp_path / "images" / "train" / "3" / path.name).write_bytes(break_scan(jpeg) if number in (7, 40) else jpeg)
    write_shards(ImageFolder(tmp_path / "images", "train"), tmp_path / "shards", "train", rules=ImageRules(decode=False))
    batches = loader_of(tmp_path / "shards").batches
    bad = BadSamples(batches.shards, 2)
    decoder = Particular(Reader(batches, bad, 0, 2), lambda sample: False)
    replaced = [decoder.pixels()[0].replaced for _ in range(5)]  # four epochs
    assert len(bad) == 2 and sum(replaced) == 8, replaced
    assert all("cannot be decoded" in sentence for sentence in bad.take_unreported().values())


def test_a_report_of_dali_is_understood() -> None:
    """Guards against images that are blamed for a GPU without memory, and against a decoder's failure that is taken for another one."""
    report = (
        "Critical error in pipeline:\nError in MIXED operator `nvidia.dali.fn.decoders.image_slice`,\nwhich was used in the pipeline "
        "definition with the following traceback:\n\n  File ...\n\nencountered:\n\n{}\nCurrent pipeline object is no longer valid."
    )
    for line in ("nvImageCodec failure: '#8'", "Failed to decode sample #5 : "):
        assert cause(report.format(line)) == line.rstrip(" :") and is_of_decoder(report.format(line))
    memory = "CUDA runtime API error cudaErrorMemoryAllocation (2):\nout of memory"
    assert cause(report.format(memory)).startswith("CUDA runtime API error") and not is_of_decoder(report.format(memory))
    assert cause("Traceback (most recent call last):\n  File ...\nImportError: no DALI\n") == "ImportError: no DALI"
    assert cause("") == "no reason given"


@pytest.mark.parametrize("fault", ["emptied", "removed"])
def test_a_lost_tar_stops_the_run_with_a_sentence(fault: str, shards: Path) -> None:
    """Guards against an endless run on the neighbours of a lost shard, and against SIGBUS when a tar is cut under it."""
    loader = loader_of(shards, max_bad_samples=20)
    next(loader)
    for tar in shards.glob("train-*.tar"):
        tar.write_bytes(b"") if fault == "emptied" else tar.unlink()
    files = loader.batches.shards.files
    with files._opening:  # other threads read
        files._descriptors.clear()  # as after a remount; an open file outlives its name
    with pytest.raises(
        UserError, match=r"21 samples of .* cannot be used, but data.max_bad_samples allows 20; .*train-00000\d.tar"
    ):
        for _ in range(20):
            next(loader)
    with pytest.raises(UserError):  # a batch is missing: going on would lose samples silently
        next(loader)


def test_a_tar_that_was_replaced_by_its_like_goes_unnoticed(digits_shards: Path, shards: Path) -> None:
    """Guards against counting samples as bad when a shard was staged anew under the run."""
    loader, reference = loader_of(shards), loader_of(digits_shards)
    next(loader), next(reference)
    for tar in shards.glob("train-*.tar"):
        copy = tar.with_suffix(".copy")
        shutil.copy(tar, copy)
        with open(tar, "r+b") as old:
            copy.rename(tar)
            old.truncate(100)  # what a descriptor from before sees
    for _ in range(10):
        assert torch.equal(next(loader).images, next(reference).images)
    assert len(loader.bad) == 0


def test_a_label_member_that_was_changed_changes_nothing(digits_shards: Path, shards: Path) -> None:
    """Guards against labels that are read from a member which no checksum covers at training time."""
    for tar in shards.glob("train-*.tar"):
        content = tar.read_bytes()
        index = tar.with_suffix(".idx").read_text().split("\n")[1].split()
        offset = int(index[index.index("cls") + 1])
        tar.write_bytes(content[:offset] + b"7" + content[offset + 1 :])
    loader, reference = loader_of(shards), loader_of(digits_shards)
    for _ in range(3):
        assert torch.equal(next(loader).labels, next(reference).labels)


def test_evaluation_leaves_a_bad_image_out_and_says_so(shards: Path) -> None:
    """Guards against an accuracy in which a neighbour is counted twice."""
    opened = ShardSet(shards, "val")
    with open(shards / "val-000000.tar", "r+b") as tar:
        tar.seek(int(opened.samples["offset"][17]) + 600)
        tar.write(bytes(30))
    loader = Loader(
        EvalBatches(shards=opened, image_size=64, batch_size=100, eval_crop=0.875),
        DataConfig(num_threads=1),
        CPU,
    )
    batches = [next(loader) for _ in range(len(loader.batches))]
    counted = np.concatenate([batch.request.index[batch.valid.numpy()] for batch in batches])
    assert np.array_equal(counted, np.delete(np.arange(359), 17))
    assert list(loader.bad.take_unreported()) == [17]


def test_files_that_cannot_be_opened_for_want_of_descriptors_are_no_bad_samples(shards: Path) -> None:
    """Guards against good images that are replaced because this process has too many files open."""
    opened = ShardSet(shards, "train")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    gc.collect()  # closes forgotten files, whose numbers would be free again below the limit
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
    try:
        with pytest.raises(UserError, match="Too many open files: raise `ulimit -n`"):
            opened.read(0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_many_bad_samples_in_a_row_cost_little_and_leak_nothing(shards: Path) -> None:
    """Guards against a map that is rebuilt for each of them, and a file that is opened again for each."""
    opened = ShardSet(shards, "train")
    bad = BadSamples(opened, limit=1438)
    with open(shards / "train-000001.tar", "r+b") as tar:
        tar.write(bytes(int(opened.samples["offset"][799])))
    before = len(os.listdir("/proc/self/fd"))
    for index in range(400, 799):
        with pytest.raises(DamagedSample):
            opened.read(index)
        bad.add(opened.damaged(index, "is a test's"))
    assert len(os.listdir("/proc/self/fd")) <= before + 1
    assert bad.replacement == dict.fromkeys(range(400, 799), 799)


def test_a_run_goes_on_counts_and_stops_past_the_limit(small_run: Path, shards: Path) -> None:
    """Guards against a 64-GPU run that ends on one bad image, or that hides how many it met."""
    source = loader_of(shards).batches
    victim = int(source.request(0).index[40])  # the second process meets it
    overwrite(shards, victim, lambda jpeg: jpeg[:-100] + bytes(40) + jpeg[-60:])
    with open(shards / "val-000000.tar", "r+b") as tar:
        tar.seek(int(ShardSet(shards, "val").samples["offset"][17]) + 600)
        tar.write(bytes(30))
    arguments = ["--config", small_run, f"data.path={shards}", "seed=7", "train.global_batch_size=48", "train.max_steps=4"]
    arguments += SMALL_MODEL
    result = run_forked("pipeline.train", *arguments, "train.micro_batch_size=24", processes=2)
    run_dir = small_run.parent / "run"
    assert [(row["replaced"], row["bad_samples"]) for row in step_rows(run_dir)] == [(1, 1), (0, 1), (0, 1), (0, 1)]
    assert result.stderr.count("was changed after it was written") == 2  # one of training, one of evaluation
    assert evaluation_rows(run_dir)[-1]["count"] == 358
    events = EventAccumulator(str(run_dir / "tensorboard")).Reload()
    assert [event.value for event in events.Scalars("trouble/bad_samples")] == [1, 1, 1, 1]
    assert [event.value for event in events.Scalars("trouble/replaced")] == [1, 0, 0, 0]

    # Met by one process after the other over the epochs, it stays one bad sample.
    long = [word.replace("max_steps=4", "max_steps=60") for word in map(str, arguments)]
    limit = ["train.micro_batch_size=24", "data.max_bad_samples=1", f"output_dir={run_dir}1"]
    assert run_forked("pipeline.train", *long, *limit, processes=2).stderr.count("was changed after it was written") == 2
    assert step_rows(Path(f"{run_dir}1"))[-1]["bad_samples"] == 1
    assert sum(row["replaced"] for row in step_rows(Path(f"{run_dir}1"))) == 2

    result = run_forked("pipeline.train", *arguments, "data.max_bad_samples=0", f"output_dir={run_dir}2", check=False)
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert "1 samples of" in result.stderr and "data.max_bad_samples allows 0" in result.stderr
