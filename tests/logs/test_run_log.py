"""The log survives resumes, and when it cannot be written the run ends with one sentence, in every process."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pipeline.logs import console
from pipeline.runs.rows import kind_of
from pipeline.terminal import duration
from support.launching import PATIENCE, REPOSITORY, clean_environment
from support.logging_process import MOUNT, PROCESS, START, error_of, run_processes
from support.runs import step_rows


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ("shutil.rmtree(run_dir / 'tensorboard')", "run/tensorboard/events.out.tfevents."),
        ("next((run_dir / 'tensorboard').iterdir()).unlink()", "run/tensorboard/events.out.tfevents."),
        ("(run_dir / 'metrics.jsonl').unlink()", "run/metrics.jsonl"),
    ],
    ids=["TensorBoard's folder", "event file", "metrics"],
)
def test_what_was_removed_under_the_run_stops_it_in_every_process(fault: str, named: str, tmp_path: Path) -> None:
    """Guards against rows that are lost without a word (as TensorBoard's own writer loses those of a removed file), a thread's traceback,
    and processes that wait for the main one."""
    scenario = START + f"if rank == 0: {fault}\nworld.barrier()\nsteps(log, 6, 9)\nprint('not yet')\nsteps(log, 10, 10)"
    for ended in run_processes(tmp_path, scenario, processes=2 if "rmtree" in fault else 1):
        sentence = error_of(ended)
        assert named in sentence and "was removed while the run went on: restore it and start again" in sentence
        assert "not yet" in ended[1]  # at the next writing, not before: no step waits for the disk


def test_a_full_disk_and_a_read_only_one_stop_the_run_with_whole_files(tmp_path: Path) -> None:
    """Guards against half a row, and against "No space left on device" without a word on where and how much is free."""
    if subprocess.run(["unshare", "--mount", "mount", "-t", "tmpfs", "none", tmp_path], capture_output=True).returncode:
        pytest.skip("needs the right to mount a file system")
    fill = """
filler = open(run_dir / "filler", "wb", buffering=0)
try:
    while filler.write(bytes(4096)): pass
except OSError: pass
"""
    # Rows enough to need another page of the full disk; what became of the file is to be seen outside the mount.
    write = (
        "try:\n    for step in range(6, 60): steps(log, step, step)\nfinally: shutil.copy(run_dir / 'metrics.jsonl', folder)\n"
    )
    (ended,) = run_processes(tmp_path, MOUNT + START + fill + write, mounts=True)
    sentence = error_of(ended)
    assert (
        "cannot be written: its disk is full (0.0 MB free, No space left on device): free some space and start again"
        in sentence
    )
    rows = step_rows(tmp_path)
    assert len(rows) % 5 == 0 and [row["step"] for row in rows] == list(range(1, len(rows) + 1))

    later = "steps(log, 6, 59); print('still refused'); filler.truncate(0); steps(log, 60, 60)\n"
    copy = "shutil.copy(run_dir / 'metrics.jsonl', folder)\n"
    (ended,) = run_processes(tmp_path, MOUNT + START + fill + later + copy, mounts=True, retry_seconds=300)
    assert "still refused" in ended[1] and "Until then it is tried again, for 300 s" in ended[2]
    assert [row["step"] for row in step_rows(tmp_path)] == list(range(1, 61))

    read_only = "subprocess.run(['mount', '-o', 'remount,ro', run_dir], check=True)\n"
    log = "try: RunLog(config, world, 0, schedule, 1.0)\nexcept ValueError as error: print(error)\n"
    (ended,) = run_processes(
        tmp_path, MOUNT + read_only + log + "write_run_files(config, world, 1, 'precision fp32: a test', 2)", mounts=True
    )
    assert "run/metrics.jsonl cannot be written (Read-only file system): see to its permissions" in ended[1]
    assert "run/config.yaml cannot be written (Read-only file system)" in error_of(ended)


def test_a_resumed_log_has_each_step_once(tmp_path: Path) -> None:
    """Guards against steps that are listed twice after a kill, against a half-written row that ends the next start, and against
    one damaged row that takes all later ones with it."""
    first = "write_run_files(config, world, 1, 'precision fp32: a test', 2)\n" + START + "steps(log, 6, 10); log.close()"
    assert run_processes(tmp_path, first)[0][0] == 0
    metrics = tmp_path / "run" / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text(lines[0] + '{"step": 99' + "\n" + "".join(lines[1:]) + '{"step": 11, "los')
    (tmp_path / "run" / ".metrics.jsonl.123.tmp").write_text("left by a killed run")
    second = "os.environ.update(SLURM_JOB_ID='19', SLURM_ARRAY_JOB_ID='17', SLURM_ARRAY_TASK_ID='2')\n"
    second += "write_run_files(config, world, 8, 'precision fp32: a test', 2)\nlog = RunLog(config, world, 7, schedule, 1.0); steps(log, 8, 12); log.flush(to_disk=True)\n"
    damaged = "shutil.copy(run_dir / 'environment.json', folder); (run_dir / 'environment.json').write_text('[{')\n"
    sentence = error_of(
        run_processes(tmp_path, second + damaged + "write_run_files(config, world, 8, 'precision fp32: a test', 2)")[0]
    )
    assert "environment.json is damaged" in sentence and "move it away" in sentence
    starts = json.loads((tmp_path / "environment.json").read_text())
    assert [start["first_step"] for start in starts] == [1, 8]
    assert [start["slurm"] for start in starts] == [{}, {"job": "17_2", "SLURM_JOB_ID": "19"}]  # squeue shows no 19
    assert [row["step"] for row in step_rows(tmp_path / "run")] == list(range(1, 13))
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("train/loss")] == list(range(1, 13))
    assert [event.value for event in events.Scalars("train/loss")] == [2.0 + step - 1 for step in range(1, 13)]
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "config.yaml",
        "environment.json",
        "metrics.jsonl",
        "tensorboard",
    ]


def test_bad_samples_are_named_once_and_counted_on_over_a_resume(tmp_path: Path) -> None:
    """Guards against a limit on bad samples that each restart sets back, and against the same warnings at every start."""
    scenario = """
log = RunLog(config, world, 0, schedule, 1.0, {3: "sample 3 is bad"})
steps(log, 1, 4)
take(log, 5, bad_samples={3: "sample 3 is bad", 7 + rank: f"sample {7 + rank} is bad"}, replaced=2)
assert log.bad_samples == {n: f"sample {n} is bad" for n in (3, 7, 8)}, log.bad_samples
"""
    ended = run_processes(tmp_path, scenario, processes=2)
    assert [code for code, _, _ in ended] == [0, 0], ended
    assert [(row["bad_samples"], row["replaced"]) for row in step_rows(tmp_path / "run")] == [(3, 0)] * 4 + [(3, 4)]
    warnings = [line for _, _, err in ended for line in err.splitlines() if line.startswith("warning: ")]
    assert warnings == ["warning: sample 7 is bad", "warning: sample 8 is bad"]


def test_a_terminal_shows_the_history_and_may_vanish(tmp_path: Path) -> None:
    """Guards against a progress bar that replaces all that was said, and against a run that ends because nobody reads it any more."""
    scenario = """
from pipeline.logs import console
console.outlive_the_terminal()
log = RunLog(config, world, 0, schedule, 1.0)
steps(log, 1, 10)
while not (Path(folder) / "gone").exists(): time.sleep(0.05)
steps(log, 11, 15)
print("to stdout"); print("to stderr", file=sys.stderr, flush=True)
log.close()
"""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 200, 0, 0))
    command = [sys.executable, "-c", PROCESS, str(tmp_path), "0", "1", scenario, "0"]
    environment = clean_environment(PYTHONPATH=str(REPOSITORY))
    process = subprocess.Popen(command, env=environment, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    shown = b""
    while b"step 10/100" not in shown:
        shown += os.read(ours, 4096)  # raises when the process has ended
    os.close(ours)  # what is written to the terminal from now on is refused with EIO
    (tmp_path / "gone").touch()
    assert process.wait(timeout=PATIENCE) == 0
    assert [row["step"] for row in step_rows(tmp_path / "run")] == list(range(1, 16))

    text = shown.decode()
    assert "training:" in text and "/100 [" in text, "no progress bar"
    line = r"\r?\d\d:\d\d:\d\d step 5/100 epoch 0.50 loss 6.0000 lr .* images/s data wait .* memory .* GiB \d+ s left\r\n"
    assert re.search(line, text), text
    assert "step 1/100 epoch 0.10 loss 2.0000 the first step took" in text and "mfu" not in text


def test_a_line_paced_by_time_is_rank_0_s_own(tmp_path: Path) -> None:
    """Guards against minutes without a line where steps are slow, and against a collective that one rank alone would begin."""
    scenario = """
from pipeline.logs import run_log
run_log._PACE = 0 if rank == 0 else 1e9
log = RunLog(config, world, 0, schedule, 1.0)
steps(log, 1, 6)
"""
    (code, out, _), (other_code, other, _) = run_processes(tmp_path, scenario, processes=2)
    assert (code, other_code) == (0, 0) and "step" not in other
    shown = re.findall(r" step (\d)/100 epoch \S+ loss (\S+) (\(this rank's\))?", out)
    assert shown == [(str(step), f"{1 + step:.4f}", "(this rank's)") for step in (1, 2, 3, 4)] + [
        ("5", "6.5000", ""),  # of both ranks, with its row
        ("6", "7.0000", "(this rank's)"),
    ]
    assert [row["step"] for row in step_rows(tmp_path / "run")] == [1, 2, 3, 4, 5]


def test_a_warning_of_any_layer_is_one_line_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against warnings that are lost, shown twice after a second install, or mixed into the results on stdout."""
    console.install()
    console.install()
    logging.getLogger("pipeline.checkpoint.saver").warning("x cannot be written (100 % full)")
    logging.getLogger("pipeline.training.folder").info("note: 50 % of it")
    logging.getLogger("pipeline.training.folder").debug("nobody asked")
    said = capsys.readouterr()
    assert said.err == "warning: x cannot be written (100 % full)\n"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d note: 50 % of it\n", said.out)


def test_durations() -> None:
    """Guards against "0 h 60 min left"."""
    assert [duration(s) for s in (0, 29, 60, 3599, 3600, 4300, 86399, 86400, 183_000)] == [
        "0 s", "29 s", "1 min", "1 h 0 min", "1 h 0 min", "1 h 12 min", "1 d 0 h", "1 d 0 h", "2 d 3 h",
    ]  # fmt: skip


def test_an_evaluation_that_is_due_again_has_no_row_yet(tmp_path: Path) -> None:
    """Guards against two rows of one evaluation, which differ in the last digits on other world sizes: its rows were written, but the
    start was killed before the checkpoint was that says so."""
    scenario = """
result = {"top1": 50.0, "top5": 90.0, "loss": 1.5, "correct1": 2, "correct5": 4, "count": 4, "class_correct": [2, 0], "class_count": [2, 2]}
log = RunLog(config, world, 0, schedule, 1.0); steps(log, 1, 5); log.evaluation(5, {"model": result, "ema": result}); log.close()
RunLog(config, world, 5, schedule, 1.0, evaluation_due=DUE).close()
"""
    for due, kinds in ((False, ["step"] * 5 + ["evaluation"] * 2), (True, ["step"] * 5)):
        assert run_processes(tmp_path, scenario.replace("DUE", str(due)))[0][0] == 0
        rows = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
        assert [kind_of(row) for row in rows] == kinds


def test_tensorboard_compares_runs_by_their_hyperparameters(tmp_path: Path) -> None:
    """Guards against a table of runs that lacks those with another key set to null, and a first group without its curves."""
    from tensorboard.plugins.hparams import metadata

    scenario = """
from pipeline.config import config_from_dict
result = {"top1": 50.0, "top5": 90.0, "loss": 1.5, "correct1": 2, "correct5": 4, "count": 4, "class_correct": [2, 0], "class_count": [2, 2]}
log = RunLog(config, world, 0, schedule, 1.0); steps(log, 1, 5); log.evaluation(5, {"model": result, "ema": result}); log.close()
log = RunLog(config, world, 5, schedule, 1.0); steps(log, 6, 10); log.close()
averaged = {**config.model_dump(), "output_dir": str(Path(folder) / "other"), "train": {**config.train.model_dump(), "ema_decay": 0.9}}
averaged["model"] = {**averaged["model"], "switches": {"conv_stem": False}}
Path(averaged["output_dir"]).mkdir()
RunLog(config_from_dict(averaged, "a test"), world, 0, schedule, 1.0).close()
"""
    assert run_processes(tmp_path, scenario)[0][0] == 0
    assert json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[5])["class_correct"] == [2, 0]
    glance = {"1_top1": [50.0], "2_loss": [4.0, 9.0], "4_skipped_or_bad": [0, 0], "5_grad_norm": [0.5, 0.5]}
    shown = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    for curve, expected in glance.items():  # a point per flush: the mean of five steps
        assert [event.value for event in shown.Scalars(f"at_a_glance/{curve}")] == expected
    assert min(shown.Tags()["scalars"]).startswith("at_a_glance/"), "not the group that TensorBoard shows first"
    values = []
    for name in ("run", "other"):
        events = EventAccumulator(str(tmp_path / name / "tensorboard")).Reload()
        content = events.PluginTagToContent(metadata.PLUGIN_NAME)
        assert metadata.EXPERIMENT_TAG not in content, "TensorBoard would show the columns of one run only"
        started = metadata.parse_session_start_info_plugin_data(content[metadata.SESSION_START_INFO_TAG])
        values.append({key: getattr(value, value.WhichOneof("kind")) for key, value in started.hparams.items()})
    assert values[0].keys() == values[1].keys() and len(values[0]) > 30
    differing = {key for key in values[0] if values[0][key] != values[1][key]}
    assert differing == {"train.ema_decay", "model.switches"} and values[1]["model.switches"] == "conv_stem=false"
    assert values[0]["train.ema_decay"] == "none" and values[0]["optim.betas"] == "0.9,0.999"


def test_the_slowest_rank_is_named_and_metrics_of_any_module_are_reduced(tmp_path: Path) -> None:
    """Guards against a stall on another node that nobody sees because the log has rank 0's wait alone, and against metrics that some
    ranks, or some steps, do not record."""
    scenario = """
def module(step):
    record("entropy", torch.tensor(float(rank)))
    record("entropy", torch.tensor(2.0 + rank))  # a second micro-batch
    record("tokens", 10 + rank, reduce="sum")
    record("largest", [0.5, 3.0][rank] if step != 4 else float("nan"), reduce="max")
    if rank == 1 and step == 5:
        record("rare", 7.0)

record("outside", 1.0)
log = RunLog(config, world, 0, schedule, 1.0)
log.restart_clock()
for step in range(1, 6):
    take(log, step, data=lambda: (module(step), time.sleep(0.3 * rank)))
    world.barrier()  # as in a backward pass, where rank 0 waits for rank 1
log.close()
"""
    ended = run_processes(tmp_path, scenario, processes=2)
    assert [code for code, _, _ in ended] == [0, 0], ended
    rows = step_rows(tmp_path / "run")
    host = os.uname().nodename
    for number, row in enumerate(rows, 1):
        assert (row["data_wait_rank"], row["data_wait_host"]) == (1, host) and 0.05 < row["data_wait"] <= 1
        assert (row["loss"], row["entropy"], row["tokens"]) == (1.5 + number, 1.5, 21)
        assert row["largest"] == (None if number == 4 else 3.0)
        assert row.get("rare") == (7.0 if number == 5 else None) and "outside" not in row
    assert f"(rank 1 on {host})" in ended[0][1]
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert [event.value for event in events.Scalars("train/entropy")] == [1.5] * 5
    assert [event.value for event in events.Scalars("utilization/data_wait_rank")] == [1] * 5
