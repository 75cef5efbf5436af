"""Typed configuration from a YAML file and ``dotted.key=value`` overrides.

==================  ==========================================================================
``train_sections``  the keys of model, training and optimizer; gradient accumulation
``data_sections``   the keys of data and augmentation
``sections``        all other keys, the whole :class:`Config`, what a resumed run may change
``bounds``          the types of values, with their bounds
``loading``         YAML files, their ``base:`` files and overrides -> :class:`Config`
``values``          strict YAML parsing
``problems``        validation errors as one sentence that names key and source
``__main__``        ``python -m pipeline.config``, and the tables of all keys
==================  ==========================================================================

A file may name another one as ``base: other.yaml`` (relative to itself) and then states only the differences. An unknown key,
a wrong type or a value out of range raises ``UserError``.
"""

from pipeline.config.bounds import Positive, PositiveInt, Section
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
    AugmentConfig,
    CheckpointConfig,
    Config,
    DataConfig,
    DistributedConfig,
    EvalConfig,
    LogConfig,
    config_to_yaml,
    decides_weights,
    flatten,
    is_free,
)
from pipeline.config.train_sections import (
    AUTO,
    ModelConfig,
    OptimConfig,
    TrainConfig,
    accumulation_steps,
    fitting_micro_batches,
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
    "decides_weights",
    "find_recipe",
    "fitting_micro_batches",
    "flatten",
    "is_free",
    "load_config",
    "load_config_as",
    "load_recipe",
    "parse_value",
    "section_from_dict",
    "shipped_recipes",
]
