"""Settings of stores in the environment, checked before the client library reads them: some of them end it with a panic of its own."""

from __future__ import annotations

import os
from urllib.parse import urlsplit

from pipeline.errors import UserError
from pipeline.stores.place import RemotePath

ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")  # the first that is set counts


def check_settings(place: RemotePath) -> None:
    """See that the address of another store than Amazon's is one.

    Raises:
        UserError: it is not.
    """
    if place.scheme != "s3":
        return
    for name in ENDPOINTS:
        if (address := os.environ.get(name)) and not _is_address(address):
            raise UserError(  # without the address, which may hold a password
                f"{name} is not the address of a store, https://HOST or https://HOST:PORT needed",
                "correct it, or unset it for Amazon",
            )


def _is_address(text: str) -> bool:
    try:
        parts = urlsplit(text)
        port = parts.port  # raises where it is none
    except ValueError:
        return False
    return (
        parts.scheme in ("http", "https") and bool(parts.hostname) and port != 0 and text.isascii() and text.split() == [text]
    )
