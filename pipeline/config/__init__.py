"""Typed configuration from a YAML file and ``dotted.key=value`` overrides.

================  ==================================================================
``sections``      every key with its type, bounds, default and description
``bounds``        the types of values, with their bounds
``loading``       YAML files, their ``base:`` files and overrides -> :class:`Config`
``values``        strict YAML parsing
``problems``      validation errors as one sentence that names key and source
``recipes``       finds a config by path or by the name of a shipped one
``accumulation``  gradient accumulation steps from the batch sizes
``describe``      a config as YAML, as flat keys, and as a Markdown table
``__main__``      ``python -m pipeline.config``
================  ==================================================================

A file may name another one as ``base: other.yaml`` (relative to itself) and then states only the differences. An unknown key,
a wrong type or a value out of range raises ``UserError``.
"""

from pipeline.config.accumulation import accumulation_steps
from pipeline.config.bounds import Positive, PositiveInt, Section
from pipeline.config.describe import config_to_yaml, flatten, is_free, markdown_page, markdown_table
from pipeline.config.loading import (
    Recipe,
    config_from_dict,
    find_recipe,
    load_config,
    load_config_as,
    load_recipe,
    section_from_dict,
    shipped_recipes,
)
from pipeline.config.sections import (
    AUTO,
    AugmentConfig,
    CheckpointConfig,
    Config,
    DataConfig,
    DistributedConfig,
    EvalConfig,
    LogConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
)
from pipeline.config.values import parse_value

__all__ = [
    "AUTO",
    "AugmentConfig",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "DistributedConfig",
    "EvalConfig",
    "LogConfig",
    "ModelConfig",
    "OptimConfig",
    "Positive",
    "PositiveInt",
    "Recipe",
    "Section",
    "TrainConfig",
    "accumulation_steps",
    "config_from_dict",
    "config_to_yaml",
    "find_recipe",
    "flatten",
    "is_free",
    "load_config",
    "load_config_as",
    "load_recipe",
    "markdown_page",
    "markdown_table",
    "parse_value",
    "section_from_dict",
    "shipped_recipes",
]
