"""Save checkpoints in the background: the training waits for a copy in memory only, and a checkpoint is published at once."""

import errno
import logging
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from pipeline.checkpoint.folder import FOLDER, SAVING, latest_step, publish, remove_old, step_folder
from pipeline.checkpoint.manifest import MANIFEST, CheckpointManifest, FileRecord, RunState
from pipeline.checkpoint.mirror import Mirror
from pipeline.checkpoint.parts import write_part
from pipeline.checkpoint.rank_slices import bytes_of_all, optimizer_state, saved_tensors
from pipeline.cluster.agreement import Agreed, Agreement
from pipeline.cluster.world import World
from pipeline.config import CheckpointConfig
from pipeline.errors import UserError
from pipeline.files import check_space, disk_reason, replace_text, sync_folder
from pipeline.optim.averages import WeightAverage
from pipeline.optim.engine import Engine

_log = logging.getLogger(__name__)
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0  # seconds between attempts, doubling: at most ~15 in the default retry_seconds
_ALIGNMENT = 16  # bytes per tensor start, a multiple of every element size: views need it
_LAST_ATTEMPT = 10.0  # seconds for a write in progress to end once another rank has failed, so that its folder can be removed


@dataclass
class _Saving:
    """A checkpoint in progress."""

    path: Path  # of this rank's file, in a folder that is hidden until it is published
    manifest: CheckpointManifest  # without files
    record: FileRecord | None = None  # of this rank's file
    done: bool = False  # that is on disk, or there is none


class Saver:
    """Saves the checkpoints of a run, and hands each to the ``mirror`` of its store, if it has one.

    Each rank copies its slices (:mod:`~pipeline.checkpoint.rank_slices`) to host memory, and a thread writes them to a file in a hidden
    folder. When the ranks agree that every file is on disk, rank 0 writes the manifest and renames the folder. A crash in between
    leaves a hidden folder, which the next start removes. A failed write is retried for ``config.retry_seconds``; then all ranks stop
    with the reason. What retention keeps, a checkpoint's own config says. ``waiting`` is called repeatedly while the training waits
    for a save, to report that it does not hang.
    """

    def __init__(
        self,
        run_dir: Path,
        world: World,
        config: CheckpointConfig,
        agreement: Agreement,
        waiting: Callable[[], None] = lambda: None,
        mirror: Mirror | None = None,
    ) -> None:
        self._run_dir, self._world, self._config, self._agreement = run_dir, world, config, agreement
        self._waiting, self._mirror = waiting, mirror
        # Ranks of an earlier start may live on for a while: their files must not end up in our hidden folder.
        self._token = world.from_main(uuid.uuid4().hex[:8])
        self._copies = HostCopies()
        self._saving: _Saving | None = None
        self._thread: threading.Thread | None = None
        self._publishing: threading.Thread | None = None
        self._error: str | None = None  # why this rank has given up writing
        self._given_up = threading.Event()  # another rank cannot write: retries are pointless
        self.started = 0  # saves so far
        self.stall_seconds = 0.0  # for which the last save blocked the training, with the wait for the one before it

    @property
    def written(self) -> int:
        """The number of saves that this rank has on disk."""
        return self.started - (self._saving is not None and not self._saving.done)

    @property
    def failed(self) -> bool:
        """Whether this rank has given up writing."""
        return self._error is not None

    def save(self, engine: Engine, ema: WeightAverage | None, state: RunState) -> None:
        """Start a save between two steps; an earlier one is completed first. Collective."""
        began = time.perf_counter()
        self.finish()
        folder = self._run_dir / FOLDER / f"{SAVING}{state.step:08d}-{self._token}"
        path, needed = folder / f"part-{self._world.rank:05d}.safetensors", bytes_of_all(engine, ema, self._world)
        tensors = self._copies.take(saved_tensors(engine, ema, self._world))  # the thread no longer reads the previous copies
        shapes = {name: list(getattr(p, "ds_shape", p.shape)) for name, p in engine.module.named_parameters()}
        manifest = CheckpointManifest(state, shapes, [], optimizer_state(engine))
        self._saving = saving = _Saving(path, manifest, done=not tensors)
        self.started += 1

        def write() -> None:
            if self._given_up.is_set():
                raise InterruptedError(errno.EINTR, "another rank cannot write its part")
            folder.mkdir(parents=True, exist_ok=True)
            check_space(folder, needed)  # a partial checkpoint would take the space that the log needs
            saving.record = write_part(path, tensors)
            saving.done = True

        if tensors:
            self._thread = self._start(path, write)
        self.stall_seconds = time.perf_counter() - began

    def settle(self, agreed: Agreed) -> None:
        """Publish a save that every rank has written. Call once per step. Collective. Raises UserError on every rank: one cannot
        write its part."""
        if agreed.save_failed:
            self._fail_on_all()
        if self._saving and agreed.written >= self.started:
            saving, self._saving = self._saving, None
            opened = os.open(saving.path, os.O_RDONLY) if self._mirror and saving.record else None  # before it is renamed
            records = self._world.gather(asdict(saving.record) if saving.record else None)
            manifest = replace(saving.manifest, files=[FileRecord(**fields) for fields in records if fields])
            if self._mirror:
                self._mirror.add(manifest, saving.record, saving.path, opened)
            if self._world.is_main and not (self._mirror and self._mirror.apart):
                self._publish(saving.path.parent, manifest)

    def finish(self) -> None:
        """Wait until the last save is published. Collective."""
        while self._saving:
            self.settle(self._agreement.exchange(save_failed=self.failed, written=self.written))
            self._wait()
        while self._agreement.ask(self._publishing is not None and self._publishing.is_alive()):
            self._wait()
        self._publishing = None
        if self._agreement.ask(self.failed):
            self._fail_on_all()

    def _fail_on_all(self) -> NoReturn:
        """Abandon the save on every rank, with the message of the first that could not write. Collective."""
        reason = self._error
        self._given_up.set()
        if self._thread:
            self._thread.join(_LAST_ATTEMPT)
        reasons = [text for text in self._world.gather(reason) if text]
        if self._saving and self._world.is_main:  # frees the space
            shutil.rmtree(self._saving.path.parent, ignore_errors=True)
        self._saving = self._error = None
        newest = latest_step(self._run_dir)
        resumes = f"resumes from its checkpoint of step {newest}" if newest else "starts again: it has no checkpoint yet"
        remedy = f"free some space or restore the folder, then give the same command again; the run {resumes}"
        raise UserError(reasons[0], remedy)

    def _wait(self) -> None:
        self._waiting()
        time.sleep(0.005)  # short against a save, and no load on the CPU

    def _publish(self, folder: Path, manifest: CheckpointManifest) -> None:
        """On rank 0: write the manifest, rename the folder, apply retention."""
        target = step_folder(self._run_dir, manifest.state.step)

        def rename() -> None:
            if folder.exists() or not target.exists():  # else an earlier attempt renamed it and failed later
                replace_text(folder / MANIFEST, manifest.to_text())
                sync_folder(folder)
                publish(folder, target)
            sync_folder(target.parent)

        self._publishing = self._start(target, rename, lambda: remove_old(self._run_dir, manifest.state))

    def _start(self, path: Path, *actions: Callable[[], None]) -> threading.Thread:
        """Start a thread that takes actions, by which a path is written."""

        def run() -> None:
            began = time.monotonic()
            try:
                for action in actions:
                    self._retry(action, path)
            except OSError as error:
                seconds = time.monotonic() - began
                self._error = f"{path} could not be written for {seconds:.0f} s ({disk_reason(path, error)})"
            except Exception as error:  # whatever it is, the other ranks must learn of it: they wait for this one
                self._error = f"{path} could not be written ({type(error).__name__}: {error})"

        thread = threading.Thread(target=run, name="checkpoint", daemon=True)
        thread.start()
        return thread

    def _retry(self, action: Callable[[], None], path: Path) -> None:
        """Repeat an action that fails with an ``OSError``, for ``retry_seconds``."""
        deadline, pause, warned = time.monotonic() + self._config.retry_seconds, _FIRST_PAUSE, False
        while True:
            try:
                return action()
            except OSError as error:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise
                if not warned:
                    warned = True
                    _log.warning(f"{path} cannot be written ({disk_reason(path, error)}); trying again for {left:.0f} s")
                if self._given_up.wait(min(pause, left)):
                    raise
                pause = min(2 * pause, _LONGEST_PAUSE)


class HostCopies:
    """Host copies of tensors in one allocation, which only the first snapshot pays for; a GPU copies asynchronously into pinned memory."""

    def __init__(self) -> None:
        self._copies: dict[str, Tensor] = {}

    def take(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Contiguous copies of tensors on the CPU or one GPU, with the same names; this overwrites the previous copies."""
        if _layout(tensors) != _layout(self._copies):
            self._copies.clear()  # frees their memory before the new allocation
            sizes = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors.values()]
            on_gpu = any(tensor.is_cuda for tensor in tensors.values())
            places = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=on_gpu).split(sizes) if sizes else ()
            for place, (name, tensor) in zip(places, tensors.items()):
                self._copies[name] = place[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for name, tensor in tensors.items():
            self._copies[name].copy_(tensor, non_blocking=True)
        for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()  # the copies' own; the device would include the loader's work ahead
        return self._copies


def _layout(tensors: dict[str, Tensor]) -> dict[str, tuple]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
