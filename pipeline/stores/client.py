"""Single requests to a store, without repetition: obstore's stores, with what can go wrong sorted into a few kinds.

obstore was chosen by measurement; docs/remote.md has the figures. Its own repetitions are off, because what is repeated here is
also counted, and waits for the whole process where a store asks for fewer requests.
"""

from __future__ import annotations

import enum
import netrc
import os
import re
from base64 import b64encode
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.errors import UserError
from pipeline.stores.place import RemotePath

if TYPE_CHECKING:
    from obstore.store import ObjectStore

EXTRA = "pip install 'pervit-pipeline[remote]'"
_CONNECT, _SILENT, _WHOLE = timedelta(seconds=10), timedelta(seconds=20), timedelta(seconds=120)  # of a request
_MARK = "sha256"  # metadata of an object
_THROTTLED = ("408", "429", "503")
# What stores answer with another status than 401 or 403 to credentials that are no longer valid, and what obstore says where it
# finds none.
_NO_CREDENTIALS = re.compile(
    r"ExpiredToken|InvalidToken|TokenRefreshRequired|InvalidAccessKeyId|169\.254\.169\.254|metadata\.google\.internal|token request|"
    r"Account must be specified|[Cc]redential",
)


class Kind(enum.Enum):
    """Why a request failed; the value is what a count of them is called."""

    MISSING = "missing"
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
class Answer:
    """Bytes of an object. ``size`` and ``tag`` are those of the whole object: bytes, and the etag if there is one."""

    data: memoryview
    size: int
    tag: str


class Client:
    """A store. Thread-safe.

    Args:
        place: what names are relative to.

    Raises:
        UserError: obstore is not installed, or a setting in the environment is wrong.
    """

    def __init__(self, place: RemotePath) -> None:
        try:
            import obstore
        except ImportError:
            raise UserError(f"{place} needs obstore, which is not installed", EXTRA) from None
        self._obstore = obstore
        self.place = place
        try:
            self._store = _open(place)
        except UserError:
            raise
        except Exception as error:  # settings in the environment: obstore has several exceptions for them
            raise UserError(
                f"{place} cannot be opened ({_first_line(error)})",
                "correct the store's settings in the environment; the repository's docs/remote.md has them",
            ) from None

    def read(self, name: str, begin: int, size: int) -> Answer:
        """``size`` bytes of an object, at least one.

        Raises:
            Failure: it cannot be had as a whole.
        """
        with _sorted_failures():
            found = self._obstore.get(self._store, name, options={"range": (begin, begin + size)})
            answer = Answer(memoryview(found.bytes()), found.meta["size"], found.meta.get("e_tag") or "")
        needed = min(size, answer.size - begin)
        if len(answer.data) != needed:
            raise Failure(Kind.CUT, f"{len(answer.data)} of {needed} bytes were sent")
        return answer

    def put(self, name: str, data: bytes | Path, mark: str = "") -> None:
        """Write a whole object: it is there completely, or as it was before.

        Args:
            name: of the object.
            data: its content, or a file with it.
            mark: what :meth:`mark` returns of it.

        Raises:
            Failure: it was not written.
        """
        with _sorted_failures():
            self._obstore.put(self._store, name, data, attributes={_MARK: mark} if mark else None)

    def mark(self, name: str) -> str:
        """What an object was marked with; empty if it was not.

        Raises:
            Failure: it cannot be asked.
        """
        with _sorted_failures():
            return str(self._obstore.get(self._store, name, options={"range": (0, 1)}).attributes.get(_MARK, ""))

    def sizes(self) -> Iterator[tuple[str, int]]:
        """Name and bytes of all objects of the place. A web server has no such list.

        Raises:
            Failure: they cannot be listed.
        """
        with _sorted_failures():
            for part in self._obstore.list(self._store):
                for found in part:
                    yield found["path"], found["size"]


class _sorted_failures:
    """Turns obstore's exceptions into :class:`Failure`."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, Failure):
            raise Failure(*_sort(error)) from None


def _sort(error: Exception) -> tuple[Kind, str]:
    text, name = str(error), type(error).__name__
    status = re.search(r"status code: (\d{3})", text)
    answer = f"the answer was {status[1]}" if status else _first_line(error)
    if name in ("PermissionDeniedError", "UnauthenticatedError"):
        return Kind.DENIED, answer
    if isinstance(error, FileNotFoundError):
        return Kind.MISSING, "there is no such object"
    if _NO_CREDENTIALS.search(text):
        code = re.search(r"<Code>(\w+)</Code>", text)
        return Kind.DENIED, code[1] if code else "no credentials were found"
    if name == "NotSupportedError" or "non-partial response" in text:
        return Kind.ERROR, "the server does not answer requests for a part of a file"
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
    lines = (str(error) or type(error).__name__).splitlines()
    return re.sub(r"\S*://\S*", "URL", lines[0])[:200]


def _open(place: RemotePath) -> ObjectStore:
    """The store of a place, with credentials as the environment has them."""
    from obstore.store import AzureStore, GCSStore, HTTPStore, S3Store

    client: dict[str, Any] = {
        "connect_timeout": _CONNECT,
        "read_timeout": _SILENT,
        "timeout": _WHOLE,
        "user_agent": "pervit-pipeline",
        "pool_max_idle_per_host": "128",
    }
    shared: dict[str, Any] = {"client_options": client, "retry_config": {"max_retries": 0, "retry_timeout": _WHOLE}}
    if place.scheme in ("http", "https"):
        client["allow_http"] = place.scheme == "http"
        if login := _login(place.host):
            client["default_headers"] = {"authorization": login}
        return HTTPStore.from_url(str(place), **shared)
    prefix = place.prefix or None
    if place.scheme == "gs":
        return GCSStore(place.host, prefix=prefix, **shared)
    if place.scheme == "az":
        return AzureStore(place.host, prefix=prefix, **shared)
    endpoint = next((os.environ[key] for key in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL") if os.environ.get(key)), "")
    if endpoint.startswith("http://"):  # the user's own choice
        client["allow_http"] = True
    chosen: dict[str, Any] = {"endpoint": endpoint} if endpoint else {}
    if _has_profile():
        chosen |= _of_profile(place)
    return S3Store(place.host, prefix=prefix, **chosen, **shared)


def _has_profile() -> bool:
    """Whether AWS's files are to be asked for credentials, as other programs do: the environment has none."""
    if os.environ.get("AWS_PROFILE"):
        return True
    if os.environ.get("AWS_ACCESS_KEY_ID") or os.environ.get("AWS_SKIP_SIGNATURE"):
        return False
    return Path(os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or "~/.aws/credentials").expanduser().exists()


def _of_profile(place: RemotePath) -> dict[str, Any]:
    """Credentials and region of a profile of AWS's files, whatever it names: keys, a role, single sign-on."""
    try:
        import boto3
    except ImportError:
        raise UserError(
            f"{place} needs boto3 to read AWS's profiles, which is not installed",
            f"{EXTRA}, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
        ) from None
    session = boto3.Session()
    credentials = session.get_credentials()
    if credentials is None:
        return {}

    def provide() -> dict[str, Any]:
        current = credentials.get_frozen_credentials()  # refreshes them where they expire
        keys = {"access_key_id": current.access_key, "secret_access_key": current.secret_key, "token": current.token}
        return {**keys, "expires_at": datetime.now(timezone.utc) + timedelta(minutes=5)}

    provider: Callable[[], dict[str, Any]] = provide
    region = {"region": session.region_name} if session.region_name else {}
    return {"credential_provider": provider, **region}


def _login(host: str) -> str:
    """The Authorization header for a web server from ``~/.netrc``, as curl uses it; empty if there is none."""
    path = Path(os.environ.get("NETRC") or "~/.netrc").expanduser()
    try:
        found = netrc.netrc(str(path)).authenticators(host.rpartition("@")[2].partition(":")[0])
    except (OSError, netrc.NetrcParseError):
        return ""
    return "Basic " + b64encode(f"{found[0]}:{found[2]}".encode()).decode() if found else ""
