"""A config as YAML, as flat dotted keys, and the table of all keys."""

from __future__ import annotations

from typing import Any

import yaml

from pipeline.config.sections import Config


def config_to_yaml(config: Config) -> str:
    """The resolved config, every key written out; :func:`load_config` reads it back to an equal one."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def flatten(config: Config) -> dict[str, Any]:
    """Dotted key -> value, in the order of the sections."""
    flat: dict[str, Any] = {}
    for name, value in config.model_dump(mode="json").items():
        flat.update({f"{name}.{key}": v for key, v in value.items()} if isinstance(value, dict) else {name: value})
    return flat


def markdown_table(beginnings: tuple[str, ...] = ("",)) -> str:
    """Markdown table of keys, defaults and meanings (``python -m pipeline.config`` prints it).

    Args:
        beginnings: prefixes; only keys that start with one of them are listed.
    """
    defaults = flatten(Config())
    lines = ["| key | default | meaning |", "|---|---|---|"]
    for key, default in defaults.items():
        if not key.startswith(beginnings):
            continue
        section, _, name = key.rpartition(".")
        fields = (Config.model_fields[section].annotation if section else Config).model_fields
        shown = yaml.safe_dump(default, default_flow_style=True).split("\n")[0]
        lines.append(f"| `{key}` | `{shown}` | {fields[name].description} |")
    return "\n".join(lines)
