"""Write how a run was started, ``config.yaml`` and ``environment.json``, what happened to it beside its steps, ``events.jsonl``,
and on what each rank trained, ``samples/``.

::

    {"event": "start", "time": ..., "step": 40, "number": 2, "last_step": 500, "world_size": 8, "zero_stage": 1, "reached": 47}
    {"event": "evaluation", "time": ..., "step": 50, "seconds": 12.1}
    {"event": "save", "time": ..., "step": 50, "seconds": 0.4, "reason": "checkpoint.every_steps"}
    {"event": "end", "time": ..., "step": 61, "reason": "stopped by SIGTERM", "whole": false}

``step`` is the number of steps done, ``time`` the Unix time in seconds, ``number`` counts the starts. ``reached`` is the last step
in the log of the start before: those after ``step`` are repeated. ``whole`` tells the end of the schedule. A start that was killed
has no end. Whoever shows the run reads it (:mod:`pipeline.runs`); a run goes on if it cannot be written.
"""

import errno
import json
import logging
import os
import platform
import subprocess
import time
from collections import defaultdict
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from xxhash import xxh3_64_hexdigest

from pipeline.augment import BatchRequest
from pipeline.cluster.agreement import do_in_main
from pipeline.cluster.environment import job_name, node_name
from pipeline.cluster.world import World
from pipeline.config import Config, config_to_yaml, flatten
from pipeline.errors import UserError
from pipeline.files import GrowingFile, being_written, cut_behind_rows, remove_leftovers, replace_text, write_error
from pipeline.hardware import cpu_name
from pipeline.logs import console
from pipeline.models.timm.names import is_timm
from pipeline.runs import CONFIG, ENVIRONMENT, EVENTS, METRICS, SAMPLES
from pipeline.runs.rows import last_rows

_log = logging.getLogger(__name__)
AUTO_REASON = "micro_batch_reason"  # key of a start that had train.micro_batch_size=auto
# What numbers depend on; one of the DALIs.
_PACKAGES = ("torch", "deepspeed", "nvidia-dali-cuda130", "nvidia-dali-cuda120", "numpy")
# What any start may change, and on which the rows that it writes, and how sums are rounded, depend.
SETTINGS = ("eval.every_epochs", "log.samples", "train.max_steps", "train.micro_batch_size")
_SLURM = ("SLURM_JOB_ID", "SLURM_JOB_NAME", "SLURM_RESTART_COUNT")


def write_run_files(config: Config, world: World, first_step: int, precision: str, micro_batch: str | None = None) -> int:
    """Write ``config.yaml`` and append this start, with its ``first_step``, counted from 1, to ``environment.json``. ``micro_batch``: why
    it has its size, where ``auto`` was asked for. Collective. Returns which start of the run this is, counted from 1. Raises
    UserError: on every rank: a file cannot be written, or ``environment.json`` is damaged."""
    start = {
        **_environment(config, world),
        "precision": precision,
        "hosts": sorted(set(world.gather(node_name()))),
        "first_step": first_step,
        "micro_batch_size": config.train.micro_batch,
        "zero_stage": config.train.zero_stage if world.size > 1 else 0,
        "settings": {key: value for key, value in flatten(config).items() if key in SETTINGS},
        **({AUTO_REASON: micro_batch} if micro_batch else {}),
    }
    return world.from_main(do_in_main(lambda: _write(config, start), world))


def _write(config: Config, start: dict) -> int:
    run_dir = config.folder
    earlier = earlier_starts(run_dir)
    about = f"# {start['precision']}\n{config_to_yaml(config)}"
    for name, content in {CONFIG: about, ENVIRONMENT: json.dumps([*earlier, start], indent=1) + "\n"}.items():
        path = run_dir / name
        with being_written(path):
            remove_leftovers(path)
            replace_text(path, content)
    if earlier and (changes := _changed_packages(earlier[-1], start)):
        console.say(f"note: since the run's last start {changes}: results may differ from those of an unbroken run")
    return len(earlier) + 1


def _changed_packages(before: object, now: dict) -> str:
    """``torch 2.12.0 has become 2.13.0, ...``; empty if all versions are those of the start before, as far as it says."""
    known = before.get("packages") if isinstance(before, dict) else None
    if not isinstance(known, dict):
        return ""
    changed = ((name, version) for name, version in now["packages"].items() if known.get(name, version) != version)
    return ", ".join(f"{name} {known[name]} has become {version}" for name, version in changed)


def earlier_starts(run_dir: Path) -> list[dict]:
    """The starts of a run so far, the latest last; none for a new run. Raises UserError: ``environment.json`` is damaged."""
    path = run_dir / ENVIRONMENT
    try:
        starts = json.loads(path.read_text())
        if not isinstance(starts, list):
            raise ValueError("not a list")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror})", "check its file system") from None
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error})", "move it away") from None
    return starts


def check_run_files(run_dir: Path) -> None:
    """Check, without writing, that :func:`write_run_files` could write. Raises UserError: as it would."""
    earlier_starts(run_dir)
    if run_dir.is_dir() and not os.access(run_dir, os.W_OK | os.X_OK):
        raise write_error(run_dir / CONFIG, PermissionError(errno.EACCES, os.strerror(errno.EACCES)))


def _environment(config: Config, world: World) -> dict:
    on_gpu, job = world.device.type == "cuda", job_name(os.environ)
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        **code_version(config),
        "world_size": world.size,
        "device": torch.cuda.get_device_name(world.device) if on_gpu else platform.processor() or "cpu",
        **({} if on_gpu else {"cpu": cpu_name(), "cpu_threads": world.cpu_threads}),  # rounding depends on both
        # What squeue and scontrol call the job, ARRAY_TASK in a job array; the rest as Slurm has it. Empty outside of a job.
        "slurm": {**({"job": job} if job else {}), **{name: os.environ[name] for name in _SLURM if name in os.environ}},
    }


def code_version(config: Config) -> dict[str, Any]:
    """Versions of Python, of the packages that numbers depend on, and of this one: the commit, None if it is installed without its repository."""
    packages, commit, here = {}, None, str(Path(__file__).parent)
    for name in (*_PACKAGES, "timm") if is_timm(config.model.name) else _PACKAGES:
        with suppress(PackageNotFoundError):
            packages[name] = version(name)
    git = ["git", "-C", here, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    with suppress(OSError, subprocess.CalledProcessError):
        commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    return {"python": platform.python_version(), "packages": packages, "git_commit": commit}


class RunEvents:
    """Appends to ``events.jsonl``; on ranks other than 0 it does nothing. Every row is one ``write`` to a file that is opened for it, and
    synced, so any thread may add one, and neither a kill nor a power failure loses one."""

    def __init__(self, run_dir: Path, world: World) -> None:
        self._run_dir, self._writes = run_dir, world.is_main

    def start(self, step: int, **facts: Any) -> None:
        """Add a start; call it before the log is opened, which removes the rows of steps that are repeated."""
        if self._writes:
            with suppress(OSError):  # what a full disk has cut is left to :meth:`add`
                cut_behind_rows(self._run_dir / EVENTS)
            rows = last_rows(self._run_dir / METRICS)
            self.add("start", step, **facts, reached=rows[-1]["step"] if rows else None)

    def add(self, event: str, step: int, **facts: Any) -> None:
        """Add a row."""
        if not self._writes:
            return
        row = json.dumps({"event": event, "time": round(time.time(), 3), "step": step, **facts}) + "\n"
        try:
            with open(self._run_dir / EVENTS, "a+b", buffering=0) as file:
                size = file.seek(0, os.SEEK_END)
                torn = size > 0 and os.pread(file.fileno(), 1, size - 1) != b"\n"  # a row that a full disk has cut
                file.write(("\n" * torn + row).encode())
                os.fsync(file.fileno())  # rows are few, and a power failure would leave zeros
        except OSError as error:
            self._writes = False
            _log.warning(f"{self._run_dir / EVENTS} cannot be written ({error.strerror}): a report lacks this start's story")


class SampleLog:
    """What this rank trained on, step by step, so that any two runs can be compared (``log.samples``): ``samples/rank-00000.jsonl``. ::

        {"start": 2, "step": 42, "time": ..., "epoch": [0, ...], "position": [640, ...], "sample": [17, ...], "augmentation": ["1f0c...", ...]}

    One line per optimizer step, with its micro-batches in order. ``start`` counts the starts of the run, as ``environment.json`` lists
    them. A step that was repeated after a resume has several lines; the weights come from the latest by ``time``. Every method raises a
    ``UserError`` on this rank if its file cannot be written. ``start``: the number of this start, counted from 1.
    """

    def __init__(self, run_dir: Path, world: World, start: int) -> None:
        path = run_dir / SAMPLES / f"rank-{world.rank:05d}.jsonl"
        with being_written(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            cut_behind_rows(path)  # a part of a line would corrupt the next one
        self._file, self._start = GrowingFile(path), start
        self.close = self._file.close
        self._step: dict[str, list] = defaultdict(list)

    def add(self, request: BatchRequest) -> None:
        """Add a micro-batch to the current step."""
        self._step["epoch"] += request.epoch.tolist()
        self._step["position"] += request.position.tolist()
        self._step["sample"] += request.index.tolist()
        self._step["augmentation"] += augmentation_digests(request)

    def write(self, step: int) -> None:
        """Write the line of a step. The kernel has it when this returns, so a kill loses nothing."""
        line = {"start": self._start, "step": step, "time": round(time.time(), 3), **self._step}
        self._file.add(json.dumps(line).encode() + b"\n")
        self._file.flush()
        self._step.clear()

    def sync(self) -> None:
        """Make all lines durable; called before a checkpoint that holds what they name."""
        self._file.flush(to_disk=True)


def augmentation_digests(request: BatchRequest) -> list[str]:
    """XXH3-64 of all random draws for an image, as 16 hexadecimal digits: crop and flip, the filters if they are chosen, and what each
    augmentation drew, of mixing the partner's sample too. For equal samples, equal digests mean equal pixels."""
    drawn = [np.ascontiguousarray(values).reshape(len(values), -1).view(np.uint8) for values in request.digested()]
    return [xxh3_64_hexdigest(row.tobytes()) for row in np.concatenate(drawn, axis=1)]  # (bytes,) each
