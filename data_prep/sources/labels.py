"""Tell which class a label of a table, a parquet file or a tar names, if any."""

from __future__ import annotations

import re
from collections.abc import Sequence

from pipeline.errors import UserError, counted, first_few

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?|nan|<na>|[+-]?inf(inity)?", re.IGNORECASE)
_BEYOND = 10**9  # -1 and 2**31 - 1 stand for no label; identifiers of species are smaller


class NoClass(str):
    """What is in the place of a label that names no class."""


def class_of(label: object) -> str:
    """The class: a name, or a whole number from 0, of which 3.0 is one; :class:`NoClass` for -1, nan, 10**9 or nothing."""
    text = str(label).strip() if isinstance(label, str | int | float) else ""
    if not text:
        return NoClass("nothing" if label is None or isinstance(label, str) else f"{label!r:.40}")
    if not _NUMBER.fullmatch(text) or text.isdigit() and len(text) < len(str(_BEYOND)):
        return text
    number = float("nan" if text[0] == "<" else text)
    return str(int(number)) if 0 <= number < _BEYOND and number.is_integer() else NoClass(f"{text:.40}")


def without_class(where: object, found: Sequence[str], skip: bool) -> str:
    """How many images have no class and the first of them, from what is there instead; "" for none.

    Raises:
        UserError: there are some, and they are not to be left out (``skip``).
    """
    text = f"{counted(len(found), 'image')} without a class ({first_few(found)})" if found else ""
    if text and not skip:
        raise UserError(
            f"{where} must have a name or a whole number from 0 to {_BEYOND - 1:,} as the label of each image, got {text}",
            "correct the labels, or leave these images out with --unlabelled skip",
        )
    return text
