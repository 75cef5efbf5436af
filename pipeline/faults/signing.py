"""What the processes of a job write for each other is signed with a secret that only they know.

The launcher makes the secret and hands it on in the environment. It is in no log, no file and no message; who does not have it can
neither write a note that counts (HMAC-SHA256) nor prove that it belongs to the job. ``docs/security.md`` says what that is worth.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re

from pipeline.errors import UserError

SECRET = "PERVIT_JOB_SECRET"  # the variable's name
LARGEST_NOTE = 65536  # bytes with the signature; a sign of life has some hundreds
_DIGITS = hashlib.sha256().digest_size * 2


def job_secret() -> bytes:
    """The job's secret, 32 bytes, from the environment.

    Raises:
        UserError: it is missing or malformed; the sentence does not quote it.
    """
    text = os.environ.get(SECRET)
    if text is None or not re.fullmatch(r"[0-9a-f]{64}", text):
        found = "not set" if text is None else f"{len(text)} characters that are no such number"
        raise UserError(
            f"{SECRET} is {found}, but several processes need one secret of 64 hexadecimal digits, by which they know each other: start with "
            f"the repository's launch/local.sh or sbatch, or set it to the output of openssl rand -hex 32 for all of them."
        )
    return bytes.fromhex(text)


def signature(secret: bytes, purpose: str, key: str, content: str) -> str:
    """64 hexadecimal digits that only who knows the secret can compute.

    Args:
        secret: the job's.
        purpose: what it is for: what was signed for one purpose does not count for another.
        key: where it stands, or who says it.
        content: what is said.
    """
    message = json.dumps([purpose, key, content]).encode()
    return hmac.new(secret, message, hashlib.sha256).hexdigest()


def is_signed(given: object, secret: bytes, purpose: str, key: str, content: str) -> bool:
    """Whether ``given`` is the :func:`signature` of the rest."""
    return isinstance(given, str) and given.isascii() and hmac.compare_digest(given, signature(secret, purpose, key, content))


def seal(secret: bytes, purpose: str, key: str, content: str) -> str:
    """The content with its signature before it."""
    return signature(secret, purpose, key, content) + content


def unseal(secret: bytes, purpose: str, key: str, note: bytes) -> str | None:
    """The content of what :func:`seal` made; None for anything else, of any length and in any encoding."""
    if len(note) > LARGEST_NOTE:
        return None
    try:
        text = note.decode()
    except UnicodeDecodeError:
        return None
    given, content = text[:_DIGITS], text[_DIGITS:]
    return content if is_signed(given, secret, purpose, key, content) else None


def printable(text: str, limit: int) -> str:
    """One line that does nothing to a terminal: control characters as "?", cut after ``limit`` characters."""
    kept = "".join(c if c.isprintable() else "?" for c in text[: limit + 1])
    return kept if len(kept) <= limit else kept[: limit - 3] + "..."
