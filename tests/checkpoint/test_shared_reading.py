"""What the ranks of a large job write and read: few files with what all hold, and no rank opens more than it needs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pipeline.checkpoint.completeness import find_gaps
from pipeline.checkpoint.headers import Entry, packed, read_headers, unpacked
from pipeline.checkpoint.held import Held
from pipeline.checkpoint.parts import Parts, slice_key, write_part
from pipeline.checkpoint.snapshot import writer_number
from pipeline.checkpoint.whole import Seen
from pipeline.errors import UserError
from support.checkpoints import save


@pytest.mark.parametrize("size", [1, 2, 7, 16, 17, 64, 1000, 4096])
def test_writers_are_spread_over_all_ranks_and_cover_everything_once(size: int) -> None:
    """Guards against numbers that nobody writes, or two ranks, and against writers that share one node's network card."""
    writers = min(size, 16)
    numbers = [writer_number(rank, size, writers) for rank in range(size)]
    ranks = [rank for rank, number in enumerate(numbers) if number is not None]
    assert [number for number in numbers if number is not None] == list(range(writers)) and ranks[0] == 0
    assert all(after - before in (size // writers, size // writers + 1) for before, after in zip(ranks, ranks[1:]))
    whole = Held("weight", "w", 0, torch.arange(1000.0), replicated=True)
    shares = [share for number in numbers if (share := whole.share(number, writers))]
    assert torch.equal(torch.cat([share.values for share in shares]), whole.values)
    own = Held("exp_avg", "w", 5, torch.ones(3), replicated=False)
    assert all(own.share(number, writers) is own for number in numbers)


def test_headers_survive_the_way_to_other_ranks() -> None:
    """Guards against a slice that other ranks look for elsewhere, and against long messages."""
    names = ["blocks.0.weight", "a/b"]
    header = [
        Entry("weight/blocks.0.weight/4096", [17], "F32"),
        Entry("exp_avg/unknown/3", [4], "F32"),
        Entry("buffer/norm.running_mean/0", [4], "F32"),
        Entry("buffer/norm.count/0", [], "I64"),
        Entry("odd", [2, 3], "BF16"),
    ]
    sent = packed({"part-00000.safetensors": header}, names)
    assert sent["part-00000.safetensors"][0] == ["weight", 0, 4096, 17, "F32"]
    assert unpacked(sent, names) == {"part-00000.safetensors": header}


@pytest.fixture
def four(tmp_path: Path):
    """A checkpoint of four ranks: a slice of the weight and a moment each."""
    names = [{slice_key("weight", "w", 10 * rank): torch.arange(10.0) + 10 * rank} for rank in range(4)]
    manifest = save(tmp_path / "step-00000001", names, {"w": [40]})
    return tmp_path / "step-00000001", manifest


def test_a_rank_opens_what_it_reads(four) -> None:
    """Guards against a start of N ranks that opens N times N files."""
    folder, manifest = four
    files = [record.name for record in manifest.files]
    headers = read_headers(folder, files)
    parts = Parts(folder, files, headers)
    assert parts.opened == [] and not find_gaps(folder, manifest, headers)
    assert parts.read("weight", "w", 12, 5).tolist() == [12, 13, 14, 15, 16] and parts.opened == files[1:2]
    assert parts.read("weight", "w", 18, 4).tolist() == [18, 19, 20, 21] and parts.opened == files[1:3]
    assert Parts(folder, files).opened == files
    del headers[files[3]][0]
    assert "weight of w ends at 30, 40 numbers needed" in find_gaps(folder, manifest, headers)[0]


def test_a_file_that_another_rank_has_verified_is_watched_too(four) -> None:
    """Guards against weights that were exchanged between the checksum on one rank and the reading on another."""
    folder, manifest = four
    mine, others = Seen.look(folder, manifest.files[:2]), Seen.look(folder, manifest.files[2:])
    names = [record.name for record in manifest.files]
    mine.elsewhere.update(others.shared())
    mine.check(names)
    write_part(folder / names[3], {slice_key("weight", "w", 30): torch.zeros(10)})
    mine.check(names[:3])
    with pytest.raises(UserError, match=f"{names[3]} was replaced or changed while the checkpoint was read"):
        mine.check(names)
    with pytest.raises(UserError, match="was replaced or changed"):
        Seen(folder, mine.marks).check(names[2:3])
