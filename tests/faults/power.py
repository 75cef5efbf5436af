"""A disk whose power can be cut: an ext4 file system in a file, which is shut down as it is.

What no ``fsync`` has made durable is then lost, and the journal is replayed at the next mount, as after a power failure. For root, where
loop devices can be mounted.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import subprocess
from pathlib import Path

from support.ranks import Job

_SHUT_DOWN = 0x8004587D  # EXT4_IOC_SHUTDOWN
_NOTHING_FLUSHED = 2  # EXT4_GOING_FLAGS_NOLOGFLUSH


class Disk:
    """Mounted on ``folder``, of ``mib`` MiB, kept in the file ``image``.

    Raises:
        OSError: such a file system cannot be made or mounted here.
    """

    def __init__(self, image: Path, folder: Path, mib: int = 768) -> None:
        self.folder, self._image = folder, image
        with open(image, "wb") as file:
            file.truncate(mib << 20)
        folder.mkdir(parents=True, exist_ok=True)
        self._run("mkfs.ext4", "-q", "-F", image)
        self._mount()

    def cut(self) -> None:
        """Lose all that is not durable; from now on access is an error."""
        descriptor = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.ioctl(descriptor, _SHUT_DOWN, struct.pack("I", _NOTHING_FLUSHED))
        finally:
            os.close(descriptor)

    def cut_under(self, job: Job) -> None:
        """Cut the power under a job, which ends with it, and mount what is left."""
        self.cut()
        job.kill()
        job.wait()
        self.restart()

    def restart(self) -> None:
        """Mount what the power failure has left. Nothing may have files open."""
        self.close()
        self._mount()

    def close(self) -> None:
        """Unmount it everywhere: a mount namespace that was made meanwhile, as a local Slurm cluster's node makes one, has a copy of the
        mount, and by that the next mount would find the file system as it is, shut down or read-only."""
        for process in self._elsewhere():
            subprocess.run(["nsenter", f"--mount={process / 'ns' / 'mnt'}", "umount", self.folder], capture_output=True)
        self._run("umount", self.folder)

    def _elsewhere(self) -> list[Path]:
        """A process of each other mount namespace that has it mounted, as its folder of /proc."""
        found = {}
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # has ended
                if f" {self.folder} " in (process / "mountinfo").read_text():
                    found[(process / "ns" / "mnt").stat().st_ino] = process
        found.pop(Path("/proc/self/ns/mnt").stat().st_ino, None)
        return list(found.values())

    def _mount(self) -> None:
        self._run("mount", "-o", "loop", self._image, self.folder)

    def _run(self, *words: object) -> None:
        done = subprocess.run([str(word) for word in words], capture_output=True, text=True)
        if done.returncode:
            raise OSError(f"{words[0]}: {done.stderr.strip()}")
