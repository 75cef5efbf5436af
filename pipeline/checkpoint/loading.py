"""Going on from a checkpoint: find the newest whole one, and read what each process holds."""

from __future__ import annotations

import socket
import sys
import time
from pathlib import Path

import torch
from safetensors import SafetensorError

from pipeline.checkpoint.completeness import find_gaps
from pipeline.checkpoint.folder import saved_steps, set_aside, step_folder
from pipeline.checkpoint.held import EMA, WEIGHT, create_moments, held
from pipeline.checkpoint.manifest import MANIFEST, CheckpointManifest, OtherFormat
from pipeline.checkpoint.parts import Parts
from pipeline.checkpoint.snapshot import saved_buffers
from pipeline.checkpoint.whole import Seen, Verified, find_damage
from pipeline.distributed.agreement import raise_on_all
from pipeline.distributed.world import World
from pipeline.errors import UserError
from pipeline.optim.ema import WeightAverage
from pipeline.optim.engine import Engine

_NAMED = 3  # gaps that a sentence lists
_LAG_SECONDS = 90.0  # that another node's network disk may take to show a folder which the main process sees


def newest_whole(run_dir: Path, world: World) -> Verified | None:
    """The newest checkpoint whose every file is as it was written, or None when the run has none; every process must call.

    Each process compares some of the files. A damaged checkpoint is named in a warning, set aside, and the one before is taken. The
    caller holds the run's lock.

    Raises:
        UserError: there are checkpoints, but none is whole; or the newest is of another version, or cannot be read now.
    """
    steps = world.gather(saved_steps(run_dir))[0]  # the main process's word: network disks may lag elsewhere
    damaged: dict[int, str] = {}
    for step in reversed(steps):
        verified, problems = _examine(step_folder(run_dir, step), world)
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
            return verified
        damaged[step] = "; ".join(problems)
    if damaged:
        raise UserError(
            f"{damaged[steps[-1]]}; 0 of the {len(steps)} checkpoints in {run_dir} are whole, 1 needed: restore the files, or choose "
            f"another output_dir."
        )
    return None


def _examine(folder: Path, world: World) -> tuple[Verified | None, list[str]]:
    """The checkpoint, with the same manifest in every process, and what all have found wrong with it.

    Raises:
        UserError: in every process: another version wrote it, or a file cannot be read now, which is no reason to pass it over.
    """
    text: str | None = None
    problem: str | None = None
    refusal: UserError | None = None
    if world.is_main:
        try:
            text = CheckpointManifest.read(folder).to_text()
        except OtherFormat as error:
            refusal = error
        except UserError as error:
            problem = error.problem
        except OSError as error:
            refusal = _unreadable(error)
    raise_on_all(refusal, world)
    text, problem = world.gather([text, problem])[0]
    if problem:
        return None, [problem]
    manifest = CheckpointManifest.parse(text, str(folder / MANIFEST))
    deadline = time.monotonic() + _LAG_SECONDS
    while not folder.is_dir() and time.monotonic() < deadline:
        time.sleep(0.1)
    seen, damage = Seen.look(folder, manifest.files), []
    try:
        damage = find_damage(folder, manifest.files, contents=False)  # all are read here, whoever compares their contents
        damage = damage or find_damage(folder, manifest.files[world.rank :: world.size])
    except OSError as error:
        refusal = _unreadable(error)
    raise_on_all(refusal, world)
    problems = sorted({sentence for part in world.gather(damage) for sentence in part})
    if not problems:  # the headers of damaged files say nothing
        problems = world.gather(find_gaps(folder, manifest)[:_NAMED] if world.is_main else [])[0]
    return Verified(folder, manifest, seen), problems


def _unreadable(error: OSError) -> UserError:
    return UserError(
        f"{error.filename or 'a checkpoint'} cannot be read on {socket.gethostname()} ({error.strerror}): see to its file system, then "
        f"give the same command again."
    )


@torch.no_grad()
def load(engine: Engine, verified: Verified, ema: WeightAverage | None, world: World) -> None:
    """Put a checkpoint into an engine of any ZeRO stage on any number of processes; every process must call.

    Args:
        engine: new, of the same model.
        verified: a whole checkpoint (:func:`newest_whole`); the files that were compared with their checksums are read.
        ema: averaged weights; they begin as the weights where the checkpoint has none.
        world: all processes.

    Raises:
        UserError: in every process: the checkpoint is of another model, or was changed since :func:`newest_whole`.
    """
    refusal = None
    try:
        _read(engine, verified, ema)
    except (KeyError, RuntimeError) as error:  # a stretch or buffer that is not there, or of another shape
        refusal = UserError(f"{verified.folder} is of another model ({error.args[0]}): choose another output_dir.")
    except (SafetensorError, OSError) as error:
        refusal = UserError(f"{verified.folder} can no longer be read ({error}): see to its file system, then start again.")
    try:
        verified.seen.check()
    except UserError as error:
        refusal = error  # which explains whatever else went wrong
    raise_on_all(refusal, world)
    engine.empty_partition_cache()


def _read(engine: Engine, verified: Verified, ema: WeightAverage | None) -> None:
    state = verified.state
    parts = Parts(verified.folder, [record.name for record in verified.manifest.files])
    create_moments(engine, state.optimizer_step)
    averaged = set(parts.names(EMA))
    with_moments = set(parts.names("exp_avg"))
    for stretch in held(engine, ema):
        quantity = stretch.quantity
        if quantity == EMA and stretch.name not in averaged:
            quantity = WEIGHT
        if quantity not in (WEIGHT, EMA) and stretch.name not in with_moments:
            continue  # never had a gradient: its moments are zero
        stretch.values.copy_(parts.read(quantity, stretch.name, stretch.start, len(stretch.values)))
    for name, buffer in saved_buffers(engine.module).items():
        buffer.copy_(parts.read_buffer(name))
