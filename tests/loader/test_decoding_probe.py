"""A GPU's decoder is tried in a process of its own: whatever becomes of that process, this one goes on, and knows what to do."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.cluster.world import World
from pipeline.errors import UserError
from pipeline.inference.evaluation import evaluation_loader
from pipeline.loader import probe
from pipeline.loader.probe import Verdict, agreed, decoding_verdict, usable_decoding
from pipeline.shards.shard_set import ShardSet
from pipeline.stores.store import StoreAway
from support.runs import write_small_config

CPU = torch.device("cpu")
CRASH = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
NULL_POINTER = "import ctypes; ctypes.string_at(0)"
NO_ANSWER = "import time; time.sleep(1000)"
BLACK = """
import io, sys, numpy
sys.stdin.buffer.read()
numpy.save(file := io.BytesIO(), numpy.zeros((96, 224, 224, 3), numpy.uint8))
sys.stdout.buffer.write(file.getbuffer())
"""
TOO_FEW = BLACK.replace("96", "95")
NOT_PIXELS = "print('no pixels')"
REFUSED = "raise RuntimeError('''Critical error in pipeline:\\nencountered:\\n\\nnvImageCodec failure: '#8' \\nCurrent pipeline ...''')"
OUT_OF_MEMORY = "raise RuntimeError('CUDA out of memory')"
# The graph for GPUs, whose decoder mistakes the place of the regions, but not that of whole images; and a library that talks.
WRONG_REGIONS = """
import sys
from pipeline.loader import dali_graph, probe
right = dali_graph.full_inputs
def wrong(images, request):
    print("a few words", flush=True)
    start = request.geometry.start
    return images, start if sys.argv[1] == "whole" else 0 * start, *right(images, request)[2:]
dali_graph.full_inputs = wrong
probe.answer(*sys.argv[1:])
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of verdicts."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "pervit" / "decoding"


@pytest.fixture
def shards(digits_shards: Path) -> ShardSet:
    return ShardSet(digits_shards, "train")


def verdict_of(shards: ShardSet, code: str, timeout: float = 1000.0) -> Verdict:
    """With Python code as the program."""
    return decoding_verdict(shards, CPU, [sys.executable, "-c", code], timeout)


def test_a_decoder_that_is_right_may_decode_regions(shards: ShardSet, cache: Path) -> None:
    """Guards against a good GPU that is not used: the program itself, on the CPU."""
    assert decoding_verdict(shards, CPU) == Verdict("regions")
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    (file,) = cache.iterdir()
    assert file.suffix == ".json"


def test_a_decoder_that_mistakes_regions_is_given_whole_images(imagenet_or_digits: ShardSet) -> None:
    """Guards against wrong pixels that pass, and against a GPU that is given up though it decodes whole images, or though a library
    prints something."""
    verdict = verdict_of(imagenet_or_digits, WRONG_REGIONS)
    assert verdict.form == "whole"
    assert "the GPU decodes whole images and then cuts out regions after a trial" in verdict.reason
    assert "decoding regions gave pixels" in verdict.reason and "decoding whole" not in verdict.reason


@pytest.fixture
def imagenet_or_digits(digits_shards: Path, request: pytest.FixtureRequest) -> ShardSet:
    folder = request.getfixturevalue("imagenet_shards") if os.environ.get("PERVIT_IMAGENET_SAMPLES") else digits_shards
    return ShardSet(folder, "train")


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        (CRASH, "was ended by SIGSEGV"),
        (NULL_POINTER, "was ended by SIGSEGV"),
        (REFUSED, "failed with nvImageCodec failure: '#8'"),
        (OUT_OF_MEMORY, "failed with RuntimeError: CUDA out of memory"),
        (BLACK, "of 255 levels from the CPU's"),
        (TOO_FEW, "gave no pixels: operands could not be broadcast"),
        (NOT_PIXELS, "gave no pixels"),
    ],
    ids=["crash", "null pointer", "refused", "out of memory", "black", "too few", "text"],
)
def test_a_decoder_that_fails_is_not_used(code: str, fault: str, shards: ShardSet, cache: Path) -> None:
    """Guards against the end of this process with the decoder's, and against a reason that is not told."""
    verdict = verdict_of(shards, code)
    assert verdict.form == "cpu"
    assert verdict.reason.count(fault) == 2, verdict.reason
    assert verdict.reason.startswith("the CPU decodes images after a trial on the CPU: decoding regions ")
    assert "nvidia-dali-cuda" in verdict.reason and "nvidia-nvimgcodec-cu" in verdict.reason
    if code == OUT_OF_MEMORY:
        assert verdict.reason.endswith("); the next start tries again.") and "#55" not in verdict.reason
        assert list(cache.iterdir()) == [], "there may be memory at the next start"
    else:
        (file,) = cache.iterdir()
        assert verdict.reason.endswith(f"see NVIDIA/nvImageCodec#55); remove {file} to try again.")


def test_a_decoder_that_hangs_is_ended(shards: ShardSet, tmp_path: Path) -> None:
    """Guards against a start that waits for ever, and against processes that stay on the GPU."""
    began = f"import os; open({str(tmp_path / 'began')!r}, 'a').write(f'{{os.getpid()}} '); "
    verdict = verdict_of(shards, began + NO_ANSWER, timeout=2)
    assert verdict.form == "cpu" and verdict.reason.count("gave no answer within 2 s") == 2
    pids = (tmp_path / "began").read_text().split()
    assert len(pids) == 2
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)


def tried(shards: ShardSet, tmp_path: Path) -> bool:
    """Whether the program is asked, instead of the memory."""
    mark = tmp_path / "asked"
    mark.unlink(missing_ok=True)
    verdict_of(shards, f"open({str(mark)!r}, 'w'); {CRASH}")
    return mark.exists()


def test_a_verdict_is_remembered_until_a_version_changes(
    shards: ShardSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a trial at every start, and against a GPU that stays unused after its decoder was mended."""
    first = verdict_of(shards, CRASH)
    assert verdict_of(shards, NOT_PIXELS) == first and not tried(shards, tmp_path)
    newer = tmp_path / "packages" / "nvidia_nvimgcodec_cu99-1.0.dist-info"
    newer.mkdir(parents=True)
    (newer / "METADATA").write_text("Metadata-Version: 2.1\nName: nvidia-nvimgcodec-cu99\nVersion: 1.0\n")
    with monkeypatch.context() as changed:
        changed.syspath_prepend(newer.parent)
        assert tried(shards, tmp_path) and not tried(shards, tmp_path)
        (newer / "METADATA").write_text("Metadata-Version: 2.1\nName: nvidia-nvimgcodec-cu99\nVersion: 1.1\n")
        assert tried(shards, tmp_path)
    assert not tried(shards, tmp_path), "the former versions are known still"
    driver = tmp_path / "version"
    driver.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  590.44.01")
    monkeypatch.setattr(probe, "DRIVER", driver)
    assert tried(shards, tmp_path)


def test_a_verdict_holds_for_images_of_its_size(shards: ShardSet, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Guards against the demo's digits, of 28 x 28 pixels, that would answer for photos."""
    verdict_of(shards, CRASH)
    photos = ShardSet(request.getfixturevalue("imagenet_shards"), "train")
    assert tried(photos, tmp_path) and not tried(photos, tmp_path)


@pytest.mark.parametrize(
    "damage",
    [
        lambda file: file.write_bytes(b""),
        lambda file: file.write_bytes(b'["cpu", "bec'),
        lambda file: file.write_bytes(b"\xff\xfe\x00"),
        lambda file: file.write_text('["gpu", "a form that there is not"]'),
        lambda file: file.write_text('{"form": "regions"}'),
        lambda file: file.write_text('[["regions"], ""]'),
        lambda file: (file.unlink(), file.mkdir()),
        lambda file: file.parent.chmod(0o777),
    ],
    ids=["empty", "cut off", "bytes", "unknown", "of another shape", "nested", "a folder", "anybody's"],
)
def test_a_file_that_cannot_be_trusted_is_ignored(
    damage: Callable[[Path], object], shards: ShardSet, cache: Path, tmp_path: Path
) -> None:
    """Guards against a start that ends on a damaged file, and against a verdict that another user has written."""
    verdict_of(shards, CRASH)
    (file,) = cache.iterdir()
    damage(file)
    assert tried(shards, tmp_path)


def test_without_a_cache_folder_there_is_a_verdict(shards: ShardSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a start that ends where the home folder cannot be written."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert verdict_of(shards, CRASH).reason.endswith("the next start tries again.")


def test_a_store_that_is_away_is_left_to_the_loader(shards: ShardSet, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a job that is not started again, as it is for the loader's own error, because the trial met the store first."""

    def away(indices: list[int]) -> list:
        raise StoreAway("https://store does not answer: start again.")

    monkeypatch.setattr(shards, "read_batch", away)
    verdict = decoding_verdict(shards, CPU)
    assert verdict.form == "cpu" and "https://store does not answer: start again" in verdict.reason
    assert list(cache.iterdir()) == []


class SeveralRanks(World):
    """This rank, and what the others have found."""

    def gather(self, value: object) -> list:
        return [value, None, ["whole", "of the second node"], None]


def test_the_worst_verdict_holds_for_all_ranks() -> None:
    """Guards against ranks that decode each in their own way, or wait for one that has decided otherwise."""
    world = SeveralRanks(0, 4, CPU, 1)
    assert agreed(Verdict("regions"), world) == Verdict("whole", "of the second node")
    assert agreed(Verdict("cpu", "of the first node"), world) == Verdict("cpu", "of the first node")
    assert agreed(Verdict("regions"), World(0, 1, CPU, 1)) == Verdict("regions")


def test_nothing_is_tried_where_a_cpu_decodes(shards: ShardSet, cache: Path, digits_shards: Path, tmp_path: Path) -> None:
    """Guards against a trial that costs seconds for nothing, and against a GPU that is asked for where there is none."""
    from pipeline.config import load_config

    world = World(0, 1, CPU, 1)
    assert usable_decoding("auto", shards, world) == ("auto", "regions")
    assert usable_decoding("cpu", shards, world) == ("cpu", "regions")
    with pytest.raises(UserError, match="this process has no GPU"):
        usable_decoding("gpu", shards, world)
    loader = evaluation_loader(shards, load_config(write_small_config(digits_shards, tmp_path)), world)
    assert np.isfinite(next(loader).images).all() and not cache.exists()
    loader.close()
