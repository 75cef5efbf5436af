"""Going on from a checkpoint: find the newest whole one, and read what each process holds."""

from __future__ import annotations

import socket
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch

from pipeline.agreement import raise_on_all
from pipeline.checkpoint.folder import (
    FileRecord,
    Manifest,
    OtherFormat,
    RunState,
    find_damage,
    saved_steps,
    set_aside,
    step_folder,
)
from pipeline.checkpoint.held import EMA, WEIGHT, create_moments, held
from pipeline.checkpoint.parts import Parts
from pipeline.checkpoint.snapshot import saved_buffers
from pipeline.distributed import World
from pipeline.ema import WeightAverage
from pipeline.errors import UserError

_LAG_SECONDS = 90.0  # that another node's network disk may take to show a folder which the main process sees


def newest_whole(run_dir: Path, world: World) -> Manifest | None:
    """The newest checkpoint whose every file is as it was written, or None when the run has none; every process must call.

    Each process compares some of the files. A damaged checkpoint is named in a warning, set aside, and the one before is taken. The
    caller holds the run's lock.

    Raises:
        UserError: there are checkpoints, but none is whole; or the newest is of another version, or cannot be read now.
    """
    steps = world.gather(saved_steps(run_dir))[0]  # the main process's word: network disks may lag elsewhere
    damaged: dict[int, str] = {}
    for step in reversed(steps):
        manifest, problems = _examine(step_folder(run_dir, step), world)
        problems = sorted({sentence for part in world.gather(problems) for sentence in part})
        if not problems:
            if world.is_main:
                for passed_over, sentence in damaged.items():
                    aside = set_aside(step_folder(run_dir, passed_over))
                    print(
                        f"warning: {sentence}: it is now {aside.name}, the run goes on from step {step}",
                        file=sys.stderr,
                        flush=True,
                    )
            world.barrier()
            return manifest
        damaged[step] = "; ".join(problems)
    if damaged:
        raise UserError(
            f"{damaged[steps[-1]]}; 0 of the {len(steps)} checkpoints in {run_dir} are whole, 1 needed: restore the files, or choose "
            f"another output_dir."
        )
    return None


def _examine(folder: Path, world: World) -> tuple[Manifest | None, list[str]]:
    """The manifest, the same in every process, and what is wrong with this process's share of the files.

    Raises:
        UserError: in every process: another version wrote it, or a file cannot be read now, which is no reason to pass it over.
    """
    manifest = problem = refusal = None
    if world.is_main:
        try:
            manifest = Manifest.read(folder)
        except OtherFormat as error:
            refusal = error
        except UserError as error:
            problem = str(error).rpartition(":")[0]
        except OSError as error:
            refusal = _unreadable(error)
    raise_on_all(refusal, world)
    fields, problem = world.gather((asdict(manifest) if manifest else None, problem))[0]
    if problem:
        return None, [problem]
    manifest = Manifest(RunState(**fields["state"]), fields["shapes"], [FileRecord(**record) for record in fields["files"]])
    deadline = time.monotonic() + _LAG_SECONDS
    while not folder.is_dir() and time.monotonic() < deadline:
        time.sleep(0.1)
    damage = []
    try:
        damage = find_damage(folder, manifest.files[world.rank :: world.size])
    except OSError as error:
        refusal = _unreadable(error)
    raise_on_all(refusal, world)
    return manifest, damage


def _unreadable(error: OSError) -> UserError:
    return UserError(
        f"{error.filename or 'a checkpoint'} cannot be read on {socket.gethostname()} ({error.strerror}): see to its file system, then "
        f"give the same command again."
    )


@torch.no_grad()
def load(engine, run_dir: Path, manifest: Manifest, ema: WeightAverage | None) -> None:
    """Put a checkpoint into an engine of any ZeRO stage on any number of processes; every process must call.

    Args:
        engine: new, of the same model.
        run_dir: the run folder.
        manifest: of the checkpoint, a whole one (:func:`newest_whole`).
        ema: averaged weights; they begin as the weights where the checkpoint has none.

    Raises:
        UserError: the checkpoint is of another model.
    """
    folder = step_folder(run_dir, manifest.state.step)
    parts = Parts(folder, [record.name for record in manifest.files])
    create_moments(engine, manifest.state.optimizer_step)
    averaged = set(parts.names(EMA))
    with_moments = set(parts.names("exp_avg"))
    try:
        for stretch in held(engine, ema):
            quantity = stretch.quantity
            if quantity == EMA and stretch.name not in averaged:
                quantity = WEIGHT
            if quantity not in (WEIGHT, EMA) and stretch.name not in with_moments:
                continue  # never had a gradient: its moments are zero
            stretch.values.copy_(parts.read(quantity, stretch.name, stretch.start, len(stretch.values)))
        for name, buffer in saved_buffers(engine.module).items():
            buffer.copy_(parts.read_buffer(name))
    except (KeyError, RuntimeError) as error:  # a stretch or buffer that is not there, or of another shape
        raise UserError(f"{folder} is of another model ({error.args[0]}): choose another output_dir.") from None
    engine.empty_partition_cache()
