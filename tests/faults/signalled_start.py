"""A training that gets a signal within its start: ``MODULE.FUNCTION RANK`` and the training's own arguments.

The rank sends itself SIGTERM as it calls that function of the training, which then goes on: the moment is the same on any machine.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys

from pipeline import train


def main() -> int:
    place, rank = sys.argv[1:3]
    del sys.argv[1:3]
    if os.environ["RANK"] == rank:
        _signal_at(*place.rsplit(".", 1))
    return train.main()


def _signal_at(module: str, name: str) -> None:
    owner = importlib.import_module(module)
    function = getattr(owner, name)

    def signalled(*arguments, **words):
        os.kill(os.getpid(), signal.SIGTERM)
        return function(*arguments, **words)

    setattr(owner, name, signalled)
