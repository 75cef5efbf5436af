"""A disk that is full and a read that fails, at every call of a run that writes or reads: what it says, and that nothing is lost."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest

from faults.refusing import EVERY, FOR_GOOD, Refusal, compiler, places, rows, train, verdict
from support.runs import write_small_config

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.skipif(compiler() is None, reason="needs a C compiler"),
]
# Of each kind of file one: by the names that :func:`~faults.refusing.places` gives them.
WRITES = (
    ("write /metrics.jsonl", FOR_GOOD),
    ("write /checkpoints/.saving/part-00000.safetensors", 1),
    ("rename /checkpoints/.saving", 1),
)
READS = (("pread /train-000000.tar", FOR_GOOD), ("read /manifest.json", 1))
RESUMES = (("read /checkpoints/step/checkpoint.json", 1),)


@pytest.fixture(scope="module")
def config(digits_shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_config(digits_shards, tmp_path_factory.mktemp("refused"))


@pytest.fixture(scope="module")
def whole(config: Path) -> dict[int, tuple[float, float]]:
    """Rows of a training of which no call fails."""
    job, _ = train(config, config.with_name("whole"))
    assert job.codes == [0], job.outputs()
    return rows(config.with_name("whole"))


def half(config: Path, run: Path) -> None:
    """A run that was stopped at its first checkpoint."""
    job, _ = train(config, run, None, f"train.max_steps={EVERY}")
    assert job.codes == [0], job.outputs()


def refuse(config: Path, run: Path, whole: dict, folder: Path, calls: str, error: int, chosen: tuple | None) -> None:
    """Let calls fail that write or read below a folder: the chosen ones, or first and last of every place, once and for good."""
    before = run.with_name("before") if run.exists() else None  # a run that is resumed each time
    if before:
        shutil.copytree(run, before)

    def again() -> None:
        shutil.rmtree(run, ignore_errors=True)
        if before:
            shutil.copytree(before, run)

    job, lines = train(config, run, Refusal(folder, calls))
    assert job.codes == [0] and rows(run) == whole, job.outputs()
    found, failures = places(lines), []
    every = [(place, count) for place in found for count in (1, FOR_GOOD)]
    for place, count in chosen or every:
        numbers = found[place]
        for at in sorted({numbers[0], numbers[-1]}) if chosen is None else [numbers[len(numbers) // 2]]:
            again()
            wrong, ended = verdict(config, run, whole, Refusal(folder, calls, error, at, count))
            print(f"{'FAIL' if wrong else 'ok'}: {place}, call {at}, {'once' if count == 1 else 'for good'}: {ended}")
            failures += [f"{place}, call {at}, x{count}: {wrong}; {ended}"] if wrong else []
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("chosen", [pytest.param(WRITES, id="some"), pytest.param(None, id="all", marks=pytest.mark.soak)])
def test_a_disk_that_is_full_at_a_call(config: Path, whole: dict, tmp_path: Path, chosen: tuple | None) -> None:
    """Guards against a write whose failure is a traceback, ends a run that could go on, or loses what the next start needs."""
    refuse(config, tmp_path / "run", whole, tmp_path / "run", "write", errno.ENOSPC, chosen)


@pytest.mark.parametrize("chosen", [pytest.param(READS, id="some"), pytest.param(None, id="all", marks=pytest.mark.soak)])
def test_data_that_cannot_be_read_at_a_call(
    config: Path, whole: dict, digits_shards: Path, tmp_path: Path, chosen: tuple | None
) -> None:
    """Guards against a read of the data whose failure is a traceback, or a sample that is replaced although it was there."""
    refuse(config, tmp_path / "run", whole, digits_shards, "read", errno.EIO, chosen)


@pytest.mark.parametrize("chosen", [pytest.param(RESUMES, id="some"), pytest.param(None, id="all", marks=pytest.mark.soak)])
def test_a_run_that_cannot_be_read_at_a_call(config: Path, whole: dict, tmp_path: Path, chosen: tuple | None) -> None:
    """Guards against a resume that a failing read ends in a traceback, or that goes on from an older checkpoint without a word."""
    run = tmp_path / "run"
    half(config, run)
    refuse(config, run, whole, run, "read", errno.EIO, chosen)
