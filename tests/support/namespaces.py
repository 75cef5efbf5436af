"""Enter namespaces of the kernel, as nsenter does; Python has no ``os.setns`` before 3.12."""

from __future__ import annotations

import ctypes
import os


def enter(namespaces: list[str]) -> None:
    """Take this thread into namespaces, each a file below /proc. Raises OSError: it may not."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptors = [os.open(path, os.O_RDONLY) for path in namespaces]  # first: another /proc may lie behind them
    for path, descriptor in zip(namespaces, descriptors):
        if libc.setns(descriptor, 0):
            raise OSError(ctypes.get_errno(), f"cannot enter {path}")
        os.close(descriptor)
