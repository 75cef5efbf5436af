"""Resume a run: find the newest intact checkpoint, and load the slices that each rank holds."""

import logging
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError

from pipeline.checkpoint.folder import saved_steps, set_aside, step_folder
from pipeline.checkpoint.manifest import MANIFEST, CheckpointManifest, OtherFormat, RunState, find_damage
from pipeline.checkpoint.parts import EMA, EMA_BUFFER, WEIGHT, Entry, SliceReader, find_gaps, find_not_finite, read_headers
from pipeline.checkpoint.rank_slices import rank_slices, read_scalars, saved_buffers
from pipeline.cluster.agreement import do_in_main, do_on_all
from pipeline.cluster.environment import node_name
from pipeline.cluster.world import World
from pipeline.errors import UserError
from pipeline.optim.averages import WeightAverage
from pipeline.optim.engine import Engine
from pipeline.optim.slices import create_state

_log = logging.getLogger(__name__)
_NAMED = 3  # gaps listed in a message
_LAG_SECONDS = 90.0  # until other nodes see a new folder on a network disk: NFS caches attributes for up to 60 s (acdirmax)


@dataclass(frozen=True)
class Verified:
    """An intact checkpoint."""

    folder: Path
    manifest: CheckpointManifest
    entries: list[Entry]  # of all its files

    @property
    def state(self) -> RunState:
        return self.manifest.state


def newest_intact(run_dir: Path, world: World, set_aside_damaged: bool = True) -> Verified | None:
    """Find the newest intact checkpoint; None if the run has none. Collective.

    Each rank verifies some of the files. A damaged checkpoint is set aside with a warning, and the one before it is tried.
    Raises UserError: there are checkpoints, but none is intact; or the newest is of another version, or cannot be read now.
    ``set_aside_damaged``: the caller must hold the run's lock then; False: the folder is only read.
    """
    # As rank 0 sees them: network disks may lag elsewhere.
    steps = world.from_main(saved_steps(run_dir) if world.is_main else [])
    damaged: dict[int, str] = {}
    for step in reversed(steps):
        verified, problems = _examine(step_folder(run_dir, step), world)
        if not problems:
            if world.is_main:
                for passed_over, sentence in damaged.items():
                    done = "it would be set aside"
                    if set_aside_damaged:
                        done = f"it is now {set_aside(step_folder(run_dir, passed_over)).name}"
                    _log.warning(f"{sentence}: {done}, the run resumes from step {step}")
            world.barrier()
            return verified
        damaged[step] = "; ".join(problems)
    if damaged:
        problem = f"{damaged[steps[-1]]}; none of the {len(steps)} checkpoints in {run_dir} is intact"
        raise UserError(problem, "restore the files, or choose another output_dir")
    return None


def _examine(folder: Path, world: World) -> tuple[Verified | None, list[str]]:
    """The checkpoint, with the same manifest on every rank, and the defects that any rank found. Collective. Raises UserError:
    on every rank: another version wrote it, or a file cannot be read now, which need not mean damage."""

    def read_manifest() -> list[str | None]:
        try:
            return [CheckpointManifest.read(folder).to_text(), None]
        except OtherFormat:
            raise
        except UserError as error:
            return [None, error.problem]
        except OSError as error:
            raise _unreadable(error) from None

    text, problem = world.from_main(do_in_main(read_manifest, world))
    if problem:
        return None, [problem]
    manifest = CheckpointManifest.parse(text, str(folder / MANIFEST))
    deadline = time.monotonic() + _LAG_SECONDS
    while not folder.is_dir() and time.monotonic() < deadline:
        time.sleep(0.1)
    mine = manifest.files[world.rank :: world.size]

    def read_mine() -> tuple[list[str], list[Entry]]:
        try:
            if damage := find_damage(folder, mine):  # a damaged file's header cannot be trusted
                return damage, []
            return find_not_finite(folder, mine), read_headers(folder, mine)
        except SafetensorError as error:
            return [f"{folder} has a file that is not a safetensors file ({error})"], []
        except OSError as error:
            raise _unreadable(error) from None

    found = world.gather(do_on_all(read_mine, world))
    if problems := {sentence for sentences, _ in found for sentence in sentences}:
        return None, sorted(problems)
    entries = [Entry(*fields) for _, rows in found for fields in rows]
    gaps = world.from_main(find_gaps(folder, manifest, entries)[:_NAMED] if world.is_main else [])
    return Verified(folder, manifest, entries), gaps


def _unreadable(error: OSError) -> UserError:
    problem = f"{error.filename or 'a checkpoint'} cannot be read on {node_name()} ({error.strerror})"
    return UserError(problem, "check its file system, then give the same command again")


@torch.no_grad()
def load(engine: Engine, verified: Verified, ema: WeightAverage | None, world: World) -> None:
    """Load a checkpoint into a new engine of the same model and optimizer, at any ZeRO stage and world size. Collective.

    Averaged weights and buffers are initialized from the weights and buffers if the checkpoint has none. Raises UserError: on
    every rank: the checkpoint is of another model or optimizer, or can no longer be read."""
    if verified.manifest.optimizer_state:
        create_state(engine)

    def read() -> None:
        try:
            _read(engine, SliceReader(verified.folder, verified.entries), ema)
        except (KeyError, RuntimeError) as error:  # a slice or buffer that is missing, or of another shape
            problem = f"{verified.folder} is of another model or optimizer ({error.args[0]})"
            raise UserError(problem, "choose another output_dir") from None
        except (SafetensorError, OSError) as error:
            raise UserError(f"{verified.folder} can no longer be read ({error})", "check its file system") from None

    do_on_all(read, world)
    engine.empty_partition_cache()


def _read(engine: Engine, reader: SliceReader, ema: WeightAverage | None) -> None:
    averaged = EMA in reader.quantities
    for held in rank_slices(engine, ema):
        quantity = WEIGHT if held.quantity == EMA and not averaged else held.quantity
        held.values.copy_(reader.read(quantity, held.name, held.start, len(held.values)))
    read_scalars(engine, lambda quantity, name: reader.read(quantity, name, 0, 1))
    for name, buffer in saved_buffers(engine.module).items():
        buffer.copy_(reader.read_buffer(name))
    if ema:
        for name, buffer in ema.models_buffers().items():
            average = ema.buffers[name]
            average.copy_(reader.read(EMA_BUFFER, name, 0, average.numel()).view_as(average) if averaged else buffer)
