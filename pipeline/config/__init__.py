"""Read a typed configuration from a YAML file, which may state only what differs from its ``base: other.yaml`` (relative to itself, or a
shipped config), and ``dotted.key=value`` overrides. An unknown key, a wrong type or a value out of range raises ``UserError``."""

from pipeline.config.loading import (
    Recipe,
    config_from_dict,
    find_recipe,
    load_config,
    load_config_as,
    load_recipe,
    section_from_dict,
)
from pipeline.config.sections import (
    AugmentConfig,
    CheckpointConfig,
    Config,
    DataConfig,
    DistributedConfig,
    config_to_yaml,
    decides_weights,
    flatten,
    is_free,
)
from pipeline.config.tables import shipped_recipes
from pipeline.config.train_sections import (
    AUTO,
    ModelConfig,
    OptimConfig,
    TrainConfig,
    accumulation_steps,
    fitting_micro_batches,
)
from pipeline.config.values import Positive, PositiveInt, Section, parse_value
