"""Keep two processes from writing the same place of a store: an object that names its owner, who rewrites it every few seconds.

Every write has the condition that nobody has written since, so of two that take it at once one loses. Nobody's clock is compared with
another's: who wants the place watches whether the object changes. An owner that could not reach the store for so long that another
took the place learns it by its next write, and stops.
"""

import json
import logging
import secrets
import threading
import time
from concurrent.futures import wait
from contextlib import suppress
from typing import Any

from pipeline.errors import UserError
from pipeline.stores.client import Version
from pipeline.stores.place import RemotePath
from pipeline.stores.store import Store, StoreFails

_log = logging.getLogger(__name__)
BEAT = 10.0  # seconds between two writes of the owner
STALE = 40.0  # seconds without one after which the owner counts as dead
_POLL = 1.0  # seconds between two looks of who waits
_RELEASED = b"null\n"


class LockLost(UserError):
    """Another process has taken the place meanwhile."""


class StoreLock:
    """The right to write a place, from :meth:`take` to :meth:`release`.

    Args:
        name: of the object, in the place.
        record: what it says of the owner, for people: ``pid``, ``host``, ``since``.
        machine: who has the same cannot live at the same time as this process: nobody waits for a former one.
    """

    def __init__(self, place: RemotePath, name: str, record: dict[str, Any], machine: str) -> None:
        self._place, self._name, self._store = place, name, Store(place, probe="")
        self._record = {**record, "machine": machine, "token": secrets.token_hex(8)}
        self._version, self._mutex, self._over = Version(), threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._beat, name="store-lock", daemon=True)

    def take(self) -> None:
        """Take the place, after a while if its owner has to show whether it lives. Raises UserError: it does."""
        seen, since = None, time.monotonic()
        while True:
            owner, version = self._look()
            stale = version == seen and time.monotonic() - since > STALE
            if stale or owner.get("machine") in (None, self._record["machine"]):
                with suppress(FileExistsError):  # somebody was faster, or the answer to our own write was lost
                    self._write(version)
                    self._thread.start()
                    return
            elif seen is None:
                seen = version
                _log.info(f"note: {self._place} was written by {_named(owner)}: waiting to see whether it lives")
            elif version != seen:
                problem = f"{self._place} is being trained by {_named(owner)}, and a place can have only one run at a time"
                raise UserError(problem, "wait for it, stop it, or choose another output_dir")
            time.sleep(_POLL)

    def renew(self) -> None:
        """Write that the owner lives. Raises LockLost: it is another one now."""
        with self._mutex:
            try:
                self._write(self._version)
            except FileExistsError:
                owner, version = self._look()
                if owner.get("token") != self._record["token"]:
                    problem = f"{self._place} was taken over by {_named(owner)}, as this run could not reach it for {STALE:g} s"
                    raise LockLost(problem, "see which of the two is to go on, and stop the other") from None
                self._version = version  # it was this process, whose answer was lost
            except StoreFails:
                self._store = Store(self._place, probe="")  # the next try reads credentials anew
                raise

    def release(self) -> None:
        """Let the next one have the place, if the store can be reached within some seconds."""
        self._over.set()
        self._thread.join(BEAT)
        if not self._thread.is_alive():
            wait([self._store.threads.submit(lambda: self._store.put(self._name, _RELEASED, replaces=self._version))], BEAT)

    def _look(self) -> tuple[dict[str, Any], Version]:
        """What the object says, nothing if there is none, and its state."""
        try:
            found = self._store.fetch(self._name)
            told = json.loads(bytes(found.data))
        except FileNotFoundError:
            return {}, Version()
        except ValueError:
            told = None
        return (told if isinstance(told, dict) else {}), found.version

    def _write(self, replaces: Version) -> None:
        text = json.dumps({**self._record, "beat": round(time.time(), 3)}) + "\n"
        self._version = self._store.put(self._name, text.encode(), replaces=replaces)

    def _beat(self) -> None:
        while not self._over.wait(BEAT):
            with suppress(OSError, UserError):  # who writes next learns it
                self.renew()


def _named(owner: dict[str, Any]) -> str:
    return f"process {owner.get('pid')} on {owner.get('host')} (since {owner.get('since')})"
