"""Resume: find the newest intact checkpoint, and load the slices that each rank holds."""

from __future__ import annotations

import logging
import socket
import time
from pathlib import Path

import torch
from safetensors import SafetensorError

from pipeline.checkpoint.completeness import find_gaps
from pipeline.checkpoint.folder import saved_steps, set_aside, step_folder
from pipeline.checkpoint.headers import Header, packed, read_headers, unpacked
from pipeline.checkpoint.held import EMA, MOMENTS, WEIGHT, create_moments, held
from pipeline.checkpoint.manifest import MANIFEST, CheckpointManifest, OtherFormat, RunState
from pipeline.checkpoint.parts import EMA_BUFFER, Parts
from pipeline.checkpoint.snapshot import saved_buffers
from pipeline.checkpoint.whole import Seen, Verified, find_damage
from pipeline.distributed.agreement import raise_on_all
from pipeline.distributed.world import World
from pipeline.errors import UserError
from pipeline.optim.ema import WeightAverage
from pipeline.optim.engine import Engine

_log = logging.getLogger(__name__)
_NAMED = 3  # gaps listed in a message
_LAG_SECONDS = 90.0  # until other nodes see a new folder on a network disk: NFS caches attributes for up to 60 s (acdirmax)


def newest_whole(run_dir: Path, world: World, set_aside_damaged: bool = True) -> Verified | None:
    """The newest intact checkpoint, or None if the run has none. Collective.

    Each rank verifies some of the files, and no rank opens the others here. A damaged checkpoint is set aside with a warning, and the one before it is tried.

    Args:
        run_dir: the run folder.
        world: all ranks.
        set_aside_damaged: the caller must hold the run's lock then; False: the folder is only read.

    Raises:
        UserError: there are checkpoints, but none is intact; or the newest is of another version, or cannot be read now.
    """
    steps = world.from_main(
        saved_steps(run_dir) if world.is_main else []
    )  # as rank 0 sees them: network disks may lag elsewhere
    damaged: dict[int, str] = {}
    for step in reversed(steps):
        verified, problems = _examine(step_folder(run_dir, step), world)
        if not problems:
            if world.is_main:
                for passed_over, sentence in damaged.items():
                    done = "it would be set aside"
                    if set_aside_damaged:
                        done = f"it is now {set_aside(step_folder(run_dir, passed_over)).name}"
                    _log.warning(f"{sentence}: {done}, the run goes on from step {step}")
            world.barrier()
            return verified
        damaged[step] = "; ".join(problems)
    if damaged:
        raise UserError(
            f"{damaged[steps[-1]]}; 0 of the {len(steps)} checkpoints in {run_dir} are whole, 1 needed",
            "restore the files, or choose another output_dir",
        )
    return None


def _examine(folder: Path, world: World) -> tuple[Verified | None, list[str]]:
    """The checkpoint, with the same manifest on every rank, and the defects that any rank found. Collective.

    Raises:
        UserError: on every rank: another version wrote it, or a file cannot be read now, which need not mean damage.
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
    text, problem = world.from_main([text, problem])
    if problem:
        return None, [problem]
    manifest = CheckpointManifest.parse(text, str(folder / MANIFEST))
    deadline = time.monotonic() + _LAG_SECONDS
    while not folder.is_dir() and time.monotonic() < deadline:
        time.sleep(0.1)
    mine, parameters = manifest.files[world.rank :: world.size], list(manifest.shapes)
    seen = Seen.look(folder, mine)
    damage: list[str] = []
    headers: dict[str, Header] = {}
    try:
        damage = find_damage(folder, mine)
        if not damage:  # a damaged file's header cannot be trusted
            headers = read_headers(folder, [record.name for record in mine])
    except SafetensorError as error:
        damage = [f"{folder} has a file that is no safetensors file ({error})"]
    except OSError as error:
        refusal = _unreadable(error)
    raise_on_all(refusal, world)
    found = world.gather([damage, seen.shared(), packed(headers, parameters)])
    problems = sorted({sentence for damage, _, _ in found for sentence in damage})
    for _, marks, its in found:
        seen.elsewhere.update(marks)
        headers.update(unpacked(its, parameters))
    if not problems:
        problems = world.from_main(find_gaps(folder, manifest, headers)[:_NAMED] if world.is_main else [])
    return Verified(folder, manifest, seen, headers), problems


def _unreadable(error: OSError) -> UserError:
    return UserError(
        f"{error.filename or 'a checkpoint'} cannot be read on {socket.gethostname()} ({error.strerror})",
        "check its file system, then give the same command again",
    )


@torch.no_grad()
def load(engine: Engine, verified: Verified, ema: WeightAverage | None, world: World) -> None:
    """Load a checkpoint into an engine, at any ZeRO stage and world size. Collective.

    Args:
        engine: new, of the same model.
        verified: an intact checkpoint (:func:`newest_whole`).
        ema: averaged weights and buffers; initialized from the weights and buffers if the checkpoint has none.
        world: all ranks.

    Raises:
        UserError: on every rank: the checkpoint is of another model, or was changed since :func:`newest_whole`.
    """
    refusal = None
    parts: Parts | None = None
    try:
        parts = Parts(verified.folder, [record.name for record in verified.manifest.files], verified.headers)
        averaged_buffers = _read(engine, verified.state, parts, ema)
    except (KeyError, RuntimeError) as error:  # a slice or buffer that is missing, or of another shape
        refusal = UserError(f"{verified.folder} is of another model ({error.args[0]})", "choose another output_dir")
    except (SafetensorError, OSError) as error:
        refusal = UserError(f"{verified.folder} can no longer be read ({error})", "check its file system, then start again")
    try:
        verified.seen.check(parts.opened if parts else ())
    except UserError as error:
        refusal = error  # the cause of any other failure
    raise_on_all(refusal, world)
    if ema and ema.buffers and not averaged_buffers and world.is_main:
        _log.info(
            f"note: {verified.folder} has no averages of the model's buffers (BatchNorm's statistics), which earlier versions did not "
            f"average: these averages begin with the buffers as they are at step {verified.state.step}."
        )
    engine.empty_partition_cache()


def _read(engine: Engine, state: RunState, parts: Parts, ema: WeightAverage | None) -> bool:
    """Read what this rank holds; returns whether the checkpoint has averages of buffers."""
    create_moments(engine, state.optimizer_step)
    averaged = set(parts.names(EMA))
    with_moments = {moment: set(parts.names(moment)) for moment in MOMENTS}
    for piece in held(engine, ema):
        quantity = piece.quantity
        if quantity == EMA and piece.name not in averaged:
            quantity = WEIGHT
        if quantity in MOMENTS and piece.name not in with_moments[quantity]:
            continue  # no moments were saved: it never had a gradient, so they are zero
        piece.values.copy_(parts.read(quantity, piece.name, piece.start, len(piece.values)))
    for name, buffer in saved_buffers(engine.module).items():
        buffer.copy_(parts.read_buffer(name))
    averaged_buffers = bool(parts.names(EMA_BUFFER))
    if ema:
        for name, buffer in ema.models_buffers().items():
            average = ema.buffers[name]
            average.copy_(parts.read(EMA_BUFFER, name, 0, average.numel()).view_as(average) if averaged_buffers else buffer)
    return averaged_buffers
