"""The words of a line of a sweep's file, split as in a shell."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.errors import UserError

CONFIG = "--config"


@dataclass(frozen=True)
class Words:
    """The words of a line, or of the command.

    Attributes:
        place: for messages.
        config: after ``--config``; empty: none.
    """

    place: str
    config: str = ""
    overrides: tuple[str, ...] = ()

    @property
    def keys(self) -> list[str]:
        return [word.partition("=")[0] for word in self.overrides]


def split_line(line: str, place: str) -> list[str]:
    """The words before a comment.

    Args:
        line: of the file.
        place: for messages.

    Raises:
        UserError: a quote is not closed.
    """
    lexer = shlex.shlex(line, posix=True, punctuation_chars=False)
    lexer.whitespace_split, lexer.commenters = True, ""
    words: list[str] = []
    try:
        for word in lexer:
            if word.startswith("#"):  # no override begins so; within a word it is part of a value
                break
            words.append(word)
    except ValueError as error:
        if "escaped" in str(error):  # a backslash at the end
            raise UserError(
                f"{place} ends with a backslash, which continues no line here, words of one line needed", "join the two lines"
            ) from None
        if re.search(r"(^|\s)#", line):  # an apostrophe in the comment
            return split_line(re.split(r"(?:^|\s)#", line, maxsplit=1)[0], place)
        raise UserError(f"{place} has a quote that is not closed, words as in a shell needed", "close it") from None
    return words


def read_words(found_words: Sequence[str], place: str) -> Words:
    """Tell the config from the overrides.

    Raises:
        UserError: a word that is neither, or a key twice.
    """
    config, overrides, words = "", [], list(found_words)
    while words:
        word = words.pop(0)
        if word == CONFIG or word.startswith(f"{CONFIG}="):
            found = word.partition("=")[2] if "=" in word else words.pop(0) if words else ""
            if config or not found:
                what = (
                    f"a second {CONFIG}, at most one" if config else f"{CONFIG} without a config, a file or a name in configs/"
                )
                raise UserError(f"{place}: found {what} needed", "correct it")
            config = found
        elif word.startswith("-"):
            raise UserError(
                f"{place}: found {word!r}, {CONFIG} CONFIG and key=value needed",
                "options of the command stand before the file",
            )
        elif "%a" in word:
            raise UserError(f"{place}: found %a in {word!r}, which a job array would replace", "write the value itself")
        elif variable := re.search(r"\$(\w+|\{\w+\})|=~(?=/|$)", word):
            raise UserError(
                f"{place}: found {variable[0].lstrip('=')} in {word!r}, which is not replaced here as a shell would",
                "write the value itself",
            )
        elif "\n" in word:
            raise UserError(f"{place}: found a line break in {word!r}, words of one line needed", "take it out")
        else:
            overrides.append(word)
    made = Words(place, config, tuple(overrides))
    twice = sorted({key for key in made.keys if made.keys.count(key) > 1})
    if twice:
        raise UserError(f"{place} sets {twice[0]} twice, once needed", "keep one of them")
    return made
