"""A disk whose power can be cut: an ext4 file system in a file, which is shut down as it is.

What no ``fsync`` has made durable is then lost, and the journal is replayed at the next mount, as after a power failure. For root, where
loop devices can be mounted.
"""

from __future__ import annotations

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
        self.folder = folder
        with open(image, "wb") as file:
            file.truncate(mib << 20)
        folder.mkdir(parents=True, exist_ok=True)
        self._run("mkfs.ext4", "-q", "-F", image)
        # Held until the end: `mount -o loop` would take up the device that a `umount` before it is about to give back, whose reads fail then.
        self._device = self._run("losetup", "--find", "--show", image).strip()
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
        self._run("umount", self.folder)
        self._mount()

    def close(self) -> None:
        self._run("umount", self.folder)
        self._run("losetup", "--detach", self._device)

    def _mount(self) -> None:
        try:
            self._run("mount", self._device, self.folder)
        except OSError:
            self._run("losetup", "--detach", self._device)
            raise

    def _run(self, *words: object) -> str:
        done = subprocess.run([str(word) for word in words], capture_output=True, text=True)
        if done.returncode:
            raise OSError(f"{words[0]}: {done.stderr.strip()}")
        return done.stdout
