"""A file server that can be stopped: ``python stalling.py FOLDER`` mounts a folder, read only, over itself, with FUSE.

SIGUSR1, and every read of a tar waits until SIGCONT, as for a server of NFS that does not answer. It stops between two requests: a
process that waits for one which the server has taken cannot even be killed. Prints "mounted" once it is.
Speaks the kernel's own protocol (include/uapi/linux/fuse.h, version 7.31): no library of FUSE is needed, only root.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
import signal
import stat
import struct
import sys

_LOOKUP, _FORGET, _GETATTR, _OPEN, _READ, _STATFS, _RELEASE = 1, 2, 3, 14, 15, 17, 18
_INIT, _OPENDIR, _READDIR, _RELEASEDIR, _INTERRUPT, _FORGET_MANY = 26, 27, 28, 29, 36, 42
_HEADER = struct.Struct("=IIQQIIII")  # length, operation, number, node, uid, gid, pid, padding
_DIRECT = 1  # the page cache keeps nothing of what is read
_READ_ONLY, _LARGEST, _ROOT, _VALID = 1, 1 << 17, 1, 1


class Server:
    """Answers the kernel's requests about one folder."""

    def __init__(self, folder: int) -> None:
        self._folder = folder  # a descriptor: its path leads to the mount
        self._paths = {_ROOT: "."}
        self._numbers = {".": _ROOT}

    def answer(self, operation: int, node: int, body: bytes) -> bytes:
        """The answer to one request. Raises OSError: the one to report."""
        path = self._paths.get(node, ".")
        if operation == _INIT:
            return struct.pack("=IIIIHHIIHHI28x", 7, 31, _LARGEST, 0, 16, 12, _LARGEST, 1, 32, 0, 0)
        if operation == _LOOKUP:
            found = os.path.normpath(os.path.join(path, body.rstrip(b"\0").decode()))
            attributes = self._attributes(found)
            return struct.pack("=QQQQII", self._numbers[found], 0, _VALID, _VALID, 0, 0) + attributes
        if operation == _GETATTR:
            return struct.pack("=QII", _VALID, 0, 0) + self._attributes(path)
        if operation in (_OPEN, _OPENDIR):
            return struct.pack("=QII", os.open(path, os.O_RDONLY, dir_fd=self._folder), _DIRECT * path.endswith(".tar"), 0)
        if operation in (_READ, _READDIR):
            handle, offset, size = struct.unpack_from("=QQI", body)
            return os.pread(handle, size, offset) if operation == _READ else self._names(path, handle, offset, size)
        if operation in (_RELEASE, _RELEASEDIR):
            os.close(struct.unpack_from("=Q", body)[0])
            return b""
        if operation == _STATFS:
            return bytes(80)
        raise OSError(
            errno.ENOSYS, "unknown"
        )  # to a flush too: none is asked for again, so that a process can end while this one is stopped

    def _attributes(self, path: str) -> bytes:
        found = os.stat(path, dir_fd=self._folder)
        number = self._numbers.setdefault(path, len(self._numbers) + 1)
        self._paths[number] = path
        times = [int(found.st_atime), int(found.st_mtime), int(found.st_ctime)]
        owner = [found.st_mode, found.st_nlink, found.st_uid, found.st_gid, 0, 4096, 0]
        return struct.pack("=6Q3I7I", number, found.st_size, found.st_blocks, *times, 0, 0, 0, *owner)

    def _names(self, path: str, handle: int, offset: int, size: int) -> bytes:
        text = b""
        for place, entry in enumerate(sorted(os.scandir(handle), key=lambda entry: entry.name)[offset:], offset + 1):
            name = entry.name.encode()
            kind = stat.S_IFMT(entry.stat().st_mode) >> 12
            row = struct.pack("=QQII", place, place, len(name), kind) + name + bytes(-len(name) % 8)
            if len(text) + len(row) > size:
                break
            text += row
        return text


def main(folder: str) -> None:
    server, device = Server(os.open(folder, os.O_RDONLY)), os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"stalling", os.fsencode(folder), b"fuse", _READ_ONLY, options):
        sys.exit(f"cannot mount: {os.strerror(ctypes.get_errno())}")
    stops: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, frame: stops.append(number))
    print("mounted", flush=True)
    while True:
        select.select([device], [], [])
        if stops:
            stops.clear()
            os.kill(os.getpid(), signal.SIGSTOP)
        try:
            request = os.read(device, _LARGEST + 4096)
        except OSError as error:
            if error.errno == errno.ENODEV:  # unmounted
                return
            continue
        _, operation, number, node, *_ = _HEADER.unpack_from(request)
        if operation in (_FORGET, _FORGET_MANY, _INTERRUPT):
            continue
        try:
            code, text = 0, server.answer(operation, node, request[_HEADER.size :])
        except OSError as error:
            code, text = -error.errno, b""
        os.write(device, struct.pack("=IiQ", 16 + len(text), code, number) + text)


if __name__ == "__main__":
    main(sys.argv[1])
