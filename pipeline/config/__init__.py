"""Configuration: one YAML file, ``dotted.key=value`` overrides, one typed and validated tree.

A file may begin with ``base: other.yaml`` (relative to itself) and then states only what differs.
An unknown key, a wrong type or a value out of range is one sentence that names the key.
"""

from pipeline.config.accumulation import accumulation_steps
from pipeline.config.describe import config_to_yaml, flatten, markdown_page, markdown_table
from pipeline.config.loading import config_from_dict, load_config, section_from_dict
from pipeline.config.recipes import find_recipe, shipped_recipes
from pipeline.config.sections import (
    AugmentConfig,
    CheckpointConfig,
    Config,
    DataConfig,
    DistributedConfig,
    EvalConfig,
    LogConfig,
    ModelConfig,
    OptimConfig,
    Positive,
    PositiveInt,
    Section,
    TrainConfig,
)
from pipeline.config.values import parse_value

__all__ = [
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
    "Section",
    "TrainConfig",
    "accumulation_steps",
    "config_from_dict",
    "config_to_yaml",
    "find_recipe",
    "flatten",
    "load_config",
    "markdown_page",
    "markdown_table",
    "parse_value",
    "section_from_dict",
    "shipped_recipes",
]
