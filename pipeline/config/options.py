"""Parse command lines with overrides, ``dotted.key=value``, and answer those who write keys as options."""

import re
from collections.abc import Collection, Sequence

from pipeline.command_line import CommandParser, command_parser
from pipeline.config.problems import nearest_keys
from pipeline.config.sections import Config, flatten
from pipeline.errors import UserError

_OPTION = re.compile(r"--?([a-z][\w.-]*)(=.*)?", re.IGNORECASE | re.DOTALL)


def override_parser(
    module: str, description: str | None, epilog: str | None = None, example: str = "train.epochs=100"
) -> CommandParser:
    """A :func:`~pipeline.command_line.command_parser` with the overrides of a config as its positional arguments."""
    parser = command_parser(module, description, epilog)
    parser.add_argument("overrides", nargs="*", metavar="dotted.key=value", help=f"for example {example}")
    parser.look = refuse_keys_as_options
    return parser


def refuse_keys_as_options(words: Sequence[str], options: Collection[str]) -> None:
    """See that no word is a config key in the form of an option, such as ``--lr 1e-3``. Raises UserError: one is, or looks like
    one; it says the override.

    Args:
        words: of the command line.
        options: that the command has, of which argparse takes beginnings too.
    """
    for word, after in zip(words, [*words[1:], ""]):
        found = _OPTION.fullmatch(word)
        if word == "--":
            return
        if not found or any(option.startswith(word.partition("=")[0]) for option in options):
            continue
        name, defaults = found[1].replace("-", "_"), flatten(Config())
        keys = [name] if name in defaults else [key for key in nearest_keys(name) if key in defaults]
        if keys:
            value = after if after and "=" not in after and not _OPTION.fullmatch(after) else "VALUE"
            value = found[2][1:] if found[2] else "true" if value == "VALUE" and isinstance(defaults[keys[0]], bool) else value
            meant = " or ".join(f"{key}={value}" for key in keys)
            raise UserError(f"config keys are not options, got {word}", f"write {meant}")
