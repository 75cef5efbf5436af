"""What the ranks of a large job write and read: few files with what all hold, and no rank opens more than it needs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pipeline.checkpoint.parts import SliceReader, find_gaps, read_headers, slice_key
from pipeline.checkpoint.rank_slices import RankSlice, writer_number
from support.checkpoints import save


@pytest.mark.parametrize("size", [1, 2, 7, 16, 17, 64, 1000, 4096])
def test_writers_are_spread_over_all_ranks_and_cover_everything_once(size: int) -> None:
    """Guards against numbers that nobody writes, or two ranks, and against writers that share one node's network card."""
    writers = min(size, 16)
    numbers = [writer_number(rank, size, writers) for rank in range(size)]
    ranks = [rank for rank, number in enumerate(numbers) if number is not None]
    assert [number for number in numbers if number is not None] == list(range(writers)) and ranks[0] == 0
    assert all(after - before in (size // writers, size // writers + 1) for before, after in zip(ranks, ranks[1:]))
    whole = RankSlice("weight", "w", 0, torch.arange(1000.0), replicated=True)
    shares = [share for number in numbers if (share := whole.written_by(number, writers))]
    assert torch.equal(torch.cat([share.values for share in shares]), whole.values)
    own = RankSlice("optimizer.exp_avg", "w", 5, torch.ones(3), replicated=False)
    assert all(own.written_by(number, writers) is own for number in numbers)


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
    entries = read_headers(folder, manifest.files)
    parts = SliceReader(folder, entries)
    assert not parts.opened and not find_gaps(folder, manifest, entries)
    assert parts.read("weight", "w", 12, 5).tolist() == [12, 13, 14, 15, 16] and list(parts.opened) == files[1:2]
    assert parts.read("weight", "w", 18, 4).tolist() == [18, 19, 20, 21] and list(parts.opened) == files[1:3]
    assert entries.pop().file == files[3]
    assert "weight of w must end at 40, got 30" in find_gaps(folder, manifest, entries)[0]
