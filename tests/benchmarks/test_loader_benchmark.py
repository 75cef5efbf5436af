"""The loader benchmark: that it counts all the work, and its report. The figures themselves are in docs/results/loader.md."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from support.launching import REPOSITORY, run_script

IMAGES = 96  # of ImageNet's samples: enough for a batch of 64, quick to re-encode

# Speaks the protocol of benchmarks/loader_peers.py. Each batch costs 50 ms of CPU time in a child process, and the child
# works on after the answer, as a loader that fills its queue does: it ends the turn with ten batches more than asked for.
BUSY_CONTESTANT = """
import subprocess, sys, time
WORKER = '''
import sys, time
for line in sys.stdin:
    end = time.process_time() + float(line)
    while time.process_time() < end:
        pass
'''
worker = subprocess.Popen([sys.executable, "-c", WORKER], stdin=subprocess.PIPE, text=True)
print("ready", flush=True)
for line in sys.stdin:
    total, untimed = map(int, line.split())
    print(0.05 * (total + 10), file=worker.stdin, flush=True)
    print("0.25", flush=True)
"""


@pytest.fixture
def benchmark_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """``benchmarks`` on the path, as for a script in it."""
    monkeypatch.syspath_prepend(REPOSITORY / "benchmarks")


@pytest.fixture
def few_images(imagenet_samples: Path, tmp_path: Path) -> Path:
    """Some of the real images, as a folder <class>/*.JPEG."""
    for path in sorted(imagenet_samples.glob("*/*.JPEG"))[:IMAGES]:
        target = tmp_path / "images" / path.parent.name / path.name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    return tmp_path / "images"


def test_work_of_children_and_after_the_answer_counts(benchmark_modules: None, tmp_path: Path) -> None:
    """Guards against a contestant that looks cheap because worker processes or the refilling of its queue are not counted."""
    from loader_process import ContestantProcess

    script = tmp_path / "busy.py"
    script.write_text(BUSY_CONTESTANT)
    process = ContestantProcess("busy", [sys.executable, str(script)], threads=1, log=tmp_path / "log")
    try:
        turns = [process.turn(batches=10, untimed=5) for _ in range(2)]
    finally:
        process.close()
    for turn in turns:
        assert turn.wall == 0.25
        assert turn.cpu == pytest.approx(0.05 * 20, rel=0.15)  # nothing of the other turn's, nothing of the start's


def test_contestant_that_ends_in_its_turn(benchmark_modules: None, tmp_path: Path) -> None:
    """Guards against a benchmark that hangs, or reports an empty row, when a contestant crashes."""
    from loader_process import ContestantProcess

    from pipeline.errors import UserError

    code = "print('ready', flush=True); input(); raise SystemExit('no more memory')"
    process = ContestantProcess("frail", [sys.executable, "-c", code], threads=1, log=tmp_path / "log")
    with pytest.raises(UserError, match="contestant frail stopped in its turn .no more memory."):
        process.turn(batches=1, untimed=0)


def test_goals(benchmark_modules: None) -> None:
    """Guards against a goal that passes although it was missed or not measured."""
    from loader_report import Goal, Row, outcomes

    def row(name: str, *cpu_ms: float) -> Row:
        return Row(name, "", "ours", "limit", None, [1.0] * len(cpu_ms), list(cpu_ms))

    rows = [row("ours", 1.0, 9.0, 2.0), row("slow", 4.0, 4.1, 0.1), row("absent")]
    goals = [Goal("", "ours", "slow", 0.5), Goal("", "ours", "slow", 0.49), Goal("", "ours", "absent", 9.0)]
    assert [(o.ratio, o.verdict) for o in outcomes(rows, goals)] == [(0.5, "PASS"), (0.5, "FAIL"), (None, "not measured")]


def test_measures_real_contestants(few_images: Path, tmp_path: Path) -> None:
    """Guards against a benchmark that no longer starts, and against a limit that does less than decoding, or more."""
    report = tmp_path / "report.json"
    options = ["--images", few_images, "--rounds", 1, "--batches", 12, "--workers", 1, "--json", report]
    result = run_script("benchmarks/loader.py", *options, "--only", "limit,ours,pillow,ffcv", "--peers", "no-such-folder")
    rows = {row["name"]: row for row in json.loads(report.read_text())["contestants"]}
    assert list(rows) == ["limit", "ours", "pillow", "ffcv"]
    if rows["limit"]["skipped"] is None:  # libjpeg-turbo's headers are here
        limit, ours, pillow = (rows[name]["cpu_ms"][0] for name in ("limit", "ours", "pillow"))
        assert 0.1 * pillow < limit < min(ours, pillow)
    assert rows["ffcv"]["skipped"] == "No module named 'ffcv'"
    assert "ffcv: skipped: No module named 'ffcv'" in result.stdout
    assert "FFCV's JPEG mode on the same JPEGs: -, must be at most 0.90: not measured" in result.stdout


def test_parts_of_the_loader(few_images: Path) -> None:
    """Guards against a breakdown that no longer runs, or leaves a stage of the loader out."""
    options = ["--images", few_images, "--rounds", 1, "--batches", 9, "--batch-size", 16, "--workers", 1]
    result = run_script("benchmarks/loader.py", *options, "--only", "ours_full", "--parts")
    lines = result.stdout.splitlines()
    table = lines[lines.index("| part | `ours_full` |") + 2 :]
    figures = {part: float(figure.split()[0]) for part, figure in (line.strip("| ").split(" | ") for line in table if line)}
    *parts, last, whole = figures
    assert (last, whole) == ("sum", "the whole loader") and len(parts) == 8
    assert figures["sum"] == pytest.approx(sum(figures[part] for part in parts), abs=0.01)
    assert min(figures[part] for part in parts) > 0


@pytest.mark.parametrize(
    ("options", "found", "needed"),
    [
        (("--only", "ours,pilow"), "'pilow'", "pillow"),
        (("--batches", 8), "got 8", "above 8"),
        (("--workers", 0), "got 0", "at least 1"),
        ((), "0 images", "<class>/*.JPEG"),
    ],
)
def test_refuses_in_a_sentence(options: tuple, found: str, needed: str, tmp_path: Path) -> None:
    """Guards against a mistaken option that ends in a traceback, or only after the contestants were started."""
    result = run_script("benchmarks/loader.py", "--images", tmp_path, *options, check=False)
    assert result.returncode == 2
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert found in result.stderr and needed in result.stderr
