"""Every key of a config with its default and meaning, as a Markdown table.

    python -m pipeline.config                 all of them, as in README.md
    python -m pipeline.config optim train.    those whose names begin so
"""

from __future__ import annotations

import argparse

from pipeline.config import flatten, markdown_table
from pipeline.config.sections import Config
from pipeline.errors import UserError, run_command


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("beginnings", nargs="*", metavar="KEY", help="a key, or how some begin; default: all")
    beginnings = tuple(parser.parse_args().beginnings)
    for beginning in beginnings:
        if not any(key.startswith(beginning) for key in flatten(Config())):
            raise UserError(f"no key begins with {beginning!r}: leave it out to see all of them.")
    print(markdown_table(beginnings or ("",)))


if __name__ == "__main__":
    run_command(main)
