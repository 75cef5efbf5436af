"""Open a place with obstore, with the credentials that other programs use: those of the environment and of the usual files.

Settings in the environment are checked before obstore reads them: some of them end it with a panic.
"""

import logging
import netrc
import os
from base64 import b64encode
from contextlib import suppress
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from pipeline.errors import UserError, missing_extra, printable, without_secrets
from pipeline.stores.place import RemotePath

if TYPE_CHECKING:
    from obstore.store import ObjectStore

_log = logging.getLogger(__name__)
ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")  # the first that is set counts
_CONNECT, _SILENT, _WHOLE = timedelta(seconds=10), timedelta(seconds=20), timedelta(seconds=120)  # of a request


def open_store(place: RemotePath) -> "ObjectStore":
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
        return GCSStore(place.host, prefix=prefix, **_google_emulator(client), **shared)
    if place.scheme == "az":
        return AzureStore(place.host, prefix=prefix, **shared)
    endpoint = next((os.environ[key] for key in ENDPOINTS if os.environ.get(key)), "")
    if endpoint.startswith("http://"):  # the user's own choice
        client["allow_http"] = True
    chosen: dict[str, Any] = {"endpoint": endpoint} if endpoint else {}
    if _has_profile():
        chosen |= _of_profile(place)
    return S3Store(place.host, prefix=prefix, **chosen, **shared)


def _google_emulator(client: dict[str, Any]) -> dict[str, Any]:
    """Options that lead to the emulator of ``STORAGE_EMULATOR_HOST``, as Google's own clients have it; empty if there is none."""
    host = os.environ.get("STORAGE_EMULATOR_HOST")
    if not host:
        return {}
    client["allow_http"] = True
    url = host if "://" in host else f"http://{host}"
    return {"base_url": url, "credential_provider": lambda: {"token": "emulator", "expires_at": None}}


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
        keys = ", or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        raise missing_extra(str(place), "boto3 to read AWS's profiles", "remote", keys) from None
    from obstore.auth.boto3 import Boto3CredentialProvider

    session = boto3.Session()
    if session.get_credentials() is None:
        return {}
    return {"credential_provider": Boto3CredentialProvider(session, ttl=timedelta(minutes=5))}


def _login(host: str) -> str:
    """The Authorization header for a web server from ``~/.netrc``, as curl uses it; empty if there is none."""
    path = Path(os.environ.get("NETRC") or "~/.netrc").expanduser()
    with suppress(OSError, netrc.NetrcParseError):
        if found := netrc.netrc(str(path)).authenticators(host.rpartition("@")[2].partition(":")[0]):
            return "Basic " + b64encode(f"{found[0]}:{found[2]}".encode()).decode()
    return ""


@cache
def warn_of_redirect(url: str) -> None:
    """Name, once, the other host to which a web server redirects requests for a file. Reading follows, without the credentials."""
    from urllib import request  # http.client, for this alone

    class Stay(request.HTTPRedirectHandler):
        def redirect_request(self, *_: Any) -> None: ...

    host, login, target = urlsplit(url).netloc, _login(urlsplit(url).netloc), ""
    try:
        asked = request.Request(url, headers={"authorization": login} if login else {}, method="HEAD")
        request.build_opener(Stay).open(asked, timeout=_CONNECT.seconds).close()
    except Exception as answer:  # of a redirect, it has the headers; of anything else, reading says what is wrong
        target = without_secrets(getattr(answer, "headers", {}).get("location") or "").partition("://")[2].partition("/")[0]
    if target not in ("", host):
        _log.warning(f"{host} redirects to {printable(target, 200)}, which gets no credentials: check that you trust it")


def check_settings(place: RemotePath) -> None:
    """Check the address of another store than Amazon's. Raises UserError: it is not an address."""
    if place.scheme != "s3":
        return
    for name in ENDPOINTS:
        if (address := os.environ.get(name)) and not _is_address(address):
            problem = f"{name} must be the address of a store, https://HOST or https://HOST:PORT"
            raise UserError(problem, "correct it, or unset it for Amazon")  # without the address, which may hold a password


def _is_address(text: str) -> bool:
    try:
        url = urlsplit(text)
        port = url.port  # raises where it is none
    except ValueError:
        return False
    return url.scheme in ("http", "https") and bool(url.hostname) and port != 0 and text.isascii() and text.split() == [text]
