"""A config as YAML, as flat dotted keys, which of them a resumed run may change, and the table of all keys."""

from __future__ import annotations

from typing import Any

import yaml
from pydantic.fields import FieldInfo

from pipeline.config.bounds import Section
from pipeline.config.sections import Config

# Keys that a resumed run may change freely: they affect neither the order of samples nor the weights beyond rounding. The
# micro-batch size is one of them so that a run can move to other hardware: all random draws, Mixup's groups too, depend on an
# image's position in the global batch. Only BatchNorm, in models that have it, normalizes over a micro-batch.
_FREE_SECTIONS = ("eval.", "checkpoint.", "log.", "distributed.")
_FREE_KEYS = (
    "output_dir",
    "data.path",
    "data.mix",  # as data.path: the sets themselves, and their weights, are compared by their identity
    "data.cache",
    "data.cache_gib",
    "data.decode",
    "data.num_threads",
    "data.prefetch",
    "data.read_ahead",
    "data.max_bad_samples",
    "train.activation_checkpointing",
    "train.deterministic",
    "train.compile",
    "train.max_skipped_steps",
    "train.max_steps",
    "train.micro_batch_size",
    "train.zero_stage",
)


def config_to_yaml(config: Section) -> str:
    """The resolved config, every key written out; :func:`load_config` reads it back to an equal one."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def flatten(config: Section) -> dict[str, Any]:
    """Dotted key -> value, in the order of the sections."""
    flat: dict[str, Any] = {}
    for name, value in config.model_dump(mode="json").items():
        flat.update({f"{name}.{key}": v for key, v in value.items()} if isinstance(value, dict) else {name: value})
    return flat


def is_free(key: str) -> bool:
    """Whether a resumed run may change a key, given as in :func:`flatten`."""
    return key in _FREE_KEYS or key.startswith(_FREE_SECTIONS)


def section_fields(name: str, root: type[Section] = Config) -> dict[str, FieldInfo]:
    """The keys of a section of ``root``, of its top level for an empty name; none for what is no section."""
    if not name:
        return root.model_fields
    annotation = root.model_fields[name].annotation if name in root.model_fields else None
    return annotation.model_fields if isinstance(annotation, type) and issubclass(annotation, Section) else {}


def markdown_table(beginnings: tuple[str, ...] = ("",), root: type[Section] = Config) -> str:
    """Markdown table of keys, defaults and meanings, as ``python -m pipeline.config`` prints it.

    Args:
        beginnings: prefixes; only keys that start with one of them are listed.
        root: the config; each of its keys has a default.
    """
    defaults = flatten(root())
    lines = ["| key | default | meaning |", "|---|---|---|"]
    for key, default in defaults.items():
        if not key.startswith(beginnings):
            continue
        section, _, name = key.rpartition(".")
        shown = yaml.safe_dump(default, default_flow_style=True).split("\n")[0]
        lines.append(f"| `{key}` | `{shown}` | {section_fields(section, root)[name].description} |")
    return "\n".join(lines)


_PAGE = """<!-- Generated, in the repository: python -m pipeline.config --markdown > docs/config.md -->
# Config keys

A config is a YAML file. The key `base: other.yaml` starts from another file, relative to this one; the file then
states only what differs. `--config` takes a file, or the name of a shipped config such as `pervit_t` or
`ablations/pervit_table1_e_no_cpe`; `python -m pipeline.config --recipes` lists them.

Any key can be overridden on the command line: `train.epochs=100`. The value is YAML, except for keys that take text: there it is
taken verbatim, so `output_dir="runs/exp #2"` needs only the shell's quotes, and `null` still means none. Later overrides win. An
unknown key, a wrong type and a value far beyond any recipe are errors that name the key.

`python -m pipeline.config` prints these tables in a terminal, `python -m pipeline.config optim` a part of them. Which keys may change
when a run is resumed: [Training](training.md#resume).
"""


def markdown_page() -> str:
    """The page ``docs/config.md``: how a config is written, then a table for each section."""
    top = tuple(name for name in Config.model_fields if not _section_doc(name)[0])
    parts = [_PAGE, "## Top level\n", markdown_table(top) + "\n"]
    for name in Config.model_fields:
        is_section, doc = _section_doc(name)
        if is_section:
            parts += [f"## `{name}`\n", *([doc + "\n"] if doc else []), markdown_table((f"{name}.",)) + "\n"]
    return "\n".join(parts)


def _section_doc(name: str) -> tuple[bool, str]:
    """Whether a top-level key is a section, and the first line of its docstring."""
    annotation = Config.model_fields[name].annotation
    if not isinstance(annotation, type) or not issubclass(annotation, Section):
        return False, ""
    return True, (vars(annotation).get("__doc__") or "").partition("\n")[0]
