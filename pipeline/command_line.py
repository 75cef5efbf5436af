"""A command's help, in the name that it was called by: ``pervit-train`` or ``python -m pipeline.train``."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path


def command_parser(module: str, description: str | None, epilog: str | None = None) -> argparse.ArgumentParser:
    """A parser whose usage and examples show what was typed, where Python's own shows the file's name.

    Args:
        module: of the command, as for ``python -m``.
        description: its help, in whose examples the command is called by ``python -m`` and this name.
        epilog: likewise, after the options.
    """
    typed = _typed(module)

    def in_these_words(text: str | None) -> str:
        text = (text or "").replace(f"python -m {module}", typed)  # None: of python -OO
        if not typed.startswith("pervit-"):
            return text
        return re.sub(r"python -m pipeline\.(\w+)", r"pervit-\1", text)  # other commands, by their short names too

    return argparse.ArgumentParser(
        prog=typed,
        description=in_these_words(description),
        epilog=in_these_words(epilog),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _typed(module: str) -> str:
    called = Path(sys.argv[0])
    if called.name.startswith("pervit-"):
        return called.name
    if called.suffix == ".py" and sys.modules["__main__"].__spec__ is None:  # a file: python data_prep/shard_imagenet.py
        return f"python {called}"
    return f"python -m {module}"
