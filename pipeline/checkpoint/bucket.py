"""Keep a run in a store: what lies where, and in which order it is written, so that a checkpoint is complete or invisible there too.

::

    URL/config.yaml, metrics.jsonl, ...                            the files of the run folder
    URL/checkpoints/step-00000040/part-00000-CHECKSUM.safetensors  a part; two saves of one step do not touch each other's
    URL/checkpoints/step-00000040/checkpoint.json                  the manifest: written after all parts, removed before the first
    URL/.lock                                                      who writes it
"""

import errno
import json
import logging
import os
import re
import tempfile
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from pipeline.checkpoint import folder as folders
from pipeline.checkpoint.folder import FETCHED, FOLDER, LOCK, saved_steps, step_folder
from pipeline.checkpoint.manifest import MANIFEST, CheckpointManifest, FileRecord, OtherFormat, checksum, folder_name
from pipeline.errors import UserError
from pipeline.files import lock_bytes, make_private, replace_file, replace_text, sync_folder, user_cache
from pipeline.stores.place import RemotePath, check_bucket, is_remote
from pipeline.stores.store import Store, StoreFails

_log = logging.getLogger(__name__)
_PROBE = ".writable"
_TRIES = 3  # of a part that arrives damaged
Listing = Mapping[str, tuple[int, str]]  # name of an object -> bytes and etag


class RunStore:
    """A run in a store. All methods raise ``StoreFails`` where it cannot be read or written, ``OSError`` where one object cannot."""

    def __init__(self, place: RemotePath, named: str = "output_dir") -> None:
        check_bucket(place, named)
        self.place = place
        self.reopen()

    def reopen(self) -> None:
        """Forget that the store has failed, and read credentials anew."""
        self.store = Store(self.place, probe="")

    def check_access(self, write: bool) -> bool:
        """Check that this user may use the place; returns whether it has a checkpoint. Raises UserError: not so."""
        try:
            if write:
                self.store.put(_PROBE, b"\n")
                self.store.delete([_PROBE])
            return bool(steps_in(self.store.objects()))
        except StoreFails as error:
            remedy = "correct the name or the credentials; this user must be allowed to list, read, write and delete there"
            raise type(error)(f"output_dir {error.problem}", remedy) from None

    def manifest(self, step: int) -> CheckpointManifest:
        key = manifest_key(step)
        return CheckpointManifest.parse(bytes(self.store.fetch(key).data), str(self.place / key))

    def newest(self, listing: Listing) -> CheckpointManifest | None:
        """That of the newest complete checkpoint; None if there is none. Raises OtherFormat: another version wrote it."""
        for step in reversed(steps_in(listing)):
            try:
                found = self.manifest(step)
                if all(listing.get(part_key(step, part), (None,))[0] == part.bytes for part in found.files):
                    return found
                problem = f"{self.place / manifest_key(step)} names parts that are not there"
            except OtherFormat:
                raise
            except UserError as error:
                problem = error.problem
            _log.warning(f"{problem}: an older checkpoint is taken")
        return None

    def fetch_files(
        self, listing: Listing, run_dir: Path, known: Mapping[str, str] | None = None, more: Collection[str] = ()
    ) -> None:
        """Copy the files of a run that are no checkpoints, and ``more``; those whose etags are ``known`` only if they are missing."""
        for name, (size, etag) in listing.items():
            parts, path = name.split("/"), run_dir / name
            wanted = FOLDER not in parts[:-1] and not any(part in ("", "..") or part.startswith(".") for part in parts)
            if (wanted or name in more) and not ((known or {}).get(name) == etag and path.exists()):
                path.parent.mkdir(parents=True, exist_ok=True)
                with suppress(FileNotFoundError):  # removed since
                    replace_file(path, lambda file: self.store.download(name, file.fileno()) if size else None)  # noqa: B023

    def fetch_parts(self, manifest: CheckpointManifest, folder: Path) -> None:
        """Copy the parts of a checkpoint that a folder lacks. Raises UserError: one is damaged in the store."""
        for part in manifest.files:
            path, key, tries = folder / part.name, part_key(manifest.state.step, part), 0
            while not (path.is_file() and checksum(path) == part):
                if (tries := tries + 1) > _TRIES:
                    raise UserError(f"{self.place / key} is damaged, its checksum does not match", "take another checkpoint")
                replace_file(path, lambda file: self.store.download(key, file.fileno(), part.bytes))  # noqa: B023

    def fetch_checkpoint(self, manifest: CheckpointManifest, run_dir: Path) -> None:
        """Copy a checkpoint into a run folder, where it becomes visible when it is complete, and apply retention there."""
        hidden = run_dir / FOLDER / f"{folders.SAVING}{manifest.state.step:08d}-fetched"
        hidden.mkdir(parents=True, exist_ok=True)
        self.fetch_parts(manifest, hidden)
        replace_text(hidden / MANIFEST, manifest.to_text())
        sync_folder(hidden)
        folders.publish(hidden, step_folder(run_dir, manifest.state.step))
        folders.remove_old(run_dir, manifest.state)

    def put(self, name: str, data: bytes | Path, size: int, mark: str = "") -> None:
        """Write an object and ask the store what arrived: ``size`` bytes, or more of a file that grows. Raises OSError: less did."""
        self.store.put(name, data, mark)
        found = self.store.describe(name) if size else (0, mark)
        if found[0] < size or found[1] != mark:
            raise OSError(errno.EIO, "what arrived is not what was sent", str(self.place / name))

    def put_part(self, step: int, part: FileRecord, source: Path) -> None:
        """Copy a part of a checkpoint, unless it is there."""
        key = part_key(step, part)
        with suppress(FileNotFoundError):
            if self.store.describe(key) == (part.bytes, part.xxh3):
                return
        self.put(key, source, part.bytes, part.xxh3)

    def put_manifest(self, manifest: CheckpointManifest) -> None:
        """Make a checkpoint visible, whose parts are all there."""
        text = manifest.to_text().encode()
        self.put(manifest_key(manifest.state.step), text, len(text))

    def remove_old(self, newest: CheckpointManifest, busy: Collection[int] = ()) -> None:
        """Apply retention up to a checkpoint, manifests first, and remove parts of no checkpoint, but those of steps that are ``busy``."""
        listing, now = self.store.objects(), newest.state.step
        complete = [step for step in steps_in(listing) if step <= now]
        stay = {*folders.kept(complete, newest.state), *busy}
        self.store.delete([manifest_key(step) for step in complete if step not in stay])
        own = {manifest_key(now), *(part_key(now, part) for part in newest.files)}
        steps = {name: step for name in listing if (step := _step_in(name)) is not None and step <= now and name not in own}
        self.store.delete([name for name, step in steps.items() if step == now or step not in stay])

    def bring_together(self, run_dir: Path, starts: str) -> None:
        """Before a start: copy what the store has and the folder has not, or the other way round, by which has the newest checkpoint.

        ``starts`` is the file that begins with the time of the run's first start. Raises UserError: they are of two runs.
        """
        listing = self.store.objects()
        if starts in listing and (run_dir / starts).exists():
            texts = bytes(self.store.fetch(starts).data), (run_dir / starts).read_bytes()
            first = [found[0] for text in texts if (found := re.search(rb'"started": "[^"]*"', text))]
            if len({*first}) > 1:
                remedy = "move the folder away if the run in the store is to go on, or choose another output_dir"
                problem = f"{self.place} and the folder in which it is kept on this machine, {run_dir}, are of two runs"
                raise UserError(problem, remedy)
        there, steps = self.newest(listing), [n for n in saved_steps(run_dir) if folders.is_intact(step_folder(run_dir, n))]
        if steps and (not there or there.state.step <= steps[-1]):
            here = CheckpointManifest.read(step_folder(run_dir, steps[-1]))
            for step in folders.kept(steps, here.state):
                if step == steps[-1] or manifest_key(step) not in listing:
                    manifest = CheckpointManifest.read(step_folder(run_dir, step))
                    for part in manifest.files:
                        self.put_part(step, part, step_folder(run_dir, step) / part.name)
                    self.put_manifest(manifest)
            return self.remove_old(here)
        self.fetch_files(listing, run_dir)
        if there:
            _log.info(f"note: fetching the checkpoint of step {there.state.step} from {self.place}")
            self.fetch_checkpoint(there, run_dir)


def steps_in(listing: Iterable[str]) -> list[int]:
    """Steps of the checkpoints with a manifest, ascending."""
    return sorted(step for name in listing if (step := _step_in(name)) is not None and name == manifest_key(step))


def _step_in(name: str) -> int | None:
    parts = name.split("/")
    return folders.step_of(parts[1]) if len(parts) == 3 and parts[0] == FOLDER else None


def manifest_key(step: int) -> str:
    return f"{FOLDER}/{folder_name(step)}/{MANIFEST}"


def part_key(step: int, part: FileRecord) -> str:
    path = Path(part.name)
    return f"{FOLDER}/{folder_name(step)}/{path.stem}-{part.xxh3}{path.suffix}"


def find_source(source: str | os.PathLike[str], step: int | str | None = None) -> Path:
    """A command's path of a trained model, a copy where it is a run in a store; raises as ``check_source`` and :func:`fetched`."""
    path = fetched(source, step)
    folders.check_source(path, step)
    return path


def fetched(source: str | os.PathLike[str], step: int | str | None = None, weights: bool = True) -> Path:
    """A command's path of a run, or of one of its checkpoints. If it is in a store, a copy in the user's cache, brought up to
    date: the parts of the checkpoint of ``step``, as for ``find_step``, unless ``weights`` is False, and the manifests of all.
    Raises UserError: there is no such run or checkpoint, or the store cannot be read."""
    if not is_remote(source):
        return Path(source)
    place = RemotePath(os.fspath(source))
    base = (user_cache() or Path(tempfile.gettempdir(), f"pervit-{os.getuid()}")) / "runs" / place.scheme
    path = base / place.host / place.prefix
    run_dir, _ = folders.locate(path)
    run = RunStore(RemotePath(f"{place.scheme}://{run_dir.relative_to(base)}"), "a run")
    listing = run.store.objects()
    if not listing:
        raise UserError(f"{run.place} has no run: nothing is there", "pass the output_dir of a run")
    if not make_private(run_dir):
        raise UserError(f"{run_dir}, for a copy of {run.place}, must be this user's folder", "set XDG_CACHE_HOME to one")
    with open(run_dir / ".fetching", "wb") as file:
        lock_bytes(file.fileno(), Path(file.name), wait=True)  # other processes of an evaluation
        for gone in {*saved_steps(run_dir)} - {*steps_in(listing)}:
            folders.remove(step_folder(run_dir, gone))
        index = run_dir / FETCHED
        known = json.loads(index.read_text()) if index.exists() else {}
        run.fetch_files(listing, run_dir, known, more={LOCK, *map(manifest_key, steps_in(listing))})
        replace_text(index, json.dumps({name: etag for name, (_, etag) in listing.items()}))
        if weights:
            try:
                folder = step_folder(run_dir, folders.find_checkpoint(path, step)[1])
            except UserError as error:
                raise UserError(str(error).replace(str(run_dir), str(run.place))) from None
            run.fetch_parts(CheckpointManifest.read(folder), folder)
    return path
