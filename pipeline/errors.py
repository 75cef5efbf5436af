"""Errors that are the user's to mend: one sentence, no traceback."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NoReturn


class UserError(ValueError):
    """A mistake in a config, a path or a data set.

    The message is one sentence that names the file or key, what was found, what is needed and the
    remedy. Commands print it and exit with 2; library callers may catch it as a ``ValueError``.
    """


def run_command(main: Callable[[], int | None]) -> NoReturn:
    """Run a command's ``main``: a :class:`UserError` becomes one line on stderr and exit code 2."""
    try:
        code = main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(2)
    sys.exit(code or 0)
