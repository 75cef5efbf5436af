"""Choose the folder where ``torch.compile`` keeps what it has compiled, so that a requeued run need not compile again.

The cache holds code that a later start runs. It is therefore not in the run folder, from which nothing is ever run, but in the
user's own cache folder. Each rank of each run has a folder to itself: no two processes write to one, whatever the file system
makes of locks, and the run's lock keeps a second start of the same run away.
"""

from __future__ import annotations

import atexit
import fcntl
import hashlib
import os
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

# Read by Inductor and by Triton. Whoever sets them has chosen a place, which is left alone.
INDUCTOR, TRITON = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"
_NAME_DIGITS = 16  # of a SHA-256: runs of one user do not share a folder by chance


def open_compile_cache(run_folder: Path, rank: int) -> Path:
    """Point the compilers at this rank's folder, or at a temporary one where the user's cache folder cannot hold it.

    Returns:
        The folder.
    """
    if chosen := _chosen(INDUCTOR):
        return Path(chosen)
    folder = cache_folder(run_folder, rank)
    if folder is None or not _is_usable(folder):
        folder = Path(tempfile.mkdtemp(prefix="pervit-compile-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ[INDUCTOR] = str(folder)
    if not _chosen(TRITON):
        os.environ[TRITON] = str(folder / "triton")
    return folder


def drop_compile_cache(run_folder: Path, rank: int) -> None:
    """Remove this rank's folder: the run is complete."""
    folder = cache_folder(run_folder, rank)
    if folder is not None and os.environ.get(INDUCTOR) == str(folder):
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):  # of other ranks, or gone
            folder.parent.rmdir()


def cache_folder(run_folder: Path, rank: int) -> Path | None:
    """``$XDG_CACHE_HOME/pervit/compile/RUN/rank-00000``, by default below ``~/.cache``; None without a home directory.

    RUN is a hash of the run folder's path.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        cache = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    except RuntimeError:
        return None
    run = hashlib.sha256(os.fsencode(run_folder.resolve())).hexdigest()[:_NAME_DIGITS]
    return cache / "pervit" / "compile" / run / f"rank-{rank:05d}"


def _chosen(variable: str) -> str:
    """The variable's value, unless PyTorch has set it to its own default, which lies in /tmp: it does so when it is imported."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    value = os.environ.get(variable, "")
    return "" if Path(value).is_relative_to(default_cache_dir()) else value


def _is_usable(folder: Path) -> bool:
    """Create the folder; whether it can be written and locked, is this user's, and nobody else may write to it."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = folder.stat()
        if about.st_uid != os.geteuid() or about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return False
        with open(folder / "lock", "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # as Inductor does; some network file systems cannot
    except OSError:
        return False
    return True
