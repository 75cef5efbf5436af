"""Send single requests to a store, without repetition, with obstore; sort what can go wrong into a few kinds.

obstore was chosen by measurement; docs/remote.md has the figures. Its own repetitions are off, because what is repeated here is
also counted, and waits for the whole process where a store asks for fewer requests.
"""

import enum
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import UserError, first_line, missing_extra
from pipeline.stores.opening import open_store
from pipeline.stores.place import RemotePath

_MARK = "sha256"  # metadata of an object
_THROTTLED = ("408", "429", "503")
_OTHER_STATE = ("AlreadyExistsError", "PreconditionError")  # obstore's exceptions for a condition that does not hold
# What stores answer, beside 401 and 403, to credentials that are no longer valid, and what obstore says where it finds none.
_NO_CREDENTIALS = re.compile(
    r"ExpiredToken|InvalidToken|TokenRefreshRequired|InvalidAccessKeyId|169\.254\.169\.254|metadata\.google\.internal|token request|"
    r"Account must be specified|[Cc]redential",
)
_NO_BUCKET = re.compile(r"NoSuchBucket|ContainerNotFound|bucket does not exist")  # in answers to requests for an object
NO_RANGES = "the server does not answer requests for a part of a file"


class Kind(enum.Enum):
    """Why a request failed; the value is what a count of them is called."""

    MISSING = "missing"
    NO_BUCKET = "no_bucket"
    DENIED = "denied"
    THROTTLED = "throttled"  # 503, 429
    CUT = "cut"  # an answer that ended early
    ERROR = "errors"  # anything else: no connection, a timeout, 500
    CHANGED = "changed"  # another object than before


class Failure(Exception):
    """A request that failed; the message is the reason, in a few words and without secrets."""

    def __init__(self, kind: Kind, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


@dataclass(frozen=True)
class Version:
    """One state of an object, for a write that must replace this state alone; by default, that there is none."""

    tag: str = ""  # the etag; empty if there is none
    number: str = ""  # of the version, where the store counts them


@dataclass(frozen=True)
class Answer:
    """Bytes of an object. ``size`` and ``version`` are those of the whole object: bytes, and etag if there is one."""

    data: memoryview
    size: int
    version: Version


class Client:
    """A store, in which names are relative to a place. Thread-safe. Raises UserError: obstore is not installed, or a setting in
    the environment is wrong."""

    def __init__(self, place: RemotePath) -> None:
        try:
            import obstore
        except ImportError:
            raise missing_extra(str(place), "obstore", "remote") from None
        self._obstore = obstore
        self.place = place
        self._conditions = True
        try:
            self._store = open_store(place)
        except UserError:
            raise
        except Exception as error:  # settings in the environment: obstore has several exceptions for them
            remedy = "correct the store's settings in the environment; the repository's docs/remote.md has them"
            raise UserError(f"{place} cannot be opened ({_first_line(error)})", remedy) from None

    def read(self, name: str, begin: int, size: int) -> Answer:
        """``size`` bytes of an object, at least one. Raises Failure: it cannot be had as a whole."""
        with _sorted_failures():
            found = self._obstore.get(self._store, name, options={"range": (begin, begin + size)})
            data = next(iter(found.stream(min_chunk_size=size + 1)), b"")  # the whole, or the beginning of what is too long
            answer = Answer(memoryview(data), found.meta["size"], _version(found.meta))
        expected = min(size, answer.size - begin)
        if len(answer.data) != expected:
            raise Failure(Kind.CUT, f"{len(answer.data)} of {expected} bytes were sent")
        return answer

    def put(self, name: str, data: bytes | Path, mark: str = "", replaces: Version | None = None) -> Version:
        """Write a whole object: it is there completely, or as it was before. Raises Failure: it was not written; of the kind
        ``CHANGED``, because it is in another state.

        Args:
            data: its content, or a file with it.
            mark: what :meth:`describe` returns of it.
            replaces: write only if the object is in this state; None: in any. A store that knows no such condition ignores it.
        """
        mode: Any = None
        if replaces is not None and self._conditions:
            state = {"e_tag": replaces.tag, "version": replaces.number}
            mode = {key: value for key, value in state.items() if value} or "create"
        try:
            with _sorted_failures(conditional=mode is not None):
                attributes = {_MARK: mark} if mark else None
                return _version(self._obstore.put(self._store, name, data, attributes=attributes, mode=mode))
        except _NoConditions:
            self._conditions = False
            return self.put(name, data, mark)

    def describe(self, name: str) -> tuple[int, str]:
        """Bytes of an object that has at least one, and its mark; empty if there is none. Raises Failure: it cannot be asked."""
        with _sorted_failures():
            found = self._obstore.get(self._store, name, options={"range": (0, 1)})
            return found.meta["size"], str(found.attributes.get(_MARK, ""))

    def delete(self, names: list[str]) -> None:
        """Remove objects; missing ones are not an error. Raises Failure: one is still there."""
        try:
            with _sorted_failures():
                self._obstore.delete(self._store, names)
        except Failure as failure:
            if failure.kind is not Kind.MISSING:
                raise
            for name in names if len(names) > 1 else []:  # Azure and Google stop at the first that is not there
                self.delete([name])

    def objects(self) -> dict[str, tuple[int, str]]:
        """Name -> bytes and etag of all objects of the place. Raises Failure: they cannot be listed, as those of a web server."""
        with _sorted_failures():
            found = [each for part in self._obstore.list(self._store) for each in part]
        return {each["path"]: (each["size"], each.get("e_tag") or "") for each in found}


class _NoConditions(Exception):
    """The store does not know conditions on writing."""


@contextmanager
def _sorted_failures(conditional: bool = False) -> Iterator[None]:
    """Turn obstore's exceptions into :class:`Failure`; ``conditional`` is of a request to write under a condition."""
    try:
        yield
    except Failure:
        raise
    except Exception as error:
        if conditional and "status code: 501" in str(error):
            raise _NoConditions from None
        if conditional and (type(error).__name__ in _OTHER_STATE or "status code: 409" in str(error)):
            raise Failure(Kind.CHANGED, "another process has written it meanwhile") from None
        raise Failure(*_sort(error)) from None


def _version(meta: Any) -> Version:
    return Version(meta.get("e_tag") or "", meta.get("version") or "")


def _sort(error: Exception) -> tuple[Kind, str]:
    text, name = str(error), type(error).__name__
    status = re.search(r"status code: (\d{3})", text)
    answer = f"the answer was {status[1]}" if status else _first_line(error)
    if "RequestTimeTooSkewed" in text:  # a 403, but the clock may be set right meanwhile
        return Kind.ERROR, "this machine's clock is not the store's"
    if name in ("PermissionDeniedError", "UnauthenticatedError"):
        return Kind.DENIED, answer
    if isinstance(error, FileNotFoundError):
        return (Kind.NO_BUCKET if _NO_BUCKET.search(text) else Kind.MISSING), "it does not exist"
    if _NO_CREDENTIALS.search(text):
        code = re.search(r"<Code>(\w+)</Code>", text)
        return Kind.DENIED, code[1] if code else "no credentials were found"
    if name == "NotSupportedError" or "non-partial response" in text:
        return Kind.ERROR, NO_RANGES
    if status and status[1] == "416":  # again and again
        return Kind.MISSING, "it ends before these bytes"
    if status and status[1] == "404":  # a list of a bucket that does not exist
        return Kind.NO_BUCKET, "it does not exist"
    if status:
        return (Kind.THROTTLED if status[1] in _THROTTLED else Kind.ERROR), answer
    if "response body error" in text or "kind: Interrupted" in text:
        return Kind.CUT, "the answer was cut off"
    for part, reason in (("kind: Timeout", "no answer in time"), ("kind: Connect", "no connection")):
        if part in text:
            return Kind.ERROR, reason
    return Kind.ERROR, answer


def _first_line(error: Exception) -> str:
    """An exception's first line without URLs, which may hold a signature."""
    return re.sub(r"\S*://\S*", "URL", first_line(error))[:200]
