"""A config as YAML, as dotted keys, and the table of all keys."""

from __future__ import annotations

from typing import Any

import yaml
from pydantic.fields import FieldInfo

from pipeline.config.sections import Config, Section


def config_to_yaml(config: Config) -> str:
    """The resolved config, every key written out; :func:`load_config` reads it back to an equal one."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def flatten(config: Config) -> dict[str, Any]:
    """Dotted key -> value, in file order."""
    flat: dict[str, Any] = {}
    for name, value in config.model_dump(mode="json").items():
        flat.update({f"{name}.{key}": v for key, v in value.items()} if isinstance(value, dict) else {name: value})
    return flat


def section_fields(name: str) -> dict[str, FieldInfo]:
    """The keys of a section, of the top level for an empty name; none for what is no section."""
    if not name:
        return Config.model_fields
    annotation = Config.model_fields[name].annotation if name in Config.model_fields else None
    return annotation.model_fields if isinstance(annotation, type) and issubclass(annotation, Section) else {}


def markdown_table(beginnings: tuple[str, ...] = ("",)) -> str:
    """Every key with its default and meaning, as the README shows them (``python -m pipeline.config`` prints it).

    Args:
        beginnings: only keys whose dotted name begins with one of these.
    """
    defaults = flatten(Config())
    lines = ["| key | default | meaning |", "|---|---|---|"]
    for key, default in defaults.items():
        if not key.startswith(beginnings):
            continue
        section, _, name = key.rpartition(".")
        shown = yaml.safe_dump(default, default_flow_style=True).split("\n")[0]
        lines.append(f"| `{key}` | `{shown}` | {section_fields(section)[name].description} |")
    return "\n".join(lines)
