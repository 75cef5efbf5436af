"""Whether a job may be requeued: restarts that count, environments and lists of restarts that are not Slurm's or ours."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.errors import UserError
from pipeline.training import restart


def checkpoint_at(run: Path, step: int) -> None:
    (run / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)


def test_only_restarts_in_a_row_count(tmp_path: Path) -> None:
    """Guards against a run that is given up although it gets on, or because of what an earlier job did."""
    for number in (1, 2, 3):
        restart.allow_restart(tmp_path, "7", number, 1)
    with pytest.raises(UserError, match="no progress.*at the beginning"):
        restart.allow_restart(tmp_path, "7", 4, 1)
    assert restart.allow_restart(tmp_path, "8", 1, 1).step is None
    checkpoint_at(tmp_path, 40)
    for number in (4, 5, 6):
        assert restart.allow_restart(tmp_path, "7", number, 137).step == 40
    with pytest.raises(UserError, match="at step 40"):
        restart.allow_restart(tmp_path, "7", 7, 137)
    checkpoint_at(tmp_path, 41)
    restart.allow_restart(tmp_path, "7", 7, 75)
    rows = json.loads((tmp_path / restart.RESTARTS).read_text())
    assert [(row["job"], row["restart"], row["step"]) for row in rows][-3:] == [("7", 5, 40), ("7", 6, 40), ("7", 7, 41)]


def test_a_wrong_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """Guards against a traceback where the environment is not Slurm's."""
    config = tmp_path / "config.yaml"
    config.write_text(f"output_dir: {tmp_path}")
    monkeypatch.setattr("sys.argv", ["restart", "--exit-code", "1", "--config", str(config)])
    for value in ("x", "-1", "²", ""):
        monkeypatch.setenv("SLURM_RESTART_COUNT", value)
        assert restart.main() == 1
        (sentence,) = capsys.readouterr().err.splitlines()
        assert f"SLURM_RESTART_COUNT must be a whole number, got {value!r}" in sentence
    assert not (tmp_path / restart.RESTARTS).exists()


def test_a_job_with_doctor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """Guards against `sbatch launch/train.slurm CONFIG --doctor`, which ends at its first time limit: the job asks with all its words."""
    config = tmp_path / "config.yaml"
    config.write_text(f"output_dir: {tmp_path}")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "0")
    words = ["--config", str(config), "train.epochs=2", "--doctor", f"output_dir={tmp_path / 'run'}"]
    monkeypatch.setattr("sys.argv", ["restart", "--exit-code", "75", *words])
    assert restart.main() == 0, capsys.readouterr().err
    assert len(restart.read_restarts(tmp_path / "run" / restart.RESTARTS)) == 1


@pytest.mark.parametrize("damage", ["", "[{", "{}x", '[{"job": "7"}]', "7", "[7]"])
def test_a_damaged_list(damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """Guards against a traceback in the job's log, or a count that silently begins anew."""
    config = tmp_path / "config.yaml"
    config.write_text(f"output_dir: {tmp_path}")
    (tmp_path / restart.RESTARTS).write_text(damage)
    monkeypatch.setattr("sys.argv", ["restart", "--exit-code", "1", "--config", str(config)])
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert restart.main() == 1
    said = capsys.readouterr()
    assert said.out == "" and len(said.err.splitlines()) == 1
    assert said.err.startswith("no restart of job 7: a process failed (exit code 1), and ") and "remove the file" in said.err
    assert (tmp_path / restart.RESTARTS).read_text() == damage
