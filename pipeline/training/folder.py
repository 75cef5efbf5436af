"""Check that a start may write into a run folder: one process at a time, the same config, the same data set.

A difference is refused with an error that names it. ``checkpoint.accept`` lists keys, or sections, that may change on purpose;
``data`` in it means another data set.

``RUN/.lock`` has a POSIX lock (:func:`pipeline.files.lock_bytes`), so a crash leaves no lock behind, a child process inherits none,
and the holder opens it only once. Its contents name the holder, for people.
"""

import errno
import hashlib
import json
import logging
import os
import re
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipeline.checkpoint.bucket import RunStore
from pipeline.checkpoint.folder import sweep
from pipeline.checkpoint.mirror import Mirror
from pipeline.cluster.agreement import do_in_main, do_on_all
from pipeline.cluster.environment import job_name
from pipeline.cluster.world import World
from pipeline.config import AUTO, Config, flatten, is_free
from pipeline.config.problems import nearest_keys
from pipeline.errors import UserError
from pipeline.files import disk_reason, lock_bytes, nearest_existing, write_error
from pipeline.runs import ENVIRONMENT, LOCK
from pipeline.runs.files import Holder, read_holder
from pipeline.stores.lock import StoreLock
from pipeline.stores.place import RemotePath, parse_place

_log = logging.getLogger(__name__)

_DYING_SECONDS = 120.0  # for the previous start of a requeued job to end; NFS frees a dead node's locks after about 90
_POLL_SECONDS = 0.5  # between attempts to lock: the holder may be on another node, and nothing signals its end
Changes = dict[str, tuple[Any, Any]]  # key -> (before, now)
_held_here: set[Path] = set()  # POSIX grants the same process a second lock, whose release would release the first
# A checkpoint does not fit other shapes, nor its moments another optimizer; another global batch size would skip or repeat samples
# of the stream.
_OF_MODEL = ("model.name", "model.image_size", "model.num_classes", "model.switches", "model.options")
_NEVER = (*_OF_MODEL, "train.freeze", "optim.name", "train.global_batch_size")
_DATA = "data"  # in checkpoint.accept: another data set. Keys of the section `data` are accepted one by one.
_NAMED = 5  # differences listed in a message
_DIGITS = 12  # of a digest in a message, as in `inspect`


def open_run_folder(folder: Path, world: World) -> "RunLock | None":
    """Create and lock the run folder: the lock on rank 0, to be held while the run writes; None elsewhere. A requeued Slurm job
    waits for processes of its previous start to end. Collective. Raises the UserError of :meth:`RunLock.take` on every rank."""
    restarted = os.environ.get("SLURM_RESTART_COUNT", "0") != "0"
    return do_in_main(lambda: RunLock.take(folder, wait_seconds=_DYING_SECONDS if restarted else 0), world)


class RunLock:
    """The lock on a run folder: acquired by :meth:`take`, held until :meth:`release` or the end of the process."""

    def __init__(self, path: Path, descriptor: int, created: bool, holder: Holder) -> None:
        self._path, self._descriptor, self._created, self.holder = path, descriptor, created, holder
        _held_here.add(path.resolve())

    @classmethod
    def take(cls, run_dir: Path, wait_seconds: float = 0) -> "RunLock":
        """Lock a run folder, which is created if it does not exist; wait ``wait_seconds`` for another holder to end, and log it
        once. Raises UserError: another process holds it, the folder cannot be created or written, or its file system has no
        locks."""
        path, started = run_dir / LOCK, time.strftime("%Y-%m-%d %H:%M:%S")
        this_process = Holder(os.getpid(), socket.gethostname(), job_name(os.environ), started)
        if path.resolve() in _held_here:
            raise _is_held(run_dir, this_process)
        created = not run_dir.exists()
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise _not_writable(run_dir, error) from None
        try:
            _wait_for_lock(descriptor, run_dir, wait_seconds)
            if os.fstat(descriptor).st_nlink == 0:  # a lock on a removed file excludes nobody
                raise UserError(f"{run_dir} was removed by another start, which was refused", "start again")
            _write(descriptor, this_process.record())
        except BaseException as error:
            os.close(descriptor)
            if isinstance(error, OSError):
                raise write_error(path, error) from None
            raise
        return cls(path, descriptor, created, this_process)

    def identity(self) -> str:
        """The same for two starts that cannot live at the same time: of this machine since it was booted, with this lock file."""
        about, booted = os.fstat(self._descriptor), Path("/proc/sys/kernel/random/boot_id")
        return f"{booted.read_text().strip()} {about.st_dev} {about.st_ino}"

    def release(self) -> None:
        """Let the next run have the folder."""
        if self._path.resolve() in _held_here:
            _held_here.discard(self._path.resolve())
            with suppress(OSError):
                _write(self._descriptor, "")  # a released lock names no holder
            os.close(self._descriptor)

    def abandon(self) -> None:
        """After a refused start: remove the folder if this start created it and nothing else is in it; else keep the lock."""
        with suppress(OSError):
            if self._created and os.listdir(self._path.parent) == [LOCK]:
                self._path.unlink()
                self.release()
                self._path.parent.rmdir()


def open_mirror(config: Config, world: World, lock: RunLock | None) -> Mirror | None:
    """Lock the store of a run and bring it and the folder together; None if the run has none. Collective.

    Several nodes share the folder, or each has its own. Then none has a whole checkpoint but that which every node fetches here: the parts that
    it writes are removed once the store has them. Rank 0 holds ``lock`` on the folder. Raises UserError on every rank: another
    process writes there, it fails, or store and folder are of two runs.
    """
    if not isinstance(place := parse_place(config.output_dir), RemotePath):
        return None
    folder, store = config.folder, RunStore(place)
    taken = StoreLock(place, LOCK, json.loads(lock.holder.record()), lock.identity()) if lock else None

    def take() -> None:
        assert taken
        taken.take()
        store.bring_together(folder, ENVIRONMENT)

    do_in_main(take, world)
    record = world.from_main(lock.holder.record() if lock else None)
    shared = lock is not None or (folder / LOCK).is_file() and (folder / LOCK).read_text() == record
    places = world.gather([shared, socket.gethostname(), str(folder.resolve())])
    leads = lock is not None or not shared and places.index(places[world.rank]) == world.rank

    def fetch() -> None:
        sweep(folder)
        if newest := store.newest(store.store.objects()):
            store.fetch_checkpoint(newest, folder)

    # By the first rank of each node with a folder of its own.
    do_on_all(lambda: fetch() if leads and not lock else None, world)
    return Mirror(folder, store, taken, leads, apart=not all(shared for shared, *_ in places))


def check_lock(run_dir: Path) -> None:
    """Raise what :meth:`RunLock.take` would, as far as that can be seen. Nothing is created or changed."""
    path = run_dir / LOCK
    try:
        if not path.exists():
            nearest = nearest_existing(run_dir)
            if nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK):
                return
            refusal = errno.EACCES if nearest.is_dir() else errno.ENOTDIR
            raise OSError(refusal, os.strerror(refusal))
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise _not_writable(run_dir, error) from None
    holder = read_holder(descriptor)
    os.close(descriptor)
    if holder and holder.alive:
        raise _is_held(run_dir, holder)


def _wait_for_lock(descriptor: int, run_dir: Path, wait_seconds: float) -> None:
    until, waiting = time.monotonic() + wait_seconds, False
    while not lock_bytes(descriptor, run_dir / LOCK):
        holder = read_holder(descriptor) or Holder()
        if time.monotonic() >= until:
            raise _is_held(run_dir, holder)
        if not waiting:
            _log.info(f"note: {run_dir} is still held by {holder}: waiting up to {wait_seconds:g} s for its end.")
            waiting = True
        time.sleep(_POLL_SECONDS)


def _not_writable(run_dir: Path, error: OSError) -> UserError:
    reason = disk_reason(run_dir / LOCK, error)
    return UserError(f"output_dir {run_dir} must be a writable folder ({reason})", "choose another output_dir")


def _is_held(run_dir: Path, holder: Holder) -> UserError:
    problem = f"{run_dir} is being trained by {holder}, and a folder can have only one run at a time"
    return UserError(problem, "wait for it, stop it, or choose another output_dir")


def _write(descriptor: int, text: str) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, text.encode(), 0)
    os.fsync(descriptor)  # other nodes may read it


def check_same_run(config: Config, begun_with: Config | None, world: World) -> None:
    """Check that a config may continue a run that was ``begun_with`` another; None: a new run. Rank 0 logs the accepted
    changes. Raises UserError, the same on every rank: a key differs that must not, or ``checkpoint.accept`` names an unknown
    key."""
    accept, now = config.checkpoint.accept, flatten(config)
    for name in accept:
        if name not in now and not any(key.startswith(f"{name}.") for key in now):
            close = nearest_keys(name)
            remedy = f"did you mean {close[0]!r}?" if close else "remove it; `pervit config` lists the keys."
            raise UserError(f"checkpoint.accept must list keys, sections or `{_DATA}`, got {name!r}: {remedy}")
    if begun_with is None:
        return
    accepted, refused = changes(config, begun_with)
    if refused:
        raise _refusal(config.output_dir, refused)
    if accepted and world.is_main:
        changed = ", ".join(f"{key} from {old} to {new}" for key, (old, new) in accepted.items())
        _log.info(f"note: this run changes {changed}, which checkpoint.accept allows.")


def changes(config: Config, begun_with: Config) -> tuple[Changes, Changes]:
    """What a config changes of the one that its run was begun with, beside what any start may: what ``checkpoint.accept`` allows, and what not."""
    before, now, accept = flatten(begun_with), flatten(config), config.checkpoint.accept
    if now["train.precision"] == AUTO:  # auto keeps the precision of the run
        now["train.precision"] = before["train.precision"]
    sections = [name for name in accept if name != _DATA]
    found: tuple[Changes, Changes] = ({}, {})
    for key in now:
        if not is_free(key) and before.get(key) != now[key]:
            allowed = key not in _NEVER and (key in accept or key.partition(".")[0] in sections)
            found[not allowed][key] = (before.get(key), now[key])
    return found


def check_same_data(config: Config, begun_with: dict[str, Any] | None, now: dict[str, Any], world: World) -> None:
    """Check that a run continues with its data set, by ``ShardSet.identity()`` of the newest checkpoint, if any, and of this
    start. Raises UserError, the same on every rank: it is another data set, and ``checkpoint.accept`` does not list
    ``data``."""
    if begun_with is None or begun_with == now:
        return
    keys = [key for key in sorted({*begun_with, *now}) if begun_with.get(key) != now.get(key)]
    differences = ", ".join(f"{key}={_short(begun_with.get(key))} (got {_short(now.get(key))})" for key in keys)
    if _DATA not in config.checkpoint.accept:
        problem = f"{config.output_dir} was started with another data set than {config.data.path}, one with {differences}"
        remedy = f"set data.path back, choose another output_dir, or accept the change with checkpoint.accept=[{_DATA}]"
        raise UserError(problem, remedy)
    if world.is_main:
        _log.info(f"note: this run was started with a data set with {differences}, which checkpoint.accept allows.")


def config_hash(config: Config) -> str:
    """SHA-256, hexadecimal, of the keys that determine the weights: equal for two starts of one run."""
    decisive = {key: value for key, value in flatten(config).items() if not is_free(key)}
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()


def _short(value: Any) -> Any:
    """Shorten digests: the first digits tell two of them apart."""
    return value[:_DIGITS] if isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) else value


def _refusal(run_dir: str, changes: Changes) -> UserError:
    """For keys whose values differ from the run's, as key -> (before, now)."""
    named, never = dict(list(changes.items())[:_NAMED]), [key for key in changes if key in _NEVER]
    begun = "; ".join(f"with {key}={old}, got {new}" for key, (old, new) in named.items())
    keys, more = ",".join(named), len(changes) - len(named)
    if more:
        begun, keys = f"{begun}; and {more} more keys differ", f"{keys},..."
    back, change = ("set it back", "change") if len(changes) == 1 else ("set them back", "changes")
    if never:
        reason = f"no run can continue with another {' or '.join(never)}, so that cannot be accepted"
        return UserError(f"{run_dir} was started {begun}", f"{back}, or choose another output_dir ({reason})")
    accept = f"accept the {change} with checkpoint.accept=[{keys}]"
    return UserError(f"{run_dir} was started {begun}", f"{back}, choose another output_dir, or {accept}")
