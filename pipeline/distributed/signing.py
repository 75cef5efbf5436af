"""Authentication of the ranks to each other: HMAC-SHA256 with the job's secret.

The launcher draws the secret and passes it on in the environment; it appears in no log, file or message. Without it a process
can neither write a message that the ranks accept nor join the job. ``docs/security.md`` has the threat model.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re

from pipeline.errors import UserError

SECRET = "PERVIT_JOB_SECRET"  # the variable's name
LARGEST_NOTE = 65536  # bytes with the signature; a heartbeat message has a few hundred
_DIGITS = hashlib.sha256().digest_size * 2


def job_secret() -> bytes:
    """The job's secret, 32 bytes, from the environment.

    Raises:
        UserError: it is missing or malformed; the message does not quote it.
    """
    text = os.environ.get(SECRET)
    if text is None or not re.fullmatch(r"[0-9a-f]{64}", text):
        found = "not set" if text is None else f"{len(text)} characters that are no such number"
        raise UserError(
            f"{SECRET} is {found}, but several processes need one secret of 64 hexadecimal digits, to authenticate each other",
            "start with "
            "the repository's launch/local.sh or sbatch, or set it to the output of openssl rand -hex 32 for all of them",
        )
    return bytes.fromhex(text)


def signature(secret: bytes, purpose: str, key: str, content: str) -> str:
    """HMAC-SHA256 as 64 hexadecimal digits.

    Args:
        secret: the job's.
        purpose: of the message: a signature for one purpose is invalid for another.
        key: under which the message is stored, or the rank that sends it.
        content: the message.
    """
    message = json.dumps([purpose, key, content]).encode()
    return hmac.digest(secret, message, "sha256").hex()


def is_signed(given: object, secret: bytes, purpose: str, key: str, content: str) -> bool:
    """Whether ``given`` is the :func:`signature` of the rest."""
    return isinstance(given, str) and given.isascii() and hmac.compare_digest(given, signature(secret, purpose, key, content))


def seal(secret: bytes, purpose: str, key: str, content: str) -> str:
    """The content, prefixed with its signature."""
    return signature(secret, purpose, key, content) + content


def unseal(secret: bytes, purpose: str, key: str, note: bytes) -> str | None:
    """Invert :func:`seal`; None for anything else, of any length and in any encoding."""
    if len(note) > LARGEST_NOTE:
        return None
    try:
        text = note.decode()
    except UnicodeDecodeError:
        return None
    given, content = text[:_DIGITS], text[_DIGITS:]
    return content if is_signed(given, secret, purpose, key, content) else None


def printable(text: str, limit: int) -> str:
    """Text that is safe to print: control characters become "?", and it is cut to ``limit`` characters."""
    if len(text) <= limit and text.isprintable():  # nearly always, and rank 0 reads thousands per second
        return text
    kept = "".join(c if c.isprintable() else "?" for c in text[: limit + 1])
    return kept if len(kept) <= limit else kept[: limit - 3] + "..."
