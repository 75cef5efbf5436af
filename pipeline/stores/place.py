"""Name a place of data: a path of a file system, or a URL of a store, as the command line and ``data.path`` give it."""

import argparse
import os
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from pipeline.errors import CREDENTIALS, UserError, check_no_secrets, without_secrets

SCHEMES = ("s3", "gs", "az", "https")
_ALLOWED = "a folder, or s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, az://CONTAINER/PREFIX or https://HOST/PATH"
_THIS_MACHINE = ("127.0.0.1", "localhost", "::1")


@dataclass(init=False, repr=False, unsafe_hash=True)
class RemotePath:
    """A place in a store. ``path / name`` and ``str(path)`` are as of a :class:`~pathlib.Path`; it holds no secrets.

    The functions of ``os`` and ``open`` take it for a file that does not exist. Raises UserError: another scheme, no bucket, or
    a URL with a password or a signature."""

    scheme: str  # s3, gs, az, https, or http of this machine
    host: str  # bucket, container, or host and port
    prefix: str  # the rest, without slashes at its ends; may be empty

    def __init__(self, url: str) -> None:
        shown = _without_secrets(url)
        try:
            parts = urlsplit(url)
            host = parts.hostname
        except ValueError as error:
            raise UserError(f"{shown} is not a URL ({error}): it must be {_ALLOWED}", "correct it") from None
        self.scheme = parts.scheme.lower()
        if self.scheme not in (*SCHEMES, "http"):
            raise UserError(f"{shown} must be {_ALLOWED}, got the scheme {self.scheme!r}", "correct it, or mount the store")
        if not host:
            raise UserError(f"{shown} must name a {'host' if 'http' in self.scheme else 'bucket'}: {_ALLOWED}", "add it")
        check_no_secrets(shown, url)
        if parts.query or parts.fragment:
            why = "which could be a signature and names no folder"
            problem = f"{shown} must not have a query (?...) or a fragment (#...), {why}"
            raise UserError(problem, CREDENTIALS.format("it"))
        if self.scheme == "http" and host not in _THIS_MACHINE:
            raise UserError(f"{shown} must be encrypted, or anybody on the way could change the images", "use https://")
        self.host, self.prefix = parts.netloc, parts.path.strip("/")

    def __str__(self) -> str:
        return f"{self.scheme}://{self.host}" + (f"/{self.prefix}" if self.prefix else "")

    def __repr__(self) -> str:
        return f"RemotePath({str(self)!r})"

    def __fspath__(self) -> str:
        return str(self)

    def __truediv__(self, name: str | os.PathLike[str]) -> "RemotePath":
        return RemotePath(f"{self}/{name}")

    @property
    def name(self) -> str:
        """The last part."""
        return str(self).rpartition("/")[2]


Place = Path | RemotePath


def is_remote(place: str | os.PathLike[str]) -> bool:
    """Whether it is a URL, of whatever scheme."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", os.fspath(place)) is not None


def parse_place(text: str | os.PathLike[str]) -> Place:
    """A path or a URL, as the user wrote it. Raises UserError: a URL that is not of a store, or has secrets in it."""
    text = os.fspath(text)
    if is_remote(text):
        return RemotePath(text)
    if re.match(rf"({'|'.join(SCHEMES)}):/", text) and not os.path.exists(text):
        raise UserError(f"{_without_secrets(text)} must have two slashes after the scheme, got one", "write it as SCHEME://")
    return Path(text)


def place_argument(text: str) -> Place:
    """:func:`parse_place` as a type for ``argparse``, which would print the whole URL in a message of its own."""
    try:
        return parse_place(text)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def check_bucket(place: Place, option: str = "") -> None:
    """Check that a place can be written to. Raises UserError: it is a web server, or a folder."""
    if not isinstance(place, RemotePath) or place.scheme not in ("s3", "gs", "az"):
        why = " (a web server can only be read)" if isinstance(place, RemotePath) else ""
        raise UserError(f"{option or 'the URL'} must be s3://BUCKET/PREFIX, gs:// or az://, got {place}{why}", "correct it")


def kept_in(place: Place) -> Path:
    """The folder of this machine in which what is written to a place is kept: ``$PERVIT_RUNS/BUCKET/PREFIX``, by default below runs/."""
    return place if isinstance(place, Path) else Path(os.environ.get("PERVIT_RUNS") or "runs", place.host, place.prefix)


def _without_secrets(url: str) -> str:
    """A URL for a message: no user, password, query or fragment."""
    return without_secrets(re.split(r"[?#]", url, maxsplit=1)[0], is_url=True)
