"""Run ``pipeline.doctor`` on a node with another clock (PERVIT_CLOCK, seconds), a mount of its own (PERVIT_MOUNT, words of mount), a
disk that takes seconds for a read (PERVIT_READ) or is "stalled", or a process that stops when it is examined (PERVIT_STOP)."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from typing import Any

from pipeline import doctor

_NEW_MOUNTS = 0x20000  # CLONE_NEWNS


def main() -> int:
    if mount := os.environ.get("PERVIT_MOUNT"):
        assert ctypes.CDLL(None).unshare(_NEW_MOUNTS) == 0
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        subprocess.run(["mount", *mount.split()], check=True)
    from pipeline.health import checks, nodes

    checks.clock = lambda: time.time() + float(os.environ.get("PERVIT_CLOCK") or 0)
    if slow := os.environ.get("PERVIT_READ"):
        pread, never = os.pread, os.pipe()[0]

        def slow_read(*arguments: int) -> bytes:
            os.read(never, 1) if slow == "stalled" else time.sleep(float(slow))
            return pread(*arguments)

        os.pread = slow_read
    if os.environ.get("PERVIT_STOP"):

        def stop(*_: Any) -> Any:
            os.kill(os.getpid(), signal.SIGSTOP)

        nodes.examine_rank = stop
    return doctor.main()


if __name__ == "__main__":
    raise SystemExit(main())
